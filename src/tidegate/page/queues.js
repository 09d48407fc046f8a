// Queues: shows how full they are and how they perform; puts and takes single messages, and shows dead letters.

import { get, post, put } from "./broker.js";
import { byId, formatAge, formatNumber, make, makeError, makeTable } from "./elements.js";

const LOOK_MS = 1500;
const QUEUES_SHOWN = 50;
const DEAD_SHOWN = 20;
const VISIBILITY_S = 60;
const NEAR_RATIO = 0.8;
const COLUMNS = [
  { title: "queue" },
  { title: "messages", isNumber: true },
  { title: "full", isNumber: true },
  { title: "leased", isNumber: true },
  { title: "parked requests", isNumber: true },
  { title: "in/s", isNumber: true },
  { title: "out/s", isNumber: true },
  { title: "hit rate", isNumber: true },
  { title: "oldest", isNumber: true },
  { title: "dead letters", isNumber: true },
];

let chosen = null;
let isShown = false;

export async function start() {
  byId("queue-new").addEventListener("submit", makeQueue);
  byId("queue-put").addEventListener("submit", putMessage);
  byId("queue-take").addEventListener("click", takeMessage);
  byId("queue-look").addEventListener("click", lookAtDead);
  byId("queue-redrive").addEventListener("click", redrive);
}

export function show() {
  if (!isShown) keepLooking();
}

async function keepLooking() {
  isShown = true;
  while (!byId("part-queues").hidden) {
    if (!document.hidden) await look().catch((error) => byId("queue-list").replaceChildren(makeError(error)));
    await new Promise((done) => setTimeout(done, LOOK_MS));
  }
  isShown = false;
}

async function look() {
  const { queues } = await get("/v1/queues");
  const shown = queues.slice(0, QUEUES_SHOWN);
  const found = await Promise.all(shown.map((queue) => get(path(queue.name, "stats")).catch(() => null)));
  const rows = shown.map((queue, at) => ({ queue, statistics: found[at] })).filter((row) => row.statistics !== null);
  showList(rows);
  const row = rows.find(({ queue }) => queue.name === chosen);
  byId("queue").hidden = row === undefined;
  if (row !== undefined) showQueue(row);
}

function showList(rows) {
  if (rows.length === 0) {
    byId("queue-list").replaceChildren(make("p", { class: "panel calm" }, "There are no queues yet. Create one below."));
    return;
  }
  const table = makeTable(
    COLUMNS,
    rows.map(({ queue, statistics }) => [
      make("button", { type: "button", class: "link", onclick: () => choose(queue.name) }, queue.name),
      formatNumber(statistics.messages),
      makeFill(queue, statistics),
      formatNumber(statistics.leased),
      formatNumber(statistics.parked),
      formatNumber(statistics.enqueued_s),
      formatNumber(statistics.delivered_s),
      statistics.hits + statistics.misses ? `${Math.round(statistics.hit_rate * 100)} %` : "–",
      statistics.messages ? formatAge(statistics.oldest_age_s) : "–",
      formatNumber(statistics.dead_letters),
    ]),
    "Queues",
  );
  [...table.tBodies[0].rows].forEach((row, at) => row.classList.toggle("chosen", rows[at].queue.name === chosen));
  // The table is replaced about every second; the focused button must keep the focus.
  const focused = [...byId("queue-list").querySelectorAll("button")].indexOf(document.activeElement);
  byId("queue-list").replaceChildren(table);
  if (focused >= 0) table.querySelectorAll("button")[focused]?.focus();
}

/** Shows how full a queue is. Marked when it is nearly full, unless it is meant to be full. */
function makeFill(queue, statistics) {
  const isRing = queue.filter !== null && queue.policy === "drop-oldest";
  const isOver = statistics.is_overflowing || statistics.holding_back_s > 0;
  const kind = isOver ? "over" : statistics.fill_ratio >= NEAR_RATIO && !isRing ? "near" : "";
  return make("span", { class: kind }, `${Math.floor(statistics.fill_ratio * 100)} %`);
}

function showQueue({ queue, statistics }) {
  byId("queue-name").textContent = queue.name;
  byId("queue-filter").textContent = queue.filter ? `filled by ${queue.filter}` : "filled by hand and by programs";
  const facts = [
    ["waiting", formatNumber(statistics.waiting)],
    ["leased", formatNumber(statistics.leased)],
    ["enqueued", formatNumber(statistics.enqueued)],
    ["delivered", formatNumber(statistics.delivered)],
    ["delivered again", formatNumber(statistics.redelivered)],
    ["deleted", formatNumber(statistics.deleted)],
    ["messages per hit", formatNumber(statistics.messages_a_hit)],
    ["size", `${formatNumber(statistics.bytes / 1024)} KiB`],
    ["method", statistics.method],
    ["durability", statistics.durability],
    ["physical queues", statistics.physical.length],
    ["when full", queue.policy === "block" ? `waits ${formatAge(queue.block_s)}, then ${queue.after_block}` : queue.policy],
    ["refused notifications", formatNumber(statistics.notifications_refused)],
    ["lifetime", queue.lifetime_s === null ? "no limit" : formatAge(queue.lifetime_s)],
    ["expired", formatNumber(statistics.expired_messages)],
  ];
  byId("queue-facts").replaceChildren(
    ...facts.map(([title, value]) => make("div", {}, make("dt", {}, title), make("dd", {}, value))),
  );
  byId("queue-redrive").disabled = byId("queue-look").disabled = statistics.dead_letters === 0;
  if (byId("queue-dead").children.length === 0 || statistics.dead_letters === 0) {
    const said = statistics.dead_letters ? `${formatNumber(statistics.dead_letters)} of them.` : "None.";
    byId("queue-dead").replaceChildren(make("p", { class: "calm" }, said));
  }
}

function choose(name) {
  chosen = name;
  for (const id of ["queue-taken", "queue-dead", "queue-put-said"]) byId(id).replaceChildren();
  look();
}

async function makeQueue(event) {
  event.preventDefault();
  const { name, filter } = Object.fromEntries(new FormData(event.target));
  try {
    await put(path(name), filter ? { filter } : {});
    byId("queue-new-error").replaceChildren();
    event.target.reset();
    choose(name);
  } catch (error) {
    byId("queue-new-error").replaceChildren(makeError(error, filter));
  }
}

async function putMessage(event) {
  event.preventDefault();
  await saying("queue-put-said", async () => {
    const body = parseJson(byId("queue-body").value);
    const { accepted, durability } = await post(path(chosen, "messages"), [{ body }]);
    return make("p", { class: "done" }, `${accepted} accepted, ${durability}`);
  });
}

async function takeMessage() {
  await saying("queue-taken", async () => {
    const { messages } = await post(path(chosen, "dequeue"), { max: 1, wait_s: 0, visibility_s: VISIBILITY_S });
    return messages.length ? makeTaken(chosen, messages[0]) : make("p", { class: "calm" }, "No message is waiting.");
  });
}

/** Shows a message that is leased to this page until it is deleted or given back, for at most a minute. */
function makeTaken(queue, message) {
  const settle = (action, done) => () =>
    saying("queue-taken", async () => {
      const answer = await post(path(queue, action), { receipts: [message.receipt] });
      return make("p", { class: answer.stale ? "calm" : "done" }, answer.stale ? "Its lease had expired." : done);
    });
  return make(
    "div",
    { class: "line" },
    make("code", {}, JSON.stringify(message.body)),
    make(
      "span",
      {},
      make("button", { type: "button", class: "quiet", onclick: settle("delete", "Deleted.") }, "Delete"),
      make("button", { type: "button", class: "quiet", onclick: settle("release", "Given back.") }, "Give back"),
    ),
  );
}

async function lookAtDead() {
  await saying("queue-dead", async () => {
    const dead = `${chosen}.dead`;
    const { physical_queues: count } = await get(path(dead));
    const read = (at) => get(`${path(dead, `physical/${at}/messages`)}?max=${DEAD_SHOWN}`);
    const parts = await Promise.all(Array.from({ length: count }, (_, at) => read(at)));
    const messages = parts.flatMap((part) => part.messages).sort((a, b) => a.enqueued_at - b.enqueued_at);
    return messages.slice(0, DEAD_SHOWN).map((message) =>
      make(
        "div",
        {},
        make("code", {}, JSON.stringify(message.body)),
        make("div", { class: "note" }, Object.entries(message.headers).map((pair) => pair.join(": ")).join(" · ")),
      ),
    );
  });
}

async function redrive() {
  await saying("queue-dead", async () => {
    const { redriven } = await post(path(chosen, "redrive"), {});
    return make("p", { class: "done" }, `${redriven} put back into ${chosen}.`);
  });
}

async function saying(id, act) {
  try {
    byId(id).replaceChildren(...[await act()].flat());
  } catch (error) {
    byId(id).replaceChildren(makeError(error));
  }
  look().catch(() => {});
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw Object.assign(new Error(error.message), { code: "JSON", remedy: 'write an object such as {"NO2": 212}' });
  }
}

function path(queue, rest = "") {
  return `/v1/queues/${encodeURIComponent(queue)}${rest && "/"}${rest}`;
}
