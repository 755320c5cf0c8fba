"""Benchmarks by name: where their rows lie, and what grades them.

They stand wherever a dataset may: `task.eval_dataset = "aime_2025"`, `oapl eval MODEL --benchmark aime_2025`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import date
from typing import Literal


@dataclass(frozen=True)
class Benchmark:
    name: str
    kind: Literal["math", "code"]
    """The task that poses and grades it."""
    path: str
    """Its name on the hub."""
    split: str
    config: str | None = None
    """The hub dataset's configuration, where it has several."""
    data_files: tuple[str, ...] = ()
    """Files of the hub dataset, where only some of them belong to it."""
    window: tuple[str, str] | None = None
    """The first and the last `contest_date` of its problems, as YYYY-MM-DD."""


LIVECODEBENCH_RELEASES = 6
"""Each has a file, and holds the problems of those before it (LiveCodeBench's dataset card)."""

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("aime_2024", "math", "HuggingFaceH4/aime_2024", "train"),
        Benchmark("aime_2025", "math", "MathArena/aime_2025", "train"),
        Benchmark("hmmt_feb_2025", "math", "MathArena/hmmt_feb_2025", "train"),
        Benchmark("hmmt_nov_2025", "math", "MathArena/hmmt_nov_2025", "train"),
        Benchmark("brumo_2025", "math", "MathArena/brumo_2025", "train"),
        Benchmark("math_500", "math", "HuggingFaceH4/MATH-500", "test"),
        Benchmark("gsm8k", "math", "openai/gsm8k", "test", config="main"),
        Benchmark("amc", "math", "math-ai/amc23", "test"),
        Benchmark("human_eval", "code", "openai/openai_humaneval", "test"),
        Benchmark("livecodebench", "code", "livecodebench/code_generation_lite", "train"),
    )
}


def find_benchmark(text: str) -> Benchmark | None:
    """The benchmark that a name stands for, or None where it is none's.

    LiveCodeBench takes a release and a window of contest dates, both optional:
    `livecodebench@v5@2024-08-01..2025-02-01`; without a release it is the newest known here. Raises ValueError for a
    release or a date that cannot be.
    """
    name, *parts = text.split("@")
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        return None
    if name != "livecodebench":
        if parts:
            raise ValueError(f"{text!r}: only livecodebench has releases and dates. Write {name!r}")
        return benchmark
    release, window = LIVECODEBENCH_RELEASES, None
    for part in parts:
        if match := re.fullmatch(r"(?:release_)?v(\d+)", part):
            release = int(match[1])
            if not 1 <= release <= LIVECODEBENCH_RELEASES:
                raise ValueError(f"{text!r}: there are releases v1 to v{LIVECODEBENCH_RELEASES}")
        else:
            window = parse_window(text, part)
    files = tuple(f"test{number if number > 1 else ''}.jsonl" for number in range(1, release + 1))
    return replace(benchmark, name=text, data_files=files, window=window)


def parse_window(text: str, part: str) -> tuple[str, str]:
    try:
        first, last = map(date.fromisoformat, part.split(".."))
        if first > last:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text!r}: {part!r} is neither a release, as v5, nor dates, as 2024-08-01..2025-02-01"
        ) from None
    return first.isoformat(), last.isoformat()
