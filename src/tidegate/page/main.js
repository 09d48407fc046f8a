// Puts the parts together: which one is shown, whether the broker answers, and the question for a token.

import { onTokenWanted, takeTokenFromAddress, watchStatus } from "./broker.js";
import { byId, formatNumber } from "./elements.js";
import * as knowledge from "./knowledge.js";
import * as map from "./map.js";
import * as path from "./path.js";
import * as pipeline from "./pipeline.js";
import * as queues from "./queues.js";
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
  const said = now ? "the broker answers" : isRefused ? "the broker wants a token" : "the broker does not answer";
  // Not the rate: whoever has the page read to them would hear of nothing else.
  if (byId("state-said").textContent !== said) byId("state-said").textContent = said;
  const rate = before && (now.load.connection_point.accepted - before.load.connection_point.accepted) / (now.uptime_s - before.uptime_s);
  byId("state-text").textContent = isRefused ? "token wanted" : !now ? "no answer" : before ? `${formatNumber(Math.round(rate))} notifications/s` : "connected";
}

/** Resolves with what was typed, or with nothing. */
function askForToken(error) {
  const dialog = byId("token-dialog");
  byId("token-title").textContent = error.code === "A502" ? "The token is wrong" : "This broker wants a token";
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
// An address with a token, pasted into a tab that is open: the streams that were refused begin anew.
window.addEventListener("hashchange", () => (takeTokenFromAddress() ? location.reload() : showPart()));
showPart();
