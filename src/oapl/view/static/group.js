// One completion with its group: its text whole, what grading found, and how far training moved its tokens.

import { address, ask, el, go, number, place, put, say, visible } from "./dom.js";

const LEVELS = 4;
const LEAST_SCALE = 0.05;
const WAIT_MS = 350;

export class Opened {
  // The dialog; `step` names the neighbour of a completion in the list behind it.
  constructor(step) {
    this.dialog = document.getElementById("dialog");
    this.step = step;
    this.dialog.onclose = () => go({ open: "", at: "" });
    this.dialog.onkeydown = (event) => this.key(event);
    this.colour = "ratio";
  }

  async use(run, open, at) {
    const key = open ? `${run} ${open}` : null;
    if (key === this.shown) return;
    this.shown = key;
    clearTimeout(this.timer);
    if (!key) {
      if (this.dialog.open) this.dialog.close();
      document.querySelector(`a.row[data-key="${CSS.escape(this.last || "")}"]`)?.focus();
      return;
    }
    const [round, position, index] = open.split(".").map(Number);
    this.last = open;
    this.where = { run, round, position, index: index || 0, at };
    if (!this.dialog.open) {
      put(this.dialog, el("h2", { id: "dialog-title" }, "Completion"));
      this.dialog.showModal();
    }
    const of = `${run} ${round}.${position}`;
    if (this.of !== of) {
      this.of = of;
      this.group = this.scores = null;
    }
    if (!this.group) {
      let group = null, error = null;
      try {
        group = await ask("group", { run, round, position });
      } catch (problem) {
        error = problem.message;
      }
      if (this.of !== of || this.group) return; // another group by now, or this one by another request
      this.group = group;
      this.error = error;
      if (!this.shown) return; // closed
    }
    this.show();
    const isGraded = this.group?.answers.some((answer) => answer.reward !== undefined);
    if (isGraded && !this.scores) this.timer = setTimeout(() => this.scores || this.score(), WAIT_MS);
  }

  async score(large = false) {
    const of = this.of;
    const { run, round, position } = this.where;
    this.scores = { waits: true };
    this.tellScores();
    let scores;
    try {
      scores = await ask("scores", { run, round, position, large: large ? 1 : "" });
    } catch (error) {
      scores = { why: error.message };
    }
    if (this.of !== of) return;
    if (scores.answers && this.group && scores.digest !== this.group.digest) {
      scores = { why: "the shard was sampled again since. Close this and open it again." };
      this.of = null;
    }
    this.scores = scores;
    if (scores.answers) {
      const sizes = scores.answers.flatMap((answer) => answer.ratios.filter((value) => value !== null).map(Math.abs)).sort((a, b) => a - b);
      this.scale = Math.max(LEAST_SCALE, sizes[Math.floor(0.95 * (sizes.length - 1))] || 0);
    }
    if (this.dialog.open && this.group) {
      this.showText();
      this.tellScores();
    }
  }

  show() {
    const { run, round, position, index, at } = this.where;
    const close = el("button", { type: "button", class: "close", click: () => this.dialog.close(), "aria-label": "Close" }, "✕");
    if (!this.group || !this.group.answers[index]) {
      const why = this.error || `This group has ${this.group.answers.length} answers.`;
      put(this.dialog, el("div", { class: "bar" }, el("h2", { id: "dialog-title" }, "Completion"), close), el("p", { class: "error" }, why));
      close.focus();
      return;
    }
    const { group } = this;
    const answer = group.answers[index];
    const { page, query } = place();
    const link = (i) => address(page, { ...query, open: `${round}.${position}.${i}`, at: at || "" });
    const fixed = `${location.origin}${location.pathname}${address("run", { run, open: `${round}.${position}.${index}` })}`;
    const facts = [
      ["reward", answer.reward === undefined ? "not graded" : number(answer.reward)],
      ["counts as", answer.is_right === undefined ? null : answer.is_right ? "right" : "wrong"],
      ["why", answer.reason || group.cause],
      ["graded of it", answer.answer],
      ...Object.entries(answer.scores || {}).map(([name, value]) => [`score ${name}`, number(value)]),
      ["end", answer.finish === "length" ? "truncated at the limit" : "stop"],
      ["tokens", number(answer.length)],
      ["log-prob", `${number(answer.logprob, 4)} nats, ${number(answer.mean_logprob)} a token`],
      ["sampled by", group.sampler === null ? "another run's policy" : `policy ${group.sampler}, for step ${group.step}`],
      ["graded by", group.verifier],
      ["file", group.file],
    ].filter(([, value]) => value !== null && value !== undefined && value !== "");
    this.text = el("pre", { class: "text", tabindex: "0", id: "completion-text", "aria-label": "Text of the completion" });
    this.text.addEventListener("keydown", (event) => this.walk(event));
    this.text.addEventListener("pointerover", (event) => event.target.dataset.token && this.read(Number(event.target.dataset.token)));
    this.reading = el("output", { class: "reading quiet" });
    this.scoring = el("div", { class: "bar scoring" });
    const title = el("h2", { id: "dialog-title", tabindex: "-1" }, `Round ${round}, ${group.prompt_id}, answer ${index + 1} of ${group.answers.length}`);
    put(
      this.dialog,
      el("div", { class: "bar" }, title, el("button", { type: "button", click: () => this.neighbour(-1) }, "Previous (k)"), el("button", { type: "button", click: () => this.neighbour(1) }, "Next (j)"), close),
      el("nav", { class: "answers", "aria-label": "Answers of this group" }, group.answers.map((each, i) =>
        el("a", { href: link(i), "aria-current": i === index ? "true" : null, click: (event) => { event.preventDefault(); go({ open: `${round}.${position}.${i}` }, { replace: true }); } },
          el("span", { class: `mark ${each.is_right === undefined ? "none" : each.is_right ? "right" : "wrong"}`, "aria-hidden": "true" }, each.is_right === undefined ? "?" : each.is_right ? "✓" : "✗"),
          ` ${i + 1}`, el("span", { class: "hidden" }, each.is_right === undefined ? "not graded" : each.is_right ? "right" : "wrong")))),
      el("details", { open: true }, el("summary", {}, "Prompt"), el("pre", { class: "text", tabindex: "0", "aria-label": "Text of the prompt" }, visible(group.prompt))),
      this.scoring,
      this.text,
      this.reading,
      el("dl", { class: "facts" }, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, visible(String(value)))])),
      el("p", {}, el("a", { href: fixed, class: "permanent" }, "Link to this completion"), " · ", el("a", { href: address("run", { run, prompt: group.prompt_id }) }, "all answers to this prompt")),
    );
    this.showText();
    this.tellScores();
    title.focus();
    say(`${title.textContent}, ${answer.is_right === undefined ? "not graded" : answer.is_right ? "right" : "wrong"}`);
  }

  showText() {
    const answer = this.group?.answers[this.where.index];
    if (!answer) return; // not here yet
    const scored = this.scores?.answers?.[this.where.index];
    this.token = null;
    this.reading.textContent = "";
    if (!scored || this.colour === "plain") {
      put(this.text, visible(answer.text));
      return;
    }
    const values = this.colour === "ratio" ? scored.ratios : scored.logprobs;
    put(this.text, scored.pieces.map((piece, i) => {
      const value = values[i];
      const size = value === null ? 0 : Math.min(1, this.colour === "ratio" ? Math.abs(value) / this.scale : -value / 5);
      const level = Math.ceil(size * LEVELS);
      const hue = this.colour === "ratio" && value > 0 ? "up" : "down";
      return el("span", { class: level ? `${hue}${level}` : null, "data-token": i }, visible(piece));
    }));
  }

  tellScores() {
    if (!this.scoring) return;
    const { scores } = this;
    if (!scores) put(this.scoring);
    else if (scores.waits) put(this.scoring, el("span", { class: "quiet" }, "The newest policy scores these tokens…"));
    else if (scores.why) put(this.scoring, el("span", { class: "quiet why" }, "No log-ratios: ", visible(scores.why)));
    else if (scores.bytes) {
      put(this.scoring, el("span", { class: "quiet" }, `No log-ratios yet: policy ${scores.policy} has ${(scores.bytes / 1e9).toFixed(1)} GB of weights.`),
        el("button", { type: "button", click: () => this.score(true) }, "Load them on the CPU and score"));
    } else {
      const ratios = scores.answers[this.where.index]?.ratios || [];
      const sum = ratios.reduce((total, value) => total + (value || 0), 0);
      const select = el("select", { id: "colour", change: (event) => { this.colour = event.target.value; this.showText(); } },
        el("option", { value: "ratio" }, "log-ratio"), el("option", { value: "logprob" }, "sampler's log-prob"), el("option", { value: "plain" }, "none"));
      select.value = this.colour;
      put(this.scoring, el("label", {}, "colour of tokens ", select),
        el("span", { class: "scored" }, `log-ratio ${number(sum)} nats: policy ${scores.policy}, the newest sealed, against policy ${this.group.sampler}, which sampled`),
        el("span", { class: "scale quiet" }, el("span", { class: "down4" }, `−${number(this.scale)}`), el("span", {}, " 0 "), el("span", { class: "up4" }, `+${number(this.scale)}`)));
    }
  }

  read(i) {
    const scored = this.scores?.answers?.[this.where.index];
    if (!scored || i < 0 || i >= scored.pieces.length || this.colour === "plain") return;
    this.text.querySelector(".at")?.classList.remove("at");
    this.text.querySelector(`[data-token="${i}"]`)?.classList.add("at");
    this.token = i;
    put(this.reading, `token ${i + 1} `, visible(JSON.stringify(scored.pieces[i])), ` log-ratio ${number(scored.ratios[i])}, sampler's log-prob ${number(scored.logprobs[i])}`);
  }

  walk(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    this.read(this.token === null ? 0 : this.token + by);
  }

  neighbour(by) {
    const { round, position, index, at } = this.where;
    const next = this.step(by, `${round}.${position}.${index}`, Number(at || 0));
    if (next) go({ open: next }, { replace: true });
    else say("no more in this list");
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    if (event.key === "j") this.neighbour(1);
    if (event.key === "k") this.neighbour(-1);
  }
}
