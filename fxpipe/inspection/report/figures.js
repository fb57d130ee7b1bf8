// When figures are drawn: those near the window at once, the others when the page is idle, all before it is printed.

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
  document.head.append(h("script", null, byId("plotly").textContent));
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
    figures.forEach((made) => { made.width = 0; paint(made, PAPER); });
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

/** Draw or redraw a chart. Its text, grid and background take their colours from the page's style. */
function plot(host, traces, layout, config) {
  const coarse = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page, it does not zoom
  window.Plotly.react(
    host,
    traces,
    {
      autosize: false,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12 },
      margin: { l: 56, r: 12, t: 16, b: 40 },
      showlegend: false,
      hovermode: "closest",
      dragmode: coarse ? false : "zoom",
      uirevision: "kept",
      ...layout,
    },
    { displaylogo: false, displayModeBar: false, showTips: false, ...config },
  );
  host.querySelectorAll(".main-svg").forEach((svg) => svg.setAttribute("aria-hidden", "true")); // the label tells it
}

const axis = (title, more) => ({ title: { text: title, standoff: 8 }, zeroline: false, automargin: false, ...more });
