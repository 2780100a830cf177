// The comparison view: the selected runs side by side.

const compareView = {
  title: 'Compare',

  open(view) {
    this.view = view;
    this.update('list');
  },

  update() {
    const ids = shownIds();
    if (!ids.length) { replace(this.view, emptyView()); return; }
    const head = [[''], ...ids.map((id) => [nameOf(id), true])];
    const newest = (id, name) => store.curves.get(id)?.steps.curves[name]?.mean.findLast(isNumber);
    const rows = [
      ['state', (id) => store.runs.get(id).state],
      ['step', (id) => count(store.runs.get(id).step)],
      ['loss', (id) => loss(store.runs.get(id).loss)],
      ['held-out loss', (id) => loss(store.runs.get(id).eval_loss)],
      ['held-out accuracy', (id) => percent(store.curves.get(id)?.evaluations.curves.accuracy?.mean.at(-1))],
      ['tokens', (id) => short(store.curves.get(id)?.steps.tokens.at(-1))],
      ['training time', (id) => duration(store.curves.get(id)?.steps.seconds.at(-1))],
      ['tokens per second', (id) => count(store.runs.get(id).tokens_per_second)],
      ['step time', (id) => milliseconds(newest(id, 'step_ms'))],
      ['MFU', (id) => percent(newest(id, 'mfu'))],
      ['planned memory', (id) => bytes(store.curves.get(id)?.record?.start?.arena_bytes)],
      ['device', (id) => store.curves.get(id)?.record?.start?.backend ?? '–'],
    ].map(([name, of]) => [name, ...ids.map(of)]).filter((row) => row.slice(1).some((cell) => cell !== '–'));
    const configs = ids.map((id) => store.details.get(id)?.config ?? {});
    const keys = [...new Set(configs.flatMap(Object.keys))].sort();
    const differs = keys.filter((key) => configs.some((config) => config[key] !== configs[0][key]));
    replace(this.view,
      part('Results', null, table(head, rows)),
      part('Settings that differ', differs.length ? null : ids.length < 2 ? 'select another run to compare with' : 'none',
        differs.length ? table([['key', false, 'key'], ...head.slice(1)], differs.map((key) => [key, ...configs.map((config) => config[key] ?? '–')])) : null));
  },

  close() {},
};
