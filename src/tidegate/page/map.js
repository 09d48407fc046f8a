// Map: shows the stations, coloured by the European Air Quality Index of their latest reading, and the readings and
// recent history of one of them. Stations outside the region appear when they publish their location.

import { streamWithPast } from "./broker.js";
import { drawChart } from "./chart.js";
import { byId, formatNumber, make, makeSvg } from "./elements.js";

const FILTER = "station;longitude;latitude";
const ALERTS_SHOWN = 50;
const POINTS_MAX = 720;
const STATIONS_MAX = 500;
const ZOOM_MAX = 24;
const MARGIN_PX = 46;
const RADIUS_PX = 10;
const TOUCH_PX = 18;
const KM_PER_DEGREE = 111.32;
const LANDMARK = { name: "Madrid", longitude: -3.7038, latitude: 40.4168 };
const UNITS = { CO: "mg/m³", hydrocarbons: "mg/m³", nmhc: "mg/m³" };

const stations = new Map(); // code -> { facts, latest, course: pollutant -> [{ at, value }], level, worst }
let region = null;
let chosen = null;
let view = null; // { longitude, latitude, pxPerDegree }
let isDrawn = true;

export async function start() {
  region = await (await fetch("/page/region.json")).json();
  region.known = new Set(region.stations.flatMap((station) => station.pollutants));
  for (const facts of region.stations) stations.set(facts.code, newStation(facts));
  byId("attribution").textContent = `Stations and names: ${region.attribution}. The readings of the demo are simulated.`;
  byId("legend").append(
    ...region.band_names.map((name, at) =>
      make("li", {}, make("span", { class: `swatch level-${at + 1}` }), `${at + 1} ${name}`),
    ),
  );
  listenToHands();
  byId("station").addEventListener("change", (event) => choose(event.target.value));
  byId("pollutant").addEventListener("change", drawSoon);
  fillStations();
  choose(region.stations[0].code);
  new ResizeObserver(() => drawSoon()).observe(byId("map-view"));
  const forever = new AbortController().signal;
  const live = new Set();
  const listen = (filter, act) =>
    streamWithPast(filter, forever, {
      delivery: ({ notification }) => notification && act(notification),
      state: (state) => {
        if (state === "live") live.add(filter);
        else live.delete(filter);
        byId("part-map").dataset.live = live.size === 2;
      },
    });
  listen(FILTER, take);
  listen("alert", showAlert);
}

export function show() {
  drawSoon();
}

// Incoming notifications.

function newStation(facts) {
  return { facts, latest: null, course: new Map(), level: 0, worst: "" };
}

function take(reading) {
  const code = String(reading.station);
  if (!(Math.abs(reading.longitude) <= 180 && Math.abs(reading.latitude) <= 90)) return;
  let station = stations.get(code);
  if (station === undefined) {
    if (stations.size >= STATIONS_MAX) return;
    const { name = code, kind = "", area = "", zone = "", longitude, latitude } = reading;
    station = newStation({ code, name: String(name), kind, area, zone, longitude, latitude, pollutants: [] });
    stations.set(code, station);
    fillStations();
  }
  station.latest = reading;
  const at = Date.parse(reading.time) || Date.now();
  for (const [name, value] of Object.entries(reading)) {
    if (region.known.has(name) && Number.isFinite(value)) addPoint(station, name, at, value);
  }
  [station.level, station.worst] = judge(reading);
  drawSoon();
}

function addPoint(station, pollutant, at, value) {
  if (!station.course.has(pollutant)) station.course.set(pollutant, []);
  const points = station.course.get(pollutant);
  // A restarted broker may begin with an earlier time.
  if (points.length > 0 && at < points.at(-1).at) points.length = 0;
  points.push({ at, value });
  if (points.length > POINTS_MAX) points.shift();
}

/** Returns the index of a reading, 1 to 6, and the pollutant that determines it; 0 if it has none. */
function judge(reading) {
  let [level, worst] = [0, ""];
  for (const [pollutant, bounds] of Object.entries(region.bands)) {
    const value = reading[pollutant];
    if (!Number.isFinite(value)) continue;
    const its = 1 + bounds.filter((bound) => value > bound).length;
    if (its > level) [level, worst] = [its, pollutant];
  }
  return [level, worst];
}

function showAlert(alert) {
  const begins = alert.state === "begins";
  const what = begins
    ? `${alert.alert} above ${formatNumber(alert.threshold)} for ${alert.windows} windows, peak ${formatNumber(alert.peak)} so far`
    : `${alert.alert} is below ${formatNumber(alert.threshold)} again; its peak was ${formatNumber(alert.peak)}`;
  const said = make(
    "li",
    {},
    make("strong", { class: begins ? "fails" : "holds" }, alert.name ?? alert.station),
    ` ${what}`,
    make("div", { class: "note" }, `${alert.state}: ${shortTime(alert.since)} to ${shortTime(alert.until)}`),
  );
  const list = byId("alerts");
  // Sorted by time, the latest first, because Spark does not keep the order of rows within a batch.
  said.dataset.until = alert.until ?? "";
  list.insertBefore(said, [...list.children].find((each) => each.dataset.until <= said.dataset.until) ?? null);
  while (list.children.length > ALERTS_SHOWN) list.lastChild.remove();
  byId("no-alerts").hidden = true;
}

/** Formats 2026-01-12T08:00:00Z as 2026-01-12 08:00. */
function shortTime(time) {
  return String(time ?? "").replace(/^(\S+)T(\d\d:\d\d):00Z$/, "$1 $2");
}

// The chosen station.

function fillStations() {
  const sorted = [...stations.values()].sort((a, b) => a.facts.name.localeCompare(b.facts.name, "es"));
  byId("station").replaceChildren(
    ...sorted.map(({ facts }) => make("option", { value: facts.code, selected: facts.code === chosen }, facts.name)),
  );
}

function choose(code) {
  chosen = code;
  byId("station").value = code;
  const { facts } = stations.get(code);
  const height = facts.altitude_m === undefined ? "" : `, ${facts.altitude_m} m`;
  byId("station-facts").textContent = `${facts.code} · ${[facts.area, facts.kind].filter(Boolean).join(" ")}${height} · ${facts.zone}`;
  fillPollutants();
  drawSoon();
}

function fillPollutants() {
  const { facts, course } = stations.get(chosen);
  const names = [...new Set([...facts.pollutants, ...course.keys()])];
  const select = byId("pollutant");
  const kept = names.includes(select.value) ? select.value : names.includes("NO2") ? "NO2" : names[0];
  select.replaceChildren(...names.map((name) => make("option", { value: name, selected: name === kept }, name)));
}

// Drawing, at most once per frame.

function drawSoon() {
  if (!isDrawn) return;
  isDrawn = false;
  requestAnimationFrame(() => {
    isDrawn = true;
    if (byId("map-view").clientWidth === 0) return;
    drawMap();
    drawStation();
  });
}

function unitOf(pollutant) {
  return UNITS[pollutant] ?? "µg/m³";
}

function drawStation() {
  const station = stations.get(chosen);
  if (byId("pollutant").options.length < station.course.size) fillPollutants();
  const names = [...byId("pollutant").options].map((option) => option.value);
  const pollutant = byId("pollutant").value;
  byId("latest").replaceChildren(
    ...names.map((name) => {
      const value = station.latest?.[name];
      const unit = make("small", {}, ` ${unitOf(name)}`);
      return make("div", {}, make("dt", {}, name), make("dd", {}, Number.isFinite(value) ? formatNumber(value) : "–", unit));
    }),
  );
  const points = station.course.get(pollutant) ?? [];
  drawChart(byId("history"), [points], {
    label: `${pollutant ?? "nothing"} at ${station.facts.name}, the last ${points.length} readings`,
    bounds: region.bands[pollutant] ?? [],
    formatTime: (date) => date.toISOString().slice(5, 16).replace("T", " "),
  });
  byId("history-note").textContent =
    points.length > 1
      ? `${pollutant} in ${unitOf(pollutant)}, the last ${points.length} readings${region.bands[pollutant] ? "; dashed: bounds of the index" : ""}`
      : "No readings yet.";
}

function drawMap() {
  const place = byId("map-view");
  const { clientWidth: width, clientHeight: height } = place;
  view ??= wholeRegion(width, height);
  const project = projection(width, height);
  const svg = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describeMap() });
  drawGrid(svg, width, height, project);
  drawStations(svg, project);
  drawScale(svg, width, height);
  place.replaceChildren(svg);
}

function describeMap() {
  const judged = [...stations.values()].filter((station) => station.level > 0);
  const worst = judged.sort((a, b) => b.level - a.level)[0];
  const told = worst ? `; the worst is ${worst.facts.name}, ${region.band_names[worst.level - 1]}` : "";
  return `${stations.size} stations, ${judged.length} with readings${told}`;
}

function drawGrid(svg, width, height, project) {
  const step = [1, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01].find((each) => each * view.pxPerDegree <= 200) ?? 0.01;
  const reach = Math.max(width, height) / view.pxPerDegree;
  const first = (value) => Math.floor((value - reach) / step) * step;
  for (let at = first(view.longitude); at < view.longitude + reach; at += step) {
    const [x] = project({ longitude: at, latitude: view.latitude });
    svg.append(makeSvg("line", { class: "grid", x1: x, x2: x, y1: 0, y2: height }));
    svg.append(makeSvg("text", { class: "degree", x: x + 3, y: 12 }, `${Math.abs(at).toFixed(2)}° ${at < 0 ? "W" : "E"}`));
  }
  for (let at = first(view.latitude); at < view.latitude + reach; at += step) {
    const [, y] = project({ longitude: view.longitude, latitude: at });
    svg.append(makeSvg("line", { class: "grid", x1: 0, x2: width, y1: y, y2: y }));
    if (y > 26) svg.append(makeSvg("text", { class: "degree", x: 4, y: y - 3 }, `${Math.abs(at).toFixed(2)}° ${at < 0 ? "S" : "N"}`));
  }
}

/** Draws the chosen and the worst stations last, over the others. A name that would cover another is left out. */
function drawStations(svg, project) {
  const order = [...stations.values()].sort((a, b) => rank(a) - rank(b));
  const taken = order.map(({ facts }) => {
    const [x, y] = project(facts);
    return { left: x - RADIUS_PX, right: x + RADIUS_PX, top: y - RADIUS_PX, bottom: y + RADIUS_PX };
  });
  const [x, y] = project(LANDMARK);
  const label = { left: x - 30, right: x + 30, top: y - 10, bottom: y + 2 };
  if (!taken.some((other) => overlaps(label, other))) {
    taken.push(label);
    svg.append(makeSvg("text", { class: "place", x, y, "text-anchor": "middle" }, LANDMARK.name));
  }
  const drawn = order.reverse().map((station) => drawOne(station, project, taken));
  svg.append(...drawn.reverse());
}

function rank(station) {
  return station.facts.code === chosen ? 10 : station.level;
}

function drawOne(station, project, taken) {
  const { facts, level } = station;
  const [x, y] = project(facts);
  const band = level ? `index ${level}, ${region.band_names[level - 1]}, by ${station.worst}` : "no reading yet";
  const group = makeSvg(
    "g",
    {
      class: `station${level ? ` level-${level}` : ""}${facts.code === chosen ? " chosen" : ""}`,
      transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
      "data-station": facts.code,
    },
    makeSvg("title", {}, `${facts.name}: ${band}`),
    makeSvg("circle", { r: RADIUS_PX }),
    makeSvg("text", { class: "level" }, level || ""),
  );
  const half = facts.name.length * 3.2;
  const box = { left: x - half, right: x + half, top: y + RADIUS_PX + 2, bottom: y + RADIUS_PX + 16 };
  const isInside = box.left > 0 && box.right < byId("map-view").clientWidth;
  if (isInside && !taken.some((other) => overlaps(box, other))) {
    taken.push(box);
    group.append(makeSvg("text", { class: "name", y: RADIUS_PX + 13 }, facts.name));
  }
  return group;
}

function overlaps(a, b) {
  return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
}

function drawScale(svg, width, height) {
  const km = [50, 20, 10, 5, 2, 1].find((each) => (each / KM_PER_DEGREE) * view.pxPerDegree < 140) ?? 1;
  const length = (km / KM_PER_DEGREE) * view.pxPerDegree;
  const [right, bottom] = [width - 16, height - 14];
  svg.append(
    makeSvg("path", { class: "scale-bar", d: `M${right - length} ${bottom - 5}v5h${length}v-5` }),
    makeSvg("text", { class: "degree", x: right - length / 2, y: bottom - 7, "text-anchor": "middle" }, `${km} km`),
  );
}

// The view. A degree of latitude has the same length everywhere; a degree of longitude is shorter by the cosine.

function projection(width, height) {
  const shrink = Math.cos((view.latitude * Math.PI) / 180);
  return ({ longitude, latitude }) => [
    width / 2 + (longitude - view.longitude) * shrink * view.pxPerDegree,
    height / 2 - (latitude - view.latitude) * view.pxPerDegree,
  ];
}

function wholeRegion(width, height) {
  const all = region.stations;
  const [west, east] = [Math.min(...all.map((s) => s.longitude)), Math.max(...all.map((s) => s.longitude))];
  const [south, north] = [Math.min(...all.map((s) => s.latitude)), Math.max(...all.map((s) => s.latitude))];
  const [longitude, latitude] = [(west + east) / 2, (south + north) / 2];
  const shrink = Math.cos((latitude * Math.PI) / 180);
  const across = (width - 2 * MARGIN_PX) / ((east - west) * shrink);
  const pxPerDegree = Math.min(across, (height - 2 * MARGIN_PX) / (north - south));
  return { longitude, latitude, pxPerDegree, pxPerDegreeMin: pxPerDegree / 2 };
}

function move(dx, dy) {
  view.longitude -= dx / (view.pxPerDegree * Math.cos((view.latitude * Math.PI) / 180));
  view.latitude = Math.max(-80, Math.min(80, view.latitude + dy / view.pxPerDegree));
  drawSoon();
}

/** Zooms around the point (x, y), relative to the centre, which keeps its place. */
function zoom(factor, x = 0, y = 0) {
  const least = view.pxPerDegreeMin;
  const wanted = Math.min(Math.max(view.pxPerDegree * factor, least), least * 2 * ZOOM_MAX);
  move(-x, -y);
  view.pxPerDegree = wanted;
  move(x, y);
}

/** Chooses the station nearest to a press. Stations have no listeners: they may be redrawn before the release. */
function chooseAt(event) {
  const place = byId("map-view");
  const box = place.getBoundingClientRect();
  const project = projection(place.clientWidth, place.clientHeight);
  const distance = ({ facts }) => {
    const [x, y] = project(facts);
    return Math.hypot(event.clientX - box.left - x, event.clientY - box.top - y);
  };
  const nearest = [...stations.values()].reduce((a, b) => (distance(b) < distance(a) ? b : a));
  if (distance(nearest) <= TOUCH_PX) choose(nearest.facts.code);
}

function listenToHands() {
  const place = byId("map-view");
  const fingers = new Map();
  const all = () => {
    view = wholeRegion(place.clientWidth, place.clientHeight);
    drawSoon();
  };
  byId("zoom-in").addEventListener("click", () => zoom(1.5));
  byId("zoom-out").addEventListener("click", () => zoom(1 / 1.5));
  byId("zoom-all").addEventListener("click", all);
  place.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = place.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - box.width / 2, event.clientY - box.top - box.height / 2];
    zoom(Math.exp(-event.deltaY / 400), x, y);
  });
  place.addEventListener("pointerdown", (event) => fingers.set(event.pointerId, event));
  place.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (before === undefined) return;
    const [dx, dy] = [event.clientX - before.clientX, event.clientY - before.clientY];
    if (!place.classList.contains("moving") && Math.hypot(dx, dy) < 4) return;
    // Capture only after a movement: a press without one chooses the station under it.
    place.setPointerCapture(event.pointerId);
    place.classList.add("moving");
    if (fingers.size === 2) {
      const other = [...fingers.values()].find((finger) => finger.pointerId !== event.pointerId);
      const distance = (finger) => Math.hypot(finger.clientX - other.clientX, finger.clientY - other.clientY);
      zoom(distance(event) / Math.max(1, distance(before)));
    } else {
      move(dx, dy);
    }
    fingers.set(event.pointerId, event);
  });
  for (const kind of ["pointerup", "pointercancel"]) {
    place.addEventListener(kind, (event) => {
      const isPress = kind === "pointerup" && !place.classList.contains("moving");
      if (fingers.delete(event.pointerId) && isPress) chooseAt(event);
      if (fingers.size === 0) place.classList.remove("moving");
    });
  }
  const keys = {
    ArrowLeft: () => move(60, 0),
    ArrowRight: () => move(-60, 0),
    ArrowUp: () => move(0, 60),
    ArrowDown: () => move(0, -60),
    "+": () => zoom(1.5),
    "-": () => zoom(1 / 1.5),
    0: all,
  };
  place.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
}
