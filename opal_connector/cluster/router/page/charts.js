// Two charts of the last minutes, drawn anew each second: lines, and bars on top of each other.

import { drawing, element, setText } from "./dom.js";

const WIDTH = 560;
const HEIGHT = 176;
const LEFT = 58;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 22;
const TICKS = 3;

/** The next 1, 2, 2.5 or 5 of a decade. */
function nice(value) {
  const decade = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * decade).find((step) => step >= value * 0.9999);
}

/** One chart in `place`; `series` are names with a class for their colour. */
export class Chart {
  constructor(place, { title, unit, isStacked }) {
    this.unit = unit;
    this.title = title;
    this.isStacked = isStacked;
    this.pointed = null;
    this.picture = drawing("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      preserveAspectRatio: "none",
    });
    this.legend = element("ul", { class: "legend" });
    this.when = element("p", { class: "note when" });
    place.replaceChildren(this.picture, this.legend, this.when);
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.leave());
    new ResizeObserver(() => this.redraw()).observe(place);
  }

  /** `points` are the oldest first: an age in seconds, and a value (or null) for each series. */
  draw(series, points) {
    this.series = series;
    this.points = points;
    this.redraw();
  }

  redraw() {
    if (this.points === undefined || this.points.length === 0) return;
    const width = Math.max(this.picture.parentElement.clientWidth, 200);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.inner = width - LEFT - RIGHT;
    const most = Math.max(...this.points.map((point) => this.highest(point)), 0);
    this.top = most > 0 ? TICKS * nice(most / TICKS) : 1;
    this.picture.replaceChildren(
      ...this.axes(most > 0),
      ...(this.isStacked ? this.bars() : this.lines()),
      ...this.pointer(),
    );
    this.describe();
  }

  highest(point) {
    const values = point.values.map((value) => value ?? 0);
    return this.isStacked ? values.reduce((sum, value) => sum + value, 0) : Math.max(...values, 0);
  }

  x(place) {
    return LEFT + (this.inner * (place + 0.5)) / this.points.length;
  }

  y(value) {
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / this.top);
  }

  axes(hasScale) {
    const parts = [];
    for (let tick = 0; tick <= TICKS; tick += 1) {
      const value = (this.top * tick) / TICKS;
      const y = this.y(value);
      parts.push(drawing("line", { class: "grid", x1: LEFT, x2: LEFT + this.inner, y1: y, y2: y }));
      if (hasScale || tick === 0) {
        const label = { class: "tick", x: LEFT - 6, y: y + 4, "text-anchor": "end" };
        parts.push(drawing("text", label, this.unit(value)));
      }
    }
    const oldest = Math.round((this.points[0].ago + this.points[1].ago) / 120);
    for (let minutes = 0; minutes < oldest; minutes += 1) {
      const part = 1 - (minutes * 60) / (this.points[0].ago || 1);
      const anchor = minutes === 0 ? "end" : "middle";
      const words = minutes === 0 ? "now" : `${minutes} min ago`;
      const where = { class: "tick", x: LEFT + this.inner * part, y: HEIGHT - 5 };
      parts.push(drawing("text", { ...where, "text-anchor": anchor }, words));
    }
    if (!hasScale) {
      const where = { class: "tick quiet", x: LEFT + this.inner / 2, y: HEIGHT / 2 };
      parts.push(drawing("text", { ...where, "text-anchor": "middle" }, "Nothing in this time"));
    }
    return parts;
  }

  lines() {
    const parts = [];
    this.series.forEach((series, number) => {
      let path = "";
      let isDrawing = false;
      this.points.forEach((point, place) => {
        const value = point.values[number];
        if (value === null) {
          isDrawing = false;
          return;
        }
        path += `${isDrawing ? "L" : "M"}${this.x(place).toFixed(1)} ${this.y(value).toFixed(1)}`;
        const isAlone = !isDrawing && (this.points[place + 1]?.values[number] ?? null) === null;
        if (isAlone) {
          const dot = { class: `dot-alone ${series.class}`, r: 2.5 };
          parts.push(drawing("circle", { ...dot, cx: this.x(place), cy: this.y(value) }));
        }
        isDrawing = true;
      });
      if (path !== "") parts.push(drawing("path", { class: `line ${series.class}`, d: path }));
    });
    return parts;
  }

  bars() {
    const parts = [];
    const width = (this.inner / this.points.length) * 0.82;
    this.points.forEach((point, place) => {
      let below = 0;
      point.values.forEach((value, number) => {
        if (!value) return;
        const [y, bottom] = [this.y(below + value), this.y(below)];
        below += value;
        const box = { x: this.x(place) - width / 2, y, width, height: Math.max(bottom - y, 0.5) };
        parts.push(drawing("rect", { class: `box ${this.series[number].class}`, ...box }));
      });
    });
    return parts;
  }

  // ---- what one reads off it ----

  point(event) {
    if (this.points === undefined) return;
    const box = this.picture.getBoundingClientRect();
    const part = (event.clientX - box.left - LEFT) / this.inner;
    const place = Math.floor(part * this.points.length);
    this.pointed = place >= 0 && place < this.points.length ? place : null;
    this.redraw();
  }

  leave() {
    this.pointed = null;
    this.redraw();
  }

  pointer() {
    if (this.pointed === null || this.pointed >= this.points.length) return [];
    const x = this.x(this.pointed);
    return [drawing("line", { class: "pointer", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM })];
  }

  /** The values where one points, or the last ones that there are. */
  describe() {
    const last = this.points.findLastIndex((point) => this.highest(point) > 0);
    const place = this.pointed ?? Math.max(last, 0);
    const point = this.points[place];
    if (this.legend.children.length !== this.series.length) {
      this.legend.replaceChildren(...this.series.map(() => entry()));
    }
    this.series.forEach((series, number) => {
      const [swatch, name, value] = this.legend.children[number].children;
      swatch.setAttribute("class", `swatch ${series.class}`);
      setText(name, series.name);
      setText(value, this.unit(point.values[number]));
    });
    const ago = Math.round(point.ago);
    setText(this.when, ago < 1 ? "In the last 5 s" : `In the 5 s that ended ${ago} s ago`);
    const words = this.series.map((one, number) => `${one.name} ${this.unit(point.values[number])}`);
    this.picture.setAttribute("aria-label", `${this.title}: ${words.join(", ")}`);
  }
}

function entry() {
  const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
  return element("li", {}, swatch, element("span"), element("b"));
}
