"""From a recipe's loss section to what is trained on, with which advantages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import make_completion, make_group, make_shard
from oapl.batching import Row, group_rows, step_counts
from oapl.config import GRPOConfig, GRPOPlusConfig, LossSection, OAPLConfig, ReinforceConfig, load_recipe
from oapl.objective import StepCounts, make_objective
from oapl.store import RunFolder
from oapl.train_loop import start_or_resume
from oapl.trainer import Trainer
from oapl.types import Group, Shard

UNIFORM, MIXED = make_group(0, [0.1, 0.1, 0.1]), make_group(1, [1.0, 0.0, 0.0])


def rows_of(loss: LossSection, *groups: Group) -> list[Row]:
    return group_rows(groups, make_objective(loss))


def advantages(loss: LossSection, *groups: Group) -> list[float]:
    return [row.advantage for row in rows_of(loss, *groups)]


# Advantages of rewards 1, 0, 0


def test_oapl_s_advantage_is_the_reward_less_the_optimal_value():
    value = math.log((math.e + 2) / 3)
    assert advantages(OAPLConfig(beta1=1.0), MIXED) == pytest.approx([1 - value, -value, -value])


def test_oapl_s_value_can_leave_the_completion_out():
    others = math.log((math.e + 1) / 2)  # of 1, 0; and 0 of 0, 0
    assert advantages(OAPLConfig(beta1=1.0, leave_one_out=True), MIXED) == pytest.approx([1.0, -others, -others])


def test_oapl_s_value_is_the_mean_at_infinite_beta1():
    assert advantages(OAPLConfig(beta1=math.inf), MIXED) == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_grpo_s_advantage_is_centred_and_scaled_on_request():
    deviation = math.sqrt(1 / 3) + 1e-4  # (4/9 + 1/9 + 1/9) / 2 = 1/3
    scaled = [2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation]
    assert advantages(GRPOConfig(kind="grpo"), MIXED) == pytest.approx(scaled)
    assert advantages(GRPOPlusConfig(kind="grpo_plus"), MIXED) == pytest.approx(scaled)
    unscaled = GRPOConfig(kind="grpo", scale_rewards="none")
    assert advantages(unscaled, MIXED) == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_reinforce_s_baseline_is_the_mean_of_the_others():
    assert advantages(ReinforceConfig(kind="reinforce"), MIXED) == pytest.approx([1.0, -0.5, -0.5])


# What is left out, and counted


def test_uniform_groups_are_trained_on_unless_they_are_dropped():
    assert len(rows_of(OAPLConfig(), UNIFORM, MIXED)) == 6
    kept = rows_of(OAPLConfig(drop_uniform_groups=True), UNIFORM, MIXED)
    assert [row.mark for row in kept] == [1.0, 0.0, 0.0]
    assert step_counts(kept, 10) == StepCounts(num_completions=3, num_tokens=3, max_completion_length=10)


def test_grpo_plus_leaves_truncated_completions_out_but_not_out_of_their_group_s_advantages():
    group = make_group(
        0,
        [1.0, 0.0, 0.0],
        completions=[make_completion([3, 4]), make_completion([5] * 9, None, "length"), make_completion([6])],
    )
    rows = rows_of(GRPOPlusConfig(kind="grpo_plus"), group)
    assert [len(row.completion.token_ids) for row in rows] == [2, 1]
    assert [row.advantage for row in rows] == pytest.approx(advantages(GRPOConfig(kind="grpo"), MIXED)[:2])
    assert step_counts(rows, 10) == StepCounts(num_completions=2, num_tokens=3, max_completion_length=10)


NOTHING_LEFT = {
    "every group uniform": ({"drop_uniform_groups": True, "beta2": 0.1}, make_shard([UNIFORM])),
    "every completion truncated": (
        {"kind": "grpo_plus"},
        make_shard([make_group(0, [1.0, 0.0], completions=[make_completion([3 + i], None, "length") for i in (0, 1)])]),
    ),
    "every group failed": ({"kind": "reinforce"}, make_shard([])),
}


@pytest.mark.parametrize(("loss", "shard"), NOTHING_LEFT.values(), ids=NOTHING_LEFT)
def test_a_step_on_nothing_changes_no_weight_and_counts(
    write_recipe, tiny_model: Path, tmp_path: Path, loss: dict[str, Any], shard: Shard
):
    recipe = load_recipe(write_recipe(loss=loss, trainer={"weight_decay": 0.1}))
    trainer = Trainer(recipe, str(tiny_model))
    before = {name: p.clone() for name, p in trainer.parameters.items()}
    metrics = trainer.train_step(shard, "digest")
    assert (trainer.step, trainer.consumed) == (1, ["digest"])
    assert all(torch.equal(p, before[name]) for name, p in trainer.parameters.items())
    assert not trainer.optimizer.state
    assert metrics["num_trained_completions"] == 0
    assert metrics["num_completions"] == shard.num_completions
    assert "loss" not in metrics

    run = RunFolder(tmp_path / "run")
    run.write_checkpoint(1, trainer.write_checkpoint)
    assert start_or_resume(recipe, run).consumed == ["digest"]
