// Pipeline: shows the progress of jobs on Spark. Jobs publish it as notifications, so the broker needs to know nothing
// about Spark, and any client can subscribe to the same notifications.

import { streamWithPast } from "./broker.js";
import { drawChart } from "./chart.js";
import { byId, formatAge, formatNumber, make } from "./elements.js";

const POINTS_MAX = 300;
const JOBS_MAX = 20;

const jobs = new Map(); // job and query -> { notification, rates, lags, panel }

export async function start() {
  streamWithPast("pipeline;query;batch", new AbortController().signal, {
    delivery: ({ notification, at = Date.now() }) => notification && take(notification, at),
  });
}

export function show() {
  for (const job of jobs.values()) draw(job);
}

function take(notification, at) {
  const name = `${notification.pipeline} · ${notification.query}`;
  if (!jobs.has(name)) {
    if (jobs.size >= JOBS_MAX) return;
    const panel = make(
      "div",
      { class: "panel", "data-job": name },
      make("h2", {}, name),
      make("dl", { class: "readings" }),
      make("div", { class: "chart" }),
      make("ul", { class: "keys" }, make("li", { class: "key-one" }, "rows per second"), make("li", { class: "key-two" }, "rows behind")),
    );
    jobs.set(name, { rates: [], lags: [], panel });
    byId("jobs").append(panel);
    byId("no-jobs").hidden = true;
  }
  const job = jobs.get(name);
  job.notification = notification;
  job.rates.push({ at, value: notification.rows_s });
  job.lags.push({ at, value: notification.behind });
  if (job.rates.length > POINTS_MAX) [job.rates, job.lags].forEach((line) => line.shift());
  draw(job);
}

function draw({ notification, rates, lags, panel }) {
  if (byId("part-pipeline").hidden) return;
  const facts = [
    ["batch", notification.batch],
    ["rows in it", notification.rows],
    ["rows per second", notification.rows_s],
    ["rows behind", notification.behind],
    ["duration", formatAge(notification.batch_ms / 1000)],
  ];
  panel.querySelector("dl").replaceChildren(
    ...facts.map(([title, value]) =>
      make("div", {}, make("dt", {}, title), make("dd", {}, typeof value === "number" ? formatNumber(value) : value)),
    ),
  );
  drawChart(panel.querySelector(".chart"), [rates, lags], { label: `${notification.rows_s} rows per second` });
}
