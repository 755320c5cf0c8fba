"""The OAPL loss against numbers derived by hand, its optimum, and its variants.

Shapes: G completions of one prompt, B completions, T tokens.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, tensor

from oapl.losses import oapl_loss, optimal_value

NAN, INF = math.nan, math.inf

# The hand-derived example, beta2 = 0.5.
#   row 0: l = (-1.0 + 1.5) + (-2.0 + 1.0) + (-0.5 + 0.5) = -0.5,  beta2 l - A = -0.25 - 0.25 = -0.5
#   row 1: l = (-0.25 + 1.25) + (-0.75 + 1.75)            =  2.0,  beta2 l - A =  1.00 + 0.50 =  1.5
LOGPROBS = [[-1.0, -2.0, -0.5], [-0.25, -0.75, 0.0]]
SAMPLER_LOGPROBS = [[-1.5, -1.0, -0.5], [-1.25, -1.75, 0.0]]
MASK = [[True, True, True], [True, True, False]]
ADVANTAGES = [0.25, -0.5]
BETA2 = 0.5


def example(**changes: Tensor) -> dict[str, Tensor]:
    arguments = {
        "logprobs": tensor(LOGPROBS),
        "sampler_logprobs": tensor(SAMPLER_LOGPROBS),
        "mask": tensor(MASK),
        "advantages": tensor(ADVANTAGES),
    }
    return {**arguments, **changes}


def loss_and_gradient(
    arguments: dict[str, Tensor], beta2: float = BETA2, num_completions: int = 2, **settings: bool
) -> tuple[Tensor, Tensor]:
    logprobs = arguments["logprobs"].clone().requires_grad_()
    loss, _ = oapl_loss(**{**arguments, "logprobs": logprobs}, beta2=beta2, num_completions=num_completions, **settings)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad


def test_the_loss_is_the_mean_squared_residual():
    loss, metrics = oapl_loss(**example(), beta2=BETA2, num_completions=2)
    assert loss.item() == pytest.approx(((-0.5) ** 2 + 1.5**2) / 2)
    assert metrics["residual"].item() == pytest.approx((-0.5 + 1.5) / 2)


def test_the_gradient_is_two_beta2_times_the_residual_on_every_token_of_a_completion():
    _, gradient = loss_and_gradient(example())
    row_0, row_1 = 2 * BETA2 * -0.5 / 2, 2 * BETA2 * 1.5 / 2
    torch.testing.assert_close(gradient, tensor([[row_0] * 3, [row_1, row_1, 0.0]]))


def test_the_average_is_over_the_completions_of_the_step_not_of_the_micro_batch():
    loss, metrics = oapl_loss(**example(), beta2=BETA2, num_completions=8)
    assert loss.item() == pytest.approx(2.5 / 8)
    assert metrics["residual"].item() == pytest.approx(1.0 / 8)


# The optimum


def test_the_exact_optimum_has_zero_loss_and_zero_gradient():
    # Three answers exist, with probabilities 1/2, 1/4, 1/4 under the sampler, so the group (a, a, b, c) *is* its
    # distribution and V^ is V* exactly. Then pi* = pi_old exp((R - V*) / beta), with beta1 = beta2 = beta.
    beta = 0.7
    old_G = tensor([0.5, 0.5, 0.25, 0.25], dtype=torch.float64)
    reward_G = tensor([1.0, 1.0, 0.0, 0.5], dtype=torch.float64)
    advantage_G = reward_G - optimal_value(reward_G, beta)
    best_G = old_G * (advantage_G / beta).exp()
    assert (best_G[0] + best_G[2] + best_G[3]).item() == pytest.approx(1.0, abs=1e-12)  # a distribution: V* is right
    # Two tokens an answer; how its log-probs are shared between them does not matter.
    arguments = {
        "logprobs": torch.stack([best_G.log() * 0.3, best_G.log() * 0.7], dim=-1),
        "sampler_logprobs": torch.stack([old_G.log() * 0.9, old_G.log() * 0.1], dim=-1),
        "mask": torch.ones(4, 2, dtype=torch.bool),
        "advantages": advantage_G,
    }
    loss, gradient = loss_and_gradient(arguments, beta2=beta, num_completions=4)
    assert loss < 1e-24
    assert gradient.abs().max() < 1e-12


def floor_of_the_loss(beta2: float) -> float:
    """The least loss of any policy on one prompt, half of whose answers are right, with beta1 = 1.

    Such a policy is w = pi / pi_old of the right answers, 2 - w of the wrong ones, w in (0, 2).
    """
    rewards = tensor([1.0, 0.0], dtype=torch.float64)
    advantages = rewards - optimal_value(rewards, 1.0)
    wrong = torch.logspace(-300, 0, 200_001, dtype=torch.float64)  # 2 - w, down to -690 nats
    residual_right = beta2 * (2 - wrong).log() - advantages[0]
    residual_wrong = beta2 * wrong.log() - advantages[1]
    return ((residual_right.square() + residual_wrong.square()) / 2).min().item()


@pytest.mark.parametrize(("beta2", "floor"), [(1.0, 0.0), (0.1, 0.048), (0.01, 0.0696), (0.001, 0.0719)])
def test_the_loss_cannot_reach_zero_where_beta2_is_below_beta1(beta2: float, floor: float):
    assert floor_of_the_loss(beta2) == pytest.approx(floor, abs=1e-3)


# The variants


def test_rescaling_divides_loss_and_gradient_by_two_beta2_and_moves_no_minimum():
    loss, gradient = loss_and_gradient(example(), beta2=0.1)
    rescaled_loss, rescaled_gradient = loss_and_gradient(example(), beta2=0.1, rescale=True)
    assert rescaled_loss.item() == pytest.approx(loss.item() / 0.2)
    torch.testing.assert_close(rescaled_gradient, gradient / 0.2)
    # At rest: l = A / beta2, on the first token. There both gradients are 0.
    at_rest = example()
    at_rest["logprobs"] = at_rest["sampler_logprobs"].clone()
    at_rest["logprobs"][:, 0] += at_rest["advantages"] / 0.1
    for rescale in (False, True):
        assert loss_and_gradient(at_rest, beta2=0.1, rescale=rescale)[1].abs().max() < 1e-6


@pytest.mark.parametrize("beta2", [1e-3, 0.1, 1.0])
def test_rescaled_the_gradient_starts_as_a_policy_gradient_whatever_beta2(beta2: float):
    at_start = example(logprobs=tensor(SAMPLER_LOGPROBS))  # l = 0
    _, gradient = loss_and_gradient(at_start, beta2=beta2, rescale=True)
    torch.testing.assert_close(gradient, tensor([[-0.25 / 2] * 3, [0.5 / 2, 0.5 / 2, 0.0]]))


def test_the_per_token_mean_divides_the_log_ratio_by_the_completion_s_own_length():
    # row 0: l / 3 = -1/6, beta2 l / 3 - A = -1/12 - 1/4 = -1/3.   row 1: l / 2 = 1, 1/2 + 1/2 = 1.
    loss, gradient = loss_and_gradient(example(), per_token_mean=True)
    assert loss.item() == pytest.approx(((1 / 3) ** 2 + 1) / 2)
    row_0, row_1 = 2 * BETA2 * (-1 / 3) / 2 / 3, 2 * BETA2 * 1 / 2 / 2
    torch.testing.assert_close(gradient, tensor([[row_0] * 3, [row_1, row_1, 0.0]]))
    _, metrics = oapl_loss(**example(), beta2=BETA2, num_completions=2, per_token_mean=True)
    assert metrics["residual"].item() == pytest.approx((-1 / 3 + 1) / 2)


# Precision


def test_bfloat16_log_probs_are_summed_in_float32():
    # Each token's ratio is 4 - 2^-7, which takes 9 binary digits: bfloat16, with 8, would round it to 4, and a sum
    # in bfloat16 would stop growing long before the 4,096th token. In float32 every partial sum is exact.
    num_tokens, ratio = 4096, 4 - 2**-7
    loss, metrics = oapl_loss(
        torch.full((1, num_tokens), -(2**-7), dtype=torch.bfloat16),
        torch.full((1, num_tokens), -4.0, dtype=torch.bfloat16),
        torch.ones(1, num_tokens, dtype=torch.bool),
        tensor([0.0]),
        beta2=1.0,
        num_completions=1,
    )
    assert metrics["residual"].item() == num_tokens * ratio == 16352
    assert loss.item() == 16352**2
    assert loss.dtype == torch.float32


# What is refused


@pytest.mark.parametrize("beta2", [0.0, -1e-3, NAN, INF])
def test_beta2_must_be_positive_and_finite(beta2: float):
    with pytest.raises(ValueError, match=rf"beta2 = {beta2} must be positive"):
        oapl_loss(**example(), beta2=beta2, num_completions=2)


# Ways to get it wrong that would go unnoticed


def test_the_usual_mistakes_give_other_numbers():
    # Two completions of two tokens, one right: R = (1, 0), beta1 = 1, beta2 = 0.5, l = (0.4, 0.6).
    rewards, beta2 = tensor([1.0, 0.0]), 0.5
    logprobs = tensor([[-1.0, -1.0], [-2.0, -1.0]])
    sampler_logprobs = tensor([[-1.1, -1.3], [-2.4, -1.2]])
    value = optimal_value(rewards, 1.0)
    loss, _ = oapl_loss(
        logprobs,
        sampler_logprobs,
        torch.ones(2, 2, dtype=torch.bool),
        rewards - value,
        beta2=beta2,
        num_completions=2,
    )

    def by_hand(log_ratios: tuple[float, float], v: float) -> float:
        return ((beta2 * log_ratios[0] - (1 - v)) ** 2 + (beta2 * log_ratios[1] - (0 - v)) ** 2) / 2

    right = by_hand((0.4, 0.6), math.log((math.e + 1) / 2))
    assert loss.item() == pytest.approx(right, rel=1e-5)
    per_token_mean = by_hand((0.2, 0.3), math.log((math.e + 1) / 2))
    value_without_log_g = by_hand((0.4, 0.6), math.log(math.e + 1))
    mean_reward = by_hand((0.4, 0.6), 0.5)
    for wrong in (per_token_mean, value_without_log_g, mean_reward):
        assert abs(wrong - right) > 0.1 * right
