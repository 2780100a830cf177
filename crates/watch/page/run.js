// The view of one run: its state, planned memory, kernels, switches, classes, samples, warnings and settings.

const runView = {
  title: 'Run',

  open(view) {
    this.view = view;
    this.update('list');
  },

  update(what) {
    // New points change the facts only; the tables are not redrawn, so that they do not move while they are read.
    if (what === 'run' && this.shownId === focused() && this.facts?.isConnected) {
      const facts = this.factsOf(focused());
      this.facts.replaceWith(facts);
      this.facts = facts;
      return;
    }
    if (this.memory) { this.memory.remove(); this.memory = null; }
    const id = focused();
    this.shownId = id;
    if (!id) { replace(this.view, emptyView()); return; }
    const [run, details] = [store.runs.get(id), store.details.get(id)];
    this.facts = this.factsOf(id);
    replace(this.view,
      this.heading(id, run), this.facts,
      details && [
        this.problems(details), this.warnings(details.record), this.classes(details), samplesPart(id, details.samples ?? []), this.plan(details),
        this.kernels(details), this.switches(details), this.machine(details), this.config(details),
      ].filter(Boolean),
    );
  },

  close() {
    if (this.memory) { this.memory.remove(); this.memory = null; }
    this.shownId = null;
  },

  heading(id, run) {
    const input = make('input', {
      type: 'text', value: nameOf(id), 'aria-label': 'Name of the run in this browser',
      onchange: (event) => {
        const name = event.target.value.trim();
        if (name && name !== id) kept.names[keyOf(id)] = name; else delete kept.names[keyOf(id)];
        keep(); changed('list');
      },
    });
    return make('div', { class: 'tools' }, input, make('span', {}, make('span', { class: `state ${run.state}` }), run.state || 'read'),
      nameOf(id) === id ? null : make('code', { class: 'faint' }, id), make('span', { class: 'faint' }, run.recipe ?? ''));
  },

  factsOf(id) {
    const [run, known] = [store.runs.get(id), store.curves.get(id)];
    const record = known?.record;
    const start = record?.start ?? {};
    const newest = (name) => known?.steps.curves[name]?.mean.findLast(isNumber);
    const seconds = known?.steps.seconds.at(-1);
    const left = run.steps && run.step && seconds && run.state === 'running' ? (seconds / run.step) * (run.steps - run.step) : null;
    return facts([
      ['step', run.steps ? `${count(run.step)} of ${count(run.steps)}` : count(run.step)],
      ['loss', loss(run.loss)],
      ['held-out loss', isNumber(run.eval_loss) ? loss(run.eval_loss) : null],
      ['held-out accuracy', isNumber(known?.evaluations.curves.accuracy?.mean.at(-1)) ? percent(known.evaluations.curves.accuracy.mean.at(-1)) : null],
      ['loss floor', isNumber(record?.end?.loss_floor) ? loss(record.end.loss_floor) : null],
      [isOfSamples(id) ? 'samples per second' : 'tokens per second', count(isOfSamples(id) ? run.samples_per_second : run.tokens_per_second)],
      ['MFU', isNumber(newest('mfu')) ? percent(newest('mfu')) : null],
      ['fraction of the predicted speed', isNumber(newest('of_predicted')) ? percent(newest('of_predicted'), 0) : null],
      ['waiting for data', isNumber(newest('data_wait')) ? percent(newest('data_wait')) : null],
      ['planned memory', isNumber(start.arena_bytes) ? bytes(start.arena_bytes + (start.driver_bytes ?? 0)) : null],
      ['GPU power', isNumber(newest('gpu_power_watts')) ? `${count(newest('gpu_power_watts'))} W` : null],
      ['clock throttled by', record?.throttled?.length ? record.throttled.join(', ') : null],
      ['tokens', known?.steps.tokens.at(-1) && !isOfSamples(id) ? short(known.steps.tokens.at(-1)) : null],
      ['epochs', record?.epoch > 0 ? record.epoch.toFixed(2) : null],
      ['training time', isNumber(seconds) ? duration(seconds) : null],
      ['time left', left === null ? null : duration(left)],
      ['parameters', start.parameters ? short(start.parameters) : null],
      ['started', record?.starts > 1 ? `${record.starts} times` : ago(run.started)],
      ['last checkpoint', isNumber(record?.saved) ? `step ${count(record.saved)}` : null],
      ['skipped updates', record?.skipped ? count(record.skipped) : null],
    ]);
  },

  problems(details) {
    return details.problems?.length ? part('Not shown', null, make('ul', { class: 'texts' }, details.problems.map((text) => make('li', {}, text)))) : null;
  },

  warnings(record) {
    if (!record?.warnings?.length) return null;
    const all = record.warning_count > record.warnings.length ? `the newest ${record.warnings.length} of ${count(record.warning_count)}` : null;
    return part('Warnings', all, make('ul', { class: 'texts' }, [...record.warnings].reverse().map((text) => make('li', { class: 'warn' }, text))));
  },

  /** The confusion matrix with the names of the classes: rows are true classes, columns are predictions. */
  classes(details) {
    const confusion = details.record?.confusion;
    if (!confusion) return null;
    const { rows, step } = confusion;
    const name = (index) => details.classes?.[index] ?? String(index);
    const total = rows.flat().reduce((a, b) => a + b, 0);
    const right = rows.reduce((sum, row, index) => sum + row[index], 0);
    const cell = (value, row, column, sum) => {
      const element = make('td', { title: `${name(row)} predicted as ${name(column)}: ${value}` }, value || '·');
      element.style.background = `color-mix(in srgb, ${row === column ? 'var(--accent)' : 'var(--bad)'} ${Math.round(85 * (sum ? value / sum : 0))}%, var(--rise))`;
      if (sum && value / sum > 0.55) element.style.color = 'var(--page)';
      return element;
    };
    return part('Confusion matrix', `after step ${count(step)}: ${count(right)} of ${count(total)} right; rows are true classes, columns are predictions`,
      make('div', { class: 'scroll' }, make('table', { class: 'matrix' },
        make('thead', {}, make('tr', {}, make('th'), rows.map((_, index) => make('th', { scope: 'col', title: name(index) }, name(index))))),
        make('tbody', {}, rows.map((row, index) => {
          const sum = row.reduce((a, b) => a + b, 0);
          return make('tr', {}, make('th', { scope: 'row', title: name(index) }, name(index)), row.map((value, column) => cell(value, index, column, sum)));
        })))));
  },

  /** Memory over the launches of a step, stacked by category. */
  plan(details) {
    const plan = details.plan;
    if (!plan?.areas?.length) return null;
    const x = plan.areas[0].bytes.map((_, index) => index * plan.launches_a_place);
    let below = x.map(() => 0);
    const curves = plan.areas.map((area, index) => {
      const least = below;
      const most = area.bytes.map((value, place) => value + least[place]);
      below = most;
      return { name: area.name, colour: PALETTE[index % PALETTE.length], x, mean: most, least, most, own: area.bytes };
    });
    this.memory = new Chart({
      title: `${bytes(plan.arena_bytes)} planned`, wide: true,
      aside: plan.peak ? `peak ${bytes(plan.peak.bytes)} in ${plan.peak.role}, launch ${count(plan.peak.launch)} of ${count(plan.peak.launches)}: ${plan.peak.kernel} of ${plan.peak.path}` : '',
      data: () => ({ curves, marks: [], domain: [0], format: bytes, formatX: count, formatTip: (value) => `launch ${count(value)}`, isArea: true }),
    });
    const legend = make('div', { class: 'legend' }, curves.map((curve) => make('span', {}, make('i', { colour: curve.colour }), `${curve.name}, ${bytes(most(curve.own))}`)));
    const alive = plan.peak?.alive ?? [];
    return part('Memory over the step', `${count(plan.launches)} launches: ${(plan.parts ?? []).map((one) => one.name).join(', then ')}`, this.memory.element, legend,
      alive.length ? make('details', {}, make('summary', {}, 'Alive at the peak, besides persistent memory'),
        table([['tensor', false, 'key'], ['buffers', true], ['memory', true]], alive.map((row) => [row.path, count(row.buffers), bytes(row.bytes)]))) : null);
  },

  /** Time by kernel against the roofline: from a profile where there is one, otherwise from the plan. */
  kernels(details) {
    const measured = details.profile?.kernels;
    const rows = (measured ?? details.plan?.kernels)?.slice(0, 24);
    if (!rows?.length) return null;
    const timeOf = (row) => row.ms ?? row.predicted_ms ?? row.roofline_ms;
    const longest = most(rows.map(timeOf));
    const bar = (row) => {
      const whole = make('i');
      const best = make('i', { class: 'least' });
      whole.style.width = `${(100 * timeOf(row)) / longest}%`;
      best.style.width = `${(100 * row.roofline_ms) / longest}%`;
      return make('div', { class: 'bar' }, whole, best);
    };
    const hasTimes = rows.some((row) => isNumber(row.ms ?? row.predicted_ms));
    const head = [['kernel', false, 'key'], ['launches', true], ['roofline time', true], ['']];
    if (hasTimes) head.splice(2, 0, [measured ? 'measured' : 'predicted', true], ['of roofline', true]);
    const times = (row) => (hasTimes ? [milliseconds(row.ms ?? row.predicted_ms), percent(row.roofline_ms / (row.ms ?? row.predicted_ms), 0)] : []);
    const cells = (row) => [row.name, count(row.launches), ...times(row), milliseconds(row.roofline_ms), bar(row)];
    const aside = measured
      ? `measured by flatout profile on ${details.profile.device}`
      : 'as planned; flatout profile --json, kept as profile.json in the folder of the run, adds measured times';
    const sinks = details.profile?.sinks ?? [];
    return part('Time by kernel', aside, table(head, rows.map(cells)),
      sinks.length ? make('ul', { class: 'texts' }, sinks.slice(0, 5).map((sink) => make('li', {}, sink.words ?? ''))) : null);
  },

  /** The states of all switches, the reasons, and what ablate measured for each. */
  switches(details) {
    const start = details.record?.start;
    if (!start?.switches) return null;
    const rows = details.ablation?.rows ?? [];
    const off = (name) => rows.find((row) => row.group === 'off' && row.measured
      && (row.name === name || row.settings?.some((word) => word.split('=')[0].replace(/^switches\./, '') === name)));
    const worth = (name) => {
      const measured = off(name)?.measured;
      if (!measured) return '';
      const ratio = measured.base_is_faster_by?.ratio;
      const words = isNumber(ratio) ? `${ratio.toFixed(3)}×` : '';
      return make('span', { class: { faster: 'good', slower: 'bad' }[measured.verdict] }, `${words} ${String(measured.verdict).replaceAll('_', ' ')}`);
    };
    const memory = (name) => {
      const difference = off(name)?.measured?.memory_difference;
      return isNumber(difference) && difference !== 0 ? `${difference > 0 ? '−' : '+'}${bytes(Math.abs(difference))}` : '';
    };
    const head = [['switch', false, 'key'], ['state'], ['why']];
    const has = rows.length > 0;
    if (has) head.splice(2, 0, ['speed-up', true], ['memory', true]);
    const cells = ([name, value]) => [name, value, ...(has ? [worth(name), memory(name)] : []), start.auto?.[name] ?? ''];
    const aside = has ? `with the effects that flatout ablate measured on ${details.ablation.device}` : 'flatout ablate --out, given the folder of the run, adds the effect of each';
    return part('Switches', aside, table(head, Object.entries(start.switches).map(cells)));
  },

  machine(details) {
    const start = details.record?.start;
    if (!start) return null;
    const rows = [
      ['device', start.device], ['flatout', start.version], ['optimiser', start.optimizer], ['loader', start.loader], ['attention', start.attention],
      ['fp8', start.fp8], ['data', start.data?.source], ['tokens in the data', isNumber(start.data?.tokens) ? count(start.data.tokens) : null],
      ['ranks', start.world ? `${start.world.ranks} on ${start.world.nodes} nodes, ${start.world.mesh}` : null],
      ['start', Object.entries(start.start_seconds ?? {}).map(([name, seconds]) => `${name} ${duration(seconds)}`).join(', ')],
      ['libraries', Object.entries(start.libraries ?? {}).map(([name, version]) => `${name} ${version}`).join(', ')],
    ];
    return part('Machine', null, table([[''], ['']], rows.filter(([, value]) => value)));
  },

  config(details) {
    if (!details.config) return null;
    return part('Settings', null, make('details', {}, make('summary', {}, `All ${Object.keys(details.config).length} keys`),
      table([['key', false, 'key'], ['value', false, 'key']], Object.entries(details.config))));
  },
};
