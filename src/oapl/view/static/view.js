// Which page is shown, by its address; the list of runs; keys and theme.

import { address, ago, ask, el, go, number, place, put } from "./dom.js";
import { ComparePage, RunPage } from "./run.js";

const main = document.getElementById("main");
const LIST_EVERY_MS = 3000;

class ListPage {
  constructor() {
    this.body = el("tbody", {});
    this.notes = el("div", {});
    this.chosen = new Set();
    this.compare = el("button", { type: "button", class: "main", disabled: true, click: () => this.beside() }, "Show the two chosen side by side");
    this.node = el("section", { "aria-label": "Runs" }, el("div", { class: "bar" }, el("h2", {}, "Runs"), this.compare), this.notes,
      el("div", { class: "wide card", tabindex: "0", role: "region", "aria-label": "Runs" }, el("table", { class: "list" },
        el("thead", {}, el("tr", {}, ["", "run", "status", "step", "reward", "task", "loss", "last sign of life"].map((name) => (name ? el("th", { scope: "col" }, name) : el("td", {}))))), this.body)));
    this.rows = new Map();
    this.tick();
  }

  async tick() {
    clearTimeout(this.timer);
    try {
      const { runs, notes, is_one: isOne } = await ask("runs");
      if (this.stopped) return;
      document.getElementById("connection").textContent = "";
      if (isOne && runs.length === 1) {
        location.replace(address("run", { run: runs[0].name }));
        return;
      }
      this.show(runs, notes);
    } catch (error) {
      document.getElementById("connection").textContent = `no answer: ${error.message}`;
    }
    this.timer = setTimeout(() => this.tick(), LIST_EVERY_MS);
  }

  show(runs, notes) {
    const order = runs.map((run) => run.name).join("\n");
    for (const run of runs) {
      if (!this.rows.has(run.name)) {
        const box = el("input", { type: "checkbox", "aria-label": `choose ${run.name}`, change: (event) => this.choose(run.name, event.target.checked) });
        this.rows.set(run.name, { box, cells: ["status", "step", "reward", "task", "loss", "active"].map(() => el("td", {})), name: el("a", { href: address("run", { run: run.name }) }, run.name) });
      }
      const { cells } = this.rows.get(run.name);
      const texts = [run.status.text, `${number(run.step)} of ${number(run.num_steps)}`, number(run.reward), run.task, run.loss, ago(run.active_at)];
      cells.forEach((cell, i) => cell.textContent !== texts[i] && (cell.textContent = texts[i]));
      cells[0].className = `kind ${run.status.kind}`;
    }
    if (order !== this.order) {
      this.order = order;
      const focused = document.activeElement;
      put(this.body, runs.map((run) => {
        const row = this.rows.get(run.name);
        return el("tr", {}, el("td", {}, row.box), el("th", { scope: "row" }, row.name), row.cells);
      }));
      if (this.body.contains(focused)) focused.focus();
    }
    put(this.notes, notes.length > 0 && el("ul", { class: "card notes" }, notes.map((note) => el("li", {}, note))), runs.length === 0 && el("p", {}, "No run is here yet; a new one appears by itself."));
  }

  choose(name, isChosen) {
    if (isChosen) this.chosen.add(name);
    else this.chosen.delete(name);
    this.compare.disabled = this.chosen.size !== 2;
  }

  beside() {
    const [a, b] = this.chosen;
    location.hash = address("compare", { a, b });
  }

  use() {}

  stop() {
    this.stopped = true;
    clearTimeout(this.timer);
  }
}

let shown = null;
let key = null;

async function render() {
  const { page, query } = place();
  if (location.hash === "#main") return;
  const next = page === "run" ? `run ${query.run}` : page === "compare" ? `compare ${query.a}\n${query.b}` : "runs";
  if (next !== key) {
    key = next;
    shown?.stop();
    shown = null;
    if (page === "run" || page === "compare") {
      let names = [];
      try {
        names = (await ask("runs")).runs.map((run) => run.name);
      } catch (error) {
        if (key !== next) return;
        put(main, el("p", { class: "error" }, error.message), el("button", { type: "button", click: () => { key = null; render(); } }, "Try again"));
        return;
      }
      if (key !== next) return;
      const wanted = page === "run" ? [query.run] : [query.a, query.b];
      const missing = wanted.filter((name) => !names.includes(name));
      if (missing.length > 0) {
        put(main, el("p", { class: "error" }, `There is no run ${missing.join(" and no run ")} here. `, el("a", { href: "#runs" }, "All runs")));
        return;
      }
      shown = page === "run" ? new RunPage(wanted, names) : new ComparePage(wanted, names);
    } else shown = new ListPage();
    document.title = `${next.replace(/^(run|compare) /, "").replace("\n", " beside ")} · oapl view`;
    put(main, shown.node);
  }
  shown?.use(place().query);
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, textarea, dialog");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && event.target.matches("input[type=search]")) event.target.blur();
  if (typing || !shown?.completions) return;
  if (event.key === "/") {
    event.preventDefault();
    document.getElementById("search").focus();
  } else if (event.key === "j" || event.key === "k") shown.completions.focus(event.key === "j" ? 1 : -1);
});

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

const theme = document.getElementById("theme");
const use = (name) => {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
};
theme.value = localStorage.getItem("oapl-view-theme") || "";
use(theme.value);
theme.addEventListener("change", () => {
  localStorage.setItem("oapl-view-theme", theme.value);
  use(theme.value);
});

window.addEventListener("hashchange", render);
document.addEventListener("visibilitychange", () => document.hidden || shown?.tick?.());
render();
