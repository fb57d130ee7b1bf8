// The module tree as a treegrid. Only what is open is in the document, and of long lists only the first rows.

const PAGE = 200; // rows of one parent at a time, and of what a search found

function moduleTree(host) {
  const tree = new Tree();
  const search = h("input", { type: "search", id: "search", placeholder: "Find modules and nodes", "aria-label": "Find modules and nodes", "aria-controls": "tree" });
  const found = h("span", { class: "quiet", role: "status" });
  let waiting = 0;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { found.textContent = tree.filter(search.value); }, 120);
  });
  tree.leave = () => { clearTimeout(waiting); search.value = ""; found.textContent = ""; };
  put(host, 
    h("div", { class: "bar" }, search, found),
    facts.nodes ? null : absent("This build does not say what its nodes are: compile again to see the nodes."),
    h("div", { class: "scroll" }, tree.table),
    h("p", { class: "quiet off-paper" }, "Arrow keys move and fold, Home and End go to the ends, Enter opens. ≠: forward, backward and weight gradients not all on one worker."));
}

class Tree {
  constructor() {
    const { modules, nodes } = facts;
    this.column = Object.fromEntries((nodes?.columns ?? []).map((name, i) => [name, i]));
    this.below = modules.map(() => []);
    modules.forEach((m, i) => missing(m.parent) || this.below[m.parent].push(i));
    this.own = modules.map(() => []);
    (nodes?.rows ?? []).forEach((row, i) => this.own[this.cell(row, "module") ?? 0]?.push(i));
    this.pages = new Map();
    this.open = new Set();
    this.only = null; // while searching: the rows of each parent that are shown
    this.before = null; // while searching: what was open before
    this.most = [0, 1].map((i) => greatest(modules.filter((m) => m.parent === 0).map((m) => sum((i ? m.backward : m.forward).map((p) => p[1])))));
    this.body = h("tbody");
    const head = [["module, node"], ["forward"], ["backward"], ["F ms", "n"], ["B ms", "n"], ["parameters", "n"], ["bytes", "n"], ["nodes", "n"]];
    this.table = h("table", { class: "tree", id: "tree", role: "treegrid", "aria-label": "Modules and nodes" },
      h("thead", null, h("tr", { role: "row" }, head.map(([label, kind]) => h("th", { role: "columnheader", class: kind }, label)))),
      this.body);
    this.body.addEventListener("click", (event) => this.click(event));
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("focusin", (event) => event.target.matches("tr") && this.current(event.target));
    this.openFirst();
    this.fill();
  }

  cell(row, name) {
    return row[this.column[name]];
  }

  /** Open the model, and as many levels as fit on a page. */
  openFirst() {
    let level = [0];
    let rows = 1;
    while (level.length) {
      const next = level.flatMap((m) => this.below[m]);
      if (!next.length || rows + next.length > 28) break;
      level.forEach((m) => this.below[m].length && this.open.add(`m${m}`));
      rows += next.length;
      level = next;
    }
    this.open.add("m0");
  }

  /** The keys of the rows below a row: m module, o a module's own nodes, n node, d what a node reads and who reads it. */
  children(key) {
    if (this.only?.has(key)) return this.only.get(key);
    const index = Number(key.slice(1));
    const nodes = () => this.own[index].map((n) => `n${n}`);
    if (key[0] === "n") return [`d${index}`];
    if (key[0] === "o") return nodes();
    if (key[0] !== "m") return [];
    const modules = this.below[index].map((m) => `m${m}`);
    return modules.length ? [...modules, ...(this.own[index].length ? [`o${index}`] : [])] : nodes();
  }

  fill() {
    this.body.replaceChildren();
    if (facts.modules.length) this.body.append(...this.rows("m0", 1, 1, 1));
    if (this.body.rows.length) this.body.rows[0].tabIndex = 0;
  }

  /** A row and all open rows below it. */
  rows(key, level, position, size) {
    const row = this.row(key, level, position, size);
    return this.open.has(key) && row.hasAttribute("aria-expanded") ? [row, ...this.rowsBelow(key, level)] : [row];
  }

  rowsBelow(key, level, from = 0) {
    const children = this.children(key);
    const to = Math.min(children.length, Math.max(from + PAGE, PAGE * (this.pages.get(key) ?? 1)));
    const rows = [];
    for (let i = from; i < to; i++) rows.push(...this.rows(children[i], level + 1, i + 1, children.length));
    if (to < children.length) {
      const more = h("tr", { role: "row", class: "can", "data-key": `+${key}`, "aria-level": level + 1, tabindex: -1 },
        h("td", { role: "gridcell", colspan: 8 }, h("span", { class: "where", style: `--level:${level}` },
          h("span", { class: "twist" }), h("span", { class: "quiet" }, `${count(children.length - to)} more: show the next ${Math.min(PAGE, children.length - to)}`))));
      more.next = to;
      rows.push(more);
    }
    return rows;
  }

  row(key, level, position, size) {
    const can = key[0] !== "d" && this.children(key).length > 0;
    const open = can && this.open.has(key);
    const index = Number(key.slice(1));
    const cells = { m: () => this.moduleCells(index), o: () => this.ownCells(index), n: () => this.nodeCells(index), d: () => this.nearCells(index) }[key[0]]();
    const [first, ...others] = cells;
    return h("tr", { role: "row", class: can && "can", "data-key": key, "aria-level": level, "aria-posinset": position, "aria-setsize": size,
      "aria-expanded": can ? String(open) : null, tabindex: -1 },
      h("td", { role: "gridcell", colspan: others.length ? null : 8 }, h("span", { class: "where", style: `--level:${level - 1}` },
        h("span", { class: "twist", "aria-hidden": "true" }, can ? "›" : ""), h("span", null, first))),
      others);
  }

  moduleCells(index) {
    const m = facts.modules[index];
    const place = ([worker, time, nodes]) => chip(worker, `worker ${worker}: ${ms(time)}, ${plural(nodes, "node")}`);
    const places = (pass) => (pass.length > 6 ? [place(pass[0]), " … ", place(pass.at(-1)), h("span", { class: "quiet" }, ` ${pass.length} workers`)] : pass.map(place));
    const time = (pass, most) => {
      const total = pass.some((p) => !missing(p[1])) ? sum(pass.map((p) => p[1])) : null;
      const part = index && total && most > 0 ? Math.min(1, total / most) : null; // of the widest module beside it at the top
      return derived("td", total, number, { role: "gridcell", class: part === null ? "n" : "n meter", style: part === null ? null : `--part:${(72 * part).toFixed(1)}%` });
    };
    const said = `${plural(m.apart, "unit")}: forward, backward and weight gradients not all on one worker`;
    return [
      h("span", { class: "path mono", title: m.path ?? m.name }, index ? m.name : moduleName(m)),
      h("td", { role: "gridcell" }, places(m.forward)),
      h("td", { role: "gridcell" }, places(m.backward), m.apart > 0 ? h("span", { class: "split", role: "img", title: said, "aria-label": said }, "≠") : null),
      time(m.forward, this.most[0]), time(m.backward, this.most[1]),
      shown("td", `modules.${index}.parameters`, count, { role: "gridcell", class: "n", title: m.owners?.length ? `owned by worker ${m.owners.join(", ")}` : null }),
      shown("td", `modules.${index}.parameter_bytes`, bytes, { role: "gridcell", class: "n" }),
      shown("td", `modules.${index}.nodes`, count, { role: "gridcell", class: "n" }),
    ];
  }

  ownCells(index) {
    const blank = () => h("td", { role: "gridcell" });
    return [h("span", { class: "quiet" }, "nodes of its own"), blank(), blank(), blank(), blank(), blank(), blank(),
      derived("td", this.own[index].length, count, { role: "gridcell", class: "n" })];
  }

  nodeCells(index) {
    const row = facts.nodes.rows[index];
    const value = (name) => this.cell(row, name);
    const path = (name) => `nodes.rows.${index}.${this.column[name]}`;
    const phase = value("phase");
    const where = (wanted) => h("td", { role: "gridcell" }, phase === wanted && !missing(value("worker")) ? chip(value("worker")) : null);
    const time = (wanted) => (phase === wanted ? shown("td", path("ms"), number, { role: "gridcell", class: "n" }) : h("td", { role: "gridcell" }));
    const line = [value("source"), value("text")].filter(Boolean).join(": ");
    return [
      [h("span", { class: "mono" }, value("name")), h("span", { class: "kind" }, [value("op"), value("type")].filter(Boolean).join(" ")),
        line ? h("span", { class: "line" }, line) : null],
      where("F"), where("B"), time("F"), time("B"), h("td", { role: "gridcell" }),
      shown("td", path("bytes"), bytes, { role: "gridcell", class: "n" }), h("td", { role: "gridcell" }),
    ];
  }

  nearCells(index) {
    const { rows } = facts.nodes;
    this.readers ??= rows.reduce((readers, row, i) => {
      for (const input of this.cell(row, "inputs") ?? []) (readers[input] ??= []).push(i);
      return readers;
    }, []);
    const links = (label, nodes) => h("div", null, `${label} `, nodes.length ? nodes.slice(0, 40).map((n, i) => [
      i ? ", " : "", h("button", { type: "button", class: "link", "data-node": n }, this.cell(rows[n], "name"))]) : "nothing",
    nodes.length > 40 ? ` and ${nodes.length - 40} more` : "");
    const unit = this.cell(rows[index], "unit");
    return [h("div", { class: "near" }, links("reads", this.cell(rows[index], "inputs") ?? []), links("is read by", this.readers[index] ?? []),
      missing(unit) ? null : h("div", null, `unit ${unit}${this.cell(rows[index], "weight") ? ", makes weight gradients alone" : ""}`))];
  }

  toggle(row, wanted) {
    const key = row.dataset.key;
    if (key[0] === "+") {
      const rows = this.rowsBelow(key.slice(1), Number(row.getAttribute("aria-level")) - 1, row.next);
      this.pages.set(key.slice(1), Math.ceil((row.next + PAGE) / PAGE));
      row.replaceWith(...rows);
      rows[0].focus();
      return;
    }
    const open = row.getAttribute("aria-expanded");
    if (open === null || open === String(wanted)) return;
    const level = Number(row.getAttribute("aria-level"));
    if (open === "true") {
      this.open.delete(key);
      while (row.nextElementSibling && Number(row.nextElementSibling.getAttribute("aria-level")) > level) row.nextElementSibling.remove();
    } else {
      this.open.add(key);
      row.after(...this.rowsBelow(key, level));
    }
    row.setAttribute("aria-expanded", String(open === "false"));
  }

  current(row) {
    this.body.querySelectorAll('tr[tabindex="0"]').forEach((other) => { other.tabIndex = -1; });
    row.tabIndex = 0;
  }

  click(event) {
    const link = event.target.closest("[data-node]");
    if (link) return this.reveal(Number(link.dataset.node));
    const row = event.target.closest("tr");
    if (!row || String(getSelection())) return undefined;
    row.focus({ preventScroll: true });
    return this.toggle(row);
  }

  key(event) {
    const row = event.target;
    if (!row.matches("tr") || event.altKey || event.ctrlKey || event.metaKey) return;
    const open = row.getAttribute("aria-expanded");
    const level = Number(row.getAttribute("aria-level"));
    const parent = () => {
      let up = row;
      while (up && Number(up.getAttribute("aria-level")) >= level) up = up.previousElementSibling;
      return up;
    };
    const act = {
      ArrowDown: () => row.nextElementSibling?.focus(),
      ArrowUp: () => row.previousElementSibling?.focus(),
      ArrowRight: () => (open === "false" ? this.toggle(row, true) : open === "true" && row.nextElementSibling?.focus()),
      ArrowLeft: () => (open === "true" ? this.toggle(row, false) : parent()?.focus()),
      Home: () => this.body.firstElementChild.focus(),
      End: () => this.body.lastElementChild.focus(),
      Enter: () => this.toggle(row),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  /** Open everything above a node and go there. */
  reveal(node) {
    if (this.only) {
      this.endSearch();
      this.leave();
    }
    const module = this.cell(facts.nodes.rows[node], "module") ?? 0;
    const place = this.below[module].length ? `o${module}` : `m${module}`;
    for (let m = module; !missing(m); m = facts.modules[m].parent) {
      this.open.add(`m${m}`);
      const above = facts.modules[m].parent;
      if (!missing(above)) this.reach(`m${above}`, this.below[above].indexOf(m));
    }
    if (place[0] === "o") this.reach(`m${module}`, this.below[module].length);
    this.open.add(place);
    this.reach(place, this.own[module].indexOf(node));
    this.fill();
    const row = this.body.querySelector(`[data-key="n${node}"]`);
    row.scrollIntoView({ block: "center" });
    row.focus();
  }

  reach(key, position) {
    this.pages.set(key, Math.max(this.pages.get(key) ?? 1, Math.ceil((position + 1) / PAGE)));
  }

  /** Show what holds `wanted` and the modules around it; all, if it is empty. Says what was found. */
  filter(wanted) {
    const query = wanted.trim().toLowerCase();
    if (!query) {
      this.endSearch();
      this.fill();
      return "";
    }
    this.before ??= new Set(this.open);
    const hits = [];
    facts.modules.forEach((m, i) => i && moduleName(m).toLowerCase().includes(query) && hits.push(`m${i}`));
    const modules = hits.length;
    (facts.nodes?.rows ?? []).forEach((row, i) => {
      const has = (name) => String(this.cell(row, name) ?? "").toLowerCase().includes(query);
      if (has("name") || has("op") || has("source") || has("text")) hits.push(`n${i}`);
    });
    this.narrow(hits.slice(0, PAGE));
    const what = `${plural(modules, "module")}, ${plural(hits.length - modules, "node")}`;
    return hits.length > PAGE ? `${what}; the first ${PAGE} are shown` : what;
  }

  endSearch() {
    this.only = null;
    this.open = this.before ?? this.open;
    this.before = null;
  }

  narrow(hits) {
    this.only = new Map();
    this.open = new Set(["m0"]);
    const add = (parent, key) => {
      const shownThere = this.only.get(parent) ?? [];
      if (!shownThere.includes(key)) this.only.set(parent, [...shownThere, key]);
      this.open.add(parent);
    };
    this.only.set("m0", []);
    for (const key of hits) {
      let module = Number(key.slice(1));
      if (key[0] === "n") {
        module = this.cell(facts.nodes.rows[module], "module") ?? 0;
        if (this.below[module].length) {
          add(`o${module}`, key);
          add(`m${module}`, `o${module}`);
        } else add(`m${module}`, key);
      }
      for (let m = module; m; m = facts.modules[m].parent ?? 0) add(`m${facts.modules[m].parent ?? 0}`, `m${m}`);
    }
    this.fill();
  }
}
