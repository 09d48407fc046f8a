// A line chart: several series over one time axis. Each call draws the whole chart.

import { formatNumber, makeSvg } from "./elements.js";

// The axis starts at 0, because none of the values shown can be negative.
const MARGIN = { left: 44, right: 12, top: 8, bottom: 22 };
const TICKS = 4;

/**
 * Draws `series`, which are lists of { at, value } with `at` in ms. `bounds` are values marked by a horizontal line.
 * `label` is the text for screen readers.
 */
export function drawChart(place, series, { label, bounds = [], formatTime = clock } = {}) {
  const { clientWidth: width, clientHeight: height } = place;
  const lines = series.map((line) => line.filter((point) => Number.isFinite(point.value)));
  const points = lines.flat();
  const [from, to] = extent(points.map((point) => point.at));
  if (width === 0) return;
  const svg = makeSvg("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height}` });
  if (from < to) drawInto(svg, lines, points, { from, to, width, height, bounds, formatTime });
  else svg.append(makeSvg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "Waiting for a second value to draw a line."));
  place.replaceChildren(svg);
}

function drawInto(svg, lines, points, { from, to, width, height, bounds, formatTime }) {
  const highest = Math.max(...points.map((point) => point.value), 0) || TICKS;
  const step = roundStep(highest / TICKS);
  const top = step * Math.ceil(highest / step);
  const x = (at) => MARGIN.left + ((at - from) / (to - from)) * (width - MARGIN.left - MARGIN.right);
  const y = (value) => height - MARGIN.bottom - Math.max(0, value / top) * (height - MARGIN.top - MARGIN.bottom);
  for (let value = 0; value <= top + step / 2; value += step) {
    svg.append(
      makeSvg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      makeSvg("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, formatNumber(value)),
    );
  }
  for (const bound of bounds.filter((value) => value <= top)) {
    svg.append(makeSvg("line", { class: "bound", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(bound), y2: y(bound) }));
  }
  const times = [[from, "start"], [(from + to) / 2, "middle"], [to, "end"]];
  for (const [at, anchor] of times) {
    svg.append(makeSvg("text", { x: x(at), y: height - 5, "text-anchor": anchor }, formatTime(new Date(at))));
  }
  lines.forEach((line, at) => {
    const path = line.map((point) => `${x(point.at).toFixed(1)},${y(point.value).toFixed(1)}`).join(" ");
    svg.append(makeSvg("polyline", { class: at === 0 ? "line-one" : "line-two", points: path }));
  });
}

function extent(values) {
  return [Math.min(...values), Math.max(...values)];
}

/** Returns 1, 2 or 5 times a power of ten, at least `least`. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}

function clock(date) {
  return date.toLocaleTimeString("en-GB");
}
