"""Losses and value estimates: pure functions of tensors, one file a loss."""

from oapl.losses.oapl import oapl_loss, optimal_value, sequence_log_ratio

__all__ = ["oapl_loss", "optimal_value", "sequence_log_ratio"]
