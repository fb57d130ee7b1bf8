// What depends on the mouse, the keyboard or what is open: tooltips, the arrow keys, the zoom of the timeline, what is
// folded, the tree and the contents. All else is made where the page is written.

const byId = (id) => document.getElementById(id);
const plural = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;

// What is folded is text until it is opened: put its elements in the place of that text.
function unfold(script) {
  const template = document.createElement("template");
  template.innerHTML = script.textContent; // made, and escaped, where the page was written
  script.replaceWith(template.content);
}

for (const box of document.querySelectorAll("details")) {
  box.addEventListener("toggle", () => box.open && box.lastElementChild.matches("script") && unfold(box.lastElementChild));
}

// Tooltips: the lines of `data-tip` of what is under the mouse or has the focus, the first one strong.

const tip = byId("tip");
let anchor = null; // the element that has the focus and the tooltip

function showTip(element, x, y) {
  tip.replaceChildren(...element.dataset.tip.split("\n").map((line, i) => {
    const part = document.createElement(i ? "div" : "strong");
    part.textContent = line;
    return part;
  }));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(x + 14, document.documentElement.clientWidth - box.width - 8);
  const below = y + 18 + box.height < window.innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? y + 18 : Math.max(8, y - box.height - 12)}px`;
}

function hideTip() {
  tip.hidden = true;
  anchor = null;
}

/** Show what is told of the element that has the focus, and keep it there when the page scrolls. */
function tipAt(element) {
  const box = element.getBoundingClientRect();
  showTip(element, Math.max(0, box.left + Math.min(box.width, 200) / 2), Math.min(box.bottom, window.innerHeight - 40) - 14);
  anchor = element;
}

addEventListener("pointermove", (event) => {
  const told = event.target.closest?.("[data-tip]");
  if (told) showTip(told, event.clientX, event.clientY);
  else if (!anchor) hideTip();
});
addEventListener("scroll", () => (anchor ? tipAt(anchor) : hideTip()), { passive: true, capture: true });
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());

// The elements `data-rove` of a drawing have one tab stop together; the arrow keys, Home and End go from one to the next.

for (const host of document.querySelectorAll("[data-rove]")) {
  const items = [...host.querySelectorAll(host.dataset.rove)];
  items.forEach((item, i) => { item.tabIndex = i ? -1 : 0; });

  /** Where an item's row has neighbours above and below, the last one there that begins before the item does. */
  const beside = (item, way) => {
    const rows = [...host.querySelectorAll(".row")].filter((row) => row.querySelector("[tabindex]"));
    if (!rows.length) return items[items.indexOf(item) + way];
    const row = rows[rows.indexOf(item.parentElement) + way];
    const before = (other) => other.getBoundingClientRect().left <= item.getBoundingClientRect().left + 0.5;
    return row && ([...row.querySelectorAll("[tabindex]")].findLast(before) ?? row.querySelector("[tabindex]"));
  };

  host.addEventListener("focusin", ({ target }) => {
    if (!target.dataset.tip) return;
    target.setAttribute("role", "img");
    target.setAttribute("aria-label", target.dataset.tip.replaceAll("\n", ", "));
    byId("live").textContent = target.getAttribute("aria-label");
    tipAt(target);
  });
  host.addEventListener("focusout", hideTip);
  host.addEventListener("keydown", (event) => {
    const at = items.indexOf(event.target);
    const to = {
      ArrowRight: () => items[at + 1], ArrowLeft: () => items[at - 1], Home: () => items[0], End: () => items.at(-1),
      ArrowDown: () => beside(event.target, 1), ArrowUp: () => beside(event.target, -1),
    }[event.key];
    if (at < 0 || !to) return;
    event.preventDefault();
    const next = to() ?? event.target;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

// The timeline: all of the time is `--zoom` times as wide as what is seen of it.

if (byId("spans")) {
  const view = document.querySelector(".view");
  const zoom = () => Number(view.style.getPropertyValue("--zoom"));
  const show = (wanted, middle = (view.scrollLeft + view.clientWidth / 2) / view.scrollWidth) => {
    view.style.setProperty("--zoom", Math.min(Math.max(1, wanted), 1000));
    view.scrollLeft = middle * view.scrollWidth - view.clientWidth / 2;
  };
  const acts = {
    first: () => show(Number(view.dataset.first), 0), all: () => show(1), in: () => show(zoom() * 2), out: () => show(zoom() / 2),
    earlier: () => { view.scrollLeft -= view.clientWidth / 2; }, later: () => { view.scrollLeft += view.clientWidth / 2; },
  };
  byId("zoom").addEventListener("click", (event) => acts[event.target.dataset.do]?.());
  view.addEventListener("keydown", (event) => acts[{ "+": "in", "-": "out" }[event.key]]?.());
}

const links = new Map([...document.querySelectorAll("#contents a")].map((link) => [link.hash.slice(1), link]));
const passing = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) {
    links.forEach((link, id) => (id === entry.target.id ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  }
}, { rootMargin: "-20% 0px -70% 0px" });
document.querySelectorAll("main > section").forEach((part) => passing.observe(part));

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
document.documentElement.dataset.ready = "";
