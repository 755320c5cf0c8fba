"""What gives a reward: the graders of this package, and functions of one's own with TRL's or verl's signature."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

from oapl.config import TaskConfig
from oapl.errors import GradingError, TaskError
from oapl.grading.code.grader import CodeGrader
from oapl.grading.code.problem_tests import parse_tests
from oapl.grading.code.sandbox import Limits
from oapl.grading.math.grader import MathGrader
from oapl.grading.worker import FunctionWorker
from oapl.tasks.problems import gold_answer, ground_truth
from oapl.types import Prompt, Verdict

LARGEST_REWARD = 3.4e38
"""Rewards are stored in float32."""
VERL = "verl:"


class Reward(Protocol):
    """One opinion on completions; a task may weigh several."""

    name: str
    verifier: str

    def start(self) -> None:
        """Raises TaskError where it could not grade anything."""
        ...

    def grade(self, prompt: Prompt, completions: Sequence[str]) -> list[Verdict | None]:
        """One verdict a completion, or None where this reward does not apply. Raises GradingError where it could not
        judge."""
        ...

    def close(self) -> None: ...


def make_reward(name: str, config: TaskConfig) -> Reward:
    if name == "math":
        return MathReward(config)
    if name == "code":
        return CodeReward(config)
    if name.startswith(VERL):
        return VerlReward(name, config.reward_timeout_s)
    return FunctionReward(name, config.reward_timeout_s)


class MathReward:
    """1 where the completion's boxed answer equals the row's `answer`, else 0."""

    name = "math"

    def __init__(self, config: TaskConfig) -> None:
        self._grader = MathGrader(
            config.num_workers,
            config.reward_timeout_s,
            answer_after=config.answer_after,
            timeout_setting="task.reward_timeout_s",
        )
        self.verifier = with_settings(self._grader.verifier, config, "answer_after")

    def start(self) -> None:
        self._grader.start()

    def grade(self, prompt: Prompt, completions: Sequence[str]) -> list[Verdict | None]:
        if not (gold := gold_answer(prompt.columns)):
            raise GradingError(f"prompt {prompt.id} has no answer to be graded by")
        return [*self._grader.grade(completions, gold)]

    def close(self) -> None:
        self._grader.close()


class CodeReward:
    """1 where the completion's program passes every test of the row, else 0."""

    name = "code"

    def __init__(self, config: TaskConfig) -> None:
        limits = Limits(timeout_s=config.test_timeout_s)
        self._grader = CodeGrader(config.num_workers, limits, config.max_tests, config.answer_after)
        self.verifier = with_settings(self._grader.verifier, config, "answer_after", "max_tests", "test_timeout_s")

    def start(self) -> None:
        self._grader.start()

    def grade(self, prompt: Prompt, completions: Sequence[str]) -> list[Verdict | None]:
        try:
            tests = parse_tests(prompt.columns)
        except TaskError as error:  # of one row among many, which is no reason to end a run
            raise GradingError(str(error)) from error
        return [*self._grader.grade(completions, tests)]

    def close(self) -> None:
        self._grader.close()


class FunctionReward:
    """A user's `reward(prompts, completions, **columns)`, TRL's signature, called once a group in a process of its own.
    It may be `async`."""

    def __init__(self, function: str, timeout_s: float) -> None:
        self.name = function
        self.verifier = f"{function}/{source_digest(function)}"
        self._worker = FunctionWorker(function, timeout_s)

    def start(self) -> None:
        self._worker.start()

    def grade(self, prompt: Prompt, completions: Sequence[str]) -> list[Verdict | None]:
        count = len(completions)
        chat = not isinstance(prompt.text, str)
        answers: list[Any] = [[{"role": "assistant", "content": text}] if chat else text for text in completions]
        columns = {name: [value] * count for name, value in prompt.columns.items()}
        values = self._worker.call(prompts=[prompt.text] * count, completions=answers, **columns)
        rewards = checked_rewards(values, count, self.name)
        return [None if reward is None else Verdict(reward) for reward in rewards]

    def close(self) -> None:
        self._worker.close()


class VerlReward:
    """A user's `compute_score(data_source, solution_str, ground_truth, extra_info)`, verl's signature, called once a
    completion in a process of its own.

    It returns a number, or a dict with a `score`; its other numbers are kept as scores, its `pred` as the answer.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name, self._function = name, name.removeprefix(VERL)
        self.verifier = f"{name}/{source_digest(self._function)}"
        self._worker = FunctionWorker(self._function, timeout_s)

    def start(self) -> None:
        self._worker.start()

    def grade(self, prompt: Prompt, completions: Sequence[str]) -> list[Verdict | None]:
        columns = prompt.columns
        try:
            truth = ground_truth(columns)
        except TaskError as error:  # of one row among many
            raise GradingError(f"prompt {prompt.id}: {error}") from error
        values = [
            self._worker.call(
                data_source=columns.get("data_source", ""),
                solution_str=text,
                ground_truth=truth,
                extra_info=columns.get("extra_info"),
            )
            for text in completions
        ]
        return [self._verdict(value, index) for index, value in enumerate(values)]

    def _verdict(self, value: Any, index: int) -> Verdict:
        if not isinstance(value, Mapping):
            return Verdict(checked_reward(value, index, self._function))
        if "score" not in value:
            raise TaskError(f"{self._function} returned a dict without `score`: it has {', '.join(map(str, value))}.")
        numbers = {str(key): extra for key, extra in value.items() if isinstance(extra, int | float)}
        scores = {key: float(n) for key, n in numbers.items() if key != "score" and abs(n) <= LARGEST_REWARD}
        answer = value.get("pred")
        return Verdict(
            checked_reward(value["score"], index, self._function), None if answer is None else str(answer), "", scores
        )

    def close(self) -> None:
        self._worker.close()


def with_settings(verifier: str, config: TaskConfig, *keys: str) -> str:
    """A verifier's name with those settings that change its verdicts."""
    return " ".join([verifier, *(f"{key}={value}" for key, value in config.changed(*keys).items())])


def combine(
    opinions: Sequence[Sequence[Verdict | None]],
    names: Sequence[str],
    weights: Sequence[float],
    judged_by: str | None = None,
) -> list[Verdict]:
    """One verdict a completion: the weighted sum of those rewards that apply to it, as TRL has it.

    The answer is that of `judged_by`, by which a completion counts as right, where it is among them; else the first.
    Raises GradingError where none applies.
    """
    verdicts = []
    for index, found in enumerate(zip(*opinions, strict=True)):
        given = [
            (name, weight, verdict)
            for name, weight, verdict in zip(names, weights, found, strict=True)
            if verdict is not None
        ]
        if not given:
            raise GradingError(f"{', '.join(names)} returned None for completion {index}: it gave no verdict")
        reward = sum(weight * verdict.reward for _, weight, verdict in given)
        if not abs(reward) <= LARGEST_REWARD:
            raise GradingError(f"the weighted sum of the rewards of completion {index} is not finite in float32")
        scores = {name: verdict.reward for name, _, verdict in given} if len(names) > 1 else {}
        for name, _, verdict in given:
            scores |= {key if len(names) == 1 else f"{name}/{key}": value for key, value in verdict.scores.items()}
        reasons = [
            verdict.reason if len(names) == 1 else f"{name}: {verdict.reason}"
            for name, _, verdict in given
            if verdict.reason
        ]
        judges = [verdict for name, _, verdict in given if name == judged_by] or [verdict for _, _, verdict in given]
        answers = [verdict.answer for verdict in judges if verdict.answer is not None]
        verdicts.append(
            Verdict(
                reward,
                answer=answers[0] if answers else None,
                reason="; ".join(reasons),
                scores=scores,
            )
        )
    return verdicts


def source_digest(function: str) -> str:
    """The beginning of the SHA-256 of the file that defines a reward function: its version, as far as it shows."""
    module = function.partition(":")[0].replace(".", "/")
    for folder in (os.getcwd(), *sys.path):
        for path in (Path(folder, f"{module}.py"), Path(folder, module, "__init__.py")):
            if path.is_file():
                return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return "unknown"


def checked_rewards(values: Any, count: int, function: str) -> list[float | None]:
    """What a reward function gave, as floats. A wrong number of them is an error of the function, so TaskError;
    a value that is no reward concerns this group alone, so GradingError."""
    if not hasattr(values, "__len__") or isinstance(values, str | bytes | Mapping | Set):
        raise TaskError(f"{function} must return a list of {count} numbers, one a completion; it returned {values!r}.")
    if len(values) != count:
        raise TaskError(
            f"{function} returned {len(values)} rewards for {count} completions; it must return one for each."
        )
    return [None if value is None else checked_reward(value, index, function) for index, value in enumerate(values)]


def checked_reward(value: Any, index: int, function: str) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        reward = float(value)
    except (TypeError, ValueError, OverflowError):
        raise GradingError(f"{function} returned {repr(value)[:80]} for completion {index}: not a number") from None
    if not abs(reward) <= LARGEST_REWARD:
        raise GradingError(f"{function} returned {reward} for completion {index}: not finite in float32")
    return reward
