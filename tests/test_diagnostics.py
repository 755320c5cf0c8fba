"""The metrics of a step against numbers derived by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import tensor

from oapl.batching import Batch
from oapl.config import GRPOConfig, LossSection, OAPLConfig
from oapl.diagnostics import StepTotals, effective_share, fit_metrics
from oapl.objective import make_objective

# How many completions weigh, w = exp(l)


@pytest.mark.parametrize(
    ("log_ratios", "share"),
    [
        ([0.0, 0.0, 0.0], 1.0),
        ([-7.0, -7.0], 1.0),  # moved alike is not moved apart
        ([0.0, math.log(3)], 4**2 / (2 * 10)),  # w = 1, 3
        ([0.0, math.log(2), math.log(2), math.log(5)], 10**2 / (4 * 34)),  # w = 1, 2, 2, 5
        ([0.0, -1000.0, -1000.0, -1000.0], 1 / 4),  # one outweighs all others
        ([5000.0, 0.0], 1 / 2),  # where exp alone would overflow
    ],
)
def test_effective_share_is_the_effective_sample_size_over_the_number(log_ratios: list[float], share: float):
    assert effective_share(tensor(log_ratios)) == pytest.approx(share)


# How well beta2 * l fits the advantages


def test_the_residual_s_spread_and_r2():
    # beta2 l = (1, 2), residuals (-0.5, 1): their deviation is 0.75, their mean square 0.625.
    # Advantages (1.5, 1) have the variance 0.0625, so R^2 = 1 - 0.625 / 0.0625 = -9.
    metrics = fit_metrics(tensor([2.0, 4.0]), tensor([1.5, 1.0]), beta2=0.5)
    assert metrics == pytest.approx({"residual_std": 0.75, "r2": -9.0})


@pytest.mark.parametrize(
    ("log_ratios", "advantages", "r2"),
    [
        ([4.0, -2.0], [2.0, -1.0], 1.0),  # beta2 l = A
        ([0.0, 0.0], [1.0, -1.0], 0.0),  # l = 0 explains nothing of centred advantages
        ([0.0, 0.0], [0.0, -1.0], -1.0),  # and is worse than their mean where they are not: 1 - 0.5 / 0.25
    ],
)
def test_r2_is_1_at_a_perfect_fit_and_at_most_0_at_the_sampler(
    log_ratios: list[float], advantages: list[float], r2: float
):
    assert fit_metrics(tensor(log_ratios), tensor(advantages), beta2=0.5)["r2"] == pytest.approx(r2)


def test_equal_advantages_have_no_r2():
    # In float32 the mean of nine times 0.1 is not 0.1, which would make a variance of rounding.
    assert fit_metrics(torch.arange(9.0), torch.full((9,), 0.1), beta2=0.5).keys() == {"residual_std"}


# Which a step reports: two completions, of 1 token with l = 2 and of 3 tokens with l = 6

BATCH = Batch(
    prompts=torch.zeros(1, 4, dtype=torch.int64),
    prompt_lengths=tensor([4]),
    prompt_of_row=tensor([0, 0]),
    inputs=torch.zeros(2, 3, dtype=torch.int64),
    targets=torch.zeros(2, 3, dtype=torch.int64),
    sampler_logprobs=torch.zeros(2, 3),
    mask=tensor([[True, False, False], [True, True, True]]),
    advantages=tensor([1.0, 0.0]),
    marks=tensor([1.0, 0.0]),
)


def metrics_of(loss: LossSection) -> dict[str, float]:
    totals = StepTotals()
    totals.add(BATCH, torch.full((2, 3), 2.0), torch.full((2, 3), 0.5), {})
    return totals.metrics(1.0, make_objective(loss))


def test_a_step_s_metrics():
    metrics = metrics_of(GRPOConfig(kind="grpo"))
    assert metrics == pytest.approx(
        {
            "log_ratio": 4.0,
            "log_ratio_right": 2.0,
            "log_ratio_wrong": 6.0,
            "ratio_right": math.exp(2),
            "advantage": 0.5,
            "effective_share": (1 + math.exp(-4)) ** 2 / (2 * (1 + math.exp(-8))),
            "entropy": 0.5,
            "token_gap": 2.0,
            "num_trained_completions": 2,
            "num_computed_tokens": 10,
        }
    )


@pytest.mark.parametrize(("per_token_mean", "fitted"), [(False, [2.0, 6.0]), (True, [2.0, 2.0])])
def test_the_fit_is_measured_on_what_the_loss_fits(per_token_mean: bool, fitted: list[float]):
    metrics = metrics_of(OAPLConfig(beta2=0.5, per_token_mean=per_token_mean))
    residuals = 0.5 * np.array(fitted) - [1.0, 0.0]
    assert metrics["residual_std"] == pytest.approx(residuals.std())
    assert metrics["r2"] == pytest.approx(1 - np.square(residuals).mean() / 0.25)
