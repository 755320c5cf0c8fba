"""Estimates of a prompt's value from the rewards of its group.

Shapes: G completions of one prompt.
"""

from __future__ import annotations

import math

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


def leave_one_out_value(rewards: Tensor, beta1: float) -> Tensor:
    """For each completion the optimal value of the group's others, so that no completion is measured by itself.

    `rewards` and the result have shape [..., G]. beta1 = inf gives the leave-one-out mean (Ahmadian et al. 2024,
    arXiv 2402.14740). Raises ValueError for a group of fewer than two.
    """
    if rewards.ndim == 0 or rewards.shape[-1] < 2:
        raise ValueError(f"rewards need shape [..., G] with G >= 2, got {list(rewards.shape)}")
    num_generations = rewards.shape[-1]
    others = [torch.cat([rewards[..., :i], rewards[..., i + 1 :]], -1) for i in range(num_generations)]
    return optimal_value(torch.stack(others, -2), beta1)
