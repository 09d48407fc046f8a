// Knowledge: sends SPARQL to the knowledge base, by the SPARQL 1.1 protocol, and keeps persistent queries open.

import { call, protocols, stream } from "./broker.js";
import { byId, formatAge, formatNumber, make, makeError, makeTable } from "./elements.js";

const RESULTS = "application/sparql-results+json";
const ROWS_SHOWN = 500;
// Normal closure: the broker drops the subscription instead of keeping it for a reconnect.
const DONE = 1000;
const NONE = "This broker has no knowledge base";

let watching = null;

export async function start() {
  byId("ask").addEventListener("submit", ask);
  byId("persist").addEventListener("click", keepOpen);
}

/** Streams only while shown: a browser opens at most six connections per host, and a hidden stream would use one. */
export function show() {
  if (watching !== null) return;
  watching = new AbortController();
  stream("persistent_queries;interval_s", watching.signal, {
    delivery: ({ notification }) => notification && showControl(notification),
  });
}

export function hide() {
  watching?.abort();
  watching = null;
}

async function ask(event) {
  event.preventDefault();
  const query = byId("sparql").value;
  try {
    const results = await call("POST", "/v1/sparql", query, "application/sparql-query", RESULTS);
    byId("answer").replaceChildren(makeResults(results));
  } catch (error) {
    byId("answer").replaceChildren(error.status === 404 ? make("p", { class: "calm" }, `${NONE}.`) : makeError(error, query));
  }
}

/** Shows the result of a SELECT or an ASK, given in the JSON format of SPARQL 1.1. */
function makeResults({ head, results, boolean }) {
  return results === undefined ? makeYesOrNo(boolean) : makeRows(head.vars, results.bindings);
}

function makeYesOrNo(isTrue) {
  return make("p", {}, isTrue ? "Yes." : "No.");
}

function makeRows(names, bindings) {
  const columns = names.map((name) => ({ title: `?${name}` }));
  const shown = bindings.slice(0, ROWS_SHOWN);
  const rows = shown.map((binding) => names.map((name) => makeTerm(binding[name])));
  const more = bindings.length > ROWS_SHOWN ? `, the first ${ROWS_SHOWN} of them shown` : "";
  return make(
    "div",
    {},
    makeTable(columns, rows, "Results"),
    make("p", { class: "note" }, `${bindings.length} ${bindings.length === 1 ? "row" : "rows"}${more}`),
  );
}

function makeTerm(term) {
  if (term === undefined) return "";
  if (term.type === "uri") return make("code", {}, `<${term.value}>`);
  return term.type === "bnode" ? make("code", {}, `_:${term.value}`) : term.value;
}

/** Opens a persistent query and shows its current result, which the broker's messages update. */
function keepOpen() {
  const query = byId("sparql").value;
  const url = new URL(`/v1/persistent?query=${encodeURIComponent(query)}`, location.href);
  url.protocol = url.protocol.replace("http", "ws");
  const socket = new WebSocket(url, protocols());
  const result = make("div", { class: "scrolling" });
  const said = make("p", { class: "note", "aria-live": "polite" }, "opening…");
  const end = make("button", { type: "button", class: "quiet", onclick: () => socket.close(DONE) }, "End");
  byId("persistent").prepend(
    make("div", { class: "panel" }, make("div", { class: "heading" }, make("code", {}, query), end), result, said),
  );
  const open = { names: [], rows: [] };
  let wasOpen = false;
  socket.addEventListener("open", () => (wasOpen = true));
  socket.addEventListener("message", (event) => {
    const message = JSON.parse(event.data);
    if (message.error !== undefined) {
      said.replaceChildren(makeError(message.error));
      return;
    }
    follow(open, message);
    const isAsk = typeof open.rows[0] === "boolean";
    result.replaceChildren(isAsk ? makeYesOrNo(open.rows[0]) : makeRows(open.names, open.rows));
    said.textContent = describe(message);
  });
  socket.addEventListener("close", () => {
    end.disabled = true;
    if (!wasOpen) said.textContent = `${NONE}, or it refused this query. Press “Ask” to see the error.`;
    else if (!said.querySelector(".error")) said.textContent += " · ended";
  });
}

function follow(open, message) {
  if (message.variables !== undefined) open.names = message.variables;
  if (message.result !== undefined) open.rows = message.result;
  for (const row of message.removed ?? []) {
    const text = JSON.stringify(row);
    open.rows.splice(open.rows.findIndex((each) => JSON.stringify(each) === text), 1);
  }
  open.rows.push(...(message.added ?? []));
}

function describe({ sequence, added, removed, merged, interval_s }) {
  if (added === undefined) return interval_s > 0 ? `open; suggested check interval: ${formatAge(interval_s)} or longer` : "open";
  const more = merged > 0 ? `, ${merged + 1} changes merged` : "";
  return `change ${sequence}: ${added.length} added, ${removed.length} removed${more}`;
}

/** Shows how programs pace the checks of their persistent queries: t = AST + RBT. They publish it as notifications. */
function showControl(control) {
  const facts = [
    ["queries", formatNumber(control.persistent_queries)],
    ["check interval", formatAge(control.interval_s)],
    ["AST", formatAge(control.ast_s)],
    ["RBT", formatAge(control.rbt_s)],
    ["checks", formatNumber(control.checks)],
    ["congestion found", formatNumber(control.detections)],
    ["losses found", formatNumber(control.losses)],
    ["changes", formatNumber(control.changes)],
  ];
  byId("control").hidden = false;
  byId("control-facts").replaceChildren(
    ...facts.map(([title, value]) => make("div", {}, make("dt", {}, title), make("dd", {}, value))),
  );
}
