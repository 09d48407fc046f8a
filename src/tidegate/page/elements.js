// All access of the parts to the document. Data from outside is always inserted as text, never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** make("button", { class: "quiet", onclick: … }, "Delete"): children are elements; anything else becomes text. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

/** Makes a table. `columns` are { title, isNumber? }, `rows` are lists of texts or elements. */
export function makeTable(columns, rows, caption) {
  const kind = (column) => (column.isNumber ? "number" : "");
  const head = columns.map((column) => make("th", { scope: "col", class: kind(column) }, column.title));
  const body = rows.map((row) =>
    make("tr", {}, ...row.map((cell, at) => make("td", { class: kind(columns[at]) }, cell))),
  );
  return make(
    "table",
    {},
    make("caption", { class: "unseen" }, caption),
    make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {}, ...body),
  );
}

/** Shows an error of the broker with its code. An invalid filter is shown with the column marked. */
export function makeError(error, text = "") {
  const said = make("p", {}, make("strong", {}, error.code ?? "error"), ` ${error.message}`);
  const cure = error.remedy ? make("p", { class: "cure" }, error.remedy) : "";
  if (error.column === undefined) return make("div", { class: "error" }, said, cure);
  const at = error.column - 1;
  const marked = make(
    "pre",
    { class: "marked", "data-column": error.column },
    text.slice(0, at),
    make("mark", {}, text.slice(at, at + 1) || " "),
    text.slice(at + 1),
  );
  return make("div", { class: "error" }, marked, said, cure, make("p", { class: "cure" }, `column ${error.column}`));
}

/** Formats 12345.678 as 12,346; small numbers keep two digits. */
export function formatNumber(value) {
  if (!Number.isFinite(value)) return "–";
  const digits = Number.isInteger(value) || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function formatAge(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${formatNumber(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}
