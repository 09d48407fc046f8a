// Path: shows the layers that a notification passes through, the load of each, and its slices.

import { get, post, watchStatus } from "./broker.js";
import { drawChart } from "./chart.js";
import { byId, formatAge, formatNumber, make, makeError } from "./elements.js";

// As many as the broker keeps, one per second.
const LOOKS_MAX = 600;
const GAP_S = 5;
const LAYERS = [
  { key: "connection_points", load: "connection_point", title: "Connection Point", work: "Holds sessions, publishers, limits and the outboxes of subscribers.", counts: "accepted" },
  { key: "access_points", load: "access_point", title: "Access Point", work: "Numbers each batch and keeps it until it is delivered.", counts: "notifications" },
  { key: "matchers", load: "matcher", title: "Matcher", work: "Finds the filters that a notification satisfies.", counts: "notifications" },
  { key: "exit_points", load: "exit_point", title: "Exit Point", work: "Joins the answers of all Matchers and keeps the order.", counts: "notifications" },
];
const SLICE_PREFIXES = { connection_points: "connection-point-", access_points: "access-point-", matchers: "matcher-", exit_points: "exit-point-" };
const LEVELS = [
  ["sessions", "sessions"],
  ["subscriptions", "subscriptions"],
  ["publishers", "publishers"],
  ["outbox_notifications", "waiting in outboxes"],
  ["bytes_under_way", "bytes in flight"],
  ["blocked_outboxes", "blocked outboxes"],
  ["dropped", "dropped"],
  ["refused", "refused"],
  ["duplicates", "duplicates"],
];

let accepted = [];
let delivered = [];
let seen = null; // { now, rate }
let isScaling = false;
const typed = new Set(); // the fields that the user has changed since the last scaling

export async function start() {
  watchStatus((now, before) => now && look(now, before));
  byId("scale").addEventListener("submit", scale);
  byId("scale").addEventListener("input", (event) => typed.add(event.target));
}

export function show() {
  if (seen !== null && !byId("part-path").hidden) draw(seen.now, seen.rate);
}

function look(now, before) {
  const rate = rates(now, before);
  if (before === null || now.uptime_s - before.uptime_s > GAP_S) {
    lookBack().catch(() => {});
  } else {
    accepted.push({ at: Date.now(), value: rate("connection_point", "accepted") });
    delivered.push({ at: Date.now(), value: rate("connection_point", "delivered") });
    if (accepted.length > LOOKS_MAX) [accepted, delivered].forEach((line) => line.shift());
  }
  seen = { now, rate };
  show();
}

/** Loads the rates that the broker has kept: when the page is opened, or was hidden for a while. */
async function lookBack() {
  const { rates } = await get("/v1/rates");
  const line = (name) => rates.map((rate) => ({ at: rate.at * 1000, value: rate[name] }));
  [accepted, delivered] = [line("accepted"), line("delivered")];
}

function draw(now, rate) {
  byId("layers").replaceChildren(...LAYERS.map((layer) => makeLayer(layer, now, rate)));
  byId("epoch").textContent = `epoch ${now.epoch}, up ${formatAge(now.uptime_s)}`;
  byId("delays").textContent = now.delays_ms
    ? `a batch passes the layers in ${formatNumber(now.delays_ms.p50)} ms (median), 99 of 100 in ${formatNumber(now.delays_ms.p99)} ms`
    : "no batch in the last second";
  const edge = now.load.connection_point;
  byId("levels").replaceChildren(
    ...LEVELS.map(([name, title]) => make("div", {}, make("dt", {}, title), make("dd", {}, formatNumber(edge[name])))),
  );
  drawChart(byId("rates"), [accepted, delivered], { label: describeRates() });
  if (isScaling) byId("scaled").replaceChildren(makeUnderWay(now));
  else fillCounts(now.configuration);
}

/** Returns a function that gives the rate per second of a layer's counter; NaN if it is unknown. */
function rates(now, before) {
  return (layer, counter) => {
    const [new_, old] = [now.load[layer]?.[counter], before?.load[layer]?.[counter]];
    return (new_ - old) / (now.uptime_s - before?.uptime_s);
  };
}

function makeLayer({ key, load, title, work, counts }, now, rate) {
  const known = Object.entries(now.slices ?? {}).filter(([name]) => name.startsWith(SLICE_PREFIXES[key]));
  const names = now.configuration[key] ?? (known.length ? known.map(([name]) => name) : ["connection-point"]);
  const slices = names.map((name) => makeSlice(name, now.slices?.[name]));
  const inCluster = known.reduce((sum, [, slice]) => sum + slice.notifications_per_s, 0);
  const a_second = now.slices === undefined ? rate(load, counts) : inCluster;
  return make(
    "li",
    { "data-layer": key },
    make(
      "div",
      { class: "panel" },
      make("h2", {}, title),
      make("p", { class: "work" }, work),
      make("ul", { class: "slices", "aria-label": `slices of ${title}` }, ...slices),
      make("dl", { class: "readings" }, ...facts(load, now, a_second)),
    ),
  );
}

function facts(layer, now, a_second) {
  const load = now.load[layer] ?? {};
  const shown = [["notifications/s", a_second]];
  if (layer === "connection_point") shown.push(["in outboxes", load.outbox_notifications]);
  if (layer === "access_point") shown.push(["in flight", load.unacknowledged_batches]);
  if (layer === "matcher") shown.push(["filters", load.filters]);
  if (layer === "exit_point") shown.push(["incomplete", load.incomplete_batches]);
  return shown
    .filter(([, value]) => value !== undefined)
    .map(([title, value]) => make("div", {}, make("dt", {}, title), make("dd", {}, formatNumber(value))));
}

function makeSlice(name, slice) {
  if (slice === undefined) return make("li", {}, name);
  const busy = make("meter", { min: 0, max: 1, high: 0.8, value: slice.busy_share, "aria-label": `${name} is busy` });
  return make("li", { title: `${Math.round(slice.busy_share * 100)} % of a core` }, name, busy);
}

function describeRates() {
  const last = (line) => formatNumber(line.at(-1)?.value ?? NaN);
  return `now ${last(accepted)} notifications per second accepted, ${last(delivered)} delivered`;
}

// Scaling.

/** Shows the current counts, except in fields that the user has changed. */
function fillCounts(configuration) {
  for (const input of byId("scale").querySelectorAll("input")) {
    if (!typed.has(input)) input.value = configuration[input.name].length;
  }
}

async function scale(event) {
  event.preventDefault();
  const inputs = [...event.target.querySelectorAll("input")];
  const button = event.target.querySelector("button");
  const given = inputs.filter((input) => input.value !== "");
  const counts = Object.fromEntries(given.map((input) => [input.name, Number(input.value)]));
  isScaling = button.disabled = true;
  show();
  try {
    byId("scaled").replaceChildren(makeOutcome(await post("/v1/scale", counts)));
  } catch (error) {
    byId("scaled").replaceChildren(makeError(error));
  } finally {
    isScaling = button.disabled = false;
    typed.clear();
  }
}

/** Shows what the probe has measured so far. */
function makeUnderWay({ epoch, scaling }) {
  const text = make("p", { class: "calm" }, "Changing the layers while notifications flow; a probe measures the effect…");
  if (scaling === undefined) return text;
  const counted = [
    ["epoch", epoch],
    ["probes", formatNumber(scaling.probes)],
    ["longest delay", `${formatNumber(scaling.longest_delay_ms)} ms`],
    ["duplicates", scaling.doubled],
    ["out of order", scaling.disordered],
  ];
  return make("div", {}, text, makeCounts(counted, "readings"));
}

function makeOutcome(outcome) {
  const counted = [
    ["epoch", outcome.epoch],
    ["longest delay", `${formatNumber(outcome.longest_delay_ms)} ms`],
    ["before the change", `${formatNumber(outcome.longest_delay_before_ms)} ms`],
    ["lost", outcome.lost],
    ["duplicates", outcome.doubled],
    ["subscriptions moved", outcome.moved],
    ["duration", formatAge(outcome.seconds)],
  ];
  return makeCounts(counted, "readings done");
}

function makeCounts(counted, kind) {
  return make(
    "dl",
    { class: kind },
    ...counted.map(([title, value]) => make("div", {}, make("dt", {}, title), make("dd", {}, value))),
  );
}
