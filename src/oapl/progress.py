"""What a person sees while a run goes on: one live panel on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from oapl.config import Recipe

RECENT = 20
"""Steps and shards that the shown rates are averaged over."""
LINE_EVERY_S = 10.0


class Progress:
    """Takes events of a run and shows them. Use as a context manager."""

    def __init__(self, recipe: Recipe, console: Console) -> None:
        self._console, self._num_steps = console, recipe.trainer.num_steps
        self._num_rounds = recipe.trainer.num_rounds
        self._phase = "starting"
        self._step: Mapping[str, Any] = {}
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=RECENT)
        self._shards: deque[Mapping[str, Any]] = deque(maxlen=RECENT)
        self._shards_done = 0
        self._last_line = 0.0
        self._told = 0
        """The last step that a line was printed of."""
        self._bar = Bar(TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[note]}"))
        self._task = self._bar.add_task("starting", total=None, note="")
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
        self._tell_last()

    def note(self, text: str) -> None:
        """Something the user should know, kept on the screen."""
        self._console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)

    def phase(self, name: str) -> None:
        self._tell_last()
        self._phase, self._shards_done = name, 0
        self._shards.clear()
        if self._live is None:
            self._console.print(f"{name} …", markup=False)
        self.refresh()

    def step(self, record: Mapping[str, Any]) -> None:
        self._step = record
        self._steps.append(record)
        if self._live is None and time.monotonic() - self._last_line > LINE_EVERY_S:
            self._tell()
        self.refresh()

    def shard(self, event: Mapping[str, Any]) -> None:
        self._shards.append(event)
        self._shards_done += 1
        if event["num_failed_groups"]:
            where = f"{self._phase}, round {event['round']}, shard {event['shard']}"
            self.note(f"{where}: {event['num_failed_groups']} groups failed grading")
        self.refresh()

    def refresh(self) -> None:
        if self._live is None:
            return
        if self._phase == "training":
            done, total, note = self._step.get("step", 0), self._num_steps, self._time_left()
        else:
            total = self._shards[-1]["num_shards"] if self._shards_done else 0
            done, note = self._shards_done, ""
        self._bar.update(self._task, description=self._phase, completed=done, total=total, note=note)
        self._live.update(Group(self._bar, *([self._table()] if self._step else [])), refresh=True)

    def _tell_last(self) -> None:
        """The last step of a phase has a line, however little time has passed."""
        if self._live is None and self._step and self._told != self._step["step"]:
            self._tell()

    def _tell(self) -> None:
        self._last_line, self._told = time.monotonic(), self._step["step"]
        self._console.print(self._line(), highlight=False, markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 3))
        shown = self._values()
        names = list(shown)
        for start in range(0, len(names), 4):
            table.add_row(*(f"[dim]{name}[/dim] {shown[name]}" for name in names[start : start + 4]))
        return table

    def _line(self) -> str:
        return "  ".join([*(f"{name} {value}" for name, value in self._values().items()), self._time_left()])

    def _values(self) -> dict[str, str]:
        record = self._step
        return {
            "step": f"{record['step']}/{self._num_steps}",
            "round": f"{record['round'] + 1}/{self._num_rounds}",
            "lag": str(record.get("lag", "-")),
            "reward": f"{self._mean('reward'):.3f}",
            "entropy": f"{self._mean('entropy'):.3f}",
            "log-ratio right": f"{self._mean('log_ratio_right'):+.2f}",
            "log-ratio wrong": f"{self._mean('log_ratio_wrong'):+.2f}",
            "tokens/s trainer": _rate(self._steps, "num_tokens", "step_s"),
            "tokens/s sampler": _rate(self._shards or self._steps, "num_tokens", "sampling_s"),
        }

    def _mean(self, key: str) -> float:
        values = [record[key] for record in self._steps if key in record]
        return sum(values) / len(values) if values else float("nan")

    def _time_left(self) -> str:
        if len(self._steps) < 2:
            return ""
        span = self._steps[-1]["time"] - self._steps[0]["time"]
        left_s = span / (len(self._steps) - 1) * (self._num_steps - self._step["step"])
        return f"{int(left_s) // 60}:{int(left_s) % 60:02d} left"


def _rate(records: deque[Mapping[str, Any]], amount: str, seconds: str) -> str:
    spent = sum(record[seconds] for record in records)
    return f"{sum(record[amount] for record in records) / spent:,.0f}" if spent > 0 else "-"
