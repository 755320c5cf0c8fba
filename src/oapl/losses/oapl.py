"""The OAPL loss and its value estimate: pure functions of tensors (arXiv 2602.19362).

Shapes: G completions of one prompt, B completions, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def optimal_value(rewards: Tensor, beta1: float) -> Tensor:
    """V^ = beta1 * log(mean_i exp(R_i / beta1)), a soft maximum over the last axis.

    `rewards` has shape [..., G] and the result [...]. It lies between the mean (beta1 -> infinity) and the
    maximum (beta1 -> 0) and is computed from the differences to the mean, so no beta1 > 0 overflows or
    loses digits; beta1 = inf gives the mean. Raises ValueError for any other beta1 and for an empty group.
    """
    if not beta1 > 0:
        raise ValueError(f"beta1 = {beta1} must be positive; the paper uses 1")
    if rewards.ndim == 0 or rewards.shape[-1] == 0:
        raise ValueError(f"rewards need shape [..., G] with G >= 1, got {list(rewards.shape)}")
    if not rewards.is_floating_point():
        rewards = rewards.float()
    mean = rewards.mean(-1, keepdim=True)
    if math.isinf(beta1):
        return mean.squeeze(-1)
    x_G = (rewards - mean) / beta1
    top = x_G.amax(-1, keepdim=True)
    # mean(exp(x)) = 1 + mean(expm1(x)): exact to the last digits where x is small, the large-beta1 end.
    small = torch.log1p(torch.expm1(x_G.clamp(max=1.0)).mean(-1))
    large = top.squeeze(-1) + (x_G - top).exp().mean(-1).log()
    soft = torch.where(top.squeeze(-1) < 1.0, small, large)
    return mean.squeeze(-1) + beta1 * soft


def oapl_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    beta2: float,
    num_completions: int,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """sum_B (beta2 * l - A)^2 / num_completions, l = sum_T log pi_theta - log pi_sampler in nats.

    `logprobs`, `sampler_logprobs` and `mask` have shape [B, T]: values where the mask is False are never
    read, so they may be anything. `advantages` has shape [B]: the reward less its group's value.
    `num_completions` counts the completions of the whole optimizer step, of which these B may be a part;
    so the losses and gradients of its micro-batches add up to the step's.

    The metrics are sums over these B completions divided by `num_completions` (they add up likewise):
    `log_ratio`, the mean of l, and `residual`, the mean of beta2 * l - A. Raises ValueError where
    shapes disagree, beta2 <= 0 or num_completions < 1.
    """
    if not (logprobs.ndim == 2 and logprobs.shape == sampler_logprobs.shape == mask.shape):
        raise ValueError(
            f"logprobs, sampler_logprobs and mask need one shape [B, T], got {list(logprobs.shape)}, "
            f"{list(sampler_logprobs.shape)} and {list(mask.shape)}"
        )
    if advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"advantages need shape [{logprobs.shape[0]}], got {list(advantages.shape)}")
    if not (beta2 > 0 and math.isfinite(beta2)):
        raise ValueError(f"beta2 = {beta2} must be positive and finite; the paper uses 1e-3")
    if num_completions < 1:
        raise ValueError(f"num_completions = {num_completions} must be at least 1")
    log_ratio_B = sequence_log_ratio(logprobs, sampler_logprobs, mask)
    residual_B = beta2 * log_ratio_B - advantages
    loss = residual_B.square().sum() / num_completions
    metrics = {
        "log_ratio": log_ratio_B.detach().sum() / num_completions,
        "residual": residual_B.detach().sum() / num_completions,
    }
    return loss, metrics


def sequence_log_ratio(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """l_B: the log-ratio of whole completions in nats, summed in float32 or better, with no division by length."""
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    ratio_BT = logprobs.to(dtype) - sampler_logprobs.to(dtype)
    return torch.where(mask.bool(), ratio_BT, torch.zeros_like(ratio_BT)).sum(-1)
