"""How long `oapl report` takes on a large run, and how large its page is.

    python benchmarks/report.py --output report.json

Makes a run folder of random completions in a temporary folder (through the store, as a sampler would), with the
shipped model as its newest policy, and writes reports of it in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from oapl.config import dump_recipe, load_recipe
from oapl.launch import environment
from oapl.model import load_tokenizer, resolve
from oapl.store import RunFolder
from oapl.types import Completion, Group, PolicyRef, Round, SamplingParams, Shard

RECIPE = Path(__file__).parent.parent / "recipes" / "countdown.toml"


def make_run(folder: Path, arguments: argparse.Namespace) -> RunFolder:
    """A run of `steps` optimizer steps whose completions are random tokens of the shipped model."""
    sizes = {"num_steps": arguments.steps, "weight_sync_steps": arguments.sync, "prompts_per_step": arguments.prompts}
    sampling = {"num_generations": arguments.generations, "max_completion_length": arguments.length}
    recipe = load_recipe(RECIPE, {"trainer": sizes, "sampling": sampling})
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.config_path.write_text(dump_recipe(recipe))
    rng = np.random.default_rng(0)
    tokenizer = load_tokenizer("builtin:countdown")
    for index in range(arguments.steps // arguments.sync):
        round = Round(
            index=index,
            policy=PolicyRef(index, index * arguments.sync, "0" * 64),
            sampling=SamplingParams(1.0, arguments.length, arguments.generations),
            seed=index,
            prompt_ids=tuple(f"train/{i}" for i in range(arguments.sync * arguments.prompts)),
            prompts_per_shard=arguments.prompts,
            verifier="random/1",
        )
        run.round(index).open(round)
        for number in range(arguments.sync):
            groups = [random_group(rng, tokenizer, position, arguments) for position in round.positions(number)]
            shard = Shard(tuple(groups), (), 1.0, 0.1, 0.0)
            run.round(index).write_shard(round, number, shard)
            run.append_metrics(record(rng, index * arguments.sync + number + 1, index, shard))
        run.round(index).seal(round)
    run.publish_policy(arguments.steps // arguments.sync, arguments.steps, copy_shipped_model)
    return run


def copy_shipped_model(folder: Path) -> None:
    shutil.copytree(resolve("builtin:countdown"), folder, dirs_exist_ok=True)


def random_group(rng: np.random.Generator, tokenizer: Any, position: int, arguments: argparse.Namespace) -> Group:
    lengths = rng.integers(arguments.length // 2, arguments.length + 1, size=arguments.generations)
    completions = [
        Completion(
            rng.integers(3, len(tokenizer), size=length).astype(np.int32),
            np.log(rng.uniform(0.2, 1.0, size=length)).astype(np.float32),
            "length" if length == arguments.length else "stop",
        )
        for length in lengths
    ]
    prompt = "use 4 9 6 make 30\n"
    return Group(
        position=position,
        prompt_id=f"train/{position}",
        prompt=prompt,
        prompt_ids=np.array(tokenizer(prompt)["input_ids"], np.int32),
        completions=tuple(completions),
        texts=tuple(tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)),
        rewards=rng.integers(0, 2, size=arguments.generations).astype(np.float32),
    )


def record(rng: np.random.Generator, step: int, index: int, shard: Shard) -> dict[str, Any]:
    """A line of metrics with every key a report draws."""
    names = ("reward", "entropy", "log_ratio_right", "log_ratio_wrong", "residual", "residual_std", "r2", "grad_norm")
    shares = ("uniform_share", "truncated_share", "effective_share", "success")
    seconds = {"sampling_s": 1.0, "grading_s": 0.1, "save_s": 0.0, "wait_s": 0.2, "step_s": 0.9}
    numbers = {name: float(rng.uniform()) for name in (*names, *shares)}
    counts = {"num_completions": shard.num_completions, "num_tokens": shard.num_tokens}
    length = shard.num_tokens / shard.num_completions
    return {"step": step, "round": index, "lag": 0, "time": 1.8e9 + step, "completion_length": length} | {
        **numbers,
        **counts,
        **seconds,
    }


def measure(run: RunFolder, output: Path, options: Sequence[str]) -> dict[str, Any]:
    """Seconds of a whole command, imports included, and megabytes of its page."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "oapl", "report", str(run.path), "--output", str(output), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": time.monotonic() - start, "cpu_s": cpu, "megabytes": output.stat().st_size / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("steps", 400), ("sync", 50), ("prompts", 32), ("generations", 8), ("length", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--output", type=Path, help="a JSON file for the numbers, with settings and versions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", arguments)
        page = Path(folder) / "report.html"
        results = {
            "tokens scored": measure(run, page, []),
            "not scored": measure(run, page, ["--no_scores"]),
            "no completions": measure(run, page, ["--groups", "0"]),
        }
    completions = arguments.steps * arguments.prompts * arguments.generations
    table = Table("report", "wall s", "CPU s", "MB", title=f"{arguments.steps} steps, {completions:,} completions")
    for name, found in results.items():
        table.add_row(name, f"{found['wall_s']:.1f}", f"{found['cpu_s']:.1f}", f"{found['megabytes']:.1f}")
    Console().print(table)
    if arguments.output:
        settings = {name: value for name, value in vars(arguments).items() if name != "output"}
        found = {"settings": settings, "results": results, "environment": environment()}
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
