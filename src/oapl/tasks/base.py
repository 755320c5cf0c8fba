"""What a task is: prompts by split and index, and verdicts on completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from oapl.types import Prompt, Split, Verdict


class Task(Protocol):
    """Problems with a verifiable reward."""

    verifier: str
    """Name and version of what gives the reward; stored with every round."""

    num_workers: int
    """How many groups it is worth grading side by side."""

    def num_prompts(self, split: Split) -> int | None:
        """How many prompts a split has; None for a generator that never ends."""
        ...

    def prompt(self, split: Split, index: int) -> Prompt:
        """The same prompt for the same split and index, in every process and session."""
        ...

    def grade(self, prompt: Prompt, completions: Sequence[str]) -> list[Verdict]:
        """One verdict a completion, in order. Raises GradingError where that cannot be had. Threads may call it."""
        ...

    def start(self) -> None:
        """Starts what grading needs. Raises TaskError where it cannot, before anything is sampled."""
        ...

    def close(self) -> None:
        """Ends what the task started (worker processes)."""
        ...
