// Sets up the list of runs, the views and the theme.

const VIEWS = { curves: curvesView, run: runView, compare: compareView, sweeps: sweepView };
let current = null;

const currentView = () => VIEWS[current];

const go = (name) => {
  if (location.hash !== `#${name}`) history.replaceState(null, '', `#${name}`);
  if (current === name) return;
  if (current) VIEWS[current].close();
  pointer.zoom = null;
  current = name;
  drawTabs();
  VIEWS[name].open(byId('view'));
};

const drawTabs = () => {
  const names = Object.keys(VIEWS).filter((name) => name !== 'sweeps' || store.sweeps.length || current === 'sweeps');
  replace(byId('tabs'), names.map((name) => make('a', { href: `#${name}`, 'aria-current': current === name && 'page' }, VIEWS[name].title)));
};

/** The most rows of the list in the document; the filter finds the others. */
const MOST_ROWS = 400;

const side = {
  text: '',

  open() {
    this.list = make('ul', { class: 'runs' });
    this.tally = make('div', { class: 'tally faint' });
    this.notes = make('div');
    replace(byId('side'), make('div', { class: 'find' }, make('input', {
      type: 'search', placeholder: 'Filter runs', 'aria-label': 'Filter runs by name, recipe or state',
      oninput: (event) => { this.text = event.target.value; this.draw(); },
    })), this.tally, this.notes, this.list);
    this.draw();
  },

  /** Runs that match every word of the filter, the newest first. */
  matching() {
    const words = this.text.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (run) => {
      const text = `${nameOf(run.id)} ${run.id} ${run.recipe ?? ''} ${run.state}`.toLowerCase();
      return words.every((word) => text.includes(word));
    };
    const runs = [...store.runs.values()].filter(matches);
    return runs.sort((a, b) => (b.started ?? Infinity) - (a.started ?? Infinity) || a.id.localeCompare(b.id, undefined, { numeric: true }));
  },

  draw() {
    // A colour field in use is not redrawn.
    if (this.list.contains(document.activeElement) && document.activeElement.type === 'color') return;
    const focusKey = document.activeElement?.dataset?.key;
    const [found, shown] = [this.matching(), shownSet()];
    const rows = found.slice(0, MOST_ROWS);
    replace(this.tally, make('span', {}, found.length === store.runs.size ? `${count(found.length)} runs` : `${count(found.length)} of ${count(store.runs.size)} runs`),
      make('span', {}, make('button', { class: 'link', type: 'button', onclick: () => setShown(found.map((run) => run.id)) }, found.length > store.mostShown ? `show ${store.mostShown}` : 'show all'), ' · ',
        make('button', { class: 'link', type: 'button', onclick: () => setShown([]) }, 'none')));
    replace(this.notes, store.notes.map((text) => make('div', { class: 'note' }, text)));
    replace(this.list, rows.map((run) => this.row(run, shown.has(run.id))),
      found.length > rows.length ? make('li', { class: 'faint' }, `and ${count(found.length - rows.length)} more: use the filter`) : null);
    if (focusKey) this.list.querySelector(`[data-key="${CSS.escape(focusKey)}"]`)?.focus();
  },

  row(run, isShown) {
    const id = run.id;
    const toggle = (event) => {
      const shown = shownSet();
      if (event.target.checked) shown.add(id); else shown.delete(id);
      setShown(shown);
    };
    const focus = () => {
      kept.focus = id;
      if (!isShown) setShown([...shownSet(), id].slice(-store.mostShown)); else { keep(); changed('list'); }
    };
    const progress = run.steps ? `${count(run.step)} / ${count(run.steps)}` : count(run.step);
    return make('li', { class: focused() === id && 'focused' },
      make('input', { type: 'checkbox', checked: isShown, 'aria-label': `Show ${nameOf(id)}`, 'data-key': `c${id}`, onchange: toggle }),
      isShown ? make('input', {
        type: 'color', value: colourOf(id), 'aria-label': `Colour of ${nameOf(id)}`,
        onchange: (event) => { kept.colours[keyOf(id)] = event.target.value; keep(); event.target.blur(); changed('list'); },
      }) : make('span'),
      make('button', { class: 'name', type: 'button', title: id, 'data-key': `n${id}`, onclick: focus, ondblclick: () => go('run') },
        make('b', {}, nameOf(id)), make('span', {}, make('span', { class: `state ${run.state}` }), [run.state || 'reading', progress].join('  '))),
      make('span', { class: 'value' }, loss(run.loss), make('span', {}, isNumber(run.eval_loss) ? loss(run.eval_loss) : '')));
  },
};

/** The theme: that of the system, or the user's choice. */
const theme = {
  dark: matchMedia('(prefers-color-scheme: dark)'),
  set() {
    const isDark = kept.theme === 'auto' ? this.dark.matches : kept.theme === 'dark';
    document.documentElement.dataset.theme = isDark ? 'dark' : 'light';
    byId('theme').title = `Theme: ${kept.theme}`;
    redrawAll();
  },
  next() {
    kept.theme = { auto: this.dark.matches ? 'light' : 'dark', light: this.dark.matches ? 'auto' : 'dark', dark: this.dark.matches ? 'light' : 'auto' }[kept.theme];
    keep();
    this.set();
  },
};

/** Batches updates, so that the page is redrawn only a few times a second. */
const news = new Set();
let isDue = false;
store.listeners.push((what) => {
  news.add(what);
  if (isDue) return;
  isDue = true;
  setTimeout(() => {
    isDue = false;
    const all = [...news];
    news.clear();
    // A folder that is itself a sweep opens with the view of sweeps.
    if (all.includes('first') && !first && store.sweeps.includes('.')) go('sweeps');
    byId('folder').textContent = store.folder.split('/').pop() || store.folder;
    byId('folder').title = store.folder;
    if (all.includes('list')) { drawTabs(); side.draw(); }
    const chosen = shownIds();
    document.title = chosen.length ? `${nameOf(focused())} ${loss(store.runs.get(focused())?.loss)} · flatout` : 'flatout';
    all.forEach((one) => currentView().update(one));
  }, news.size > 1 ? 60 : 120);
});

byId('menu').addEventListener('click', () => {
  const isOpen = byId('side').classList.toggle('open');
  byId('menu').setAttribute('aria-expanded', String(isOpen));
});
byId('theme').addEventListener('click', () => theme.next());
theme.dark.addEventListener('change', () => theme.set());
addEventListener('scroll', pointAll, { passive: true });
addEventListener('hashchange', () => { const name = location.hash.slice(1); if (VIEWS[name]) go(name); });

theme.set();
side.open();
const first = location.hash.slice(1);
const wantsRun = first.startsWith('run=');
subscribe();
if (wantsRun) { current = 'curves'; drawTabs(); VIEWS.curves.open(byId('view')); } else go(VIEWS[first] ? first : 'curves');
