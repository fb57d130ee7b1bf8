// Elements, the tooltip, and moving among many things with one tab stop. Text is always text, never markup.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** h("p", {class: "quiet"}, "text", child): an HTML element. */
const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);

/** The same for SVG. */
const g = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

/** Append what is there of `children`. */
const put = (element, ...children) => fill(element, null, children);

const tip = byId("tip");

/** Show `lines`, the first one strong, beside a point of the window. With `spoken`, readers of the screen hear it. */
function showTip(lines, x, y, spoken = false) {
  tip.replaceChildren(...lines.filter(Boolean).map((line, i) => h(i ? "div" : "strong", null, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x + 14), document.documentElement.clientWidth - box.width - 8);
  const below = y + 18 + box.height < window.innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? y + 18 : Math.max(8, y - box.height - 12)}px`;
  if (spoken) byId("live").textContent = tip.textContent && [...tip.children].map((c) => c.textContent).join(", ");
}

let anchor = null; // the element that has the focus and the tooltip, with its lines

function hideTip() {
  tip.hidden = true;
  anchor = null;
}

/** Show the lines of an element that has the focus, and keep them beside it when the page scrolls. */
function tipAt(element, lines) {
  const box = element.getBoundingClientRect();
  const spoken = anchor?.element !== element;
  showTip(lines, box.left + box.width / 2, Math.min(box.bottom, window.innerHeight - 40) - 14, spoken);
  anchor = { element, lines };
}

/** Give `items` one tab stop together; the arrow keys, Home and End go from one to the next. */
function rove(items, describe) {
  items.forEach((item, i) => {
    item.setAttribute("tabindex", i ? -1 : 0);
    item.addEventListener("focus", () => tipAt(item, describe(i)));
    item.addEventListener("blur", hideTip);
    item.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: items.length - 1 };
      if (event.key === "Escape") hideTip();
      if (!(event.key in to)) return;
      event.preventDefault();
      const next = items[Math.min(items.length - 1, Math.max(0, to[event.key]))];
      item.setAttribute("tabindex", -1);
      next.setAttribute("tabindex", 0);
      next.focus();
    });
  });
}

addEventListener("scroll", () => (anchor ? tipAt(anchor.element, anchor.lines) : hideTip()), { passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
