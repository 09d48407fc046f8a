// Subscriptions: tries a filter on the live notifications, and explains why a notification matches it or not.

import { post, stream } from "./broker.js";
import { byId, formatNumber, make, makeError } from "./elements.js";

const SHOWN = 30;
const SAMPLE_MS = 1000;
const SHOW_MS = 150;

let trying = null;
let passing = null;
let sampled = { notification: null, of: 0 };

export async function start() {
  byId("try").addEventListener("submit", (event) => (event.preventDefault(), tryFilter()));
  byId("try-stop").addEventListener("click", stop);
  byId("why").addEventListener("submit", (event) => (event.preventDefault(), explain()));
}

/** Subscribes to everything only while shown, because each notification costs the broker a delivery. */
export function show() {
  if (passing !== null) return;
  passing = new AbortController();
  stream("*", passing.signal, { delivery: ({ notification }) => notification && sample(notification) });
  showSampled(passing.signal);
}

export function hide() {
  passing?.abort();
  passing = null;
}

/** Picks one of the notifications of a second, each with the same probability. */
function sample(notification) {
  sampled.of += 1;
  if (Math.random() * sampled.of < 1) sampled.notification = notification;
}

function showSampled(signal) {
  if (signal.aborted) return;
  if (sampled.of > 0) prepend(byId("passing"), [sampled.notification]);
  sampled = { notification: null, of: 0 };
  setTimeout(() => showSampled(signal), SAMPLE_MS);
}

function tryFilter() {
  stop();
  const filter = byId("try-filter").value;
  const mine = (trying = new AbortController());
  let [count, missed, waiting] = [0, 0, []];
  const showSoon = () => {
    if (mine.signal.aborted) return;
    prepend(byId("matching"), waiting.splice(0).reverse());
    byId("try-count").textContent = `${formatNumber(count)} so far${missed ? `, ${formatNumber(missed)} missed because they arrive too fast` : ""}`;
  };
  byId("try-error").replaceChildren();
  byId("matching").replaceChildren();
  byId("try-count").textContent = "…";
  byId("try-stop").disabled = false;
  stream(filter, mine.signal, {
    state: showSoon,
    delivery: ({ notification, gap }) => {
      missed += gap ?? 0;
      if (notification === undefined) return;
      count += 1;
      if (waiting.push(notification) === 1) setTimeout(showSoon, SHOW_MS);
      if (waiting.length > SHOWN) waiting.splice(1, 1);
    },
    error: (error) => {
      if (mine.signal.aborted) return;
      stop();
      byId("try-error").replaceChildren(makeError(error, filter));
    },
  });
}

function stop() {
  trying?.abort();
  trying = null;
  byId("try-stop").disabled = true;
  if (byId("try-count").textContent === "…") byId("try-count").textContent = "";
}

function prepend(list, notifications) {
  list.prepend(
    ...notifications.slice(0, SHOWN).map((notification) => {
      const ask = () => {
        byId("why-notification").value = JSON.stringify(notification, null, 1);
        explain();
      };
      const button = make("button", { type: "button", class: "quiet", onclick: ask }, "why?");
      return make("div", { class: "line" }, make("code", {}, ...describe(notification)), make("span", {}, button));
    }),
  );
  while (list.children.length > SHOWN) list.lastChild.remove();
}

function describe(notification) {
  return Object.entries(notification).flatMap(([name, value]) => [
    make("span", { class: "soft" }, `${name}=`),
    `${typeof value === "string" ? value : JSON.stringify(value)} `,
  ]);
}

async function explain() {
  const filter = byId("try-filter").value;
  const said = byId("why-said");
  let notification;
  try {
    notification = JSON.parse(byId("why-notification").value);
  } catch (error) {
    said.replaceChildren(makeError({ code: "JSON", message: error.message, remedy: 'write an object such as {"NO2": 212}' }));
    return;
  }
  try {
    const { matches, constraints } = await post("/v1/why", { filter, notification });
    const verdict = make("p", { class: matches ? "holds" : "fails" }, matches ? "It matches." : "It does not match.");
    const lines = constraints.map(({ text, holds, reason }) =>
      make(
        "li",
        {},
        make("span", { class: holds ? "holds" : "fails", role: "img", "aria-label": holds ? "holds" : "fails" }, holds ? "✓" : "✗"),
        make("code", {}, text),
        make("span", {}, reason),
      ),
    );
    said.replaceChildren(verdict, make("ul", { class: "verdict" }, ...lines));
  } catch (error) {
    said.replaceChildren(makeError(error, filter));
  }
  said.scrollIntoView({ block: "nearest" });
}
