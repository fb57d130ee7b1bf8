// The module tree, a treegrid: what is open, where the focus is, and what a search shows. A node's rows are made when the
// row that holds them is first opened.

const FOUND = 200; // rows of what a search found that are shown

const body = document.querySelector("#tree tbody");
const search = byId("search");
const said = document.querySelector(".bar [role=status]");
let opened = null; // while searching: the rows that were open before

const level = (row) => Number(row.getAttribute("aria-level"));
const isOpen = (row) => row.getAttribute("aria-expanded") === "true";
const rowOf = (key) => body.querySelector(`tr[data-key="${key}"]`);

/** The next row, or the one before, that is shown. */
function neighbour(row, way) {
  let next = row;
  do next = next[way]; while (next && (next.hidden || next.matches("script")));
  return next;
}

/** The row above in the tree. */
function parent(row) {
  let up = row.previousElementSibling;
  while (up && !(up.matches("tr") && level(up) < level(row))) up = up.previousElementSibling;
  return up;
}

/** Open or close a row; of the rows below it those are shown above which all is open. */
function toggle(row, open = !isOpen(row)) {
  if (!row.hasAttribute("aria-expanded")) return;
  if (open && row.nextElementSibling?.matches("script")) unfold(row.nextElementSibling);
  row.setAttribute("aria-expanded", String(open));
  const top = level(row);
  let shut = open ? Infinity : top; // what is deeper than this is in a closed row
  for (let next = row.nextElementSibling; next && (next.matches("script") || level(next) > top); next = next.nextElementSibling) {
    if (next.matches("script")) continue;
    if (level(next) <= shut && open) shut = Infinity;
    next.hidden = level(next) > shut;
    if (shut === Infinity && next.getAttribute("aria-expanded") === "false") shut = level(next);
  }
}

/** Give a row the tab stop of the tree, and the focus. */
function focusOn(row, options) {
  if (!row) return;
  body.querySelectorAll('tr[tabindex="0"]').forEach((other) => { other.tabIndex = -1; });
  row.tabIndex = 0;
  row.focus(options);
}

/** Open everything above a node and go there. */
function reveal(node) {
  if (opened) endSearch();
  body.querySelectorAll("script").forEach(unfold);
  const row = rowOf(`n${node}`);
  for (let up = parent(row); up; up = parent(up)) up.setAttribute("aria-expanded", "true");
  toggle(body.rows[0], true);
  row.scrollIntoView({ block: "center" });
  focusOn(row);
}

/** Show what holds `wanted` and the modules around it; all, if it is empty. Says what was found. */
function find(wanted) {
  const query = wanted.trim().toLowerCase();
  if (!query) {
    if (opened) endSearch();
    return;
  }
  body.querySelectorAll("script").forEach(unfold);
  opened ??= new Set([...body.rows].filter(isOpen));
  const hits = { m: [], n: [] };
  for (const row of body.rows) {
    const kind = row.dataset.key[0];
    if (kind in hits && row !== body.rows[0] && searched(row, kind).includes(query)) hits[kind].push(row);
    row.hidden = true;
    if (isOpen(row)) row.setAttribute("aria-expanded", "false");
  }
  const all = [...hits.m, ...hits.n];
  body.rows[0].hidden = false;
  for (const row of all.slice(0, FOUND)) {
    row.hidden = false;
    for (let up = parent(row); up && !isOpen(up); up = parent(up)) {
      up.hidden = false;
      up.setAttribute("aria-expanded", "true");
    }
  }
  said.textContent = `${plural(hits.m.length, "module")}, ${plural(hits.n.length, "node")}${all.length > FOUND ? `; the first ${FOUND} are shown` : ""}`;
}

/** What a search looks at: a module's path, or a node's name, operator, place and line. */
function searched(row, kind) {
  const path = row.querySelector(".path");
  return (kind === "m" ? path.title || path.textContent : row.cells[0].textContent).toLowerCase();
}

function endSearch() {
  for (const row of body.rows) if (row.hasAttribute("aria-expanded")) row.setAttribute("aria-expanded", String(opened.has(row)));
  opened = null;
  clearTimeout(waiting);
  search.value = "";
  said.textContent = "";
  toggle(body.rows[0], isOpen(body.rows[0]));
}

let waiting = 0;
search.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => find(search.value), 120);
});

body.addEventListener("click", (event) => {
  const link = event.target.closest("[data-node]");
  if (link) return reveal(link.dataset.node);
  const row = event.target.closest("tr");
  if (!row || String(getSelection())) return undefined;
  focusOn(row, { preventScroll: true });
  return toggle(row);
});

body.addEventListener("keydown", (event) => {
  const row = event.target;
  if (!row.matches("tr") || event.altKey || event.ctrlKey || event.metaKey) return;
  const closed = row.getAttribute("aria-expanded") === "false";
  const down = () => focusOn(neighbour(row, "nextElementSibling"));
  const act = {
    ArrowDown: down,
    ArrowUp: () => focusOn(neighbour(row, "previousElementSibling")),
    ArrowRight: () => (closed ? toggle(row, true) : isOpen(row) && down()),
    ArrowLeft: () => (isOpen(row) ? toggle(row, false) : focusOn(parent(row))),
    Home: () => focusOn(body.rows[0]),
    End: () => focusOn([...body.rows].findLast((last) => !last.hidden)),
    Enter: () => toggle(row),
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

if (body.rows.length) body.rows[0].tabIndex = 0;
