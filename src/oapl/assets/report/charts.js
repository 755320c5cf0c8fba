"use strict";
// Everything drawn with plotly. Each chart is a function of `state`; `listeners` draw it again.

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
function faded(hex, alpha) {
  const number = parseInt(hex.slice(1), 16);
  return `rgba(${number >> 16}, ${(number >> 8) & 255}, ${number & 255}, ${alpha})`;
}
function layout(changes) {
  const axis = { gridcolor: style("--grid"), zerolinecolor: style("--line"), linecolor: style("--line"), automargin: true, fixedrange: false, title: { standoff: 8 } };
  return {
    paper_bgcolor: style("--card"), plot_bgcolor: style("--card"), showlegend: false, hovermode: "x unified",
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", size: 12, color: style("--soft") },
    margin: { l: 44, r: 12, t: 8, b: 38 },
    hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--text"), size: 12 } },
    ...changes,
    xaxis: { ...axis, showgrid: false, zeroline: false, ...changes.xaxis },
    yaxis: { ...axis, zeroline: true, ...changes.yaxis },
  };
}
const CONFIG = { displayModeBar: false };

// Makes a card at once, and returns what draws its chart: cards share rows, so all must be there before one is measured.
function chartCard(parent, { title, keys = [], shows, bad, tall = false, id }, figure) {
  const plot = element("div", { class: `plot${tall ? " tall" : ""}`, id: `plot-${id}` });
  const keyList = element("div", { class: "keys" });
  const save = element("button", { type: "button", class: "save", title: "Save as a picture", "aria-label": `Save ${title} as a picture`,
    onclick: () => Plotly.downloadImage(plot, { format: "png", filename: id, width: 900, height: 500, scale: 2 }) }, "⤓");
  parent.append(element("article", { class: "card chart", id: `chart-${id}` },
    element("div", { class: "head" }, element("h3", {}, title), keyList, save), plot,
    shows ? element("p", { class: "shows" }, shows) : null,
    bad ? element("p", { class: "bad" }, element("b", {}, "Bad: "), bad) : null));
  const draw = () => {
    const made = figure();
    keyList.replaceChildren(...(made.keys || keys).map(lineKey));
    Plotly.react(plot, made.traces, layout(made.layout), CONFIG);
  };
  return () => {
    draw();
    new ResizeObserver(() => Plotly.Plots.resize(plot)).observe(plot);
    listeners.push(draw);
    themeListeners.push(draw);
  };
}
function lineKey({ label, color: stroke, dash }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", "22");
  svg.setAttribute("height", "4");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [key, value] of Object.entries({ x1: 0, x2: 22, y1: 2, y2: 2, stroke: stroke || style("--soft"), "stroke-width": 2.5, "stroke-dasharray": DASHES[dash] || "none" }))
    line.setAttribute(key, value);
  svg.append(line);
  return element("span", {}, svg, label);
}
const DASHES = { dash: "5 3", dot: "2 2", dashdot: "6 2 2 2", longdash: "8 3" };
const LINE_STYLES = ["solid", "dash", "dot", "dashdot", "longdash"];

// Curves against steps, samples or wall time

function axisOf(columns) {
  const raw = columns[state.axis];
  if (state.axis !== "wall_s") return raw;
  return raw.map((seconds) => (seconds === null ? null : seconds / wallUnit().seconds));
}
function wallUnit() {
  const sources = STUDY ? STUDY.curves.map((curve) => curve.columns.wall_s?.mean || []) : RUNS.map((run) => run.columns.wall_s || []);
  const longest = Math.max(0, ...sources.map((column) => column[column.length - 1] || 0));
  return longest > 7200 ? { name: "hours", seconds: 3600 } : longest > 180 ? { name: "minutes", seconds: 60 } : { name: "seconds", seconds: 1 };
}
function axisTitle() {
  return { step: "optimizer steps", samples: "completions trained on", wall_s: `wall time of the trainer, ${wallUnit().name}` }[state.axis];
}
// A moving mean; with `rounds`, one that does not reach across rounds.
function moving(values, rounds) {
  const half = Math.max(1, Math.round(values.length / 40));
  return values.map((value, i) => {
    if (value === null) return null;
    let sum = 0, count = 0;
    for (let j = Math.max(0, i - half); j <= Math.min(values.length - 1, i + half); j++) if (values[j] !== null && (!rounds || rounds[j] === rounds[i])) { sum += values[j]; count++; }
    return sum / count;
  });
}
function lineTraces(x, values, { name, stroke, dash, stepped, rounds }) {
  const smooth = state.smooth && !stepped && values.filter((value) => value !== null).length > 12;
  const shape = stepped ? { shape: "hv" } : {};
  const known = x.map((place, i) => [place, values[i], i]).filter(([, value]) => value !== null);
  const xs = known.map(([place]) => place);
  const raw = { type: "scatter", mode: known.length < 3 ? "markers" : "lines", x: xs, y: known.map(([, value]) => value), name, line: { color: stroke, width: stepped ? 1.2 : 2, dash, ...shape }, marker: { color: stroke }, hovertemplate: "%{y:.4~g}" };
  if (!smooth) return [raw];
  const averaged = moving(known.map(([, value]) => value), rounds && known.map(([, , i]) => rounds[i]));
  return [{ ...raw, line: { color: faded(stroke, 0.28), width: 1 }, hoverinfo: "skip", hovertemplate: undefined }, { ...raw, y: averaged }];
}
function curveFigure(chart) {
  return () => {
    const traces = [], keys = [];
    const alone = RUNS.length === 1 && chart.lines.length > 1;
    RUNS.forEach((run, index) => {
      if (state.hidden.has(index)) return;
      chart.lines.forEach((line, place) => {
        const values = run.columns[line.metric];
        if (!values) return;
        const stroke = alone ? lineColor(line.metric, place) : color(index);
        const name = [RUNS.length > 1 ? run.name : null, chart.lines.length > 1 || RUNS.length === 1 ? line.label : null].filter(Boolean).join(", ");
        traces.push(...lineTraces(axisOf(run.columns), values, { name, stroke, dash: alone ? "solid" : LINE_STYLES[place], stepped: chart.stepped, rounds: chart.resets ? run.columns.round : null }));
      });
    });
    if (chart.lines.length > 1) chart.lines.forEach((line, place) => keys.push(alone ? { label: line.label, color: lineColor(line.metric, place) } : { label: line.label, dash: LINE_STYLES[place] }));
    return { traces, keys, layout: curveLayout(chart) };
  };
}
function lineColor(metric, place) {
  const special = { log_ratio_right: 2, log_ratio_wrong: 4 };
  return color(special[metric] ?? place);
}
function curveLayout(chart) {
  const rounds = RUNS.length && state.axis === "step" ? roundShapes() : [];
  return {
    shapes: rounds,
    xaxis: { title: { text: axisTitle() }, rangemode: "tozero" },
    yaxis: { title: { text: chart.axis }, type: chart.log ? "log" : "linear", ...(chart.log ? { tickformat: "~g", nticks: 6 } : {}), ...(chart.share ? { rangemode: "tozero" } : {}) },
  };
}
function roundShapes() {
  const syncs = new Set(RUNS.map((run) => run.sync));
  const last = Math.max(0, ...RUNS.map((run) => run.columns.step[run.columns.step.length - 1] || 0));
  const [sync] = syncs;
  if (syncs.size > 1 || last / sync > 24) return [];
  return Array.from({ length: Math.max(0, Math.ceil(last / sync) - 1) }, (_, i) => ({
    type: "line", layer: "below", xref: "x", yref: "paper", x0: (i + 1) * sync + 0.5, x1: (i + 1) * sync + 0.5, y0: 0, y1: 1, line: { color: style("--line"), width: 1, dash: "dot" },
  }));
}
function validationFigure() {
  const traces = [];
  RUNS.forEach((run, index) => {
    if (state.hidden.has(index) || !run.selection) return;
    const x = run.selection.steps.map((step) => atStep(run.columns, step));
    const chosen = run.selection.steps.map((step) => step === run.selection.step);
    traces.push({ type: "scatter", mode: "lines+markers", name: run.name, x, y: run.selection.values, line: { color: color(index), width: 2 }, marker: { color: color(index), size: chosen.map((yes) => (yes ? 14 : 7)), symbol: chosen.map((yes) => (yes ? "star" : "circle")) } });
  });
  return { traces, layout: curveLayout({ axis: "validation pass@1" }) };
}
function atStep(columns, step) {
  if (step === 0) return 0;
  const x = axisOf(columns);
  let place = columns.step.findIndex((value) => value >= step);
  if (place < 0) place = x.length - 1;
  return x[place];
}

// pass@k

function passTraces(curve, { name, stroke, dash }) {
  const all = Object.keys(curve).map(Number).sort((a, b) => a - b).filter((k) => curve[k] && curve[k][0] !== null);
  const at = (i) => all.map((k) => curve[k][i]);
  const traces = [{ type: "scatter", mode: "lines+markers", x: all, y: at(0), name, line: { color: stroke, width: 2.2, dash }, marker: { size: 6, color: stroke }, hovertemplate: "%{y:.3f}" }];
  if (all.length && curve[all[0]][1] !== null && curve[all[0]][1] !== undefined)
    traces.unshift({ type: "scatter", mode: "lines", x: [...all, ...all.slice().reverse()], y: [...at(2), ...at(1).reverse()], fill: "toself", fillcolor: faded(stroke, 0.13), line: { width: 0 }, hoverinfo: "skip" });
  return traces;
}
function passLayout(all) {
  return { xaxis: { type: "log", tickvals: all, ticktext: all.map(String), title: { text: "k (answers a problem)" } }, yaxis: { title: { text: "pass@k" }, range: [0, 1.02] } };
}
function passFigure() {
  const traces = [], all = new Set();
  RUNS.forEach((run, index) => {
    if (state.hidden.has(index) || !(run.scores.base || run.scores.final)) return;
    ks(run).forEach((k) => all.add(k));
    const several = RUNS.length > 1;
    const base = run.scores.base && passTraces(run.scores.base.pass_at_k, { name: several ? `${run.name}, base` : "base model", stroke: several ? color(index) : color(7), dash: "dash" });
    if (base) traces.push(...(several ? base.slice(-1) : base));
    if (run.scores.final) traces.push(...passTraces(run.scores.final.pass_at_k, { name: several ? `${run.name}, after` : "after training", stroke: color(index), dash: "solid" }));
  });
  const one = RUNS.length === 1;
  return { traces, keys: [{ label: "base model", dash: "dash", color: one ? color(7) : undefined }, { label: "after training", color: one ? color(0) : undefined }], layout: passLayout([...all].sort((a, b) => a - b)) };
}

// Time

function showTime() {
  const node = document.getElementById("time");
  let chosen = RUNS.findIndex((run) => run.rounds.round.length);
  if (RUNS.length > 1) {
    const box = select("run", RUNS.map((run, i) => [String(i), run.name]), (value) => { chosen = Number(value); changed(); });
    box.node.value = String(chosen);
    node.append(element("div", { class: "controls" }, box.label));
  }
  return chartCard(node, { id: "time", title: "Seconds of each round", tall: true,
    shows: "Where the trainer's and the sampler's seconds went. Where the two work side by side, the taller bar is the round's wall time.",
    bad: "Mostly waiting: the sampler is the slower side. Mostly grading: the reward function is what the run waits for. Much saving: save less often." },
  () => timeFigure(RUNS[chosen]));
}
const TIME_PARTS = [
  ["save_s", "trainer saves", 6, -0.42], ["wait_s", "trainer waits", 7, -0.42], ["step_s", "trainer steps", 0, -0.42],
  ["sampling_s", "sampler generates", 2, 0.02], ["grading_s", "sampler grades", 1, 0.02],
];
function timeFigure(run) {
  const traces = [];
  for (const side of [-0.42, 0.02]) {
    const base = run.rounds.round.map(() => 0);
    for (const [name, label, tone, offset] of TIME_PARTS) {
      if (offset !== side) continue;
      const y = run.rounds[name];
      traces.push({ type: "bar", name: label, x: run.rounds.round, y, base: base.slice(), offset, width: 0.4, marker: { color: color(tone) }, customdata: y, hovertemplate: "%{customdata:.4~g} s" });
      y.forEach((value, i) => (base[i] += value || 0));
    }
  }
  return { traces, keys: TIME_PARTS.map(([, label, tone]) => ({ label, color: color(tone) })),
    layout: { barmode: "overlay", xaxis: { title: { text: "round" }, ...(run.rounds.round.length < 20 ? { dtick: 1 } : {}) }, yaxis: { title: { text: "seconds" }, rangemode: "tozero" } } };
}

// Study

function shownPoints(list) {
  return list.filter((point) => !state.hidden.has(STUDY.methods.indexOf(point.method)) && fitsFilter(point.grid));
}
function pointLook(point, list, without) {
  const rest = [...new Set(list.map((other) => gridText(other.grid, without)))];
  return { stroke: color(STUDY.methods.indexOf(point.method)), dash: LINE_STYLES[rest.indexOf(gridText(point.grid, without)) % LINE_STYLES.length], name: [point.method, gridText(point.grid, without)].filter(Boolean).join(", ") };
}
function dashKeys(list, without) {
  const rest = [...new Set(list.map((point) => gridText(point.grid, without)))];
  return rest.length > 1 && rest.length <= LINE_STYLES.length ? rest.map((label, i) => ({ label: label || "–", dash: LINE_STYLES[i] })) : [];
}
function settingFigure(key, k) {
  return () => {
    const shown = shownPoints(STUDY.cells).filter((cell) => cell.grid[key] !== "" && cell.pass[k] && cell.pass[k][0] !== null);
    const lines = new Map();
    for (const cell of shown) {
      const look = pointLook(cell, shown, key);
      if (!lines.has(look.name)) lines.set(look.name, { look, cells: [] });
      lines.get(look.name).cells.push(cell);
    }
    const xs = [...new Set(shown.map((cell) => Number(cell.grid[key])))].sort((a, b) => a - b);
    const wide = xs[0] > 0 && xs[xs.length - 1] / xs[0] >= 8;
    const traces = [...lines.values()].map(({ look, cells }, i) => {
      cells.sort((a, b) => a.grid[key] - b.grid[key]);
      const nudge = wide ? (x) => x * (1 + 0.015 * i) : (x) => x + 0.006 * i * ((xs[xs.length - 1] - xs[0]) || 1);
      const at = (j) => cells.map((cell) => cell.pass[k][j]);
      return { type: "scatter", mode: "lines+markers", name: look.name, x: cells.map((cell) => nudge(Number(cell.grid[key]))), y: at(0), line: { color: look.stroke, dash: look.dash, width: 2 },
        marker: { color: look.stroke, size: 8, symbol: cells.map((cell) => (cell.num_collapsed ? "x" : "circle")) },
        error_y: at(1)[0] === null ? undefined : { type: "data", symmetric: false, array: at(2).map((v, j) => v - at(0)[j]), arrayminus: at(1).map((v, j) => at(0)[j] - v), color: faded(look.stroke, 0.6), thickness: 1.3, width: 4 },
        hovertemplate: "%{y:.3f}" };
    });
    return { traces, keys: dashKeys(shown, key), layout: { xaxis: { title: { text: key }, type: wide ? "log" : "linear", tickvals: xs, ticktext: xs.map(String) }, yaxis: { title: { text: `pass@${k}` } } } };
  };
}
function studyPassFigure() {
  const shown = shownPoints(STUDY.cells);
  const base = Object.fromEntries(Object.entries(STUDY.base).map(([k, value]) => [k, [value, null, null]]));
  const traces = passTraces(base, { name: "base model", stroke: color(7), dash: "dash" });
  const few = shown.length <= 8;
  for (const cell of shown) {
    const made = passTraces(cell.pass, pointLook(cell, shown));
    traces.push(...(few ? made : made.slice(-1)));
  }
  return { traces, keys: [{ label: "base model", dash: "dash", color: color(7) }, ...dashKeys(shown)], layout: passLayout(STUDY.ks) };
}
function studyCurveFigure(chart) {
  return () => {
    const shown = shownPoints(STUDY.curves);
    const traces = [];
    for (const curve of shown) {
      const look = pointLook(curve, shown);
      const x = axisOf(Object.fromEntries(["step", "samples", "wall_s"].map((name) => [name, curve.columns[name]?.mean || []])));
      chart.lines.forEach((line, place) => {
        const found = curve.columns[line.metric];
        if (!found) return;
        const rounds = chart.resets ? curve.columns.round?.mean : null;
        const soft = state.smooth && !chart.stepped ? (values, places) => moving(values, rounds && (places ? places.map((i) => rounds[i]) : rounds)) : (values) => values;
        const name = chart.lines.length > 1 ? `${look.name}, ${line.label}` : look.name;
        if (curve.num_seeds > 1 && shown.length <= 8 && chart.lines.length === 1) {
          const band = x.map((place, i) => [place, found.low[i], found.high[i], i]).filter(([, low]) => low !== null);
          const places = band.map(([place]) => place), kept = band.map((b) => b[3]), low = soft(band.map((b) => b[1]), kept), high = soft(band.map((b) => b[2]), kept);
          traces.push({ type: "scatter", mode: "lines", x: [...places, ...places.slice().reverse()], y: [...high, ...low.slice().reverse()], fill: "toself", fillcolor: faded(look.stroke, 0.12), line: { width: 0 }, hoverinfo: "skip" });
        }
        const ys = soft(found.mean);
        traces.push({ type: "scatter", mode: "lines", name, x, y: ys, line: { color: look.stroke, width: 2, dash: chart.lines.length > 1 ? LINE_STYLES[place] : look.dash }, hovertemplate: "%{y:.4~g}" });
        const ends = curve.ends.map((end) => nearest(curve.columns.step.mean, end.step)).filter((i) => i >= 0 && ys[i] !== null);
        if (ends.length) traces.push({ type: "scatter", mode: "markers", name: `${name}: a run collapsed`, x: ends.map((i) => x[i]), y: ends.map((i) => ys[i]), marker: { symbol: "x", size: 10, color: look.stroke, line: { color: style("--card"), width: 1 } }, hovertemplate: "%{y:.4~g}" });
      });
    }
    const keys = chart.lines.length > 1 ? chart.lines.map((line, place) => ({ label: line.label, dash: LINE_STYLES[place] })) : dashKeys(shown);
    return { traces, keys, layout: curveLayout(chart) };
  };
}
function nearest(steps, step) {
  if (!steps || step === null) return -1;
  const place = steps.findIndex((value) => value >= step);
  return place < 0 ? steps.length - 1 : place;
}

// All of them, one after the other so that the page stays responsive while they are drawn

function showCharts() {
  const jobs = DATA.kind === "study" ? studyJobs() : runJobs();
  const step = () => {
    const job = jobs.shift();
    if (!job) {
      document.documentElement.dataset.ready = "true";
      return;
    }
    job();
    setTimeout(step, 0);
  };
  step();
}
function runJobs() {
  const jobs = [];
  const pass = document.getElementById("passk");
  if (pass) jobs.push(chartCard(pass, { id: "passk", title: "pass@k on held-out problems", tall: true,
    shows: "How many problems are solved with k answers each; k = 1 is what one try is worth, the largest k what the policy can still reach.",
    bad: "Better at k = 1 but below the base model at the largest k: the policy is surer and less varied." }, passFigure));
  for (const chart of DATA.charts) {
    const parent = document.getElementById(`${chart.section}-charts`);
    jobs.push(chartCard(parent, chart, curveFigure(chart)));
    if (chart.id === "reward" && RUNS.some((run) => run.selection)) jobs.push(chartCard(parent, { id: "validation", title: "Validation pass@1",
      shows: "pass@1 on the validation problems as training went on; the star is the step that was chosen.", bad: "It falls while the reward still rises: the policy fits the training problems alone." }, validationFigure));
  }
  if (document.getElementById("time")) jobs.push(showTime());
  return jobs;
}
function studyJobs() {
  const jobs = [];
  const settings = document.getElementById("settings");
  if (settings) {
    const grid = element("div", { class: "grid" });
    settings.append(grid);
    const ends = [...new Set([STUDY.ks[0], STUDY.ks[STUDY.ks.length - 1]])];
    for (const key of STUDY.keys.filter(isNumeric)) for (const k of ends)
      jobs.push(chartCard(grid, { id: `setting-${key.replace(/\W/g, "-")}-${k}`, title: `pass@${k} against ${key}`, shows: "A cross in place of a point: a run there collapsed." }, settingFigure(key, k)));
  }
  jobs.push(chartCard(document.getElementById("passk"), { id: "passk", title: "pass@k by method", tall: true,
    shows: "How many problems are solved with k answers each, averaged over seeds.", bad: "Below the base model at the largest k: the method pays for its pass@1 with variety." }, studyPassFigure));
  for (const chart of DATA.charts) {
    const shows = `${chart.shows} Mean over seeds, least and most as a band; a cross: a run collapsed, and counts on with its last value.`;
    jobs.push(chartCard(document.getElementById(`${chart.section}-charts`), { ...chart, shows }, studyCurveFigure(chart)));
  }
  return jobs;
}
