"""What a task is: prompts by split and index, and a reward for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from oapl.types import Prompt, Split


class Task(Protocol):
    """Problems with a verifiable reward."""

    verifier: str
    """Name and version of what gives the reward; stored with every round."""

    def num_prompts(self, split: Split) -> int | None:
        """How many prompts a split has; None for a generator that never ends."""
        ...

    def prompt(self, split: Split, index: int) -> Prompt:
        """The same prompt for the same split and index, in every process and session."""
        ...

    def rewards(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """One finite reward a completion, in order. Raises GradingError where that cannot be had."""
        ...

    def start(self) -> None:
        """Starts what grading needs. Raises TaskError where it cannot, before anything is sampled."""
        ...

    def close(self) -> None:
        """Ends what the task started (worker processes)."""
        ...
