// The model map: the units from the input to the loss, once as forward and once as backward, coloured by worker.

const LANE = 40; // height of a lane
const GAP = 34; // between lanes: here mismatches are marked

function modelMap(host) {
  const { units } = facts;
  const timed = units.some((u) => !missing(u.forward_ms));
  const three = units.some((u) => u.weights !== u.backward);
  const weight = units.map((u) => (timed ? sum([u.forward_ms, u.backward_ms, u.weight_ms]) : 1));
  const floor = (sum(weight) || 1) * (0.02 / units.length); // what takes no time is still there
  const ends = new Float64Array(units.length + 1);
  weight.forEach((w, i) => { ends[i + 1] = ends[i] + w + floor; });
  const lanes = [
    { key: "forward", name: "forward", letter: "F", cut: "FP cut", times: ["forward_ms"] },
    { key: "backward", name: "backward", letter: "B", cut: "BP cut", times: three ? ["backward_ms"] : ["backward_ms", "weight_ms"] },
    three && { key: "weights", name: "weight gradients", letter: "W", cut: "W cut", times: ["weight_ms"] },
  ].filter(Boolean);
  figure(host, (width) => drawMap(host, width, { units, ends, lanes }), { first: true });
}

/** Maximal runs of equal `of(i)` among the first `length` numbers, as [first, end, value]. */
function runs(length, of) {
  const found = [];
  for (let i = 0; i < length; i++) {
    const value = of(i);
    if (found.length && found.at(-1)[2] === value) found.at(-1)[1] = i + 1;
    else found.push([i, i + 1, value]);
  }
  return found;
}

/** The least room that `label` takes in the drawing's small fixed-width type. */
const room = (label) => label.length * 7.1 + 8;

const clipped = (label, space) => (room(label) <= space ? label : space > 38 ? `${label.slice(0, Math.floor((space - 16) / 7.1))}…` : "");

function drawMap(host, width, { units, ends, lanes }) {
  const left = width < 560 ? 22 : 76;
  const scale = (width - left - 2) / ends.at(-1);
  const x = (unit) => left + ends[unit] * scale;
  const cuts = lanes.map((lane) => placeCuts(lane, x, width));
  const above = 18 + 15 * cuts[0].levels;
  const tops = lanes.map((_, i) => above + i * (LANE + GAP));
  const bottom = tops.at(-1) + LANE;
  const below = 6 + 15 * Math.max(1, ...cuts.slice(1).map((c) => c.levels));
  const strip = bottom + below + 14;
  const height = strip + 42;
  const items = [];
  const described = [];

  const label = laneLabels(lanes, x);
  const laneParts = lanes.flatMap((lane, i) => {
    const segments = runs(units.length, (u) => units[u][lane.key]);
    return segments.map(([first, end, worker]) => {
      const time = laneTime(lane, first, end);
      const space = x(end) - x(first);
      const said = label(worker, time, space);
      const lines = [`worker ${worker}, ${lane.name}`, `units ${first} to ${end - 1} of ${units.length}`,
        `${unitName(first)} … ${unitName(end - 1)}`, ms(time)];
      const item = g("g", { role: "img", "aria-label": lines.join(", ") },
        g("rect", { x: x(first), y: tops[i], width: Math.max(space, 1), height: LANE, fill: colour(worker), "data-worker": worker, "data-lane": lane.letter, "data-value": time }),
        hairs(first, end, x, tops[i]),
        said.map((line, k) => g("text", { class: "lane", x: x(first) + space / 2, y: tops[i] + LANE / 2 + 4 + 15 * (k - (said.length - 1) / 2), "text-anchor": "middle", style: `fill:${textOn(worker)};font-weight:600` }, line)),
        g("rect", { class: "frame", x: x(first) + 2, y: tops[i] + 2, width: Math.max(space - 4, 1), height: LANE - 4, rx: 2 }));
      items.push(item);
      described.push(lines);
      return item;
    });
  });
  const names = lanes.map((lane, i) => [
    g("text", { class: "name", x: 0, y: tops[i] + LANE / 2 + (left > 30 ? -1 : 4) }, left > 30 ? (lane.key === "weights" ? "weights" : lane.name) : lane.letter),
    left > 30 && g("text", { x: 0, y: tops[i] + LANE / 2 + 14 }, i ? "← to input" : "to loss →"),
  ]);
  const cursor = g("line", { class: "cursor", y1: above - 4, y2: strip + 26, visibility: "hidden" });
  const svg = g("svg", { class: "drawing map", viewBox: `0 0 ${width} ${height}`, height, role: "group",
    "aria-label": "Forward and backward of the model from input to loss, by worker. Arrow keys go from part to part." },
    mismatchPattern(), names, mismatches(units, lanes, tops, x), laneParts,
    cuts.map((c, i) => drawCuts(c, tops[i], i === 0, i === lanes.length - 1)), moduleStrip(units, x, strip, width), cursor);
  rove(items, (i) => described[i]);
  svg.addEventListener("pointermove", (event) => pointAt(event, svg, width, x, cursor));
  svg.addEventListener("pointerleave", () => { hideTip(); cursor.setAttribute("visibility", "hidden"); });
  host.replaceChildren(svg);
}

/** The milliseconds of some units in a lane, null where none is known. */
function laneTime(lane, first, end) {
  const times = facts.units.slice(first, end).flatMap((u) => lane.times.map((name) => u[name]));
  return times.some((t) => !missing(t)) ? sum(times) : null;
}

// What a part of a lane says, the fullest first: one line or two.
const SAID = [(w, t) => [`worker ${w} · ${t}`], (w, t) => [`worker ${w}`, t], (w, t) => [String(w), t]];

/** What is written into a part of `space`, as lines: one form for all parts that have room for their time, else the number. */
function laneLabels(lanes, x) {
  const parts = lanes.flatMap((lane) => runs(facts.units.length, (u) => facts.units[u][lane.key])
    .map(([first, end, worker]) => ({ worker, time: ms(laneTime(lane, first, end)), space: x(end) - x(first) })));
  const fits = (lines, space) => lines.every((line) => room(line) <= space);
  const least = SAID.at(-1);
  const able = parts.filter(({ worker, time, space }) => fits(least(worker, time), space));
  const form = SAID.find((said) => able.every(({ worker, time, space }) => fits(said(worker, time), space)));
  return (worker, time, space) => [form(worker, ms(time)), [String(worker)]].find((lines) => fits(lines, space)) ?? [];
}

/** The units after the last one that is in a module are the loss function's. */
const lastInModule = facts.units.findLastIndex((unit) => unit.module);
const isLoss = (u) => lastInModule >= 0 && u > lastInModule;
const unitName = (u) => facts.units[u].module || (isLoss(u) ? "(loss)" : "(no module)");

function pointAt(event, svg, width, x, cursor) {
  const { units } = facts;
  const box = svg.getBoundingClientRect();
  const place = ((event.clientX - box.left) / box.width) * width;
  let [low, high] = [0, units.length - 1];
  if (place < x(0)) return hideTip();
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (x(middle) <= place) low = middle;
    else high = middle - 1;
  }
  const unit = units[low];
  cursor.setAttribute("x1", place);
  cursor.setAttribute("x2", place);
  cursor.setAttribute("visibility", "visible");
  showTip([unitName(low), `unit ${low} of ${units.length}`,
    `forward on worker ${unit.forward}: ${ms(unit.forward_ms)}`, `backward on worker ${unit.backward}: ${ms(unit.backward_ms)}`,
    unit.weight_ms && "weights" in unit ? `weight gradients on worker ${unit.weights}: ${ms(unit.weight_ms)}` : null], event.clientX, event.clientY);
}

/** Lines between the units of a part, where they would not blur into one. */
function hairs(first, end, x, top) {
  if ((x(end) - x(first)) / (end - first) < 2) return null;
  const d = [];
  let last = x(first);
  for (let u = first + 1; u < end; u++) {
    if (x(u) - last < 4 || x(end) - x(u) < 4) continue;
    last = x(u);
    d.push(`M${last.toFixed(1)} ${top}v${LANE}`);
  }
  return d.length ? g("path", { class: "hair", d: d.join("") }) : null;
}

function mismatchPattern() {
  return g("defs", null, g("pattern", { id: "apart", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    g("rect", { width: 6, height: 6, fill: "var(--sunk)" }), g("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "tie", "stroke-width": 2 })));
}

function mismatches(units, lanes, tops, x) {
  return lanes.slice(1).flatMap((lane, i) => {
    const before = lanes[i];
    return runs(units.length, (u) => (!units[u].apart || units[u][before.key] === units[u][lane.key] ? "" : `${units[u][before.key]} ${units[u][lane.key]}`))
      .filter(([, , pair]) => pair)
      .map(([first, end, pair]) => {
        const [a, b] = pair.split(" ");
        const space = x(end) - x(first);
        const top = tops[i] + LANE;
        const label = [`${before.letter} on ${a}, ${lane.letter} on ${b}`, `${a} ≠ ${b}`, "≠"].find((l) => room(l) <= space);
        return g("g", { class: "mismatch", "data-units": end - first },
          g("rect", { x: x(first), y: top, width: Math.max(space, 2), height: GAP, fill: "url(#apart)" }),
          label && g("rect", { x: x(first) + space / 2 - room(label) / 2, y: top + 7, width: room(label), height: 20, rx: 4, fill: "var(--surface)" }),
          label && g("text", { class: "apart", x: x(first) + space / 2, y: top + 21, "text-anchor": "middle" }, label));
      });
  });
}

/** The cuts of a lane, each with a level on which its label finds room, or none. */
function placeCuts(lane, x, width) {
  const { units } = facts;
  const free = [0, 0, 0];
  const all = runs(units.length, (u) => units[u][lane.key]).slice(1);
  if (all.length > 12) free.length = 1; // many cuts: labels in one line, as far as they fit
  const cuts = all.map(([first]) => {
    const full = `${lane.cut} ${unitName(first)}`;
    const label = [full, unitName(first)].find((l) => room(l) < width * 0.45) ?? lane.cut;
    const start = Math.min(Math.max(0, x(first) - room(label) / 2), width - room(label));
    const level = free.findIndex((end) => start >= end);
    if (level >= 0) free[level] = start + room(label) + 6;
    return { at: x(first), label, level, middle: start + room(label) / 2 };
  });
  return { cuts, levels: Math.max(1, ...cuts.map((c) => c.level + 1)) };
}

function drawCuts({ cuts }, top, first, last) {
  const dense = cuts.length > 1 && (cuts.at(-1).at - cuts[0].at) / (cuts.length - 1) < 16;
  const lines = [];
  const labels = [];
  for (const cut of cuts) {
    const reach = 5 + 15 * Math.max(cut.level, 0);
    const up = first ? reach : 5;
    const down = last ? reach : 5;
    const inside = !first && !last;
    lines.push(g("line", { class: dense ? "cut thin" : "cut", x1: cut.at, x2: cut.at, y1: top - up, y2: top + LANE + down }));
    if (cut.level >= 0 && !inside) labels.push(g("text", { class: "cut-text", x: cut.middle, y: first ? top - reach - 5 : top + LANE + reach + 12, "text-anchor": "middle" }, cut.label));
  }
  return [lines, labels];
}

const NAMED = 40; // pixels that a part needs, in the mean, for names to stand in most
const OWN = 0.25; // of a module's width may be outside of the modules in it, if those are to stand for it

/**
 * Which modules are where: the tree opened at its widest places until its parts get too narrow. A module has one name,
 * in the middle of all that is in it; what an opened module does itself, between its parts, has none.
 */
function moduleStrip(units, x, top, width) {
  const { modules } = facts;
  const index = new Map(modules.map((m, i) => [m.path, i]));
  const open = new Set([0]);
  const places = units.map((unit, u) => (isLoss(u) ? index.get(null) : index.get(unit.module ?? "")) ?? 0);
  const shownAs = (u) => {
    const trail = [];
    for (let m = places[u]; m !== null && m !== undefined; m = modules[m].parent) trail.push(m);
    return trail.reverse().find((m) => !open.has(m)) ?? trail.at(-1);
  };
  const one = (u) => x(u + 1) - x(u);
  const divides = (m) => {
    const inside = units.map((_, u) => u).filter((u) => shownAs(u) === m);
    return sum(inside.filter((u) => places[u] === m).map(one)) <= OWN * sum(inside.map(one));
  };
  const parents = new Set(modules.map((m) => m.parent));
  let parts = runs(units.length, shownAs);
  const whole = new Set(); // were looked at
  const across = x(units.length) - x(0);
  const space = ([first, end]) => x(end) - x(first);
  for (let round = 0; round < 12; round++) {
    const wide = parts.filter((part) => !open.has(part[2]) && !whole.has(part[2]) && parents.has(part[2]) && space(part) >= 160);
    if (!wide.length) break;
    const widest = wide.reduce((most, part) => (space(part) > space(most) ? part : most));
    const alike = new Set(wide.map(([, , m]) => m).filter((m) => modules[m].parent === modules[widest[2]].parent));
    const opened = [...alike].filter(divides);
    opened.forEach((m) => open.add(m));
    const finer = runs(units.length, shownAs);
    const named = space(widest) > across / 2 ? 7 : NAMED; // what is most of the model is shown by its parts, even if few have names
    if (opened.length && finer.length <= Math.max(12, across / named)) parts = finer;
    else opened.forEach((m) => open.delete(m));
    alike.forEach((m) => whole.add(m));
  }
  const narrow = across / parts.length < NAMED; // too narrow for names: some stand beneath
  return [
    parts.map(([first, end]) => g("rect", { class: "cell", x: x(first), y: top, width: Math.max(x(end) - x(first), 0.5), height: narrow ? 12 : 24 })),
    stripNames(parts.filter(([, , m]) => !open.has(m)), x, narrow ? width : null).map(({ name, middle }) => [
      narrow && g("path", { class: "tie", d: `M${middle.toFixed(1)} ${top + 12}v6` }),
      g("text", { class: "mono strip", x: middle, y: top + (narrow ? 30 : 16), "text-anchor": "middle" }, name)]),
  ];
}

/** The names that fit, each with its middle: inside their modules' extents, or beneath them and inside of `width`. */
function stripNames(parts, x, width) {
  const extents = new Map();
  for (const [first, end, m] of parts) extents.set(m, [extents.get(m)?.[0] ?? first, end]);
  const taken = [];
  const free = (from, to) => taken.every(([a, b]) => to <= a || from >= b);
  return [...extents].flatMap(([m, [first, end]]) => {
    const path = facts.modules[m].path || facts.modules[m].name;
    const name = facts.modules[m].name;
    const space = x(end) - x(first);
    const middle = x(first) + space / 2;
    const names = width === null ? [path, path.split(".").slice(-2).join("."), name, clipped(name, space)] : [path];
    const held = names.find((n) => n && (width === null ? room(n) <= space + 1 : middle >= room(n) / 2 && middle + room(n) / 2 <= width));
    if (!held || !free(middle - room(held) / 2, middle + room(held) / 2)) return [];
    taken.push([middle - room(held) / 2, middle + room(held) / 2]);
    return [{ name: held, middle }];
  });
}

if (byId("map")) modelMap(byId("map"));
