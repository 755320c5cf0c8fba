"""GRPO's loss against TRL's: one batch through a real `GRPOTrainer`, of which only model and generation are given.

Shapes: B completions, T tokens.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from oapl.losses import group_advantages, grpo_loss
from oapl.model import save_policy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of an import are not ours
    trl = pytest.importorskip("trl", minversion="1.16")
    from trl import GRPOConfig, GRPOTrainer

NUM_GENERATIONS, MAX_LENGTH, EPSILON, EPSILON_HIGH, CLIP_MAX = 4, 8, 0.2, 0.28, 1.5
LENGTHS = [8, 3, 5, 1, 2, 7, 8, 4]
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.3, 0.9, 0.1, 0.1]
GENERATOR = torch.Generator().manual_seed(0)
MASK_BT = torch.arange(MAX_LENGTH) < torch.tensor(LENGTHS)[:, None]
SAMPLER_LOGPROBS_BT = torch.where(MASK_BT, -3 * torch.rand(8, MAX_LENGTH, generator=GENERATOR), 0.0)
LOGPROBS_BT = SAMPLER_LOGPROBS_BT + 0.5 * torch.randn(8, MAX_LENGTH, generator=GENERATOR)  # a lag that clips and caps


class Given(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, told what was sampled and what the policy's log-probs are."""

    logprobs_BT: Tensor

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        ids = [[5] * length for length in LENGTHS]
        sampled = [row[:length].tolist() for row, length in zip(SAMPLER_LOGPROBS_BT, LENGTHS, strict=True)]
        return [[3, 4]] * len(ids), ids, None, [""] * len(ids), sampled, {}, None, None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        logprobs_BT = 1 * self.logprobs_BT  # computed, as a model's are: without gradient where TRL asks for none
        return logprobs_BT, torch.zeros_like(logprobs_BT), None


@pytest.fixture
def trl_trainer(tiny_model: Path, tmp_path: Path):
    def make(**settings: Any) -> Given:
        arguments = GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=len(LENGTHS),
            num_generations=NUM_GENERATIONS,
            max_completion_length=MAX_LENGTH,
            epsilon=EPSILON,
            epsilon_high=EPSILON_HIGH,
            vllm_importance_sampling_clip_max=CLIP_MAX,
            **settings,
        )
        trainer = Given(
            AutoModelForCausalLM.from_pretrained(tiny_model).train(),
            lambda completions, **columns: REWARDS,
            arguments,
            Dataset.from_dict({"prompt": ["a", "b"]}),
            processing_class=AutoTokenizer.from_pretrained(tiny_model),
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.logprobs_BT = LOGPROBS_BT.clone().requires_grad_()
        return trainer

    return make


def trl_loss_and_gradient(trainer: Given, *, sampler_is_old: bool) -> tuple[Tensor, Tensor]:
    batch = trainer._generate_and_score_completions([{"prompt": p} for p in "ab" for _ in range(NUM_GENERATIONS)])
    assert torch.equal(batch["completion_mask"].bool(), MASK_BT)
    if sampler_is_old:
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    assert trainer.logprobs_BT.grad is not None
    return loss.detach(), trainer.logprobs_BT.grad


def our_loss_and_gradient(scale_rewards: Any = "group", **settings: Any) -> tuple[Tensor, Tensor, float]:
    logprobs_BT = LOGPROBS_BT.clone().requires_grad_()
    advantages_B = group_advantages(torch.tensor(REWARDS).view(-1, NUM_GENERATIONS), scale_rewards).flatten()
    loss, metrics = grpo_loss(
        logprobs_BT,
        SAMPLER_LOGPROBS_BT,
        MASK_BT,
        advantages_B,
        epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH,
        importance_sampling_clip_max=CLIP_MAX,
        num_completions=len(LENGTHS),
        num_tokens=sum(LENGTHS),
        max_completion_length=MAX_LENGTH,
        **settings,
    )
    loss.backward()
    assert logprobs_BT.grad is not None
    return loss.detach(), logprobs_BT.grad, metrics["clip_share"].item()


def assert_equal(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)
    assert theirs[1].abs().max() > 1e-2  # there is something to agree on


LOSS_TYPES = pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])


@LOSS_TYPES
@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_the_clipped_loss_is_trl_s_with_the_sampler_as_the_old_policy(trl_trainer, loss_type: str, scale_rewards: str):
    trainer = trl_trainer(loss_type=loss_type, scale_rewards=scale_rewards)
    theirs = trl_loss_and_gradient(trainer, sampler_is_old=True)
    loss, gradient, clip_share = our_loss_and_gradient(loss_type=loss_type, scale_rewards=scale_rewards)
    assert_equal((loss, gradient), theirs)
    assert clip_share == pytest.approx(trainer._metrics["train"]["clip_ratio/region_mean"][0], abs=1e-6)
    assert clip_share > 0.1


@LOSS_TYPES
@pytest.mark.parametrize("kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_weighted_loss_is_trl_s_vllm_correction_on_a_batch_stepped_on_once(trl_trainer, loss_type: str, kind: str):
    trainer = trl_trainer(loss_type=loss_type, vllm_importance_sampling_mode=kind)
    trainer.use_vllm = True  # set after it was made, so that no server is asked for: what weights the loss
    theirs = trl_loss_and_gradient(trainer, sampler_is_old=False)
    loss, gradient, clip_share = our_loss_and_gradient(loss_type=loss_type, importance_sampling=kind)
    assert_equal((loss, gradient), theirs)
    assert clip_share > 0.1


def test_a_saved_policy_goes_on_in_trl_and_in_transformers(tiny_model: Path, tmp_path: Path):
    model, policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), tmp_path / "policy"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    policy.mkdir()
    save_policy(model, AutoTokenizer.from_pretrained(tiny_model), policy, probe=[[3, 4]])
    theirs = GRPOTrainer(
        str(policy),
        lambda completions, **columns: [0.0] * len(completions),
        GRPOConfig(str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none"),
        Dataset.from_dict({"prompt": ["a"]}),
    ).model
    for loaded in (theirs, AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)):
        found = dict(loaded.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(found[name], parameter), name
