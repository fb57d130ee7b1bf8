// Memory over the simulated time, a step line for each worker.

function memorySection(host) {
  const memory = facts.timeline?.memory;
  if (!memory?.length) return put(host, absent("There is no memory over time: it comes with the simulated timeline."));
  const drawing = h("div", { class: "chart", role: "img", "aria-label": `Memory over the simulated time, a line for each worker. ${memory.map((m) => `Worker ${m.worker} at most ${bytes(greatest(m.bytes))}`).join(", ")}.` });
  put(host, workerKey(memory.map((m) => m.worker)), drawing, fold("The most of each worker, as a table", () =>
    table("Peak memory", [{ label: "worker" }, { label: "most", kind: "n" }, { label: "changes", kind: "n" }], memory.length, (i) => [
      h("td", null, chip(memory[i].worker)), derived("td", greatest(memory[i].bytes), bytes, { class: "n" }), derived("td", memory[i].bytes.length, count, { class: "n" })])));
  const unit = memoryUnit(greatest(memory.map((m) => greatest(m.bytes))));
  return figure(drawing, (width) => plot(drawing, memory.map((m) => ({
    type: "scatter", mode: "lines", x: [...m.seconds, facts.timeline.seconds].map((s) => s * 1e3), y: [...m.bytes, m.bytes.at(-1)].map((b) => b / unit.bytes),
    line: { shape: "hv", width: 2, ...stroke(m.worker) }, hovertemplate: `worker ${m.worker}: %{y:.3~f} ${unit.name} at %{x:.4~g} ms<extra></extra>`, name: `worker ${m.worker}`,
  })), { width, height: 300, xaxis: axis("milliseconds, simulated", { range: [0, facts.timeline.seconds * 1e3] }), yaxis: axis(unit.name, { rangemode: "tozero" }) }), { height: 300, plotly: true });
}

function memoryUnit(most) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(most || 1) / 10)));
  return { bytes: 1024 ** power, name: ["B", "KiB", "MiB", "GiB", "TiB"][power] };
}
