"""REINFORCE with a group baseline: the plain policy gradient, blind to lag.

Shapes: B completions, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from oapl.losses.ratios import check_batch, check_count, sequence_log_ratio


def reinforce_loss(
    logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, advantages: Tensor, *, num_completions: int
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """-sum_B A * l / num_completions, whose gradient is that of -A log pi_theta(o|q) (Williams 1992).

    With the leave-one-out mean as baseline it is RLOO (Ahmadian et al. 2024, arXiv 2402.14740). It takes the
    completions for the policy's own; the sampler's log-probs only shift its value, so it is 0 where both agree.
    Shapes as in `oapl_loss`. Raises ValueError where they disagree or num_completions < 1.
    """
    check_batch(logprobs, sampler_logprobs, mask, advantages)
    check_count("num_completions", num_completions)
    log_ratio_B = sequence_log_ratio(logprobs, sampler_logprobs, mask)
    return -(advantages * log_ratio_B).sum() / num_completions, {}
