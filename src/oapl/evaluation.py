"""pass@k with intervals, from an evaluation's stored groups.

Shapes: Q problems, n samples of each, c of them correct; S seeds of a run, K values of k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from oapl.config import TaskConfig
from oapl.errors import StoreError, TaskError
from oapl.store import RoundFolder
from oapl.types import Group, PolicyRef, Shard

NUM_RESAMPLES = 10_000
CHUNK = 1_000
"""Resamples drawn at once."""
Interval = tuple[float, float, float]
"""Mean, and the lower and upper end of its 95 % interval."""


@lru_cache(maxsize=100_000)
def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate of the chance that at least one of k samples is correct.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374), in whole numbers, so exact for any n;
    1.0 where n - c < k. Raises ValueError for k < 1, k > n, c < 0 or c > n.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct = {num_correct} must lie between 0 and num_samples = {num_samples}")
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"k = {k} must lie between 1 and num_samples = {num_samples}: take more samples or a smaller k"
        )
    total = comb(num_samples, k)
    return (total - comb(num_samples - num_correct, k)) / total


def bootstrap_interval(values: NDArray[np.float64], seed: int = 0) -> Interval:
    """The mean over problems and its 95 % percentile interval, problems resampled with replacement."""
    rng = np.random.default_rng(seed)
    equal = np.full(len(values), 1 / len(values))
    means = [rng.multinomial(len(values), equal) @ values / len(values) for _ in range(NUM_RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def bootstrap_over_seeds(values_KSQ: NDArray[np.float64], seed: int = 0) -> list[Interval]:
    """For each k the mean over seeds and problems, and its 95 % percentile interval over both.

    A resample draws seeds, then problems, with replacement. The seeds answer the same problems, so all seeds drawn
    share one draw of problems: what is hard for one seed is hard for the others, and more seeds do not average that
    away.
    """
    _, num_seeds, num_problems = values_KSQ.shape
    rng = np.random.default_rng(seed)
    equal_S, equal_Q = np.full(num_seeds, 1 / num_seeds), np.full(num_problems, 1 / num_problems)
    resampled = []
    for start in range(0, NUM_RESAMPLES, CHUNK):
        count = min(CHUNK, NUM_RESAMPLES - start)  # R resamples at once
        seeds_RS = rng.multinomial(num_seeds, equal_S, count) / num_seeds
        problems_RQ = rng.multinomial(num_problems, equal_Q, count) / num_problems
        resampled.append((problems_RQ @ values_KSQ.transpose(0, 2, 1) * seeds_RS).sum(-1))
    low_K, high_K = np.percentile(np.concatenate(resampled, axis=-1), [2.5, 97.5], axis=-1)
    means_K = values_KSQ.mean((1, 2))
    return [(float(mean), float(low), float(high)) for mean, low, high in zip(means_K, low_K, high_K, strict=True)]


@dataclass(frozen=True)
class Scores:
    """What one policy did on the held-out problems."""

    policy_version: int | None
    """None for a snapshot."""
    step: int
    """The optimizer steps that made it."""
    num_generations: int
    num_correct: Mapping[int, int]
    """Correct samples of each problem, by the problem's position."""
    num_failed: int
    """Problems left out since a completion of theirs could not be graded."""
    mean_length: float
    truncated_share: float
    consensus: Mapping[int, float] | None = None
    """The chance that the most frequent answer to each problem is right, by its position; None where there are no
    answers to vote by."""

    def ks(self) -> list[int]:
        """The powers of two up to the number of samples."""
        return [2**i for i in range(self.num_generations.bit_length())]

    def pass_at(self, k: int, positions: Iterable[int] | None = None) -> NDArray[np.float64]:
        """pass@k of each problem (or of those at `positions`), shape [Q]."""
        chosen = self.num_correct if positions is None else positions
        return np.array([pass_at_k(self.num_generations, self.num_correct[position], k) for position in chosen])

    def success(self, positions: Collection[int]) -> float:
        """pass@1 over the problems at `positions`, from whole numbers: equal results are equal floats."""
        return sum(self.num_correct[position] for position in positions) / (self.num_generations * len(positions))

    def cons_at_n(self) -> Interval | None:
        """How often the most frequent of all answers to a problem is right."""
        return None if self.consensus is None else bootstrap_interval(np.array([*self.consensus.values()]))

    def pass_at_k(self) -> dict[int, Interval]:
        return {k: bootstrap_interval(self.pass_at(k)) for k in self.ks()}


def majority(group: Group, right: Sequence[bool]) -> float:
    """The chance that the most frequent answer is right, where ties are broken by lot. All right answers are one
    answer, however they are written; wrong ones are told apart by their text without spaces; none does not vote."""
    votes = Counter(
        None if is_right else "".join(verdict.answer.split())
        for verdict, is_right in zip(group.verdicts, right, strict=True)
        if verdict.answer is not None
    )
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    return winners.count(None) / len(winners) if winners else 0.0


def read_scores(folder: RoundFolder, task: TaskConfig) -> Scores:
    """The scores of a complete evaluation round. Raises StoreError where a shard is missing or damaged, or several
    graders judged, and TaskError where no problem could be graded."""
    round = folder.load()
    if folder.is_judged_otherwise(round):
        raise StoreError(
            f"{folder.path}: some of its shards were graded otherwise than the others. Grade all of it again by "
            f"`oapl eval` with --regrade."
        )
    shards = [folder.read_shard(number) for number in range(round.num_shards)]
    return score_shards(shards, round.policy, round.sampling.num_generations, task)


def score_shards(shards: Sequence[Shard], policy: PolicyRef, num_generations: int, task: TaskConfig) -> Scores:
    groups = [group for shard in shards for group in shard.groups]
    if not groups:
        first = next(failure for shard in shards for failure in shard.failed)
        raise TaskError(f"no held-out problem could be graded, the first ({first.prompt_id}) because {first.cause}.")
    right = {group.position: group.marks(task.judged_by) >= task.success_threshold for group in groups}
    completions = [completion for group in groups for completion in group.completions]
    return Scores(
        policy_version=policy.version,
        step=policy.step,
        num_generations=num_generations,
        num_correct={position: int(each.sum()) for position, each in right.items()},
        num_failed=sum(len(shard.failed) for shard in shards),
        mean_length=float(np.mean([len(completion.token_ids) for completion in completions])),
        truncated_share=float(np.mean([completion.finish_reason == "length" for completion in completions])),
        consensus={group.position: majority(group, right[group.position].tolist()) for group in groups}
        if "math" in task.rewards
        else None,
    )


def paired_test(differences: NDArray[np.float64], seed: int = 0) -> float:
    """Two-sided p of the mean difference, [Q] differences paired by problem: the share of sign flips whose mean is at
    least as far from 0, the observed one among them (Monte Carlo permutation test)."""
    rng = np.random.default_rng(seed)
    observed = abs(differences.sum()) - 1e-9  # sums in another order may differ in the last digit
    as_far = 1
    for _ in range(NUM_RESAMPLES // CHUNK):
        signs_RQ = rng.choice((-1.0, 1.0), (CHUNK, len(differences)))
        as_far += int((np.abs(signs_RQ @ differences) >= observed).sum())
    return as_far / (NUM_RESAMPLES + 1)


def best_step(validation_scores: Mapping[int, float]) -> int:
    """The step of the snapshot that did best; of equals the earliest."""
    return max(validation_scores, key=lambda step: (validation_scores[step], -step))


def paired_differences(first: Scores, second: Scores) -> dict[int, NDArray[np.float64]]:
    """second - first in pass@k of each problem that both graded, by k."""
    positions = sorted(first.num_correct.keys() & second.num_correct.keys())
    if not positions:
        raise TaskError("no problem was graded in both evaluations, so there is no difference to give.")
    shared = sorted(set(first.ks()) & set(second.ks()))
    return {k: second.pass_at(k, positions) - first.pass_at(k, positions) for k in shared}


def differences(base: Scores, final: Scores) -> dict[int, Interval]:
    """final - base in pass@k, paired by problem over the problems that both graded."""
    return {k: bootstrap_interval(values) for k, values in paired_differences(base, final).items()}
