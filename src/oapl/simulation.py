"""The loop of rounds as a discrete-event simulation: who waits for whom, how long, and what moves.

It knows rates and numbers, no recipe and no folder. Events are a sampler's block and a trainer's step, never a token,
so thousands of samplers over hundreds of rounds take seconds. docs/planning.md says what the model leaves out.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Any, Literal

import numpy as np
import simpy

NUM_DRAWN = 64
"""Blocks whose lengths are drawn one by one; all others take as long as one of these."""
TOO_SHORT = 1e-9
"""Share of a piece of work that counts as nothing, for sums that do not come out even."""

Side = Literal["trainer", "sampler"]


@dataclass(frozen=True)
class Rates:
    """How fast each part works alone: measured in a run, or given."""

    sampler_tokens_per_s: float
    """Of one sampler while its engine is full."""
    trainer_tokens_per_s: float
    """Completion tokens of steps, by the trainer that was measured."""
    lengths: tuple[int, ...]
    """Tokens of completions, from which those of the run are drawn."""
    fixed_share: float = 0.5
    """Share of a full engine's time for one token a row that does not shrink as rows end: 0 is an engine whose time is
    all in its rows, 1 one that takes as long for one row as for all."""
    grading_s: float = 0.0
    """To grade and store one completion."""
    sync_s: float = 0.0
    """From a sealed policy to its first token, but for what the storage's bandwidth takes."""
    save_s: float = 0.0
    """For the checkpoint and the policy at a round's end, but for what the storage's bandwidth takes."""
    policy_bytes: float = 0.0
    checkpoint_bytes: float = 0.0
    group_bytes_per_token: float = 8.0
    """On disk: by default an id and a log-prob, four bytes each."""
    storage_bytes_per_s: float = inf
    """Of the storage that all share."""
    shared_slowdown: float = 1.0
    """Times as long as alone that sampling and steps take while the other side works: 1 on machines of their own."""


@dataclass(frozen=True)
class Layout:
    """How a run is cut, and how many work on it."""

    num_rounds: int
    steps_per_round: int
    """L."""
    shards_per_round: int
    """Steps of a round's first epoch."""
    shards_per_block: int
    """Sampled together, by one sampler."""
    rows_per_shard: int
    """Completions that a step trains on."""
    max_num_seqs: int
    """Rows of one sampler's full engine."""
    rounds_ahead: int = 0
    num_samplers: int = 1
    trainer_speed: float = 1.0
    """Of this run's trainer, in units of the one whose rate is known."""
    checkpoints_kept: int = 2

    def policy_of_round(self, index: int) -> int:
        return max(0, index - self.rounds_ahead)

    @property
    def blocks_per_round(self) -> int:
        return -(-self.shards_per_round // self.shards_per_block)


@dataclass(frozen=True)
class Outcome:
    """Seconds of all samplers are summed: step_s + save_s + wait_s = wall_s, and sampling_s + load_s + idle_s =
    num_samplers * wall_s."""

    wall_s: float
    """From the first round's opening until the last policy is sealed."""
    step_s: float
    save_s: float
    wait_s: float
    """The trainer's, for shards."""
    sampling_s: float
    """Grading and storing included."""
    load_s: float
    idle_s: float
    """The samplers', for a policy, a block or the end."""
    num_samplers: int
    lag_mean: float
    lag_max: int
    """Steps between the weights that sampled and those that were trained."""
    groups_bytes: float
    policies_bytes: float
    checkpoints_bytes: float
    """Stored at the end; older checkpoints are removed."""
    network_bytes: float
    """All that was written to the storage or read from it."""

    @property
    def trainer_idle_share(self) -> float:
        return self.wait_s / self.wall_s

    @property
    def sampler_idle_share(self) -> float:
        return self.idle_s / (self.num_samplers * self.wall_s)

    @property
    def sampler_load_share(self) -> float:
        return self.load_s / (self.num_samplers * self.wall_s)

    @property
    def network_bytes_per_s(self) -> float:
        return self.network_bytes / self.wall_s


def simulate(rates: Rates, layout: Layout, seed: int = 0) -> Outcome:
    """Runs the loop from the first round's opening to the last policy."""
    return Loop(rates, layout, seed).outcome()


def token_steps(lengths: Sequence[int], slots: int, fixed_share: float) -> float:
    """How long an engine takes for these completions, in units of one token for each row of a full engine.

    A row that ends gives its slot to the next (continuous batching). A token step with r rows takes
    fixed_share + (1 - fixed_share) * r / slots, so all of them take fixed_share times their number, and the rest times
    the tokens over the slots.
    """
    if len(lengths) <= slots:
        num_steps = max(lengths, default=0)
    else:
        ends = list(lengths[:slots])
        heapq.heapify(ends)
        for length in lengths[slots:]:
            heapq.heapreplace(ends, ends[0] + length)
        num_steps = max(ends)
    return fixed_share * num_steps + (1 - fixed_share) * sum(lengths) / slots


def step_seconds(rates: Rates, layout: Layout) -> float:
    """Of one optimizer step, whose tokens are those of its completions on average."""
    num_tokens = layout.rows_per_shard * float(np.mean(rates.lengths))
    return num_tokens / (rates.trainer_tokens_per_s * layout.trainer_speed)


def load_seconds(rates: Rates, layout: Layout) -> float:
    """From a sealed policy to its first token, when every sampler with a block reads it at once."""
    num_readers = min(layout.num_samplers, layout.blocks_per_round)
    return rates.sync_s + num_readers * rates.policy_bytes / rates.storage_bytes_per_s


def save_seconds(rates: Rates) -> float:
    return rates.save_s + (rates.policy_bytes + rates.checkpoint_bytes) / rates.storage_bytes_per_s


@lru_cache(maxsize=64)
def block_seconds(rates: Rates, num_rows: int, slots: int, seed: int) -> tuple[float, ...]:
    """How long one sampler takes for some blocks of so many completions, whose lengths are drawn."""
    random, lengths = np.random.default_rng([seed, num_rows]), np.array(rates.lengths)
    full_step_s = slots / rates.sampler_tokens_per_s
    drawn = (random.choice(lengths, num_rows).tolist() for _ in range(NUM_DRAWN))
    return tuple(full_step_s * token_steps(block, slots, rates.fixed_share) for block in drawn)


@dataclass
class Sums:
    """Seconds, as they add up."""

    step_s: float = 0.0
    save_s: float = 0.0
    wait_s: float = 0.0
    sampling_s: float = 0.0
    load_s: float = 0.0
    idle_s: float = 0.0
    loads: int = 0
    lags: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """When each sampler had nothing left to do."""


class Loop:
    """Samplers and a trainer that share nothing but which policies are sealed and which shards are stored."""

    def __init__(self, rates: Rates, layout: Layout, seed: int) -> None:
        self._rates, self._layout, self._seed = rates, layout, seed
        self._random = np.random.default_rng(seed)
        self._drawn: dict[int, tuple[float, ...]] = {}
        """`block_seconds` by the shards of a block."""
        self._clock = simpy.Environment()
        self._sealed = [self._clock.event() for _ in range(layout.num_rounds + 1)]
        self._claimed = [0] * layout.num_rounds
        """The first shard of each round that no sampler has taken yet."""
        self._stored: set[tuple[int, int]] = set()
        self._awaited: tuple[tuple[int, int], simpy.Event] | None = None
        self._at_work = {"trainer": 0, "sampler": 0}
        self._changed = self._clock.event()
        """Who is at work; only where they slow each other."""
        self._sums = Sums()

    def outcome(self) -> Outcome:
        self._sealed[0].succeed()
        for _ in range(self._layout.num_samplers):
            self._clock.process(self._sample())
        self._clock.run(self._clock.process(self._train()))
        sums, rates, layout, wall_s = self._sums, self._rates, self._layout, self._clock.now
        num_policies = layout.num_rounds + 1
        num_tokens = layout.num_rounds * layout.shards_per_round * layout.rows_per_shard * float(np.mean(rates.lengths))
        groups_bytes = num_tokens * rates.group_bytes_per_token
        num_epochs = layout.steps_per_round / layout.shards_per_round
        return Outcome(
            wall_s=wall_s,
            step_s=sums.step_s,
            save_s=sums.save_s,
            wait_s=sums.wait_s,
            sampling_s=sums.sampling_s,
            load_s=sums.load_s,
            idle_s=sums.idle_s + sum(wall_s - end for end in sums.ends),
            num_samplers=layout.num_samplers,
            lag_mean=float(np.mean(sums.lags)),
            lag_max=max(sums.lags),
            groups_bytes=groups_bytes,
            policies_bytes=num_policies * rates.policy_bytes,
            checkpoints_bytes=min(layout.num_rounds, layout.checkpoints_kept) * rates.checkpoint_bytes,
            network_bytes=groups_bytes * (1 + num_epochs)
            + (num_policies + sums.loads) * rates.policy_bytes
            + layout.num_rounds * rates.checkpoint_bytes,
        )

    def _train(self) -> Generator[simpy.Event, Any, None]:
        layout, sums = self._layout, self._sums
        step_s, save_s = step_seconds(self._rates, layout), save_seconds(self._rates)
        for index in range(layout.num_rounds):
            lag = (index - layout.policy_of_round(index)) * layout.steps_per_round
            for number in range(layout.steps_per_round):
                shard = (index, number)
                if number < layout.shards_per_round and shard not in self._stored:
                    start = self._clock.now
                    self._awaited = (shard, self._clock.event())
                    yield self._awaited[1]
                    sums.wait_s += self._clock.now - start
                took_s = yield from self._work("trainer", step_s)
                sums.step_s += took_s
                sums.lags.append(lag + number)
            yield self._clock.timeout(save_s)
            sums.save_s += save_s
            self._sealed[index + 1].succeed()

    def _sample(self) -> Generator[simpy.Event, Any, None]:
        layout, sums = self._layout, self._sums
        grading_s = self._rates.grading_s * layout.rows_per_shard
        load_s = load_seconds(self._rates, layout)
        held: int | None = None
        for index in range(layout.num_rounds):
            version = layout.policy_of_round(index)
            if self._claimed[index] == layout.shards_per_round:
                continue
            start = self._clock.now
            yield self._sealed[version]
            sums.idle_s += self._clock.now - start
            while block := self._claim(index):
                if held != version:
                    yield self._clock.timeout(load_s)
                    sums.load_s += load_s
                    sums.loads += 1
                    held = version
                sampling_s = yield from self._work("sampler", self._sampling_s(len(block)))
                sums.sampling_s += sampling_s  # not in one line: others add to it while this one waits
                for number in block:
                    yield self._clock.timeout(grading_s)
                    sums.sampling_s += grading_s
                    self._store((index, number))
        sums.ends.append(self._clock.now)

    def _work(self, side: Side, seconds: float) -> Generator[simpy.Event, Any, float]:
        """Passes the time for work that takes so long alone; returns how long it took."""
        start, slowdown = self._clock.now, self._rates.shared_slowdown
        if slowdown == 1:
            yield self._clock.timeout(seconds)
            return seconds
        other: Side = "sampler" if side == "trainer" else "trainer"
        self._change(side, 1)
        left = seconds
        while left > TOO_SHORT * seconds:
            since, factor = self._clock.now, slowdown if self._at_work[other] else 1.0
            yield self._clock.timeout(left * factor) | self._changed
            left -= (self._clock.now - since) / factor
        self._change(side, -1)
        return self._clock.now - start

    def _change(self, side: Side, by: int) -> None:
        self._at_work[side] += by
        self._changed.succeed()
        self._changed = self._clock.event()

    def _sampling_s(self, num_shards: int) -> float:
        if num_shards not in self._drawn:
            num_rows, slots = num_shards * self._layout.rows_per_shard, self._layout.max_num_seqs
            self._drawn[num_shards] = block_seconds(self._rates, num_rows, slots, self._seed)
        return self._drawn[num_shards][self._random.integers(NUM_DRAWN)]

    def _claim(self, index: int) -> range:
        """The next block of a round, by its shards; empty where all are taken."""
        start = self._claimed[index]
        self._claimed[index] = min(start + self._layout.shards_per_block, self._layout.shards_per_round)
        return range(start, self._claimed[index])

    def _store(self, shard: tuple[int, int]) -> None:
        self._stored.add(shard)
        if self._awaited is not None and self._awaited[0] == shard:
            self._awaited[1].succeed()
            self._awaited = None
