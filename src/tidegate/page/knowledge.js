// Knowledge: SPARQL to the knowledge base, by the SPARQL 1.1 protocol, and queries that stay open.

import { call, protocols } from "./broker.js";
import { byId, make, makeError, makeTable } from "./elements.js";

const RESULTS = "application/sparql-results+json";
const ROWS_SHOWN = 500;
const NONE = "This broker serves no knowledge base";

export async function start() {
  byId("ask").addEventListener("submit", ask);
  byId("persist").addEventListener("click", keepOpen);
}

export function show() {}

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

/** Of a SELECT or an ASK, in the JSON format of SPARQL 1.1. */
function makeResults({ head, results, boolean }) {
  if (results === undefined) return make("p", {}, boolean ? "Yes." : "No.");
  const columns = head.vars.map((name) => ({ title: `?${name}` }));
  const shown = results.bindings.slice(0, ROWS_SHOWN);
  const rows = shown.map((binding) => head.vars.map((name) => makeTerm(binding[name])));
  const more = results.bindings.length > ROWS_SHOWN ? `, the first ${ROWS_SHOWN} of them shown` : "";
  return make(
    "div",
    {},
    makeTable(columns, rows, "Results"),
    make("p", { class: "note" }, `${results.bindings.length} rows${more}`),
  );
}

function makeTerm(term) {
  if (term === undefined) return "";
  if (term.type === "uri") return make("code", {}, `<${term.value}>`);
  return term.type === "bnode" ? make("code", {}, `_:${term.value}`) : term.value;
}

function keepOpen() {
  const query = byId("sparql").value;
  const url = new URL(`/v1/persistent?query=${encodeURIComponent(query)}`, location.href);
  url.protocol = url.protocol.replace("http", "ws");
  const socket = new WebSocket(url, protocols());
  const events = make("div", { class: "events", "aria-live": "polite" }, make("p", { class: "calm" }, "opening…"));
  const end = make("button", { type: "button", class: "quiet", onclick: () => socket.close() }, "End");
  byId("persistent").prepend(
    make("div", { class: "panel" }, make("div", { class: "heading" }, make("code", {}, query), end), events),
  );
  let wasOpen = false;
  socket.addEventListener("open", () => {
    wasOpen = true;
    events.replaceChildren();
  });
  socket.addEventListener("message", (event) => {
    events.prepend(make("code", {}, event.data));
    while (events.children.length > ROWS_SHOWN) events.lastChild.remove();
  });
  socket.addEventListener("close", (event) => {
    end.disabled = true;
    if (!wasOpen) events.replaceChildren(make("p", { class: "calm" }, `${NONE}, or refuses this query.`));
    else events.prepend(make("p", { class: "calm" }, event.reason || "ended"));
  });
}
