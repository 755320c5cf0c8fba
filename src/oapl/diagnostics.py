"""What a step tells of itself: metrics of the sampled groups, and of the policy's distance to their sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oapl.batching import Batch
from oapl.losses import sequence_log_ratio
from oapl.objective import Objective
from oapl.types import Shard

LISTS = ("_log_ratios", "_marks", "_advantages", "_entropies", "_gaps", "_num_tokens")
"""Of a `StepTotals`, with one tensor for each micro-batch."""


class StepTotals:
    """Sums over a step's completions, gathered micro-batch by micro-batch without waiting for the device."""

    def __init__(self) -> None:
        self._scalars: dict[str, Tensor] = {}
        self._log_ratios: list[Tensor] = []
        self._marks: list[Tensor] = []
        self._advantages: list[Tensor] = []
        self._entropies: list[Tensor] = []
        self._gaps: list[Tensor] = []
        self._num_tokens: list[Tensor] = []
        self._num_computed_tokens = 0

    def add(self, batch: Batch, logprobs: Tensor, entropy: Tensor, scalars: Mapping[str, Tensor]) -> None:
        for name, value in scalars.items():
            self._scalars[name] = self._scalars.get(name, torch.zeros_like(value)) + value
        self._log_ratios.append(sequence_log_ratio(logprobs, batch.sampler_logprobs, batch.mask))
        self._marks.append(batch.marks)
        self._advantages.append(batch.advantages)
        self._entropies.append(torch.where(batch.mask, entropy, 0.0).sum())
        self._gaps.append(torch.where(batch.mask, (logprobs - batch.sampler_logprobs).abs(), 0.0).sum())
        self._num_tokens.append(batch.mask.sum(-1))
        self._num_computed_tokens += batch.num_computed_tokens

    def __getstate__(self) -> dict[str, Any]:
        """As they go to another rank: in the memory of the host."""
        return {
            "_scalars": {name: value.cpu() for name, value in self._scalars.items()},
            **{kind: [value.cpu() for value in getattr(self, kind)] for kind in LISTS},
            "_num_computed_tokens": self._num_computed_tokens,
        }

    @classmethod
    def of_all(cls, parts: Sequence[StepTotals]) -> StepTotals:
        """Those of all ranks together, each rank's after the one's before."""
        if len(parts) == 1:
            return parts[0]
        totals = cls()
        for part in parts:
            for name, value in part._scalars.items():
                totals._scalars[name] = totals._scalars.get(name, torch.zeros_like(value)) + value
            for kind in LISTS:
                getattr(totals, kind).extend(getattr(part, kind))
            totals._num_computed_tokens += part._num_computed_tokens
        return totals

    def metrics(self, success_threshold: float, objective: Objective) -> dict[str, float]:
        """`ratio_right`: the mean of exp(l) over right completions, which estimates by how much the policy's chance of
        a right answer is that of its sampler. `token_gap`: the mean absolute log-ratio of a token; at lag 0 that is how
        far engine and trainer differ.
        """
        log_ratios, marks = torch.cat(self._log_ratios), torch.cat(self._marks)
        advantages = torch.cat(self._advantages)
        lengths = torch.cat(self._num_tokens)
        num_tokens = lengths.sum().item()
        fitted = log_ratios / lengths if objective.per_token_mean else log_ratios
        right = marks >= success_threshold
        metrics = {name: value.item() for name, value in self._scalars.items()}
        for name, chosen in (
            ("log_ratio", log_ratios),
            ("log_ratio_right", log_ratios[right]),
            ("log_ratio_wrong", log_ratios[~right]),
        ):
            if len(chosen):
                metrics[name] = chosen.mean().item()
        if right.any():
            metrics["ratio_right"] = log_ratios[right].double().exp().mean().item()
        return {
            **metrics,
            "effective_share": effective_share(log_ratios),
            "advantage": advantages.mean().item(),
            **(fit_metrics(fitted, advantages, objective.beta2) if objective.beta2 is not None else {}),
            "entropy": torch.stack(self._entropies).sum().item() / num_tokens,
            "token_gap": torch.stack(self._gaps).sum().item() / num_tokens,
            "num_trained_completions": len(marks),
            "num_computed_tokens": self._num_computed_tokens,
        }


def effective_share(log_ratios: Tensor) -> float:
    """Effective sample size of completions weighted by exp(l), as a share of their number: (sum w)^2 / (N sum w^2).

    1 where the policy is its sampler; 1/N where one completion outweighs all others (Kong 1992).
    """
    weights = (log_ratios.double() - log_ratios.max()).exp()
    return (weights.sum().square() / (len(weights) * weights.square().sum())).item()


def fit_metrics(log_ratios: Tensor, advantages: Tensor, beta2: float) -> dict[str, float]:
    """How well beta2 * l fits the advantage: the residual's spread, and R^2 against the best constant fit.

    R^2 is 0 where nothing is explained, 1 at a perfect fit, and below 0 where the fit is worse than none; it is left
    out where all advantages are equal.
    """
    advantages = advantages.double()
    residuals = beta2 * log_ratios.double() - advantages
    spread = (advantages - advantages.mean()).square().mean()
    metrics = {"residual_std": residuals.std(correction=0).item()}
    if spread > 0:
        metrics["r2"] = (1 - residuals.square().mean() / spread).item()
    return metrics


def shard_metrics(shard: Shard, success_threshold: float, judged_by: str | None = None) -> dict[str, float]:
    """What the sampled groups themselves say, whatever the trainer makes of them."""
    metrics: dict[str, float] = {
        "num_completions": shard.num_completions,
        "num_failed_groups": len(shard.failed),
        "num_tokens": shard.num_tokens,
        "mismatch": shard.mismatch,
        "sampling_s": shard.sampling_s,
        "grading_s": shard.grading_s,
    }
    if not shard.groups:
        return metrics
    completions = [completion for group in shard.groups for completion in group.completions]
    rewards = torch.cat([torch.from_numpy(group.rewards) for group in shard.groups])
    marks = torch.cat([torch.from_numpy(group.marks(judged_by)) for group in shard.groups])
    is_uniform = [bool((group.all_rewards == group.all_rewards[0]).all()) for group in shard.groups]
    scores: dict[str, list[float]] = {}
    for verdict in (verdict for group in shard.groups for verdict in group.verdicts):
        for name, score in verdict.scores.items():
            scores.setdefault(f"reward/{name}", []).append(score)
    return {
        "reward": rewards.mean().item(),
        "success": (marks >= success_threshold).float().mean().item(),
        **{name: sum(values) / len(values) for name, values in scores.items()},
        "uniform_share": sum(is_uniform) / len(is_uniform),
        **metrics,
        "completion_length": shard.num_tokens / len(completions),
        "truncated_share": sum(c.finish_reason == "length" for c in completions) / len(completions),
        "surprise": -sum(float(c.logprobs.sum()) for c in completions) / len(completions),
    }
