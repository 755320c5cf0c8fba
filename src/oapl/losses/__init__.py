"""Losses, values and advantages: pure functions of tensors, one file a loss.

Every loss takes per-token log-probs of shape [B, T] and divides by the counts of the whole optimizer step, of which
its B completions may be a part: so the losses and gradients of a step's micro-batches add up to the step's. Each
returns the loss and its own metrics, which add up likewise.
"""

from oapl.losses.grpo import group_advantages, grpo_loss
from oapl.losses.grpo_plus import grpo_plus_loss
from oapl.losses.oapl import oapl_loss
from oapl.losses.ratios import sequence_log_ratio
from oapl.losses.reinforce import reinforce_loss
from oapl.losses.values import leave_one_out_value, optimal_value

__all__ = [
    "group_advantages",
    "grpo_loss",
    "grpo_plus_loss",
    "leave_one_out_value",
    "oapl_loss",
    "optimal_value",
    "reinforce_loss",
    "sequence_log_ratio",
]
