"""REINFORCE and its baseline. Shapes: G completions of one prompt, B completions, T tokens."""

from __future__ import annotations

import pytest
import torch
from torch import tensor

from loss_examples import COUNTS, random_batch, reinforce, value_and_gradient
from oapl.losses import reinforce_loss


def test_the_value_is_minus_the_mean_of_advantage_times_log_ratio():
    # l = (0.5 - 1.0, 2.0), A = (0.25, -0.5): -(0.25 * -0.5 - 0.5 * 2.0) / 2 = 0.5625
    loss, metrics = reinforce_loss(
        tensor([[-1.0, -2.0], [-0.25, 9.0]]),
        tensor([[-1.5, -1.0], [-2.25, 9.0]]),
        tensor([[True, True], [True, False]]),
        tensor([0.25, -0.5]),
        num_completions=2,
    )
    assert loss.item() == pytest.approx(0.5625)
    assert metrics == {}


@pytest.mark.parametrize("lag", [0.0, 1.0, 50.0])
def test_the_gradient_is_minus_the_advantage_on_each_token_at_any_lag(lag: float):
    batch = random_batch()
    batch["logprobs"] = batch["sampler_logprobs"] + lag
    _, gradient_BT, _ = value_and_gradient(reinforce, batch)
    expected_BT = torch.where(batch["mask"], -batch["advantages"][:, None] / COUNTS["num_completions"], 0.0)
    torch.testing.assert_close(gradient_BT, expected_BT)
