// A chart on a canvas: curves with the min/max band they were downsampled from, markers, axes, and a cross-hair that all charts
// share.

/** Shared by all charts: the position of the cross-hair on the x axis, and the zoomed range. */
const pointer = { x: null, zoom: null, charts: new Set() };

const redrawAll = () => pointer.charts.forEach((chart) => chart.schedule(true));
/** Moves the cross-hair without redrawing the curves. */
const pointAll = () => pointer.charts.forEach((chart) => chart.schedule(false));

/** Ticks at round numbers between two ends. */
const ticks = (low, high, most, isLog, isBytes) => {
  if (!(high > low)) return [low];
  if (isBytes) {
    const unit = 2 ** (10 * Math.floor(Math.log2(Math.max(high, 1)) / 10));
    return ticks(low / unit, high / unit, most, false).map((value) => value * unit);
  }
  if (isLog) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const digit of high / low > 1e3 ? [1] : high / low > 10 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9]) {
        const at = digit * 10 ** power;
        if (at >= low && at <= high) found.push(at);
      }
    }
    const every = Math.ceil(found.length / most);
    return found.length > 1 ? found.filter((_, index) => index % every === 0) : [low, high];
  }
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((digit) => digit * power).find((size) => size >= rough) ?? 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
};

/** Binary search: the index of the first value in an ascending column that is at least this. */
const lowerBound = (column, value) => {
  let low = 0;
  let high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
};

/** An exponential moving average over `span` tokens, in which a value is weighted by its tokens; the same as in reports of runs. */
const smoothed = (values, tokens, span) => {
  if (!(span > 0)) return values;
  let [sum, weight, before] = [0, 0, 0];
  return values.map((value, index) => {
    const fade = Math.exp(-Math.max(0, tokens[index] - before) / span);
    before = tokens[index];
    if (!isNumber(value)) return null;
    sum = fade * sum + (1 - fade) * value;
    weight = fade * weight + (1 - fade);
    return weight > 0 ? sum / weight : value;
  });
};

/** The finite numbers among these. */
const finite = (values) => values.filter(isNumber);
const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

class Chart {
  /** `title`, a faint `aside`, whether it is `wide`, and `data()`, which returns the current curves, markers, scales and formats. */
  constructor({ title, aside, wide, data }) {
    this.data = data;
    this.canvas = make('canvas', { tabindex: 0, role: 'img', 'aria-label': title });
    this.aside = make('span', { class: 'faint' }, aside ?? '');
    this.reading = make('span', { class: 'read' });
    this.element = make('section', { class: wide ? 'chart wide' : 'chart' },
      make('header', {}, make('h3', {}, title), this.aside, this.reading), this.canvas);
    this.canvas.addEventListener('pointermove', (event) => this.point(event));
    this.canvas.addEventListener('pointerleave', () => { pointer.x = null; tip.hide(); pointAll(); });
    this.canvas.addEventListener('pointerdown', (event) => { if (event.pointerType === 'mouse') this.drag = event.offsetX; });
    this.canvas.addEventListener('pointerup', (event) => this.zoom(event));
    this.canvas.addEventListener('dblclick', () => { pointer.zoom = null; redrawAll(); });
    this.canvas.addEventListener('keydown', (event) => this.key(event));
    this.canvas.addEventListener('blur', () => { pointer.x = null; tip.hide(); pointAll(); });
    this.observer = new ResizeObserver(() => this.schedule(true));
    this.observer.observe(this.canvas);
    pointer.charts.add(this);
    this.schedule(true);
  }

  remove() {
    this.observer.disconnect();
    pointer.charts.delete(this);
    this.element.remove();
  }

  /** Draws with the next frame; a chart outside the viewport waits until it is scrolled into view. */
  schedule(isNew) {
    this.isStale ||= isNew;
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      const box = this.canvas.getBoundingClientRect();
      if (!this.element.isConnected || box.bottom < 0 || box.top > innerHeight) return;
      if (this.isStale) { this.isStale = false; this.draw(box); }
      this.cross();
    });
  }

  valueAt(pixel) {
    const { left, width, x } = this.frame;
    return x[0] + ((pixel - left) / width) * (x[1] - x[0]);
  }

  point(event) {
    if (!this.frame) return;
    pointer.x = this.valueAt(event.offsetX);
    this.showTip(event.clientX, event.clientY);
    this.dragTo = this.drag === undefined ? undefined : event.offsetX;
    pointAll();
  }

  /** Shows the values under the cross-hair in a tooltip. */
  showTip(x, y) {
    const { curves, marks, format, formatX } = this.shown;
    const all = curves.concat((marks ?? []).map((mark) => ({ ...mark, mean: mark.y })));
    const rows = all.map((curve) => ({ curve, value: this.valueOf(curve, pointer.x) })).filter((row) => isNumber(row.value));
    if (!rows.length) { tip.hide(); return; }
    tip.show(x, y, (this.shown.formatTip ?? formatX)(pointer.x), rows.map(({ curve, value }) => [curve.colour, curve.name, format(value)]));
  }

  valueOf(curve, x) {
    const column = curve.x;
    if (!column.length || x < column[0] || x > column.at(-1) * 1.02) return null;
    const after = Math.min(lowerBound(column, x), column.length - 1);
    const at = after > 0 && x - column[after - 1] < column[after] - x ? after - 1 : after;
    return (curve.own ?? curve.smooth ?? curve.mean)[at];
  }

  zoom(event) {
    if (this.drag !== undefined && Math.abs(event.offsetX - this.drag) > 6) {
      pointer.zoom = [this.valueAt(this.drag), this.valueAt(event.offsetX)].sort((a, b) => a - b);
      refine();
    }
    this.drag = undefined;
    this.dragTo = undefined;
    redrawAll();
  }

  key(event) {
    const steps = { ArrowLeft: -0.02, ArrowRight: 0.02 }[event.key];
    if (event.key === 'Escape') { pointer.zoom = null; pointer.x = null; tip.hide(); redrawAll(); }
    if (!steps || !this.frame) return;
    event.preventDefault();
    const [low, high] = this.frame.x;
    pointer.x = Math.min(high, Math.max(low, (pointer.x ?? (low + high) / 2) + steps * (high - low)));
    const box = this.canvas.getBoundingClientRect();
    this.showTip(box.left + this.frame.left + (this.frame.width * (pointer.x - low)) / (high - low), box.top + 20);
    pointAll();
  }

  /** The ranges of both axes. The first steps of a run do not extend the axis of values. */
  scales() {
    const { curves, marks, isLog, domain, floor } = this.shown;
    const ends = curves.concat(marks ?? []).filter((curve) => curve.x.length);
    const whole = [least(ends.map((curve) => curve.x[0])), most(ends.map((curve) => curve.x.at(-1)))];
    const x = pointer.zoom && pointer.zoom[0] < whole[1] ? pointer.zoom : whole;
    const values = [];
    for (const curve of curves) {
      const from = Math.max(lowerBound(curve.x, x[0]), pointer.zoom ? 0 : Math.ceil(curve.x.length * 0.02));
      const to = lowerBound(curve.x, x[1]) + 1;
      const line = curve.smooth ?? curve.mean;
      const isNoisy = curve.smooth && curve.smooth !== curve.mean;
      for (let index = Math.min(from, curve.x.length - 1); index < Math.min(to, curve.x.length); index += 1) {
        values.push(line[index]);
        if (!isNoisy) values.push(curve.least?.[index], curve.most?.[index]);
        else values.push(curve.mean[index]);
      }
    }
    for (const mark of marks ?? []) mark.y.forEach((value, index) => { if (mark.x[index] >= x[0] && mark.x[index] <= x[1]) values.push(value); });
    if (isNumber(floor)) values.push(floor);
    const usable = finite(values).filter((value) => !isLog || value > 0);
    let [low, high] = [least(usable), most(usable)];
    if (!usable.length) [low, high] = isLog ? [1, 10] : [0, 1];
    if (domain) [low, high] = [Math.min(low, domain[0] ?? low), Math.max(high, domain[1] ?? high)];
    if (low === high) [low, high] = isLog ? [low / 1.2, high * 1.2] : [low - Math.abs(low) * 0.1 - 1e-9, high + Math.abs(high) * 0.1 + 1e-9];
    if (isLog) { const room = (high / low) ** 0.05; return { x, y: [low / room, high * room] }; }
    const room = (high - low) * 0.06;
    return { x, y: [domain && low >= domain[0] ? Math.max(domain[0], low - room) : low - room, high + room] };
  }

  /** Draws everything but the cross-hair onto an off-screen canvas. */
  draw(box) {
    this.shown = this.data();
    const { curves, marks, isLog, format, formatX, floor, isArea } = this.shown;
    const ratio = window.devicePixelRatio || 1;
    const [wide, high] = [Math.round(box.width * ratio), Math.round(box.height * ratio)];
    if (!wide || !high) return;
    if (this.canvas.width !== wide || this.canvas.height !== high) { this.canvas.width = wide; this.canvas.height = high; }
    this.picture ??= document.createElement('canvas');
    this.picture.width = wide; this.picture.height = high;
    const pen = this.picture.getContext('2d');
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, box.width, box.height);
    if (!curves.concat(marks ?? []).some((curve) => curve.x.length)) { this.frame = null; return; }
    const style = getComputedStyle(document.documentElement);
    const ink = (name) => style.getPropertyValue(name);
    const scales = this.scales();
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const rows = ticks(scales.y[0], scales.y[1], box.height / 46, isLog, format === bytes);
    const left = Math.ceil(most(rows.map((value) => pen.measureText(format(value)).width))) + 10;
    const frame = { left, top: 8, width: box.width - left - 8, height: box.height - 30, x: scales.x, y: scales.y };
    this.frame = frame;
    const toX = (value) => frame.left + (frame.width * (value - frame.x[0])) / (frame.x[1] - frame.x[0] || 1);
    const of = isLog ? Math.log : (value) => value;
    const [bottom, top] = frame.y.map(of);
    const toY = (value) => frame.top + frame.height * (1 - (of(value) - bottom) / (top - bottom || 1));
    pen.lineWidth = 1;
    pen.textBaseline = 'middle';
    for (const value of rows) {
      const y = Math.round(toY(value)) + 0.5;
      pen.strokeStyle = ink('--grid');
      pen.beginPath(); pen.moveTo(frame.left, y); pen.lineTo(frame.left + frame.width, y); pen.stroke();
      pen.fillStyle = ink('--faint'); pen.textAlign = 'right';
      pen.fillText(format(value), frame.left - 7, y);
    }
    pen.textBaseline = 'top';
    for (const value of ticks(frame.x[0], frame.x[1], frame.width / 90, false)) {
      const [x, text] = [toX(value), formatX(value)];
      const half = pen.measureText(text).width / 2;
      pen.textAlign = x + half > frame.left + frame.width + 6 ? 'right' : x - half < frame.left - 4 ? 'left' : 'center';
      pen.fillText(text, pen.textAlign === 'right' ? frame.left + frame.width + 6 : x, frame.top + frame.height + 7);
    }
    pen.save();
    pen.beginPath(); pen.rect(frame.left - 5, frame.top - 5, frame.width + 10, frame.height + 10); pen.clip();
    if (isNumber(floor)) {
      pen.strokeStyle = ink('--faint'); pen.setLineDash([2, 3]);
      pen.beginPath(); pen.moveTo(frame.left, toY(floor)); pen.lineTo(frame.left + frame.width, toY(floor)); pen.stroke();
      pen.setLineDash([]);
    }
    for (const curve of curves) this.curve(pen, curve, toX, toY, isArea, frame);
    for (const mark of marks ?? []) this.marks(pen, mark, toX, toY, ink('--page'));
    pen.restore();
  }

  /** Draws the off-screen canvas, the range that is being selected, and the cross-hair. */
  cross() {
    const pen = this.canvas.getContext('2d');
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (!this.picture?.width) return;
    pen.drawImage(this.picture, 0, 0);
    const frame = this.frame;
    if (!frame) return;
    const ratio = window.devicePixelRatio || 1;
    const style = getComputedStyle(document.documentElement);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (this.dragTo !== undefined) {
      pen.fillStyle = style.getPropertyValue('--accent'); pen.globalAlpha = 0.12;
      pen.fillRect(this.drag, frame.top, this.dragTo - this.drag, frame.height);
      pen.globalAlpha = 1;
    }
    if (pointer.x !== null && pointer.x >= frame.x[0] && pointer.x <= frame.x[1]) {
      const x = Math.round(frame.left + (frame.width * (pointer.x - frame.x[0])) / (frame.x[1] - frame.x[0] || 1)) + 0.5;
      pen.strokeStyle = style.getPropertyValue('--faint'); pen.globalAlpha = 0.5; pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(x, frame.top); pen.lineTo(x, frame.top + frame.height); pen.stroke();
      pen.globalAlpha = 1;
    }
  }

  /** Draws the band of a curve, faintly, and its line. */
  curve(pen, curve, toX, toY, isArea, frame) {
    const { x, mean, smooth, least: low, most: high, colour } = curve;
    const isSmooth = smooth && smooth !== mean;
    const first = Math.max(0, lowerBound(x, frame.x[0]) - 1);
    const last = Math.min(x.length, lowerBound(x, frame.x[1]) + 2);
    pen.strokeStyle = colour; pen.fillStyle = colour; pen.lineJoin = 'round';
    if (low && high) {
      pen.globalAlpha = isArea ? 0.75 : 0.16; pen.beginPath();
      for (let index = first; index < last; index += 1) if (isNumber(high[index])) pen.lineTo(toX(x[index]), toY(high[index]));
      for (let index = last - 1; index >= first; index -= 1) if (isNumber(low[index])) pen.lineTo(toX(x[index]), toY(low[index]));
      pen.fill();
    }
    const line = (values) => {
      let isOpen = false;
      pen.beginPath();
      for (let index = first; index < last; index += 1) {
        if (!isNumber(values[index])) { isOpen = false; continue; }
        if (isOpen) pen.lineTo(toX(x[index]), toY(values[index])); else pen.moveTo(toX(x[index]), toY(values[index]));
        isOpen = true;
      }
      pen.stroke();
    };
    if (isSmooth) { pen.globalAlpha = 0.22; pen.lineWidth = 1; line(mean); }
    pen.globalAlpha = 1; pen.lineWidth = isArea ? 0.8 : 1.7;
    line(smooth ?? mean);
    if (x.length === 1 && isNumber(mean[0])) { pen.beginPath(); pen.arc(toX(x[0]), toY(mean[0]), 3, 0, 7); pen.fill(); }
  }

  /** Draws held-out values as rings on a dashed line. */
  marks(pen, { x, y, colour }, toX, toY, paper) {
    pen.strokeStyle = colour; pen.lineWidth = 1.2; pen.setLineDash([4, 3]);
    pen.beginPath();
    x.forEach((value, index) => { if (isNumber(y[index])) pen.lineTo(toX(value), toY(y[index])); });
    pen.stroke(); pen.setLineDash([]);
    if (x.length > 60) return;
    pen.fillStyle = paper; pen.lineWidth = 1.6;
    x.forEach((value, index) => {
      if (!isNumber(y[index])) return;
      pen.beginPath(); pen.arc(toX(value), toY(y[index]), 3, 0, 7); pen.fill(); pen.stroke();
    });
  }
}

/** The tooltip. */
const tip = (() => {
  const element = make('div', { class: 'tip', hidden: true, 'aria-hidden': 'true' });
  document.body.append(element);
  return {
    show(x, y, title, rows) {
      replace(element, make('div', { class: 'faint' }, title), make('table', {}, rows.slice(0, 12).map(([colour, name, value]) => make('tr', {},
        make('td', {}, make('i', { colour }), name), make('td', {}, value)))));
      element.hidden = false;
      const box = element.getBoundingClientRect();
      element.style.left = `${x + 16 + box.width > innerWidth ? Math.max(4, x - 16 - box.width) : x + 16}px`;
      element.style.top = `${Math.min(y + 14, innerHeight - box.height - 6)}px`;
    },
    hide() { element.hidden = true; },
  };
})();
