"""The optimizer step: what must not change it, and an exact resume."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from oapl.attention import KEPT
from oapl.batching import group_rows, micro_batches, step_counts
from oapl.config import EngineConfig, Recipe, load_recipe
from oapl.diagnostics import StepTotals
from oapl.engines.embedded import EmbeddedEngine
from oapl.errors import ConfigError, TrainingError
from oapl.losses import oapl_loss
from oapl.model import next_token_logprobs
from oapl.store import RunFolder
from oapl.train_loop import start_or_resume
from oapl.trainer import Trainer, scheduled_learning_rate
from oapl.types import Group, Request, SamplingParams, Shard, Verdict


@pytest.fixture
def recipe(write_recipe) -> Recipe:
    return load_recipe(write_recipe())


def sampled_shard(model: Path, *, temperature: float = 1.0, num_prompts: int = 3, seed: int = 0) -> Shard:
    """Groups that a real engine sampled, of prompts and completions of different lengths, with real-valued rewards."""
    engine = EmbeddedEngine(EngineConfig())
    engine.load(model)
    rng = np.random.default_rng(seed)
    asked = [Request(rng.integers(3, 17, size=4 + 3 * i).astype(np.int32), seed + i) for i in range(num_prompts)]
    answers = engine.generate(asked, SamplingParams(temperature, 14, 4))
    groups = tuple(
        Group(i, f"train/{i}", "", request.prompt_ids, tuple(c), ("",) * 4, tuple(map(Verdict, rng.random(4))))
        for i, (request, c) in enumerate(zip(asked, answers, strict=True))
    )
    return Shard(groups, (), 1.0, 0.0, 0.0)


def gradients(trainer: Trainer, shard: Shard, max_tokens: int) -> dict[str, torch.Tensor]:
    """The gradient of one step, before clipping and without taking it."""
    rows = group_rows(shard.groups, trainer.objective)
    trainer.zero_gradients()
    counts, totals = step_counts(rows, 32), StepTotals()
    trainer.config = trainer.config.model_copy(update={"max_tokens_per_microbatch": max_tokens})
    for micro in micro_batches(rows, max_tokens, trainer.lm.has_plain_cache):
        trainer.backward(micro, counts, totals)
    return {name: p.grad.clone() for name, p in trainer.parameters.items() if p.grad is not None}


def in_float64(recipe: Recipe, model: Path) -> Trainer:
    """A trainer whose sums hardly depend on their order. Its attention is the one that keeps to float64: `eager`, the
    default on a CPU, rounds its softmax to float32, differently for rows that are computed together differently."""
    kept = recipe.model.model_copy(update={"attn_implementation": "sdpa"})
    trainer = Trainer(recipe.model_copy(update={"model": kept}), str(model))
    trainer.model.double()
    return trainer


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-7)


LOSSES = [
    {"kind": "oapl", "beta2": 0.1},
    {"kind": "oapl", "beta2": 0.1, "leave_one_out": True, "rescale": True, "per_token_mean": True},
    *({"kind": "grpo", "loss_type": loss_type} for loss_type in ("grpo", "dr_grpo", "dapo")),
    {"kind": "grpo", "importance_sampling": "token_truncate"},
    {"kind": "grpo", "importance_sampling": "sequence_mask"},
    {"kind": "grpo_plus"},
    {"kind": "reinforce"},
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_micro_batch_size_does_not_change_the_gradient(write_recipe, tiny_model: Path, loss: dict[str, object]):
    recipe = load_recipe(write_recipe(loss=loss))
    trainer, shard = in_float64(recipe, tiny_model), sampled_shard(tiny_model)
    whole = gradients(trainer, shard, max_tokens=10**6)
    assert_same(whole, gradients(trainer, shard, max_tokens=60))
    assert_same(whole, gradients(trainer, shard, max_tokens=1))
    assert_same(whole, gradients(trainer, shard, max_tokens=7))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_micro_batch_size_does_not_change_the_metrics(write_recipe, tiny_model: Path, loss: dict[str, object]):
    """In a second step, on data that the weights have moved away from."""
    shard, metrics = sampled_shard(tiny_model), []
    for max_tokens in (10**6, 60, 1):
        recipe = load_recipe(write_recipe(loss=loss, trainer={"max_tokens_per_microbatch": max_tokens}))
        trainer = Trainer(recipe, str(tiny_model))
        trainer.train_step(shard, "digest")
        metrics.append(trainer.train_step(shard, "digest"))
        del metrics[-1]["num_computed_tokens"]  # padding, which is what differs
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-3, abs=1e-5)
    assert metrics[2] == pytest.approx(metrics[0], rel=1e-3, abs=1e-5)


def test_order_of_groups_does_not_change_the_gradient(recipe: Recipe, tiny_model: Path):
    trainer, shard = in_float64(recipe, tiny_model), sampled_shard(tiny_model)
    turned = Shard(tuple(reversed(shard.groups)), (), 1.0, 0.0, 0.0)
    assert_same(gradients(trainer, shard, 10**6), gradients(trainer, turned, 60))


def test_padding_does_not_change_the_gradient(recipe: Recipe, tiny_model: Path):
    """The step computed row by row, with no padding at all, by the loss's definition."""
    trainer, shard = in_float64(recipe, tiny_model), sampled_shard(tiny_model)
    padded = gradients(trainer, shard, 10**6)
    trainer.zero_gradients()
    for row in group_rows(shard.groups, trainer.objective):
        ids = torch.tensor([[*row.prompt_ids.tolist(), *row.completion.token_ids.tolist()]])
        logprobs = next_token_logprobs(trainer.model, ids, 1.0, first=len(row.prompt_ids) - 1)
        sampler = torch.from_numpy(row.completion.logprobs)[None]
        loss, _ = oapl_loss(
            logprobs,
            sampler,
            torch.ones_like(sampler, dtype=torch.bool),
            torch.tensor([row.advantage]),
            beta2=recipe.loss.beta2,
            num_completions=12,
        )
        loss.backward()
    assert_same(padded, {name: p.grad for name, p in trainer.parameters.items()})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_ratios_start_at_zero(write_recipe, tiny_model: Path, temperature: float):
    """On the sampler's own weights every log-ratio is 0, at any temperature, so the loss is the mean of A^2."""
    recipe = load_recipe(write_recipe(sampling={"temperature": temperature}))
    trainer, shard = Trainer(recipe, str(tiny_model)), sampled_shard(tiny_model, temperature=temperature)
    advantages = [row.advantage for row in group_rows(shard.groups, trainer.objective)]
    metrics = trainer.train_step(shard, "digest")
    assert metrics["log_ratio"] == pytest.approx(0, abs=1e-4)
    assert metrics["loss"] == pytest.approx(np.mean(np.square(advantages)), abs=1e-5)


def test_a_step_moves_probability_towards_reward(recipe: Recipe, tiny_model: Path):
    trainer, shard = Trainer(recipe, str(tiny_model)), sampled_shard(tiny_model)
    first = trainer.train_step(shard, "digest")["loss"]
    for _ in range(10):
        last = trainer.train_step(shard, "digest")["loss"]
    assert last < first


def test_bf16_trains_fp32_weights(write_recipe, tiny_model: Path):
    recipe = load_recipe(write_recipe(trainer={"bf16": True}))
    trainer, shard = Trainer(recipe, str(tiny_model)), sampled_shard(tiny_model)
    plain = Trainer(load_recipe(write_recipe(trainer={"bf16": False})), str(tiny_model))
    coarse, exact = gradients(trainer, shard, 10**6), gradients(plain, shard, 10**6)
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in trainer.parameters.values())
    a = torch.cat([g.flatten() for g in coarse.values()])
    b = torch.cat([g.flatten() for g in exact.values()])
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.98


def test_resume_is_exact(recipe: Recipe, tiny_model: Path, tmp_path: Path):
    """Three steps, a checkpoint, three more; against the same six steps with a new trainer from the checkpoint on."""
    shards = [sampled_shard(tiny_model, seed=10 * i) for i in range(6)]
    straight = Trainer(recipe, str(tiny_model))
    for shard in shards[:3]:
        straight.train_step(shard, "digest")
    run = RunFolder(tmp_path / "run")
    run.write_checkpoint(3, straight.write_checkpoint)
    for shard in shards[3:]:
        straight.train_step(shard, "digest")

    resumed = start_or_resume(recipe, run)
    assert resumed.step == 3
    assert resumed.consumed == ["digest"] * 3
    for shard in shards[3:]:
        resumed.train_step(shard, "digest")
    for name, parameter in straight.parameters.items():
        assert torch.equal(parameter, resumed.parameters[name]), name


def test_a_checkpoint_is_safetensors_and_json_only(recipe: Recipe, tiny_model: Path, tmp_path: Path):
    trainer = Trainer(recipe, str(tiny_model))
    trainer.train_step(sampled_shard(tiny_model), "digest")
    run = RunFolder(tmp_path)
    run.write_checkpoint(1, trainer.write_checkpoint)
    names = {path.name for path in run.checkpoint_path(1).iterdir()}
    assert names == {"model.safetensors", "optimizer.safetensors", "state.json", "sealed.json"}
    assert load_file(run.checkpoint_path(1) / "model.safetensors").keys() == trainer.parameters.keys()


def test_a_gradient_that_is_not_finite_takes_no_step(recipe: Recipe, tiny_model: Path):
    trainer, shard = Trainer(recipe, str(tiny_model)), sampled_shard(tiny_model)
    with torch.no_grad():
        next(iter(trainer.parameters.values()))[4] = torch.nan
    before = {name: p.clone() for name, p in trainer.parameters.items()}
    with pytest.raises(TrainingError, match=r"step 0: the gradient is not finite"):
        trainer.train_step(shard, "digest")
    for name, parameter in trainer.parameters.items():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0, equal_nan=True)


def test_learning_rate_schedule(write_recipe):
    """Peak 1, warm-up 4, 12 steps: 1/4, 2/4, 3/4, 4/4, then flat; or half a cosine over the other 8 steps."""
    constant = load_recipe(write_recipe(trainer={"learning_rate": 1.0, "warmup_steps": 4})).trainer
    assert [scheduled_learning_rate(constant, s) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = constant.model_copy(update={"lr_scheduler_type": "cosine"})
    assert scheduled_learning_rate(cosine, 4) == 1.0
    assert scheduled_learning_rate(cosine, 8) == pytest.approx(0.5)
    assert scheduled_learning_rate(cosine, 12) == pytest.approx(0.0)


def test_a_cosine_may_end_above_zero(write_recipe):
    """Peak 1, warm-up 4, 12 steps, least 0.2: from 1 to 0.2, half of the way after half of the other 8 steps."""
    settings = {"learning_rate": 1.0, "warmup_steps": 4, "lr_scheduler_type": "cosine", "min_lr_rate": 0.2}
    config = load_recipe(write_recipe(trainer=settings)).trainer
    assert scheduled_learning_rate(config, 0) == 0.25
    for step, cosine in ((4, 1.0), (6, math.cos(math.pi / 4)), (8, 0.0), (10, -math.cos(math.pi / 4)), (12, -1.0)):
        assert scheduled_learning_rate(config, step) == pytest.approx(0.2 + 0.8 * (1 + cosine) / 2)


def test_the_end_of_a_cosine_has_no_use_without_one(write_recipe):
    with pytest.raises(ConfigError, match=r"trainer: min_lr_rate = 0.1 is where a cosine ends"):
        load_recipe(write_recipe(trainer={"min_lr_rate": 0.1}))


@pytest.mark.parametrize("few_scores", [0, 800, 10**6])
def test_the_kind_of_attention_is_chosen_by_size_and_does_not_change_the_gradient(
    recipe: Recipe, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, few_scores: int
):
    """Two layers of four heads, in float64."""
    shard, chosen = sampled_shard(tiny_model), []
    trainer = in_float64(recipe, tiny_model)
    want = gradients(trainer, shard, 60)
    monkeypatch.setattr("oapl.trainer.KEPT_BYTES", few_scores * 2 * 4 * 8)
    monkeypatch.setattr(trainer, "chooses_attention", True)
    choose = trainer.model.set_attn_implementation
    monkeypatch.setattr(trainer.model, "set_attn_implementation", lambda kind: (chosen.append(kind), choose(kind)))
    assert_same(gradients(trainer, shard, 60), want)
    assert set(chosen) == {0: {"sdpa"}, 800: {"sdpa", KEPT}, 10**6: {KEPT}}[few_scores]


def test_attention_is_chosen_in_bfloat16_unless_the_recipe_says(write_recipe, tiny_model: Path):
    chooses = [
        Trainer(load_recipe(write_recipe(model=model, trainer={"bf16": bf16})), str(tiny_model)).chooses_attention
        for bf16, model in (
            (True, {}),
            (True, {"attn_implementation": "sdpa"}),
            (True, {"attn_implementation": "eager"}),
            (False, {}),
        )
    ]
    assert chooses == [True, False, False, False]
