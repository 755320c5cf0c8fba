"""The sign that a run is losing its right answers, read from its own metrics while its old policy is still good."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

LEAST_STEPS = 10
LEAST_COMPLETIONS = 256
"""What is averaged: the last so many steps, and more of them where they hold fewer completions than this."""
LEAST_SHARE = 0.5
"""Of its best chance of a right answer so far that a policy must keep."""
LEAST_LOSS = 0.1
"""Mean log-ratio of right answers, as a share of an answer's surprise, below which importance weights are believed."""


class Guard:
    """Watches the steps of a run, in order.

    A step's completions say how often the sampler was right (`success`), and with importance weights how often the
    trained policy would be now: `success * ratio_right`. Both are averaged over a window of the last steps and
    compared with the best such average of `success` before. The weights of long answers scatter widely, so a low
    weighted average counts only where right answers have on average also lost a share of their surprise.
    """

    def __init__(self) -> None:
        self._recent: deque[Mapping[str, Any]] = deque()
        self._num_completions = 0
        self._best = 0.0

    def observe(self, record: Mapping[str, Any]) -> str | None:
        """Takes the next step's record of metrics.jsonl; returns what is wrong, or None."""
        if "success" not in record:
            return None  # none of its groups could be graded
        self._recent.append(record)
        self._num_completions += record["num_completions"]
        if len(self._recent) < LEAST_STEPS or self._num_completions < LEAST_COMPLETIONS:
            return None
        while (
            len(self._recent) > LEAST_STEPS
            and self._num_completions - self._recent[0]["num_completions"] >= LEAST_COMPLETIONS
        ):
            self._num_completions -= self._recent.popleft()["num_completions"]
        success = self._mean("success")
        self._best = max(self._best, success)
        if success < LEAST_SHARE * self._best:
            return f"the sampler's share of right answers fell to {success:.3f}, from {self._best:.3f} at its best"
        now = sum(step["success"] * step.get("ratio_right", 0.0) for step in self._recent) / len(self._recent)
        right = [step["log_ratio_right"] for step in self._recent if "log_ratio_right" in step]
        loss = -sum(right) / len(right) if right else 0.0
        if now < LEAST_SHARE * self._best and loss > LEAST_LOSS * self._mean("surprise"):
            return (
                f"right answers are being unlearnt: they have lost {loss:.2f} nats on average, and by importance "
                f"weights the policy now gives {now:.3f} of them, where {self._best:.3f} was its best"
            )
        return None

    def _mean(self, name: str) -> float:
        return float(sum(step[name] for step in self._recent)) / len(self._recent)
