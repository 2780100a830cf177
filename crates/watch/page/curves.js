// The view of curves: the selected runs on common axes.

const share = (value) => percent(value, Math.abs(value) < 0.1 ? 1 : 0);
const celsius = (value) => `${number(value)} °C`;

/** A row per chart: the source of its curve and the format of its values. A chart without values is left out. */
const CHARTS = [
  { title: 'Loss', curve: 'loss', held: 'loss', wide: true, format: number, canLog: true, hasFloor: true },
  { title: 'Tokens per second', curve: 'tokens_per_second', format: short, domain: [0], unless: (run) => isOfSamples(run) },
  { title: 'Samples per second', curve: 'samples_per_second', format: short, domain: [0], unless: (run) => !isOfSamples(run) },
  { title: 'MFU', aside: 'the model’s arithmetic over the device’s peak', curve: 'mfu', format: share, domain: [0] },
  { title: 'Accuracy', aside: 'held out', held: 'accuracy', format: share },
  { title: 'F1', aside: 'held out, mean of classes', held: 'f1', format: share },
  { title: 'Exact answers', aside: 'held out', held: 'exact', format: share },
  { title: 'Reward accuracy', curve: 'reward_accuracy', held: 'reward_accuracy', format: share },
  { title: 'Reward margin', curve: 'reward_margin', held: 'reward_margin', format: number },
  { title: 'Bits per byte', aside: 'held out', held: 'bits_per_byte', format: number },
  { title: 'Learning rate', curve: 'lr', format: number, domain: [0], isExact: true },
  { title: 'Gradient norm', curve: 'grad_norm', format: number, isLog: true },
  { title: 'Fraction of the predicted speed', curve: 'of_predicted', format: share, domain: [0] },
  { title: 'Fraction of the roofline', curve: 'of_roofline', format: share, domain: [0] },
  { title: 'Waiting for data', aside: 'share of an update', curve: 'data_wait', format: share, domain: [0, 0.05] },
  { title: 'Padding', aside: 'share of the computed tokens', curve: 'padding', format: share, domain: [0] },
  { title: 'GPU power', curve: 'gpu_power_watts', format: (value) => `${number(value)} W`, domain: [0] },
  { title: 'GPU clock', curve: 'gpu_clock_mhz', format: (value) => `${count(value)} MHz` },
  { title: 'GPU temperature', curve: 'gpu_temperature_celsius', format: celsius },
  { title: 'GPU memory', aside: 'of all processes', curve: 'gpu_memory_bytes', format: bytes, domain: [0] },
  { title: 'GPU utilisation', curve: 'gpu_utilization', format: share, domain: [0, 1] },
];

/** Whether a run trains on images, whose speed is counted in samples. */
const isOfSamples = (id) => {
  const config = store.details.get(id)?.config;
  return Boolean(config && config['data.task'] && config['data.task'].includes('images'));
};

const AXES = [['step', 'Step'], ['tokens', 'Tokens'], ['time', 'Time']];
const columnOf = () => ({ step: 'step', tokens: 'tokens', time: 'seconds' })[kept.axis];
const formatAxis = (value) => ({ step: count, tokens: short, time: duration })[kept.axis](Math.max(0, value));

/** The share of a run over which curves are smoothed: quadratic in the slider, a fifth at most. */
const smoothingShare = () => 0.2 * (kept.smooth / 100) ** 2;

/** Tokens over which curves are smoothed, the same for all runs: a share of the tokens of the longest. */
const smoothingSpan = () => smoothingShare() * most([0, ...shownIds().map((id) => store.curves.get(id)?.steps.tokens.at(-1) ?? 0)]);

/** Finer curves of the zoomed range: id -> the range, and its steps as columns. */
const parts = new Map();

/** Requests finer curves of the zoomed range where the present ones are downsampled. */
const refine = () => {
  if (currentView() !== curvesView) return;
  for (const id of shownIds()) {
    const steps = store.curves.get(id)?.steps;
    if (!steps || !(steps.stride > 1) || !pointer.zoom) continue;
    const column = steps[columnOf()];
    const at = (value) => Math.min(Math.max(lowerBound(column, value), 0), column.length - 1);
    const [low, high] = [at(pointer.zoom[0]), at(pointer.zoom[1])];
    // Some more steps on both sides, for the smoothing.
    const room = Math.ceil((high - low) / 4) + 1;
    const [from, to] = [steps.step[Math.max(0, low - room)], steps.step[Math.min(steps.step.length - 1, high + room)]];
    const known = parts.get(id);
    // The end of a running run changes all the time: it is requested at most every two seconds.
    if (known && known.from === from && (known.to === to || Date.now() - known.asked < 2000)) continue;
    const wanted = { from, to, steps: known?.from === from ? known.steps : null, asked: Date.now() };
    parts.set(id, wanted);
    fetch(`/api/part?id=${encodeURIComponent(id)}&from=${from}&to=${to}`).then((answer) => (answer.ok ? answer.json() : null)).then((part) => {
      if (!part?.steps || parts.get(id) !== wanted) return;
      wanted.steps = appended(null, part.steps);
      redrawAll();
    }).catch(() => { /* The present curves stay. */ });
  }
};

/** The steps of a run that are drawn: those of the zoomed range where finer ones have arrived. */
const stepsOf = (id) => {
  const known = store.curves.get(id).steps;
  const part = pointer.zoom && parts.get(id)?.steps;
  if (!part) return known;
  const [column, last] = [part[columnOf()], known[columnOf()].at(-1)];
  const covers = column[0] <= Math.max(pointer.zoom[0], known[columnOf()][0]) && column.at(-1) >= Math.min(pointer.zoom[1], last) - 0.02 * (pointer.zoom[1] - pointer.zoom[0]);
  return covers ? part : known;
};

/** The current curves of a chart. */
const dataOf = (chart) => {
  const [column, span] = [columnOf(), smoothingSpan()];
  const curves = [];
  const marks = [];
  let floor = null;
  for (const id of shownIds()) {
    const known = store.curves.get(id);
    if (!known || chart.unless?.(id)) continue;
    const [colour, name] = [colourOf(id), nameOf(id)];
    const steps = stepsOf(id);
    const curve = chart.curve && steps.curves[chart.curve];
    if (curve) {
      const hasTokens = steps.tokens.at(-1) > 0;
      const smooth = chart.isExact || kept.smooth === 0 ? undefined
        : smoothed(curve.mean, hasTokens ? steps.tokens : steps.step, hasTokens ? span : smoothingShare() * steps.step.at(-1));
      curves.push({ name, colour, x: steps[column], mean: curve.mean, least: curve.least, most: curve.most, smooth });
    }
    const held = chart.held && known.evaluations.curves[chart.held];
    if (held) marks.push({ name: chart.curve ? `${name}, held out` : name, colour, x: known.evaluations[column], y: held.mean });
    if (chart.hasFloor) floor = known.record?.end?.loss_floor ?? floor;
  }
  return {
    curves, marks, floor, format: chart.format, formatX: formatAxis, domain: chart.domain,
    isLog: chart.isLog || (chart.canLog && kept.log),
  };
};

const curvesView = {
  title: 'Curves',
  charts: new Map(),

  open(view) {
    this.charts.forEach((chart) => chart.remove());
    this.charts.clear();
    this.tools = make('div', { class: 'tools' });
    this.legend = make('div', { class: 'legend', 'aria-label': 'Selected runs' });
    this.grid = make('div', { class: 'charts' });
    this.empty = make('div');
    replace(view, this.tools, this.legend, this.empty, this.grid);
    this.drawTools();
    this.update('list');
  },

  drawTools() {
    const set = (name) => (value) => { kept[name] = value; if (name === 'axis') pointer.zoom = null; keep(); this.drawTools(); redrawAll(); };
    const smooth = make('span', {}, this.smoothWords());
    replace(this.tools,
      segments('Axis', AXES, kept.axis, set('axis')),
      segments('Loss', [[false, 'Linear'], [true, 'Log']], kept.log, set('log')),
      make('label', {}, 'Smoothing', make('input', {
        type: 'range', min: 0, max: 100, value: kept.smooth, 'aria-label': 'Smoothing',
        oninput: (event) => { kept.smooth = Number(event.target.value); keep(); smooth.textContent = this.smoothWords(); redrawAll(); },
      }), smooth),
    );
  },

  smoothWords() {
    return kept.smooth === 0 ? 'off' : `over ${short(smoothingSpan())} tokens`;
  },

  update() {
    const ids = shownIds();
    replace(this.legend, ids.map((id) => make('span', {}, make('i', { colour: colourOf(id) }), nameOf(id), this.progress(id))));
    for (const row of CHARTS) {
      const isThere = ids.some((id) => {
        const known = store.curves.get(id);
        return known && !row.unless?.(id) && ((row.curve && known.steps.curves[row.curve]) || (row.held && known.evaluations.curves[row.held]));
      });
      const chart = this.charts.get(row.title);
      if (isThere && !chart) this.charts.set(row.title, new Chart({ title: row.title, aside: row.aside, wide: row.wide, data: () => dataOf(row) }));
      if (!isThere && chart) { chart.remove(); this.charts.delete(row.title); }
    }
    const wanted = CHARTS.map((row) => this.charts.get(row.title)?.element).filter(Boolean);
    if (wanted.length !== this.grid.children.length || wanted.some((element, index) => this.grid.children[index] !== element)) replace(this.grid, wanted);
    const smooth = this.tools.querySelector('label span');
    if (smooth) smooth.textContent = this.smoothWords();
    replace(this.empty, ids.length ? null : emptyView());
    this.tools.hidden = !ids.length;
    if (pointer.zoom) refine();
    redrawAll();
  },

  /** The progress of reading a long log. */
  progress(id) {
    const known = store.curves.get(id);
    if (known && known.read < 1) return make('span', { class: 'faint' }, `reading ${percent(known.read, 0)}`);
    return null;
  },

  close() {
    this.charts.forEach((chart) => chart.remove());
    this.charts.clear();
  },
};

const emptyView = () => make('div', { class: 'empty' }, store.runs.size
  ? [make('h2', {}, 'No run is selected'), make('p', {}, 'Tick runs in the list to draw their curves on one axis.')]
  : [make('h2', {}, 'No runs yet'), make('p', {}, 'flatout train makes one. It appears here by itself.')]);
