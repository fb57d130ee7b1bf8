// Tables: made when they are looked at, in pages, and scrolled within themselves where they are wide.

const ROWS = 500; // that a long table shows at a time

/**
 * A table of `count` rows; `row(i)` gives the cells of one. Columns are {label, kind}: kind "n" for numbers.
 */
function table(caption, columns, count, row) {
  const body = h("tbody");
  const more = h("button", { type: "button", class: "more", onclick: () => extend() });
  const made = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", null,
      h("caption", { class: "unseen" }, caption),
      h("thead", null, h("tr", null, columns.map((c) => h("th", { scope: "col", class: c.kind, title: c.title }, c.label)))),
      body),
  );
  function extend() {
    const from = body.rows.length;
    const to = Math.min(count, from + ROWS);
    for (let i = from; i < to; i++) body.append(h("tr", null, row(i)));
    more.textContent = `${(count - to).toLocaleString("en")} more rows: show ${Math.min(ROWS, count - to)}`;
    if (to < count) made.append(more);
    else more.remove();
  }
  extend();
  return made;
}

/** A table that opens; it is made when it is first opened. */
function fold(summary, make, properties) {
  const box = h("details", properties, h("summary", null, summary));
  box.addEventListener("toggle", () => box.open && box.children.length === 1 && box.append(make()));
  return box;
}

const SECTIONS = [];

/** A section of the page, with an entry in its contents. */
function section(id, title, lead, ...children) {
  SECTIONS.push([id, title]);
  const made = h("section", { id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title), lead && h("p", { class: "lead" }, lead), ...children);
  byId("main").append(made);
  return made;
}

const absent = (...what) => h("p", { class: "missing" }, ...what);
