"use strict";
// The browser of completions. Tokens and texts come from a model and are hostile: textContent only.

function showCompletions() {
  if (!RUNS.some((run) => run.completions || run.completion_notes.length)) return;
  const node = section("completions", "Completions", "A fixed sample of the groups that were trained on.");
  const view = { run: Math.max(0, RUNS.findIndex((run) => run.completions)), round: "", step: "", place: 0, filter: "all", text: "" };
  const runs = select("run", RUNS.map((run, i) => [String(i), run.name]), (value) => pick({ run: Number(value) }));
  const rounds = select("round", [], (value) => pick({ round: value }));
  const steps = select("step", [], (value) => pick({ step: value }));
  const prompts = select("prompt", [], (value) => pick({ place: Number(value) }), true);
  const back = element("button", { type: "button", id: "previous", onclick: () => pick({ place: view.place - 1 }) }, "← previous");
  const next = element("button", { type: "button", id: "next", onclick: () => pick({ place: view.place + 1 }) }, "next →");
  const search = element("input", { type: "search", placeholder: "search prompts and answers", "aria-label": "Search", id: "search" });
  search.addEventListener("input", () => pick({ text: search.value }));
  const filter = switcher("Answers", [["all", "all"], ["right", "right"], ["wrong", "wrong"], ["truncated", "truncated"]], "all",
    (value) => pick({ filter: value }));
  filter.id = "filter";
  const count = element("span", { class: "soft", id: "count" });
  const stage = element("div", { id: "stage" });
  const about = element("div", { class: "soft", style: "font-size:13.5px" });
  runs.node.value = String(view.run);
  node.append(element("div", { class: "card browser" },
    about,
    element("div", { class: "controls", style: "margin:0" }, RUNS.length > 1 ? runs.label : null, filter, search, count),
    element("div", { class: "controls", style: "margin:0" }, rounds.label, steps.label, prompts.label, back, next),
    stage));

  function pick(change) {
    if ("run" in change) Object.assign(view, { round: "", step: "" });
    if ("round" in change) view.step = "";
    if (!("place" in change)) view.place = 0;
    Object.assign(view, change);
    paint();
  }
  function paint() {
    const run = RUNS[view.run];
    const shown = run.completions;
    about.replaceChildren(...aboutSample(run));
    if (!shown) {
      stage.replaceChildren();
      count.textContent = "";
      for (const box of [rounds, steps, prompts]) box.node.replaceChildren();
      back.disabled = next.disabled = true;
      return;
    }
    const fits = (answer) => answerFits(answer, view.filter, shown.threshold);
    const found = shown.groups.filter((group) => group.answers.some((answer) => fits(answer) && textFits(group, answer, view.text)));
    const inRound = found.filter((group) => view.round === "" || String(group.round) === view.round);
    const groups = inRound.filter((group) => view.step === "" || String(group.step) === view.step);
    fill(rounds.node, [["", "all"], ...unique(found.map((group) => group.round)).map((round) => [String(round), round])]);
    fill(steps.node, [["", "all"], ...unique(inRound.map((group) => group.step)).map((step) => [String(step), step])]);
    rounds.node.value = view.round;
    steps.node.value = view.step;
    view.place = Math.min(Math.max(0, view.place), Math.max(0, groups.length - 1));
    fill(prompts.node, groups.map((group, i) => [String(i), `step ${group.step} · ${oneLine(group.prompt)} (${group.id})`]));
    prompts.node.value = String(view.place);
    back.disabled = view.place <= 0;
    next.disabled = view.place >= groups.length - 1;
    const matching = groups.reduce((sum, group) => sum + group.answers.filter((a) => fits(a) && textFits(group, a, view.text)).length, 0);
    count.textContent = `${matching} answers in ${groups.length} prompts`;
    if (!groups.length) stage.replaceChildren(element("p", { class: "soft" }, "No answer fits."));
    else stage.replaceChildren(groupView(groups[view.place], shown, fits, view.text));
  }
  paint();
}
function aboutSample(run) {
  const shown = run.completions;
  const nodes = run.completion_notes.map((note) => element("p", { class: "note", style: "margin:0 0 8px" }, note));
  if (!shown) return [...nodes, element("p", {}, "No completions of this run are left to show.")];
  nodes.push(element("p", {}, `${shown.groups.length} of ${shown.num_groups} prompts, drawn with a fixed seed from steps spread evenly over the run, ` +
    "the first and the last included, each with all of its answers."));
  if (shown.policy !== null) nodes.push(element("p", { class: "scale" },
    element("span", {}, `less likely under policy ${shown.policy} (−${shown.scale} nats)`), element("i"),
    element("span", {}, `more likely (+${shown.scale}) than when it was sampled. Choose a token for its numbers.`)));
  return nodes;
}
function unique(values) {
  return [...new Set(values)];
}
function oneLine(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 70 ? `${line.slice(0, 70)}…` : line;
}
function textOf(answer) {
  return answer.tokens ? answer.tokens.join("") : answer.text;
}
function answerFits(answer, filter, threshold) {
  if (filter === "right") return answer.mark >= threshold;
  if (filter === "wrong") return answer.mark < threshold;
  if (filter === "truncated") return answer.finish === "length";
  return true;
}
function textFits(group, answer, text) {
  const wanted = text.toLowerCase();
  return !wanted || group.prompt.toLowerCase().includes(wanted) || textOf(answer).toLowerCase().includes(wanted);
}
function groupView(group, shown, fits, text) {
  const answers = group.answers.filter((answer) => fits(answer) && textFits(group, answer, text));
  const hidden = group.answers.length - answers.length;
  return element("div", { class: "group" },
    element("p", { class: "soft", style: "font-size:13.5px" },
      `Round ${group.round}, step ${group.step}, ${group.id}, sampled from policy ${group.sampler}` +
      (hidden ? `; ${hidden} of its ${group.answers.length} answers do not fit the filter` : "")),
    element("pre", { class: "prompt card" }, group.prompt),
    element("div", { class: `answers${group.answers.some((answer) => answer.length > 120) ? " long" : ""}` },
      ...answers.map((answer) => answerView(answer, shown))));
}
function answerView(answer, shown) {
  const right = answer.mark >= shown.threshold;
  const info = element("div", { class: "token-info" });
  const body = element("div", { class: "answer" });
  if (answer.tokens) body.append(...tokenNodes(answer, shown.scale, info));
  else body.textContent = answer.text;
  return element("article", { class: "answer-card" },
    element("div", { class: "answer-head" },
      element("span", { class: `badge ${right ? "right" : "wrong"}` }, `${right ? "✓" : "✗"} reward ${answer.reward}`),
      element("span", { class: `badge ${answer.finish}` }, answer.finish === "length" ? "truncated" : "stopped"),
      answer.reason ? element("span", { class: "reason" }, answer.reason) : null,
      element("span", {}, `${answer.length} tokens`),
      answer.ratio === undefined ? null : element("span", { title: "log pi_theta - log pi_sampler of the whole answer" },
        `log-ratio ${fixed(answer.ratio, 2, true)}`),
      element("span", { title: "log pi_sampler of the whole answer" }, `sampled at ${fixed(answer.logprob, 1)} nats`)),
    body, answer.tokens ? info : null);
}
function tokenNodes(answer, scale, info) {
  const cut = answer.omitted ? answer.tokens.length - 500 : -1;
  const nodes = [];
  answer.tokens.forEach((piece, i) => {
    if (i === cut) nodes.push(element("span", { class: "soft" }, `\n[… ${answer.omitted} tokens …]\n`));
    const ratio = answer.ratios[i];
    const ends = i === answer.tokens.length - 1 && answer.finish === "stop";
    const node = element("span", { "data-i": i, class: ends ? "soft" : undefined }, piece.replace(/\n/g, "↵\n"));
    const strength = Math.min(1, Math.abs(ratio ?? 0) / scale) * 0.75;
    node.style.backgroundColor = `rgba(var(${ratio < 0 ? "--down" : "--up"}), ${strength.toFixed(3)})`;
    const numbers = `log-ratio ${fixed(ratio, 3, true)}, sampled at ${fixed(answer.logprobs[i], 2)} nats (${(100 * Math.exp(answer.logprobs[i])).toPrecision(2)} %)`;
    node.title = numbers;
    node.addEventListener("click", () => {
      for (const other of node.parentNode.querySelectorAll(".picked")) other.classList.remove("picked");
      node.classList.add("picked");
      info.textContent = `token ${i + 1} ${JSON.stringify(piece)}: ${numbers}`;
    });
    nodes.push(node);
  });
  return nodes;
}
