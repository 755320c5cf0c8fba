"use strict";
// A study: methods against the grid, and curves averaged over seeds.

const STUDY = DATA.study;
const study = { k: null, filter: {} };

function showStudyText() {
  const max = STUDY.ks[STUDY.ks.length - 1];
  study.k = STUDY.ks[0];
  const failed = STUDY.runs.filter((run) => run.status === "failed").length;
  const collapsed = STUDY.runs.filter((run) => run.status === "collapsed").length;
  heading(STUDY.name, `${STUDY.runs.length} runs of ${STUDY.methods.length} methods` +
    (STUDY.keys.length ? ` over ${STUDY.keys.join(", ")}` : "") + (collapsed ? `; ${collapsed} collapsed` : "") + (failed ? `; ${failed} failed` : "") + ".");
  for (const note of STUDY.notes) document.getElementById("main").append(element("p", { class: "note" }, note));
  const main = document.getElementById("main");
  main.append(legend(STUDY.methods, true));
  const table = section("table", "Methods and settings", "pass@k after training on held-out problems, mean over seeds with its 95 % interval. " +
    "The stronger the colour, the higher. ✕: runs that collapsed or failed.");
  const holder = element("div", { class: "scroll", id: "heat" });
  const paint = () => holder.replaceChildren(heatTable());
  const pick = switcher("k", STUDY.ks.map((k) => [String(k), `k = ${k}`]), String(study.k), (value) => {
    study.k = Number(value);
    paint();
  });
  table.append(element("div", { class: "card" }, element("div", { class: "controls" }, pick), holder));
  listeners.push(paint);
  themeListeners.push(paint);
  paint();
  if (STUDY.keys.some(isNumeric)) section("settings", "Against each setting",
    `pass@${STUDY.ks[0]} and pass@${max} after training; bars are 95 % intervals. Lines join the same values of the other settings.`);
  section("passk", "pass@k curves", "After training, averaged over seeds. Dashed grey: the base model. Bands: 95 % intervals.");
  showCurveSections();
  showStudyFilters();
  showRunList();
}
function showStudyFilters() {
  const varied = STUDY.keys.filter((key) => values(key).length > 1);
  if (!varied.length) return;
  const boxes = varied.map((key) => select(key, [["", "all"], ...values(key).map((value) => [value, value || "–"])], (value) => {
    study.filter[key] = value;
    changed();
  }));
  const first = document.getElementById("settings") || document.getElementById("passk");
  first.before(element("div", { class: "card controls", id: "study-filter", style: "margin:20px 0 0" },
    element("b", {}, "Show only"), ...boxes.map((box) => box.label)));
}
function values(key) {
  const found = [...new Set(STUDY.cells.map((cell) => cell.grid[key]))];
  return found.sort((a, b) => (isNumeric(key) ? Number(a) - Number(b) : a < b ? -1 : 1));
}
function isNumeric(key) {
  return STUDY.cells.some((cell) => cell.grid[key] !== "") && STUDY.cells.every((cell) => cell.grid[key] === "" || isFinite(Number(cell.grid[key])));
}
function fitsFilter(grid, except) {
  return Object.entries(study.filter).every(([key, value]) => key === except || value === "" || grid[key] === value);
}
function gridText(grid, without) {
  return STUDY.keys.filter((key) => key !== without && values(key).length > 1 && grid[key] !== "")
    .map((key) => `${shortKey(key)} ${grid[key]}`).join(", ");
}
function shortKey(key) {
  return key.split(".").pop();
}
// One column for each value of the setting that most cells have; a line for each method with its other settings.
function heatTable() {
  const key = columnKey();
  const rest = STUDY.keys.filter((other) => other !== key && values(other).some((value) => value !== ""));
  const lines = new Map();
  for (const cell of STUDY.cells) {
    const name = JSON.stringify([cell.method, ...rest.map((other) => cell.grid[other])]);
    if (!lines.has(name)) lines.set(name, { method: cell.method, grid: cell.grid, cells: new Map() });
    lines.get(name).cells.set(key ? cell.grid[key] : "", cell);
  }
  const order = [...lines.values()].sort((a, b) => STUDY.methods.indexOf(a.method) - STUDY.methods.indexOf(b.method) ||
    rest.reduce((sum, other) => sum || compare(other, a.grid[other], b.grid[other]), 0));
  const means = STUDY.cells.map((cell) => cell.pass[study.k]?.[0]).filter((value) => value !== null && value !== undefined);
  const low = Math.min(...means), high = Math.max(...means);
  const columns = key ? values(key) : [""];
  const head = element("tr", {}, element("th", {}, "method"), ...rest.map((other) => element("th", {}, other)),
    ...columns.map((value) => element("th", {}, key ? `${shortKey(key)} ${value || "–"}` : `pass@${study.k}`)));
  const body = order.filter((line) => !state.hidden.has(STUDY.methods.indexOf(line.method))).map((line) => element("tr", {},
    element("th", {}, dot(STUDY.methods.indexOf(line.method)), " ", line.method),
    ...rest.map((other) => element("th", {}, line.grid[other] || "–")),
    ...columns.map((value) => heatCell(line.cells.get(value), low, high))));
  return element("table", { class: "heat" }, element("thead", {}, head), element("tbody", {}, ...body));
}
function columnKey() {
  const filled = (key) => STUDY.cells.filter((cell) => cell.grid[key] !== "").length * 100 + values(key).length;
  return STUDY.keys.slice().sort((a, b) => filled(b) - filled(a))[0];
}
function compare(key, a, b) {
  return isNumeric(key) ? Number(a) - Number(b) : a < b ? -1 : a > b ? 1 : 0;
}
function heatCell(cell, low, high) {
  const score = cell && cell.pass[study.k];
  const losses = cell ? ["collapsed", "failed"].filter((how) => cell[`num_${how}`]).map((how) => `✕ ${cell[`num_${how}`]} ${how}`) : [];
  const lost = losses.length ? element("span", { class: "mark-bad" }, losses.join(", ")) : null;
  if (!score || score[0] === null) return element("td", { class: "none" }, cell ? lost || "no result" : "");
  const share = high > low ? (score[0] - low) / (high - low) : 1;
  const alpha = (0.06 + 0.5 * share).toFixed(3);
  const interval = score[1] === null ? null : `[${fixed(score[1])}, ${fixed(score[2])}]`;
  const node = element("td", { title: `${cell.num_seeds} seeds, from ${fixed(score[3])} to ${fixed(score[4])}` },
    element("span", { class: "value" }, fixed(score[0])), interval ? element("span", { class: "interval" }, interval) : null, lost);
  node.style.backgroundColor = `rgba(var(--up), ${alpha})`;
  return node;
}
function showRunList() {
  const ks = [...new Set([STUDY.ks[0], STUDY.ks[STUDY.ks.length - 1]])].filter((k) => k !== undefined);
  const node = section("list", "All runs", "One line a run; differences are to the base model, with 95 % intervals over problems.");
  const head = ["method", ...STUDY.keys.map(shortKey), "seed", "status", "step", ...ks.flatMap((k) => [`pass@${k}`, "difference"]), "folder"];
  const rows = STUDY.runs.map((run) => element("tr", {},
    element("td", {}, dot(STUDY.methods.indexOf(run.method)), " ", run.method),
    ...STUDY.keys.map((key) => element("td", {}, run.grid[key] || "–")),
    element("td", {}, run.seed),
    element("td", {}, element("span", { class: `badge ${run.status}`, title: run.reason }, run.status)),
    element("td", { class: "num" }, run.num_steps ? `${run.step} / ${run.num_steps}` : run.step),
    ...ks.flatMap((k) => [element("td", {}, ...intervalNodes(run.pass[k].final)), element("td", {}, ...intervalNodes(run.pass[k].difference, true))]),
    element("td", {}, element("code", {}, run.run))));
  node.append(element("div", { class: "card scroll" }, element("table", { class: "scores" },
    element("thead", {}, element("tr", {}, ...head.map((name) => element("th", {}, name)))), element("tbody", {}, ...rows))));
  const reasons = STUDY.runs.filter((run) => run.reason);
  if (reasons.length) node.append(element("details", {}, element("summary", {}, "Why runs ended early"),
    element("ul", {}, ...reasons.map((run) => element("li", {}, `${run.method}, ${gridText(run.grid) || "–"}, seed ${run.seed}: ${run.reason}`)))));
}
