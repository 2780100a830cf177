// The view of sweeps: a table of runs, and parallel coordinates of the varied keys and the result.

/** The name of a sweep, or of the folder if that is the sweep. */
const titleOfSweep = (id) => (id === '.' ? store.folder.split('/').pop() : id);

const sweepView = {
  title: 'Sweeps',
  sort: 'best',

  open(view) {
    this.view = view;
    this.update('list');
  },

  async update(what) {
    if (what === 'run' || what === 'details') return;
    const known = store.sweeps.includes(this.id) ? this.id : store.sweeps[0];
    if (!known) { replace(this.view, make('div', { class: 'empty' }, make('h2', {}, 'No sweeps here'), make('p', {}, 'flatout sweep tiny lr=1e-3,3e-3 makes one.'))); return; }
    // The list changes with every step of every run: the file is requested at most every three seconds.
    if (this.id !== known || !this.sweep || Date.now() - this.asked > 3000) {
      this.id = known;
      this.asked = Date.now();
      try {
        const answer = await fetch(`/api/sweep?id=${encodeURIComponent(known)}`);
        if (answer.ok) this.sweep = await answer.json();
      } catch { return; }
    }
    if (this.sweep && currentView() === this) this.draw();
  },

  draw() {
    const { sweep, id } = this;
    // If the folder itself is the sweep, its runs are directly in it.
    const idOf = (name) => (id === '.' ? name : `${id}/${name}`);
    const runs = (sweep.runs ?? []).map((run) => ({ ...run, live: store.runs.get(idOf(run.name)) }));
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.values ?? {})))];
    const isHigherBetter = sweep.goal && !/loss|bits/.test(sweep.goal);
    const better = (a, b) => (isHigherBetter ? b - a : a - b);
    const worth = (run) => run.best ?? run.live?.eval_loss ?? null;
    const order = {
      best: (a, b) => better(worth(a) ?? (isHigherBetter ? -Infinity : Infinity), worth(b) ?? (isHigherBetter ? -Infinity : Infinity)),
      name: (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }),
    };
    runs.sort(order[this.sort] ?? ((a, b) => String(a.values[this.sort]).localeCompare(String(b.values[this.sort]), undefined, { numeric: true })));
    const best = runs.filter((run) => isNumber(worth(run))).sort(order.best)[0];
    const sorter = (name, title) => make('button', { type: 'button', onclick: () => { this.sort = name; this.draw(); } }, title, this.sort === name ? ' ↓' : '');
    const head = [[sorter('name', 'run'), false, 'key'], ...keys.map((key) => [sorter(key, key), true]), ['state'], ['step', true], [sorter('best', `best ${sweep.goal ?? 'loss'}`), true], ['last loss', true], ['time', true]];
    const rows = runs.map((run) => [
      run.live ? make('button', { class: 'link', onclick: () => { kept.focus = run.live.id; setShown([run.live.id, ...shownIds()]); go('run'); } }, run.name) : run.name,
      ...keys.map((key) => run.values?.[key]), run.live?.state || run.state || 'waiting', count(run.live?.step ?? run.step), isNumber(worth(run)) ? worth(run).toFixed(4) : null,
      loss(run.live?.loss ?? run.loss), duration(run.seconds),
    ]);
    const choose = store.sweeps.length > 1 ? make('label', {}, 'Sweep', make('select', {
      onchange: (event) => { this.id = event.target.value; this.sweep = null; this.update('list'); },
    }, store.sweeps.map((name) => make('option', { value: name, selected: name === id }, titleOfSweep(name))))) : null;
    const all = make('button', { class: 'link', type: 'button', onclick: () => { setShown(runs.filter((run) => run.live).map((run) => run.live.id)); go('curves'); } }, 'Show the curves of all');
    const canvas = make('canvas', { role: 'img', 'aria-label': 'Parallel coordinates of the sweep' });
    replace(this.view, make('div', { class: 'tools' }, choose, make('h2', {}, titleOfSweep(id)), make('span', { class: 'faint' }, `${sweep.recipe ?? ''}, ${runs.length} runs by ${sweep.goal ?? 'loss'}`), all),
      keys.length ? part('Parallel coordinates', 'better runs have darker lines', make('div', { class: 'coordinates' }, canvas)) : null,
      part('Runs', null, table(head, rows, (index) => (runs[index] === best ? 'best' : null))),
      sweep.means?.length ? part('Means over seeds', null, this.means(sweep)) : null);
    if (keys.length) requestAnimationFrame(() => this.coordinates(canvas, runs, keys, worth, isHigherBetter, best));
  },

  means(sweep) {
    const keys = [...new Set(sweep.means.flatMap((mean) => Object.keys(mean.values ?? {})))];
    const rest = Object.keys(sweep.means[0]).filter((key) => key !== 'values' && typeof sweep.means[0][key] === 'number');
    return table([...keys.map((key) => [key, true]), ...rest.map((key) => [key.replaceAll('_', ' '), true])],
      sweep.means.map((mean) => [...keys.map((key) => mean.values?.[key]), ...rest.map((key) => number(mean[key]))]));
  },

  /** Draws an axis per key and one for the result, and a line per run. */
  coordinates(canvas, runs, keys, worth, isHigherBetter, best) {
    const box = canvas.getBoundingClientRect();
    if (!box.width) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = box.width * ratio; canvas.height = box.height * ratio;
    const pen = canvas.getContext('2d');
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const ink = (name) => style.getPropertyValue(name);
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const done = runs.filter((run) => isNumber(worth(run)));
    const axes = keys.map((key) => this.axis(key, runs.map((run) => run.values?.[key])));
    const results = done.map(worth);
    const [low, high] = [least(results), most(results)];
    axes.push({ name: this.sweep.goal ?? 'loss', at: (run) => (high > low ? (worth(run) - low) / (high - low) : 0.5), labels: [[0, number(low)], [1, number(high)]] });
    const [top, height, side] = [34, box.height - 54, 60];
    const x = (index) => side + ((box.width - 2 * side) * index) / Math.max(1, axes.length - 1);
    const y = (share) => top + height * (1 - share);
    const merit = (run) => { const at = high > low ? (worth(run) - low) / (high - low) : 1; return isHigherBetter ? at : 1 - at; };
    for (const run of [...done].sort((a, b) => merit(a) - merit(b))) {
      pen.strokeStyle = ink('--accent'); pen.globalAlpha = run === best ? 1 : 0.12 + 0.5 * merit(run) ** 2; pen.lineWidth = run === best ? 2.6 : 1.4;
      pen.beginPath();
      axes.forEach((axis, index) => {
        const [px, py] = [x(index), y(axis.key ? axis.at(run.values?.[axis.key]) : axis.at(run))];
        if (!index) pen.moveTo(px, py);
        else { const before = x(index - 1); const middle = (before + px) / 2; const previous = axes[index - 1]; pen.bezierCurveTo(middle, y(previous.at(run.values?.[previous.key])), middle, py, px, py); }
      });
      pen.stroke();
    }
    pen.globalAlpha = 1;
    axes.forEach((axis, index) => {
      pen.strokeStyle = ink('--faint'); pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(x(index), top); pen.lineTo(x(index), top + height); pen.stroke();
      pen.fillStyle = ink('--text'); pen.textAlign = 'center'; pen.textBaseline = 'alphabetic';
      pen.fillText(axis.name, x(index), 16);
      pen.fillStyle = ink('--faint'); pen.textBaseline = 'middle'; pen.textAlign = index === axes.length - 1 ? 'left' : 'right';
      // An outline in the page's colour keeps labels readable on lines.
      pen.strokeStyle = ink('--page'); pen.lineWidth = 4;
      for (const [at, text] of axis.labels) {
        const place = x(index) + (index === axes.length - 1 ? 8 : -8);
        pen.strokeText(text, place, y(at));
        pen.fillText(text, place, y(at));
      }
    });
  },

  /** Positions of values along an axis: numbers on a linear scale, or a logarithmic one if they span more than a factor of eight; other values evenly. */
  axis(key, values) {
    const unique = [...new Set(values.filter((value) => value !== undefined))];
    const numbers = unique.map(Number);
    if (numbers.every(isNumber)) {
      const [low, high] = [least(numbers), most(numbers)];
      const isLog = low > 0 && high / low > 8;
      const of = isLog ? Math.log : (value) => value;
      const at = (value) => (high > low ? (of(Number(value)) - of(low)) / (of(high) - of(low)) : 0.5);
      const sorted = [...numbers].sort((a, b) => a - b);
      const shown = sorted.length > 8 ? [low, high] : sorted;
      return { key, name: key, at, labels: shown.map((value) => [at(value), number(value)]) };
    }
    unique.sort();
    const at = (value) => (unique.length > 1 ? unique.indexOf(value) / (unique.length - 1) : 0.5);
    return { key, name: key, at, labels: unique.slice(0, 20).map((value) => [at(value), String(value).slice(0, 18)]) };
  },

  close() {},
};
