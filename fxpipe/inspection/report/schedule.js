// The schedule as a grid: which action each worker does when, and which version of its weights it sees.

const CELL = /^([FB])(\d+(?:\.\d+)?)(?:@(\d+))?(?:\+(\d+))?$/;

function schedulePicture(host) {
  const { grid } = facts;
  if (!grid?.rows?.length) return put(host, absent("There is no grid of actions."));
  put(host, h("p", { class: "lead" }, example(grid)));
  const wide = greatest(grid.rows.map((row) => row.length));
  put(host, 
    h("div", { class: "scroll off-paper", tabindex: 0, role: "region", "aria-label": "Grid of actions" }, gridTable(grid, 0, wide)),
    h("div", { class: "on-paper" }, Array.from({ length: Math.ceil(wide / 12) }, (_, i) => gridTable(grid, 12 * i, Math.min(wide, 12 * i + 12)))));
  return undefined;
}

/** One sentence, about a cell of this very grid. */
function example({ rows, schedule, policy }) {
  const cells = rows.flat().map((cell) => [cell, CELL.exec(cell)]).filter(([, read]) => read?.[3] !== undefined);
  const [cell, read] = cells.find(([, r]) => r[4] && r[1] === "F" && Number(r[3]) > 0) ?? cells.find(([, r]) => r[4]) ?? cells.find(([, r]) => Number(r[3]) > 0) ?? cells[0] ?? [];
  const under = `Under schedule ${schedule} and policy ${policy}, `;
  if (!cell) return `${under}each row is a worker and each column one step of the pipeline.`;
  const pass = read[1] === "F" ? "forward" : "backward";
  const [minibatch, microbatch] = read[2].split(".");
  const ahead = read[4] ? `, predicted ${read[4]} further` : "";
  return `${under}${cell} is the ${pass} of minibatch ${minibatch}${microbatch ? `, microbatch ${microbatch},` : ""} with the worker's weights after ${plural(Number(read[3]), "update")}${ahead}; a dot is a step in which a worker waits.`;
}

function gridTable({ rows }, from, to) {
  const cell = (worker, label) => {
    const read = CELL.exec(label ?? "");
    if (!read) return h("td", { class: "idle", "aria-label": "waits" }, "·");
    const [action, ...seen] = label.split(/(?=@)/);
    const back = read[1] === "B";
    return h("td", { "data-cell": label, style: back ? `background:${colour(worker)};color:${textOn(worker)}` : `background:${tint(worker, 0.28)}` }, action, h("span", { class: "seen" }, seen));
  };
  return h("table", { class: "grid" }, h("tbody", null, rows.map((row, w) => h("tr", null, h("th", { scope: "row" }, chip(w)),
    Array.from({ length: to - from }, (_, i) => cell(w, row[from + i]))))));
}
