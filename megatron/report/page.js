"use strict";
// Draws the charts of the page from the data in it. A point is a bucket of neighbouring steps: the line goes through
// the means, the band reaches from the lowest value to the highest.

const { charts, runs } = JSON.parse(document.getElementById("data").textContent);
const COLOURS = 8, MARGIN = { left: 62, right: 14, top: 8, bottom: 24 }, NEAR = 6, MARK = 6;
const view = { axis: "step", range: null, hidden: new Set(), logarithmic: new Set() };

function element(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

function html(name, attributes, ...children) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

const colour = (run) => `color: var(--run-${runs.indexOf(run) % COLOURS})`;
const seen = () => runs.filter((run) => !view.hidden.has(run));

// ---- numbers --------------------------------------------------------------------------------------------------------

function brief(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= unit) return `${+(value / (letter === "k" ? 1e3 : unit)).toPrecision(4)}${letter}`;
  return size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(5));
}

const DURATIONS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

/** A scale of the horizontal axis: what a tick is divided by, and its unit. */
function unitOf(span) {
  if (view.axis !== "seconds") return [1, ""];
  return DURATIONS.find(([length]) => span >= 2 * length) ?? [1, "s"];
}

function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => +((first + index) * step).toPrecision(12));
}

function logarithmicTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const factor of high / low > 1e4 ? [1] : [1, 2, 5]) found.push(+(factor * 10 ** power).toPrecision(3));
  const inside = found.filter((value) => value >= low && value <= high);
  return inside.length > 1 ? inside : ticks(low, high, 5);
}

// ---- what there is to draw ------------------------------------------------------------------------------------------

const told = (value) => value !== null && Number.isFinite(value);

/** Of a run: points with their place on the axis in use. */
function points(run, column) {
  const { mean, low = mean, high = mean } = run.curves[column];
  return mean.map((value, index) => ({ x: run[view.axis][index], mean: value, low: low[index], high: high[index],
                                       first: index ? run.step[index - 1] + 1 : run.first, last: run.step[index] }))
    .filter((point) => told(point.x));
}

function horizontal() {
  if (view.range) return view.range;
  const ends = seen().flatMap((run) => [run[view.axis].at(0), run[view.axis].at(-1)]).filter(told);
  const low = Math.min(...ends, ends.length ? Infinity : 0), high = Math.max(...ends, ends.length ? -Infinity : 1);
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}

function vertical(values, logarithmic) {
  let low = Infinity, high = -Infinity;
  for (const value of values)
    if (told(value) && !(logarithmic && value <= 0)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  if (low === high) [low, high] = low === 0 ? [-1, 1] : [low - Math.abs(low) / 10, low + Math.abs(low) / 10];
  if (logarithmic) return [low * (low / high) ** 0.04, high * (high / low) ** 0.04];
  return [low - (high - low) * 0.04, high + (high - low) * 0.04];
}

/** Runs of neighbours that are told, as one path each. */
function path(list, x, y) {
  let text = "", begun = false;
  for (const [place, value] of list) {
    if (!told(value)) { begun = false; continue; }
    const at = `${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
    text += begun ? `L${at}` : `M${at}h0`;  // h0: one alone is a dot
    begun = true;
  }
  return text;
}

function band(list, x, y) {
  const parts = [[]];
  for (const point of list) told(point.low) ? parts.at(-1).push(point) : parts.push([]);
  return parts.filter((part) => part.length).map((part) => "M" + [
    ...part.map((point) => `${x(point.x).toFixed(1)} ${y(point.high).toFixed(1)}`),
    ...part.toReversed().map((point) => `${x(point.x).toFixed(1)} ${y(point.low).toFixed(1)}`)].join("L") + "Z").join("");
}

// ---- a chart --------------------------------------------------------------------------------------------------------

class Chart {
  constructor(spec, isFirst) {
    this.spec = spec;
    this.isFirst = isFirst;
    this.svg = element("svg", { role: "img", "aria-label": spec.title, height: isFirst ? 340 : 210 });
    this.tip = html("div", { className: "tip", hidden: true });
    const caption = html("figcaption", {}, spec.title, html("span", {}, spec.unit));
    if (spec.logarithmic) {
      const box = html("input", { type: "checkbox" });
      box.addEventListener("change", () => {
        box.checked ? view.logarithmic.add(spec.column) : view.logarithmic.delete(spec.column);
        this.draw();
      });
      caption.append(html("label", {}, box, " logarithmic"));
    }
    this.figure = html("figure", {}, caption, this.svg, this.tip);
    this.listen();
  }

  draw() {
    this.width = Math.max(120, this.svg.clientWidth - MARGIN.left - MARGIN.right);
    this.height = this.svg.clientHeight - MARGIN.top - MARGIN.bottom;
    const logarithmic = view.logarithmic.has(this.spec.column), [left, right] = horizontal();
    const curves = seen().map((run) => [run, points(run, this.spec.column)]);
    const inside = (place) => place.x >= left && place.x <= right;
    const evaluations = this.spec.column === "lm_loss" ? seen().map((run) => [run, run.evaluations.map(
      (found) => ({ ...found, x: found[view.axis] })).filter((found) => told(found.x) && told(found.loss))]) : [];
    const [bottom, top] = vertical([
      ...curves.flatMap(([, list]) => list.filter(inside).flatMap((point) => [point.low, point.high])),
      ...evaluations.flatMap(([, list]) => list.filter(inside).map((found) => found.loss))], logarithmic);
    const bend = logarithmic ? (value) => Math.log(Math.max(value, bottom)) : (value) => value;
    this.x = (value) => (value - left) / (right - left) * this.width;
    this.y = (value) => (bend(top) - bend(value)) / (bend(top) - bend(bottom)) * this.height;
    this.back = (pixel) => left + pixel / this.width * (right - left);
    this.curves = curves;
    this.evaluations = evaluations;
    this.svg.replaceChildren();
    this.tip.hidden = true;
    this.axes(left, right, logarithmic ? logarithmicTicks(bottom, top) : ticks(bottom, top, this.height / 45));
    // An inner svg cuts off what lies outside of it, beyond the marks at its ends.
    const wide = this.width + 2 * MARK;
    this.plot = element("svg", { x: MARGIN.left - MARK, y: MARGIN.top, width: wide, height: this.height,
                                 viewBox: `${-MARK} 0 ${wide} ${this.height}` }, this.svg);
    for (const [run, list] of curves) this.curve(run, list);
    for (const [run, list] of evaluations) this.evaluated(run, list);
    this.chosen = element("rect", { class: "chosen", y: 0, height: this.height, width: 0 }, this.plot);
    this.hair = element("line", { class: "hair", y1: 0, y2: this.height }, this.plot);
  }

  axes(left, right, rows) {
    const bottom = MARGIN.top + this.height, [size, unit] = unitOf(right - left);
    for (const value of rows) {
      const y = MARGIN.top + this.y(value);
      element("line", { class: "rule", x1: MARGIN.left, x2: MARGIN.left + this.width, y1: y, y2: y }, this.svg);
      element("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, this.svg).append(brief(value));
    }
    for (const value of ticks(left / size, right / size, this.width / 80)) {
      if (view.axis !== "seconds" && !Number.isInteger(value)) continue;
      const x = MARGIN.left + this.x(value * size);
      element("line", { class: "rule", x1: x, x2: x, y1: bottom, y2: bottom + 4 }, this.svg);
      element("text", { x, y: bottom + 17, "text-anchor": "middle" }, this.svg).append(`${brief(value)} ${unit}`.trim());
    }
  }

  curve(run, list) {
    const group = element("g", { style: colour(run) }, this.plot);
    if (run.curves[this.spec.column].low) element("path", { class: "band", d: band(list, this.x, this.y) }, group);
    for (const start of run.resumes.filter((start) => told(start[view.axis]))) {
      const x = this.x(start[view.axis]);
      element("line", { class: "resume", x1: x, x2: x, y1: 0, y2: this.height }, group);
    }
    element("path", { class: "line", d: path(list.map((point) => [point.x, point.mean]), this.x, this.y) }, group);
    if (this.isFirst) for (const save of run.saves.filter((save) => told(save[view.axis]))) {
      const x = this.x(save[view.axis]);
      element("path", { class: "save", d: `M${x} ${this.height - 6}l3.5 6h-7z` }, group);
    }
  }

  evaluated(run, list) {
    const group = element("g", { style: colour(run) }, this.plot);
    for (const split of new Set(list.map((found) => found.split))) {
      const own = list.filter((found) => found.split === split);
      element("path", { class: "evaluations", d: path(own.map((found) => [found.x, found.loss]), this.x, this.y) }, group);
      for (const found of own) {
        const x = this.x(found.x), y = this.y(found.loss);
        split === "test" ? element("path", { class: "evaluation", d: `M${x} ${y - 5}l5 5l-5 5l-5 -5z` }, group)
          : element("circle", { class: "evaluation", cx: x, cy: y, r: 3 }, group);
      }
    }
  }

  // ---- pointing at it, and choosing a part

  listen() {
    let from = null;
    const pixel = (event) => {
      const inside = event.clientX - this.svg.getBoundingClientRect().left - MARGIN.left;
      return Math.min(this.width, Math.max(0, inside));
    };
    this.svg.addEventListener("pointerdown", (event) => {
      from = pixel(event);
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointermove", (event) => {
      const here = pixel(event);
      this.point(here);
      if (from !== null) {
        this.chosen.setAttribute("x", Math.min(from, here));
        this.chosen.setAttribute("width", Math.abs(here - from));
      }
    });
    this.svg.addEventListener("pointerup", (event) => {
      const ends = [from, pixel(event)].sort((one, other) => one - other);
      if (from !== null && ends[1] - ends[0] > NEAR) { view.range = ends.map(this.back); drawAll(); }
      from = null;
    });
    this.svg.addEventListener("dblclick", () => { view.range = null; drawAll(); });
    this.svg.addEventListener("pointerleave", () => {
      this.tip.hidden = true;
      for (const chart of all) chart.hair.style.visibility = "hidden";
    });
  }

  point(pixel) {
    for (const chart of all) {
      chart.hair.setAttribute("x1", pixel * chart.width / this.width);
      chart.hair.setAttribute("x2", pixel * chart.width / this.width);
      chart.hair.style.visibility = "visible";
    }
    const lines = this.curves.flatMap(([run, list]) => this.said(run, list, pixel));
    this.tip.replaceChildren(...lines);
    this.tip.hidden = !lines.length;
    const left = MARGIN.left + pixel + 16, room = this.figure.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${left > room ? Math.max(4, left - this.tip.offsetWidth - 16) : left}px`;
    this.tip.style.top = "2.6rem";
  }

  /** What there is of a run at a place, as lines of the tip. */
  said(run, list, pixel) {
    const nearest = list.reduce((best, point) => best && Math.abs(this.x(best.x) - pixel)
      <= Math.abs(this.x(point.x) - pixel) ? best : point, null);
    if (!nearest) return [];
    const { first, last, mean, low, high } = nearest, near = (place) => Math.abs(this.x(place[view.axis]) - pixel) < NEAR;
    const value = !told(mean) ? "not finite" : low === high ? brief(mean) : `${brief(mean)} (${brief(low)} to ${brief(high)})`;
    const steps = first === last ? `step ${last.toLocaleString("en")}`
      : `steps ${first.toLocaleString("en")} to ${last.toLocaleString("en")}`;
    const scores = this.evaluations.filter(([of]) => of === run).flatMap(([, found]) => found.filter(near));
    const more = [
      ...scores.map((found) => `${found.split} ${brief(found.loss)} at step ${found.step.toLocaleString("en")}`),
      ...run.resumes.filter(near).map((start) => `resumed after step ${start.step.toLocaleString("en")}`
        + (start.given_up ? `, ${start.given_up.toLocaleString("en")} steps given up` : "")),
      ...(this.isFirst ? run.saves.filter(near).map((save) => `saved at step ${save.step.toLocaleString("en")}`) : [])];
    const name = html("span", {}, runs.length > 1 ? `${run.name}  ` : "");
    name.style = colour(run);
    return [html("div", {}, name, html("b", {}, `${steps}  `), value), ...more.map((text) => html("div", {}, html("b", {}, text)))];
  }
}

// ---- the page -------------------------------------------------------------------------------------------------------

const LINE = '<path class="line" d="M1 6h20"/>';
const isThinned = () => runs.some((run) => Object.values(run.curves).some((curve) => curve.low));
const SAMPLES = [
  ["mean of neighbouring steps", LINE, isThinned],
  ["lowest to highest", '<path class="band" d="M1 1h20v10h-20z"/>', isThinned],
  ["validation", '<circle class="evaluation" cx="11" cy="6" r="3"/>',
    () => runs.some((run) => run.evaluations.some((found) => found.split !== "test"))],
  ["test", '<path class="evaluation" d="M11 1l5 5l-5 5l-5-5z"/>',
    () => runs.some((run) => run.evaluations.some((found) => found.split === "test"))],
  ["resumed", '<path class="resume" d="M11 0v12"/>', () => runs.some((run) => run.resumes.length)],
  ["saved", '<path class="save" d="M11 3l3.5 6h-7z"/>', () => runs.some((run) => run.saves.length)]];

function sample(drawing) {
  const made = element("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" });
  made.innerHTML = drawing;
  return made;
}

function legend() {
  const place = document.getElementById("legend");
  for (const run of runs.length > 1 ? runs : []) {
    const swatch = sample(LINE), button = html("button", { type: "button" }, swatch, run.name);
    swatch.style = colour(run);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      const hides = !view.hidden.has(run);
      hides ? view.hidden.add(run) : view.hidden.delete(run);
      button.setAttribute("aria-pressed", String(!hides));
      drawAll();
    });
    place.append(button);
  }
  for (const [text, drawing, isThere] of SAMPLES) if (isThere()) place.append(html("span", {}, sample(drawing), text));
  place.append(html("span", {}, "drag over a chart for a part of it, double-click for all"));
}

function drawAll() {
  for (const chart of all) chart.draw();
}

const all = charts.map((spec, index) => new Chart(spec, index === 0));
document.getElementById("charts").append(...all.map((chart) => chart.figure));
for (const box of document.querySelectorAll("#axes input")) {
  box.disabled = !runs.some((run) => run[box.value].some(told));
  box.addEventListener("change", () => { view.axis = box.value; view.range = null; drawAll(); });
}
legend();
drawAll();
addEventListener("resize", drawAll);
