// Samples of one run by evaluation: texts that its model generated, and held-out texts and images with its predictions.

/** The step whose samples are shown, by run; the newest for other runs. */
const sampleSteps = new Map();

/** The section of the view: a slider over the evaluations that have samples, and the samples of one of them. */
const samplesPart = (id, samples) => {
  const known = samples.filter((sample) => isNumber(sample.step));
  const steps = [...new Set(known.map((sample) => sample.step))].sort((a, b) => a - b);
  if (!steps.length) return null;
  const content = make('div');
  const words = make('span');
  const show = (place) => {
    const step = steps[place];
    const own = known.filter((sample) => sample.step === step);
    words.textContent = `step ${count(step)}${place === steps.length - 1 ? ', the newest' : ''}`;
    replace(content, sampleGrid(id, own.filter((sample) => sample.predicted !== undefined)), sampleTexts(own.filter((sample) => sample.predicted === undefined)));
  };
  const chosen = steps.indexOf(sampleSteps.get(id));
  const place = chosen < 0 ? steps.length - 1 : chosen;
  const slider = make('input', {
    type: 'range', min: 0, max: steps.length - 1, value: String(place), 'aria-label': 'Evaluation whose samples are shown',
    oninput: (event) => {
      const at = Number(event.target.value);
      // At its end the slider follows the run.
      if (at === steps.length - 1) sampleSteps.delete(id); else sampleSteps.set(id, steps[at]);
      show(at);
    },
  });
  show(place);
  const tools = make('div', { class: 'tools' }, make('label', {}, steps.length > 1 ? slider : null, words));
  const section = part('Samples', `${count(known.length)} at ${count(steps.length)} ${steps.length === 1 ? 'evaluation' : 'evaluations'}`, tools, content);
  section.classList.add('samples');
  return section;
};

const sampleTexts = (samples) => (samples.length ? make('ul', { class: 'texts' }, samples.map((sample) => make('li', {},
  make('span', { class: 'faint' }, sample.prompt ?? ''), /^\s/.test(sample.text ?? '') ? '' : '  ', sample.text ?? ''))) : null);

/** Held-out examples with the predicted class, its probability, and whether it is right. */
const sampleGrid = (id, samples) => {
  if (!samples.length) return null;
  const right = samples.filter((sample) => sample.is_right).length;
  return [make('p', { class: 'faint' }, `${count(right)} of ${count(samples.length)} right`), make('ul', { class: 'examples' }, samples.map((sample) => make('li', { class: sample.is_right ? 'right' : 'wrong' },
    sample.image ? make('img', {
      src: `/api/sample?id=${encodeURIComponent(id)}&image=${encodeURIComponent(sample.image)}`, alt: `Held-out image ${sample.image}`, loading: 'lazy',
    }) : make('p', { title: sample.prompt ?? '' }, sample.prompt ?? ''),
    make('b', {}, `${sample.is_right ? '✓' : '✗'} ${sample.predicted}`), make('span', {}, percent(sample.probability, 0)),
    sample.is_right || sample.truth === undefined ? null : make('span', { class: 'truth' }, `is ${sample.truth}`))))];
};
