"""What a machine can do at best, measured in the run that it is compared with, and what it is."""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def matmul_rate(size: int = 2048, repeats: int = 8) -> float:
    """bf16 FLOP/s of a square product, the best of some."""
    import torch

    a, b = (torch.randn(size, size).bfloat16() for _ in range(2))
    return 2 * size**3 / best_time(lambda: a @ b, repeats)


def read_bandwidth(num_bytes: int = 2**29, repeats: int = 8) -> float:
    """Bytes a second at which memory is read in order, the best of some."""
    import torch

    a = torch.ones(num_bytes // 4)
    return num_bytes / best_time(a.sum, repeats)


def best_time(work: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def facts(*packages: str) -> dict[str, Any]:
    """Versions of what is installed of these, and the platform."""
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return {"versions": versions, "platform": platform.platform()}


def write_results(args: argparse.Namespace, packages: tuple[str, ...], **found: Any) -> None:
    """Into `--output`, where it is given: what was found, with versions and the other arguments."""
    if args.output:
        settings = {name: value for name, value in vars(args).items() if name not in ("output", "child", "data")}
        values = {**facts(*packages), "settings": settings, **found}
        args.output.write_text(json.dumps(values, indent=1, default=str) + "\n")
