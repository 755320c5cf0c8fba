"""GRPO against the sampler, at whatever lag: clipped, or importance-weighted.

Shapes: G completions of one prompt, B completions, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from oapl.losses.ratios import check_batch, check_count, token_log_ratio

LossType = Literal["grpo", "dr_grpo", "dapo"]
ImportanceSampling = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

STD_FLOOR = 1e-4
"""Added to a group's standard deviation, as TRL does."""


def group_advantages(rewards: Tensor, scale_rewards: Literal["group", "none"]) -> Tensor:
    """R - mean(R) of each group along the last axis; with "group" divided by its standard deviation.

    Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; "none" is Dr. GRPO's (Liu et al. 2025, arXiv 2503.20783).
    """
    centered = rewards - rewards.mean(-1, keepdim=True)
    if scale_rewards == "none":
        return centered
    return centered / (rewards.std(-1, keepdim=True) + STD_FLOOR)


def grpo_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_sampling: ImportanceSampling = "none",
    importance_sampling_clip_max: float = 2.0,
    loss_type: LossType = "dapo",
    num_completions: int,
    num_tokens: int,
    max_completion_length: int,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The token losses below, summed over each completion and normalized by `loss_type`.

    With r_t = pi_theta / pi_sampler of a token and advantage A, a token's loss is

    - `importance_sampling = "none"`: -min(r_t A, clip(r_t, 1 - epsilon, 1 + epsilon_high) A), the clipped surrogate
      of PPO with the sampler as the old policy; epsilon_high is epsilon where it is None;
    - otherwise -w A log pi_theta in gradient, without a clip: w, of which no gradient is taken, is r_t ("token") or
      the completion's product of them ("sequence"), and beyond `importance_sampling_clip_max` it is set to
      that ("truncate") or to 0 ("mask"). TRL's loss is the same, on batches that it steps on once.

    Normalization: "grpo" means over a completion's tokens, then over completions; "dr_grpo" divides the sum by
    num_completions * max_completion_length; "dapo" by num_tokens (Yu et al. 2025, arXiv 2503.14476, eq. 12). The
    counts are those of the whole optimizer step; `logprobs`, `sampler_logprobs`, `mask` have shape [B, T] and
    `advantages` [B].

    The metric `clip_share` is the share of the step's tokens on which the clip or the cap acts, whatever `loss_type`.
    Raises ValueError where shapes disagree or a setting is out of range.
    """
    check_batch(logprobs, sampler_logprobs, mask, advantages)
    check_count("num_completions", num_completions)
    check_count("num_tokens", num_tokens)
    check_count("max_completion_length", max_completion_length)
    log_ratio_BT = token_log_ratio(logprobs, sampler_logprobs, mask)
    if importance_sampling == "none":
        high = epsilon if epsilon_high is None else epsilon_high
        loss_BT, clipped_BT = clipped_surrogate(log_ratio_BT, advantages[:, None], epsilon, high)
    else:
        weight_BT, clipped_BT = importance_weight(
            log_ratio_BT.detach(), importance_sampling, importance_sampling_clip_max
        )
        on_policy_ratio_BT = (log_ratio_BT - log_ratio_BT.detach()).exp()  # 1, with the gradient of log pi_theta
        loss_BT = -weight_BT * advantages[:, None] * on_policy_ratio_BT
    scale_B1 = token_scale(mask, loss_type, num_completions, num_tokens, max_completion_length)
    loss = torch.where(mask.bool(), loss_BT * scale_B1, 0.0).sum()
    return loss, {"clip_share": (clipped_BT & mask.bool()).sum() / num_tokens}


def clipped_surrogate(
    log_ratio_BT: Tensor, advantages_B1: Tensor, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """Each token's loss, and where the clip acts."""
    if not (0 < epsilon < 1 and epsilon_high > 0):
        raise ValueError(f"epsilon = {epsilon} must lie between 0 and 1 and epsilon_high = {epsilon_high} above 0")
    ratio_BT = log_ratio_BT.exp()
    free_BT = ratio_BT * advantages_B1
    clipped_BT = ratio_BT.clamp(1 - epsilon, 1 + epsilon_high) * advantages_B1
    return -torch.minimum(free_BT, clipped_BT), (clipped_BT < free_BT).detach()


def importance_weight(log_ratio_BT: Tensor, kind: ImportanceSampling, clip_max: float) -> tuple[Tensor, Tensor]:
    """Each token's weight, broadcast over the completion for the sequence kinds, and where the cap acts."""
    if kind not in get_args(ImportanceSampling):
        raise ValueError(f"importance_sampling = {kind!r} must be one of {', '.join(get_args(ImportanceSampling))}")
    if not (clip_max >= 1 and math.isfinite(clip_max)):
        raise ValueError(f"importance_sampling_clip_max = {clip_max} must be finite and at least 1")
    level, act = kind.split("_")
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
    beyond_BT = log_ratio_BT > math.log(clip_max)
    weight_BT = log_ratio_BT.clamp(max=math.log(clip_max)).exp()
    return (weight_BT if act == "truncate" else torch.where(beyond_BT, 0.0, weight_BT)), beyond_BT


def token_scale(
    mask: Tensor, loss_type: LossType, num_completions: int, num_tokens: int, max_completion_length: int
) -> Tensor:
    """What a token's loss is multiplied by, shape [B, 1]."""
    if loss_type == "grpo":
        return 1 / (mask.sum(-1, keepdim=True).clamp(min=1) * num_completions)
    if loss_type == "dr_grpo":
        return torch.full_like(mask[:, :1], 1 / (num_completions * max_completion_length), dtype=torch.float32)
    if loss_type == "dapo":
        return torch.full_like(mask[:, :1], 1 / num_tokens, dtype=torch.float32)
    raise ValueError(f"loss_type = {loss_type!r} must be one of {', '.join(get_args(LossType))}")
