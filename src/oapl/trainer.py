"""The trainer's state and its one act: an optimizer step on a shard, and the exact checkpoint of it all."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from oapl.anchor import Anchor
from oapl.attention import KEPT, KEPT_COMPILED
from oapl.batching import Row, collate, group_rows, idle_batch, shared_micro_batches, step_counts
from oapl.causal_lm import take_apart
from oapl.checkpoint import read_tensors, stored_shapes, write_tensors
from oapl.config import Recipe, TrainerConfig
from oapl.diagnostics import StepTotals, shard_metrics
from oapl.errors import StoreError, TrainingError
from oapl.lora import add_lora, frozen_digest, trained_parameters
from oapl.model import checkpoint_layers, compile_parts, load_model, load_tokenizer, probe_record, write_policy
from oapl.objective import StepCounts, make_objective
from oapl.pieces import backward_in_pieces
from oapl.precision import compute_in_bfloat16, round_to_bfloat16
from oapl.sharding import ALONE, Ranks, shard
from oapl.types import Shard

KEPT_BYTES = 2**29
"""Of a micro-batch's pairs of tokens, what attention on a CPU may keep for the backward pass, all layers together."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
RNG_STATE = "rng_state"


class Trainer:
    """Weights, optimizer and step count of a run: all that a checkpoint holds."""

    def __init__(self, recipe: Recipe, source: str, ranks: Ranks = ALONE) -> None:
        self.recipe, self.config, self.ranks = recipe, recipe.trainer, ranks
        self.device = ranks.device(self.config.device)
        torch.manual_seed(recipe.seed)
        with ranks.turn():
            self._load(source)
        self.tokenizer = load_tokenizer(source)
        self.keeps_states = self.lm.has_plain_cache and not self.config.gradient_checkpointing and ranks is ALONE
        """Whether keys and values may be computed once and used again."""
        self.objective = make_objective(recipe.loss)
        self.anchor = Anchor(recipe, ranks) if recipe.recomputes_anchor else None
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=self.config.learning_rate,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            eps=self.config.adam_epsilon,
            weight_decay=self.config.weight_decay,
            fused=True,
        )
        self.step = 0
        self.consumed: list[str] = []
        """The digest of the shard that each step so far was trained on."""

    def _load(self, source: str) -> None:
        """The model, of which each of several ranks keeps its share alone."""
        recipe, config, is_alone = self.recipe, self.config, self.ranks is ALONE
        device = config.device if is_alone else "cpu"  # from where only the share goes to the rank's own
        self.model = load_model(source, "float32", device, recipe.model.attn_implementation)
        self.chooses_attention = chooses_attention(recipe, self.model)
        lm = take_apart(self.model, compile_head=config.torch_compile)
        if recipe.model.use_peft:
            add_lora(self.model, recipe.model)
        trained = trained_parameters(self.model)
        if config.bf16:
            if is_alone:
                trained = compute_in_bfloat16(self.model)
            else:
                round_to_bfloat16(p for p in self.model.parameters() if not p.requires_grad)
        if config.gradient_checkpointing:
            checkpoint_layers(self.model)
        if config.torch_compile:
            compile_parts(self.model)
        self.frozen_digest = frozen_digest(self.model) if recipe.model.use_peft else None
        self.lm = shard(lm, self.ranks, bf16=config.bf16)
        self.parameters = trained if is_alone else trained_parameters(self.model)
        """What the optimizer moves, in float32; the model's own, unless that computes in bfloat16."""

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
        max_tokens, num_ranks = self.config.max_tokens_per_microbatch, self.ranks.size
        for micro in shared_micro_batches(rows, max_tokens, self.keeps_states, num_ranks)[self.ranks.rank]:
            self.backward(micro, counts, totals)
        totals = StepTotals.of_all(self.ranks.gather(totals))
        norm = clip_gradients(list(self.parameters.values()), self.config.max_grad_norm)
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
        """Adds the gradient of a micro-batch, and what there is to tell of it. One without rows has neither, and costs
        each rank the same collectives as any."""
        temperature, max_tokens = self.recipe.sampling.temperature, self.config.max_tokens_per_microbatch
        is_long = len(rows) == 1 and len(rows[0]) > max_tokens and self.keeps_states
        if rows:
            batch = collate(rows, self.device, share_prompts=self.keeps_states and not is_long)
        else:
            batch = idle_batch(self.device)
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

        if not rows:
            self.lm.logprobs(batch, temperature)[0].sum().backward()  # type: ignore[no-untyped-call]
            return
        if is_long:
            logprobs, entropy = backward_in_pieces(self.lm, batch, temperature, max_tokens, loss_of)
        else:
            logprobs, entropy = self.lm.logprobs(batch, temperature)
            loss_of(logprobs).backward()  # type: ignore[no-untyped-call]
        totals.add(batch, logprobs.detach(), entropy, scalars)

    @torch.no_grad()
    def update_model(self) -> None:
        """Rounds the float32 weights to those that the model computes with, where it has some of its own."""
        if self.ranks is not ALONE:
            return  # a share is rounded whenever it is gathered
        for name, parameter in trained_parameters(self.model).items():
            if parameter is not self.parameters[name]:
                parameter.copy_(self.parameters[name])

    def write_policy(self, folder: Path, probe: Sequence[Sequence[int]]) -> None:
        """A plain Hugging Face model folder, with the model's own log-probs of the probe sequences."""
        record, weights = self.lm.run(probe_record, self.model, probe), self.lm.weights()
        if self.ranks.is_first:
            write_policy(self.model, self.tokenizer, folder, weights, record)

    def write_checkpoint(self, folder: Path) -> None:
        """Everything the next step depends on, in safetensors and JSON."""
        moments = {
            f"{name}.{moment}": self.optimizer.state[parameter][moment]
            for name, parameter in self.parameters.items()
            for moment in MOMENTS
            if parameter in self.optimizer.state
        }
        files = {
            "model": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "optimizer": {**moments, RNG_STATE: torch.get_rng_state()},
        }
        write_tensors(folder, files, self.ranks)
        if self.ranks.is_first:
            state = {"step": self.step, "consumed": self.consumed, "frozen_digest": self.frozen_digest}
            (folder / "state.json").write_text(json.dumps(state) + "\n")

    def read_checkpoint(self, folder: Path) -> None:
        """Takes the exact state of a checkpoint, by however many ranks it was written. Raises StoreError where it is of
        another model."""
        stored, rng_state = stored_shapes(folder), torch.get_rng_state()
        moments = {
            f"{name}.{moment}": (parameter, moment) for name, parameter in self.parameters.items() for moment in MOMENTS
        }
        expected = {name: parameter.shape for name, parameter in self.parameters.items()}
        found = {name: shape for name, shape in stored.items() if name not in moments and name != RNG_STATE}
        if found != expected:
            odd = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))[:3]
            raise StoreError(f"{folder} is of another model than this run's: they differ in {', '.join(odd)}.")
        for key, (parameter, moment) in moments.items():
            if key in stored:
                empty = torch.zeros((), device=self.device) if moment == "step" else torch.zeros_like(parameter)
                self.optimizer.state[parameter][moment] = empty
        tensors = {key: self.optimizer.state[p][moment] for key, (p, moment) in moments.items() if key in stored}
        read_tensors(folder, {**self.parameters, **tensors, RNG_STATE: rng_state}, self.ranks)
        torch.set_rng_state(rng_state)
        self.update_model()
        state = json.loads((folder / "state.json").read_text())
        if state.get("frozen_digest") != self.frozen_digest:
            raise StoreError(
                f"{folder} was trained on other frozen weights than model.name_or_path = "
                f"{self.recipe.model.name_or_path!r} holds now. Restore that model."
            )
        self.step, self.consumed = state["step"], state["consumed"]


def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scales gradients down to this norm, of all of them together and over all ranks; returns what it was."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


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
