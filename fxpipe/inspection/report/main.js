// The page from top to bottom.

function card(...make) {
  const host = h("div", { class: "card" });
  make.forEach((part) => part(host));
  return host;
}

overview();
section("model", "Model", `From the input on the left to the loss on the right: which worker runs the forward of each part, and which its backward.${facts.units.some((u) => u.apart) ? " Forward and backward have cuts of their own." : ""}`,
  card(modelMap), card(moduleTree));
section("edges", "What crosses workers", "Every value that leaves a worker, wider the more bytes it has, in the colour of the worker that sends it.", card(edgeSection));
section("balance", "Balance", `What a microbatch costs each worker${elsewhere()}, for each mode of cuts. The slowest worker sets the pace; the dashed line is where all would be if work could be halved at will.`, card(balance));
section("timeline", "Timeline", elsewhere() ? `When each worker does what; simulated${elsewhere()}.` : "When each worker does what.", card(timelineSection));
section("memory", "Memory over time", `Weights, saved values and messages of each worker, as simulated${elsewhere()}.`, card(memorySection));
section("run", "Run", facts.run ? "What was measured." : null, card(runSection));
section("schedule", "Schedule and versions", null, card(schedulePicture));
section("workers", "Workers", null, card(workerSection));
put(byId("foot"), `fxpipe ${facts.fxpipe}`, facts.build.digest ? ` · build ${String(facts.build.digest).slice(0, 12)}` : "", facts.build.folder ? ` · ${facts.build.folder}` : "");

const links = new Map(SECTIONS.map(([id, title]) => [id, h("a", { href: `#${id}` }, title)]));
byId("contents").append(h("ul", null, [...links.values()].map((link) => h("li", null, link))));
const passing = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) {
    links.forEach((link, id) => (id === entry.target.id ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  }
}, { rootMargin: "-20% 0px -70% 0px" });
document.querySelectorAll("main > section").forEach((part) => passing.observe(part));
startFigures();
