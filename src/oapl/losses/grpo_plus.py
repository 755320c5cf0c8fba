"""GRPO+, DeepCoder's recipe: GRPO with a higher upper clip, no KL and no entropy term, truncated completions left out.

Agentica and Together AI 2025 (DeepCoder, the rllm scripts).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from oapl.losses.grpo import grpo_loss

EPSILON = 0.2
EPSILON_HIGH = 0.28


def grpo_plus_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    num_completions: int,
    num_tokens: int,
    max_completion_length: int,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """`grpo_loss` with epsilon 0.2, epsilon_high 0.28 and the mean over all tokens of the step.

    Truncated completions take part in their group's advantages and in nothing else: they are not among the B, nor
    in the counts.
    """
    return grpo_loss(
        logprobs,
        sampler_logprobs,
        mask,
        advantages,
        epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH,
        loss_type="dapo",
        num_completions=num_completions,
        num_tokens=num_tokens,
        max_completion_length=max_completion_length,
    )
