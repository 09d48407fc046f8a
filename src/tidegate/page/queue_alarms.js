// A banner on every part: lists queues that are nearly full, and queues that hold back or refuse publishers.

import { byId, formatAge, formatNumber, make } from "./elements.js";

const SHOWN = 5;
let said = "";

export function showAlarms(alarms) {
  const lines = alarms.slice(0, SHOWN).map(describe);
  if (alarms.length > SHOWN) lines.push({ text: `${alarms.length - SHOWN} more queues are nearly full.`, isBad: false });
  // Updated only if the text changes: otherwise a screen reader would repeat it every second.
  const text = lines.map((line) => line.text).join("\n");
  if (text === said) return;
  said = text;
  const banner = byId("queue-alarms");
  banner.hidden = lines.length === 0;
  banner.classList.toggle("bad", lines.some((line) => line.isBad));
  banner.replaceChildren(...lines.map((line) => make("p", {}, line.text)), make("a", { href: "#queues" }, "Show queues"));
}

function describe(alarm) {
  const name = `Queue ${alarm.queue} is ${Math.floor(alarm.fill_ratio * 100)} % full`;
  if (alarm.is_overflowing) {
    const counts = [
      [alarm.notifications_refused, "refused"],
      [alarm.notifications_dropped, "dropped"],
    ].filter(([count]) => count > 0);
    const so_far = counts.map(([count, what]) => `${formatNumber(count)} ${what}`).join(", ") || "the oldest messages are dropped";
    return { text: `${name} and no longer stores what does not fit: ${so_far}.`, isBad: true };
  }
  if (alarm.holding_back_s > 0) {
    return { text: `${name} and has held back its publishers for ${formatAge(Math.ceil(alarm.holding_back_s))}.`, isBad: true };
  }
  return { text: `${name}. When it is full, it holds back its publishers.`, isBad: false };
}
