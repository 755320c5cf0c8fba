"""From the recipe's loss section to functions: which completions are trained on, their advantages, their loss.

Shapes: G completions of one prompt, B completions, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from oapl.config import GRPOConfig, GRPOPlusConfig, LossSection, OAPLConfig, ReinforceConfig
from oapl.losses import (
    group_advantages,
    grpo_loss,
    grpo_plus_loss,
    leave_one_out_value,
    oapl_loss,
    optimal_value,
    reinforce_loss,
)
from oapl.types import Completion, Group


@dataclass(frozen=True)
class StepCounts:
    """Of all completions that an optimizer step trains on; what losses divide by."""

    num_completions: int
    num_tokens: int
    max_completion_length: int


class Loss(Protocol):
    def __call__(
        self, logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, advantages: Tensor, counts: StepCounts
    ) -> tuple[Tensor, Mapping[str, Tensor]]: ...


@dataclass(frozen=True)
class Objective:
    """What a trainer needs to know of a loss."""

    advantages: Callable[[Tensor], Tensor]
    """f64[G] rewards of a group to the advantages of its completions."""
    loss: Loss
    keeps_group: Callable[[Group], bool] = lambda group: True
    keeps_completion: Callable[[Completion], bool] = lambda completion: True
    beta2: float | None = None
    """Where the loss is a regression of beta2 * log-ratio onto the advantage."""
    per_token_mean: bool = False
    """Whether that log-ratio is the mean of a completion's tokens, not their sum."""


def make_objective(config: LossSection) -> Objective:
    if isinstance(config, OAPLConfig):
        return oapl_objective(config)
    if isinstance(config, GRPOConfig):
        return grpo_objective(config)
    if isinstance(config, GRPOPlusConfig):
        return Objective(
            advantages=lambda rewards_G: group_advantages(rewards_G, "group"),
            loss=lambda logprobs, sampler, mask, advantages, counts: grpo_plus_loss(
                logprobs, sampler, mask, advantages, **vars(counts)
            ),
            keeps_completion=lambda completion: completion.finish_reason != "length",
        )
    assert isinstance(config, ReinforceConfig)
    return Objective(
        advantages=lambda rewards_G: rewards_G - leave_one_out_value(rewards_G, float("inf")),
        loss=lambda logprobs, sampler, mask, advantages, counts: reinforce_loss(
            logprobs, sampler, mask, advantages, num_completions=counts.num_completions
        ),
    )


def oapl_objective(config: OAPLConfig) -> Objective:
    value = leave_one_out_value if config.leave_one_out else optimal_value
    return Objective(
        advantages=lambda rewards_G: rewards_G - value(rewards_G, config.beta1),
        loss=lambda logprobs, sampler, mask, advantages, counts: oapl_loss(
            logprobs,
            sampler,
            mask,
            advantages,
            beta2=config.beta2,
            num_completions=counts.num_completions,
            rescale=config.rescale,
            per_token_mean=config.per_token_mean,
        ),
        keeps_group=lambda group: not config.drop_uniform_groups or group.all_rewards.min() < group.all_rewards.max(),
        beta2=config.beta2,
        per_token_mean=config.per_token_mean,
    )


def grpo_objective(config: GRPOConfig) -> Objective:
    return Objective(
        advantages=lambda rewards_G: group_advantages(rewards_G, config.scale_rewards),
        loss=lambda logprobs, sampler, mask, advantages, counts: grpo_loss(
            logprobs,
            sampler,
            mask,
            advantages,
            epsilon=config.epsilon,
            epsilon_high=config.epsilon_high,
            importance_sampling=config.importance_sampling,
            importance_sampling_clip_max=config.importance_sampling_clip_max,
            loss_type=config.loss_type,
            **vars(counts),
        ),
    )
