"""The trainer's state and its one act: an optimizer step on a shard, and the exact checkpoint of it all."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from oapl.anchor import Anchor
from oapl.attention import KEPT, KEPT_COMPILED
from oapl.batching import Row, collate, group_rows, micro_batches, step_counts
from oapl.causal_lm import take_apart
from oapl.config import Recipe, TrainerConfig
from oapl.diagnostics import StepTotals, shard_metrics
from oapl.errors import StoreError, TrainingError
from oapl.lora import add_lora, frozen_digest, trained_parameters
from oapl.model import checkpoint_layers, compile_parts, load_model, load_tokenizer
from oapl.objective import StepCounts, make_objective
from oapl.pieces import backward_in_pieces
from oapl.precision import compute_in_bfloat16
from oapl.types import Shard

KEPT_BYTES = 2**29
"""Of a micro-batch's pairs of tokens, what attention on a CPU may keep for the backward pass, all layers together."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Trainer:
    """Weights, optimizer and step count of a run: all that a checkpoint holds."""

    def __init__(self, recipe: Recipe, source: str) -> None:
        self.recipe, self.config = recipe, recipe.trainer
        torch.manual_seed(recipe.seed)
        self.model = load_model(source, "float32", self.config.device, recipe.model.attn_implementation)
        self.chooses_attention = chooses_attention(recipe, self.model)
        self.lm = take_apart(self.model, compile_head=self.config.torch_compile)
        self.tokenizer = load_tokenizer(source)
        if recipe.model.use_peft:
            add_lora(self.model, recipe.model)
        self.parameters = trained_parameters(self.model)
        """What the optimizer moves, in float32; the model's own, unless that computes in bfloat16."""
        if self.config.bf16:
            self.parameters = compute_in_bfloat16(self.model)
        if self.config.gradient_checkpointing:
            checkpoint_layers(self.model)
        if self.config.torch_compile:
            compile_parts(self.model)
        self.keeps_states = self.lm.has_plain_cache and not self.config.gradient_checkpointing
        """Whether keys and values may be computed once and used again."""
        self.objective = make_objective(recipe.loss)
        self.anchor = Anchor(recipe) if recipe.recomputes_anchor else None
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=self.config.learning_rate,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            eps=self.config.adam_epsilon,
            weight_decay=self.config.weight_decay,
            fused=True,
        )
        self.frozen_digest = frozen_digest(self.model) if recipe.model.use_peft else None
        self.step = 0
        self.consumed: list[str] = []
        """The digest of the shard that each step so far was trained on."""

    def train_step(self, shard: Shard, digest: str) -> dict[str, float]:
        """One optimizer step on all groups of a shard; returns its metrics."""
        threshold, judged_by = self.recipe.task.success_threshold, self.recipe.task.judged_by
        rows = group_rows(shard.groups, self.objective, judged_by)
        if not rows:  # nothing to learn from, and still a step of the schedule
            self.step += 1
            self.consumed.append(digest)
            return {**shard_metrics(shard, threshold, judged_by), "num_trained_completions": 0}
        counts = step_counts(rows, self.recipe.sampling.max_completion_length)
        learning_rate = scheduled_learning_rate(self.config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.zero_gradients()
        totals = StepTotals()
        for micro in micro_batches(rows, self.config.max_tokens_per_microbatch, self.keeps_states):
            self.backward(micro, counts, totals)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)
        if not torch.isfinite(norm):
            raise TrainingError(
                f"step {self.step}: the gradient is not finite (norm {norm.item()}); no step was taken. "
                f"Look at this round's log-ratios, and start a new run_dir with a lower trainer.learning_rate"
                + (" or a larger loss.beta2." if self.objective.beta2 is not None else ".")
            )
        self.optimizer.step()
        self.update_model()
        self.step += 1
        self.consumed.append(digest)
        sampled = shard_metrics(shard, threshold, judged_by)
        if self.objective.beta2 is not None:
            sampled["hold"] = self.objective.beta2 * sampled["surprise"]
        return {
            **sampled,
            **totals.metrics(threshold, self.objective),
            "grad_norm": norm.item(),
            "learning_rate": learning_rate,
        }

    def zero_gradients(self) -> None:
        """In the memory they had. All are there, so that what no token of a step reaches moves alike after a resume."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def backward(self, rows: Sequence[Row], counts: StepCounts, totals: StepTotals) -> None:
        """Adds the gradient of a micro-batch, and what there is to tell of it."""
        temperature, max_tokens = self.recipe.sampling.temperature, self.config.max_tokens_per_microbatch
        is_long = len(rows) == 1 and len(rows[0]) > max_tokens and self.keeps_states
        batch = collate(rows, self.config.device, share_prompts=self.keeps_states and not is_long)
        if self.chooses_attention:
            kind = attention_by_size(self.model, batch.num_scores, self.config.torch_compile)
            self.model.set_attn_implementation(kind)
        scalars: dict[str, Tensor] = {}
        if self.anchor is not None:
            attn_implementation = self.model.config._attn_implementation
            recomputed = self.anchor.logprobs(batch, attn_implementation, max_tokens if is_long else None)
            scalars["anchor_gap"] = (recomputed - batch.sampler_logprobs).abs().sum() / counts.num_tokens
            batch = replace(batch, sampler_logprobs=recomputed)

        def loss_of(logprobs: Tensor) -> Tensor:
            loss, metrics = self.objective.loss(logprobs, batch.sampler_logprobs, batch.mask, batch.advantages, counts)
            scalars.update(loss=loss.detach(), **metrics)
            return loss

        if is_long:
            logprobs, entropy = backward_in_pieces(self.lm, batch, temperature, max_tokens, loss_of)
        else:
            logprobs, entropy = self.lm.logprobs(batch, temperature)
            loss_of(logprobs).backward()  # type: ignore[no-untyped-call]
        totals.add(batch, logprobs.detach(), entropy, scalars)

    @torch.no_grad()
    def update_model(self) -> None:
        """Rounds the float32 weights to those that the model computes with, where they are not the same."""
        for name, parameter in trained_parameters(self.model).items():
            if parameter is not self.parameters[name]:
                parameter.copy_(self.parameters[name])

    def write_checkpoint(self, folder: Path) -> None:
        """Everything the next step depends on, in safetensors and JSON."""
        save_file({name: p.detach().contiguous() for name, p in self.parameters.items()}, folder / "model.safetensors")
        moments = {
            f"{name}.{moment}": self.optimizer.state[parameter][moment].contiguous()
            for name, parameter in self.parameters.items()
            for moment in MOMENTS
            if parameter in self.optimizer.state
        }
        save_file({**moments, "rng_state": torch.get_rng_state()}, folder / "optimizer.safetensors")
        state = {"step": self.step, "consumed": self.consumed, "frozen_digest": self.frozen_digest}
        (folder / "state.json").write_text(json.dumps(state) + "\n")

    def read_checkpoint(self, folder: Path) -> None:
        """Takes the exact state of a checkpoint. Raises StoreError where it is of another model."""
        weights = load_file(folder / "model.safetensors", device=self.config.device)
        if weights.keys() != self.parameters.keys():
            odd = sorted(weights.keys() ^ self.parameters.keys())[:3]
            raise StoreError(f"{folder} is of another model than this run's: they differ in {', '.join(odd)}.")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
        self.update_model()
        moments = load_file(folder / "optimizer.safetensors")
        torch.set_rng_state(moments.pop("rng_state"))
        for key, value in moments.items():
            name, _, moment = key.rpartition(".")
            self.optimizer.state[self.parameters[name]][moment] = value.to(self.config.device)
        state = json.loads((folder / "state.json").read_text())
        if state.get("frozen_digest") != self.frozen_digest:
            raise StoreError(
                f"{folder} was trained on other frozen weights than model.name_or_path = "
                f"{self.recipe.model.name_or_path!r} holds now. Restore that model."
            )
        self.step, self.consumed = state["step"], state["consumed"]


def chooses_attention(recipe: Recipe, model: PreTrainedModel) -> bool:
    """Whether the kind of attention is to be chosen for each micro-batch by its size."""
    return (
        recipe.trainer.bf16
        and recipe.trainer.device == "cpu"
        and recipe.model.attn_implementation is None
        and model.config._attn_implementation == "sdpa"
    )


def attention_by_size(model: PreTrainedModel, num_scores: int, is_compiled: bool) -> str:
    """The kind of attention for so many pairs of tokens: that which keeps their chances, where they are few."""
    sizes = model.config.get_text_config(decoder=True)
    num_kept = num_scores * sizes.num_hidden_layers * sizes.num_attention_heads
    if num_kept * model.dtype.itemsize > KEPT_BYTES:
        return "sdpa"
    return KEPT_COMPILED if is_compiled else KEPT


def scheduled_learning_rate(config: TrainerConfig, step: int) -> float:
    """Of the step numbered `step` from 0: a linear warm-up, then constant, or a half cosine to its least."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_scheduler_type == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps)
    above_least = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_rate + (1 - config.min_lr_rate) * above_least)
