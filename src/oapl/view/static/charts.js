// Curves as SVG: one or several runs in one picture, read by pointer or by arrow keys.

import { el, number, put, svg } from "./dom.js";

const HEIGHT = 190;
const LEFT = 46;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 24;

export function ticks(low, high, count = 4) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(+value.toPrecision(12));
  return found;
}

function range(lists) {
  let low = Infinity;
  let high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (value === null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return [low, high];
}

export class Chart {
  // `definition` is one of the report's charts; `set` gives it [{name, columns}], one a run.
  constructor(definition) {
    this.definition = definition;
    this.legend = el("div", { class: "legend" });
    this.picture = svg("svg", { tabindex: "0", role: "img", class: "plot" });
    this.node = el(
      "figure",
      { class: "card chart" },
      el("figcaption", {}, el("h4", {}, definition.title), el("span", { class: "quiet" }, definition.axis)),
      this.picture,
      this.legend,
      el("details", {}, el("summary", {}, "what it shows"), el("p", {}, definition.shows), el("p", {}, el("b", {}, "Bad: "), definition.bad)),
    );
    this.cursor = null;
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.moveTo(null));
    this.picture.addEventListener("blur", () => this.moveTo(null));
    this.picture.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.picture);
  }

  set(runs, axis) {
    this.runs = runs;
    this.axis = axis;
    this.series = [];
    runs.forEach((run, r) => {
      this.definition.lines.forEach((line, l) => {
        const y = run.columns[line.metric];
        if (!y) return;
        const shown = runs.length > 1 ? `${run.name}: ${line.label}` : line.label;
        this.series.push({ name: shown, x: run.columns[axis], y, look: runs.length > 1 ? `run${r} line${l}` : `run${l}` });
      });
    });
    this.draw();
  }

  draw() {
    const width = this.picture.clientWidth;
    if (!this.series || width < 60) return;
    const { log, share } = this.definition;
    const toY = log ? (value) => (value > 0 ? Math.log10(value) : null) : (value) => value;
    const ys = this.series.map((one) => one.y.map((value) => (value === null ? null : toY(value))));
    const xs = range(this.series.map((one) => one.x));
    let [low, high] = share ? [0, 1] : range(ys);
    if (!(high >= low)) [low, high] = [0, 1];
    if (high === low) [low, high] = [low - 0.5 * (Math.abs(low) || 1), high + 0.5 * (Math.abs(high) || 1)];
    this.scale = (value) => LEFT + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (width - LEFT - RIGHT);
    const top = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const value of ticks(low, high)) {
      parts.push(svg("line", { x1: LEFT, x2: width - RIGHT, y1: top(value), y2: top(value), class: value === 0 && !log ? "zero" : "grid" }));
      parts.push(svg("text", { x: LEFT - 6, y: top(value) + 4, "text-anchor": "end" }, number(log ? 10 ** value : value)));
    }
    for (const value of ticks(xs[0], xs[1], Math.max(2, Math.floor(width / 90)))) {
      parts.push(svg("text", { x: Math.min(this.scale(value), width - RIGHT - 8), y: HEIGHT - 6, "text-anchor": "middle" }, number(value)));
    }
    this.series.forEach((one, s) => {
      let path = "";
      let open = false;
      let before = null;
      ys[s].forEach((value, i) => {
        if (value === null) {
          open = false;
          return;
        }
        const x = this.scale(one.x[i]).toFixed(1);
        if (open && this.definition.stepped) path += `H${x}`;
        path += `${open ? "L" : "M"}${x} ${top(value).toFixed(1)}`;
        if (!open && ys[s][i + 1] == null) path += "h0.1";
        open = true;
        before = value;
      });
      if (before !== null) parts.push(svg("path", { d: path, class: `curve ${one.look}` }));
    });
    this.line = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor" });
    parts.push(this.line);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.setAttribute("aria-label", this.words());
    put(this.picture, parts);
    this.tell();
  }

  words() {
    const said = this.series.map((one) => {
      const known = one.y.filter((value) => value !== null);
      return `${one.name} from ${number(known[0])} to ${number(known[known.length - 1])}`;
    });
    return `${this.definition.title}: ${said.join("; ")}. Arrow keys read it.`;
  }

  point(event) {
    const box = this.picture.getBoundingClientRect();
    const x = event.clientX - box.left;
    const first = this.series[0]?.x || [];
    let best = null;
    first.forEach((value, i) => {
      if (best === null || Math.abs(this.scale(value) - x) < Math.abs(this.scale(first[best]) - x)) best = i;
    });
    this.moveTo(best);
  }

  key(event) {
    const last = (this.series[0]?.x.length || 0) - 1;
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    const at = { Home: 0, End: last }[event.key];
    if (step === undefined && at === undefined) return;
    event.preventDefault();
    this.moveTo(at ?? Math.min(last, Math.max(0, (this.cursor ?? last) + step)));
  }

  moveTo(index) {
    this.cursor = index;
    this.tell();
  }

  tell() {
    const first = this.series[0];
    const at = this.cursor === null || !first ? null : first.x[this.cursor];
    if (this.line) {
      this.line.classList.toggle("on", at !== null && at !== undefined);
      if (at !== null && at !== undefined) {
        this.line.setAttribute("x1", this.scale(at));
        this.line.setAttribute("x2", this.scale(at));
      }
    }
    const values = this.series.map((one) => {
      let i = one.y.length - 1;
      if (at !== null && at !== undefined) {
        i = one.x.findIndex((value) => value >= at);
        if (i < 0) i = one.y.length - 1;
      } else while (i > 0 && one.y[i] === null) i -= 1;
      return el("span", {}, el("i", { class: `swatch ${one.look}` }), `${one.name} `, el("b", {}, number(one.y[i])));
    });
    const where = at === null || at === undefined ? "newest" : `${{ step: "step", samples: "completions", wall_s: "seconds" }[this.axis]} ${number(at)}`;
    put(this.legend, el("span", { class: "quiet" }, where), values);
  }
}

// A grid of charts that is kept while new points arrive.
export class Charts {
  constructor() {
    this.axis = "step";
    this.select = el(
      "select",
      { change: (event) => this.use(event.target.value), id: "axis" },
      el("option", { value: "step" }, "steps"),
      el("option", { value: "samples" }, "completions"),
      el("option", { value: "wall_s" }, "seconds of training"),
    );
    this.grid = el("div", { class: "charts" });
    this.node = el("section", { class: "curves", "aria-label": "Curves" }, el("div", { class: "bar" }, el("h3", {}, "Curves"), el("label", {}, "against ", this.select)), this.grid);
    this.made = new Map();
  }

  use(axis) {
    this.axis = axis;
    for (const chart of this.made.values()) chart.set(chart.runs, axis);
  }

  set(definitions, runs) {
    const ids = definitions.map((definition) => definition.id).join();
    if (ids !== this.ids) {
      this.ids = ids;
      this.made = new Map(definitions.map((definition) => [definition.id, new Chart(definition)]));
      put(this.grid, [...this.made.values()].map((chart) => chart.node), this.made.size ? null : el("p", { class: "quiet" }, "No step is trained yet."));
    }
    for (const definition of definitions) {
      const chart = this.made.get(definition.id);
      chart.definition = definition;
      chart.set(runs, this.axis);
    }
  }
}
