// Builds elements of the document. Texts are inserted as text nodes, so that nothing from a run becomes markup.

/** An element with attributes and children; a child that is not a node becomes text. */
const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'class') element.className = value;
    else if (name === 'colour') element.style.background = value;
    else if (name === 'value' || name === 'checked') element[name] = value;
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : String(child))));
  return element;
};

const replace = (element, ...children) => {
  element.replaceChildren(...children.flat().filter((child) => child));
};

const byId = (id) => document.getElementById(id);

/** A group of buttons of which one is pressed. */
const segments = (label, choices, chosen, choose) => make('fieldset', { 'aria-label': label }, make('span', {}, label),
  make('span', { class: 'segments' }, choices.map(([value, name]) => make('button', {
    type: 'button', 'aria-pressed': String(value === chosen), onclick: () => choose(value),
  }, name))));

/** A table: a head of [title, is a number], and rows of cells that are texts or elements. */
const table = (head, rows, classes = () => null) => make('div', { class: 'scroll' }, make('table', { class: 'data' },
  make('thead', {}, make('tr', {}, head.map(([title, isNumber]) => make('th', { class: isNumber && 'number', scope: 'col' }, title)))),
  make('tbody', {}, rows.map((row, index) => make('tr', { class: classes(index) }, row.map((cell, column) => make('td', {
    class: [head[column][1] && 'number', head[column][2]].filter(Boolean).join(' ') || null,
  }, cell ?? '–')))))));

/** A part of a view, under its heading. */
const part = (title, aside, ...content) => make('section', { class: 'part' },
  make('header', {}, make('h2', {}, title), aside && make('span', { class: 'faint' }, aside)), content);

/** A grid of facts, from pairs of name and value; those without a value are left out. */
const facts = (pairs) => make('dl', { class: 'facts' }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== '')
  .map(([name, value]) => make('div', {}, make('dt', {}, name), make('dd', {}, value))));
