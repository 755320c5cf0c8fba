"""Any dataset of the reasoning-gym package: generated problems with their own scoring."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from oapl.errors import TaskError
from oapl.grading.worker import FunctionWorker
from oapl.installation import installed_version
from oapl.tasks.rewards import checked_reward
from oapl.types import Prompt, Split, Verdict, split_and_index

SEEDS: dict[Split, int] = {"train": 0, "validation": 1_100_003, "evaluation": 1_000_003}
"""reasoning-gym draws problem i from seed + i, so the splits share no draw. Where a dataset knows few different
problems, the same ones still turn up in several."""
SIZES: dict[Split, int] = {"train": 10_000, "validation": 1_000, "evaluation": 1_000}
MAX_SIZE = 1_000_000


class ReasoningGymTask:
    """Prompts are the problems' questions; a completion is scored as it stands, by the dataset itself."""

    num_workers = 1

    def __init__(self, dataset: str, args: Mapping[str, Any], timeout_s: float) -> None:
        self._dataset, self._args = dataset, dict(args)
        self._sizes: dict[Split, int] = {**SIZES, "train": self._args.pop("size", SIZES["train"])}
        if not (isinstance(self._sizes["train"], int) and 1 <= self._sizes["train"] <= MAX_SIZE):
            raise TaskError(f"task.args: size = {self._sizes['train']!r} must be between 1 and {MAX_SIZE:,}.")
        self.verifier = f"reasoning_gym:{dataset}/{version()}"
        self._sources: dict[Split, Any] = {}
        self._source("train")
        self._source("evaluation")
        self._worker = FunctionWorker("oapl.tasks.gym:score_all", timeout_s)

    def num_prompts(self, split: Split) -> int:
        return self._sizes[split]

    def _source(self, split: Split) -> Any:
        """A split's problems. Some datasets make all of them at once, so those that nothing asks for are not made."""
        if split not in self._sources:
            self._sources[split] = make_dataset(self._dataset, self._args, SEEDS[split], self._sizes[split])
        return self._sources[split]

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(f"{split}/{index}", self._source(split)[index]["question"])

    def grade(self, prompt: Prompt, completions: Sequence[str]) -> list[Verdict]:
        split, index = split_and_index(prompt.id)
        values = self._worker.call(
            dataset=self._dataset,
            args=self._args,
            seed=SEEDS[split],
            size=self._sizes[split],
            index=index,
            completions=list(completions),
        )
        return [Verdict(checked_reward(value, i, self.verifier)) for i, value in enumerate(values)]

    def start(self) -> None:
        self._worker.start()

    def close(self) -> None:
        self._worker.close()


def score_all(
    dataset: str, args: Mapping[str, Any], seed: int, size: int, index: int, completions: Sequence[str]
) -> list[float]:
    """The worker's side: the dataset's own score, between 0 and 1, of each completion."""
    source = cached_dataset(dataset, json.dumps(args), seed, size)
    entry = source[index]
    return [float(source.score_answer(answer=completion.strip(), entry=entry)) for completion in completions]


@lru_cache(maxsize=4)
def cached_dataset(dataset: str, args: str, seed: int, size: int) -> Any:
    return make_dataset(dataset, json.loads(args), seed, size)


def version() -> str:
    installed = installed_version("reasoning-gym")
    if installed is None:
        raise TaskError(
            "task.name = 'reasoning_gym:…' needs the reasoning-gym package: pip install 'oapl[reasoning-gym]'."
        )
    return installed


def make_dataset(dataset: str, args: Mapping[str, Any], seed: int, size: int) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(dataset, size=size, seed=seed, **args)
    except (ValueError, TypeError, AssertionError) as error:
        raise TaskError(
            f"task.name = 'reasoning_gym:{dataset}' with task.args = {dict(args)} cannot be made: {error}"
        ) from error
