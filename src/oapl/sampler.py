"""The sampler: fills rounds with groups from one frozen policy. It reads policies and writes rounds, nothing else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from oapl.config import Recipe
from oapl.engines import make_engine
from oapl.engines.base import Engine
from oapl.errors import EngineError, PolicyLostError, StoreError, TaskError
from oapl.judging import MAX_FAILED_IN_A_ROW, Judge, shard_event
from oapl.model import PROBE, check_probe, encode_prompt, load_tokenizer, probe_gap, probe_sequences
from oapl.paths import StorePath, poll_s
from oapl.plan import SEED_STRIDE, derive_seed, scoring_params, shards_per_block, training_params
from oapl.processes import pause
from oapl.store import RoundFolder
from oapl.store.files import move_aside
from oapl.store.leases import Leases
from oapl.store.rounds import is_judged_as
from oapl.tasks import Task, make_task
from oapl.types import (
    Completion,
    Draft,
    FailedGroup,
    PolicyRef,
    Prompt,
    Request,
    Round,
    SampledGroup,
    SamplingParams,
    Shard,
    Split,
    split_and_index,
)

MAX_CHECKED = 4096
"""Rows of a split that are looked at before anything is sampled."""
MAX_LOST = 3
"""Times in a row that an engine may lose the policy while it works on one block."""
ShardEvent = Mapping[str, Any]
T = TypeVar("T")

log = logging.getLogger(__name__)


class Sampler:
    """An engine, a task and what it takes to make groups with them."""

    def __init__(
        self,
        recipe: Recipe,
        locate: Callable[[PolicyRef], Path],
        should_stop: Callable[[], bool] = lambda: False,
        on_shard: Callable[[ShardEvent], None] = lambda _: None,
        *,
        alone: bool = False,
    ) -> None:
        """`alone`: for an evaluation that is no part of a run, so that prompts to train on do not matter."""
        self.recipe, self.should_stop, self.alone = recipe, should_stop, alone
        self._locate, self._on_shard = locate, on_shard
        self.task: Task = make_task(recipe.task)
        self._judge = Judge(self.task, should_stop)
        self.engine: Engine = make_engine(recipe.engine, recipe.model.attn_implementation, should_stop)
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._loaded: PolicyRef | None = None
        self.num_stored = 0
        """Shards that this one stored, so far."""
        self._mismatch = 0.0
        self._leases: dict[StorePath, Leases] = {}

    def hold(self, policy: PolicyRef) -> None:
        """Makes sure that the engine holds this policy: files verified, loaded, and its probe scored."""
        self._on(policy, lambda: None)

    def _on(self, policy: PolicyRef, work: Callable[[], T]) -> T:
        """What this work with a policy gives, begun again with the policy loaded and probed once more where the engine
        lost it."""
        times_lost = 0
        while True:
            try:
                self._load(policy)
                return work()
            except PolicyLostError as error:
                self._loaded, times_lost = None, times_lost + 1
                if times_lost > MAX_LOST:
                    raise EngineError(
                        f"{error}, and that for the {times_lost}th time in a row. Find out from its own log why, and "
                        f"give the same command: what was stored is kept."
                    ) from error
                log.warning("%s: the policy is loaded once more", error)

    def _load(self, policy: PolicyRef) -> None:
        if policy == self._loaded:
            return
        path = self._locate(policy)
        probe = probe_sequences(path) if (path / PROBE).exists() else []
        is_swap = self._loaded is not None and self._loaded.digest != policy.digest
        before = None
        with suppress(PolicyLostError):
            before = self.engine.score(probe) if is_swap else None
        self._loaded = None
        self.engine.load(path)
        if self._tokenizer is None:  # all policies of a run have the same
            self._tokenizer = load_tokenizer(str(path))
            check_prompts(self.recipe, self.task, self._tokenizer, self.engine.context_length, self.alone)
        self._mismatch = self._probe(path, probe, before) if probe else 0.0
        self._loaded = policy

    def _probe(self, path: Path, probe: list[list[int]], before: list[list[float]] | None) -> float:
        """The probe's gap. Where a swap went wrong, or left the scores as they were before it, the engine is first
        started anew."""
        scores = self.engine.score(probe)
        if before is not None and (scores == before or probe_gap(path, scores) > self.recipe.probe_tolerance):
            self.engine.close()
            self.engine.load(path)
            scores = self.engine.score(probe)
        return check_probe(path, scores, self.recipe.probe_tolerance)

    def fill(self, folder: RoundFolder, round: Round) -> None:
        """Works on a round, and waits for others at work on it, until it is sealed or this is told to stop."""
        while not self.work_on(folder, round) and not self.should_stop():
            pause(poll_s(folder.path), self.should_stop)

    def work_on(self, folder: RoundFolder, round: Round) -> bool:
        """Samples, grades and stores what of the round is missing and not in another sampler's hands; seals it once all
        is in. Returns whether it is sealed.

        Opens the round if need be; a stored one of another policy is moved aside first. Shards are sampled in blocks
        that fill the engine, each by the sampler that took its lease. Ends early, with nothing stored lost, when told
        to stop. Raises StoreError where the folder holds a round that was planned with other settings, or one that
        scores weights and is judged otherwise, and TaskError where grading is broken.
        """
        self._open(folder, round)
        with ExitStack() as held:
            for number, shard in self._judge.worth_keeping(self._make_missing(folder, round, held)):
                if folder.write_shard(round, number, shard):
                    self.num_stored += 1
                    self._on_shard(shard_event(round, number, shard))
        if folder.is_sealed():
            return True
        if missing_shards(folder, range(round.num_shards)):
            return False
        stored = folder.load()
        if stored.policy != round.policy or not is_judged_alike(stored, round):
            return False  # it was planned anew meanwhile, and this one's shards are the strange ones
        if folder.set_strange_shards_aside(round):
            return False
        check_some_graded(folder, round)
        folder.seal(round)
        return True

    def _open(self, folder: RoundFolder, round: Round) -> None:
        if not round.problems and folder.is_open() and folder.load().policy != round.policy:
            move_aside(folder.path)
        stored = folder.load() if folder.is_open() else folder.open_once(round)
        folder.check_planned(round)
        if not is_judged_alike(stored, round):
            raise StoreError(
                f"{folder.path} was begun by {stored.verifier}, and the task, which has {round.verifier}, or its rows "
                f"have changed since. Run the same command again: all of it is then graded alike."
            )

    def _make_missing(self, folder: RoundFolder, round: Round, held: ExitStack) -> Iterator[tuple[int, Shard]]:
        """Makes the blocks that nobody has in hand. A block's lease is `held` until its shards are stored, which is for
        whoever is given them."""
        leases = self._leases.setdefault(folder.path, Leases(folder.path / "leases", self.recipe.launch.lease_s))
        patience = min(MAX_FAILED_IN_A_ROW, round.num_prompts)
        for block in self._blocks(round):
            if not missing_shards(folder, block):
                continue
            if self.should_stop():
                return
            if (lease := leases.take(f"block-{block.start:05d}")) is None:
                continue
            held.enter_context(lease)
            drafts = folder.read_drafts(round)
            yield from self.make_shards(folder, round, block, drafts, patience)
            remove_stored(folder, round, drafts)
            if not missing_shards(folder, block):
                held.close()

    def _blocks(self, round: Round) -> list[range]:
        """The shards that are sampled together (`shards_per_block`). A block is sampled whole even where some of it is
        stored already, since a completion's last digits depend on what it is batched with."""
        rows_per_shard = round.prompts_per_shard * round.sampling.num_generations
        size = shards_per_block(round.num_shards, rows_per_shard, self.recipe.engine.max_num_seqs)
        return [range(start, min(start + size, round.num_shards)) for start in range(0, round.num_shards, size)]

    def make_shards(
        self,
        folder: RoundFolder,
        round: Round,
        block: range,
        drafts: dict[int, Draft],
        patience: int,
    ) -> Iterator[tuple[int, Shard]]:
        """Samples a block of shards at once, and grades those of it that are missing; ends early when told to stop.

        What was sampled is kept in `drafts`, and in the folder, until it is graded and stored, so that nothing is
        sampled twice, however long grading takes and whatever ends it.
        """
        if not (missing := missing_shards(folder, block)):
            return
        self.task.start()
        asked = [position for number in missing for position in round.positions(number)]
        lacking = set(asked).difference(*(draft.positions for draft in drafts.values()))
        if lacking == set(asked):  # then the block is sampled whole, so that it is what it would have been at once
            lacking = {position for number in block for position in round.positions(number)}
        if lacking:
            first = min(lacking) // round.prompts_per_shard
            drafts[first] = self.sample(round, sorted(lacking))
            folder.write_draft(round, first, drafts[first])
        for number in missing:
            positions = round.positions(number)
            draft = next(draft for draft in drafts.values() if positions[0] in draft.positions)  # which has all of it
            shard = self._judge.grade(draft.part(positions), patience)
            if shard is None:
                return
            yield number, shard

    def sample(self, round: Round, positions: Sequence[int]) -> Draft:
        """The completions of these of a round's prompts, which still lack their verdicts."""
        self.hold(round.policy)
        start = time.monotonic()
        requests: dict[int, Request] = {}
        unsampled = []
        for position in positions:
            prompt_id = round.prompt_ids[position]
            try:
                prompt = self.task.prompt(*split_and_index(prompt_id))
                requests[position] = self._request(round, position, prompt)
            except TaskError as error:  # of an endless task, or one of very many rows, which were not all checked
                unsampled.append(FailedGroup(position, prompt_id, str(error)))
        answers = self.generate(round.policy, list(requests.values()), round.sampling)
        sampled = tuple(
            self._sampled_group(position, round.prompt_ids[position], request, completions)
            for (position, request), completions in zip(requests.items(), answers, strict=True)
        )
        return Draft(sampled, tuple(unsampled), time.monotonic() - start, self._mismatch)

    def generate(
        self, policy: PolicyRef, requests: Sequence[Request], params: SamplingParams
    ) -> list[list[Completion]]:
        """What the engine makes of these with a policy, be it lost meanwhile."""
        return self._on(policy, lambda: self.engine.generate(requests, params))

    def _request(self, round: Round, position: int, prompt: Prompt) -> Request:
        """Raises TaskError where the prompt is empty or leaves no room for its completion."""
        assert self._tokenizer is not None
        prompt_ids = encode_prompt(self._tokenizer, prompt.text, self.recipe.task)
        check_length(prompt, len(prompt_ids), round.sampling, self.engine.context_length)
        return Request(np.array(prompt_ids, np.int32), derive_seed(round.seed, position))

    def _sampled_group(
        self, position: int, prompt_id: str, request: Request, completions: Sequence[Completion]
    ) -> SampledGroup:
        assert self._tokenizer is not None
        return SampledGroup(
            position=position,
            prompt_id=prompt_id,
            prompt=self._tokenizer.decode(request.prompt_ids),
            prompt_ids=request.prompt_ids,
            completions=tuple(completions),
            texts=tuple(self._tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions),
        )

    def close(self) -> None:
        self.task.close()
        self.engine.close()


def missing_shards(folder: RoundFolder, shards: range) -> list[int]:
    stored = set(folder.stored_shards())
    return [number for number in shards if number not in stored]


def is_judged_alike(stored: Round, round: Round) -> bool:
    """What scores weights has one grader; what is trained on may go on with a mended reward."""
    return not round.problems or is_judged_as(round, vars(stored))


def check_some_graded(folder: RoundFolder, round: Round) -> None:
    """Raises TaskError where all of a round's groups failed, each sampler having met a few; they are moved aside."""
    seals = [folder.shard_seal(number) for number in range(round.num_shards)]
    if any(seal["num_groups"] for seal in seals):
        return
    cause = seals[0]["failed"][0]["cause"]
    for number in range(round.num_shards):
        folder.set_shard_aside(number)
    raise TaskError(f"none of the {round.num_prompts} groups of {folder.path} could be graded: {cause}")


def remove_stored(folder: RoundFolder, round: Round, drafts: dict[int, Draft]) -> None:
    """Removes the drafts whose shards are all stored."""
    for first in list(drafts):
        shards = {position // round.prompts_per_shard for position in drafts[first].positions}
        if all(folder.has_shard(number) for number in shards):
            folder.remove_draft(first)
            del drafts[first]


def check_length(prompt: Prompt, num_tokens: int, sampling: SamplingParams, context: int) -> None:
    """Raises TaskError where a prompt is empty or leaves no room for its longest completion."""
    if num_tokens == 0:
        raise TaskError(f"prompt {prompt.id} has no tokens: {prompt.text!r}. Remove it from the dataset.")
    if num_tokens + sampling.max_completion_length > context:
        raise TaskError(
            f"prompt {prompt.id} has {num_tokens} tokens, which with max_completion_length = "
            f"{sampling.max_completion_length} passes the model's context of {context} (or engine.max_model_len). "
            f"Remove the prompt, lower max_completion_length in [sampling] or [evaluation], or raise "
            f"engine.max_model_len where it is set."
        )


def check_prompts(
    recipe: Recipe, task: Task, tokenizer: PreTrainedTokenizerBase, context: int, alone: bool, num_checked: int = 32
) -> None:
    """Fails early on prompts that could not be sampled: those of your own rows, some of a generated task; of an
    evaluation that stands alone, none but its own."""
    training, scoring = training_params(recipe), scoring_params(recipe, recipe.evaluation.num_generations)
    splits: list[tuple[Split, SamplingParams]] = [("evaluation", scoring)]
    if not alone:
        splits.insert(0, ("train", training))
    if recipe.selection is not None and not alone:
        splits.append(("validation", scoring))
    for split, sampling in splits:
        count = task.num_prompts(split)
        start = recipe.seed * SEED_STRIDE if count is None and split == "train" else 0
        checked = MAX_CHECKED if recipe.task.dataset is not None else num_checked
        every = max(1, -(-count // checked)) if count is not None else 1  # of very many rows some, over all of them
        for index in range(start, start + (count or checked), every):
            prompt = task.prompt(split, index)
            prompt_ids = encode_prompt(tokenizer, prompt.text, recipe.task)
            check_known(prompt, prompt_ids, tokenizer)
            check_length(prompt, len(prompt_ids), sampling, context)


def check_known(prompt: Prompt, prompt_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises TaskError where the model cannot read most of a prompt."""
    unknown = sum(token == tokenizer.unk_token_id for token in prompt_ids)
    if unknown > len(prompt_ids) / 2:
        raise TaskError(
            f"prompt {prompt.id} cannot be read by the model: {unknown} of its {len(prompt_ids)} tokens are unknown to "
            f"its tokenizer ({tokenizer.unk_token}). Use another model, or prompts in the words it knows "
            f"(builtin:countdown reads countdown problems only)."
        )
