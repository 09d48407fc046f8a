// Puts the parts together: selects the one that is shown, shows whether the broker answers, and asks for a token.

import { onTokenWanted, takeTokenFromAddress, watchStatus } from "./broker.js";
import { byId, formatNumber } from "./elements.js";
import * as knowledge from "./knowledge.js";
import * as map from "./map.js";
import * as path from "./path.js";
import * as pipeline from "./pipeline.js";
import * as queues from "./queues.js";
import { showAlarms } from "./queue_alarms.js";
import * as subscriptions from "./subscriptions.js";

const PARTS = { map, path, queues, subscriptions, knowledge, pipeline };
let shown = null;

function showPart() {
  const wanted = location.hash.slice(1);
  const name = wanted in PARTS ? wanted : (shown ?? "map");
  if (name === shown) return;
  if (shown !== null) PARTS[shown].hide?.();
  for (const each of Object.keys(PARTS)) byId(`part-${each}`).hidden = each !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else {
      link.removeAttribute("aria-current");
    }
  }
  document.title = `${byId(`title-${name}`).textContent} · Tidegate`;
  if (shown !== null) window.scrollTo(0, 0);
  shown = name;
  PARTS[name].show();
}

function showState(now, before, error) {
  byId("state-dot").className = now ? "dot live" : "dot broken";
  const isRefused = error?.status === 401;
  const said = now ? "the broker answers" : isRefused ? "the broker requires a token" : "the broker does not answer";
  // Without the rate: a screen reader would announce every change of it.
  if (byId("state-said").textContent !== said) byId("state-said").textContent = said;
  const rate = before && (now.load.connection_point.accepted - before.load.connection_point.accepted) / (now.uptime_s - before.uptime_s);
  byId("state-text").textContent = isRefused ? "token required" : !now ? "no answer" : before ? `${formatNumber(Math.round(rate))} notifications/s` : "connected";
}

/** Resolves with the token that the user typed, or with an empty text. */
function askForToken(error) {
  const dialog = byId("token-dialog");
  byId("token-title").textContent = error.code === "A502" ? "The token is wrong" : "This broker requires a token";
  byId("token-input").value = "";
  dialog.showModal();
  return new Promise((done) => {
    byId("token-form").onsubmit = (event) => {
      event.preventDefault();
      dialog.close(byId("token-input").value.trim());
    };
    byId("token-cancel").onclick = () => dialog.close("");
    dialog.oncancel = () => (dialog.returnValue = "");
    dialog.onclose = () => {
      byId("give-token").hidden = dialog.returnValue !== "";
      done(dialog.returnValue);
    };
  });
}

takeTokenFromAddress();
onTokenWanted(askForToken);
byId("give-token").addEventListener("click", () => location.reload());
await Promise.all(Object.values(PARTS).map((part) => part.start()));
watchStatus(showState);
watchStatus((now) => now && showAlarms(now.queue_alarms));
// An address with a token was pasted into an open tab: reload, to restart the streams that were refused.
window.addEventListener("hashchange", () => (takeTokenFromAddress() ? location.reload() : showPart()));
showPart();
