"""A long record costs no more than a short one: what is looked at does not grow with the rounds that are done.

Looks are counted and named, not timed: files opened, folders listed, names looked up; in an object store, requests.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console

from helpers import flip_a_bit, make_group, make_round, make_shard
from oapl.assessment import find_target
from oapl.config import Recipe, load_recipe
from oapl.inspection import inspect
from oapl.opening import open_run
from oapl.paths import ObjectPath, StorePath
from oapl.report.completions import MAX_SHARDS, sample_groups
from oapl.results import unsampled
from oapl.store import RunFolder, Unscored, put_in_order
from oapl.store.files import SEAL, files_in, write_json
from oapl.store.rounds import IMPORTED
from oapl.train_loop import ensure_first_policy, run_trainer, start_or_resume, write_checkpoint

STEPS_PER_ROUND = 2
SHORT, LONG = 30, 60
"""Finished rounds: more than `oapl inspect` shows and than a report takes samples from."""

watched: list[tuple[str, list[str]]] = []
"""The folder that is watched, and what was looked at in it so far."""


def note(event: str, args: tuple[Any, ...]) -> None:
    if watched and event in ("open", "os.scandir", "os.listdir"):
        note_path(args[0])


def note_path(path: object) -> None:
    folder, seen = watched[-1]
    if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(folder):
        seen.append(os.path.relpath(path, folder))


sys.addaudithook(note)


@contextmanager
def looks(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every file of the run that is opened, every folder listed, every name looked up, each time that it is."""
    real_stat = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        note_path(path)
        return real_stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        watched.append((f"{run.path}{os.sep}", []))
        try:
            yield watched[-1][1]
        finally:
            watched.pop()


def in_older_rounds(seen: list[str], first: int) -> list[str]:
    """What of it lies in rounds and policies before these."""
    parts = [path.split(os.sep) for path in seen]
    return [
        os.sep.join(each)
        for each in parts
        if each[0] in ("rounds", "policies") and len(each) > 1 and each[1].isdigit() and 0 < int(each[1]) < first
    ]


@pytest.fixture
def recipe(write_recipe: Callable[..., Path]) -> Recipe:
    return load_recipe(write_recipe(trainer={"num_steps": 1000, "weight_sync_steps": STEPS_PER_ROUND}))


def make_record(run: RunFolder, num_rounds: int, publish: Callable[[int], object]) -> None:
    """So many rounds that are sampled and trained, and one of which a shard is sampled, and trained."""
    for index in range(num_rounds + 1):
        publish(index)
        policy = run.policy(index)
        assert policy is not None
        round = make_round(index, policy, num_shards=STEPS_PER_ROUND)
        run.round(index).open(round)
        for number in range(STEPS_PER_ROUND if index < num_rounds else 1):
            run.round(index).write_shard(round, number, make_shard([make_group(number, [1.0, 0.0])]))
            run.append_metrics(metrics_line(index * STEPS_PER_ROUND + number + 1, index))
        if index < num_rounds:
            run.round(index).seal(round)


def metrics_line(step: int, index: int) -> dict[str, float]:
    seconds = {"sampling_s": 1.5, "save_s": 0.0, "wait_s": 0.5, "step_s": 2.0}
    return {"step": step, "round": index, "reward": 0.5, "num_completions": 2, **seconds}


def make_run(folder: Path, recipe: Recipe, num_rounds: int) -> RunFolder:
    """A run on a disk, whose policies are all alike."""
    run = RunFolder(folder)
    open_run(recipe, run)
    ensure_first_policy(recipe, run)

    def copy_first(place: Path) -> None:
        for path in files_in(Path(run.policy_path(0))):
            if path.name != SEAL:
                shutil.copy(path, place)

    make_record(run, num_rounds, lambda version: run.publish_policy(version, version * STEPS_PER_ROUND, copy_first))
    trainer = start_or_resume(recipe, run)
    for trainer.step in (num_rounds * STEPS_PER_ROUND, num_rounds * STEPS_PER_ROUND + 1):
        run.write_checkpoint(trainer.step, partial(write_checkpoint, trainer, run))
    run.remove_checkpoint(0)
    return run


class Reached(Exception):
    """The trainer is ready for its next step."""


def resume(recipe: Recipe, run: RunFolder) -> None:
    def ready(_: int) -> None:
        raise Reached

    assert open_run(recipe, run) == []
    with suppress(Reached):
        run_trainer(recipe, run, lambda: False, fill_round=ready)
        raise AssertionError("the trainer did not ask for its round")


@pytest.fixture
def short(tmp_path: Path, recipe: Recipe) -> RunFolder:
    return make_run(tmp_path / "short", recipe, SHORT)


@pytest.fixture
def long(tmp_path: Path, recipe: Recipe) -> RunFolder:
    return make_run(tmp_path / "long", recipe, LONG)


def test_a_resume_looks_at_no_finished_round(recipe: Recipe, short: RunFolder, long: RunFolder, monkeypatch):
    counts = []
    for run, num_rounds in ((short, SHORT), (long, LONG)):
        with looks(run, monkeypatch) as seen:
            resume(recipe, run)
        assert in_older_rounds(seen, num_rounds) == []
        counts.append(len(seen))
    assert counts[0] == counts[1]


def test_a_resume_after_all_recorded_rounds_looks_at_no_finished_round(
    recipe: Recipe, short: RunFolder, long: RunFolder, tmp_path: Path, monkeypatch
):
    """The other run has no round that is left to be brought in."""
    launch = recipe.launch.model_copy(update={"rounds_from": str(tmp_path / "source")})
    offline, counts = recipe.model_copy(update={"launch": launch}), []
    for run, num_rounds in ((short, SHORT), (long, LONG)):
        for index in range(num_rounds):
            write_json(run.round(index).path / IMPORTED, {"from": f"{tmp_path}/source/rounds/{index:06d}"})
        with looks(run, monkeypatch) as seen:
            resume(offline, run)
        assert in_older_rounds(seen, num_rounds) == []
        counts.append(len(seen))
    assert counts[0] == counts[1]


def test_damage_in_what_is_to_be_trained_is_found_however_long_the_record(recipe: Recipe, long: RunFolder):
    round = long.round(LONG).load()
    long.round(LONG).write_shard(round, 1, make_shard([make_group(1, [1.0, 0.0])]))
    flip_a_bit(Path(long.round(LONG).parquet_path(1)))
    (note,) = open_run(recipe, long)
    assert f"{LONG:06d}/groups-00001.parquet does not match its seal" in note


def test_a_sampler_that_joins_looks_at_no_finished_round(recipe: Recipe, long: RunFolder, monkeypatch):
    with looks(long, monkeypatch) as seen:
        folder, policy, _ = next(unsampled(recipe, long))
    assert (folder.path.name, policy.version) == (f"{LONG:06d}", LONG)
    assert in_older_rounds(seen, LONG) == []


def test_an_evaluation_of_the_newest_policy_looks_at_no_other(long: RunFolder, monkeypatch):
    with looks(long, monkeypatch) as seen:
        target = find_target(str(long.path), None, None)
    assert target.weights is not None
    assert target.weights.name == f"policy {LONG}"
    assert in_older_rounds(seen, LONG) == []


def inspected(run: RunFolder, **options: int) -> str:
    console = Console(file=StringIO(), width=200)
    inspect(run, console, **options)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_inspect_reads_the_rounds_it_shows_and_no_other(long: RunFolder, monkeypatch):
    with looks(long, monkeypatch) as seen:
        text = inspected(long, num_rounds=3)
    assert in_older_rounds(seen, LONG - 2) == []
    rows = re.findall(r"^ *(\d+) +\d+ +\d/2", text, re.MULTILINE)  # round, policy, shards
    assert rows == [f"{LONG - 2}", f"{LONG - 1}", f"{LONG}"]
    assert f"{LONG - 2} older rounds are not shown: --rounds {LONG + 1} shows all." in text
    assert "older rounds" not in inspected(long, num_rounds=LONG + 1)


def test_inspect_takes_a_sealed_rounds_numbers_from_its_seal_alone(long: RunFolder, monkeypatch):
    sealed = next(line for line in inspected(long).splitlines() if line.split()[:1] == [str(LONG - 1)])
    # Two shards of 1.5 s were sampled, and none of their groups failed.
    assert sealed.split()[2:4] == ["2/2", "0"]
    assert "3.0" in sealed.split()
    with looks(long, monkeypatch) as seen:
        inspected(long, num_groups=0)
    shards = [path for path in seen if path.startswith(f"rounds/{LONG - 1:06d}/groups")]
    assert shards == []


def test_a_report_reads_as_much_of_a_long_record_as_of_a_short_one(short: RunFolder, long: RunFolder, monkeypatch):
    shards, listed = [], []
    for run, num_rounds in ((short, SHORT), (long, LONG)):
        with looks(run, monkeypatch) as seen:
            _, num_groups, notes = sample_groups(run, STEPS_PER_ROUND, 60)
        assert notes == []
        assert num_groups == num_rounds * STEPS_PER_ROUND + 1  # a group a shard
        shards.append(sum(path.endswith(".parquet") for path in seen))
        listed.append(len({path.split(os.sep)[1] for path in seen if path.startswith("rounds/0")}))
    assert shards == [MAX_SHARDS, MAX_SHARDS]
    assert listed == [MAX_SHARDS, MAX_SHARDS]


def requests_to_put_in_order(name: str, num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a run in an object store, by this process's own."""
    path: StorePath = ObjectPath(f"memory://{name}/run")
    run = RunFolder(path)

    def write(place: Path) -> None:
        (place / "model.safetensors").write_bytes(b"weights")

    make_record(run, num_rounds, lambda version: run.publish_policy(version, version * STEPS_PER_ROUND, write))
    run.write_checkpoint(num_rounds * STEPS_PER_ROUND, write)
    count = 0
    ask = ObjectPath._ask

    def counted(self: ObjectPath, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return ask(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectPath, "_ask", counted)
        notes = put_in_order(
            run,
            steps_per_round=STEPS_PER_ROUND,
            shards_per_round=STEPS_PER_ROUND,
            num_rounds=1000,
            policy_of_round=lambda index: index,
            unscored=lambda: Unscored(frozenset({0, 1000})),
        )
    assert notes == []
    return count


def test_in_an_object_store_a_resume_asks_as_often_however_long_the_record(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OAPL_CACHE", str(tmp_path))
    try:
        assert requests_to_put_in_order("a", 3, monkeypatch) == requests_to_put_in_order("b", LONG, monkeypatch)
    finally:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
