"""OAPL inside verl: importing this registers the loss `oapl` and the advantage `oapl` with verl 0.9.

`VERL_USE_EXTERNAL_MODULES=oapl.integrations.verl` in the environment of all of verl's processes imports it.

A round is one of verl's training batches: `data.train_batch_size` prompts are answered by the weights of that moment,
and trained on in mini-batches of `ppo_mini_batch_size` prompts, one optimizer step each. So L is the first divided by
the second. The anchor is what verl's trainer computes for the batch before its first step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
from verl.workers.config import PolicyLossConfig

from oapl.losses import oapl_loss, optimal_value

NAME = "oapl"
BETA1 = 5.0


@dataclass
class OAPLLossConfig(PolicyLossConfig):  # type: ignore[misc]
    """verl's `actor.policy_loss` with `beta2`, in reward per nat. Name it as that section's `_target_`."""

    loss_mode: str = NAME
    beta2: float = 0.1


@register_adv_est(NAME)  # type: ignore[untyped-decorator]
def oapl_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Rewards less the optimal value of their group, at every token: two tensors of shape [B, T], both the same.

    `token_level_rewards` and `response_mask` have shape [B, T]; `index` names the prompt of each row. `algorithm.beta1`
    is the temperature of the value, 5 by default. Raises ValueError for one that is not positive.
    """
    rewards = (token_level_rewards * response_mask).sum(-1)
    groups: dict[Any, list[int]] = defaultdict(list)
    for row, prompt in enumerate(index):
        groups[prompt].append(row)
    beta1 = float(config.get("beta1", BETA1)) if config is not None else BETA1
    advantages = torch.zeros_like(rewards)
    for rows in groups.values():
        advantages[rows] = rewards[rows] - optimal_value(rewards[rows], beta1)
    spread = advantages[:, None] * response_mask
    return spread, spread


@register_policy_loss(NAME)  # type: ignore[untyped-decorator]
def oapl_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Mapping[str, float]]:
    """`oapl.losses.oapl_loss` of a micro-batch, as its part of the mini-batch's mean over completions.

    All tensors have shape [B, T]. `loss_agg_mode` is of no use here, since a completion counts once whatever its
    length. Raises ValueError where `config.policy_loss` has no beta2, and where verl would weigh the samples.
    """
    beta2 = None if config is None else config.policy_loss.get("beta2")
    if beta2 is None:
        raise ValueError(
            "the loss oapl needs beta2: set actor_rollout_ref.actor.policy_loss._target_="
            "oapl.integrations.verl.OAPLLossConfig and +actor_rollout_ref.actor.policy_loss.beta2=0.1"
        )
    if rollout_is_weights is not None:
        raise ValueError("OAPL weighs no samples: set algorithm.rollout_correction.rollout_is=null")
    batch = config.global_batch_info
    mask = response_mask.bool()
    num_completions = int(batch.get("global_batch_size") or len(mask))
    loss, metrics = oapl_loss(
        log_prob,
        old_log_prob,
        mask,
        advantages.masked_fill(~mask, 0).sum(-1) / mask.sum(-1).clamp(min=1),
        beta2=beta2,
        num_completions=num_completions,
    )
    scale = batch.get("dp_size") or 1  # verl averages the gradients of its ranks
    return loss * scale, {"actor/residual": float(metrics["residual"]) * num_completions / len(mask)}
