"""The loop of rounds in simulation, where seconds can be added up by hand: a block takes `s`, a step takes `t`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oapl.config import EngineConfig
from oapl.engines.embedded import EmbeddedEngine
from oapl.simulation import Layout, Outcome, Rates, simulate, token_steps
from oapl.types import Request, SamplingParams

ROWS, LENGTH = 8, 10


def run(s: float, t: float, *, rounds: int = 3, steps: int = 4, rates: dict[str, Any] | None = None, **layout: Any):
    """A block is one shard of 8 completions of 10 tokens, which fill the engine: 80 tokens in `s` or `t` seconds."""
    tokens = ROWS * LENGTH
    return simulate(
        Rates(tokens / s, tokens / t, (LENGTH,), **(rates or {})),
        Layout(rounds, steps, layout.pop("shards", steps), 1, ROWS, ROWS, **layout),
    )


# How long a block takes


def test_an_engines_time_is_that_of_its_longest_row_or_that_of_its_tokens():
    assert token_steps([4, 1], slots=2, fixed_share=1) == 4
    assert token_steps([4, 1], slots=2, fixed_share=0) == 5 / 2
    assert token_steps([4, 1], slots=2, fixed_share=0.5) == (4 + 5 / 2) / 2


def test_a_row_that_ends_gives_its_slot_to_the_next():
    # one slot holds the row of 3, the other those of 1 and 2
    assert token_steps([3, 1, 2], slots=2, fixed_share=1) == 3
    # 5 | 1, then 2 after it, then 4 after that
    assert token_steps([5, 1, 2, 4], slots=2, fixed_share=1) == 1 + 2 + 4


def test_the_embedded_engine_takes_so_many_token_steps(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    engine = EmbeddedEngine(EngineConfig(max_num_seqs=3))
    engine.load(tiny_model)
    taken = []
    step = engine._step
    monkeypatch.setattr(engine, "_step", lambda *args: (taken.append(1), step(*args)))
    requests = [Request(np.array([3, 4], np.int32), seed) for seed in range(5)]
    groups = engine.generate(requests, SamplingParams(1.0, 20, 2))
    lengths = [len(completion.token_ids) for group in groups for completion in group]
    assert len(set(lengths)) > 3
    assert len(taken) == token_steps(lengths, slots=3, fixed_share=1)


# How long a run takes


def test_with_one_step_a_round_the_sides_take_turns():
    out = run(5, 2, rounds=3, steps=1, rates={"save_s": 0.5, "sync_s": 0.25})
    assert out.wall_s == pytest.approx(3 * (0.25 + 5 + 2 + 0.5))
    assert out.wait_s == pytest.approx(3 * (0.25 + 5))
    assert out.idle_s == pytest.approx(3 * (2 + 0.5))


def test_within_a_round_the_slower_side_sets_the_pace():
    """Of 4 blocks and 4 steps the slower four follow each other; of the quicker ones the first or the last is left."""
    assert run(5, 2, rounds=3, steps=4).wall_s == pytest.approx(3 * (4 * 5 + 2))
    assert run(2, 5, rounds=3, steps=4).wall_s == pytest.approx(3 * (2 + 4 * 5))


def test_a_round_ahead_hides_the_quicker_side_in_the_slower():
    slow_sampler = run(5, 2, rounds=3, steps=4, rounds_ahead=1)
    assert slow_sampler.wall_s == pytest.approx(12 * 5 + 2)
    assert slow_sampler.idle_s == pytest.approx(2)  # after the last block
    assert slow_sampler.wait_s == pytest.approx(12 * 5 + 2 - 12 * 2)
    slow_trainer = run(2, 5, rounds=3, steps=4, rounds_ahead=1, rates={"save_s": 1.0})
    assert slow_trainer.wall_s == pytest.approx(2 + 3 * (4 * 5 + 1))
    assert slow_trainer.wait_s == pytest.approx(2)  # for the first block


def test_samplers_divide_the_sampling_among_them():
    """4 blocks of 50 s land at once; the 4 steps after the last of them have nothing to hide behind."""
    for count, turns in ((1, 24), (2, 12), (4, 6)):
        out = run(50, 1, rounds=3, steps=8, rounds_ahead=1, num_samplers=count)
        assert out.wall_s == pytest.approx(turns * 50 + count * 1)
        assert out.sampling_s == pytest.approx(24 * 50)


def test_samplers_beyond_the_blocks_of_a_round_have_nothing_to_do():
    enough, many = (run(50, 1, steps=8, num_samplers=count) for count in (8, 20))
    assert many.wall_s == enough.wall_s
    assert many.idle_s == pytest.approx(enough.idle_s + 12 * many.wall_s)


def test_shards_of_a_block_land_together_one_after_the_other_as_they_are_graded():
    tokens = ROWS * LENGTH
    rates = Rates(2 * tokens / 6, tokens / 100, (LENGTH,), grading_s=0.5 / ROWS)
    out = simulate(rates, Layout(1, 2, 2, 2, ROWS, 2 * ROWS))
    assert out.wait_s == pytest.approx(6 + 0.5)
    assert out.sampling_s == pytest.approx(6 + 2 * 0.5)


def test_a_second_epoch_waits_for_nothing():
    out = run(5, 2, rounds=2, steps=8, shards=4)
    assert out.wall_s == pytest.approx(2 * (4 * 5 + 2 + 4 * 2))
    assert out.sampling_s == pytest.approx(2 * 4 * 5)


@pytest.mark.parametrize("rounds_ahead", [0, 1])
@pytest.mark.parametrize("num_samplers", [1, 3])
@pytest.mark.parametrize("s", [0.3, 3, 30])
def test_working_and_waiting_add_up_to_the_time(s: float, num_samplers: int, rounds_ahead: int):
    rates = {"save_s": 0.7, "sync_s": 1.3, "policy_bytes": 10.0, "storage_bytes_per_s": 50.0, "grading_s": 0.01}
    out = run(s, 2, rounds=4, steps=5, num_samplers=num_samplers, rounds_ahead=rounds_ahead, rates=rates)
    assert out.step_s + out.save_s + out.wait_s == pytest.approx(out.wall_s)
    assert out.sampling_s + out.load_s + out.idle_s == pytest.approx(num_samplers * out.wall_s)


def test_more_samplers_and_a_round_ahead_never_take_longer():
    times = [
        [run(7, 1, steps=12, num_samplers=count, rounds_ahead=ahead).wall_s for count in range(1, 14)]
        for ahead in (0, 1)
    ]
    for walls in times:
        assert walls == sorted(walls, reverse=True)
    assert all(ahead <= behind for behind, ahead in zip(*times, strict=True))


def test_lengths_that_differ_take_the_engine_longer_than_equal_ones_with_the_same_tokens():
    equal, mixed = (
        simulate(Rates(100, 1e9, lengths, fixed_share=1), Layout(2, 4, 4, 1, ROWS, ROWS)).wall_s
        for lengths in ((10,), (1, 19))
    )
    assert mixed > 1.5 * equal


# Lag, storage, network


def test_lag_is_at_most_l_less_one_or_one_round_more():
    behind = run(1, 1, rounds=3, steps=4)
    assert (behind.lag_mean, behind.lag_max) == (3 / 2, 3)
    ahead = run(1, 1, rounds=3, steps=4, rounds_ahead=1)  # 0 to 3, then twice 4 to 7
    assert (ahead.lag_mean, ahead.lag_max) == ((3 / 2 + 2 * (4 + 3 / 2)) / 3, 7)


def test_every_policy_is_kept_and_read_by_every_sampler_that_uses_it():
    rates = {"policy_bytes": 100.0, "checkpoint_bytes": 1000.0, "group_bytes_per_token": 2.0}
    out = run(1, 1, rounds=3, steps=4, num_samplers=2, rates=rates)
    groups = 3 * 4 * ROWS * LENGTH * 2.0
    assert (out.groups_bytes, out.policies_bytes, out.checkpoints_bytes) == (groups, 4 * 100, 2 * 1000)
    assert out.network_bytes == 2 * groups + 4 * 100 + 3 * 2 * 100 + 3 * 1000


def test_samplers_that_read_a_policy_at_once_share_the_storage():
    rates = {"policy_bytes": 60.0, "checkpoint_bytes": 30.0, "storage_bytes_per_s": 10.0}
    alone, four = (run(5, 2, rounds=1, steps=4, num_samplers=count, rates=rates) for count in (1, 4))
    assert alone.load_s == pytest.approx(6)
    assert four.load_s == pytest.approx(4 * 4 * 6)
    assert alone.save_s == pytest.approx((60 + 30) / 10)
    assert four.wall_s == pytest.approx(4 * 6 + 5 + 4 * 2 + 9)


def test_the_same_seed_gives_the_same_outcome():
    rates = Rates(100, 100, tuple(range(1, 50)))
    layout = Layout(3, 4, 4, 1, ROWS, ROWS, num_samplers=2)
    first, again, other = (simulate(rates, layout, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert isinstance(first, Outcome)
    assert simulate(rates, replace(layout, trainer_speed=2.0), 1).step_s == pytest.approx(first.step_s / 2)


# One machine for both


def test_sides_that_share_a_machine_take_longer_while_both_work():
    """The first of two blocks of 6 s is sampled alone. Then a step of 2 s takes 4 beside the second block, of which
    that time does 2 s; the 4 s that are left, and the second step, each run alone."""
    out = run(6, 2, rounds=1, steps=2, rates={"shared_slowdown": 2.0})
    assert out.wall_s == pytest.approx(6 + 4 + 4 + 2)
    assert out.sampling_s == pytest.approx(6 + 8)
    assert out.step_s == pytest.approx(4 + 2)
    assert out.step_s + out.wait_s == pytest.approx(out.wall_s)
    assert out.sampling_s + out.idle_s == pytest.approx(out.wall_s)
