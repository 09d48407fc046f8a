// All access of the parts to the broker: calls, and streams that reconnect. If the broker requires a token, the page
// takes it from its own address or asks for it once, and keeps it until the tab is closed. Streams are read with fetch
// instead of EventSource, which cannot send a token.

const TOKEN = "tidegate-token";
const TOKEN_REMEDY = "press “Enter token” above; tidegate serve prints the token, or ask the broker's operator";
const RETRY_MS = [500, 1000, 2000, 5000];
const STATUS_MS = 1000;
const READ_MAX = 1000;

export class BrokerError extends Error {
  constructor(status, error) {
    super(error.message);
    Object.assign(this, { status, code: error.code, remedy: error.remedy, column: error.column });
  }
}

let askForToken = async () => "";
let asking = null;
let isDeclined = false;

/** Sets the async function that asks the user for a token. */
export function onTokenWanted(ask) {
  askForToken = ask;
}

/**
 * Stores the token of an address such as /#token=…, as `tidegate serve` prints it, and removes it from the address bar
 * and the browser's history. The fragment of an address is never sent over the network. Returns whether there was one.
 */
export function takeTokenFromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given === null) return false;
  sessionStorage.setItem(TOKEN, given.trim());
  history.replaceState(null, "", location.pathname);
  return true;
}

/** Returns the subprotocols of a WebSocket. It cannot set headers, so one carries the token: see listeners/gate.py. */
export function protocols() {
  const encoded = btoa(token()).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return encoded ? ["tidegate", `tidegate-token.${encoded}`] : [];
}

export function get(path) {
  return call("GET", path);
}

export function post(path, body) {
  return call("POST", path, JSON.stringify(body), "application/json");
}

export function put(path, body) {
  return call("PUT", path, JSON.stringify(body), "application/json");
}

/** Returns the parsed JSON, or throws a BrokerError with the code, the message and the remedy. */
export async function call(method, path, body, type, accept = "application/json") {
  const response = await request(path, { method, body, headers: { Accept: accept, ...(type && { "Content-Type": type }) } });
  return response.status === 204 ? null : response.json();
}

/**
 * Reads the server-sent events of /v1/stream for a filter until `signal` aborts. `on.delivery` gets each delivery,
 * `on.state` "live" or "broken". `on.error` gets errors that a retry cannot fix, such as an invalid filter.
 */
export async function stream(filter, signal, on) {
  for (let failures = 0; !signal.aborted; failures++) {
    try {
      const response = await request(`/v1/stream?filter=${encodeURIComponent(filter)}`, { signal });
      on.state?.("live");
      failures = 0;
      await readEvents(response.body, (data) => on.delivery(data));
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof BrokerError && error.status < 429) return on.error?.(error);
    }
    on.state?.("broken");
    await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
  }
}

/**
 * Does the same as `stream`, but first delivers earlier notifications if a queue holds them. Such a queue has exactly
 * this filter, drops its oldest messages, and keeps the order because it has one physical queue. Then `at` of a
 * delivery is the time when it was queued, in ms.
 */
export async function streamWithPast(filter, signal, on) {
  for (const { body, enqueued_at } of await lookBack(filter).catch(() => [])) {
    on.delivery({ notification: body, at: enqueued_at * 1000 });
  }
  return stream(filter, signal, on);
}

async function lookBack(filter) {
  const { queues } = await get("/v1/queues");
  const isMemory = (queue) => queue.filter === filter && queue.policy === "drop-oldest" && queue.physical_queues === 1;
  const memory = queues.find(isMemory);
  const remembered = [];
  for (let [next, isMore] = [0, memory !== undefined]; isMore; ) {
    const part = await get(`/v1/queues/${memory.name}/physical/0/messages?from=${next}&max=${READ_MAX}`);
    remembered.push(...part.messages);
    next = part.next;
    isMore = part.messages.length === READ_MAX;
  }
  return remembered;
}

/**
 * Calls `listener(now, before, error)` with /v1/layers about once a second while the page is visible. If the broker does
 * not answer, `now` is null and `error` is the reason.
 */
export function watchStatus(listener) {
  watchers.push(listener);
  if (watchers.length === 1) lookAtStatus();
}

const watchers = [];
let seen = null;

async function lookAtStatus() {
  if (!document.hidden) {
    let error = null;
    const now = await get("/v1/layers").catch((reason) => ((error = reason), null));
    const before = seen && now && seen.broker === now.broker ? seen : null;
    seen = now;
    for (const watcher of watchers) watcher(now, before, error);
  }
  setTimeout(lookAtStatus, STATUS_MS);
}

function token() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

async function request(path, options) {
  const shown = token();
  const headers = { ...options.headers, ...(shown && { Authorization: `Bearer ${shown}` }) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const error = body.error ?? { code: `HTTP ${response.status}`, message: response.statusText || "no answer" };
  if (response.status !== 401) throw new BrokerError(response.status, error);
  if (shown === token()) {
    // Requests that fail while the dialog is open wait for its answer. A user who declined is not asked again.
    if (!isDeclined) asking ??= askForToken(error).finally(() => (asking = null));
    const given = await asking;
    isDeclined = !given;
    if (isDeclined) throw new BrokerError(401, { ...error, remedy: TOKEN_REMEDY });
    sessionStorage.setItem(TOKEN, given);
  }
  return request(path, options);
}

async function readEvents(body, onData) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      for (const line of event.split("\n")) {
        if (line.startsWith("data: ")) onData(JSON.parse(line.slice(6)));
      }
    }
  }
}
