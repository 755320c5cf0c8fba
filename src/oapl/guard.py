"""The signs that a run is losing its right answers, read from its own metrics while an old policy is still good."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from oapl.errors import CollapseError
from oapl.store import RunFolder
from oapl.store.files import read_json

Record = Mapping[str, Any]

WARNING = "warning"
"""Under this name a step's record carries the sign to whoever shows it; metrics.jsonl has numbers alone."""

LEAST_HOLD, GOOD_HOLD, MOST_HOLD = 0.05, 0.5, 10.0
"""beta2 times the surprise of an answer (nats): 0.01 collapses, 0.2 to 1 holds and learns, 10 hardly learns
(docs/findings.md)."""

LEAST_STEPS = 10
"""A window holds at least so many steps."""
LEAST_KEPT = 0.4
"""Share of its right answers that a policy must keep, by importance weights, of those that its sampler gave."""
LEAST_LOSS = 0.1
"""Mean log-ratio of right answers, as a share of an answer's surprise, below which the weights are not believed."""
LEAST_SUCCESS = 0.5
"""Share of its best success so far that a sampler must reach."""


def good_beta2(surprise: float) -> float:
    """For answers of so many nats."""
    return GOOD_HOLD / surprise


def beta2_warning(record: Record) -> str | None:
    """What to say of a beta2 that does not fit the answers of a step, or None; only OAPL's steps have a `hold`."""
    hold = record.get("hold", GOOD_HOLD)
    if LEAST_HOLD <= hold <= MOST_HOLD:
        return None
    effect = (
        "so little hardly holds the policy, and right answers may be unlearnt"
        if hold < LEAST_HOLD
        else "so much lets the policy learn little"
    )
    return (
        f"loss.beta2 times the answers' mean surprise is {hold:.2g}: {effect}. With {record['surprise']:.1f} nats an "
        f"answer, try loss.beta2 = {good_beta2(record['surprise']):.1g}."
    )


class Window:
    """The last steps that together hold enough completions to tell a change from chance."""

    def __init__(self, least_completions: int) -> None:
        self._least = least_completions
        self._records: deque[Record] = deque()
        self._num_completions = 0

    def add(self, record: Record) -> bool:
        """Whether there are enough by now."""
        self._records.append(record)
        self._num_completions += record["num_completions"]
        while (
            len(self._records) > LEAST_STEPS
            and self._num_completions - self._records[0]["num_completions"] >= self._least
        ):
            self._num_completions -= self._records.popleft()["num_completions"]
        return len(self._records) >= LEAST_STEPS and self._num_completions >= self._least

    def mean(self, value: Callable[[Record], float | None]) -> float:
        """Over the steps that have the value; 0 where none has."""
        values = [given for record in self._records if (given := value(record)) is not None]
        return sum(values) / len(values) if values else 0.0


class Guard:
    """Watches the steps of a run, in order, for either of two signs.

    Right answers fade: on the sampler's own completions, importance weights say how many of its right answers the
    trained policy would still give (`ratio_right`). That is seen steps before the policy is used. The weights of long
    answers scatter widely, so they count only where right answers have on average also lost a share of their surprise.

    The sampler fails: its share of right answers, measured, falls well below its best. At small lags only this shows.
    It takes a longer window, since prompts differ much in difficulty.
    """

    def __init__(self) -> None:
        self._weighted = Window(least_completions=256)
        self._measured = Window(least_completions=1600)
        self._best = 0.0

    def observe(self, record: Record) -> str | None:
        """Takes the next step's record of metrics.jsonl; returns what is wrong, or None."""
        if "success" not in record:
            return None  # none of its groups could be graded
        signs = [self._fading(record), self._failing(record)]  # both, since each takes the record in
        return next((sign for sign in signs if sign is not None), None)

    def _fading(self, record: Record) -> str | None:
        if not self._weighted.add(record):
            return None
        sampled = self._weighted.mean(lambda step: step["success"])
        kept = self._weighted.mean(lambda step: step["success"] * step.get("ratio_right", 1.0))
        loss = -self._weighted.mean(lambda step: step.get("log_ratio_right"))
        if kept < LEAST_KEPT * sampled and loss > LEAST_LOSS * self._weighted.mean(lambda step: step["surprise"]):
            return (
                f"right answers are being unlearnt: they have lost {loss:.2f} nats on average, and by importance "
                f"weights the policy now gives {kept / sampled:.0%} of those that its sampler gave"
            )
        return None

    def _failing(self, record: Record) -> str | None:
        if not self._measured.add(record):
            return None
        success = self._measured.mean(lambda step: step["success"])
        self._best = max(self._best, success)
        if success < LEAST_SUCCESS * self._best:
            return f"the sampler's share of right answers fell to {success:.3f}, from {self._best:.3f} at its best"
        return None


def first_sign(metrics: Iterable[Record]) -> tuple[int, str] | None:
    """The step of a run that first showed a sign, and the sign; None where none did."""
    guard = Guard()
    return next(((record["step"], sign) for record in metrics if (sign := guard.observe(record)) is not None), None)


def collapse_error(run: RunFolder) -> CollapseError:
    """The error of a run that the guard has stopped."""
    facts = read_json(run.collapse_path, "step", "reason", "advice")
    return CollapseError(f"stopped at step {facts['step']}: {facts['reason']}. {facts['advice']}")
