"""Estimates of a prompt's value against their definitions. Shapes: G completions of one prompt."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, tensor

from oapl.losses import leave_one_out_value, optimal_value

NAN, INF = math.nan, math.inf


# The optimal value


@pytest.mark.parametrize(
    ("num_right", "value"),
    # V^ = log((k e + 8 - k) / 8), e.g. k = 1: log((2.71828 + 7) / 8) = log(1.21479) = 0.195
    [(0, 0.0), (1, 0.195), (2, 0.357), (4, 0.620), (6, 0.828), (8, 1.0)],
)
def test_value_of_eight_completions_of_which_k_are_right(num_right: int, value: float):
    rewards = tensor([1.0] * num_right + [0.0] * (8 - num_right))
    assert optimal_value(rewards, 1.0).item() == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize(("num_right", "total"), [(1, -0.56), (2, -0.86), (4, -0.96), (6, -0.62), (8, 0.0)])
def test_the_advantages_of_a_group_never_sum_above_zero(num_right: int, total: float):
    rewards = tensor([1.0] * num_right + [0.0] * (8 - num_right))
    advantages = rewards - optimal_value(rewards, 1.0)
    assert advantages.sum().item() == pytest.approx(total, abs=6e-3)


def plain_value(rewards: Tensor, beta1: float) -> Tensor:
    """The definition, in float64: beta1 (log sum exp(R / beta1) - log G)."""
    return beta1 * ((rewards.double() / beta1).logsumexp(-1) - math.log(rewards.shape[-1]))


REWARDS = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
BETAS = (1e-4, 1e-2, 0.3, 1.0, 5.0, 100.0, 1e6)


@pytest.mark.parametrize("beta1", BETAS)
def test_the_value_lies_between_the_mean_and_the_best_reward(beta1: float):
    values = optimal_value(REWARDS, beta1)
    assert (values >= REWARDS.mean(-1) - 1e-6).all()
    assert (values <= REWARDS.amax(-1) + 1e-6).all()


@pytest.mark.parametrize("beta1", BETAS)
@pytest.mark.parametrize("rewards", [REWARDS, (REWARDS > 0).float()], ids=["real", "0/1"])
def test_the_value_in_float32_matches_the_definition_in_float64(rewards: Tensor, beta1: float):
    values = optimal_value(rewards, beta1)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), plain_value(rewards, beta1), atol=1e-6, rtol=1e-6)


def test_tiny_and_huge_beta1_have_their_known_limits_in_float32():
    rewards = tensor([1.0, 0.0, 0.0, 0.0])
    # beta1 -> 0: max - beta1 log 4. beta1 -> infinity: mean + variance / (2 beta1), here 0.25 + 0.1875 / 2e6.
    assert optimal_value(rewards, 1e-4).item() == pytest.approx(1 - 1e-4 * math.log(4), abs=1e-7)
    assert optimal_value(rewards, 1e6).item() == pytest.approx(0.25 + 0.1875 / 2e6, abs=3e-8)


def test_rewards_far_from_zero_lose_no_digits():
    # V^(R + c) = V^(R) + c, and 1000 is exact in float32 up to 6e-5.
    shifted = optimal_value(tensor([1000.0, 1001.0]), 1.0)
    assert shifted.item() == pytest.approx(1000 + math.log((1 + math.e) / 2), abs=6e-5)


def test_infinite_beta1_gives_the_mean():
    assert torch.equal(optimal_value(REWARDS, INF), REWARDS.mean(-1))


def test_leading_axes_are_groups_of_their_own():
    values = optimal_value(REWARDS.view(4, 50, 8), 1.0)
    assert torch.equal(values, optimal_value(REWARDS, 1.0).view(4, 50))


def test_whole_number_rewards_are_rewards_too():
    assert optimal_value(tensor([1, 0]), 1.0).item() == pytest.approx(math.log((math.e + 1) / 2))


@pytest.mark.parametrize("beta1", [0, 0.0, -1.0, NAN, -INF])
def test_beta1_must_be_positive(beta1: float):
    with pytest.raises(ValueError, match=rf"beta1 = {beta1} must be positive"):
        optimal_value(REWARDS, beta1)


@pytest.mark.parametrize(("rewards", "shape"), [(torch.zeros(3, 0), r"\[3, 0\]"), (tensor(1.0), r"\[\]")])
def test_a_value_needs_a_group(rewards: Tensor, shape: str):
    with pytest.raises(ValueError, match=rf"shape \[..., G\] with G >= 1, got {shape}"):
        optimal_value(rewards, 1.0)


# The leave-one-out value


@pytest.mark.parametrize("beta1", [1e-2, 1.0, 5.0, INF])
@pytest.mark.parametrize("num_generations", [2, 8])
def test_each_completion_is_valued_by_the_others_of_its_group(beta1: float, num_generations: int):
    rewards = REWARDS[:5, :num_generations].double()
    values = leave_one_out_value(rewards, beta1)
    for g in range(5):
        for i in range(num_generations):
            others = tensor([rewards[g, j].item() for j in range(num_generations) if j != i], dtype=torch.float64)
            expected = others.mean() if beta1 == INF else plain_value(others, beta1)
            assert values[g, i].item() == pytest.approx(expected.item(), abs=1e-12)


def test_infinite_beta1_gives_the_baseline_of_rloo():
    # RLOO's advantage is G / (G - 1) times the reward less the mean: here 4/3 of (0.75, -0.25, -0.25, -0.25).
    rewards = tensor([1.0, 0.0, 0.0, 0.0])
    assert (rewards - leave_one_out_value(rewards, INF)).tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert leave_one_out_value(rewards, INF).tolist() == pytest.approx([0.0, 1 / 3, 1 / 3, 1 / 3])


def test_a_completion_s_own_reward_does_not_move_its_leave_one_out_value():
    rewards = tensor([1.0, 0.0, 0.5])
    changed = tensor([100.0, 0.0, 0.5])
    assert leave_one_out_value(rewards, 1.0)[0] == leave_one_out_value(changed, 1.0)[0]
    assert leave_one_out_value(rewards, 1.0)[1] != leave_one_out_value(changed, 1.0)[1]


@pytest.mark.parametrize(("rewards", "shape"), [(torch.zeros(3, 1), r"\[3, 1\]"), (tensor(1.0), r"\[\]")])
def test_leaving_one_out_needs_two(rewards: Tensor, shape: str):
    with pytest.raises(ValueError, match=rf"G >= 2, got {shape}"):
        leave_one_out_value(rewards, 1.0)
