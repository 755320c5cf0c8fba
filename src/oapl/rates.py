"""How fast a run's parts work: read from a run folder that was measured, or given, or both.

A block is what a sampler samples at once (`oapl.plan.shards_per_block`): some shards, whose `sampling_s` are parts of
the block's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from oapl.config import PlanConfig, Recipe, load_recipe
from oapl.errors import ConfigError
from oapl.paths import file_size, folder_size
from oapl.plan import shards_per_block
from oapl.simulation import Rates, token_steps
from oapl.store import RoundFolder, RunFolder

GIB = 2**30
NUM_DRAWN_LENGTHS = 10_000
FLOAT32 = 4
OPTIONS = ("sampler_tokens_per_s", "trainer_tokens_per_s", "grading_s", "sync_s", "save_s", "shared_slowdown")
"""Those that are rates as they stand."""
NEEDED = {
    "lengths": "--completion_tokens, or --lengths_file,",
    "sampler_tokens_per_s": "--sampler_tokens_per_s",
    "trainer_tokens_per_s": "--trainer_tokens_per_s, or --step_s",
}
"""The options of rates that have no default."""
LEAST_SPREAD = 0.3
"""Between the shares of the least and the most overlapped span, for a slowdown to show."""


@dataclass(frozen=True)
class Block:
    """What a sampler made at once, as its seals and files tell."""

    lengths: list[int]
    """Tokens of each completion."""
    sampling_s: float
    """Without grading."""
    grading_s: float
    first_grading_s: float
    """The first shard's, after which the trainer may begin."""
    stored_at: float
    """When its last seal was written, as the file system tells."""

    @property
    def seconds(self) -> float:
        return self.sampling_s + self.grading_s


def rates_of(recipe: Recipe, plan: PlanConfig, run: RunFolder | None = None) -> tuple[Rates, list[str]]:
    """The rates of a recipe's run, and for each where it comes from. Options win over what a run shows.

    Raises ConfigError where a rate that is needed is neither given nor measured.
    """
    measured = Measurement(run, plan.engine_fixed_share) if run is not None else None
    found: dict[str, Any] = {} if measured is None else measured.rates()
    if measured is not None:
        rows = recipe.engine.max_num_seqs / measured.recipe.engine.max_num_seqs  # of a full engine, this one's to that
        found["sampler_tokens_per_s"] *= rows / (plan.engine_fixed_share + (1 - plan.engine_fixed_share) * rows)
    origin = dict.fromkeys(found, f"measured in {run.path}" if run is not None else "")
    if measured is not None and (plan.gpus is not None or plan.samplers):  # which lie on machines of their own
        del found["shared_slowdown"], origin["shared_slowdown"]
    given: dict[str, Any] = {name: value for name in OPTIONS if (value := getattr(plan, name)) is not None}
    if drawn := given_lengths(plan, recipe.sampling.max_completion_length):
        given["lengths"] = tuple(drawn)
    lengths = (found | given).get("lengths")
    if plan.step_s is not None and lengths is not None:
        of_step = recipe.trainer.prompts_per_step * recipe.sampling.num_generations * float(np.mean(lengths))
        given["trainer_tokens_per_s"] = of_step / plan.step_s
    found, origin = found | given, origin | dict.fromkeys(given, "given")
    if missing := [option for name, option in NEEDED.items() if name not in found]:
        raise ConfigError(
            f"oapl plan needs rates: give {' and '.join(missing)}; or --from_run with the folder of a run that shows "
            f"them."
        )
    if plan.policy_gib is not None or "policy_bytes" not in found:
        found |= sizes(recipe, plan)
        origin["policy_bytes"] = "given" if plan.policy_gib is not None else "from the model's shape"
    storage = math.inf if plan.storage_gib_per_s is None else plan.storage_gib_per_s * GIB
    rates = Rates(**found, fixed_share=plan.engine_fixed_share, storage_bytes_per_s=storage)
    told = describe(rates, origin, recipe)
    if measured is not None and measured.recipe.model.name_or_path != recipe.model.name_or_path:
        models = measured.recipe.model.name_or_path, recipe.model.name_or_path
        told.append(f"NOTE: {measured.path} is a run of {models[0]}, and not of {models[1]}")
    return rates, told


def given_lengths(plan: PlanConfig, limit: int) -> list[int]:
    """Completions' lengths that the options ask for, each from 1 to the limit; none where they ask for none."""
    if plan.lengths_file is not None:
        return read_lengths(plan.lengths_file, limit)
    if plan.completion_tokens is None:
        return []
    if plan.completion_tokens > limit:
        raise ConfigError(
            f"--completion_tokens = {plan.completion_tokens:g} is beyond sampling.max_completion_length = {limit}. "
            f"Raise that, or give fewer."
        )
    if plan.completion_spread == 0:
        return [max(1, round(plan.completion_tokens))]
    variance = math.log1p(plan.completion_spread**2)
    normal = np.random.default_rng(0).standard_normal(NUM_DRAWN_LENGTHS)
    drawn = np.exp(math.sqrt(variance) * normal)
    return scaled_to_mean(drawn, plan.completion_tokens, limit)


def scaled_to_mean(drawn: np.ndarray, mean: float, limit: int) -> list[int]:
    """Lengths in these proportions, cut at the limit, that have the mean all the same."""
    low, high = 0.0, limit / float(drawn.min())
    for _ in range(60):
        middle = (low + high) / 2
        is_short = np.clip(middle * drawn, 1, limit).mean() < mean
        low, high = (middle, high) if is_short else (low, middle)
    return [int(length) for length in np.clip(high * drawn, 1, limit).round()]


def read_lengths(path: Path, limit: int) -> list[int]:
    """Raises ConfigError where the file holds something else than whole numbers from 1 to the limit."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--lengths_file {path} cannot be read: {error}.") from error
    if not words:
        raise ConfigError(f"--lengths_file {path} is empty: give one length a line.")
    for word in words:
        if not word.isdecimal() or not 1 <= int(word) <= limit:
            raise ConfigError(
                f"--lengths_file {path}: {word!r} is no length from 1 to sampling.max_completion_length = {limit}."
            )
    return [int(word) for word in words]


def sizes(recipe: Recipe, plan: PlanConfig) -> dict[str, float]:
    """Bytes of a policy and of a checkpoint: as given, or as the model's shape says."""
    from oapl.estimate import disk_bytes, facts_of, policy_itemsize

    if plan.policy_gib is not None:
        policy = plan.policy_gib * GIB
        return {"policy_bytes": policy, "checkpoint_bytes": policy / policy_itemsize(recipe) * 3 * FLOAT32}
    try:
        told = disk_bytes(recipe, facts_of(recipe))
    except Exception as error:  # a config comes from anywhere, and its code raises anything
        raise ConfigError(
            f"the size of {recipe.model.name_or_path} is not known ({type(error).__name__}). Give --policy_gib."
        ) from error
    return {"policy_bytes": told["a policy"], "checkpoint_bytes": told["a checkpoint"]}


def describe(rates: Rates, origin: Mapping[str, str], recipe: Recipe) -> list[str]:
    """Lines to read: each rate, and where it comes from."""
    lengths = np.array(rates.lengths)
    storage = "no limit" if math.isinf(rates.storage_bytes_per_s) else f"{rates.storage_bytes_per_s / GIB:g} GiB/s"
    told = {
        "sampler_tokens_per_s": f"a sampler makes {rates.sampler_tokens_per_s:,.0f} tokens/s with "
        f"{recipe.engine.max_num_seqs:,} rows; {rates.fixed_share:.0%} of a token's time stays when rows end",
        "trainer_tokens_per_s": f"the trainer takes steps on {rates.trainer_tokens_per_s:,.0f} completion tokens/s",
        "lengths": f"a completion has {lengths.mean():,.0f} tokens, half of them at most {np.median(lengths):,.0f}, "
        f"1 in 100 at least {np.quantile(lengths, 0.99):,.0f}",
        "grading_s": f"to grade and store one takes {1e3 * rates.grading_s:.3g} ms",
        "sync_s": f"to take a new policy takes a sampler {rates.sync_s:.3g} s, without reading it",
        "save_s": f"to save at a round's end takes the trainer {rates.save_s:.3g} s, without writing",
        "policy_bytes": f"a policy has {rates.policy_bytes / GIB:.3g} GiB; the storage has {storage}",
        "shared_slowdown": f"sampler and trainer slow each other by {rates.shared_slowdown:.2f} times",
    }
    return [f"{text} ({origin.get(name, 'by default')})" for name, text in told.items()]


# What a run shows


class Measurement:
    """A run's own rates. Its seconds hold whatever else its machine did."""

    def __init__(self, run: RunFolder, fixed_share: float = 0.5) -> None:
        """Raises ConfigError where the folder shows too little."""
        self.path, self._run, self._fixed_share = run.path, run, fixed_share
        if not run.config_path.exists():
            raise ConfigError(f"--from_run {run.path} is not a run folder: it has no config.toml.")
        self.recipe = load_recipe(run.config_path)
        self.records = run.metrics()
        self.rounds = [blocks_of(run.round(i), self.recipe) for i in run.round_indices() if not run.is_pruned()]
        self.blocks = [block for blocks in self.rounds for block in blocks]
        if not self.blocks or not self.records:
            raise ConfigError(
                f"--from_run {run.path} shows no rates: it needs a step that was trained and a shard that was sampled "
                f"there. A run of one round does."
            )
        self.lengths = [length for block in self.blocks for length in block.lengths]

    def rates(self) -> dict[str, Any]:
        """What of `Rates` the run shows; nothing is said of what did not happen in it."""
        sampling, all_steps = self._sampling_spans(), self._step_spans()
        steps = all_steps[1:] or all_steps  # the first one warms up
        slowdown = slowdown_of(sampling, all_steps), slowdown_of(steps, sampling)
        both = float(np.mean([each for each in slowdown if each is not None] or [1.0]))
        found = {
            "lengths": tuple(self.lengths),
            "sampler_tokens_per_s": rate_alone(sampling, all_steps, both),
            "trainer_tokens_per_s": rate_alone(steps, sampling, both),
            "shared_slowdown": both,
            "grading_s": self._grading_s(),
            "policy_bytes": folder_size(self._run.policy_path(max(self._run.policy_versions()))),
            "group_bytes_per_token": self._group_bytes() / sum(self.lengths),
        }
        if checkpoints := self._run.checkpoint_steps():
            found["checkpoint_bytes"] = folder_size(self._run.checkpoint_path(checkpoints[-1]))
        saves = [record["save_s"] for record in self._firsts() if record["step"] > 1 and record["save_s"] > 0]
        if saves:
            found["save_s"] = float(np.mean(saves))
        if loads := self._loads():
            found["sync_s"] = max(0.0, float(np.mean(loads)))
        return found

    def sampling_seconds(self) -> float:
        """Of all blocks, with grading and storing."""
        return sum(block.sampling_s for block in self.blocks) + self._grading_s() * len(self.lengths)

    def _sampling_spans(self) -> list[Span]:
        """Of every block; its work is in tokens of a full engine."""
        slots = self.recipe.engine.max_num_seqs
        return [
            Span(
                block.stored_at - block.seconds,
                block.sampling_s,
                slots * token_steps(block.lengths, slots, self._fixed_share),
            )
            for block in self.blocks
        ]

    def _step_spans(self) -> list[Span]:
        """Of every step; its work is in completion tokens."""
        return [Span(step["time"] - step["step_s"], step["step_s"], step["num_tokens"]) for step in self.records]

    def _firsts(self) -> list[Mapping[str, Any]]:
        """The records of each round's first step."""
        steps = self.recipe.trainer.weight_sync_steps
        return [record for record in self.records if record["step"] % steps == 1 % steps]

    def _loads(self) -> list[float]:
        """What the trainer waited for a round's first shard beyond its sampling and grading. With rounds_ahead = 1
        only the first round shows it, and that counts everywhere if there is no other, though it takes longer."""
        waits = {record["round"]: record["wait_s"] for record in self._firsts()}
        is_inline = self.recipe.launch.kind == "inline"
        loads = {}
        for index, blocks in zip(self._run.round_indices(), self.rounds, strict=True):
            if index in waits and blocks:
                before = (
                    sum(b.seconds for b in blocks) if is_inline else blocks[0].sampling_s + blocks[0].first_grading_s
                )
                loads[index] = waits[index] - before
        later = [] if self.recipe.launch.rounds_ahead else [load for index, load in loads.items() if index > 0]
        return later or [load for index, load in loads.items() if index == 0]

    def _grading_s(self) -> float:
        """Of one completion, with what the sampler's time between two seals has beyond sampling and grading."""
        storing = list(self._storing())
        between, num_stored = (sum(each) for each in zip(*storing, strict=True)) if storing else (0.0, 1)
        grading_s = sum(block.grading_s for block in self.blocks) / len(self.lengths)
        return grading_s + max(0.0, between / num_stored)

    def _storing(self) -> Iterator[tuple[float, int]]:
        """Seconds between two blocks' seals beyond the second's own, and its completions."""
        if self.recipe.launch.kind == "inline":
            return
        for blocks in self.rounds:
            for before, block in pairwise(blocks):
                between = block.stored_at - before.stored_at - block.seconds
                if between < block.seconds:  # else the run was stopped there
                    yield between, len(block.lengths)

    def _group_bytes(self) -> int:
        folders = (self._run.round(index) for index in self._run.round_indices())
        own = (folder for folder in folders if not folder.is_imported())
        return sum(file_size(folder.parquet_path(number)) for folder in own for number in folder.stored_shards())


@dataclass(frozen=True)
class Span:
    """A time in which one side worked."""

    start: float
    seconds: float
    work: float

    def overlap(self, others: Sequence[Span]) -> float:
        """The share of it in which one of the others lay."""
        end = self.start + self.seconds
        shared = (min(end, other.start + other.seconds) - max(self.start, other.start) for other in others)
        return min(1.0, sum(max(0.0, each) for each in shared) / self.seconds)


def slowdown_of(spans: Sequence[Span], others: Sequence[Span]) -> float | None:
    """How much longer the same work takes while the others work too, by a line through seconds a unit of work against
    the overlap. None where all spans overlap about alike, as for sides that never, or always, work at once."""
    overlaps = np.array([span.overlap(others) for span in spans])
    if np.ptp(overlaps) < LEAST_SPREAD:
        return None
    slope, alone = np.polyfit(overlaps, [span.seconds / span.work for span in spans], 1)
    return max(1.0, 1 + float(slope / alone)) if alone > 0 else None


def rate_alone(spans: Sequence[Span], others: Sequence[Span], slowdown: float) -> float:
    """Work a second while the others rest: the time of the overlap counts as so much less."""
    seconds = sum(span.seconds * (1 - span.overlap(others) * (1 - 1 / slowdown)) for span in spans)
    return sum(span.work for span in spans) / seconds


def blocks_of(folder: RoundFolder, recipe: Recipe) -> list[Block]:
    """The whole blocks that were sampled for a round here, in order."""
    if folder.is_imported():
        return []
    round = folder.load()
    rows_per_shard = round.prompts_per_shard * round.sampling.num_generations
    size = shards_per_block(round.num_shards, rows_per_shard, recipe.engine.max_num_seqs)
    blocks = []
    for start in range(0, round.num_shards, size):
        numbers = range(start, min(start + size, round.num_shards))
        if not all(folder.has_shard(number) for number in numbers):
            break
        seals = [folder.shard_seal(number) for number in numbers]
        blocks.append(
            Block(
                lengths=[length for number in numbers for length in folder.completion_lengths(number)],
                sampling_s=total(seals, "sampling_s") - total(seals, "grading_s"),
                grading_s=total(seals, "grading_s"),
                first_grading_s=seals[0]["grading_s"],
                stored_at=seals[-1].get("time", 0.0),
            )
        )
    return blocks


def total(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(record[name] for record in records))
