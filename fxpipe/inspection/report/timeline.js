// What every worker does when: the simulated run, and beneath it the measured one, on one axis of time.

const KINDS = ["wait", "data", "save", "evaluate", "receive", "send", "F", "B", "W", "predict", "update"]; // the last are drawn on top
const ACTIONS = ["F", "B", "W"];
const LABELS = 300; // that are written into spans at once

function timelineSection(host) {
  const panels = [
    facts.timeline && { name: "simulated", ...facts.timeline },
    facts.run?.timeline && { name: "measured", ...facts.run.timeline },
  ].filter((panel) => panel && panel.spans.length);
  for (const panel of panels) prepare(panel);
  const view = new Timeline(host, panels);
  figure(host, (width) => view.draw(width), { height: view.height, plotly: true });
}

/** Each worker's spans by their start, so that the one at a time is found at once. */
function prepare(panel) {
  panel.rows = [];
  panel.last = 0;
  panel.spans.forEach((span, i) => {
    (panel.rows[span[0]] ??= []).push(i);
    panel.last = Math.max(panel.last, span[5]);
  });
  panel.rows = Array.from({ length: facts.build.workers }, (_, w) => (panel.rows[w] ?? []).sort((a, b) => panel.spans[a][4] - panel.spans[b][4]));
}

/** "12.3 ms, from 68.0 to 80.3": times as exact as their difference, from seconds. */
function stretch(start, stop) {
  const long = (stop - start) * 1e3;
  const places = long > 0 ? Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(long)))) : 3;
  const time = (t) => (t * 1e3).toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
  return `${ms(long)}, from ${time(start)} to ${time(stop)}`;
}

function spanLines(panel, span) {
  const [worker, kind, minibatch, microbatch, start, stop] = span;
  const action = ACTIONS.includes(kind) ? `${kind}${minibatch}${microbatch ? `.${microbatch}` : ""}` : kind;
  return [`${action} on worker ${worker}, ${panel.name}`,
    missing(minibatch) || minibatch < 0 ? null : `minibatch ${minibatch}${microbatch ? `, microbatch ${microbatch}` : ""}`,
    stretch(start, stop)];
}

class Timeline {
  constructor(host, panels) {
    this.host = host;
    this.panels = panels;
    const workers = facts.build.workers;
    this.row = workers > 24 ? 13 : workers > 8 ? 18 : 28;
    this.height = panels.length * (workers * this.row + 34) + 44;
    this.all = Math.max(...panels.map((p) => p.last));
    this.first = Math.min(this.all, this.opening() * 1.02);
    this.at = null; // what the arrow keys are on: [panel, worker, place in its row]
    const acts = {
      first: () => this.show(0, this.first), all: () => this.show(0, this.all),
      in: () => this.scale(0.5), out: () => this.scale(2), earlier: () => this.move(-0.5), later: () => this.move(0.5),
    };
    byId("zoom").addEventListener("click", (event) => acts[event.target.dataset.do]?.());
    host.addEventListener("pointermove", (event) => this.hover(event));
    host.addEventListener("pointerleave", hideTip);
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("blur", hideTip);
  }

  /** The time that the first minibatches take: what fits into a page without blurring. */
  opening() {
    const least = Math.min(...this.panels.map((p) => p.last));
    const wanted = Math.max(6, Math.min(12, facts.build.workers * 2)) * facts.build.microbatches;
    const ends = this.panels.map((p) => p.spans.filter((s) => s[2] === Math.floor(wanted / facts.build.microbatches) - 1).reduce((m, s) => Math.max(m, s[5]), 0) || p.last);
    return Math.max(...ends, Math.min(least, this.all / 4));
  }

  draw(width) {
    const workers = facts.build.workers;
    const layout = { width, height: this.height, margin: { l: 44, r: 10, t: 22, b: 40 }, annotations: [] };
    const inside = this.height - 62;
    const traces = [];
    this.axes = [];
    const seen = this.range ?? [0, this.first];
    this.panels.forEach((panel, i) => {
      const suffix = i ? i + 1 : "";
      const top = 1 - (i * (workers * this.row + 34)) / inside;
      const bottom = Math.max(0, top - (workers * this.row) / inside);
      const lastOne = i === this.panels.length - 1;
      layout[`yaxis${suffix}`] = axis("", { domain: [bottom, top], range: [workers - 0.5, -0.5], fixedrange: true, tickmode: "linear", tick0: 0, dtick: workers > 24 ? 8 : 1, showgrid: false, anchor: `x${suffix}` });
      layout[`xaxis${suffix}`] = axis(lastOne ? "milliseconds" : "", { anchor: `y${suffix}`, matches: i ? "x" : undefined, range: seen.map((t) => t * 1e3), showticklabels: lastOne, minallowed: 0, maxallowed: this.all * 1.02e3 });
      layout.annotations.push({ text: `<b>${panel.name}</b>, by worker`, xref: "paper", yref: "paper", x: 0, y: top, xanchor: "left", yanchor: "bottom", showarrow: false, yshift: 1 });
      traces.push(...this.traces(panel, suffix));
      traces.push(this.labelTrace(suffix, "ink"), this.labelTrace(suffix, "white"), this.labelTrace(suffix, "black"));
      this.axes.push(suffix);
    });
    plot(this.host, traces, layout, { doubleClick: false });
    if (!this.bound) {
      this.bound = true;
      this.host.on("plotly_relayout", () => this.moved());
      this.host.on("plotly_doubleclick", () => this.show(0, this.all));
    }
    this.label();
  }

  /** One trace for all spans of a kind and a colour: as many paths as there are styles, not as there are spans. */
  traces(panel, suffix) {
    const made = new Map();
    for (const [worker, kind, , , start, stop] of panel.spans) {
      const style = `${KINDS.indexOf(kind)} ${worker % 8}`;
      const trace = made.get(style) ?? { kind, worker, x: [], y: [] };
      made.set(style, trace);
      const half = kind === "wait" ? 0.07 : 0.42;
      if (trace.x.length) { trace.x.push(null); trace.y.push(null); }
      trace.x.push(start * 1e3, stop * 1e3, stop * 1e3, start * 1e3, start * 1e3);
      trace.y.push(worker - half, worker - half, worker + half, worker + half, worker - half);
    }
    return [...made.entries()].sort((a, b) => parseInt(a[0], 10) - parseInt(b[0], 10)).map(([, { kind, worker, x, y }]) => ({
      type: "scatter", mode: "lines", fill: "toself", x, y, xaxis: `x${suffix}`, yaxis: `y${suffix}`, meta: kind, hoverinfo: "skip",
      fillcolor: looks.fills[kind][worker % 8].color, line: { width: kind === "wait" ? 0 : 0.6, simplify: false },
      fillpattern: looks.fills[kind][worker % 8].pattern.shape ? looks.fills[kind][worker % 8].pattern : undefined,
    }));
  }

  labelTrace(suffix, shade) {
    return { type: "scatter", mode: "text", x: [], y: [], text: [], xaxis: `x${suffix}`, yaxis: `y${suffix}`, hoverinfo: "skip", textfont: { size: 10.5 }, meta: `label ${shade}`, cliponaxis: true };
  }

  /** Write into the spans that are wide enough what they are. */
  label() {
    const [from, to] = this.seen();
    const pixels = (this.host.clientWidth - 54) / (to - from);
    const update = { x: [], y: [], text: [], "textfont.color": [] };
    const which = [];
    this.panels.forEach((panel, i) => {
      const shades = { ink: [], white: [], black: [] };
      let written = 0;
      if (this.row >= 18) {
        for (const span of panel.spans) {
          const [worker, kind, minibatch, microbatch, start, stop] = span;
          if (!ACTIONS.includes(kind) || stop < from || start > to || written >= LABELS) continue;
          const name = `${kind}${minibatch}${microbatch ? `.${microbatch}` : ""}`;
          const space = Math.min(stop, to) - Math.max(start, from);
          if (space * pixels < name.length * 6.6 + 6) continue;
          written += 1;
          shades[kind === "F" ? "ink" : textOn(worker) === "#ffffff" ? "white" : "black"].push([(Math.max(start, from) + space / 2) * 1e3, worker, name]);
        }
      }
      const inks = { ink: dark() ? "#e9ebee" : "#16191d", white: "#ffffff", black: "#111111" };
      for (const [shade, places] of Object.entries(shades)) {
        which.push(this.host.data.findIndex((t) => t.meta === `label ${shade}` && t.xaxis === `x${this.axes[i]}`));
        update.x.push(places.map((p) => p[0]));
        update.y.push(places.map((p) => p[1]));
        update.text.push(places.map((p) => p[2]));
        update["textfont.color"].push(inks[shade]);
      }
    });
    window.Plotly.restyle(this.host, update, which);
  }

  seen() {
    return this.host.layout.xaxis.range.map((t) => t / 1e3);
  }

  moved() {
    this.range = this.seen();
    hideTip();
    this.label();
  }

  show(from, to) {
    startPlotly();
    const width = Math.min(to - from, this.all * 1.01);
    const start = Math.min(Math.max(0, from), this.all * 1.01 - width);
    window.Plotly.relayout(this.host, { "xaxis.range": [start * 1e3, (start + width) * 1e3] });
  }

  scale(factor) {
    const [from, to] = this.seen();
    const middle = this.at ? this.middle() : (from + to) / 2;
    this.show(middle - ((to - from) * factor) / 2, middle + ((to - from) * factor) / 2);
  }

  move(part) {
    const [from, to] = this.seen();
    this.show(from + (to - from) * part, to + (to - from) * part);
  }

  middle() {
    const span = this.span();
    return (span[4] + span[5]) / 2;
  }

  span() {
    const [panel, worker, place] = this.at;
    return this.panels[panel].spans[this.panels[panel].rows[worker][place]];
  }

  /** The last span of a worker that begins before `time`, as a place in its row; -1 if there is none. */
  find(panel, worker, time) {
    const row = panel.rows[worker];
    let [low, high] = [-1, row.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (panel.spans[row[middle]][4] <= time) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** What is told of a time in which a worker has no span; `place` is its last that began before. */
  idleLines(panel, worker, place) {
    const row = panel.rows[worker];
    const from = greatest([0, ...row.slice(0, place + 1).map((i) => panel.spans[i][5])]);
    const next = panel.spans[row[place + 1]];
    const simulated = panel.name === "simulated";
    return [`worker ${worker}, ${panel.name}`, next ? `${simulated ? "waits" : "between actions"} ${stretch(from, next[4])}`
      : `nothing more ${simulated ? "simulated" : "shown"} after ${ms(from * 1e3)}`];
  }

  hover(event) {
    const layout = this.host._fullLayout;
    if (!layout) return;
    const box = this.host.getBoundingClientRect();
    for (const [i, panel] of this.panels.entries()) {
      const [x, y] = [layout[`xaxis${this.axes[i]}`], layout[`yaxis${this.axes[i]}`]];
      const across = event.clientX - box.left - x._offset;
      const down = event.clientY - box.top - y._offset;
      if (across < 0 || across > x._length || down < 0 || down > y._length) continue;
      const worker = Math.floor((down / y._length) * facts.build.workers);
      const time = x.p2l(across) / 1e3;
      const place = this.find(panel, worker, time);
      const span = place >= 0 && panel.spans[panel.rows[worker][place]];
      if (span && time <= span[5]) showTip(spanLines(panel, span), event.clientX, event.clientY);
      else showTip(this.idleLines(panel, worker, place), event.clientX, event.clientY);
      return;
    }
    hideTip();
  }

  key(event) {
    if (event.key === "+" || event.key === "-") return this.scale(event.key === "+" ? 0.5 : 2);
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!step || !this.host._fullLayout) return undefined;
    event.preventDefault();
    this.at = this.at ? this.next(step) : [0, 0, Math.max(0, this.find(this.panels[0], 0, this.seen()[0]))];
    const span = this.span();
    if (!span) return undefined;
    const [from, to] = this.seen();
    if (span[5] < from || span[4] > to) this.show(this.middle() - (to - from) / 2, this.middle() + (to - from) / 2);
    const [panel] = this.at;
    const layout = this.host._fullLayout;
    const [x, y] = [layout[`xaxis${this.axes[panel]}`], layout[`yaxis${this.axes[panel]}`]];
    const box = this.host.getBoundingClientRect();
    return showTip(spanLines(this.panels[panel], span), box.left + x._offset + x.l2p(this.middle() * 1e3), box.top + y._offset + y.l2p(span[0]), true);
  }

  next([down, right]) {
    let [panel, worker, place] = this.at;
    const here = this.middle();
    if (right) return [panel, worker, Math.min(this.panels[panel].rows[worker].length - 1, Math.max(0, place + right))];
    const rows = this.panels.flatMap((p, i) => p.rows.map((row, w) => [i, w, row.length])).filter((r) => r[2]);
    const now = rows.findIndex(([i, w]) => i === panel && w === worker);
    [panel, worker] = rows[Math.min(rows.length - 1, Math.max(0, now + down))];
    place = Math.max(0, this.find(this.panels[panel], worker, here));
    return [panel, worker, place];
  }
}

if (byId("spans")) timelineSection(byId("spans"));
