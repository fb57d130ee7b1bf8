// A run: where its time went, how its loss fell, how fast it was, how stale its weights were.

const SPENT = ["F", "B", "predict", "update", "send", "receive", "wait", "data", "other"];
const STEPS = 400; // from which on a mean is drawn over the single steps
const KEYED = 32; // lines that are named above their chart
const POINTS = 1500; // that a curve is drawn with

function runSection(host) {
  const { run } = facts;
  if (!run) return put(host, absent("No run was given: ", h("code", null, "fxpipe inspect build/ --run DIR --html report.html"), " shows one beside its forecast."));
  put(host, runWords(run));
  if (run.time_losses?.length) {
    put(host, h("h3", null, "Where time was lost"), h("ol", { class: "losses" }, run.time_losses.map((l, i) =>
      h("li", null, missing(l.worker) ? null : chip(l.worker), l.text, " ", shown("span", `run.time_losses.${i}.share`, share, { class: "quiet" })))));
  }
  const { metrics } = run;
  if (metrics?.step?.length) {
    put(host, h("div", { class: "two" }, curve("Loss", "loss", metrics), curve("Samples a second", "samples_per_second", metrics)),
      fold("The steps as a table", () => metricsTable(metrics)));
  } else put(host, absent("The run left no steps in metrics.jsonl."));
  spent(host, run);
  staleness(host, run);
}

function runWords(run) {
  const parts = [["folder", "run.folder", text], ["steps", "run.steps", count], ["samples a step", "run.samples", count], ["seconds", "run.seconds", number], ["transport", "run.transport", text],
    ["device", "run.device", text], ["threads", "run.threads", count], ["seed", "run.seed", text], ...Object.keys(run.evaluation ?? {}).map((name) => [`held out ${name}`, `run.evaluation.${name}`, number])];
  return h("dl", { class: "settings" }, parts.filter(([, path]) => !missing(at(path))).map(([label, path, format]) => h("div", null, h("dt", null, label), shown("dd", path, format))));
}

const clock = known((value) => value.toFixed(3));

/** A trailing mean over a fiftieth of the steps. */
function smooth(values) {
  const size = Math.max(2, Math.round(values.length / 50));
  const held = [];
  let total = 0;
  return values.map((value) => {
    if (!missing(value)) total += value - (held.push(value) > size ? held[held.length - 1 - size] : 0);
    return held.length ? total / Math.min(size, held.length) : null;
  });
}

/** The points of a curve within a range of x, or of each stretch of it the least and the greatest where they are many. */
function thin(x, y, from, to) {
  let [first, end] = [x.findIndex((v) => v >= from), x.findLastIndex((v) => v <= to) + 1];
  first = Math.max(0, first - 1);
  end = Math.min(x.length, end + 1);
  const stride = Math.ceil((end - first) / POINTS);
  if (stride < 3) return [x.slice(first, end), y.slice(first, end)];
  const kept = [];
  for (let i = first; i < end; i += stride) {
    let [least, most] = [i, i];
    for (let k = i; k < Math.min(end, i + stride); k++) {
      if (y[k] < y[least] || missing(y[least])) least = k;
      if (y[k] > y[most] || missing(y[most])) most = k;
    }
    kept.push(Math.min(least, most), Math.max(least, most));
  }
  return [kept.map((k) => x[k]), kept.map((k) => y[k])];
}

function curve(title, name, metrics) {
  const { step, [name]: values } = metrics;
  const held = values?.filter((v) => !missing(v)) ?? [];
  if (!held.length) return h("div", null, h("h3", null, title), absent(`The steps do not say their ${title.toLowerCase()}.`));
  const many = held.length >= STEPS;
  const drawing = h("div", { class: "chart", role: "img", "aria-label": `${title} over steps ${step[0]} to ${step.at(-1)}: first ${number(held[0])}, last ${number(held.at(-1))}. The table below has the numbers.` });
  const line = (y, more) => ({ type: "scatter", mode: held.length < 3 ? "markers" : "lines", x: step, y, line: { color: "#777777", width: 1.5 }, marker: { color: "#777777" }, hovertemplate: "step %{x}: %{y:.4~g}<extra></extra>", ...more });
  const traces = many
    ? [line(values, { opacity: 0.35, line: { color: "#777777", width: 1 } }), line(smooth(values), { line: { color: "#4C6FE0", width: 2 }, hovertemplate: "mean to step %{x}: %{y:.4~g}<extra></extra>" })]
    : [line(values, { line: { color: "#4C6FE0", width: 2 }, marker: { color: "#4C6FE0", size: 7 } })];
  const whole = traces.map(({ x, y }) => [x, y]);
  const fit = (from, to) => whole.map(([x, y]) => thin(x, y, from, to));
  fit(-Infinity, Infinity).forEach(([x, y], i) => Object.assign(traces[i], { x, y }));
  let bound = !many;
  figure(drawing, (width) => {
    plot(drawing, traces, { width, height: 260, xaxis: axis("step"), yaxis: axis("", { rangemode: name === "loss" ? "normal" : "tozero" }) });
    if (!bound) drawing.on("plotly_relayout", (change) => {
      if (!Object.keys(change).some((key) => key.startsWith("xaxis."))) return; // seen closer, there is more to see
      const fitted = fit(...("xaxis.range[0]" in change ? drawing.layout.xaxis.range : [-Infinity, Infinity]));
      window.Plotly.restyle(drawing, { x: fitted.map((f) => f[0]), y: fitted.map((f) => f[1]) }, fitted.map((_, i) => i));
    });
    bound = true;
  }, { height: 260, plotly: true });
  return h("div", null, h("h3", null, title, h("span", { class: "quiet" }, many ? ", grey each step, blue the mean of a fiftieth of them" : "")), drawing);
}

function metricsTable(metrics) {
  const fields = [["loss", number], ["lr", number], ["grad_norm", number], ["seconds", number], ["samples_per_second", number]].filter(([name]) => metrics[name]?.some((v) => !missing(v)));
  return table("Steps", [{ label: "step", kind: "n" }, ...fields.map(([name]) => ({ label: name.replaceAll("_", " "), kind: "n" }))], metrics.step.length, (i) => [
    shown("td", `run.metrics.step.${i}`, count, { class: "n" }), ...fields.map(([name, format]) => shown("td", `run.metrics.${name}.${i}`, format, { class: "n" }))]);
}

function spent(host, run) {
  put(host, h("h3", null, "What each worker did with its time"));
  const { workers } = run;
  if (!workers?.length) return put(host, absent("run.json is not there or tells nothing of the workers: the run did not end."));
  const used = SPENT.filter((kind) => workers.some((w) => w.spent?.[kind] > 0));
  const tall = Math.max(120, 50 + workers.length * (workers.length > 16 ? 16 : 34));
  const ranks = workers.map((w) => w.rank);
  const drawing = h("div", { class: "chart", role: "img", "aria-label": `Seconds that each worker spent on what. ${workers.slice(0, 8).map((w) => `Worker ${w.rank} was busy ${share(w.busy)}`).join(", ")}. The table below has the numbers.` });
  put(host, key(used), drawing, spentTable(run, used));
  return figure(drawing, (width) => plot(drawing, used.flatMap((kind) => {
    const values = workers.map((w) => w.spent?.[kind] ?? 0);
    return bars(kind, ranks, values, { way: "x", format: seconds });
  }), { width, height: tall, barmode: "stack", bargap: 0.3, dragmode: false, xaxis: axis("seconds", { fixedrange: true }), yaxis: axis("worker", { autorange: "reversed", tickmode: ranks.length > 16 ? "auto" : "linear", dtick: 1, showgrid: false, fixedrange: true }) }), { height: tall, plotly: true });
}

function spentTable(run, used) {
  const paces = [["busy", "busy", share], ["F ms", "forward_ms", number], ["B ms", "backward_ms", number], ["wait ms", "wait_ms", number]];
  const times = [["all", "seconds", clock], ...used.map((kind) => [kind, `spent.${kind}`, clock])];
  const labels = (fields) => fields.map(([label]) => ({ label, kind: "n" }));
  const cells = (i, fields) => fields.map(([, path, format]) => shown("td", `run.workers.${i}.${path}`, format, { class: "n" }));
  const { workers } = run;
  return [
    table("Seconds of the workers", [{ label: "seconds of worker" }, ...labels(times)], workers.length, (i) => [h("td", null, chip(workers[i].rank)), ...cells(i, times)]),
    table("Minibatches of the workers", [{ label: "a minibatch of worker" }, ...labels(paces), { label: "engines" }], workers.length, (i) => [
      h("td", null, chip(workers[i].rank)), ...cells(i, paces), h("td", null, list(workers[i].engines && [...new Set(workers[i].engines)]))]),
    waitTable(workers),
  ];
}

/** What the workers waited for, the longest first; folded where it is long. */
function waitTable(workers) {
  const rows = workers.flatMap((w, i) => (w.waits ?? []).map((wait, k) => [w, wait, `run.workers.${i}.waits.${k}.seconds`]))
    .sort((a, b) => (b[1].seconds ?? 0) - (a[1].seconds ?? 0));
  if (!rows.length) return null;
  const make = () => table("What the workers waited for", [{ label: "worker" }, { label: "waited for" }, { label: "from" }, { label: "seconds", kind: "n" }], rows.length, (r) => {
    const [worker, wait, path] = rows[r];
    return [h("td", null, chip(worker.rank)), h("td", { class: "name" }, wait.what), h("td", null, missing(wait.from) ? NONE : chip(wait.from)), shown("td", path, clock, { class: "n" })];
  });
  return rows.length > 24 ? fold("What the workers waited for, as a table", make) : make();
}

const asTrace = ([x, y]) => ({ x, y });

/** The curves of all logs, each with its name and with a stroke of its own among those of its colour. */
function strokedCurves(logs) {
  const groups = new Set(logs.map((log) => log.group)).size > 1;
  const drawn = new Array(8).fill(0); // of each colour
  return logs.flatMap(curves).map((log) => ({
    ...log, name: `worker ${log.worker} · ${groups ? `group ${log.group} · ` : ""}${log.name}`, stroke: stroke(log.worker, drawn[log.worker % 8]++),
  }));
}

/** A log by how many updates its forwards were behind and predicted ahead: each is a curve of its own. */
function curves(log) {
  const made = new Map();
  log.step.forEach((step, i) => {
    const name = `${log.stale[i]} behind, predicted ${log.ahead[i]}`;
    const { x, y } = made.get(name) ?? made.set(name, { x: [], y: [] }).get(name);
    x.push(step);
    y.push(log.rmse[i]);
  });
  return [...made].map(([name, points]) => ({ ...log, ...points, name }));
}

function staleness(host, run) {
  put(host, h("h3", null, "How far weights were from those their updates met"));
  const logs = (run.staleness ?? []).filter((log) => log.step.length);
  if (!logs.length) return put(host, absent("Staleness was not logged: ", h("code", null, "fxpipe run --log-staleness"), " logs it."));
  const drawing = h("div", { class: "chart", role: "img", "aria-label": `Root mean square of the difference, over steps. ${logs.slice(0, 8).map((l) => `Worker ${l.worker}, group ${l.group}: last ${number(l.rmse.at(-1))}`).join(", ")}. The table below has the numbers.` });
  const rows = logs.flatMap((log) => log.step.map((_, i) => [run.staleness.indexOf(log), i]));
  const lines = strokedCurves(logs);
  const names = () => lineKey("Lines", lines.map((line) => ({ name: line.name, ...line.stroke })));
  put(host, h("p", { class: "quiet" }, "“1 behind, predicted 1”: the forwards whose weights were one update behind, with one update predicted. A group is one of the optimizer's parameter groups, counted from 0."),
    lines.length > KEYED ? [workerKey([...new Set(logs.map((l) => l.worker))]), fold(`The ${count(lines.length)} lines by name`, names)] : names(),
    drawing, fold("Staleness as a table", () =>
    table("Staleness", [{ label: "worker" }, { label: "parameter group", kind: "n", title: "of the optimizer, counted from 0" }, { label: "step", kind: "n" }, { label: "updates behind", kind: "n" }, { label: "predicted", kind: "n" }, { label: "RMSE", kind: "n", title: "root mean square of the difference" }, { label: "RMS of the weights", kind: "n" }], rows.length, (r) => {
      const [l, i] = rows[r];
      return [h("td", null, chip(run.staleness[l].worker)), shown("td", `run.staleness.${l}.group`, count, { class: "n" }),
        ...[["step", count], ["stale", count], ["ahead", count], ["rmse", number], ["rms", number]].map(([name, format]) => shown("td", `run.staleness.${l}.${name}.${i}`, format, { class: "n" }))];
    })));
  return figure(drawing, (width) => plot(drawing, lines.map((log) => ({
    type: "scatter", mode: log.x.length > 60 ? "lines" : "lines+markers", ...asTrace(thin(log.x, log.y, -Infinity, Infinity)), name: log.name, line: { width: 1.8, ...log.stroke }, marker: { size: 4, color: colour(log.worker) },
    hovertemplate: `${log.name}<br>step %{x}: %{y:.3~g}<extra></extra>`,
  })), { width, height: 340, xaxis: axis("step"), yaxis: axis("root mean square of the difference (RMSE)", { rangemode: "tozero", exponentformat: "e" }), margin: { l: 68, r: 12, t: 16, b: 40 } }), { height: 340, plotly: true });
}
