"use strict";
// Draws the charts of the page from the data in it. A point is a bucket of neighbouring steps: the line goes through
// the means, the band reaches from the lowest value to the highest.

const { charts, runs } = JSON.parse(document.getElementById("data").textContent);
const COLOURS = 8, MARGIN = { left: 62, right: 14, top: 8, bottom: 24 }, NEAR = 6, MARK = 6;
const DURATIONS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const view = { axis: "step", range: null, hidden: new Set(), logarithmic: new Set() };

function svg(name, attributes, parent) {
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
const count = (value) => value.toLocaleString("en");
const brief = (value) => value && Math.abs(value) < 1e-3 ? value.toExponential(2)
  : value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 5 });

/** The smallest range of all finite values; `margin`: what is added at both ends, as a share of it. */
function extent(values, margin) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  const more = high > low ? (high - low) * margin : Math.abs(low) / 10 || 1;
  return [low - more, high + more];
}

function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => +((first + index) * step).toPrecision(12));
}

/** Powers of ten, with 2 and 5 between them over a few decades. */
function logarithmicTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const factor of high / low > 1e4 ? [1] : [1, 2, 5]) found.push(+(factor * 10 ** power).toPrecision(3));
  const inside = found.filter((value) => value >= low && value <= high);
  return inside.length > 1 ? inside : ticks(low, high, 5);
}

/** Events or points with their place on the axis in use. */
const placed = (list) => list.map((one) => ({ ...one, x: one[view.axis] })).filter((one) => Number.isFinite(one.x));

function points(run, column) {
  const { mean, low = mean, high = mean } = run.curves[column];
  return placed(mean.map((value, index) => ({
    mean: value, low: low[index], high: high[index], first: index ? run.step[index - 1] + 1 : run.first,
    step: run.step[index], tokens: run.tokens[index], seconds: run.seconds[index] })));
}

class Chart {
  constructor(spec, isFirst) {
    this.spec = spec;
    this.isFirst = isFirst;
    this.svg = svg("svg", { role: "img", "aria-label": spec.title, height: isFirst ? 340 : 210 });
    this.tip = html("div", { className: "tip", hidden: true });
    const caption = html("figcaption", {}, spec.title, html("span", {}, spec.unit));
    if (spec.logarithmic) {
      const box = html("input", { type: "checkbox" });
      box.addEventListener("change", () => {
        view.logarithmic[box.checked ? "add" : "delete"](spec.column);
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
    const seen = runs.filter((run) => !view.hidden.has(run)), isLoss = this.spec.column === "lm_loss";
    const [left, right] = view.range ?? extent(seen.flatMap((run) => [run[view.axis].at(0), run[view.axis].at(-1)]), 0);
    this.series = seen.map((run) => ({
      run, points: points(run, this.spec.column), resumes: placed(run.resumes),
      saves: this.isFirst ? placed(run.saves) : [],
      evaluations: isLoss ? placed(run.evaluations).filter((found) => Number.isFinite(found.loss)) : [] }));
    const inside = (place) => place.x >= left && place.x <= right;
    const isLogarithmic = view.logarithmic.has(this.spec.column);
    const bend = isLogarithmic ? (value) => value > 0 ? Math.log(value) : -Infinity : (value) => value;
    const [bottom, top] = extent(this.series.flatMap(({ points, evaluations }) => [
      ...points.filter(inside).flatMap((point) => [bend(point.low), bend(point.high)]),
      ...evaluations.filter(inside).map((found) => bend(found.loss))]), 0.04);
    this.x = (value) => (value - left) / (right - left) * this.width;
    this.y = (value) => (top - Math.max(bend(value), bottom)) / (top - bottom) * this.height;
    this.back = (pixel) => left + pixel / this.width * (right - left);
    this.svg.replaceChildren();
    this.tip.hidden = true;
    this.axes(left, right, isLogarithmic ? logarithmicTicks(Math.exp(bottom), Math.exp(top))
      : ticks(bottom, top, this.height / 45));
    // An inner svg cuts off what lies outside of it, beyond the marks at its ends.
    const wide = this.width + 2 * MARK;
    this.plot = svg("svg", { x: MARGIN.left - MARK, y: MARGIN.top, width: wide, height: this.height,
                             viewBox: `${-MARK} 0 ${wide} ${this.height}` }, this.svg);
    for (const series of this.series) this.curve(series);
    this.chosen = svg("rect", { class: "chosen", y: 0, height: this.height, width: 0 }, this.plot);
    this.hair = svg("line", { class: "hair", y1: 0, y2: this.height }, this.plot);
  }

  axes(left, right, rows) {
    const bottom = MARGIN.top + this.height;
    const [size, unit] = view.axis !== "seconds" ? [1, ""]
      : DURATIONS.find(([length]) => right - left >= 2 * length) ?? [1, "s"];
    for (const value of rows) {
      const y = MARGIN.top + this.y(value);
      svg("line", { class: "rule", x1: MARGIN.left, x2: MARGIN.left + this.width, y1: y, y2: y }, this.svg);
      svg("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, this.svg).append(brief(value));
    }
    for (const value of ticks(left / size, right / size, this.width / 80)) {
      if (view.axis !== "seconds" && !Number.isInteger(value)) continue;
      const x = MARGIN.left + this.x(value * size);
      svg("line", { class: "rule", x1: x, x2: x, y1: bottom, y2: bottom + 4 }, this.svg);
      svg("text", { x, y: bottom + 17, "text-anchor": "middle" }, this.svg).append(`${brief(value)} ${unit}`.trim());
    }
  }

  /** A path through [x, value] pairs, with gaps where a value is not finite. */
  path(pairs) {
    let text = "", begun = false;
    for (const [x, value] of pairs) {
      const at = `${this.x(x).toFixed(1)} ${this.y(value).toFixed(1)}`;
      if (Number.isFinite(value)) text += begun ? `L${at}` : `M${at}h0`;  // h0: one alone is a dot
      begun = Number.isFinite(value);
    }
    return text;
  }

  band(list) {
    const parts = [[]];
    for (const point of list) Number.isFinite(point.low) ? parts.at(-1).push(point) : parts.push([]);
    const at = (point, value) => `${this.x(point.x).toFixed(1)} ${this.y(value).toFixed(1)}`;
    return parts.filter((part) => part.length).map((part) => "M" + [
      ...part.map((point) => at(point, point.high)),
      ...part.toReversed().map((point) => at(point, point.low))].join("L") + "Z").join("");
  }

  curve({ run, points, resumes, saves, evaluations }) {
    const group = svg("g", { style: colour(run) }, this.plot);
    const mark = (name, d) => svg("path", { class: name, d }, group);
    if (run.curves[this.spec.column].low) mark("band", this.band(points));
    for (const start of resumes) mark("resume", `M${this.x(start.x)} 0v${this.height}`);
    mark("line", this.path(points.map((point) => [point.x, point.mean])));
    for (const save of saves) mark("save", `M${this.x(save.x)} ${this.height - 6}l3.5 6h-7z`);
    for (const split of new Set(evaluations.map((found) => found.split))) {
      const own = evaluations.filter((found) => found.split === split);
      mark("evaluations", this.path(own.map((found) => [found.x, found.loss])));
      for (const found of own) {
        const x = this.x(found.x), y = this.y(found.loss);
        split === "test" ? mark("evaluation", `M${x} ${y - 5}l5 5l-5 5l-5 -5z`)
          : svg("circle", { class: "evaluation", cx: x, cy: y, r: 3 }, group);
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
      if (from === null) return;
      this.chosen.setAttribute("x", Math.min(from, here));
      this.chosen.setAttribute("width", Math.abs(here - from));
    });
    this.svg.addEventListener("pointerup", (event) => {
      const ends = [from, pixel(event)].sort((one, other) => one - other);
      if (from !== null && ends[1] - ends[0] > NEAR) show(ends.map(this.back));
      from = null;
    });
    this.svg.addEventListener("dblclick", () => show(null));
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
    const lines = this.series.flatMap((series) => this.values(series, pixel));
    this.tip.replaceChildren(...lines);
    this.tip.hidden = !lines.length;
    const left = MARGIN.left + pixel + 16, room = this.figure.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${left > room ? Math.max(4, left - this.tip.offsetWidth - 16) : left}px`;
    this.tip.style.top = "2.6rem";
  }

  /** The values of a run at a place, as lines of the tip. */
  values({ run, points, resumes, saves, evaluations }, pixel) {
    const distance = (place) => Math.abs(this.x(place.x) - pixel), near = (place) => distance(place) < NEAR;
    if (!points.length) return [];
    const nearest = points.reduce((best, point) => distance(best) <= distance(point) ? best : point);
    const { first, step, mean, low, high } = nearest;
    const value = !Number.isFinite(mean) ? "not finite"
      : low === high ? brief(mean) : `${brief(mean)} (${brief(low)} to ${brief(high)})`;
    const steps = first === step ? `step ${count(step)}` : `steps ${count(first)} to ${count(step)}`;
    const events = [
      ...evaluations.filter(near).map((found) => `${found.split} ${brief(found.loss)} at step ${count(found.step)}`),
      ...resumes.filter(near).map((start) => `resumed after step ${count(start.step)}`
        + (start.given_up ? `, ${count(start.given_up)} steps given up` : "")),
      ...saves.filter(near).map((save) => `saved at step ${count(save.step)}`)];
    const name = html("span", { style: colour(run) }, runs.length > 1 ? `${run.name}  ` : "");
    return [html("div", {}, name, html("b", {}, `${steps}  `), value),
            ...events.map((text) => html("div", {}, html("b", {}, text)))];
  }
}

// ---- the page -------------------------------------------------------------------------------------------------------

const LINE = '<path class="line" d="M1 6h20"/>';
const isThinned = runs.some((run) => Object.values(run.curves).some((curve) => curve.low));
const hasSplit = (isTest) => runs.some((run) => run.evaluations.some((found) => (found.split === "test") === isTest));
const SAMPLES = [
  ["mean of neighbouring steps", LINE, isThinned],
  ["lowest to highest", '<path class="band" d="M1 1h20v10h-20z"/>', isThinned],
  ["validation", '<circle class="evaluation" cx="11" cy="6" r="3"/>', hasSplit(false)],
  ["test", '<path class="evaluation" d="M11 1l5 5l-5 5l-5-5z"/>', hasSplit(true)],
  ["resumed", '<path class="resume" d="M11 0v12"/>', runs.some((run) => run.resumes.length)],
  ["saved", '<path class="save" d="M11 3l3.5 6h-7z"/>', runs.some((run) => run.saves.length)]];

function sample(drawing, style = "") {
  const made = svg("svg", { viewBox: "0 0 22 12", "aria-hidden": "true", style });
  made.innerHTML = drawing;
  return made;
}

function legend() {
  const place = document.getElementById("legend");
  for (const run of runs.length > 1 ? runs : []) {
    const button = html("button", { type: "button", ariaPressed: "true" }, sample(LINE, colour(run)), run.name);
    button.addEventListener("click", () => {
      view.hidden.delete(run) || view.hidden.add(run);
      button.setAttribute("aria-pressed", String(!view.hidden.has(run)));
      show(view.range);
    });
    place.append(button);
  }
  for (const [text, drawing, isThere] of SAMPLES) if (isThere) place.append(html("span", {}, sample(drawing), text));
  place.append(html("span", {}, "drag over a chart for a part of it, double-click for all"));
}

/** Draws all charts; `range`: the part of the horizontal axis, or null for all. */
function show(range) {
  view.range = range;
  for (const chart of all) chart.draw();
}

const all = charts.map((spec, index) => new Chart(spec, index === 0));
document.getElementById("charts").append(...all.map((chart) => chart.figure));
for (const box of document.querySelectorAll("#axes input")) {
  box.disabled = !runs.some((run) => run[box.value].some(Number.isFinite));
  box.addEventListener("change", () => { view.axis = box.value; show(null); });
}
legend();
show(null);
addEventListener("resize", () => show(view.range));
