// How evenly each mode of cuts spreads the work: a stacked bar for every worker, and the line that none could be below.

const PARTS = [["F", "forward_ms"], ["B", "backward_ms"], ["W", "weight_ms"], ["update", "update_ms"], ["recompute", "recompute_ms"], ["exposed", "exposed_ms"]];

function balance(host) {
  const { partitions } = facts;
  if (!partitions.length) {
    return put(host, absent("The build does not say what its units cost (profile.json is not there): compile again to see how evenly the modes of cuts would spread the work."));
  }
  const used = PARTS.filter(([, name]) => partitions.some((p) => p.workers.some((w) => w[name] > 0)));
  const drawing = h("div", { class: "chart", role: "img", "aria-label": `Balance of ${list(partitions.map((p) => `${p.mode}, ${share(p.efficiency)}${p.chosen ? ", chosen" : ""}`))}. The tables below have the numbers.` });
  put(host, 
    key(used.map(([kind]) => kind)), drawing, modeTable(),
    fold("What each worker takes, as a table", balanceTable));
  return figure(drawing, (width) => drawBalance(drawing, width, used), { height: 320, plotly: true });
}

function drawBalance(host, width, used) {
  const { partitions } = facts;
  const panels = partitions.length;
  const beside = width >= 210 * panels; // room for their titles
  const gap = beside ? 0.04 : 0.42 / panels;
  const part = (1 - gap * (panels - 1)) / panels;
  const top = greatest(partitions.flatMap((p) => p.workers.map((w) => w.total_ms ?? 0))) || 1;
  const layout = { barmode: "stack", bargap: 0.25, shapes: [], annotations: [], margin: { l: 48, r: 8, t: 46, b: 44 } };
  const traces = [];
  partitions.forEach((p, i) => {
    const suffix = i ? i + 1 : "";
    const across = beside ? [i * (part + gap), i * (part + gap) + part] : [0, 1];
    const down = beside ? [0, 1] : [1 - i * (part + gap) - part, 1 - i * (part + gap)];
    const workers = p.workers.map((_, w) => w);
    layout[`xaxis${suffix}`] = axis("worker", { domain: across, anchor: `y${suffix}`, tickangle: 0, tickmode: workers.length > 16 ? "auto" : "linear", dtick: 1, showgrid: false, fixedrange: true });
    layout[`yaxis${suffix}`] = axis(i && beside ? "" : "ms a microbatch", { domain: down, anchor: `x${suffix}`, range: [0, top * 1.08], showticklabels: !(i && beside), fixedrange: true, nticks: 6 });
    for (const [kind, name] of used) {
      traces.push(...bars(kind, workers, p.workers.map((w) => w[name]), { xaxis: `x${suffix}`, yaxis: `y${suffix}` }));
    }
    if (!missing(p.ideal_ms)) {
      layout.shapes.push({ type: "line", xref: `x${suffix}`, yref: `y${suffix}`, x0: -0.5, x1: workers.length - 0.5, y0: p.ideal_ms, y1: p.ideal_ms, line: { width: 1.5, dash: "4px,3px" } });
    }
    layout.annotations.push({ text: `${p.chosen ? "<b>✓ " : ""}${p.mode}${p.chosen ? ", chosen</b>" : ""}<br>${share(p.efficiency)}`, xref: "paper", yref: "paper", x: across[0], y: down[1], xanchor: "left", yanchor: "bottom", align: "left", showarrow: false, font: { size: 13 } });
  });
  plot(host, traces, { ...layout, width, height: beside ? 320 : 90 + 210 * panels, dragmode: false });
}

function modeTable() {
  const columns = [{ label: "cuts" }, { label: "slowest worker", kind: "n" }, { label: "ideal", kind: "n" }, { label: "efficiency", kind: "n" }, { label: "proved best" }];
  return table("Modes of cuts", columns, facts.partitions.length, (i) => {
    const p = facts.partitions[i];
    return [h("td", null, p.mode, p.chosen ? h("strong", null, " ✓ chosen") : null),
      shown("td", `partitions.${i}.bottleneck_ms`, ms, { class: "n" }), shown("td", `partitions.${i}.ideal_ms`, ms, { class: "n" }),
      shown("td", `partitions.${i}.efficiency`, share, { class: "n" }), h("td", null, known((exact) => (exact ? "yes" : "no"))(p.exact))];
  });
}

function balanceTable() {
  const fields = [...PARTS.map(([kind, name]) => [MARKS[kind].name, name, number]), ["total ms", "total_ms", number], ["memory", "memory_bytes", bytes]];
  const rows = facts.partitions.flatMap((p, i) => p.workers.map((_, w) => [p.mode, i, w]));
  return table("Balance", [{ label: "cuts" }, { label: "worker" }, ...fields.map(([label]) => ({ label, kind: "n" }))], rows.length, (r) => {
    const [mode, i, w] = rows[r];
    return [h("td", null, mode), h("td", null, chip(w)), ...fields.map(([, name, format]) => shown("td", `partitions.${i}.workers.${w}.${name}`, format, { class: "n" }))];
  });
}
