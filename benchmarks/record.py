"""What a long record costs: a run of 1,000,000 groups in 500 rounds beside one of 1,000 groups, by the same recipe.

    make .venv/installed-dev
    .venv/bin/python benchmarks/record.py --output record.json

Makes both run folders through the store, as sampler and trainer do but for fsync, unless they are there (0.9 GB). The
groups are those of a few shards that the shipped model sampled, again and again. Beyond its finished rounds, each run
stands within a round of which half is sampled and a quarter trained, so what is still to be trained is the same. Then
each command runs in a process of its own, in turn on the one and the other; its floor is a process that imports what it
imports. Counts of files and listings are of the run folder, by Python's audit events.

Then a sampler fills one round with the shipped model, on the disk and in an object store (moto's, here), with each
part of its work timed; and a shard of long completions is stored, whatever would have sampled them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from machine import write_results

RECIPE = Path(__file__).parents[1] / "recipes" / "countdown.toml"
STEPS_PER_ROUND = 50
PROMPTS_PER_STEP = 40
SAMPLED, TRAINED = 25, 12
"""Shards of the round in work that are sampled and trained."""
NUM_TEMPLATES = 4
"""Shards that are really sampled."""


def overrides(num_rounds: int) -> dict[str, Any]:
    """Of the recipe, for a run of so many finished rounds and one in work."""
    return {
        "sampling": {"num_generations": 4},
        "trainer": {
            "num_steps": (num_rounds + 1) * STEPS_PER_ROUND,
            "weight_sync_steps": STEPS_PER_ROUND,
            "prompts_per_step": PROMPTS_PER_STEP,
            "save_steps": TRAINED,
            "on_collapse": "warn",
            "num_threads": 1,
        },
        "engine": {"num_threads": 1},
        "evaluation": {"num_prompts": 16, "num_generations": 4},
    }


# The record


def make_run(place: str, rounds: str) -> dict[str, Any]:
    """A run of so many finished rounds, and one in work."""
    from oapl.config import load_recipe
    from oapl.opening import open_run
    from oapl.plan import plan_evaluation, plan_round
    from oapl.sampler import Sampler
    from oapl.store import RunFolder
    from oapl.store.leases import Leases
    from oapl.tasks import make_task
    from oapl.train_loop import ensure_first_policy, start_or_resume, write_checkpoint

    os.fsync = lambda _: None
    folder, num_rounds = Path(place), int(rounds)
    recipe, run = load_recipe(RECIPE, overrides(num_rounds)), RunFolder(folder)
    open_run(recipe, run)
    ensure_first_policy(recipe, run)
    first = run.policy(0)
    assert first is not None
    task = make_task(recipe.task)
    sampler = Sampler(recipe, run.verified_policy_path)
    sampler.fill(run.evaluation(0), plan_evaluation(recipe, sampler.task, first))
    plan = plan_round(recipe, sampler.task, first, 0)
    blocks = range(NUM_TEMPLATES)
    scratch = RunFolder(folder / "scratch").round(0)
    templates = [shard for _, shard in sampler.make_shards(scratch, plan, blocks, {}, PROMPTS_PER_STEP)]
    sampler.close()
    shutil.rmtree(folder / "scratch")
    trainer = start_or_resume(recipe, run)
    run.remove_checkpoint(0)
    record = trainer.train_step(templates[0], "")
    trainer.consumed.clear()

    def copy_policy(place: Path) -> None:
        for path in run.policy_path(0).iterdir():
            if path.name != "sealed.json":
                os.link(path, place / path.name)

    def save(step: int) -> None:
        trainer.step = step
        run.write_checkpoint(step, partial(write_checkpoint, trainer, run))

    for index in range(num_rounds + 1):
        policy = run.publish_policy(index, index * STEPS_PER_ROUND, copy_policy)
        round = plan_round(recipe, task, policy, index)
        folder_of_round = run.round(index)
        folder_of_round.open_once(round)
        leases = Leases(folder_of_round.path / "leases", recipe.launch.lease_s)
        is_last = index == num_rounds
        if index >= num_rounds - 1:
            save(index * STEPS_PER_ROUND)
        for number in range(SAMPLED if is_last else STEPS_PER_ROUND):
            template, positions = templates[number % NUM_TEMPLATES], round.positions(number)
            groups = tuple(
                replace(group, position=position, prompt_id=round.prompt_ids[position])
                for group, position in zip(template.groups, positions, strict=True)
            )
            lease = leases.take(f"block-{number:05d}")
            assert lease is not None
            with lease:
                folder_of_round.write_shard(round, number, replace(template, groups=groups))
            if is_last and number >= TRAINED:
                continue
            trainer.consumed.append(folder_of_round.shard_seal(number)["digest"])
            step = index * STEPS_PER_ROUND + number + 1
            seconds = {"lag": number, "save_s": 0.1, "wait_s": 0.2, "step_s": 0.9, "time": 1.8e9 + step}
            run.append_metrics({"step": step, "round": index, "epoch": 0, **record, **seconds})
        if not is_last:
            folder_of_round.seal(round)
    save(num_rounds * STEPS_PER_ROUND + TRAINED)
    return {"num_groups": num_rounds * recipe.trainer.prompts_per_round + SAMPLED * PROMPTS_PER_STEP}


# What is measured, each in a process of its own


class Reached(Exception):
    """The trainer is ready for its next step."""


def resume(folder: Path) -> None:
    """All that `oapl train` does before its first new step, but for the engine and the step itself."""
    from oapl.config import load_recipe
    from oapl.opening import open_run
    from oapl.store import RunFolder
    from oapl.train_loop import run_trainer

    def ready(_: int) -> None:
        raise Reached

    run = RunFolder(folder)
    recipe = load_recipe(run.config_path)
    if notes := open_run(recipe, run):
        raise SystemExit(f"{folder} is damaged: {notes}")
    with suppress(Reached):
        run_trainer(recipe, run, lambda: False, fill_round=ready)


def join(folder: Path) -> None:
    """A sampler's look for work, up to what it would sample first."""
    from oapl.config import load_recipe
    from oapl.launch import how_ended
    from oapl.results import unsampled
    from oapl.sampler import missing_shards
    from oapl.store import RunFolder
    from oapl.tasks import make_task

    run = RunFolder(folder)
    recipe = load_recipe(run.config_path)
    assert how_ended(recipe, run) is None
    place, _, plan = next(unsampled(recipe, run))
    round = plan(task=make_task(recipe.task))
    place.check_planned(round)
    assert len(missing_shards(place, range(round.num_shards))) == STEPS_PER_ROUND - SAMPLED
    assert place.read_drafts(round) == {}


def find_weights(folder: Path) -> None:
    """What `oapl eval RUN` looks at before it samples."""
    from oapl.assessment import find_target

    target = find_target(str(folder), None, None)
    assert target.weights is not None
    assert target.weights.find() is not None


def prune(folder: Path) -> None:
    from oapl.store import RunFolder

    RunFolder(folder).prune()


def command(*words: str) -> Callable[[Path], None]:
    """A command of `oapl`, with the run's folder for {}."""

    def run(folder: Path) -> None:
        from oapl.cli import main

        if main([word.format(folder) for word in words]) != 0:
            raise SystemExit(f"oapl {' '.join(words)} failed")

    return run


REPORT = ("report", "{}", "--output", "{}.html")
CASES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "resume": ("oapl.launch, oapl.train_loop, oapl.opening", resume),
    "join as a sampler": ("oapl.launch, oapl.sampler", join),
    "oapl inspect": ("oapl.cli, oapl.inspection", command("inspect", "{}")),
    "oapl inspect --groups 0": ("oapl.cli, oapl.inspection", command("inspect", "{}", "--groups", "0")),
    "oapl report": ("oapl.cli, oapl.report.page, oapl.scoring", command(*REPORT)),
    "oapl report --no_scores": ("oapl.cli, oapl.report.page", command(*REPORT, "--no_scores")),
    "oapl report --groups 0": ("oapl.cli, oapl.report.page", command(*REPORT, "--groups", "0")),
    "oapl eval, until it samples": ("oapl.assessment", find_weights),
    "prune": ("oapl.store", prune),
}


def look(case: str, folder: str | None = None) -> dict[str, float]:
    """Runs a case, or for its floor imports what it needs: seconds after the imports, and what of the run folder was
    opened and listed."""
    imports, work = CASES[case]
    found: dict[str, float] = {"files": 0, "listings": 0}
    exec(f"import {imports}")
    if folder is not None:

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event in ("open", "os.scandir", "os.listdir") and str(args[0]).startswith(f"{folder}/"):
                found["files" if event == "open" else "listings"] += 1

        sys.addaudithook(hook)
        start = time.perf_counter()
        work(Path(folder))
        found["work_s"] = time.perf_counter() - start
    return found


def measure(case: str, folder: Path | None) -> dict[str, float]:
    """A case in a process of its own; with its seconds and megabytes, imports included."""
    if folder is not None and case == "prune":
        copy = folder.with_name(f"{folder.name}-copy")
        shutil.copytree(folder, copy, copy_function=os.link)
        folder = copy
    start = time.perf_counter()
    found = answer("look", case, *([folder] if folder else []))
    found["wall_s"] = time.perf_counter() - start
    if folder is not None and case == "prune":
        shutil.rmtree(folder)
    return found


# A sampler's work on the record, beside its sampling


def fill_round(place: str, num_shards: str) -> dict[str, Any]:
    """A round of so many shards, sampled by the shipped model into a folder or an object store: milliseconds a group of
    each part of the work, and the requests."""
    import oapl.sampler as module
    from oapl.config import load_recipe, merge
    from oapl.judging import Judge
    from oapl.plan import plan_round
    from oapl.sampler import Sampler
    from oapl.store import RoundFolder, RunFolder
    from oapl.store.leases import Lease, Leases
    from oapl.train_loop import ensure_first_policy

    steps = {"num_steps": int(num_shards), "weight_sync_steps": int(num_shards)}
    recipe = load_recipe(RECIPE, merge(overrides(0), {"trainer": steps}))
    run, seconds, requests = RunFolder(place), defaultdict[str, float](float), Counter[str]()
    ensure_first_policy(recipe, run)
    policy = run.policy(0)
    assert policy is not None
    sampler = Sampler(recipe, run.verified_policy_path)
    sampler.hold(policy)

    def time_it(part: str, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return real(*args, **options)
            finally:
                seconds[part] += time.perf_counter() - start

        setattr(owner, name, timed)

    for part, owner, *names in (
        ("generate", sampler.engine, "generate"),
        ("sample", sampler, "sample"),
        ("grade", Judge, "grade"),
        ("open the round", sampler, "_open"),
        ("leases", Leases, "take"),
        ("leases", Lease, "__exit__"),
        ("drafts", RoundFolder, "read_drafts", "write_draft"),
        ("drafts", module, "remove_stored"),
        ("look what is missing", module, "missing_shards"),
        ("store shards", RoundFolder, "write_shard"),
        ("seal the round", module, "check_some_graded"),
        ("seal the round", RoundFolder, "seal"),
    ):
        for name in names:
            time_it(part, owner, name)
    count_requests(requests)
    start = time.perf_counter()
    round = plan_round(recipe, sampler.task, policy, 0)
    seconds["plan"] = time.perf_counter() - start
    sampler.fill(run.round(0), round)
    total = time.perf_counter() - start
    sampler.close()
    seconds["tokens to text"] = seconds.pop("sample") - seconds["generate"]
    seconds["the rest"] = total - sum(seconds.values())
    return {
        "num_groups": round.num_prompts,
        "ms_per_group": {part: 1e3 * each / round.num_prompts for part, each in seconds.items()},
        "requests_per_group": {name: count / round.num_prompts for name, count in requests.items()},
    }


def count_requests(counts: Counter[str]) -> None:
    """Of this process to S3, from now on, by their kind."""
    from aiobotocore.client import AioBaseClient

    real = AioBaseClient._make_api_call

    async def counted(self: Any, operation: str, arguments: Any) -> Any:
        counts[operation] += 1
        return await real(self, operation, arguments)

    AioBaseClient._make_api_call = counted


def store_long_answers(place: str, length: int = 4096) -> dict[str, float]:
    """A shard of completions of so many random tokens: seconds a million tokens to store and to read it, the best of
    some."""
    import numpy as np

    from oapl.store import RunFolder
    from oapl.types import Completion, Group, PolicyRef, Round, SamplingParams, Shard, Verdict

    rng = np.random.default_rng(0)
    sampling = SamplingParams(1.0, length, 4)
    ids = tuple(f"train/{i}" for i in range(PROMPTS_PER_STEP))
    groups = tuple(
        Group(
            position=position,
            prompt_id=ids[position],
            prompt="prompt",
            prompt_ids=np.arange(100, dtype=np.int32),
            completions=tuple(
                Completion(
                    rng.integers(0, 150_000, length).astype(np.int32),
                    -rng.exponential(0.3, length).astype(np.float32),
                    "stop",
                )
                for _ in range(4)
            ),
            texts=tuple(" ".join(map(str, rng.integers(0, 9999, length))) for _ in range(4)),
            verdicts=(Verdict(1.0), Verdict(0.0), Verdict(0.0), Verdict(1.0)),
        )
        for position in range(PROMPTS_PER_STEP)
    )
    shard, found = Shard(groups, (), 1.0, 0.1, 0.0), defaultdict[str, list[float]](list)
    for turn in range(5):
        round = Round(turn, PolicyRef(0, 0, "0" * 64), sampling, 0, ids, PROMPTS_PER_STEP, "random/1")
        folder = RunFolder(place).round(turn)
        folder.open_once(round)
        for name, work in (
            ("store", partial(folder.write_shard, round, 0, shard)),
            ("read", partial(folder.read_shard, 0)),
        ):
            start = time.perf_counter()
            work()
            found[name].append(1e6 * (time.perf_counter() - start) / shard.num_tokens)
    size = folder.parquet_path(0).stat().st_size
    return {**{name: min(times) for name, times in found.items()}, "bytes_per_token": size / shard.num_tokens}


@contextmanager
def object_store() -> Iterator[str]:
    """A bucket of an S3 server on this machine, which holds it in memory."""
    import fsspec

    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    try:
        while True:
            with socket.socket() as place:
                if place.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        fsspec.filesystem("s3").mkdir("record")
        yield "s3://record/run"
    finally:
        server.kill()
        server.wait()


def measure_sampler(num_shards: int) -> dict[str, Any]:
    """On the disk and in an object store; prints a table on the way."""
    with tempfile.TemporaryDirectory() as folder:
        found = {"disk": answer("fill", f"{folder}/run", num_shards), "long answers": answer("store", f"{folder}/long")}
    with object_store() as place:
        found["object store"] = answer("fill", place, num_shards)
    disk, remote = (found[place]["ms_per_group"] for place in ("disk", "object store"))
    print("\n| ms a group | disk | object store |\n|---|---|---|")
    for part in disk:
        print(f"| {part} | {disk[part]:.2f} | {remote[part]:.2f} |")
    print(f"\nrequests a group: {found['object store']['requests_per_group']}\nlong answers: {found['long answers']}")
    return found


def answer(case: str, *words: object) -> dict[str, Any]:
    """What a process of its own says in its last line."""
    command = [sys.executable, __file__, "--child", case, "--words", *map(str, words)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(said.splitlines()[-1]))


def measure_record(
    cases: Sequence[str], num_turns: int, runs: Mapping[str, Path]
) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by case and run; prints a table on the way. Seconds are those after the imports, megabytes all."""
    print("| | imports: s, MB | 1,000 groups: s, MB, files, listings | large: s, MB, files, listings | ratio of s |")
    print("|---|---|---|---|---|")
    found = {}
    for case in cases:
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in ("floor", *runs)}
        for _ in range(num_turns):
            for name, each in turns.items():
                each.append(measure(case, runs.get(name)))
        medians = {
            name: {key: statistics.median(turn[key] for turn in each) for key in each[0]}
            for name, each in turns.items()
        }
        floor, small, large = medians.values()
        texts = [
            f"{each['work_s']:.2f}, {each['megabytes']:.0f}, {each['files']:.0f}, {each['listings']:.0f}"
            for each in (small, large)
        ]
        ratio = large["work_s"] / small["work_s"]
        print(
            f"| {case} | {floor['wall_s']:.1f}, {floor['megabytes']:.0f} | {' | '.join(texts)} | {ratio:.1f} |",
            flush=True,
        )
        found[case] = medians
    return found


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "make": make_run,
    "look": look,
    "fill": fill_round,
    "store": store_long_answers,
}


def child(case: str, words: Sequence[str]) -> None:
    """What a process of its own does, and the most memory that it held."""
    found = CHILDREN[case](*words)
    print(json.dumps({**found, "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/record"), help="where the run folders lie, or will")
    parser.add_argument("--rounds", type=int, default=500, help="finished rounds of the large run")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--shards", type=int, default=STEPS_PER_ROUND, help="of the round that is sampled")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--words", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.words)
        return
    runs = {name: args.folder / name for name in ("small", "large")}
    for place, num_rounds in zip(runs.values(), (0, args.rounds), strict=True):
        if not place.exists():
            answer("make", place, num_rounds)
    found = {"record": measure_record(args.cases, args.turns, runs), "sampler": measure_sampler(args.shards)}
    args.folder = None  # no result names a folder of one machine
    write_results(args, ("oapl", "torch", "transformers", "pyarrow", "s3fs", "moto"), **found)


if __name__ == "__main__":
    main()
