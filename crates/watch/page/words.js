// Formats numbers for people.

const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);

const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString('en-US') : '–');

/** A number with a unit: 1,234 as 1.23K. */
const short = (value) => {
  if (!isNumber(value)) return '–';
  const size = Math.abs(value);
  for (const [unit, scale] of [['T', 1e12], ['G', 1e9], ['M', 1e6], ['K', 1e3]]) {
    if (size >= scale) return `${Number((value / scale).toPrecision(3))}${unit}`;
  }
  return number(value);
};

/** A number with four significant digits. */
const number = (value) => {
  if (!isNumber(value)) return '–';
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (size >= 1e5) return count(value);
  if (size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
};

const loss = (value) => (isNumber(value) ? value.toFixed(4) : '–');
const percent = (value, digits = 1) => (isNumber(value) ? `${(100 * value).toFixed(digits)}%` : '–');
const milliseconds = (value) => {
  if (!isNumber(value)) return '–';
  return value > 0 && value < 0.001 ? '< 0.001 ms' : `${Number(value.toPrecision(3))} ms`;
};

const bytes = (value) => {
  if (!isNumber(value)) return '–';
  for (const [unit, scale] of [['TiB', 2 ** 40], ['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]]) {
    if (Math.abs(value) >= scale) return `${(value / scale).toFixed(1)} ${unit}`;
  }
  return `${value} B`;
};

const duration = (seconds) => {
  if (!isNumber(seconds)) return '–';
  if (seconds < 60) return `${Number(seconds.toFixed(seconds < 10 ? 1 : 0))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
};

const ago = (time) => (isNumber(time) ? `${duration(Math.max(0, Date.now() / 1000 - time))} ago` : '–');
