"use strict";
// Text of the page: heading, cards, tables. Whatever a run holds is shown by textContent alone, never as HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs || [];
const PALETTE = {
  light: ["#3457d5", "#d9591c", "#0f8a5f", "#9333c9", "#c2264b", "#0b84a5", "#a17500", "#6b7280"],
  dark: ["#8aa4ff", "#ff9a5c", "#4fd1a0", "#cf9bff", "#ff7d9c", "#5cc8e6", "#f1c365", "#b3bccb"],
};
const state = { hidden: new Set(), axis: "step", smooth: true, theme: "light", allK: RUNS.length === 1 };
const NAV = { runs: "Settings", summary: "pass@k", passk: "Curves of k", policy: "Policy", data: "Samples", time: "Time", table: "Table", settings: "Settings", list: "Runs" };
const listeners = []; // called when what is shown of the curves changes
const themeListeners = []; // called when the theme changes

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") node.style.cssText = value;
    else if (value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map(asNode));
  return node;
}
function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}
function section(id, title, lead) {
  const node = element("section", { id }, element("h2", {}, title), lead ? element("p", { class: "lead" }, lead) : null);
  document.getElementById("main").append(node);
  document.getElementById("nav").append(element("a", { href: `#${id}` }, NAV[id] || title));
  return node;
}
function color(index) {
  const colors = PALETTE[state.theme];
  return colors[index % colors.length];
}
function dot(index) {
  const node = element("span", { class: "dot" });
  const paint = () => (node.style.background = color(index));
  themeListeners.push(paint);
  paint();
  return node;
}
function changed() {
  listeners.forEach((listener) => listener());
}
function select(label, options, onchange, wide = false) {
  const node = element("select", { onchange: () => onchange(node.value), "aria-label": label });
  fill(node, options);
  return { node, label: element("label", { class: wide ? "wide" : "" }, label, node) };
}
function fill(node, options) {
  node.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
}
function switcher(label, options, current, onpick) {
  const group = element("div", { class: "switch", role: "group", "aria-label": label });
  for (const [value, text] of options) {
    const button = element("button", { type: "button", "aria-pressed": String(value === current), "data-value": value }, text);
    button.addEventListener("click", () => {
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
      onpick(value);
    });
    group.append(button);
  }
  return group;
}

// Theme

function startTheme() {
  let stored = null;
  try { stored = localStorage.getItem("oapl-theme"); } catch { /* a browser may keep nothing for files */ }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(stored || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(state.theme === "dark" ? "light" : "dark");
    try { localStorage.setItem("oapl-theme", state.theme); } catch { /* then it holds until the page is closed */ }
  });
}
function setTheme(theme) {
  state.theme = theme;
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "☀ Light" : "☾ Dark";
  themeListeners.forEach((listener) => listener());
}

// Numbers

function fixed(value, digits = 3, signed = false) {
  if (value === null || value === undefined) return "–";
  return (signed && value >= 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(digits);
}
function intervalNodes(interval, signed = false) {
  if (!interval || interval[0] === null) return [element("span", { class: "soft" }, "–")];
  const [mean, low, high] = interval;
  const sure = signed && low !== null && (low > 0 ? " up" : high < 0 ? " down" : "");
  const nodes = [element("span", { class: `value${sure || ""}` }, fixed(mean, 3, signed))];
  if (low !== null && low !== undefined) {
    nodes.push(element("span", { class: "interval" }, `[${fixed(low, 3, signed)}, ${fixed(high, 3, signed)}]`));
  }
  return nodes;
}

// Runs

function showText() {
  startTheme();
  document.title = `${DATA.title} – oapl report`;
  if (DATA.kind === "study") showStudyText();
  else showRunsText();
  document.getElementById("main").append(element("footer", {},
    `Made by oapl ${DATA.version} on ${DATA.made}. The file holds all it shows and fetches nothing.`));
}
function heading(title, lead) {
  document.getElementById("main").append(element("h1", {}, title), element("p", { class: "lead", style: "margin-top:6px" }, lead));
}
function showRunsText() {
  heading(RUNS.length === 1 ? RUNS[0].name : `${RUNS.length} runs`,
    RUNS.length === 1 ? RUNS[0].status.text[0].toUpperCase() + RUNS[0].status.text.slice(1) : RUNS.map((run) => run.name).join(" · "));
  const cards = section("runs", RUNS.length === 1 ? "The run" : "The runs",
    RUNS.length > 1 ? "Settings in which the runs differ are marked in “All settings”." : null);
  cards.append(element("div", { class: "grid" }, ...RUNS.map(runCard)));
  if (RUNS.length > 1) document.getElementById("main").append(legend(RUNS.map((run) => run.name), true));
  const scored = RUNS.filter((run) => run.scores.base || run.scores.final);
  if (scored.length) showScores(scored);
  if (scored.length) section("passk", "pass@k curves", "The chance that at least one of k answers to a held-out problem is right. " +
    "Dashed: the base model. Bands: 95 % intervals over problems.");
  showCurveSections();
  if (RUNS.some((run) => run.rounds.round.length)) section("time", "Where time went",
    "Each round's seconds, stacked. Left bar: the trainer (saving, waiting for the sampler, its steps). Right bar: the sampler (generating, grading).");
  showCompletions();
}
function runCard(run, index) {
  const different = (key) => RUNS.some((other) => other.settings[key] !== run.settings[key]);
  const rows = Object.entries(run.settings).map(([key, value]) =>
    element("tr", { class: different(key) ? "differs" : "" }, element("td", {}, element("code", {}, key)), element("td", {}, value)));
  return element("article", { class: "card run" },
    element("div", { class: "run-head" }, RUNS.length > 1 ? dot(index) : null, element("h3", {}, run.name),
      element("span", { class: `badge ${run.status.kind}` }, run.status.text)),
    definitions(run.card),
    element("details", {}, element("summary", {}, "Dates and versions"), definitions(run.facts)),
    element("details", {}, element("summary", {}, "All settings"),
      element("div", { class: "scroll" }, element("table", {}, element("tbody", {}, ...rows)))),
    ...run.notes.map((note) => element("p", { class: "note" }, note)));
}
function definitions(pairs) {
  return element("dl", { class: "settings", style: "margin-top:8px" },
    ...pairs.map(([label, value]) => element("div", {}, element("dt", {}, label), element("dd", {}, value))));
}
function legend(names, stuck) {
  return element("div", { class: `legend${stuck ? " stuck" : ""}`, role: "group", "aria-label": "Shown" },
    ...names.map((name, index) => {
      const chip = element("button", { type: "button", class: "chip", "aria-pressed": "true" }, dot(index), name);
      chip.addEventListener("click", () => {
        if (!state.hidden.delete(index)) state.hidden.add(index);
        chip.setAttribute("aria-pressed", String(!state.hidden.has(index)));
        changed();
      });
      return chip;
    }));
}
function showScores(scored) {
  const first = scored[0].scores.final || scored[0].scores.base;
  const node = section("summary", "pass@k before and after",
    `Held-out problems (${first.num_prompts}, ${first.num_generations} samples each), with 95 % intervals over problems. ` +
    "A difference in colour has an interval without 0.");
  const holder = element("div", { class: "scroll" });
  const many = scored.some((run) => ks(run).length > 2);
  const toggle = switcher("Rows", [["ends", "k = 1 and largest"], ["all", "all k"]], state.allK ? "all" : "ends", (value) => {
    state.allK = value === "all";
    paint();
  });
  const paint = () => holder.replaceChildren(scoresTable(scored));
  node.append(element("div", { class: "card" }, many ? element("div", { class: "controls" }, toggle) : null, holder));
  listeners.push(paint);
  paint();
}
function ks(run) {
  return Object.keys((run.scores.final || run.scores.base).pass_at_k).map(Number).sort((a, b) => a - b);
}
function scoresTable(scored) {
  const body = [];
  for (const run of scored) {
    const index = RUNS.indexOf(run);
    if (state.hidden.has(index)) continue;
    const all = ks(run);
    if (RUNS.length > 1) body.push(element("tr", { class: "run-row" }, element("td", { colspan: "4" }, dot(index), " ", run.name)));
    for (const k of state.allK ? all : [...new Set([all[0], all[all.length - 1]])]) {
      const of = (name) => (run.scores[name] ? run.scores[name].pass_at_k[k] : null);
      body.push(element("tr", {},
        element("td", {}, element("b", {}, `pass@${k}`)),
        element("td", {}, ...intervalNodes(of("base"))),
        element("td", {}, ...intervalNodes(of("final"))),
        element("td", {}, ...intervalNodes(run.scores.difference ? run.scores.difference[k] : null, true))));
    }
  }
  const names = ["", "before", "after", "difference"];
  return element("table", { class: "scores" }, element("thead", {}, element("tr", {}, ...names.map((name) => element("th", {}, name)))),
    element("tbody", {}, ...body));
}

// Sections that charts.js fills

const CURVE_SECTIONS = [
  ["learning", "Learning", "What the run was after."],
  ["policy", "The policy", "How far training moved the policy, and how well it fits what it is to fit."],
  ["data", "What was sampled", "Whether the completions were fit to learn from."],
];
function showCurveSections() {
  const present = CURVE_SECTIONS.filter(([id]) => DATA.charts.some((chart) => chart.section === id));
  present.forEach(([id, title, lead], place) => {
    const node = section(id, title, lead);
    if (place === 0) node.append(curveControls());
    node.append(element("div", { class: "grid", id: `${id}-charts` }));
  });
}
function curveControls() {
  const says = element("span", { class: "soft", style: "font-size:13.5px" });
  const explain = {
    step: "Optimizer steps.",
    samples: "Completions trained on so far.",
    wall_s: "The trainer's clock: seconds of saving, waiting for the sampler and stepping, added up; without evaluations and pauses.",
  };
  const pick = (axis) => {
    state.axis = axis;
    says.textContent = explain[axis];
    changed();
  };
  says.textContent = explain.step;
  return element("div", { class: "controls" },
    switcher("X axis", [["step", "steps"], ["samples", "samples"], ["wall_s", "wall time"]], "step", pick),
    switcher("Curves", [["smooth", "smoothed"], ["raw", "as measured"]], "smooth", (value) => {
      state.smooth = value === "smooth";
      changed();
    }), says);
}
