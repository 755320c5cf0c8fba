"""GRPO and GRPO+ against numbers derived by hand.

Shapes: G completions of one prompt, B completions, T tokens.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from loss_examples import value_and_gradient
from oapl.losses import group_advantages, grpo_loss, grpo_plus_loss

COUNTS = {"num_completions": 2, "num_tokens": 5, "max_completion_length": 10}
MASK = tensor([[True, True, True], [True, True, False]])
ADVANTAGES = [2.0, -1.0]


def with_ratios(ratios: list[list[float]], advantages: list[float] = ADVANTAGES) -> dict[str, Tensor]:
    """Two completions, of 3 and of 2 tokens, with these pi / pi_sampler."""
    sampler_BT = tensor([[-1.0, -2.0, -0.5], [-0.25, -0.75, 0.0]])
    return {
        "logprobs": sampler_BT + tensor(ratios).log(),
        "sampler_logprobs": sampler_BT,
        "mask": MASK,
        "advantages": tensor(advantages),
    }


def grpo(batch: dict[str, Tensor], **settings: Any) -> tuple[Tensor, Tensor, float]:
    def loss(*tensors: Tensor, **counts: int):
        return grpo_loss(*tensors, **settings, **counts)

    value, gradient, metrics = value_and_gradient(loss, batch, COUNTS)
    return value, gradient, metrics["clip_share"].item()


def assert_close(actual: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(actual, tensor(expected), rtol=1e-5, atol=1e-7)


# The clip. epsilon = 0.2, so ratios beyond 0.8 … 1.2 are clipped where that lowers the objective.
#
#   A = 2:   r = 1.5: min(3.0, 2.4) = 2.4, clipped      A = -1:  r = 1.5: min(-1.5, -1.2) = -1.5, not clipped
#            r = 1.0: min(2.0, 2.0) = 2.0                        r = 0.5: min(-0.5, -0.8) = -0.8, clipped
#            r = 0.5: min(1.0, 1.6) = 1.0, not clipped
CLIPPED = [[1.5, 1.0, 0.5], [1.5, 0.5, 1.0]]
TOKEN_LOSSES = [[-2.4, -2.0, -1.0], [1.5, 0.8, 0.0]]
TOKEN_GRADIENTS = [[0.0, -2.0, -1.0], [1.5, 0.0, 0.0]]  # -r A, and 0 where clipped


@pytest.mark.parametrize(
    ("loss_type", "loss", "scales"),
    [
        ("grpo", (-5.4 / 3 + 2.3 / 2) / 2, [1 / 6, 1 / 4]),
        ("dr_grpo", (-5.4 + 2.3) / (2 * 10), [1 / 20, 1 / 20]),
        ("dapo", (-5.4 + 2.3) / 5, [1 / 5, 1 / 5]),
    ],
)
def test_each_loss_type_normalizes_the_clipped_token_losses_its_own_way(
    loss_type: str, loss: float, scales: list[float]
):
    value, gradient, _ = grpo(with_ratios(CLIPPED), loss_type=loss_type)
    assert value.item() == pytest.approx(loss)
    scaled = tensor(TOKEN_LOSSES) * tensor(scales)[:, None]
    assert scaled.sum().item() == pytest.approx(loss)  # the two derivations agree
    assert_close(gradient, (tensor(TOKEN_GRADIENTS) * tensor(scales)[:, None]).tolist())


def test_a_clipped_token_has_no_gradient_and_the_pessimistic_side_is_never_clipped():
    _, gradient, _ = grpo(with_ratios(CLIPPED))
    assert gradient[0, 0] == 0  # good and already raised beyond 1.2
    assert gradient[1, 1] == 0  # bad and already lowered beyond 0.8
    assert gradient[0, 2] != 0  # good, yet lowered: is raised again
    assert gradient[1, 0] != 0  # bad, yet raised: is lowered again


def test_epsilon_high_widens_the_upper_clip_alone():
    # r = 1.5 lies below 1.6 now and loses 3.0; r = 0.5 of the bad completion stays clipped at 0.8.
    value, gradient, clip_share = grpo(with_ratios(CLIPPED), epsilon_high=0.6)
    assert value.item() == pytest.approx((-3.0 - 2.0 - 1.0 + 1.5 + 0.8) / 5)
    assert_close(gradient, [[-0.6, -0.4, -0.2], [0.3, 0.0, 0.0]])
    assert clip_share == pytest.approx(1 / 5)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_clip_share_is_the_share_of_tokens_whatever_the_normalization(loss_type: str):
    *_, clip_share = grpo(with_ratios(CLIPPED), loss_type=loss_type)
    assert clip_share == pytest.approx(2 / 5)


def test_without_an_advantage_nothing_is_clipped_and_nothing_moves():
    _, gradient, clip_share = grpo(with_ratios(CLIPPED, advantages=[0.0, 0.0]))
    assert not gradient.any()
    assert clip_share == 0


def test_grpo_plus_clips_at_0_8_and_1_28_and_takes_the_mean_over_tokens():
    # A = 2: r = 1.25 is free (2.5), r = 1.5 is clipped at 1.28 (2.56). A = -1: r = 0.75 is clipped at 0.8.
    batch = with_ratios([[1.25, 1.5, 1.0], [0.75, 1.0, 1.0]])
    value, gradient, metrics = value_and_gradient(grpo_plus_loss, batch, COUNTS)
    assert value.item() == pytest.approx((-2.5 - 2.56 - 2.0 + 0.8 + 1.0) / 5)
    assert_close(gradient, [[-2.5 / 5, 0.0, -2.0 / 5], [0.0, 1.0 / 5, 0.0]])
    assert metrics["clip_share"].item() == pytest.approx(2 / 5)


# Importance sampling, with a cap of 1.25: weights w, of which no gradient is taken, and the gradient is -w A.
#
#   tokens  r = 2, 1, 0.25 and 2, 1.5:  truncated w = 1.25, 1, 0.25 and 1.25, 1.25;  masked w = 0, 1, 0.25 and 0, 0
#   wholes  r = 0.5        and 3:       truncated w = 0.5          and 1.25;         masked w = 0.5       and 0
WEIGHTED = [[2.0, 1.0, 0.25], [2.0, 1.5, 1.0]]
WEIGHTS = {
    "token_truncate": ([[1.25, 1.0, 0.25], [1.25, 1.25, 0.0]], 3 / 5),
    "token_mask": ([[0.0, 1.0, 0.25], [0.0, 0.0, 0.0]], 3 / 5),
    "sequence_truncate": ([[0.5, 0.5, 0.5], [1.25, 1.25, 0.0]], 2 / 5),
    "sequence_mask": ([[0.5, 0.5, 0.5], [0.0, 0.0, 0.0]], 2 / 5),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_each_importance_weight_and_its_cap(kind: str):
    weights, share = WEIGHTS[kind]
    value, gradient, clip_share = grpo(
        with_ratios(WEIGHTED), importance_sampling=kind, importance_sampling_clip_max=1.25
    )
    losses = [[-w * a for w in row] for row, a in zip(weights, ADVANTAGES, strict=True)]  # each token's -w A
    assert value.item() == pytest.approx(sum(map(sum, losses)) / 5)
    assert_close(gradient, [[loss / 5 for loss in row] for row in losses])
    assert clip_share == pytest.approx(share)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_cap_above_every_ratio_leaves_the_plain_weights(kind: str):
    # Then truncating and masking are one: the token's ratio, or the completion's.
    _, gradient, clip_share = grpo(with_ratios(WEIGHTED), importance_sampling=kind, importance_sampling_clip_max=10.0)
    weights = {"token": [[2.0, 1.0, 0.25], [2.0, 1.5, 0.0]], "sequence": [[0.5] * 3, [3.0] * 2 + [0.0]]}
    rows = zip(weights[kind.partition("_")[0]], ADVANTAGES, strict=True)
    assert_close(gradient, [[-w * a / 5 for w in row] for row, a in rows])
    assert clip_share == 0


@pytest.mark.parametrize(("kind", "weight"), [("sequence_truncate", 2.0), ("sequence_mask", 0.0)])
def test_a_completion_a_thousand_nats_off_overflows_nothing(kind: str, weight: float):
    batch = with_ratios([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    batch["logprobs"] = batch["logprobs"] + tensor([[400.0], [-600.0]])  # 1,200 nats up, and 1,200 down
    _, gradient, _ = grpo(batch, importance_sampling=kind)
    assert_close(gradient, [[-2.0 * weight / 5] * 3, [0.0, 0.0, 0.0]])


# Advantages

REWARDS_G = tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)


def test_group_advantages_are_centred_and_on_request_divided_by_the_sample_deviation():
    # mean 0.5; the deviation with G - 1 below the fraction line is sqrt(4 * 0.25 / 3) = 0.57735.
    deviation = math.sqrt(1 / 3) + 1e-4
    assert group_advantages(REWARDS_G, "none").tolist() == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages(REWARDS_G, "group").tolist() == pytest.approx(
        [0.5 / deviation, -0.5 / deviation, -0.5 / deviation, 0.5 / deviation]
    )


@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_a_uniform_group_has_no_advantage(scale_rewards: Any):
    assert group_advantages(torch.full((4,), 0.3), scale_rewards).abs().max() < 1e-3
    assert group_advantages(torch.full((4,), 0.3).double(), scale_rewards).tolist() == [0.0] * 4


def test_leading_axes_are_groups_of_their_own():
    two = torch.stack([REWARDS_G, 10 * REWARDS_G])
    assert group_advantages(two, "none").tolist() == [[0.5, -0.5, -0.5, 0.5], [5.0, -5.0, -5.0, 5.0]]


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": 0.0}, "epsilon = 0.0 must lie between 0 and 1"),
        ({"epsilon": 1.0}, "epsilon = 1.0 must lie between 0 and 1"),
        ({"epsilon": math.nan}, "epsilon = nan must lie between 0 and 1"),
        ({"epsilon_high": 0.0}, "epsilon_high = 0.0 above 0"),
        ({"importance_sampling": "token"}, "importance_sampling = 'token' must be one of none, token_truncate"),
        (
            {"importance_sampling": "token_mask", "importance_sampling_clip_max": 0.5},
            "importance_sampling_clip_max = 0.5 must be finite and at least 1",
        ),
        (
            {"importance_sampling": "token_mask", "importance_sampling_clip_max": math.inf},
            "importance_sampling_clip_max = inf must be finite",
        ),
        ({"loss_type": "bnpo"}, "loss_type = 'bnpo' must be one of grpo, dr_grpo, dapo"),
        ({"num_tokens": 0}, "num_tokens = 0 must be at least 1"),
        ({"max_completion_length": 0}, "max_completion_length = 0 must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        grpo_loss(**with_ratios(CLIPPED), **{**COUNTS, **settings})
