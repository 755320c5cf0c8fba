"""pass@k against counting every subset, and intervals against what they claim."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import prod
from pathlib import Path

import numpy as np
import pytest

from helpers import make_completion, make_group, make_round, make_shard
from oapl import evaluation
from oapl.config import TaskConfig
from oapl.evaluation import (
    Scores,
    best_step,
    bootstrap_interval,
    bootstrap_over_seeds,
    differences,
    pass_at_k,
    read_scores,
)
from oapl.store import RoundFolder
from oapl.types import FailedGroup, PolicyRef

# pass@k


def share_of_subsets_with_a_correct_sample(num_samples: int, num_correct: int, k: int) -> Fraction:
    """Samples 0 … c - 1 are the correct ones."""
    subsets = list(combinations(range(num_samples), k))
    return Fraction(sum(subset[0] < num_correct for subset in subsets), len(subsets))


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(num_samples: int):
    for num_correct in range(num_samples + 1):
        for k in range(1, num_samples + 1):
            counted = share_of_subsets_with_a_correct_sample(num_samples, num_correct, k)
            assert pass_at_k(num_samples, num_correct, k) == float(counted)


@pytest.mark.parametrize("num_correct", [0, 1, 7, 5_000, 9_000, 9_999, 10_000])
@pytest.mark.parametrize("k", [1, 2, 64, 1_000, 5_000, 10_000])
def test_pass_at_k_is_exact_for_ten_thousand_samples(num_correct: int, k: int):
    n = 10_000
    # All k draws without replacement miss with probability prod (n - c - i) / (n - i), 0 where a factor is 0.
    top, bottom = prod(max(0, n - num_correct - i) for i in range(k)), prod(n - i for i in range(k))
    exact = 1 - Fraction(top, bottom)
    assert pass_at_k(n, num_correct, k) == float(exact)


def test_pass_at_k_is_one_where_fewer_than_k_samples_are_wrong():
    assert pass_at_k(8, 5, 4) == 1.0  # three wrong samples cannot fill four places
    assert pass_at_k(8, 4, 4) == 1 - 1 / 70  # four can, in one way of C(8, 4) = 70
    assert pass_at_k(1, 1, 1) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 2, 9), "k = 9 must lie between 1 and num_samples = 8"),
        ((8, 2, 0), "k = 0 must lie between 1 and num_samples = 8"),
        ((8, 2, -1), "k = -1 must lie between 1 and num_samples = 8"),
        ((8, 9, 1), "num_correct = 9 must lie between 0 and num_samples = 8"),
        ((8, -1, 1), "num_correct = -1 must lie between 0 and num_samples = 8"),
        ((-1, 0, 1), "num_correct = 0 must lie between 0 and num_samples = -1"),
        ((0, 0, 1), "k = 1 must lie between 1 and num_samples = 0"),
    ],
)
def test_impossible_counts_are_errors(arguments: tuple[int, int, int], message: str):
    with pytest.raises(ValueError, match=message):
        pass_at_k(*arguments)


# Intervals


def test_the_interval_covers_the_true_mean_about_95_times_in_100(monkeypatch: pytest.MonkeyPatch):
    # Problems of unlike difficulty: each problem's pass rate is uniform on (0, 1), estimated from 8 samples, so the
    # true mean is 1/2. Over 400 repetitions the share covered has a standard deviation of sqrt(0.95 * 0.05 / 400) =
    # 0.011; the percentile bootstrap over 100 problems falls short of 0.95 by less than 0.01. Hence 0.91 to 0.98.
    monkeypatch.setattr(evaluation, "NUM_RESAMPLES", 1_000)
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        values = rng.binomial(8, rng.uniform(size=100)) / 8
        _, low, high = bootstrap_interval(values)
        covered += low <= 0.5 <= high
    assert 0.91 <= covered / 400 <= 0.98


def test_the_interval_is_that_of_the_normal_approximation_for_many_problems():
    values = np.array([0.0, 1.0] * 200)
    mean, low, high = bootstrap_interval(values)
    half_width = 1.96 * 0.5 / np.sqrt(400)  # sd of one problem is 1/2
    assert mean == 0.5
    assert low == pytest.approx(0.5 - half_width, abs=0.005)
    assert high == pytest.approx(0.5 + half_width, abs=0.005)


def test_constant_values_have_an_interval_of_no_width():
    assert bootstrap_interval(np.full(37, 0.3)) == pytest.approx((0.3, 0.3, 0.3), abs=1e-12)


def test_the_same_values_always_have_the_same_interval():
    values = np.random.default_rng(0).uniform(size=50)
    assert bootstrap_interval(values) == bootstrap_interval(values)


# Intervals over seeds and problems


def test_an_interval_over_seeds_and_problems_has_the_spread_of_both():
    # x_sq = a_s + b_q with 100 seeds of a = +-0.1 and 400 problems of b = 0 or 1. Seeds and problems are drawn on their
    # own, so the mean of a resample has the variance 0.1^2 / 100 + 0.5^2 / 400: the spread of the problems is not
    # divided by the number of seeds, since all seeds answer the same problems.
    a_S, b_Q = np.array([-0.1, 0.1] * 50), np.array([0.0, 1.0] * 200)
    ((mean, low, high),) = bootstrap_over_seeds((a_S[:, None] + b_Q)[None])
    half_width = 1.96 * np.sqrt(0.01 / 100 + 0.25 / 400)
    assert mean == pytest.approx(0.5)
    assert low == pytest.approx(0.5 - half_width, abs=0.005)
    assert high == pytest.approx(0.5 + half_width, abs=0.005)


def test_two_seeds_that_disagree_everywhere_have_the_widest_interval():
    # A resample draws (0, 0), (0, 1), (1, 0) or (1, 1): a quarter of the means is 0, a quarter is 1, more than 2.5 %.
    values_SQ = np.array([np.zeros(9), np.ones(9)])
    assert bootstrap_over_seeds(values_SQ[None])[0] == pytest.approx((0.5, 0.0, 1.0), abs=1e-12)


def test_seeds_that_agree_are_worth_one_seed():
    # The problems alone spread: 16 of sd 1/2 give a half-width of 1.96 / 8, for one seed as for ten.
    values_Q = np.array([0.0, 1.0] * 8)
    one, ten = (bootstrap_over_seeds(np.tile(values_Q, (1, num_seeds, 1)))[0] for num_seeds in (1, 10))
    for _, low, high in (one, ten):
        assert (high - low) / 2 == pytest.approx(1.96 / 8, abs=0.035)  # means come in steps of 1/16


def test_each_k_has_the_interval_that_it_has_alone():
    values_KSQ = np.random.default_rng(0).uniform(size=(3, 2, 5))
    assert bootstrap_over_seeds(values_KSQ) == [bootstrap_over_seeds(values_KSQ[k : k + 1])[0] for k in range(3)]


# Scores and their differences


def scores(num_correct: dict[int, int], num_generations: int = 8) -> Scores:
    return Scores(0, 0, num_generations, num_correct, num_failed=0, mean_length=1.0, truncated_share=0.0)


def test_k_goes_up_to_the_number_of_samples_in_powers_of_two():
    assert scores({0: 1}, 64).ks() == [1, 2, 4, 8, 16, 32, 64]
    assert scores({0: 1}, 10).ks() == [1, 2, 4, 8]
    assert scores({0: 1}, 1).ks() == [1]


def test_differences_are_paired_by_problem():
    # Every problem gains one correct sample of eight, so each paired difference in pass@1 is 1/8 and the interval has
    # no width, though the problems differ widely and were stored in another order.
    base = scores({0: 0, 1: 7, 2: 3, 3: 5})
    final = scores({3: 6, 1: 8, 0: 1, 2: 4})
    assert differences(base, final)[1] == pytest.approx((1 / 8, 1 / 8, 1 / 8), abs=1e-12)


def test_differences_leave_out_problems_and_ks_that_only_one_side_has():
    base = scores({0: 0, 1: 4, 9: 8}, num_generations=8)
    final = scores({0: 1, 1: 3, 5: 0}, num_generations=4)
    result = differences(base, final)
    assert list(result) == [1, 2, 4]
    # Problem 0: 1/4 - 0/8, problem 1: 3/4 - 4/8.
    assert result[1][0] == pytest.approx((0.25 + 0.25) / 2)


def test_scores_are_read_from_a_stored_evaluation(tmp_path: Path):
    folder = RoundFolder(tmp_path / "base")
    policy = PolicyRef(3, 150, "abc")
    round = make_round(3, policy, num_shards=2, prompts_per_shard=2, num_generations=2)
    folder.open(round)
    long = [make_completion([1, 2, 3], finish_reason="length"), make_completion([1])]
    folder.write_shard(round, 0, make_shard([make_group(0, [0.5, 0.4]), make_group(1, [1.0, 0.5], completions=long)]))
    folder.write_shard(round, 1, make_shard([make_group(2, [0.0, 0.0])], [FailedGroup(3, "train/3", "it raised")]))
    result = read_scores(folder, TaskConfig(name="countdown", success_threshold=0.5))
    assert (result.policy_version, result.step) == (3, 150)
    assert dict(result.num_correct) == {0: 1, 1: 2, 2: 0}
    assert result.num_failed == 1
    assert result.mean_length == pytest.approx((1 + 1 + 3 + 1 + 1 + 1) / 6)
    assert result.truncated_share == pytest.approx(1 / 6)
    assert result.pass_at_k()[1][0] == pytest.approx((1 / 2 + 2 / 2 + 0) / 3)
    assert result.pass_at_k()[2][0] == pytest.approx((1 + 1 + 0) / 3)
    assert result.success(list(result.num_correct)) == 3 / 6


def test_the_best_step_has_the_highest_score_and_of_equals_is_the_earliest():
    assert best_step({0: 0.1, 50: 0.4, 100: 0.2}) == 50
    assert best_step({0: 0.25, 50: 0.5, 100: 0.5}) == 50
    assert best_step({150: 0.5, 0: 0.5, 50: 0.5}) == 0
