"""The trainer: L optimizer steps on each round, an exact checkpoint, the next policy. It never sees an engine."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from oapl.batching import Batch, collate, group_rows, micro_batches
from oapl.config import Recipe, TrainerConfig
from oapl.errors import StoreError, TrainingError
from oapl.losses import oapl_loss, sequence_log_ratio
from oapl.model import encode_prompt, load_model, load_tokenizer, next_token_logprobs, save_policy
from oapl.processes import wait_until
from oapl.store import RoundFolder, RunFolder
from oapl.tasks import make_task
from oapl.types import Shard

NUM_PROBE_SEQUENCES = 4
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Trainer:
    """Weights, optimizer and step count of a run: all that a checkpoint holds."""

    def __init__(self, recipe: Recipe, source: str) -> None:
        self.recipe, self.config = recipe, recipe.trainer
        torch.manual_seed(recipe.seed)
        self.model = load_model(source, "float32", self.config.device)
        self.tokenizer = load_tokenizer(source)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=self.config.learning_rate,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            eps=self.config.adam_epsilon,
            weight_decay=self.config.weight_decay,
        )
        self.step = 0
        self.consumed: list[str] = []
        """The digest of the shard that each step so far was trained on."""

    def train_step(self, shard: Shard, digest: str) -> dict[str, float]:
        """One optimizer step on all groups of a shard; returns its metrics."""
        rows = group_rows(shard.groups, self.recipe.loss.beta1)
        if not rows:  # every group of the step failed: nothing to learn from, and still a step of the schedule
            self.step += 1
            self.consumed.append(digest)
            return {"num_completions": 0, "num_tokens": 0, "num_failed_groups": len(shard.failed)}
        learning_rate = scheduled_learning_rate(self.config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        totals = StepTotals(self.recipe.task.success_threshold)
        for micro in micro_batches(rows, self.config.max_tokens_per_microbatch):
            self.backward(collate(micro, self.config.device), len(rows), totals)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)
        if not torch.isfinite(norm):
            raise TrainingError(
                f"step {self.step}: the gradient is not finite (norm {norm.item()}); no step was taken. "
                f"Look at this round's log-ratios, and start a new run_dir with a lower trainer.learning_rate or a "
                f"larger loss.beta2."
            )
        self.optimizer.step()
        self.step += 1
        self.consumed.append(digest)
        return {
            **totals.metrics(),
            **shard_metrics(shard),
            **totals.token_means(shard.num_tokens),
            "grad_norm": norm.item(),
            "learning_rate": learning_rate,
        }

    def backward(self, batch: Batch, num_completions: int, totals: StepTotals) -> None:
        with self.autocast():
            logprobs, entropy = next_token_logprobs(
                self.model, batch.ids, self.recipe.sampling.temperature, batch.first
            )
        loss, loss_metrics = oapl_loss(
            logprobs,
            batch.sampler_logprobs,
            batch.mask,
            batch.advantages,
            beta2=self.recipe.loss.beta2,
            num_completions=num_completions,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        totals.add(batch, logprobs.detach(), entropy, {"loss": loss.detach(), **loss_metrics})

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.config.device.partition(":")[0], torch.bfloat16, enabled=self.config.bf16)

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
        (folder / "state.json").write_text(json.dumps({"step": self.step, "consumed": self.consumed}) + "\n")

    def read_checkpoint(self, folder: Path) -> None:
        """Takes the exact state of a checkpoint. Raises StoreError where it is of another model."""
        weights = load_file(folder / "model.safetensors", device=self.config.device)
        if weights.keys() != self.parameters.keys():
            odd = sorted(weights.keys() ^ self.parameters.keys())[:3]
            raise StoreError(f"{folder} is of another model than this run's: they differ in {', '.join(odd)}.")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
        moments = load_file(folder / "optimizer.safetensors")
        torch.set_rng_state(moments.pop("rng_state"))
        for key, value in moments.items():
            name, _, moment = key.rpartition(".")
            device = "cpu" if moment == "step" else self.config.device
            self.optimizer.state[self.parameters[name]][moment] = value.to(device)
        state = json.loads((folder / "state.json").read_text())
        self.step, self.consumed = state["step"], state["consumed"]


class StepTotals:
    """Sums over a step's completions, gathered micro-batch by micro-batch without waiting for the device."""

    def __init__(self, success_threshold: float) -> None:
        self._threshold = success_threshold
        self._scalars: dict[str, torch.Tensor] = {}
        self._log_ratios: list[torch.Tensor] = []
        self._rewards: list[torch.Tensor] = []
        self._entropies: list[torch.Tensor] = []
        self._gaps: list[torch.Tensor] = []
        self._num_tokens = 0

    def add(
        self, batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor, scalars: Mapping[str, torch.Tensor]
    ) -> None:
        for name, value in scalars.items():
            self._scalars[name] = self._scalars.get(name, torch.zeros_like(value)) + value
        self._log_ratios.append(sequence_log_ratio(logprobs, batch.sampler_logprobs, batch.mask))
        self._rewards.append(batch.rewards)
        self._entropies.append(torch.where(batch.mask, entropy, 0.0).sum())
        self._gaps.append(torch.where(batch.mask, (logprobs - batch.sampler_logprobs).abs(), 0.0).sum())
        self._num_tokens += batch.ids.numel()

    def token_means(self, num_tokens: int) -> dict[str, float]:
        """`token_gap`: the mean absolute log-ratio of a token. At lag 0 that is how far engine and trainer differ."""
        return {
            "entropy": torch.stack(self._entropies).sum().item() / num_tokens,
            "token_gap": torch.stack(self._gaps).sum().item() / num_tokens,
        }

    def metrics(self) -> dict[str, float]:
        log_ratios, rewards = torch.cat(self._log_ratios), torch.cat(self._rewards)
        right = rewards >= self._threshold
        metrics = {name: value.item() for name, value in self._scalars.items()}
        metrics["num_computed_tokens"] = self._num_tokens
        for name, chosen in (("log_ratio_right", log_ratios[right]), ("log_ratio_wrong", log_ratios[~right])):
            if len(chosen):
                metrics[name] = chosen.mean().item()
        metrics["success"] = right.float().mean().item()
        return metrics


def shard_metrics(shard: Shard) -> dict[str, float]:
    """What the sampled groups themselves say, whatever the trainer makes of them."""
    completions = [completion for group in shard.groups for completion in group.completions]
    rewards = torch.tensor([group.rewards.tolist() for group in shard.groups])
    return {
        "reward": rewards.mean().item(),
        "uniform_share": (rewards == rewards[:, :1]).all(-1).float().mean().item(),
        "num_completions": len(completions),
        "num_failed_groups": len(shard.failed),
        "num_tokens": shard.num_tokens,
        "completion_length": shard.num_tokens / len(completions),
        "truncated_share": sum(c.finish_reason == "length" for c in completions) / len(completions),
        "surprise": -sum(float(c.logprobs.sum()) for c in completions) / len(completions),
        "mismatch": shard.mismatch,
        "sampling_s": shard.sampling_s,
        "grading_s": shard.grading_s,
    }


def scheduled_learning_rate(config: TrainerConfig, step: int) -> float:
    """Of the step numbered `step` from 0: a linear warm-up, then constant, or a half cosine to 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_scheduler_type == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def start_or_resume(recipe: Recipe, run: RunFolder) -> Trainer:
    """The trainer at the newest checkpoint; without one, at the model itself, which becomes checkpoint 0."""
    steps = run.checkpoint_steps()
    trainer = Trainer(recipe, source_of(recipe, run) if steps else recipe.model.name_or_path)
    if steps:
        trainer.read_checkpoint(run.checkpoint_path(steps[-1]))
    else:
        run.write_checkpoint(0, trainer.write_checkpoint)
    return trainer


def source_of(recipe: Recipe, run: RunFolder) -> str:
    """Where a resumed run takes its model's architecture from: its own policy 0, if that is whole."""
    try:
        policy = run.policy(0)
        return str(run.verified_policy_path(policy)) if policy is not None else recipe.model.name_or_path
    except StoreError:
        return recipe.model.name_or_path


def publish(trainer: Trainer, run: RunFolder) -> None:
    """Seals the trainer's weights as the policy of the round that starts at its step."""
    version = trainer.step // trainer.config.weight_sync_steps
    probe = probe_sequences(trainer, run, version)
    dtype = "bfloat16" if trainer.config.bf16 else "float32"

    def write(folder: Path) -> None:
        with trainer.autocast():
            save_policy(trainer.model, trainer.tokenizer, folder, dtype=dtype, probe=probe)

    run.publish_policy(version, trainer.step, write)


def probe_sequences(trainer: Trainer, run: RunFolder, version: int) -> list[list[int]]:
    """What the policy's probe is scored on: completions of the round before it, or else a few prompts."""
    try:
        shard = run.round(version - 1).read_shard(trainer.config.weight_sync_steps - 1) if version > 0 else None
    except StoreError:  # lost since it was trained on
        shard = None
    if shard is None:
        task = make_task(trainer.recipe.task)
        prompts = [
            task.prompt("train", index % (task.num_prompts("train") or 2**31)) for index in range(NUM_PROBE_SEQUENCES)
        ]
        encoded = [encode_prompt(trainer.tokenizer, prompt.text) for prompt in prompts]
        return [prompt_ids for prompt_ids in encoded if len(prompt_ids) > 1]
    return [
        [*group.prompt_ids.tolist(), *group.completions[0].token_ids.tolist()]
        for group in shard.groups[:NUM_PROBE_SEQUENCES]
    ]


def run_trainer(
    recipe: Recipe,
    run: RunFolder,
    should_stop: Callable[[], bool],
    on_step: Callable[[Mapping[str, Any]], None] = lambda _: None,
    fill_round: Callable[[int], None] = lambda _: None,
) -> None:
    """Trains every round of the run, from wherever its last checkpoint left it, until done or told to stop.

    `fill_round` is called at each round's start, for a run whose sampler is this same process. Of each step's
    record, `save_s` is what checkpoint and policy took before the step, `wait_s` the wait for its groups, `step_s`
    the step; a round's wall time is the sum of the three over its steps.
    """
    config = recipe.trainer
    save_steps = config.save_steps or config.weight_sync_steps
    trainer = start_or_resume(recipe, run)
    if trainer.step > 0:
        ensure_first_policy(recipe, run)
    clock = Clock()
    first = True
    while not should_stop():
        index, number = divmod(trainer.step, config.weight_sync_steps)
        if number == 0:
            publish(trainer, run)
        if trainer.step >= config.num_steps:
            return
        save_s = clock.lap()
        if number == 0 or first:
            fill_round(index)
        folder = run.round(index)
        if (number == 0 or first) and not wait_until(partial(is_ready, run, recipe, index), should_stop):
            break
        if first:
            clock, save_s, first = Clock(), 0.0, False  # what came before the round was no part of it
        if not wait_until(partial(folder.has_shard, number), should_stop):
            break
        wait_s = clock.lap()
        metrics = train_on(trainer, folder, number)
        record = {
            "step": trainer.step,
            "round": index,
            "lag": trainer.step - 1 - recipe.policy_of_round(index) * config.weight_sync_steps,
            **metrics,
            "save_s": save_s,
            "wait_s": wait_s,
            "step_s": clock.lap(),
            "time": time.time(),
        }
        run.append_metrics(record)  # before the checkpoint, so that no step it holds lacks its record
        on_step(record)
        if trainer.step % save_steps == 0 or trainer.step % config.weight_sync_steps == 0:
            save(trainer, run)
    if trainer.step not in run.checkpoint_steps():
        save(trainer, run)


def is_ready(run: RunFolder, recipe: Recipe, index: int) -> bool:
    """Whether the round is open, and of the policy it should be sampled from."""
    policy = run.policy(recipe.policy_of_round(index))
    return run.round(index).is_open() and policy in (None, run.round(index).load().policy)


def train_on(trainer: Trainer, folder: RoundFolder, number: int) -> dict[str, float]:
    try:
        shard = folder.read_shard(number)
    except StoreError as error:
        raise StoreError(f"{error}. Run the same command again: the shard is moved aside and sampled again.") from error
    return trainer.train_step(shard, folder.shard_seal(number)["digest"])


def save(trainer: Trainer, run: RunFolder) -> None:
    """Writes a checkpoint and removes the oldest, but for those that a round in work may start from again."""
    run.sync_metrics()
    run.write_checkpoint(trainer.step, trainer.write_checkpoint)
    config, ahead = trainer.config, trainer.recipe.launch.rounds_ahead
    steps = run.checkpoint_steps()
    oldest_start = (trainer.step // config.weight_sync_steps - 1 - ahead) * config.weight_sync_steps
    for step in steps[: -config.save_total_limit]:
        if not (step >= oldest_start and step % config.weight_sync_steps == 0):
            run.remove_checkpoint(step)


class Clock:
    """Seconds since the last lap."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        last, self._last = self._last, time.monotonic()
        return self._last - last


def ensure_first_policy(recipe: Recipe, run: RunFolder) -> None:
    """Seals the model itself as policy 0, where a run has none, or has it no longer."""
    if run.policy(0) is None:
        publish(Trainer(recipe, recipe.model.name_or_path), run)
