"""What a step tells of itself: metrics of the sampled groups, and of the policy's distance to its sampler."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from oapl.batching import Batch
from oapl.losses import sequence_log_ratio
from oapl.types import Shard


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
