// The head of the page: what was built, in words and in the numbers that matter, and what is wrong with it.

function overview() {
  const { build, forecast, partitions, units, run } = facts;
  document.title = `${build.model ?? build.folder ?? "fxpipe"} · fxpipe report`;
  const setting = (label, path, format = text) => h("div", null, h("dt", null, label), shown("dd", path, format));
  put(byId("top"), 
    h("p", { class: "eyebrow" }, "fxpipe report"),
    h("h1", null, build.model ?? build.folder ?? "A model", " on ", shown("span", "build.workers", (n) => plural(n, "worker"))),
    h("dl", { class: "settings" },
      setting("schedule", "build.schedule"), setting("policy", "build.policy"), setting("cuts", "build.cuts"),
      setting("microbatches", "build.microbatches"), setting("samples a minibatch", "build.samples", count),
      build.autocast && setting("autocast", "build.autocast"),
      setting("device", "build.device"), setting("costs", "build.costs"), setting("torch", "build.torch")),
    h("p", { class: "summary" }, ...inWords(units)),
    figureRow(keyFigures(build, forecast, partitions, run)),
    warnings(build, run),
    forecast ? null : absent("There is no forecast: the build does not say what its stages take. Compile again to have one."));
}

function keyFigures(build, forecast, partitions, run) {
  const card = (label, element) => h("div", null, h("dt", null, label), element);
  const chosen = partitions.findIndex((p) => p.chosen);
  const expected = `forecast${elsewhere()}`;
  const fullest = greatest(facts.workers.map((w) => w.memory_bytes ?? 0));
  return [
    forecast && card(`samples a second, ${expected}`, shown("dd", "forecast.samples_per_second", number)),
    run?.samples_per_second && card("samples a second, measured", shown("dd", "run.samples_per_second", number)),
    run?.efficiency && card("measured over forecast", shown("dd", "run.efficiency", share)),
    forecast && card(`milliseconds a minibatch, ${expected}`, shown("dd", "forecast.milliseconds", number)),
    forecast && card(`bubble, ${expected}`, shown("dd", "forecast.bubble", share)),
    run && !missing(run.bubble) && card("bubble, measured", shown("dd", "run.bubble", share)),
    chosen >= 0 && card(`balance${elsewhere()}: ideal over slowest worker`, shown("dd", `partitions.${chosen}.efficiency`, share)),
    fullest > 0 && card(`memory of the fullest worker${elsewhere()}`, derived("dd", fullest, bytes)),
    card("crosses workers, a microbatch", derived("dd", sum(facts.edges.filter((e) => e.kind !== "weights").map((e) => e.bytes)), bytes)),
  ].filter(Boolean);
}

const figureRow = (cards) => h("dl", { class: "figures", style: `--columns:${cards.length < 6 ? cards.length : Math.ceil(cards.length / 2)}` }, cards);

function inWords(units) {
  const apart = units.filter((u) => u.apart).length;
  const of = `${plural(apart, "unit")} of ${count(units.length)}`;
  const three = units.some((u) => u.weights !== u.backward);
  const split = !apart ? "Every unit runs forward and backward on the same worker."
    : three ? `${of} ${apart === 1 ? "does" : "do"} not run forward, backward and weight gradients all on one worker.`
      : `${of} ${apart === 1 ? "runs" : "run"} forward on one worker and backward on another.`;
  if (facts.workers.length > 6) return [split];
  const said = facts.workers.flatMap((w, i) => [
    h("span", { class: "nobreak" }, chip(w.worker), "forward from"), " ", h("code", null, w.forward_from ?? NONE),
    w.backward_from === w.forward_from ? ", backward too" : [", backward from ", h("code", null, w.backward_from ?? NONE)],
    i < facts.workers.length - 1 ? "; " : ". ",
  ]);
  return [...said.flat(), split];
}

function warnings(build, run) {
  const said = [
    ...build.edited.map((file) => `Edited: ${file} is not as compile wrote it. What it does may differ from what is shown.`),
    ...build.stale.map((what) => `Stale: since this was compiled, ${what}.`),
    ...(run?.problems ?? []).map((problem) => `Run: ${problem}`),
  ];
  return said.length ? h("ul", { class: "warnings", "aria-label": "Warnings" }, said.map((line) => h("li", null, line))) : null;
}
