// Completions of one run, or of two beside each other: presets, filters, lists that follow, a search that goes on.

import { address, ask, el, go, number, place, put, say, visible } from "./dom.js";

const FIELDS = ["verdict", "finish", "prompt", "text", "first_round", "last_round", "least_reward", "most_reward", "order"];
const PRESETS = [
  ["newest", {}],
  ["wrong but likely", { verdict: "wrong", order: "likely" }],
  ["right but rare", { verdict: "right", order: "rare" }],
  ["truncated", { finish: "length" }],
  ["failed grading", { verdict: "failed" }],
];
const OTHER_ORDERS_EVERY_MS = 5000;

export function filtersOf(query) {
  return Object.fromEntries(FIELDS.map((name) => [name, query[name] || ""]));
}

export function keyOf(row) {
  return `${row.round}.${row.position}.${row.idx ?? 0}`;
}

export class Completions {
  constructor(runs) {
    this.runs = runs;
    this.columns = runs.map((run, at) => new Column(run, at, runs.length > 1));
    this.presets = el("div", { class: "presets", role: "group", "aria-label": "Presets" });
    this.form = this.makeForm();
    this.node = el(
      "section",
      { class: "completions", "aria-label": "Completions" },
      el("div", { class: "bar" }, el("h3", {}, "Completions")),
      this.presets,
      this.form,
      el("div", { class: runs.length > 1 ? "columns" : "" }, this.columns.map((column) => column.node)),
    );
  }

  makeForm() {
    const choice = (name, label, options) =>
      el("label", {}, label, el("select", { name }, options.map(([value, text]) => el("option", { value }, text))));
    const field = (name, label, type, more = {}) => el("label", {}, label, el("input", { name, type, ...more }));
    const range = (label, first, last, more) =>
      el("div", { class: "range", role: "group", "aria-label": label },
        el("label", {}, `${label} from`, el("input", { name: first, type: "number", ...more })), el("label", {}, "to", el("input", { name: last, type: "number", ...more })));
    const form = el(
      "form",
      { class: "filters", role: "search", "aria-label": "Completions" },
      field("text", "text", "search", { placeholder: "in completion or prompt", maxlength: 500, id: "search" }),
      choice("verdict", "verdict", [["", "any"], ["right", "right"], ["wrong", "wrong"], ["failed", "failed grading"]]),
      choice("finish", "end", [["", "any"], ["stop", "stop"], ["length", "truncated"]]),
      choice("order", "order", [["", "newest"], ["likely", "likeliest a token"], ["rare", "least likely a token"], ["longest", "longest"], ["best", "highest reward"], ["worst", "lowest reward"]]),
      field("prompt", "prompt", "text", { placeholder: "train/17", size: 10, maxlength: 100 }),
      range("rounds", "first_round", "last_round", { min: 0, max: 99999999 }),
      range("reward", "least_reward", "most_reward", { step: "any" }),
      el("button", { type: "submit", class: "main" }, "Show"),
      el("button", { type: "button", click: () => go(Object.fromEntries([...FIELDS, "offset"].map((name) => [name, ""]))) }, "Clear"),
    );
    const take = () => go({ ...Object.fromEntries(new FormData(form)), offset: "" });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      take();
    });
    form.addEventListener("change", (event) => event.target.name !== "text" && take());
    return form;
  }

  use(query) {
    const filters = filtersOf(query);
    for (const name of FIELDS) {
      const input = this.form.elements[name];
      if (input.value !== filters[name] && input !== document.activeElement) input.value = filters[name];
      else if (input.value !== filters[name] && input.tagName === "SELECT") input.value = filters[name];
    }
    put(
      this.presets,
      PRESETS.map(([name, wanted]) => {
        const next = filtersOf(wanted);
        const isOn = FIELDS.every((field) => field === "prompt" || next[field] === filters[field]);
        return el("button", { type: "button", "aria-pressed": String(isOn), click: () => go({ ...next, prompt: filters.prompt, offset: "" }) }, name);
      }),
    );
    for (const column of this.columns) column.use(filters, Number(query.offset || 0));
  }

  follow(at, index) {
    this.columns[at].follow(index);
  }

  // The row of `key` and its neighbours, for the keys j and k.
  step(by, key, at) {
    const rows = this.columns[at].rows;
    const now = rows.findIndex((row) => keyOf(row) === key);
    const next = now < 0 ? (by > 0 ? 0 : rows.length - 1) : now + by;
    return rows[next] ? keyOf(rows[next]) : null;
  }

  focus(by) {
    const links = [...this.node.querySelectorAll("a.row")];
    const now = links.indexOf(document.activeElement);
    const next = links[now < 0 ? 0 : Math.min(links.length - 1, Math.max(0, now + by))];
    next?.focus();
  }

  stop() {
    for (const column of this.columns) column.stop();
  }
}

class Column {
  constructor(run, at, named) {
    this.run = run;
    this.at = at;
    this.rows = [];
    this.status = el("p", { class: "quiet status" });
    this.list = el("ol", { class: "rows" });
    this.more = el("div", { class: "bar pager" });
    this.node = el("div", { class: "column" }, named && el("h4", { class: `run${at}` }, run), this.status, this.list, this.more);
    this.index = null;
  }

  use(filters, offset) {
    const asked = JSON.stringify([filters, offset]);
    if (asked === this.asked) return;
    this.asked = asked;
    this.filters = filters;
    this.offset = offset;
    this.rows = [];
    this.known = null;
    this.load(null);
  }

  stop() {
    this.abort?.abort();
  }

  get isSearch() {
    return this.filters.text !== "" && this.filters.verdict !== "failed";
  }

  follow(index) {
    this.index = index;
    this.tell();
    if (!index || this.loading || this.isSearch || this.version === undefined || index.version === this.version) return;
    const isLive = this.filters.order === "" && this.offset === 0;
    if (isLive || Date.now() - this.loadedAt > OTHER_ORDERS_EVERY_MS) this.load(null);
  }

  async load(before) {
    this.abort?.abort();
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.loading = true;
    this.node.setAttribute("aria-busy", "true");
    try {
      const cursor = before ? { before_round: before[0], before_shard: before[1] } : {};
      const answer = await ask("completions", { run: this.run, ...this.filters, ...cursor, ...(this.offset > 0 && { offset: this.offset }) }, signal);
      this.answer = answer;
      this.version = answer.version;
      this.rows = before ? [...this.rows, ...answer.rows] : answer.rows;
      this.error = null;
      this.show();
      if (this.isSearch) say(`${this.rows.length} found in ${answer.searched} of ${answer.shards} shards`);
    } catch (error) {
      if (signal.aborted) return;
      this.error = error.message;
      this.asked = null;
    }
    this.loadedAt = Date.now();
    this.loading = false;
    this.node.removeAttribute("aria-busy");
    this.tell();
  }

  show() {
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const isFirst = this.known === null;
    const known = this.known || new Set();
    put(this.list, this.rows.map((row) => el("li", {}, this.row(row, !isFirst && !known.has(keyOf(row))))));
    this.known = new Set(this.rows.map(keyOf));
    if (focused) this.list.querySelector(`[data-key="${focused}"]`)?.focus();
    const { total, offset } = this.answer;
    const buttons = [];
    if (this.isSearch && this.answer.before) {
      buttons.push(el("button", { type: "button", class: "go-on", click: () => this.load(this.answer.before) }, "Search older shards"));
    } else if (!this.isSearch && total > 0) {
      if (offset > 0) buttons.push(el("button", { type: "button", click: () => go({ offset: Math.max(0, offset - 50) || "" }) }, "Previous"));
      buttons.push(el("span", { class: "quiet" }, `${number(offset + 1)} to ${number(offset + this.rows.length)} of ${number(total)}`));
      if (offset + this.rows.length < total) buttons.push(el("button", { type: "button", click: () => go({ offset: offset + 50 }) }, "Next"));
    }
    put(this.more, buttons);
  }

  row(row, isNew) {
    const key = keyOf(row);
    const { page, query } = place();
    const href = address(page, { ...query, open: key, at: this.at || "" });
    const mark = row.cause !== undefined || row.reward === null ? ["not graded", "none", "?"] : row.is_right ? ["right", "right", "✓"] : ["wrong", "wrong", "✗"];
    const facts =
      row.cause !== undefined
        ? [el("span", {}, row.prompt_id), el("span", {}, `round ${row.round}`)]
        : [
            el("span", { class: "reward" }, number(row.reward)),
            el("span", {}, `round ${row.round}`),
            el("span", {}, row.prompt_id),
            el("span", {}, `${number(row.length)} tokens${row.finish === "length" ? ", cut" : ""}`),
            el("span", { title: "mean log-prob of a token under its sampler, in nats" }, `${number(row.mean_logprob)} a token`),
          ];
    return el(
      "a",
      { class: `row${isNew ? " new" : ""}`, href, "data-key": key },
      el("span", { class: `mark ${mark[1]}`, title: mark[0] }, el("span", { "aria-hidden": "true" }, mark[2]), el("span", { class: "hidden" }, mark[0])),
      el("span", { class: "facts" }, facts),
      el("span", { class: "snippet" }, visible(row.cause !== undefined ? row.cause : (row.text || "").replaceAll("\n", " ↵ "))),
    );
  }

  tell() {
    if (this.error) {
      put(this.status, el("span", { class: "error" }, this.error), " ", el("button", { type: "button", click: () => this.use(this.filters, this.offset) }, "Try again"));
      return;
    }
    const said = [];
    if (this.answer && this.isSearch) said.push(`${number(this.rows.length)} found; ${number(this.answer.searched)} of ${number(this.answer.shards)} shards read, newest first.`);
    else if (this.answer && this.rows.length === 0) said.push(!this.index?.is_whole ? "" : this.index.num_sealed === 0 ? "No shard is sealed yet." : "None such.");
    if (!this.index?.is_whole) said.push("The index is being made.");
    else if (this.index.num_read < this.index.num_sealed) said.push(`The index has ${number(this.index.num_read)} of ${number(this.index.num_sealed)} shards; newest first.`);
    const text = said.join(" ");
    if (this.status.textContent !== text) this.status.textContent = text;
  }
}
