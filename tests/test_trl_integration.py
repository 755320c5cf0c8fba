"""OAPL inside TRL: the loss is ours, and a round is TRL's generation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from oapl.losses import oapl_loss, optimal_value
from oapl.model import next_token_logprobs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL warns at import of a vLLM that is newer than it knows
    from oapl.integrations.trl import OAPLConfig, OAPLTrainer, group_advantages

pytestmark = pytest.mark.filterwarnings("ignore")  # those of TRL and of what it imports

PROMPTS = [f"use {a} {b} make {a + b}\n" for a in range(2, 10) for b in range(1, 9)]
MakeTrainer = Callable[..., OAPLTrainer]


def length_reward(completions: list[str], **_: Any) -> list[float]:
    return [len(completion) / 10 for completion in completions]


@pytest.fixture
def make_trainer(tiny_model: Path, tmp_path: Path) -> MakeTrainer:
    def make(reward_funcs: Any = length_reward, peft_config: Any = None, **settings: Any) -> OAPLTrainer:
        args = OAPLConfig(
            **{
                "output_dir": str(tmp_path / "trl"),
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "num_generations": 4,
                "max_completion_length": 8,
                "weight_sync_steps": 3,
                "max_steps": 6,
                "learning_rate": 1e-2,
                "logging_steps": 1,
                "report_to": "none",
                "save_strategy": "no",
                "use_cpu": True,
                "bf16": False,
                "gradient_checkpointing": False,
                "disable_tqdm": True,
                **settings,
            }
        )
        return OAPLTrainer(
            AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
            reward_funcs,
            args,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=AutoTokenizer.from_pretrained(tiny_model),
            peft_config=peft_config,
        )

    return make


def batch(trainer: OAPLTrainer) -> dict[str, torch.Tensor]:
    """Left-padded prompts and right-padded completions, as TRL makes them."""
    torch.manual_seed(1)
    prompts = torch.randint(3, 20, (4, 5))
    completions = torch.randint(3, 20, (4, 6))
    prompt_mask, completion_mask = torch.ones_like(prompts), torch.ones_like(completions)
    prompt_mask[1, :2], completion_mask[2, 4:], completion_mask[3, 1:] = 0, 0, 0
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([0.7, -0.2, 0.1, -0.6]),
        "old_per_token_logps": -3 * torch.rand(4, 6),
    }


def test_the_loss_and_its_gradient_are_those_of_oapl(make_trainer: MakeTrainer):
    """Log-probs from a forward pass of each completion alone, without padding, at the temperature."""
    trainer = make_trainer(temperature=0.7, beta2=0.3)
    inputs = batch(trainer)
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    loss = trainer._compute_loss(model, inputs) * 2
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    logprobs = torch.zeros(4, 6)
    for row in range(4):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
        completion = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]
        ids = torch.cat([prompt, completion])[None]
        logprobs[row, : len(completion)] = next_token_logprobs(model, ids, 0.7, first=len(prompt) - 1)[0]
    expected, _ = oapl_loss(
        logprobs,
        inputs["old_per_token_logps"],
        inputs["completion_mask"].bool(),
        inputs["advantages"],
        beta2=0.3,
        num_completions=4,
    )
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (gradient - wanted).norm() <= 1e-6 * wanted.norm()


def test_a_round_is_sampled_at_its_sync_and_trained_on_for_all_of_its_steps(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer()
    generated, trained = [], []
    generate, compute = OAPLTrainer._generate_and_score_completions, OAPLTrainer._compute_loss

    def generate_and_note(self: OAPLTrainer, inputs: Any) -> Any:
        generated.append((self.state.global_step, [row["prompt"] for row in inputs]))
        return generate(self, inputs)

    def compute_and_note(self: OAPLTrainer, model: Any, inputs: Any) -> Any:
        loss = compute(self, model, inputs)
        texts = self.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
        trained.append((texts, self._metrics["train"]["log_ratio"][-1]))
        return loss

    monkeypatch.setattr(OAPLTrainer, "_generate_and_score_completions", generate_and_note)
    monkeypatch.setattr(OAPLTrainer, "_compute_loss", compute_and_note)
    trainer.train()
    assert [(step, len(prompts)) for step, prompts in generated] == [(0, 24), (3, 24)]
    assert all(len(set(prompts[i : i + 4])) == 1 for _, prompts in generated for i in range(0, 24, 4))
    assert [text for texts, _ in trained for text in texts] == [
        prompt for _, prompts in generated for prompt in prompts
    ], "in order, and so in whole groups"
    ratios = [abs(ratio) for _, ratio in trained]
    assert max(*ratios[0:2], *ratios[6:8]) < 1e-4, "the weights that sampled have moved nowhere"
    assert min(*ratios[2:6], *ratios[8:12]) > 1e-3
    lags = [record["lag"] for record in trainer.state.log_history if "lag" in record]
    assert lags == [0, 1, 2, 0, 1, 2]


def test_values_are_of_whole_groups_and_what_has_no_reward_counts_in_none():
    nan = float("nan")
    rewards = torch.tensor([[1.0, 0.0], [0.0, 2.0], [nan, nan], [1.0, nan], [3.0, 0.0], [3.0, 0.0]])
    advantages, is_scored = group_advantages(rewards, torch.tensor([1.0, 0.5]), 3, 5.0)
    first, second = torch.tensor([1.0, 1.0]).double(), torch.tensor([1.0, 3.0, 3.0]).double()
    assert advantages[:2].tolist() == (first - optimal_value(first, 5.0)).tolist() == [0.0, 0.0]
    assert advantages[2] == 0
    assert not is_scored[2]
    assert advantages[3:].tolist() == pytest.approx((second - optimal_value(second, 5.0)).tolist())


def test_a_completion_without_a_reward_is_no_part_of_the_loss(make_trainer: MakeTrainer):
    """The first of each group has none; the others of it count, and their value is without it."""

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [float(i % 4) if i % 4 else None for i in range(len(completions))]

    trainer = make_trainer(reward)
    trainer.train()
    value = optimal_value(torch.tensor([1.0, 2.0, 3.0]).double(), trainer.args.beta1)
    for part in trainer._buffered_inputs:
        assert part["completion_mask"].any(1).tolist() == [False, True, True, True]
        assert part["advantages"].tolist() == pytest.approx([0.0, *(i - float(value) for i in (1, 2, 3))])


def test_dropout_is_off_so_that_what_sampled_has_a_log_ratio_of_zero(make_trainer: MakeTrainer):
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, init_lora_weights=False)
    trainer = make_trainer(peft_config=config)
    trainer.train()
    ratios = {record["lag"]: abs(record["log_ratio"]) for record in trainer.state.log_history if "lag" in record}
    assert ratios[0] < 1e-4 < 1e-3 < ratios[2]


def test_what_vllm_gave_no_log_prob_of_is_anchored_in_the_trainer(make_trainer: MakeTrainer):
    """At once, where these weights have just sampled, and TRL computes no log-probs at generation."""
    trainer = make_trainer(temperature=0.7)
    trainer.current_gradient_accumulation_steps = 2
    inputs = batch(trainer)
    wanted = trainer._compute_loss(trainer.model.train(), {**inputs, "old_per_token_logps": None})
    inputs["old_per_token_logps"] = torch.full((4, 6), float("nan"))
    assert torch.equal(trainer._compute_loss(trainer.model.train(), inputs), wanted)


def test_passes_over_a_round_lie_between_two_syncs(make_trainer: MakeTrainer):
    trainer = make_trainer(weight_sync_steps=4, num_iterations=2, max_steps=8)
    trainer.train()
    lags = [record["lag"] for record in trainer.state.log_history if "lag" in record]
    assert lags == [0, 1, 2, 3] * 2
    assert len(trainer._buffered_inputs) == 4  # of two steps of two micro-batches each


def test_an_evaluation_may_be_larger_than_a_round(make_trainer: MakeTrainer):
    trainer = make_trainer(weight_sync_steps=1, gradient_accumulation_steps=1, max_steps=1, log_completions=True)
    trainer.eval_dataset = Dataset.from_dict({"prompt": PROMPTS[:4]})
    trainer.train()
    assert "eval_log_ratio" in trainer.evaluate()


def test_adapters_are_trained_and_an_evaluation_leaves_the_round_alone(make_trainer: MakeTrainer):
    from peft import LoraConfig

    trainer = make_trainer(peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), max_steps=3)
    trainer.eval_dataset = Dataset.from_dict({"prompt": PROMPTS[:2]})
    trainer.train()
    kept = trainer._buffered_inputs
    trainer.evaluate()
    assert trainer._buffered_inputs is kept
    assert any(
        name.endswith("lora_B.default.weight") and p.abs().max() > 0 for name, p in trainer.model.named_parameters()
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"epsilon": 0.3}, "epsilon = 0.3 is of GRPO's loss"),
        ({"loss_type": "dr_grpo"}, "loss_type = 'dr_grpo' is of GRPO's loss"),
        ({"top_p": 0.9}, "top_p = 0.9: tokens would be drawn from another distribution"),
        ({"generation_kwargs": {"top_p": 0.5}}, "tokens would be drawn from another distribution"),
        ({"disable_dropout": False}, "two random draws"),
        ({"num_iterations": 2}, "must be a multiple of num_iterations = 2"),
        ({"steps_per_generation": 4}, "a round is generated at once"),
        ({"weight_sync_steps": 0}, "must be at least 1"),
        ({"beta2": 0.0}, "beta2 = 0.0 must be positive"),
        ({"num_generations": 3}, "must be divisible by num_generations = 3"),
        ({"weight_sync_steps": 50}, "train_dataset has 64 rows, and a round of weight_sync_steps = 50 needs 100"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make_trainer: MakeTrainer, settings: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=told):
        make_trainer(**settings)
