"""The sampler's log-probs computed again by the trainer: what they equal, what they do not depend on, and a resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conftest import RecipeWriter, make_tiny_model
from helpers import flip_a_bit
from oapl.cli import main
from oapl.store import RunFolder
from oapl.types import Shard

ANCHOR = {"anchor": "trainer"}


def train(recipe: Path, run: RunFolder, *options: str) -> int:
    return main(["train", str(recipe), "--run_dir", str(run.path), *options])


def weights(run: RunFolder, version: int) -> dict[str, torch.Tensor]:
    return load_file(run.policy_path(version) / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())


REWARD = """
def length(prompts, completions, wanted, **columns):
    return [-abs(len(completion) - w) / 5 for completion, w in zip(completions, wanted)]
"""


@pytest.fixture
def write_recipe(write_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecipeWriter:
    """Recipes with rewards that differ within a group, for a model that solves nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "length_rewards.py").write_text(REWARD)
    rows = [{"prompt": f"use {i} {i + 1} make 9\n", "wanted": 4 + i % 3} for i in range(1, 13)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "dataset", "dataset": "rows.jsonl", "eval_dataset": "rows.jsonl"}
    task["reward_funcs"] = "length_rewards:length"
    return partial(write_recipe, task=task)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def recorded(tmp_path: Path, write_recipe) -> RunFolder:
    """One round of 4 shards, sampled from the model itself and not trained on."""
    run = RunFolder(tmp_path / "recorded")
    assert main(["sample", str(write_recipe(trainer={"num_steps": 4})), "--run_dir", str(run.path)]) == 0
    return run


@pytest.mark.parametrize("rounds_ahead", [0, 1])
@pytest.mark.parametrize("num_epochs", [1, 2])
def test_in_float32_both_anchors_learn_the_same(write_recipe, tmp_path: Path, rounds_ahead: int, num_epochs: int):
    """The embedded engine computes what the trainer does. So each round has the policy that sampled it as its anchor,
    also the one that is sampled ahead, and keeps it from epoch to epoch. AdamW's epsilon is larger than by default, so
    that gradients which are nothing but rounding do not move by steps of full size.
    """
    runs = {anchor: RunFolder(tmp_path / anchor) for anchor in ("engine", "trainer")}
    for anchor, run in runs.items():
        recipe = write_recipe(
            loss={"anchor": anchor},
            trainer={"num_epochs": num_epochs, "adam_epsilon": 1e-4},
            launch={"rounds_ahead": rounds_ahead},
        )
        assert train(recipe, run) == 0
    ours, theirs = weights(runs["trainer"], 3), weights(runs["engine"], 3)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-5)
    moved = [(weight - weights(runs["engine"], 0)[name]).abs().max().item() for name, weight in theirs.items()]
    assert max(moved) > 5e-3
    for one, other in zip(runs["trainer"].metrics(), runs["engine"].metrics(), strict=True):
        assert one["log_ratio"] == pytest.approx(other["log_ratio"], abs=1e-3)
        assert one["anchor_gap"] < 1e-4
        assert "anchor_gap" not in other


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"max_tokens_per_microbatch": 7},
        {"max_tokens_per_microbatch": 7, "bf16": True},
    ],
    ids=str,
)
def test_at_lag_0_every_log_ratio_is_exactly_0(write_recipe, run: RunFolder, settings: dict[str, Any]):
    """The frozen copy computes as the trainer does: its types, its attention, its micro-batches, its pieces."""
    assert train(write_recipe(loss=ANCHOR, trainer=settings), run) == 0
    firsts = [record for record in run.metrics() if record["lag"] == 0]
    assert [record["token_gap"] for record in firsts] == [0, 0, 0]
    assert all((record["anchor_gap"] > 1e-3) == ("bf16" in settings) for record in firsts)  # the engine is in float32


def test_with_lora_the_anchor_is_the_merged_policy(write_recipe, run: RunFolder):
    """Merged weights and weights beside an adapter differ by rounding, in float32."""
    pytest.importorskip("peft")
    assert train(write_recipe(loss=ANCHOR, model={"use_peft": True}), run) == 0
    gaps = [record["token_gap"] for record in run.metrics()]
    assert max(gaps[0], gaps[4], gaps[8]) < 1e-5
    assert min(gaps[3], gaps[7], gaps[11]) > 1e-4


def change_logprobs(run: RunFolder, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Of all completions of round 0, as if its engine had computed otherwise; sealed anew."""
    folder = run.round(0)
    round = folder.load()
    for number in range(round.num_shards):
        shard = folder.read_shard(number)
        groups = tuple(
            replace(group, completions=tuple(replace(c, logprobs=change(c.logprobs)) for c in group.completions))
            for group in shard.groups
        )
        folder.set_shard_aside(number)
        assert folder.write_shard(round, number, Shard(groups, (), 1.0, 0.0, 0.0))
    folder.seal(round)
    folder.seal(round)


def test_what_the_engine_said_moves_nothing(write_recipe, recorded: RunFolder, tmp_path: Path):
    """Its log-probs are off by 0.3 nats a token: the gap tells it, and the weights are the same to the last bit."""
    runs = {}
    for name, change in (("as it was", None), ("off", lambda logprobs: logprobs - np.float32(0.3))):
        if change is not None:
            change_logprobs(recorded, change)
        for anchor in ("engine", "trainer"):
            run = runs[name, anchor] = RunFolder(tmp_path / f"{name}-{anchor}")
            recipe = write_recipe(loss={"anchor": anchor}, trainer={"num_steps": 4})
            assert train(recipe, run, "--launch.rounds_from", str(recorded.path)) == 0
    assert same(weights(runs["as it was", "trainer"], 1), weights(runs["off", "trainer"], 1))
    assert not same(weights(runs["as it was", "engine"], 1), weights(runs["off", "engine"], 1))
    assert [record["anchor_gap"] for record in runs["off", "trainer"].metrics()] == pytest.approx([0.3] * 4, abs=1e-4)


@pytest.mark.parametrize(
    ("sections", "is_damaged"),
    [
        ({}, False),
        ({}, True),
        ({"launch": {"rounds_ahead": 1}}, True),
        ({"trainer": {"num_epochs": 2}}, True),
        ({"trainer": {"bf16": True}}, False),
        ({"model": {"use_peft": True}}, False),
    ],
    ids=str,
)
def test_a_resume_in_mid_round_is_exact(write_recipe, run: RunFolder, sections: dict[str, Any], is_damaged: bool):
    """The last two steps are done again, from a checkpoint within round 2. Where the policy that sampled that round is
    damaged, it is made again first, though the round is full."""
    if "model" in sections:
        pytest.importorskip("peft")
    trainer = {"save_steps": 10, "save_total_limit": 4, **sections.get("trainer", {})}
    recipe = write_recipe(**{**sections, "loss": ANCHOR, "trainer": trainer})
    assert train(recipe, run) == 0
    undisturbed = weights(run, 3)
    run.summary_path.unlink()
    run.remove_checkpoint(12)
    if is_damaged:
        sampler = run.round(2).load().policy.version
        flip_a_bit(run.policy_path(sampler) / "model.safetensors")
    assert train(recipe, run) == 0
    assert run.policy_path(3).with_name("000003.aside-1").exists()
    assert same(weights(run, 3), undisturbed)


@pytest.mark.slow
def test_processes_learn_the_same(write_recipe, run: RunFolder, tmp_path: Path):
    other = RunFolder(tmp_path / "other")
    assert train(write_recipe(loss=ANCHOR), run) == 0
    assert train(write_recipe(loss=ANCHOR, launch={"kind": "processes"}), other) == 0
    for name, weight in weights(run, 3).items():
        torch.testing.assert_close(weights(other, 3)[name], weight, rtol=0, atol=1e-3)


def test_another_runs_round_is_anchored_to_that_runs_policy(write_recipe, run: RunFolder, tmp_path: Path):
    """Round 1 of a run that learned at another rate: its log-ratios are the same, whoever computes the anchor. A copy
    of a copy leads to the run that sampled it."""
    others = [RunFolder(tmp_path / f"other{number}") for number in range(2)]
    assert train(write_recipe(trainer={"num_steps": 8, "learning_rate": 3e-3}), others[0]) == 0
    recipe = write_recipe(loss=ANCHOR, trainer={"num_steps": 8})
    assert train(recipe, others[1], "--launch.rounds_from", str(others[0].path)) == 0
    assert train(recipe, run, "--launch.rounds_from", str(others[1].path)) == 0
    assert same(weights(run, 2), weights(others[1], 2))
    assert max(record["anchor_gap"] for record in run.metrics()) < 1e-4
    assert run.round(1).load().policy != run.policy(1)


def test_another_runs_round_without_its_policy_is_refused_at_the_start(write_recipe, run: RunFolder, tmp_path, capsys):
    other = RunFolder(tmp_path / "other")
    assert train(write_recipe(trainer={"num_steps": 8}), other) == 0
    shutil.rmtree(other.policy_path(1))
    recipe = write_recipe(loss=ANCHOR, trainer={"num_steps": 8})
    capsys.readouterr()
    assert train(recipe, run, "--launch.rounds_from", str(other.path)) == 2
    assert f"loss.anchor = 'trainer' needs the policy that sampled {other.round(1).path}" in capsys.readouterr().err
    assert not run.config_path.exists()
    assert train(recipe, run, "--launch.rounds_from", str(other.path), "--loss.anchor", "engine") == 0


def test_the_other_run_may_go_where_its_policy_is_this_runs_own(write_recipe, recorded: RunFolder, run: RunFolder):
    """Both began with the same model, which is policy 0 of both."""
    recipe = write_recipe(loss=ANCHOR, trainer={"num_steps": 4, "save_steps": 2})
    options = ("--launch.rounds_from", str(recorded.path))
    assert train(recipe, run, *options) == 0
    shutil.rmtree(recorded.path)
    undisturbed = weights(run, 1)
    run.summary_path.unlink()
    run.remove_checkpoint(4)
    assert train(recipe, run, *options) == 0
    assert same(weights(run, 1), undisturbed)


def test_a_policy_that_attends_otherwise_is_refused(write_recipe, run: RunFolder, tmp_path: Path, capsys):
    """Sampled by a model with a window, which the trainer's batches have no place for."""
    from transformers import MistralConfig, MistralForCausalLM

    folder = make_tiny_model(tmp_path / "windowed")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "max_position_embeddings": 64}
    MistralForCausalLM(MistralConfig(**sizes, **heads, eos_token_id=1)).save_pretrained(folder)
    other = RunFolder(tmp_path / "other")
    short = write_recipe(model={"name_or_path": str(folder)}, trainer={"num_steps": 4})
    assert main(["sample", str(short), "--run_dir", str(other.path)]) == 0
    recipe = write_recipe(loss=ANCHOR, trainer={"num_steps": 4})
    assert train(recipe, run, "--launch.rounds_from", str(other.path)) == 1
    assert "which attends otherwise than the LlamaForCausalLM that is trained" in capsys.readouterr().err
