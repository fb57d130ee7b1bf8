// The facts, numbers as people read them, and the colours of workers.

const facts = JSON.parse(byId("facts").textContent);
const NONE = "–";
const COLOURS = ["#4477AA", "#EE7733", "#228833", "#CC3311", "#AA3377", "#33BBEE", "#CCBB44", "#777777"];
const DARK_TEXT = new Set([1, 5, 6, 7]); // the colours on which black is easier to read than white

const colour = (worker) => COLOURS[worker % 8];
const textOn = (worker) => (DARK_TEXT.has(worker % 8) ? "#111111" : "#ffffff");

function tint(worker, opacity) {
  const hex = colour(worker);
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${red},${green},${blue},${opacity})`;
}

/** Three digits that count, or all before the point: 0.0123, 1.23, 12.3, 1,234. */
function digits(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e15 || size < 1e-5) return value.toExponential(2);
  if (size >= 100) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return value.toPrecision(3);
}

const missing = (value) => value === null || value === undefined || Number.isNaN(value);
const known = (format) => (value) => (missing(value) ? NONE : format(value));

const count = known((value) => value.toLocaleString("en"));
const number = known(digits);
const ms = known((value) => `${digits(value)} ms`);
const seconds = known((value) => `${digits(value)} s`);
const share = known((value) => `${(100 * value).toFixed(1)}%`);
const text = known(String);
const list = known((values) => values.join(", ") || NONE);

const bytes = known((value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < 4; unit++) value /= 1024;
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
});

/** The value at a path into the facts, "workers.0.forward_ms"; undefined where there is none. */
function at(path) {
  return path.split(".").reduce((value, key) => (value === null || value === undefined ? undefined : value[key]), facts);
}

/** An element that shows one of the facts, with its path and its raw value. */
function shown(tag, path, format, properties) {
  const value = at(path);
  const raw = missing(value) ? null : typeof value === "object" ? JSON.stringify(value) : value;
  return h(tag, { "data-fact": path, "data-value": raw, ...properties }, format(value));
}

/** A number that is computed from facts. */
const derived = (tag, value, format, properties) =>
  h(tag, { "data-value": missing(value) ? null : value, ...properties }, format(value));

/** A worker, by number and colour. */
const chip = (worker, title) =>
  h("span", { class: "chip", title: title ?? `worker ${worker}`, style: `background:${colour(worker)};color:${textOn(worker)}` },
    String(worker));

/** " under gpipe · latest", where what was simulated is not of the build's own schedule and policy; else nothing. */
function elsewhere() {
  const { build, forecast, grid } = facts;
  const { schedule, policy } = forecast ?? grid ?? build;
  return schedule === build.schedule && policy === build.policy ? "" : ` under ${schedule} · ${policy}`;
}

const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many ?? `${one}s`}`;
const moduleName = (row) => (row.path === null ? row.name : row.path || facts.build.model || "the model");
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
/** The greatest, also of more values than a call takes arguments. */
const greatest = (values) => values.reduce((most, value) => (value > most ? value : most), -Infinity);
