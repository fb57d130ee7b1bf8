// What all parts of the page use: the facts, numbers as people read them, drawn elements, the tooltip, what is folded,
// when figures are drawn, and the contents.

const byId = (id) => document.getElementById(id);
const facts = JSON.parse(byId("facts").textContent);
const looks = JSON.parse(byId("looks").textContent); // colours and patterns, see marks.py

const colour = (worker) => looks.colours[worker % 8];
const textOn = (worker) => looks.texts[worker % 8];

/** Three digits that count, or all before the point: 0.0123, 1.23, 12.3, 1,234. */
function digits(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e15 || size < 1e-5) return value.toExponential(2);
  return size >= 100 ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : value.toPrecision(3);
}

const missing = (value) => value === null || value === undefined;
const known = (format) => (value) => (missing(value) ? "–" : format(value));
const ms = known((value) => `${digits(value)} ms`);
const bytes = known((value) => {
  const unit = Math.min(4, Math.max(0, Math.floor(Math.log2(value || 1) / 10)));
  const size = value / 1024 ** unit;
  return `${size.toFixed(unit === 0 || size >= 100 ? 0 : 1)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
});
const plural = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
/** The greatest, also of more values than a call takes arguments. */
const greatest = (values) => values.reduce((most, value) => (value > most ? value : most), -Infinity);

/** g("rect", {x: 1}, "text", child): an element of SVG. Text is always text, never markup. */
function g(tag, properties, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (missing(value) || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => !missing(child) && child !== false));
  return element;
}

// What is folded is text until it is opened: put its elements in the place of that text.
function unfold(script) {
  const template = document.createElement("template");
  template.innerHTML = script.textContent; // made, and escaped, where the page was written
  script.replaceWith(template.content);
}

for (const box of document.querySelectorAll("details")) {
  box.addEventListener("toggle", () => box.open && box.lastElementChild.matches("script") && unfold(box.lastElementChild));
}

const tip = byId("tip");

/** Show `lines`, the first one strong, next to a point of the window. With `spoken`, screen readers say it. */
function showTip(lines, x, y, spoken = false) {
  tip.replaceChildren(...lines.filter(Boolean).map((line, i) => {
    const element = document.createElement(i ? "div" : "strong");
    element.textContent = line;
    return element;
  }));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x + 14), document.documentElement.clientWidth - box.width - 8);
  const below = y + 18 + box.height < window.innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? y + 18 : Math.max(8, y - box.height - 12)}px`;
  if (spoken) byId("live").textContent = tip.textContent && [...tip.children].map((c) => c.textContent).join(", ");
}

let anchor = null; // the element that has the focus and the tooltip, with its lines

function hideTip() {
  tip.hidden = true;
  anchor = null;
}

/** Show the lines of an element that has the focus, and keep them next to it when the page scrolls. */
function tipAt(element, lines) {
  const box = element.getBoundingClientRect();
  const spoken = anchor?.element !== element;
  showTip(lines, box.left + box.width / 2, Math.min(box.bottom, window.innerHeight - 40) - 14, spoken);
  anchor = { element, lines };
}

/** Give `items` one tab stop together; the arrow keys, Home and End go from one to the next. */
function rove(items, describe) {
  items.forEach((item, i) => {
    item.setAttribute("tabindex", i ? -1 : 0);
    item.addEventListener("focus", () => tipAt(item, describe(i)));
    item.addEventListener("blur", hideTip);
    item.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: items.length - 1 };
      if (event.key === "Escape") hideTip();
      if (!(event.key in to)) return;
      event.preventDefault();
      const next = items[Math.min(items.length - 1, Math.max(0, to[event.key]))];
      item.setAttribute("tabindex", -1);
      next.setAttribute("tabindex", 0);
      next.focus();
    });
  });
}

addEventListener("scroll", () => (anchor ? tipAt(anchor.element, anchor.lines) : hideTip()), { passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());

// Figures: those near the window are drawn at once, the others when the page is idle, all before it is printed.

const PAPER = 680; // pixels of A4 between its margins
const figures = [];
let printing = false;

const nearby = new IntersectionObserver(
  (entries) => entries.forEach((entry) => entry.isIntersecting && paint(figures.find((f) => f.host === entry.target))),
  { rootMargin: "150px" },
);

/** Have `draw(width)` make or remake what is in `host`; `height` keeps the room until then. `first`: draw it at once. */
function figure(host, draw, { height = 0, plotly = false, first = false } = {}) {
  host.style.minHeight = `${height}px`;
  const made = { host, draw, plotly, first, width: 0 };
  figures.push(made);
  nearby.observe(host);
  return made;
}

function paint(made, width = made.host.clientWidth) {
  if (width === made.width || width === 0) return;
  if (made.plotly) startPlotly();
  made.width = width;
  made.draw(width);
  made.host.style.minHeight = "";
  made.host.dataset.drawn = "";
  nearby.unobserve(made.host);
}

/** Plotly's script is text until the first chart needs it: so the page itself is there sooner. */
function startPlotly() {
  if (window.Plotly) return;
  const script = document.createElement("script");
  script.textContent = byId("plotly").textContent;
  document.head.append(script);
}

function whenIdle(work) {
  if (window.requestIdleCallback) requestIdleCallback(work, { timeout: 500 });
  else setTimeout(work, 50);
}

function paintTheRest() {
  const next = figures.find((made) => made.width === 0 && made.host.clientWidth);
  if (!next) {
    document.documentElement.dataset.ready = "";
    return;
  }
  paint(next);
  whenIdle(paintTheRest);
}

function startFigures() {
  figures.filter((made) => made.first).forEach((made) => paint(made));
  addEventListener("load", () => whenIdle(paintTheRest));
  let waiting = 0;
  new ResizeObserver(() => {
    clearTimeout(waiting);
    waiting = setTimeout(() => !printing && figures.filter((made) => made.width).forEach((made) => paint(made)), 80);
  }).observe(byId("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  addEventListener("beforeprint", () => {
    printing = true;
    hideTip();
    figures.forEach((made) => { made.width = 0; paint(made, made.host.closest(".panels") ? PAPER / 3 - 16 : PAPER); });
  });
  addEventListener("afterprint", () => {
    printing = false;
    repaint();
  });
}

function repaint() {
  for (const made of figures) {
    if (!made.width) continue;
    made.width = 0;
    paint(made);
  }
}

const dark = () => !printing && matchMedia("(prefers-color-scheme: dark)").matches;

const links = new Map([...document.querySelectorAll("#contents a")].map((link) => [link.hash.slice(1), link]));
const passing = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) {
    links.forEach((link, id) => (id === entry.target.id ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  }
}, { rootMargin: "-20% 0px -70% 0px" });
document.querySelectorAll("main > section").forEach((part) => passing.observe(part));
