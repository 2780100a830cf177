// State from the server, and the user's choices, which the browser stores.

const PALETTE = ['#2f6fde', '#d1570a', '#22915b', '#9a4fc9', '#c9332c', '#008ea6', '#b8860b', '#d0428f', '#5b6b7d', '#6f8f1a'];

const store = {
  runs: new Map(),      // id -> its entry in the list
  sweeps: [],
  notes: [],
  folder: '',
  mostShown: 32,
  curves: new Map(),    // id -> { steps, evaluations, record, read, unreadable }
  details: new Map(),   // id -> the response of /api/run
  listeners: [],
  source: null,
};

/** Stored in the browser: names, colours, the selection and the settings of charts. */
const kept = (() => {
  const defaults = { names: {}, colours: {}, shown: null, axis: 'step', log: false, smooth: 25, theme: 'auto', focus: null };
  let held;
  try { held = JSON.parse(localStorage.getItem('flatout') ?? '{}'); } catch { held = {}; }
  return Object.assign({}, defaults, held && typeof held === 'object' ? held : {});
})();

const keep = () => {
  try { localStorage.setItem('flatout', JSON.stringify(kept)); } catch { /* Without storage the page works, but forgets. */ }
};

/** Choices for a run are stored under its folder, because another folder may have a run of the same name. */
const keyOf = (id) => `${store.folder}/${id}`;
const nameOf = (id) => (Object.hasOwn(kept.names, keyOf(id)) ? kept.names[keyOf(id)] : id);

/** The colour chosen for a run, or one by its position in the selection. */
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

/** The run whose details are shown: the one that was clicked, or the first selected one. */
const focused = () => {
  const shown = shownIds();
  return shown.includes(kept.focus) ? kept.focus : shown[0] ?? null;
};

const changed = (what) => store.listeners.forEach((listener) => listener(what));

/** Truncates the known columns to `news.from` and appends an update. */
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

/** The first selection: the run that the address names, else the previous selection, else the newest runs. */
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

/** Selects the newest runs, once the list has their start times. */
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
  // The record changes with every evaluation and checkpoint: the folder of the focused run is read again.
  if (news.record && (!store.details.has(news.id) || news.id === focused())) fetchDetails(news.id);
  changed('run');
};

/** Requests the rest of a run's folder. */
const fetchDetails = async (id) => {
  try {
    const answer = await fetch(`/api/run?id=${encodeURIComponent(id)}`);
    if (!answer.ok) return;
    store.details.set(id, await answer.json());
    changed('details');
  } catch { /* The stream reports a lost connection. */ }
};

/** Opens the stream of updates for the selected runs. */
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
  // A newer page replaced this one, which does not reconnect by itself.
  source.addEventListener('full', own(({ most_pages: mostPages }) => {
    source.close();
    store.source = null;
    setStatus(`more than ${mostPages} pages are open, so this one was disconnected: reload it to continue`, true);
  }));
  // A reopened stream sends every curve from its beginning.
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
