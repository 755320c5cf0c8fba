"""The loss against numbers derived by hand, and the ways of computing it that must not change it.

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
    arguments: dict[str, Tensor], beta2: float = BETA2, num_completions: int = 2
) -> tuple[Tensor, Tensor]:
    logprobs = arguments["logprobs"].clone().requires_grad_()
    loss, _ = oapl_loss(**{**arguments, "logprobs": logprobs}, beta2=beta2, num_completions=num_completions)
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


def test_metrics_carry_no_gradient():
    logprobs = tensor(LOGPROBS, requires_grad=True)
    _, metrics = oapl_loss(**example(logprobs=logprobs), beta2=BETA2, num_completions=2)
    assert not any(value.requires_grad for value in metrics.values())


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


# The value


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


# What must change nothing


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("where", ["logprobs", "sampler_logprobs", "both"])
def test_what_is_masked_reaches_neither_loss_nor_gradient(garbage: float, where: str):
    arguments = example()
    for name in ("logprobs", "sampler_logprobs"):
        if where in (name, "both"):
            arguments[name][1, 2] = garbage
    loss, gradient = loss_and_gradient(arguments)
    expected_loss, expected_gradient = loss_and_gradient(example())
    assert torch.equal(loss, expected_loss)
    assert torch.equal(gradient, expected_gradient)


def random_batch(num_completions: int = 8, num_tokens: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths_B = torch.randint(1, num_tokens + 1, (num_completions,), generator=generator)
    return {
        "logprobs": -torch.rand(num_completions, num_tokens, generator=generator, dtype=torch.float64),
        "sampler_logprobs": -torch.rand(num_completions, num_tokens, generator=generator, dtype=torch.float64),
        "mask": torch.arange(num_tokens) < lengths_B[:, None],
        "advantages": torch.randn(num_completions, generator=generator, dtype=torch.float64),
    }


def select(arguments: dict[str, Tensor], rows: Tensor | slice) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in arguments.items()}


@pytest.mark.parametrize("sizes", [[8], [3, 5], [1, 1, 6], [1] * 8])
def test_micro_batches_do_not_change_the_loss_or_its_gradient(sizes: list[int]):
    batch = random_batch()
    loss, gradient = loss_and_gradient(batch, num_completions=8)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [
        loss_and_gradient(select(batch, slice(start, start + size)), num_completions=8)
        for start, size in zip(starts, sizes, strict=True)
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient, rtol=1e-12, atol=0)


def test_padding_does_not_change_the_loss_or_its_gradient():
    batch = random_batch()
    loss, gradient = loss_and_gradient(batch, num_completions=8)
    padded = {
        **batch,
        "logprobs": torch.nn.functional.pad(batch["logprobs"], (2, 5), value=NAN),
        "sampler_logprobs": torch.nn.functional.pad(batch["sampler_logprobs"], (2, 5), value=7.0),
        "mask": torch.nn.functional.pad(batch["mask"], (2, 5), value=False),
    }
    padded_loss, padded_gradient = loss_and_gradient(padded, num_completions=8)
    torch.testing.assert_close(padded_loss, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(padded_gradient[:, 2:-5], gradient, rtol=1e-12, atol=0)
    assert not padded_gradient[:, :2].any()
    assert not padded_gradient[:, -5:].any()


def test_order_does_not_change_the_loss_or_its_gradient():
    batch = random_batch()
    order = torch.tensor([5, 0, 7, 3, 1, 6, 2, 4])
    loss, gradient = loss_and_gradient(batch, num_completions=8)
    shuffled_loss, shuffled_gradient = loss_and_gradient(select(batch, order), num_completions=8)
    torch.testing.assert_close(shuffled_loss, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(shuffled_gradient, gradient[order], rtol=1e-12, atol=0)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler_logprobs": torch.zeros(2, 4)}, r"one shape \[B, T\], got \[2, 3\], \[2, 4\] and \[2, 3\]"),
        ({"mask": torch.ones(2, 1, dtype=torch.bool)}, r"one shape \[B, T\], got \[2, 3\], \[2, 3\] and \[2, 1\]"),
        ({"logprobs": torch.zeros(3)}, r"one shape \[B, T\], got \[3\], \[2, 3\] and \[2, 3\]"),
        ({"advantages": torch.zeros(2, 1)}, r"advantages need shape \[2\], got \[2, 1\]"),
        ({"advantages": torch.zeros(3)}, r"advantages need shape \[2\], got \[3\]"),
    ],
)
def test_shapes_that_would_broadcast_are_refused(changes: dict[str, Tensor], message: str):
    with pytest.raises(ValueError, match=message):
        oapl_loss(**example(**changes), beta2=BETA2, num_completions=2)


@pytest.mark.parametrize("beta2", [0.0, -1e-3, NAN, INF])
def test_beta2_must_be_positive_and_finite(beta2: float):
    with pytest.raises(ValueError, match=rf"beta2 = {beta2} must be positive"):
        oapl_loss(**example(), beta2=beta2, num_completions=2)


def test_num_completions_must_be_positive():
    with pytest.raises(ValueError, match="num_completions = 0 must be at least 1"):
        oapl_loss(**example(), beta2=BETA2, num_completions=0)


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
