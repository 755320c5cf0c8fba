"""Others' completions become rounds of a run: their tokens, the groups they are of, and their sampler's log-probs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from oapl.anchor import Anchor
from oapl.batching import Row
from oapl.config import Recipe
from oapl.errors import ConfigError, ExchangeError, GradingError, TaskError
from oapl.exchange.shapes import SHAPES, Trace, read_traces
from oapl.model import encode_prompt, eos_token_ids, load_tokenizer, resolve
from oapl.opening import open_run
from oapl.plan import derive_seed, training_params
from oapl.roles import use_threads
from oapl.sampler import Sampler, check_length
from oapl.sharding import ALONE
from oapl.store import RunFolder
from oapl.store.files import digest_file
from oapl.tasks import Task, make_task
from oapl.train_loop import ensure_first_policy, on_host
from oapl.types import (
    Completion,
    FinishReason,
    Group,
    PolicyRef,
    Request,
    Round,
    SampledGroup,
    Shard,
    Verdict,
    split_and_index,
)

UNKNOWN = "unknown"
"""The digest of a policy that a file does not name."""
UNSET = 1.0
"""In the place of a log-prob, which is never above 0, that is to be computed."""
SLACK = 0.05
"""The part of `sampling.max_completion_length` by which a text may have more tokens, or fewer, than were sampled."""
SHOWN = 3
Tell = Callable[[str], None]


@dataclass
class Found:
    """A group on its way into a round."""

    number: int
    """Of the groups in the files, in the order in which they begin."""
    traces: list[Trace]
    texts: list[str]
    prompt_id: str
    prompt_ids: list[int]
    completions: list[Completion]
    verdicts: list[Verdict]
    other_rewards: tuple[float, ...]
    num_lacking: int
    """Completions to be sampled."""

    @property
    def is_of_task(self) -> bool:
        """Whether the task has this problem, and so can grade more completions of it."""
        return not self.prompt_id.startswith("imported/")

    @property
    def place(self) -> str:
        return f"{self.traces[0].prompt!r:.80} ({self.traces[0].place})"


def import_files(
    recipe: Recipe,
    run: RunFolder,
    paths: Sequence[Path],
    tell: Tell,
    *,
    weights: Mapping[str, float] | None = None,
    samples: bool = True,
) -> None:
    """Makes sealed rounds of the completions in some files, in a run folder where nothing was sampled yet.

    `weights`: see `read_traces`. `samples`: whether groups of fewer than `sampling.num_generations` are completed.
    Raises ExchangeError where the files do not fit each other or the recipe, ConfigError where the run folder does not.
    """
    if run.round_indices():
        raise ConfigError(f"{run.path} has rounds already. Name a new folder as --run_dir.")
    if recipe.launch.rounds_from is not None:
        raise ConfigError("launch.rounds_from brings rounds from another run. Leave it out of an import of files.")
    traces, shape, notes = read_traces(paths, weights)
    for note in notes:
        tell(note)
    with closing(Reader(recipe, samples)) as reader:
        found = without_lone(reader.groups(traces, tell), tell)
    if shape == "trl":
        check_one_group(found, recipe.sampling.num_generations)
    parts = [Part(groups, policy_of(recipe, groups)) for groups in in_rounds(recipe, found, tell)]
    check_gradable([group for part in parts for group in part.lacking], recipe)
    with run.lock("run"):
        for note in open_run(recipe, run):
            tell(note)
        if any(part.policy is None or part.lacking for part in parts):
            ensure_first_policy(recipe, run)
            model = run.policy(0)
            assert model is not None
            recompute(recipe, run, model, parts, tell)
            complete(recipe, run, model, parts, tell)
        files = [{"path": str(path.resolve()), "digest": digest_file(path)} for path in paths]
        for index, part in enumerate(parts):
            write_round(recipe, run, reader, index, part, shape, files)
    groups = [group for part in parts for group in part.groups]
    rewards = [verdict.reward for group in groups for verdict in group.verdicts]
    tell(
        f"{len(parts)} round{'s' * (len(parts) > 1)} of {SHAPES[shape].what}: {len(groups)} groups, {len(rewards)} "
        f"completions, {sum(group.num_lacking for group in groups)} of them sampled; mean reward "
        f"{np.mean(rewards):.3f}; log-probs {', '.join(sorted({part.logprobs for part in parts}))}"
    )


@dataclass
class Part:
    """A round in the making."""

    groups: list[Found]
    policy: PolicyRef | None
    """Whose log-probs all of its completions have; None where they are yet to be computed."""
    logprobs: str = "of the files"
    graded_by: str | None = None
    """The task's verifier, where it graded some."""

    @property
    def lacking(self) -> list[Found]:
        """The groups that are to be completed."""
        return [group for group in self.groups if group.num_lacking > 0]


class Reader:
    """A model's tokens, a task's problems, and what makes groups of traces by them."""

    def __init__(self, recipe: Recipe, samples: bool) -> None:
        self.recipe, self.samples = recipe, samples
        self.tokenizer = load_tokenizer(recipe.model.name_or_path)
        self.eos_ids = eos_token_ids(Path(resolve(recipe.model.name_or_path)))
        config = AutoConfig.from_pretrained(resolve(recipe.model.name_or_path)).get_text_config(decoder=True)
        self.context_length = int(getattr(config, "max_position_embeddings", 0) or 2**31 - 1)
        self.task: Task = make_task(recipe.task)
        self._as_it_stands = recipe.task.model_copy(update={"chat": False, "system_prompt": None})
        self.slack = int(SLACK * recipe.sampling.max_completion_length)
        self.num_unlike = self.num_without_specials = self.num_near_limit = 0
        self.first_unlike = ""
        self.longest: tuple[int, str] = (0, "")

    def close(self) -> None:
        self.task.close()

    def groups(self, traces: Sequence[Trace], tell: Tell) -> list[Found]:
        """The groups in the order in which they begin. Raises ExchangeError where a completion is too long."""
        limit = self.recipe.sampling.max_completion_length
        gathered: dict[tuple[Any, ...], list[Trace]] = {}
        for trace in traces:
            gathered.setdefault(trace.group, []).append(trace)
        check_one_prompt(gathered)
        groups = [self.group(number, rows) for number, rows in enumerate(gathered.values())]
        if self.longest[0] > limit:
            raise ExchangeError(
                f"{self.longest[1]}: the completion has {self.longest[0]} tokens, more than "
                f"sampling.max_completion_length = {limit}. Set it to what the completions were sampled with; if it is "
                f"that, leave the row's group out: above it, what was cut there would be taken as ended."
            )
        if self.num_near_limit:
            tell(
                f"{self.num_near_limit} of {len(traces)} completions have neither finish_reason nor token_ids, and "
                f"have sampling.max_completion_length = {limit} tokens, give or take {self.slack}: taken as cut"
            )
        if self.num_unlike:
            tell(
                f"{self.num_unlike} of {len(traces)} completions read otherwise once they are tokens of this model, "
                f"the first at {self.first_unlike}: they were sampled from another tokenizer, or hold special tokens"
            )
        if self.num_without_specials:
            tell(
                f"{self.num_without_specials} prompts are none of the task's and were written without their special "
                f"tokens, if they had some: they are taken as plain text"
            )
        return groups

    def group(self, number: int, traces: list[Trace]) -> Found:
        first = traces[0]
        prompt_id, prompt_ids = self.prompt(first)
        if not prompt_ids:
            raise ExchangeError(f"{first.place}: the prompt has no tokens.")
        others = other_rewards(traces)
        known = len(traces) + len(others)
        completions = [self.completion(trace, len(prompt_ids)) for trace in traces]
        is_whole = bool(others) or first.group_rewards is not None or not self.samples
        return Found(
            number,
            traces,
            [trace.text for trace in traces],
            prompt_id or label(first) or f"imported/{number}",
            prompt_ids,
            completions,
            [verdict_of(trace) for trace in traces],
            others,
            0 if is_whole else max(0, self.recipe.sampling.num_generations - known),
        )

    def prompt(self, trace: Trace) -> tuple[str | None, list[int]]:
        """Which of the task's problems a prompt is, if any, and its tokens."""
        own = trace.own.get("prompt_ids")
        if own is None and trace.lacks_special_tokens and (found := self._by_text.get(str(trace.prompt))) is not None:
            return found
        ids = self.known(trace, own) if own else encode_prompt(self.tokenizer, trace.prompt, self._as_it_stands)
        prompt_id = self.named(trace.own.get("prompt_id"), ids) or self._by_tokens.get(tuple(ids))
        if own is None and trace.lacks_special_tokens and prompt_id is None and self.tokenizer.chat_template:
            self.num_without_specials += 1
        return prompt_id, ids

    def named(self, prompt_id: Any, ids: Sequence[int]) -> str | None:
        """The id, if it is one of the task's training problems and that is the prompt."""
        if not isinstance(prompt_id, str) or not re.fullmatch(r"train/\d{1,12}", prompt_id):
            return None
        index, count = split_and_index(prompt_id)[1], self.task.num_prompts("train")
        if count is not None and index >= count:
            return None
        posed = encode_prompt(self.tokenizer, self.task.prompt("train", index).text, self.recipe.task)
        return prompt_id if posed == list(ids) else None

    @cached_property
    def _posed(self) -> list[tuple[str, list[int]]]:
        """The training problems of a task that has so many and no more."""
        problems = (self.task.prompt("train", index) for index in range(self.task.num_prompts("train") or 0))
        return [(each.id, encode_prompt(self.tokenizer, each.text, self.recipe.task)) for each in problems]

    @cached_property
    def _by_tokens(self) -> dict[tuple[int, ...], str]:
        return {tuple(ids): prompt_id for prompt_id, ids in reversed(self._posed)}

    @cached_property
    def _by_text(self) -> dict[str, tuple[str, list[int]]]:
        return {
            self.tokenizer.decode(ids, skip_special_tokens=True): (prompt_id, ids)
            for prompt_id, ids in reversed(self._posed)
        }

    def known(self, trace: Trace, ids: list[int]) -> list[int]:
        """The ids, all of which the model has. Raises ExchangeError where one is none of its own."""
        if wrong := [each for each in ids if not 0 <= each < len(self.tokenizer)]:
            raise ExchangeError(
                f"{trace.place}: {wrong[0]} is no token of {self.recipe.model.name_or_path}, which has "
                f"{len(self.tokenizer)}. Name the model that the completions were sampled from, or one with its tokens."
            )
        return ids

    def completion(self, trace: Trace, num_prompt: int) -> Completion:
        """Its tokens, and its log-probs where the row has them; else `UNSET`."""
        asked = self.recipe.sampling.temperature
        if trace.own.get("temperature", asked) != np.float32(asked):
            raise ExchangeError(
                f"{trace.place}: sampled at temperature {trace.own['temperature']}, the recipe has "
                f"sampling.temperature = {asked}. Set it to the same."
            )
        own = trace.own.get("token_ids")
        if own is not None:
            ids = self.known(trace, own)
            reason = trace.finish_reason or self.reason(ids, trace.text)
        else:
            ids, reason = self.encode(trace)
        if not ids:
            raise ExchangeError(
                f"{trace.place}: the completion is empty. Where a model ended at once, say so by finish_reason `stop`; "
                f"else leave the row out."
            )
        if own is not None or len(ids) > self.recipe.sampling.max_completion_length + self.slack:
            self.longest = max(self.longest, (len(ids), trace.place))
        if num_prompt + len(ids) > self.context_length:
            raise ExchangeError(
                f"{trace.place}: {num_prompt} tokens of the prompt and {len(ids)} of the completion pass the model's "
                f"context of {self.context_length}."
            )
        logprobs = trace.own.get("logprobs") or np.full(len(ids), UNSET)
        return Completion(np.array(ids, np.int32), np.array(logprobs, np.float32), reason)

    def encode(self, trace: Trace) -> tuple[list[int], FinishReason]:
        """A text's tokens, and the end-of-sequence token where the completion ended by itself and not by a stop text.

        That is known by the row, or from the text's end, or else from its length: what has clearly fewer tokens than
        `sampling.max_completion_length` was not cut.
        """
        ids = list(self.tokenizer(trace.text, add_special_tokens=False)["input_ids"])
        if self.tokenizer.decode(ids, skip_special_tokens=True) != trace.text:
            self.num_unlike += 1
            self.first_unlike = self.first_unlike or trace.place
        reason = trace.finish_reason or self.reason(ids, trace.text, self.slack)
        self.num_near_limit += reason == "length" and trace.finish_reason is None
        if reason == "stop" and not self.has_ended(ids, trace.text) and (ids or trace.finish_reason):
            ids.append(self.eos_id)
        return ids, reason

    @property
    def eos_id(self) -> int:
        own = self.tokenizer.eos_token_id
        return int(own) if own in self.eos_ids else int(self.eos_ids[0])

    def has_ended(self, ids: Sequence[int], text: str) -> bool:
        """Whether the end is there already."""
        return bool(ids) and (ids[-1] in self.eos_ids or text.endswith(self.recipe.sampling.stop or ("\0",)))

    def reason(self, ids: Sequence[int], text: str, slack: int = 0) -> FinishReason:
        is_short = len(ids) < self.recipe.sampling.max_completion_length - slack
        return "stop" if is_short or self.has_ended(ids, text) else "length"


def check_one_prompt(gathered: Mapping[tuple[Any, ...], Sequence[Trace]]) -> None:
    """Raises ExchangeError where two prompts claim one place in a round, or several groups do."""
    places: dict[tuple[Any, Any], Trace] = {}
    for traces in gathered.values():
        first = traces[0]
        place = (first.own.get("round"), first.own.get("position"))
        if None in place:
            continue
        if (other := places.setdefault(place, first)) is not first:
            raise ExchangeError(
                f"{first.place} and {other.place} are both of round {place[0]}, position {place[1]}, and have other "
                f"prompts. The files are of several runs: import each into a folder of its own."
            )


def check_one_group(groups: Sequence[Found], num_generations: int) -> None:
    """Raises ExchangeError where rows of TRL's, which have no group but their step and prompt, are of several groups.
    Those that were exported say their group."""
    for group in groups:
        if len(group.traces) > num_generations and group.traces[0].own.get("position") is None:
            raise ExchangeError(
                f"{group.place} has {len(group.traces)} completions in one step, more than sampling.num_generations = "
                f"{num_generations}. Set it to TRL's; if it is that, they are of several groups, as where TRL "
                f"evaluated or a batch had the prompt twice: leave all but one of these groups out."
            )


def other_rewards(traces: Sequence[Trace]) -> tuple[float, ...]:
    """Those of the group's rewards that none of the rows earned. Raises ExchangeError where more rows earned one than
    the group has it."""
    if traces[0].group_rewards is None:
        return tuple(traces[0].own.get("other_rewards", ()))
    left = list(traces[0].group_rewards)
    for trace in traces:
        nearest = [reward for reward in left if np.float32(reward) == np.float32(trace.reward)]
        if not nearest:
            raise ExchangeError(
                f"{trace.place}: more rows of this prompt earned {trace.reward:g} than its `response_rewards` "
                f"{list(traces[0].group_rewards)} have. Are they of several groups?"
            )
        left.remove(nearest[0])
    return tuple(left)


def label(trace: Trace) -> str:
    """What a prompt that is none of a task's was called when it was imported before, or ""."""
    name = str(trace.own.get("prompt_id"))
    return name if re.fullmatch(r"imported/\d+", name) else ""


def verdict_of(trace: Trace) -> Verdict:
    answer, reason = trace.own.get("answer"), trace.own.get("reason")
    scores = trace.own.get("scores") or trace.scores
    return Verdict(
        trace.reward,
        answer if isinstance(answer, str) else None,
        reason if isinstance(reason, str) else "",
        {str(name): float(score) for name, score in scores.items()},
    )


def without_lone(groups: Sequence[Found], tell: Tell) -> list[Found]:
    """Those of two rewards or more: one alone is its own value, and there is nothing to learn from it."""
    kept = [group for group in groups if len(group.completions) + len(group.other_rewards) + group.num_lacking > 1]
    if len(kept) < len(groups):
        tell(f"{len(groups) - len(kept)} prompts have a single completion, and are left out")
    return kept


def in_rounds(recipe: Recipe, groups: Sequence[Found], tell: Tell) -> Iterator[list[Found]]:
    """The groups, in order, in rounds of as many shards as the recipe's have; a round's last one may be short. Those of
    rounds that are exported stay apart. Raises ExchangeError where there are too few for one round."""
    trainer = recipe.trainer
    num_rounds, left = 0, 0
    for _, stretch in groupby(groups, key=lambda group: group.traces[0].own.get("round")):
        found = list(stretch)
        for start in range(0, len(found), trainer.prompts_per_round):
            part = found[start : start + trainer.prompts_per_round]
            if -(-len(part) // trainer.prompts_per_step) == trainer.shards_per_round:
                num_rounds += 1
                yield part
            else:
                left += len(part)
    if num_rounds == 0:
        steps = -(-len(groups) // trainer.prompts_per_step) * trainer.num_epochs
        raise ExchangeError(
            f"the files hold {len(groups)} groups, fewer than a round of the recipe has: {trainer.prompts_per_round}, "
            f"of trainer.prompts_per_step = {trainer.prompts_per_step} and trainer.weight_sync_steps = "
            f"{trainer.weight_sync_steps}. Give more files, or --trainer.weight_sync_steps {steps}"
            f" here and when training."
        )
    if left:
        tell(
            f"{left} groups are left out, as they fill no round of {trainer.prompts_per_round}: "
            f"trainer.weight_sync_steps says how many steps of {trainer.prompts_per_step} prompts a round has"
        )
    if num_rounds > trainer.num_rounds:
        tell(
            f"{num_rounds} rounds, and trainer.num_steps = {trainer.num_steps} trains on {trainer.num_rounds}: "
            f"{num_rounds * trainer.weight_sync_steps} steps train on all"
        )


def check_gradable(lacking: Sequence[Found], recipe: Recipe) -> None:
    """Raises ExchangeError where a group is to be completed that the task cannot grade."""
    if strange := [group for group in lacking if not group.is_of_task]:
        shown = ", ".join(group.place for group in strange[:SHOWN])
        raise ExchangeError(
            f"{len(strange)} prompts have fewer than sampling.num_generations = {recipe.sampling.num_generations} "
            f"completions, and are none of the task's, which could grade more: "
            f"{shown}{', …' * (len(strange) > SHOWN)}. Name the task that has them, lower "
            f"num_generations, or give --no_sampling, which leaves groups as they are."
        )


def policy_of(recipe: Recipe, groups: Sequence[Found]) -> PolicyRef | None:
    """The policy whose log-probs the files have, as far as they name it; None where some completions of the round have
    none, or several policies' are among them: a round has one anchor."""
    completions = [completion for group in groups for completion in group.completions]
    traces = [trace for group in groups for trace in group.traces]
    named = {(trace.own.get("policy_version"), trace.own.get("policy_digest")) for trace in traces}
    if len(named) > 1 or any(completion.logprobs[0] == UNSET for completion in completions):
        return None
    ((version, digest),) = named
    version = version if isinstance(version, int) else 0
    return PolicyRef(version, version * recipe.trainer.weight_sync_steps, str(digest or UNKNOWN))


def recompute(recipe: Recipe, run: RunFolder, model: PolicyRef, parts: Sequence[Part], tell: Tell) -> None:
    """Gives the completions of a round the model's log-probs, at the recipe's temperature, where they lack some, or are
    of another policy and more are to be sampled from this one."""
    strange = []
    for part in parts:
        if part.lacking and part.policy is not None and part.policy.digest == model.digest:
            part.policy = model
        elif part.lacking or part.policy is None:
            part.policy, part.logprobs = model, "of the model"
            strange.append(part)
    groups = [group for part in strange for group in part.groups]
    if not groups:
        return
    num_without = sum(completion.logprobs[0] == UNSET for group in groups for completion in group.completions)
    why = f"{num_without} completions have none" if num_without else "the files' are not of this one policy"
    tell(f"log-probs by {recipe.model.name_or_path}, as {why} …")
    use_threads(recipe.trainer.num_threads)
    anchor = Anchor(on_host(recipe), ALONE)
    anchor.load(model, run.verified_policy_path(model))
    rows = [
        Row(position, np.array(group.prompt_ids, np.int32), completion, mark=0.0, advantage=0.0)
        for position, group in enumerate(groups)
        for completion in group.completions
    ]
    scored = iter(anchor.score(rows))
    for group in groups:
        group.completions = [replace(each, logprobs=next(scored)) for each in group.completions]


def complete(recipe: Recipe, run: RunFolder, model: PolicyRef, parts: Sequence[Part], tell: Tell) -> None:
    """Adds fresh completions of the model to groups that lack some, with the task's verdicts."""
    lacking = [group for part in parts for group in part.lacking]
    if not lacking:
        return
    tell(f"sampling {sum(group.num_lacking for group in lacking)} completions of {len(lacking)} prompts …")
    use_threads(recipe.engine.num_threads)
    params, tokenizer = training_params(recipe), load_tokenizer(recipe.model.name_or_path)
    with closing(Sampler(recipe, run.verified_policy_path)) as sampler:
        sampler.task.start()
        sampler.hold(model)
        for part in parts:
            part.graded_by = sampler.task.verifier if part.lacking else None
        problems = [sampler.task.prompt(*split_and_index(group.prompt_id)) for group in lacking]
        for problem, group in zip(problems, lacking, strict=True):
            check_length(problem, len(group.prompt_ids), params, sampler.engine.context_length)
        for count in sorted({group.num_lacking for group in lacking}):
            alike = [each for each in zip(problems, lacking, strict=True) if each[1].num_lacking == count]
            requests = [
                Request(np.array(group.prompt_ids, np.int32), derive_seed(recipe.seed, "import", group.number))
                for _, group in alike
            ]
            answers = sampler.generate(model, requests, replace(params, num_generations=count))
            for (problem, group), completions in zip(alike, answers, strict=True):
                texts = [tokenizer.decode(each.token_ids, skip_special_tokens=True) for each in completions]
                try:
                    group.verdicts += sampler.task.grade(problem, texts)
                except GradingError as error:
                    raise TaskError(
                        f"fresh completions of {group.place} could not be graded: {error}. Mend the reward, or give "
                        f"--no_sampling."
                    ) from error
                group.completions += completions
                group.texts += texts


def write_round(
    recipe: Recipe,
    run: RunFolder,
    reader: Reader,
    index: int,
    part: Part,
    shape: str,
    files: Sequence[Mapping[str, str]],
) -> None:
    groups, policy = part.groups, part.policy
    assert policy is not None
    verifiers = sorted(
        {str(trace.own.get("verifier") or f"imported from {shape}") for group in groups for trace in group.traces}
    )
    if part.graded_by is not None:
        verifiers.append(part.graded_by)
    origin = {
        "files": files,
        "format": shape,
        "logprobs": part.logprobs,
        "num_sampled": sum(group.num_lacking for group in groups),
    }
    round = Round(
        index=index,
        policy=policy,
        sampling=training_params(recipe),
        seed=derive_seed(recipe.seed, "round", index),
        prompt_ids=tuple(group.prompt_id for group in groups),
        prompts_per_shard=recipe.trainer.prompts_per_step,
        verifier=" + ".join(dict.fromkeys(verifiers)),
    )
    stored = [
        Group.of(
            SampledGroup(
                position,
                group.prompt_id,
                reader.tokenizer.decode(group.prompt_ids),
                np.array(group.prompt_ids, np.int32),
                tuple(group.completions),
                tuple(group.texts),
            ),
            group.verdicts,
            group.other_rewards,
        )
        for position, group in enumerate(groups)
    ]
    shards = [
        Shard(tuple(stored[place] for place in round.positions(number)), (), 0.0, 0.0, 0.0)
        for number in range(round.num_shards)
    ]
    run.round(index).write_imported(round, shards, origin)
