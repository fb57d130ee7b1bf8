// How kinds of time look in every chart: the worker gives the colour, the kind its brightness and pattern.

const MARKS = {
  F: { name: "forward (F)", opacity: 0.5 },
  B: { name: "backward (B)", opacity: 1 },
  W: { name: "weight gradients (W)", opacity: 1, shape: "-" },
  predict: { name: "predict", opacity: 0.5, shape: "x" },
  update: { name: "update", opacity: 1, shape: "x" },
  recompute: { name: "recompute", opacity: 0.5, shape: "-" },
  exposed: { name: "communication", opacity: 0.15, shape: "/" },
  send: { name: "send", opacity: 0.15, shape: "/" },
  receive: { name: "receive", opacity: 0.15, shape: "\\" },
  wait: { name: "wait", opacity: 0.12 },
  data: { name: "data", opacity: 0.15, shape: "|" },
  evaluate: { name: "evaluate", opacity: 0.5, shape: "|" },
  other: { name: "other", opacity: 0.15, shape: "." },
};

/** The pattern of a kind as Plotly wants it; on full colour it is white, on pale colour the colour itself. */
function pattern(kind, worker) {
  const { opacity, shape } = MARKS[kind];
  const line = opacity === 1 ? "rgba(255,255,255,0.8)" : colour(worker);
  return { shape: shape ?? "", fgcolor: line, bgcolor: tint(worker, opacity), size: 6, solidity: 0.3 };
}

/** The key of a chart: every kind in it, in grey, since colour tells the worker. */
function key(kinds) {
  return h("ul", { class: "key", "aria-label": "Key" }, kinds.map((kind) => h("li", null, swatch(kind), MARKS[kind].name)));
}

function swatch(kind) {
  const { opacity, shape } = MARKS[kind];
  const lines = { "/": "M0 14L7 0M7 14L14 0M14 14L21 0M21 14L26 4", "\\": "M0 0L7 14M7 0L14 14M14 0L21 14M21 0L26 10", "-": "M0 4H26M0 10H26", "|": "M4 0V14M10 0V14M16 0V14M22 0V14", x: "M0 0L13 14M13 14L26 0M0 14L13 0M13 0L26 14", ".": "M5 5h1M12 9h1M19 5h1M22 11h1M5 11h1" };
  return g("svg", { width: 26, height: 14, "aria-hidden": "true" },
    g("rect", { width: 26, height: 14, rx: 2, fill: COLOURS[7], "fill-opacity": opacity }),
    shape ? g("path", { d: lines[shape], stroke: opacity === 1 ? "#fff" : COLOURS[7], "stroke-width": 1.4 }) : null);
}

/** The swatch of nothing at all. */
const blank = () => g("svg", { width: 26, height: 14, "aria-hidden": "true" }, g("rect", { x: 0.5, y: 0.5, width: 25, height: 13, rx: 2, fill: "none", stroke: COLOURS[7] }));

/** Bars of one kind, for each colour a trace; "x" or "y" of `way` is the axis of values. */
function bars(kind, workers, values, { way = "y", format = ms, ...more } = {}) {
  const across = way === "x" ? "y" : "x";
  return [...new Set(workers.map((w) => w % 8))].map((same) => {
    const own = workers.map((_, i) => i).filter((i) => workers[i] % 8 === same);
    return {
      type: "bar", meta: kind, orientation: way === "x" ? "h" : "v", [across]: own.map((i) => workers[i]), [way]: own.map((i) => values[i]),
      hovertext: own.map((i) => `worker ${workers[i]}: ${MARKS[kind].name} ${format(values[i])}`), hoverinfo: "text", textposition: "none",
      marker: { color: tint(same, MARKS[kind].opacity), pattern: { ...pattern(kind, same), fillmode: "overlay" }, line: { width: 0 } },
      ...more,
    };
  });
}

// How lines of one colour differ: of workers whose colours repeat, or of one worker.
const STROKES = ["solid", "7px,4px", "2px,3px", "7px,3px,2px,3px", "13px,4px", "13px,3px,2px,3px", "7px,2px,2px,2px,2px,2px", "4px,2px"];
const stroke = (worker, nth = Math.floor(worker / 8)) => ({ color: colour(worker), dash: STROKES[nth % 8] });

/** The key of a chart of lines, each {name, ...stroke}. */
const lineKey = (label, lines) => h("ul", { class: "key", "aria-label": label }, lines.map((line) => h("li", null,
  g("svg", { width: 34, height: 8, "aria-hidden": "true" }, g("line", { x1: 0, x2: 34, y1: 4, y2: 4, stroke: line.color, "stroke-width": 2.5, "stroke-dasharray": line.dash === "solid" ? null : line.dash.replaceAll("px", "") })),
  line.name)));

const workerKey = (workers) => lineKey("Workers", workers.map((w) => ({ name: `worker ${w}`, ...stroke(w) })));
