// What crosses workers: a row for each worker with its F and its B, and a line for every edge between them.

function edgeSection(host) {
  const { edges } = facts;
  const lines = edges.length > Number(host.dataset.single) ? bundles(edges) : edges.map((edge, i) => ({ ...edge, members: [i] }));
  const size = sizes(lines);
  figure(host, (width) => drawEdges(host, width, lines, size), { height: size.height });
}

const end = (phase, source) => (phase === "update" ? "B" : phase.includes("F") && !(source && phase === "FB") ? "F" : "B");

function bundles(edges) {
  const made = new Map();
  edges.forEach((edge, i) => {
    const key = [edge.kind, edge.src, edge.src_phase, edge.dst, edge.dst_phase].join();
    const bundle = made.get(key) ?? { ...edge, name: null, bytes: 0, members: [] };
    bundle.bytes += edge.bytes ?? 0;
    bundle.members.push(i);
    made.set(key, bundle);
  });
  return [...made.values()];
}

/** How tall boxes and rows are, so that the lines of a box have room, and how thick the thickest line may be. */
function sizes(lines) {
  const { workers } = facts.build;
  const ends = new Map();
  for (const line of lines) {
    const [a, b] = [end(line.src_phase, true), end(line.dst_phase, false)];
    for (const side of [`${line.src}${a}${a === b}`, `${line.dst}${b}${a === b}`]) ends.set(side, (ends.get(side) ?? 0) + 1);
  }
  const crowd = greatest([...ends.values()]);
  const tall = Math.min(Math.max(workers > 16 ? 26 : 38, 6 * crowd), workers > 8 ? 60 : 160);
  const pitch = tall + (workers > 16 ? 18 : 38);
  return { tall, pitch, thick: Math.min(9, (0.8 * tall) / crowd), height: 26 + workers * pitch };
}

const phaseName = (phase) => (phase === "update" ? phase : [...phase].map((p) => ({ F: "forward", B: "backward", W: "weight gradients" })[p]).join(" and "));

function edgeLines(line) {
  const { edges } = facts;
  const route = `from worker ${line.src}, ${phaseName(line.src_phase)}, to worker ${line.dst}, ${phaseName(line.dst_phase)}`;
  if (line.members.length > 1) {
    const names = line.members.slice(0, 4).map((i) => edges[i].name).join(", ");
    return [`${plural(line.members.length, "edge")}, ${line.kind}, ${bytes(line.bytes)}`, route, line.members.length > 4 ? `${names}, …` : names];
  }
  const edge = edges[line.members[0]];
  return [`${edge.name}, ${bytes(edge.bytes)}`, `${edge.kind}${edge.shape ? `, ${edge.dtype ?? ""}[${edge.shape.join(", ")}]` : ""}`, route,
    [edge.module, edge.source].filter(Boolean).join(" · "), edge.names?.length ? `${plural(edge.names.length, "parameter")}: ${edge.names.slice(0, 6).join(", ")}${edge.names.length > 6 ? ", …" : ""}` : null];
}

function drawEdges(host, width, lines, { tall, pitch, thick: thickest, height }) {
  const workers = facts.build.workers;
  const side = Math.min(width * (width < 500 ? 0.2 : 0.27), 230);
  const box = Math.min(104, width * 0.15);
  const places = { F: side, B: width - side - box };
  const top = 26;
  const y = (worker) => top + (worker + 0.5) * pitch;
  const most = greatest(lines.map((line) => line.bytes ?? 0)) || 1;
  const port = ports(lines, tall);
  const items = lines.map((line, i) => {
    const lanes = [end(line.src_phase, true), end(line.dst_phase, false)];
    const thick = Math.min(1.2, thickest) + (thickest - Math.min(1.2, thickest)) * Math.sqrt((line.bytes ?? 0) / most);
    const path = wire(line, lanes, places, box, y, port[i], side, workers);
    const described = edgeLines(line);
    return g("g", { class: "edge", role: "img", "aria-label": described.filter(Boolean).join(", "), "data-edges": JSON.stringify(line.members), "data-value": line.bytes,
      onpointermove: (event) => showTip(described, event.clientX, event.clientY), onpointerleave: hideTip },
      g("path", { class: "hit", d: path.d }),
      g("path", { class: "wire", d: path.d, stroke: colour(line.src), "stroke-width": thick.toFixed(1), "stroke-dasharray": looks.dashes[line.kind], "stroke-opacity": 0.85 }),
      g("path", { d: path.head(Math.min(4, 1.5 + thickest / 2) + thick / 2), style: `fill:${colour(line.src)}` }));
  });
  const boxes = Array.from({ length: workers }, (_, w) => ["F", "B"].map((phase) => [
    g("rect", { x: places[phase], y: y(w) - tall / 2, width: box, height: tall, rx: 6, fill: colour(w) }),
    g("text", { x: places[phase] + box / 2, y: y(w) + 4, "text-anchor": "middle", style: `fill:${textOn(w)};font-weight:600` }, box > 80 ? `worker ${w} · ${phase}` : `${w} ${phase}`)]));
  rove(items, (i) => edgeLines(lines[i]));
  host.replaceChildren(g("svg", { class: "drawing", viewBox: `0 0 ${width} ${height}`, height, role: "group",
    "aria-label": "Edges between workers. Arrow keys go from edge to edge." },
    g("text", { class: "name", x: places.F + box / 2, y: 14, "text-anchor": "middle" }, "forward"),
    g("text", { class: "name", x: places.B + box / 2, y: 14, "text-anchor": "middle" }, box > 80 ? "backward, update" : "backward"),
    boxes, g("g", { class: "edges" }, items)));
}

/** Where on its boxes each line begins and ends: lines of one side of a box are spread over it. */
function ports(lines, tall) {
  const { workers } = facts.build;
  const sides = new Map();
  const same = new Map(); // how many lines there are already between two boxes
  const found = lines.map((line) => {
    const pair = [line.src, end(line.src_phase, true), line.dst, end(line.dst_phase, false)].join();
    same.set(pair, (same.get(pair) ?? -1) + 1);
    return { turn: same.get(pair) };
  });
  lines.forEach((line, i) => {
    const a = end(line.src_phase, true);
    const b = end(line.dst_phase, false);
    const outer = a === b ? "outer" : "inner";
    for (const [which, worker, phase, other] of [["from", line.src, a, line.dst], ["to", line.dst, b, line.src]]) {
      const key = `${worker}${phase}${outer}`;
      const way = other - worker;
      const far = way > 0 ? workers - way : -way; // arcs are within each other: upwards the far ones below, downwards above
      const rank = outer === "inner" ? way : way > 0 ? workers + far : far;
      sides.set(key, [...(sides.get(key) ?? []), { i, which, rank, kind: outer === "inner" ? line.kind : "", turn: outer === "outer" && way > 0 ? -found[i].turn : found[i].turn }]);
    }
  });
  for (const side of sides.values()) {
    side.sort((a, b) => a.rank - b.rank || (a.kind > b.kind) - (a.kind < b.kind) || a.turn - b.turn);
    side.forEach((p, n) => { found[p.i][p.which] = ((n + 0.5) / side.length - 0.5) * (tall - 8); });
  }
  return found;
}

function wire(line, [from, to], places, box, y, port, side, workers) {
  const [ya, yb] = [y(line.src) + port.from, y(line.dst) + port.to];
  if (from === to) { // an arc outside of the column
    const out = from === "F" ? -1 : 1;
    const x = places[from] + (out > 0 ? box : 0);
    const reach = Math.min(side - 16, 26 + (side - 60) * Math.sqrt(Math.abs(line.dst - line.src) / Math.max(workers - 1, 3)) + 7 * (port.turn % 6));
    const bend = x + (out * reach * 4) / 3;
    return { d: `M${x} ${ya}C${bend} ${ya} ${bend} ${yb} ${x + out * 8} ${yb}`, head: (r) => triangle(x, yb, -out, r) };
  }
  const out = from === "F" ? 1 : -1;
  const xa = places[from] + (out > 0 ? box : 0);
  const xb = places[to] + (out > 0 ? 0 : box);
  const middle = (xa + xb) / 2;
  return { d: `M${xa} ${ya}C${middle} ${ya} ${middle} ${yb} ${xb - out * 8} ${yb}`, head: (r) => triangle(xb, yb, out, r) };
}

/** An arrow head that ends at a point, pointing right (1) or left (−1). */
const triangle = (x, y, way, r) => `M${x} ${y}l${-way * (r + 5)} ${-r}v${2 * r}z`;

if (byId("wires")) edgeSection(byId("wires"));
