// Runs as the server tells of them, and the choices of whoever looks at them, which this browser keeps.

const PALETTE = ['#2f6fde', '#d1570a', '#22915b', '#9a4fc9', '#c9332c', '#008ea6', '#b8860b', '#d0428f', '#5b6b7d', '#6f8f1a'];

const store = {
  runs: new Map(),      // id -> the line of the list
  sweeps: [],
  notes: [],
  folder: '',
  mostShown: 32,
  curves: new Map(),    // id -> { steps, evaluations, record, read, unreadable }
  details: new Map(),   // id -> what /api/run told
  listeners: [],
  source: null,
};

/** Kept by this browser: names, colours, the selection and how curves are drawn. */
const kept = (() => {
  const defaults = { names: {}, colours: {}, shown: null, axis: 'step', log: false, smooth: 25, theme: 'auto', focus: null };
  let held;
  try { held = JSON.parse(localStorage.getItem('flatout') ?? '{}'); } catch { held = {}; }
  return Object.assign({}, defaults, held && typeof held === 'object' ? held : {});
})();

const keep = () => {
  try { localStorage.setItem('flatout', JSON.stringify(kept)); } catch { /* A browser that keeps nothing still shows everything. */ }
};

/** Runs are kept under the folder they lie in: another folder may have a run of the same name. */
const keyOf = (id) => `${store.folder}/${id}`;
const nameOf = (id) => (Object.hasOwn(kept.names, keyOf(id)) ? kept.names[keyOf(id)] : id);

/** The colour a run was given, or one by its place in the order of names. */
const colourOf = (id) => {
  if (Object.hasOwn(kept.colours, keyOf(id))) return kept.colours[keyOf(id)];
  const place = shownIds().indexOf(id);
  return PALETTE[(place < 0 ? 0 : place) % PALETTE.length];
};

const shownSet = () => new Set((kept.shown ?? {})[store.folder] ?? []);
const shownIds = () => [...shownSet()].filter((id) => store.runs.has(id)).slice(0, store.mostShown);

const setShown = (ids) => {
  kept.shown = Object.assign({}, kept.shown, { [store.folder]: [...new Set(ids)].slice(0, store.mostShown) });
  keep();
  subscribe();
  changed('list');
};

/** The run whose details are shown: the one that was pointed at, or the first that is drawn. */
const focused = () => {
  const shown = shownIds();
  return shown.includes(kept.focus) ? kept.focus : shown[0] ?? null;
};

const changed = (what) => store.listeners.forEach((listener) => listener(what));

/** Puts news of columns behind what is known of them. */
const appended = (known, news) => {
  const have = known ?? { step: [], tokens: [], seconds: [], curves: {} };
  const cut = (column, more) => { column.length = Math.min(column.length, news.from); for (const value of more) column.push(value); };
  const before = Math.min(have.step.length, news.from);
  for (const axis of ['step', 'tokens', 'seconds']) cut(have[axis], news[axis]);
  for (const name of new Set([...Object.keys(have.curves), ...Object.keys(news.curves)])) {
    const curve = (have.curves[name] ??= {});
    const more = news.curves[name] ?? {};
    for (const kind of ['mean', 'least', 'most']) {
      if (!curve[kind] && !more[kind]) continue;
      const column = (curve[kind] ??= []);
      while (column.length < before) column.push(kind === 'mean' ? null : curve.mean?.[column.length] ?? null);
      cut(column, more[kind] ?? []);
      while (column.length < have.step.length) column.push(null);
    }
  }
  have.stride = news.stride;
  return have;
};

const takeList = (list) => {
  const isFirst = store.folder === '';
  store.folder = list.folder;
  store.mostShown = list.most_shown;
  if (list.all) store.runs.clear();
  for (const run of list.runs) store.runs.set(run.id, run);
  store.sweeps = list.sweeps;
  store.notes = list.notes;
  if (isFirst) { chooseFirst(); changed('first'); }
  changed('list');
};

/** At first, the run that the address names; else what was shown before; else the newest runs. */
const chooseFirst = () => {
  const asked = new URLSearchParams(location.hash.slice(1)).get('run');
  if (asked && store.runs.has(asked)) {
    kept.focus = asked;
    setShown(new Set([asked, ...shownIds()]));
  } else if (!shownIds().length) {
    store.wantsNewest = true;
  }
  subscribe();
};

/** The newest runs, once the list knows when they began. */
const chooseNewest = () => {
  const begun = [...store.runs.values()].filter((run) => isNumber(run.started));
  if (!store.wantsNewest || !begun.length || [...store.runs.values()].some((run) => run.state === '')) return;
  store.wantsNewest = false;
  begun.sort((a, b) => b.started - a.started);
  setShown(begun.slice(0, 4).map((run) => run.id));
};

const takeRun = (news) => {
  const known = store.curves.get(news.id) ?? {};
  store.curves.set(news.id, {
    steps: appended(known.steps, news.steps),
    evaluations: appended(known.evaluations, news.evaluations),
    record: news.record ?? known.record,
    read: news.read,
    unreadable: news.unreadable,
  });
  // Every evaluation and checkpoint is news: the folder is read again for the run that is looked at.
  if (news.record && (!store.details.has(news.id) || news.id === focused())) fetchDetails(news.id);
  changed('run');
};

/** Asks for the rest of a run's folder; again where its log says that something happened. */
const fetchDetails = async (id) => {
  try {
    const answer = await fetch(`/api/run?id=${encodeURIComponent(id)}`);
    if (!answer.ok) return;
    store.details.set(id, await answer.json());
    changed('details');
  } catch { /* The stream says where the server is gone. */ }
};

/** Opens the stream of news for the runs that are shown. */
const subscribe = () => {
  const ids = shownIds();
  const query = ids.map((id) => `run=${encodeURIComponent(id)}`).join('&');
  if (store.source && store.query === query && store.source.readyState !== EventSource.CLOSED) return;
  store.source?.close();
  store.query = query;
  for (const id of [...store.curves.keys()]) if (!ids.includes(id)) { store.curves.delete(id); store.details.delete(id); }
  const source = new EventSource(`/api/live?${query}`);
  store.source = source;
  const own = (take) => (event) => { if (store.source === source) take(JSON.parse(event.data)); };
  source.addEventListener('runs', own((list) => { takeList(list); chooseNewest(); }));
  source.addEventListener('run', own(takeRun));
  // Another page took this one's place: it does not take it back by itself.
  source.addEventListener('full', own(({ most_pages: mostPages }) => {
    source.close();
    store.source = null;
    setStatus(`more than ${mostPages} pages are open, so this one rests: load it again to go on`, true);
  }));
  // A stream that begins again sends every curve from its beginning.
  source.onopen = () => setStatus('');
  source.onerror = () => {
    if (store.source !== source) return;
    setStatus('connection lost', true);
    if (source.readyState === EventSource.CLOSED) setTimeout(() => { if (store.source === source) { store.query = null; subscribe(); } }, 2000);
  };
};

const setStatus = (text, isLost = false) => {
  const status = byId('status');
  status.textContent = text;
  status.className = isLost ? 'status lost' : 'status';
};
