// One run, or two of them, followed while they go.

import { Charts } from "./charts.js";
import { Completions } from "./completions.js";
import { address, ago, ask, el, go, number, put, say, svg } from "./dom.js";
import { Opened } from "./group.js";

const EVERY_MS = 1500;
const AT_FIRST_EVERY_MS = 300;
const HIDDEN_EVERY_MS = 15000;
const WIRE = [
  ["trained", "trained on"],
  ["stored", "sealed, waits for training"],
  ["drafted", "sampled, waits for grading"],
  ["leased", "being sampled"],
  ["waits", "not begun"],
];

// What the page of one run and that of two have in common: they ask for states, and draw them.
class Followed {
  constructor(names, names_of_all) {
    this.names = names;
    this.states = names.map(() => null);
    this.charts = new Charts();
    this.completions = new Completions(names);
    this.opened = new Opened((...given) => this.completions.step(...given));
    this.overview = el("div", {});
    this.parts = new Map();
    this.node = el("div", { class: "followed" }, this.head(names_of_all), this.overview, this.charts.node, this.completions.node, this.tail());
    this.tick();
  }

  tail() {
    this.settings = el("table", { class: "settings" });
    return el("details", { class: "card" }, el("summary", {}, "Every setting"), el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Settings" }, this.settings));
  }

  async tick() {
    clearTimeout(this.timer);
    const started = Date.now();
    try {
      const asked = this.names.map((run, at) => ask("state", { run, index: 1, seen: this.states[at]?.version ?? "" }));
      const answers = await Promise.all(asked);
      if (this.stopped) return;
      document.getElementById("connection").textContent = "";
      this.take(answers);
    } catch (error) {
      if (this.stopped) return;
      document.getElementById("connection").textContent = `no answer: ${error.message}`;
    }
    const every = this.states.every((state) => state?.index.num_read > 0 || state?.index.is_whole) ? EVERY_MS : AT_FIRST_EVERY_MS;
    const wait = document.hidden ? HIDDEN_EVERY_MS : Math.max(every, 4 * (Date.now() - started));
    this.timer = setTimeout(() => this.tick(), wait);
  }

  take(answers) {
    let isNew = false;
    answers.forEach((answer, at) => {
      const before = this.states[at];
      if (answer.curves) isNew = true;
      if (before && before.step !== answer.step && answers.length === 1) say(`step ${answer.step} of ${answer.num_steps}`);
      this.states[at] = { curves: before?.curves, charts: before?.charts, seconds: before?.seconds, ...answer };
    });
    this.describe();
    if (isNew) {
      const charts = new Map();
      for (const state of this.states) {
        for (const chart of state.charts) {
          const known = charts.get(chart.id);
          if (!known || known.lines.length < chart.lines.length) charts.set(chart.id, chart);
        }
      }
      this.charts.set([...charts.values()], this.states.map((state) => ({ name: state.name, columns: state.curves })));
    }
    answers.forEach((answer, at) => this.completions.follow(at, answer.index));
    this.showSettings();
  }

  // A part of the overview, made anew only where what it shows has changed, so that focus and selection stay.
  part(name, value, make) {
    const said = JSON.stringify(value);
    const known = this.parts.get(name);
    if (known?.said === said) return known.node;
    const node = make(value) || el("div", {});
    if (known) {
      const selector = "summary, [tabindex], a";
      const at = [...known.node.querySelectorAll(selector)].indexOf(document.activeElement);
      known.node.replaceWith(node);
      if (at >= 0) node.querySelectorAll(selector)[at]?.focus();
    }
    this.parts.set(name, { said, node });
    return node;
  }

  card({ name, status, step, num_steps, card: facts, active_at }) {
    const node = this.part(`card ${name}`, { status, step, num_steps, card: facts }, card);
    node.querySelector(".life").textContent = ` · last sign of life ${ago(active_at)}`;
    return node;
  }

  describe() {
    const pieces = this.pieces();
    if (!this.overview.firstChild) put(this.overview, this.layout(pieces));
  }

  showSettings() {
    const keys = [...new Set(this.states.flatMap((state) => Object.keys(state.settings)))];
    const shape = JSON.stringify(this.states.map((state) => state.settings));
    if (shape === this.shape) return;
    this.shape = shape;
    put(
      this.settings,
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "setting"), this.names.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, keys.map((key) => {
        const values = this.states.map((state) => state.settings[key] ?? "–");
        return el("tr", { class: new Set(values).size > 1 ? "differs" : null }, el("th", { scope: "row" }, key), values.map((value) => el("td", {}, value)));
      })),
    );
  }

  use(query) {
    this.completions.use(query);
    this.opened.use(this.names[Number(query.at || 0)] ?? this.names[0], query.open, query.at);
  }

  stop() {
    this.stopped = true;
    clearTimeout(this.timer);
    this.completions.stop();
    this.opened.use(null, null);
  }
}

export class RunPage extends Followed {
  head(all) {
    const others = all.filter((name) => name !== this.names[0]);
    const compare = el("select", { id: "compare", change: (event) => (location.hash = address("compare", { a: this.names[0], b: event.target.value })) },
      el("option", { value: "" }, "…"), others.map((name) => el("option", {}, name)));
    return el("div", { class: "bar" }, el("h2", {}, this.names[0]), others.length > 0 && el("label", {}, "beside ", compare));
  }

  pieces() {
    const [state] = this.states;
    return {
      card: this.card(state),
      notes: this.part("notes", [...state.notes, ...(state.index?.notes || [])], notes),
      wire: this.part("wire", state.wire, wire),
      load: this.part("load", state.load, load),
      rounds: this.part("rounds", state.rounds, rounds),
      scores: this.part("scores", state.scores, scores),
    };
  }

  layout({ card, notes, wire, load, rounds, scores }) {
    return [card, notes, el("div", { class: "pair" }, wire, load), rounds, scores];
  }
}

export class ComparePage extends Followed {
  head(all) {
    const pick = (name, at) => {
      const select = el("select", { id: `pick-${name}`, "aria-label": at === 0 ? "First run" : "Second run", change: (event) => go({ [name]: event.target.value, open: "", at: "" }) }, all.map((each) => el("option", {}, each)));
      select.value = this.names[at];
      return el("label", { class: `run${at}` }, el("i", { class: `swatch run${at}` }), select);
    };
    return el("div", { class: "bar" }, el("h2", {}, "Two runs"), pick("a", 0), pick("b", 1));
  }

  pieces() {
    return {
      columns: this.states.map((state, at) => [
        this.card(state),
        ...Object.entries({ wire, load, scores }).map(([name, make]) => this.part(`${name} ${at}`, state[name], make)),
      ]),
      notes: this.part("notes", this.states.flatMap((state) => [...state.notes, ...(state.index?.notes || [])]), notes),
      differing: this.part("differing", this.states.map((state) => [state.name, state.settings]), differing),
    };
  }

  layout({ columns, notes, differing }) {
    const column = (state, at) =>
      el("div", { class: "column" }, el("h3", { class: `run${at}` }, el("a", { href: address("run", { run: state.name }) }, state.name)), columns[at]);
    return [el("div", { class: "columns" }, this.states.map(column)), notes, differing];
  }
}

function differing([[a, settings], [b, others]]) {
  const keys = Object.keys({ ...settings, ...others }).filter((key) => settings[key] !== others[key]);
  return el("section", { class: "card", "aria-label": "Settings that differ" }, el("h3", {}, "Settings that differ"),
    keys.length === 0 ? el("p", {}, "None.") : el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table of settings that differ" }, el("table", {},
      el("thead", {}, el("tr", {}, ["setting", a, b].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, keys.map((key) => el("tr", {}, el("th", { scope: "row" }, key), [settings, others].map((each) => el("td", {}, each[key] ?? "–"))))))));
}

function card(state) {
  const { status, step, num_steps } = state;
  return el(
    "section",
    { class: `card now ${status.kind}`, "aria-label": "Status" },
    el("p", { class: "status" }, el("b", { class: `kind ${status.kind}` }, status.text), el("span", { class: "quiet life" })),
    el("progress", { max: num_steps, value: step, "aria-label": "Steps" }),
    el("dl", { class: "facts" }, state.card.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
  );
}

function notes(texts) {
  return texts.length > 0 && el("ul", { class: "card notes" }, texts.map((text) => el("li", {}, text)));
}

// `ago` is said when the part is made: a lease's beat is news, and makes it anew.
function wire(all) {
  const cell = (kind, i) => svg("rect", { x: 10 * (i % 50), y: 12 * Math.floor(i / 50), width: 8, height: 10, rx: 2, class: kind });
  const shown = all.map((round) => {
    const counts = WIRE.map(([kind, words]) => [round.states.filter((state) => state === kind).length, kind, words]).filter(([count]) => count > 0);
    const words = counts.map(([count, , text]) => `${count} ${text}`).join(", ");
    const width = 10 * Math.min(50, Math.max(20, round.states.length));
    const height = 12 * Math.ceil(round.states.length / 50);
    return el("div", { class: "round" },
      el("h4", {}, `Round ${round.index}`, el("span", { class: "quiet" }, ` ${round.imported ? "of another run" : `by policy ${round.policy}`}, ${number(round.prompts)} prompts × ${round.generations}`)),
      svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words, class: "strip" }, round.states.map(cell)),
      el("p", { class: "legend" }, counts.map(([count, kind, text]) => el("span", {}, el("i", { class: `swatch ${kind}` }), `${count} ${text}`))),
      round.leases.length > 0 && el("ul", { class: "leases quiet" }, round.leases.map((lease) => el("li", {}, `from shard ${lease.shard} on: ${lease.host}, process ${lease.pid}, heard of ${ago(lease.beat_at)}`))));
  });
  return el("section", { class: "card", "aria-label": "The round on the wire" }, el("h3", {}, "On the wire"), shown.length > 0 ? shown : el("p", { class: "quiet" }, "No round is open."));
}

function load(sums) {
  const title = el("h3", {}, "Load");
  if (!sums) return el("section", { class: "card", "aria-label": "Load" }, title, el("p", { class: "quiet" }, "No step is trained yet."));
  const wall = sums.wait_s + sums.step_s + sums.save_s;
  const sampling = Math.max(0, sums.sampling_s - sums.grading_s);
  const whole = Math.max(wall, sums.sampling_s) || 1;
  const bar = (name, parts) => {
    let start = 0;
    const rects = parts.filter(([, seconds]) => seconds > 0).map(([kind, seconds]) => {
      const rect = svg("rect", { x: (500 * start) / whole, width: (500 * seconds) / whole, height: 14, class: kind });
      start += seconds;
      return rect;
    });
    const words = parts.map(([kind, seconds]) => `${kind} ${number(seconds)} s`).join(", ");
    return el("div", {}, el("h4", {}, name), svg("svg", { viewBox: "0 0 500 14", preserveAspectRatio: "none", class: "load", role: "img", "aria-label": `${name}: ${words}` }, rects),
      el("p", { class: "legend" }, parts.map(([kind, seconds]) => el("span", {}, el("i", { class: `swatch ${kind}` }), `${kind} ${number(seconds)} s (${Math.round((100 * seconds) / (wall || 1))} %)`))));
  };
  return el("section", { class: "card", "aria-label": "Load" },
    title,
    el("p", { class: "quiet" }, `The last ${sums.steps} steps, ${number(wall)} s of the trainer's clock; lag ${number(sums.lag)} steps.`),
    bar("Trainer", [["step", sums.step_s], ["wait", sums.wait_s], ["save", sums.save_s]]),
    bar("Samplers", [["sample", sampling], ["grade", sums.grading_s], ["idle", Math.max(0, wall - sums.sampling_s)]]),
    el("p", {}, `Trainer ${number(sums.num_tokens / (sums.step_s || Infinity))} tokens/s of its steps; samplers ${number(sums.num_tokens / (sums.sampling_s || Infinity))} tokens/s of sampling.`));
}

function rounds(all) {
  if (all.length === 0) return null;
  const head = ["round", "policy", "shards", "failed", "reward", "wall s", "sample s", "train s", "overlap"];
  const cells = (each) => [each.index, each.num_shards === 0 ? "damaged" : each.policy ?? "other run's", `${each.num_stored}/${each.num_shards}${each.is_sealed ? "" : " open"}`, each.num_failed, number(each.reward), each.wall_s.toFixed(1), each.sampling_s.toFixed(1), each.training_s.toFixed(1), each.overlap === null ? "" : each.overlap.toFixed(2)];
  return el("details", { class: "card rounds", open: rounds.isOpen, toggle: (event) => (rounds.isOpen = event.target.open) }, el("summary", {}, "Newest rounds"),
    el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Newest rounds" }, el("table", {}, el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, all.map((each) => el("tr", {}, cells(each).map((text) => el("td", {}, String(text)))))))));
}
rounds.isOpen = false;

function scores(found) {
  const names = Object.keys(found);
  if (names.length === 0) return null;
  const ks = [...new Set(names.flatMap((name) => Object.keys(found[name].pass_at_k || found[name])))].filter((k) => /^\d+$/.test(k));
  const text = (value) => (value ? `${value[0].toFixed(3)} [${value[1].toFixed(3)}, ${value[2].toFixed(3)}]` : "–");
  return el("section", { class: "card", "aria-label": "pass@k" }, el("h3", {}, "pass@k"), el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "pass@k" }, el("table", {},
    el("thead", {}, el("tr", {}, ["k", ...names].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ks.map((k) => el("tr", {}, el("th", { scope: "row" }, k), names.map((name) => el("td", {}, text((found[name].pass_at_k || found[name])[k])))))))));
}
