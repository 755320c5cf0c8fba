"""Log-ratios of the policy to its sampler, and the checks that all losses share.

Shapes: B completions, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_batch(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, advantages: Tensor) -> None:
    """Raises ValueError where shapes disagree."""
    if not (logprobs.ndim == 2 and logprobs.shape == sampler_logprobs.shape == mask.shape):
        raise ValueError(
            f"logprobs, sampler_logprobs and mask need one shape [B, T], got {list(logprobs.shape)}, "
            f"{list(sampler_logprobs.shape)} and {list(mask.shape)}"
        )
    if advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"advantages need shape [{logprobs.shape[0]}], got {list(advantages.shape)}")


def check_count(name: str, value: int) -> None:
    """Raises ValueError for a count below 1."""
    if value < 1:
        raise ValueError(f"{name} = {value} must be at least 1")


def token_log_ratio(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi_theta - log pi_sampler of each token in nats, [B, T], float32 or better; 0 where the mask is False.

    Values under a False mask are never read, so they may be anything, and their gradient is 0.
    """
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    ratio_BT = logprobs.to(dtype) - sampler_logprobs.to(dtype)
    return torch.where(mask.bool(), ratio_BT, torch.zeros_like(ratio_BT))


def sequence_log_ratio(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """l_B: the log-ratio of whole completions in nats, summed in float32 or better, with no division by length."""
    return token_log_ratio(logprobs, sampler_logprobs, mask).sum(-1)
