"""The OAPL loss: a regression of the log-ratio onto the advantage (Ritter et al. 2026, arXiv 2602.19362).

Shapes: B completions, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from oapl.losses.ratios import check_batch, check_count, sequence_log_ratio


def oapl_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    beta2: float,
    num_completions: int,
    rescale: bool = False,
    per_token_mean: bool = False,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """sum_B (beta2 * l - A)^2 / num_completions, l = sum_T log pi_theta - log pi_sampler in nats.

    `logprobs`, `sampler_logprobs` and `mask` have shape [B, T]: values where the mask is False are never
    read, so they may be anything. `advantages` has shape [B]: the reward less its group's value.
    `num_completions` counts the completions of the whole optimizer step.

    `rescale` divides the loss by 2 * beta2, which gives its gradient the units of a policy gradient and moves no
    minimum. `per_token_mean` divides l by the completion's length: a common variant that is not OAPL, since its
    optimum is not the policy that the method is derived from.

    The metric `residual` is the mean of beta2 * l - A. Raises ValueError where shapes disagree, beta2 <= 0 or
    num_completions < 1.
    """
    check_batch(logprobs, sampler_logprobs, mask, advantages)
    check_count("num_completions", num_completions)
    if not (beta2 > 0 and math.isfinite(beta2)):
        raise ValueError(f"beta2 = {beta2} must be positive and finite; the paper uses 1e-3")
    log_ratio_B = sequence_log_ratio(logprobs, sampler_logprobs, mask)
    if per_token_mean:
        log_ratio_B = log_ratio_B / mask.sum(-1).clamp(min=1)
    residual_B = beta2 * log_ratio_B - advantages
    loss = residual_B.square().sum() / num_completions
    if rescale:
        loss = loss / (2 * beta2)
    return loss, {"residual": residual_B.detach().sum() / num_completions}
