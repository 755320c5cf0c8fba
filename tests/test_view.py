"""`oapl view`: what it answers and what it refuses, and how the page behaves in a real browser, on a run that goes on.

The browser tests leave pictures for a person in tests/screenshots.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import browser

pytest.importorskip("duckdb", reason="no duckdb here: pip install 'oapl[view]'")
pytest.importorskip("starlette", reason="no starlette here: pip install 'oapl[view]'")

import duckdb
from starlette.testclient import TestClient

from helpers import make_completion, make_group, make_round
from oapl.cli import main
from oapl.config import dump_recipe, load_recipe
from oapl.errors import ConfigError
from oapl.report.completions import TokenScores
from oapl.store import RunFolder
from oapl.types import FailedGroup, Group, PolicyRef, Shard
from oapl.view.app import make_app
from oapl.view.index import Filters, Index
from oapl.view.metrics import Metrics, last_record
from oapl.view.runs import Runs

SCREENSHOTS = Path(__file__).parent / "screenshots"
RECIPE = Path(__file__).parent.parent / "recipes" / "countdown.toml"
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'><b>bold</b>"
TURNED = "\u202eabc\u200b\x1b[31m"
ANSWERS = ("1+2=3\n3*4=12", f"2*2=4 {TURNED}", HOSTILE, "4-1=3\n")
REWARDS = (1.0, 0.0, 0.0, 1.0)
MEANS = (-0.5, -0.25, -2.0, -1.5)
"""Log-prob a token of each answer."""
TOKEN = "a-token-of-43-characters-that-nobody-guesses"
WAIT_S = 60.0


def make_run(
    folder: Path, *, rounds: int = 2, sync: int = 3, trained: int = 4, seed: int = 0, **task: Any
) -> RunFolder:
    """Rounds of `sync` shards of two groups of four answers; the last group of round 0 could not be graded."""
    sizes = {"num_steps": rounds * sync, "weight_sync_steps": sync, "prompts_per_step": 2}
    recipe = load_recipe(RECIPE, {"seed": seed, "trainer": sizes, "sampling": {"num_generations": 4}, "task": task})
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.config_path.write_text(dump_recipe(recipe))
    for index in range(rounds):
        round = make_round(index, PolicyRef(index, index * sync, "0" * 64), num_shards=sync, prompts_per_shard=2)
        run.round(index).open(round)
        for number in range(sync):
            add_shard(run, index, number, failing=(index, number) == (0, sync - 1))
    for step in range(1, trained + 1):
        run.append_metrics(metrics_line(step, sync))
    return run


def add_shard(run: RunFolder, index: int, number: int, *, failing: bool = False) -> None:
    round = run.round(index).load()
    groups = [answers_group(position) for position in round.positions(number)]
    failed: tuple[FailedGroup, ...] = ()
    if failing:
        last = groups.pop()
        failed = (FailedGroup(last.position, last.prompt_id, f"timed out {HOSTILE}", last.without_verdicts()),)
    run.round(index).write_shard(round, number, Shard(tuple(groups), failed, 1.5, 0.25, 0.0))


def answers_group(position: int) -> Group:
    ends = ("stop", "stop", "length", "stop")
    completions = [make_completion([8, 9, 10], [mean] * 3, end) for mean, end in zip(MEANS, ends, strict=True)]
    group = make_group(position, REWARDS, prompt_ids=[3, 8, 4], completions=completions)
    return replace(group, texts=ANSWERS, prompt=f"use 1 2 3 make {position}\n")


def metrics_line(step: int, sync: int) -> dict[str, Any]:
    return {
        "step": step,
        "round": (step - 1) // sync,
        "epoch": 0,
        "lag": (step - 1) % sync,
        "time": 1.8e9 + step,
        "reward": 0.1 * step,
        "num_completions": 8,
        "num_tokens": 24,
        "entropy": 0.5 / step,
        "sampling_s": 1.5,
        "grading_s": 0.25,
        "wait_s": 0.5,
        "step_s": 1.0,
        "save_s": 0.125,
    }


def pieces_and_ratios(run: RunFolder, sampled: Any) -> TokenScores:
    """Scores whose tokens are as hostile as a tokenizer can make them."""
    pieces = [[[HOSTILE, "\n", TURNED] for _ in item.group.completions] for item in sampled]
    ratios = [[np.array([0.5, -0.5, 0.0], np.float32) for _ in item.group.completions] for item in sampled]
    return TokenScores(2, pieces, ratios)


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come true in {WAIT_S:.0f} s"
        time.sleep(0.05)
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "runs" / "a[1]*<b>")


NAME = "a[1]*<b>"


@pytest.fixture
def index(run: RunFolder, tmp_path: Path) -> Iterator[Index]:
    index = Index(run, 1.0, None, tmp_path / "index")
    wait_for(lambda: index.progress.num_read == 6, "the index of six shards")
    yield index
    index.close()


def client_of(
    folder: Path, scorer: Any = None, token: str | None = None, base: str = "http://127.0.0.1:8760"
) -> TestClient:
    names = ["localhost"] if token is None else ["localhost", "trainer.example"]
    return TestClient(make_app(Runs([folder]), scorer, names, token, 8760), base_url=base, follow_redirects=False)


@pytest.fixture
def client(run: RunFolder) -> Iterator[TestClient]:
    with client_of(Path(run.path).parent, pieces_and_ratios) as client:
        yield client


def completions(client: TestClient, num_read: int = 6, **query: Any) -> dict[str, Any]:
    wait_for(
        lambda: client.get("/api/state", params={"run": NAME}).json()["index"]["num_read"] == num_read, "the index"
    )
    answer = client.get("/api/completions", params={"run": NAME, **query})
    assert answer.status_code == 200, answer.text
    return answer.json()


# The index


def test_wrong_but_likely_and_right_but_rare_are_ordered_by_the_log_prob_of_a_token(index: Index):
    likely = index.page(Filters(verdict="wrong", order="likely"))
    rare = index.page(Filters(verdict="right", order="rare"))
    assert likely["total"] == rare["total"] == 2 * (12 - 1)  # two of each in every graded group
    assert {row["idx"] for row in likely["rows"][:11]} == {1}  # -0.25 a token, and then -2
    assert {row["idx"] for row in rare["rows"][:11]} == {3}  # -1.5 a token, and then -0.5
    assert likely["rows"][0]["logprob"] == pytest.approx(3 * MEANS[1])
    assert likely["rows"][0]["mean_logprob"] == pytest.approx(MEANS[1])


def test_newest_completions_come_first_with_the_beginning_of_their_texts(index: Index):
    rows = index.page(Filters())["rows"]
    assert [(row["round"], row["shard"], row["idx"]) for row in rows[:4]] == [(1, 2, i) for i in range(4)]
    assert [row["text"] for row in rows[:4]] == list(ANSWERS)


def test_truncated_and_failed_groups_are_found_with_the_cause(index: Index):
    cut = index.page(Filters(finish="length"))
    assert {row["idx"] for row in cut["rows"]} == {2}
    assert cut["total"] == 12
    failed = index.page(Filters(verdict="failed", finish="length", order="likely"))
    assert [(row["round"], row["position"], row["prompt_id"]) for row in failed["rows"]] == [(0, 5, "train/5")]
    assert failed["rows"][0]["cause"].startswith("timed out")


def test_filters_hold_together(index: Index):
    found = index.page(Filters(prompt="train/3", first_round=1, least_reward=1.0))
    assert [(row["round"], row["prompt_id"], row["reward"]) for row in found["rows"]] == [(1, "train/3", 1.0)] * 2
    assert index.page(Filters(last_round=0, most_reward=0.0))["total"] == 2 * 5
    assert index.page(Filters(prompt="' OR true --"))["total"] == 0


def test_a_value_that_is_none_of_those_known_is_refused():
    with pytest.raises(ConfigError, match="order is one of newest, likely"):
        Filters(order="reward; DROP TABLE completions")  # type: ignore[arg-type]


def test_a_search_goes_through_shards_newest_first_and_says_how_far_it_came(index: Index):
    found = index.search(Filters(text="ONERROR"))  # in whatever case
    assert [(row["round"], row["position"], row["idx"]) for row in found["rows"]] == [
        (round, position, 2)
        for round in (1, 0)
        for position in (4, 5, 2, 3, 0, 1)  # the newest shard first
    ]
    assert (found["searched"], found["shards"], found["before"]) == (6, 6, None)
    nothing = index.search(Filters(text="nowhere"), seconds=0.0)  # time for one look at some shards
    assert (nothing["rows"], nothing["searched"], nothing["before"]) == ([], 4, [0, 2])


def test_a_search_that_is_gone_on_with_finds_each_completion_once(run: RunFolder, tmp_path: Path):
    for index in (2, 3, 4, 5):
        round = make_round(index, PolicyRef(index, 3 * index, "0" * 64), num_shards=3, prompts_per_shard=2)
        run.round(index).open(round)
        for number in range(3):
            add_shard(run, index, number)
    index = Index(run, 1.0, None, tmp_path / "index")
    wait_for(lambda: index.progress.num_read == 18, "the index")
    first = index.search(Filters(text="="))  # in every answer, so in 8 of a shard
    assert len(first["rows"]) == 7 * 8  # as many shards as fill a page of 50
    rows, found = list(first["rows"]), first
    while found["before"] is not None:
        found = index.search(Filters(text="="), tuple(found["before"]))
        rows += found["rows"]
    index.close()
    keys = [(row["round"], row["position"], row["idx"]) for row in rows]
    assert len(keys) == len(set(keys)) == 18 * 8
    assert keys == sorted(keys, key=lambda key: (-key[0], -(key[1] // 2), key[1], key[2]))


def test_shards_that_are_sealed_later_or_again_are_taken_in(run: RunFolder, index: Index):
    run.round(0).set_shard_aside(1)
    wait_for(lambda: index.page(Filters())["total"] == 5 * 8, "the shard that is gone")
    add_shard(run, 0, 1)
    wait_for(lambda: index.page(Filters())["total"] == 6 * 8, "the shard that is back")
    assert index.progress.notes == []


def test_a_damaged_shard_is_named_and_the_others_are_shown(run: RunFolder, tmp_path: Path):
    path = Path(run.round(1).parquet_path(1))
    path.write_bytes(path.read_bytes()[:200])
    index = Index(run, 1.0, None, tmp_path / "index")
    wait_for(lambda: index.progress.num_read == 6, "the index")
    assert index.page(Filters())["total"] == 5 * 8
    assert [note.partition(":")[0] for note in index.progress.notes] == ["Shard 1 of round 1 is left out"]
    assert len(index.search(Filters(text="1+2"))["rows"]) == 5 * 2
    index.close()


@pytest.mark.parametrize("position", ["x", True, -1, 2**70])
def test_a_seal_with_a_failure_of_the_wrong_kind_leaves_out_its_shard_and_doubles_no_other(
    run: RunFolder, tmp_path: Path, position: Any
):
    path = Path(run.round(0).seal_path(2))
    seal = json.loads(path.read_text())
    seal["failed"][0]["position"] = position
    path.write_text(json.dumps(seal))
    index = Index(run, 1.0, None, tmp_path / "index")
    wait_for(lambda: index.progress.num_read == 6, "the index of six shards")
    index.update()
    assert index.page(Filters())["total"] == 5 * 8
    assert index.page(Filters(verdict="failed"))["total"] == 0
    (note,) = index.progress.notes
    assert note.startswith("Shard 2 of round 0 is left out: its seal")
    index.close()


def test_a_seal_that_is_no_file_or_nested_without_end_leaves_out_its_shard_and_the_index_goes_on(
    run: RunFolder, tmp_path: Path
):
    seals = [Path(run.round(0).seal_path(number)) for number in (0, 1)]
    seals[0].write_text("[" * 200_000)
    seals[1].unlink()
    os.mkfifo(seals[1])
    parquet = Path(run.round(0).parquet_path(2))
    parquet.unlink()
    parquet.symlink_to(parquet)
    index = Index(run, 1.0, None, tmp_path / "index")
    wait_for(lambda: index.progress.num_read == 6, "the index of six shards")
    assert index.page(Filters())["total"] == 3 * 8
    assert sorted(note.partition(" is left out")[0] for note in index.progress.notes) == [
        f"Shard {number} of round 0" for number in range(3)
    ]
    index.close()


def test_the_index_goes_on_after_a_look_that_failed(run: RunFolder, index: Index, monkeypatch: pytest.MonkeyPatch):
    look = index.update
    failures = iter([RuntimeError("once")])

    def fail_once() -> None:
        for failure in failures:
            raise failure
        look()

    monkeypatch.setattr(index, "update", fail_once)
    wait_for(lambda: index.progress.notes == ["The index cannot be kept up now: once"], "the note")
    Path(run.round(1).seal_path(2)).unlink()
    wait_for(lambda: index.progress.num_read == 5, "the next look")


def test_a_batch_that_cannot_be_taken_in_leaves_nothing_behind(index: Index):
    cursor = index._database.cursor()
    bad = {(0, 0): [(0, 0, "x", "train/0", "why")]}
    with pytest.raises(duckdb.Error):
        index._insert({(0, 0): index._files[0, 0]}, bad, cursor)
    assert index.page(Filters())["total"] == 6 * 8  # the answers of the failed group are shown as well
    cursor.execute("SELECT 1")  # and the next can begin


def test_the_graders_own_score_says_what_is_right_where_other_rewards_are_added(tmp_path: Path):
    run = make_run(tmp_path / "run")
    for number in range(3):
        run.round(1).set_shard_aside(number)
    round = run.round(1).load()
    group = answers_group(0)
    scored = tuple(
        replace(v, reward=0.5, scores={"math": 1.0 if i == 2 else 0.0}) for i, v in enumerate(group.verdicts)
    )
    run.round(1).write_shard(round, 0, Shard((replace(group, verdicts=scored),), (), 1.0, 0.1, 0.0))
    index = Index(run, 1.0, "math", tmp_path / "index")
    wait_for(lambda: index.progress.num_read == 4, "the index")
    assert [row["idx"] for row in index.page(Filters(verdict="right", first_round=1))["rows"]] == [2]
    index.close()


# Metrics


def test_metrics_are_read_on_and_a_step_done_again_counts_as_the_later_line_says(tmp_path: Path):
    run = RunFolder(tmp_path)
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.refresh()
    assert len(metrics) == 0
    for step in (1, 2, 3):
        run.append_metrics(metrics_line(step, 3))
    metrics.refresh()
    run.append_metrics({**metrics_line(2, 3), "reward": 0.9, "r2": 0.5})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "rew')
    metrics.refresh()
    assert metrics.column("reward").tolist() == pytest.approx([0.1, 0.9, 0.3])
    assert metrics.column("r2", -1.0).tolist() == [-1.0, 0.5, -1.0]
    assert metrics.column("reward").tolist() == pytest.approx([record["reward"] for record in run.metrics()])
    assert last_record(tmp_path / "metrics.jsonl") == {**metrics_line(2, 3), "reward": 0.9, "r2": 0.5}
    run.append_metrics(metrics_line(4, 3))  # ends the line that was cut short
    metrics.refresh()
    assert metrics.column("step").tolist() == [1, 2, 3, 4]
    version = metrics.version
    (tmp_path / "metrics.jsonl").rename(tmp_path / "before.jsonl")
    for step in range(1, 10):  # another run's, which is longer
        run.append_metrics({**metrics_line(step, 3), "reward": 0.5})
    metrics.refresh()
    assert metrics.column("reward").tolist() == [0.5] * 9
    assert metrics.version > version


# What is answered


def test_a_runs_state_has_curves_rounds_load_and_the_round_on_the_wire(client: TestClient):
    state = client.get("/api/state", params={"run": NAME}).json()
    assert state["status"] == {"kind": "unfinished", "text": "unfinished: step 4 of 6"}
    assert state["curves"]["reward"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [chart["id"] for chart in state["charts"]] == ["reward", "entropy", "lag"]
    assert [wire["states"] for wire in state["wire"]] == [["trained", "stored", "stored"]]  # round 1, of which one step
    assert state["load"]["wait_s"] == pytest.approx(4 * 0.5)
    assert [(each["index"], each["num_failed"]) for each in state["rounds"]] == [(1, 0), (0, 1)]
    again = client.get("/api/state", params={"run": NAME, "seen": state["version"]}).json()
    assert "curves" not in again


def test_who_holds_a_lease_is_told_until_it_is_given_back(run: RunFolder, client: TestClient):
    from oapl.store.leases import Leases

    for number in (1, 2):
        run.round(1).set_shard_aside(number)
    lease = Leases(run.round(1).path / "leases", 60.0).take("block-00001")
    assert lease is not None
    with lease:
        wire = client.get("/api/state", params={"run": NAME}).json()["wire"][0]
        assert wire["states"] == ["trained", "leased", "waits"]
        assert [(held["shard"], held["pid"]) for held in wire["leases"]] == [(1, os.getpid())]
    assert client.get("/api/state", params={"run": NAME}).json()["wire"][0]["leases"] == []


def test_a_group_is_whole_with_verdicts_and_scores(client: TestClient):
    group = client.get("/api/group", params={"run": NAME, "round": 1, "position": 3}).json()
    assert [answer["text"] for answer in group["answers"]] == list(ANSWERS)
    assert [answer["is_right"] for answer in group["answers"]] == [True, False, False, True]
    assert (group["prompt_id"], group["step"], group["file"]) == ("train/3", 5, "rounds/000001/groups-00001.parquet")
    scores = client.get("/api/scores", params={"run": NAME, "round": 1, "position": 3}).json()
    assert scores == {"why": "The run holds no policy any more."}
    ungraded = client.get("/api/group", params={"run": NAME, "round": 0, "position": 5}).json()
    assert ungraded["cause"].startswith("timed out")
    assert "reward" not in ungraded["answers"][0]


def test_log_ratios_come_from_the_newest_sealed_policy_and_large_weights_are_asked_for_first(
    run: RunFolder, client: TestClient, monkeypatch: pytest.MonkeyPatch
):
    for version in (0, 1, 2):
        run.publish_policy(version, 3 * version, lambda place: (place / "model.safetensors").write_bytes(b"x" * 100))
    query = {"run": NAME, "round": 1, "position": 3}
    scores = client.get("/api/scores", params=query).json()
    assert (scores["policy"], scores["answers"][0]["ratios"]) == (2, [0.5, -0.5, 0.0])
    monkeypatch.setattr("oapl.view.app.MAX_WEIGHTS", 99)
    other = {**query, "position": 4}
    assert client.get("/api/scores", params=other).json() == {"policy": 2, "bytes": 100}
    assert client.get("/api/scores", params={**other, "large": 1}).json()["policy"] == 2


def test_scores_are_of_the_group_and_the_policy_that_are_there_now(run: RunFolder, tmp_path: Path):
    calls: list[float] = []

    def scorer(run: RunFolder, sampled: Any) -> TokenScores:
        calls.append(float(sampled[0].group.completions[0].logprobs[0]))
        return pieces_and_ratios(run, sampled)

    def publish(data: bytes) -> None:
        run.publish_policy(0, 0, lambda place: (place / "model.safetensors").write_bytes(data))

    publish(b"x")
    with client_of(Path(run.path).parent, scorer) as client:

        def digests() -> set[str]:
            query = {"run": NAME, "round": 1, "position": 0}
            return {client.get(f"/api/{kind}", params=query).json()["digest"] for kind in ("group", "scores")}

        (before,) = digests()
        digests()
        assert len(calls) == 1  # kept
        folder = run.round(1)
        folder.set_shard_aside(0)
        round = folder.load()
        other = replace(answers_group(0), completions=tuple([make_completion([8, 9], [-3.0] * 2, "stop")] * 4))
        folder.write_shard(round, 0, Shard((other, answers_group(1)), (), 1.5, 0.25, 0.0))
        (after,) = digests()
        assert after != before
        assert calls == [MEANS[0], -3.0]
        shutil.rmtree(run.policy_path(0))
        publish(b"y")
        digests()
        assert len(calls) == 3


def test_runs_are_listed_newest_activity_first_and_new_ones_appear(
    run: RunFolder, client: TestClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("oapl.view.runs.LOOK_EVERY_S", 0.0)
    assert [each["name"] for each in client.get("/api/runs").json()["runs"]] == [NAME]
    make_run(Path(run.path).parent / "studies" / "one" / "runs" / "b")
    assert [each["name"] for each in client.get("/api/runs").json()["runs"]] == ["studies/one/runs/b", NAME]
    (Path(run.path).parent / "broken").mkdir()
    for damage in ("no = recipe", "no = " + "[" * 50_000):
        (Path(run.path).parent / "broken" / "config.toml").write_text(damage)
        (note,) = client.get("/api/runs").json()["notes"]
        assert note.startswith("broken: ")


def test_a_run_that_is_continued_with_other_settings_is_shown_with_them(
    run: RunFolder, client: TestClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("oapl.view.runs.LOOK_EVERY_S", 0.0)
    assert completions(client, verdict="right")["total"] == 11 * 2
    before = client.get("/api/state", params={"run": NAME}).json()
    recipe = load_recipe(run.config_path, {"trainer": {"num_steps": 60}, "task": {"success_threshold": 2.0}})
    run.config_path.write_text(dump_recipe(recipe))
    (card,) = client.get("/api/runs").json()["runs"]
    state = client.get("/api/state", params={"run": NAME, "seen": before["version"]}).json()
    assert (card["num_steps"], state["num_steps"], state["settings"]["trainer.num_steps"]) == (60, 60, "60")
    assert "curves" in state  # no version comes twice
    assert completions(client, verdict="right")["total"] == 0


def test_nothing_is_written_into_a_run(run: RunFolder, client: TestClient):
    def listing() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in Path(run.path).rglob("*")}

    before = listing()
    completions(client, text="1+2")
    client.get("/api/group", params={"run": NAME, "round": 1, "position": 3})
    client.get("/api/scores", params={"run": NAME, "round": 1, "position": 3})
    client.get("/api/runs")
    assert listing() == before


# What is refused


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/%2e%2e/cli.py",
        "/etc/passwd",
        "//etc/passwd",
        "/api/state?run=../../etc",
        "/api/state?run=/etc",
        "/api/state",
        f"/api/group?run={NAME.replace('[', '%5B')}&round=-1&position=0",
        f"/api/group?run={NAME.replace('[', '%5B')}&round=7&position=0",
        f"/api/group?run={NAME.replace('[', '%5B')}&round=1&position=6",
    ],
)
def test_a_path_outside_of_the_runs_is_not_found(client: TestClient, path: str):
    assert client.get(path).status_code == 404


def test_links_out_of_the_folder_are_not_followed(run: RunFolder, tmp_path: Path):
    secret = make_run(tmp_path / "secret")
    (Path(run.path).parent / "link").symlink_to(secret.path)
    parquet = Path(run.round(1).parquet_path(1))
    parquet.unlink()
    parquet.symlink_to(secret.round(1).parquet_path(1))
    with client_of(Path(run.path).parent) as client:
        assert [each["name"] for each in client.get("/api/runs").json()["runs"]] == [NAME]
        assert completions(client, first_round=1)["total"] == 2 * 8
        answer = client.get("/api/group", params={"run": NAME, "round": 1, "position": 2})
        assert (answer.status_code, "is not followed" in answer.text) == (404, True)


@pytest.mark.parametrize("file", ["config.toml", "metrics.jsonl", "summary.json", "collapse.json"])
def test_a_run_whose_own_file_is_a_link_out_is_a_note_and_the_file_is_not_read(
    run: RunFolder, tmp_path: Path, file: str
):
    secret = make_run(tmp_path / "secret")
    (secret.path / "collapse.json").write_text("{}")
    (secret.path / "summary.json").write_text("{}")
    linked = make_run(Path(run.path).parent / "linked")
    Path(linked.path / file).unlink(missing_ok=True)
    Path(linked.path / file).symlink_to(secret.path / file)
    with client_of(Path(run.path).parent) as client:
        answer = client.get("/api/runs").json()
        assert [each["name"] for each in answer["runs"]] == [NAME]
        (note,) = answer["notes"]
        assert note.startswith("linked: ")
        assert note.endswith("is not followed")
        assert client.get("/api/state", params={"run": "linked"}).status_code == 404


def test_links_out_among_seals_leases_and_weights_are_not_followed(run: RunFolder, tmp_path: Path):
    secret = make_run(tmp_path / "secret")
    seal = Path(run.round(0).seal_path(0))
    seal.unlink()
    seal.symlink_to(secret.round(0).seal_path(0))
    (run.round(1).path / "leases").symlink_to(secret.path)
    run.publish_policy(0, 0, lambda place: (place / "model.safetensors").write_bytes(b"x"))
    weights = Path(run.policy_path(0)) / "model.safetensors"
    weights.unlink()
    weights.symlink_to(secret.config_path)
    with client_of(Path(run.path).parent, pieces_and_ratios) as client:
        state = client.get("/api/state", params={"run": NAME}).json()
        assert [each["index"] for each in state["rounds"]] == [1]
        assert state["wire"] == []
        assert [note.endswith("is not followed") for note in state["notes"]] == [True, True]
        for kind, query in (("group", {"round": 0, "position": 0}), ("scores", {"round": 1, "position": 0})):
            answer = client.get(f"/api/{kind}", params={"run": NAME, **query})
            assert (answer.status_code, "is not followed" in answer.text) == (404, True)


def test_one_malformed_file_hides_neither_its_run_nor_the_others(run: RunFolder):
    bad = make_run(Path(run.path).parent / "bad")
    seal = Path(bad.round(0).seal_path(0))
    seal.write_text(json.dumps({**json.loads(seal.read_text()), "num_groups": "x"}))
    (bad.round(1).path / "leases").mkdir()
    (bad.round(1).path / "leases" / "block-00000.0.json").write_text("[]")
    with open(bad.metrics_path, "a") as metrics:
        metrics.write('{"step": "7"}\n' + "[" * 50_000 + "\n")
    with client_of(Path(run.path).parent) as client:
        assert {each["name"] for each in client.get("/api/runs").json()["runs"]} == {NAME, "bad"}
        state = client.get("/api/state", params={"run": "bad"}).json()
        assert [each["index"] for each in state["rounds"]] == [1]
        assert state["step"] == 7
        (note,) = state["notes"]
        assert note.startswith("Round 0 cannot be shown now: ")


@pytest.mark.parametrize("number", ["", "x", "1e9", "99999999999", "--1", "\u0661"])
def test_what_is_no_number_is_refused(client: TestClient, number: str):
    answer = client.get("/api/group", params={"run": NAME, "round": 1, "position": number})
    assert (answer.status_code, answer.json()["error"][:8]) == (400, "position")


@pytest.mark.parametrize("number", ["x", "1e39", "-1e39", "nan", "inf"])
def test_a_reward_that_is_no_finite_number_of_32_bits_is_refused(client: TestClient, number: str):
    answer = client.get("/api/completions", params={"run": NAME, "least_reward": number})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("least_reward must be a number")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_and_head_are_answered(client: TestClient, method: str):
    assert client.request(method, "/api/runs").status_code == 405
    assert client.head("/").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8760", "127.0.0.1.evil.example", "10.0.0.1:8760", "a@localhost", ""]
)
def test_a_name_that_is_not_ours_is_refused(client: TestClient, host: str):
    assert client.get("/api/runs", headers={"host": host}).status_code == 421
    for own in ("localhost:8760", "127.0.0.1:9000", "[::1]:8760"):  # whatever the port: it may be forwarded
        assert client.get("/api/runs", headers={"host": own}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    ],
)
def test_a_request_from_another_origin_is_refused(client: TestClient, headers: dict[str, str]):
    for path in ("/", "/static/view.js", "/api/runs"):
        assert client.get(path, headers=headers).status_code == 403
    assert client.get("/api/runs", headers={"origin": "http://127.0.0.1:8760"}).status_code == 200


def test_a_link_on_another_page_opens_the_page_and_nothing_else(client: TestClient):
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert client.get("/", headers=link).status_code == 200
    assert client.get("/api/runs", headers=link).status_code == 403


def test_every_answer_forbids_foreign_scripts_frames_and_guessed_types(client: TestClient):
    for path in ("/", "/api/runs", "/static/view.js", "/nowhere"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


def test_without_the_token_nothing_is_answered_and_with_it_a_cookie_takes_its_place(run: RunFolder):
    with client_of(Path(run.path).parent, token=TOKEN, base="http://trainer.example:8760") as client:
        for path in (
            "/",
            "/static/view.js",
            "/api/runs",
            "/?token=",
            f"/?token={TOKEN[:-1]}x",
            f"/api/runs?token={TOKEN}",
        ):
            assert client.get(path).status_code == 401
        assert client.get("/", headers={"cookie": "oapl_view_8760=wrong"}).status_code == 401
        answer = client.get(f"/?token={TOKEN}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        for flag in ("HttpOnly", "SameSite=strict", "Path=/"):
            assert flag in answer.headers["set-cookie"]
        assert client.get("/api/runs").status_code == 200  # by the cookie
        assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 421


def test_an_object_store_is_refused_with_what_to_do_instead(capsys: pytest.CaptureFixture[str]):
    assert main(["view", "s3://bucket/runs"]) == 2
    assert "oapl inspect s3://bucket/runs" in capsys.readouterr().err


def test_a_folder_that_is_not_there_and_a_missing_package_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert main(["view", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err
    monkeypatch.setattr("oapl.cli.find_spec", lambda name: None if name == "duckdb" else find_spec(name))
    assert main(["view", str(tmp_path)]) == 1
    assert "pip install 'oapl[view]'" in capsys.readouterr().err


def test_the_page_weighs_less_than_a_megabyte():
    static = Path(make_app.__code__.co_filename).parent / "static"
    assert sum(path.stat().st_size for path in static.iterdir()) < 1_000_000


# In a browser, on a folder with a run that goes on


class Server:
    """`oapl view` in a process of its own."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "oapl", "view", *words, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        match = re.search(r"http://\S+", self.process.stdout.readline())
        assert match is not None
        self.url = match[0]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=WAIT_S)
        return self.process.returncode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, with one that is there."""
    folder = tmp_path_factory.mktemp("view") / "runs"
    make_run(folder / "one<i>", rounds=30)  # long enough for a second page
    return folder


@pytest.fixture(scope="module")
def live(folder: Path, driver: Any) -> Iterator[str]:
    """The name of a run that is trained while the tests look at it."""
    settings = {
        "trainer.num_steps": 20,
        "trainer.weight_sync_steps": 5,
        "trainer.prompts_per_step": 4,
        "sampling.num_generations": 4,
        "evaluation.num_prompts": 4,
        "evaluation.num_generations": 4,
        "trainer.num_threads": 1,
        "engine.num_threads": 1,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "oapl", "train", str(RECIPE), "--run_dir", str(folder / "live"), *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    yield "live"
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_S)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(str(folder))
    yield server
    assert server.stop() == 0


class Page:
    """The page in the browser; whatever a test did, the console must have stayed silent."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self, state: str) -> None:
        browser.set_window(self.driver, 1200, 800)
        self.prefer("light")
        self.driver.get("about:blank")
        self.driver.get(f"{self.url}{state}")

    def prefer(self, theme: str) -> None:
        media = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})

    def value(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    def wait(self, condition: str) -> Any:
        return wait_for(lambda: self.value(condition), condition)

    def text(self, selector: str) -> str:
        return str(
            self.driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        )

    def click(self, selector: str) -> None:
        self.driver.execute_script("document.querySelector(arguments[0]).click()", selector)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def picture(self, name: str, whole: bool = True) -> None:
        browser.take_picture(self.driver, SCREENSHOTS / f"view-{name}.png", whole)

    def findings(self) -> list[str]:
        """What axe-core finds serious or critical, where its package is here."""
        spec = find_spec("axe_playwright_python")
        if spec is None or not spec.submodule_search_locations:
            pytest.skip("no axe-core here: pip install axe-playwright-python")
        script = Path(spec.submodule_search_locations[0], "axe.min.js").read_text()
        self.driver.execute_script(script)
        found = self.driver.execute_async_script(
            "axe.run(document, {resultTypes: ['violations']}).then(arguments[arguments.length - 1])"
        )
        return [
            f"{each['id']}: {node['html'][:120]} {node['failureSummary'][:200]}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]


@pytest.fixture
def page(driver: Any, server: Server) -> Iterator[Page]:
    page = Page(driver, server.url)
    driver.get_log("browser")
    yield page
    assert driver.get_log("browser") == []


ROWS = "document.querySelectorAll('a.row').length"
OTHER = "one%3Ci%3E"


@pytest.mark.slow
def test_a_new_run_appears_and_is_followed_to_its_end(page: Page, folder: Path, live: str):
    page.open("#runs")
    page.wait("[...document.querySelectorAll('.list th a')].some((a) => a.textContent === 'live')")
    page.picture("list")
    page.driver.execute_script(
        "[...document.querySelectorAll('.list th a')].find((a) => a.textContent === 'live').click()"
    )
    page.wait(f"{ROWS} > 0")
    page.wait("document.querySelectorAll('.strip rect').length === 5")
    page.wait("document.querySelector('.curve.run0')")
    steps = "Number(document.querySelector('progress')?.value)"
    seen = page.wait(f"{steps} > 0 && {steps}")
    first = page.value("document.querySelector('a.row').dataset.key")
    page.picture("live")
    page.wait(f"{steps} > {seen}")
    page.wait(f"document.querySelector('a.row').dataset.key !== '{first}'")  # newer ones have landed
    page.wait("document.querySelector('.kind.finished')")
    assert page.text(".now .status").startswith("finished, 20 steps")
    page.wait("document.querySelector('[aria-label=\"pass@k\"]')")
    page.wait(f"{ROWS} === 50 && document.querySelector('.pager').textContent.includes('of 320')")
    page.picture("finished")


@pytest.mark.slow
def test_a_completion_shows_how_far_the_newest_policy_moved_each_token(page: Page, folder: Path, live: str):
    page.open("#run?run=live&first_round=0&last_round=0&verdict=wrong&order=likely")
    page.wait(f"{ROWS} > 0")
    page.click("a.row")
    page.wait("document.querySelector('.scored')")
    assert re.match(r"log-ratio .* nats: policy \d+, the newest sealed, against policy 0", page.text(".scored"))
    assert page.value("document.querySelectorAll('#completion-text span[data-token]').length") > 1
    text = page.text("#completion-text")
    page.picture("completion", whole=False)
    page.driver.execute_script("document.getElementById('completion-text').focus()")
    page.press("\ue014")  # right arrow
    assert page.text(".reading").startswith("token 1 ")
    permanent = page.value("document.querySelector('.permanent').href")
    page.driver.get("about:blank")
    page.driver.get(permanent)
    page.wait("document.querySelector('#completion-text')?.textContent")
    page.wait("document.querySelector('.scored')")
    assert page.text("#completion-text") == text  # the link opens this very one


def test_presets_filter_and_every_state_has_an_address(page: Page):
    page.open(f"#run?run={OTHER}")
    page.wait(f"{ROWS} === 50")
    page.click(".presets button:nth-child(2)")
    page.wait("document.querySelectorAll('.row .mark.wrong').length === 50")
    assert "verdict=wrong" in page.driver.current_url
    assert page.value("document.querySelector('[name=order]').value") == "likely"
    page.click(".pager button")
    page.wait("location.hash.includes('offset=50')")
    page.driver.back()
    page.driver.back()
    page.wait("document.querySelector('[name=order]').value === ''")
    page.click(".presets button:nth-child(5)")
    page.wait("document.querySelector('.snippet')?.textContent.startsWith('timed out')")
    page.click("a.row")
    page.wait("document.querySelector('dialog[open] dl.facts')")
    assert "not graded" in page.text("dialog dl.facts")
    page.open(f"#run?run={OTHER}&text=1%2B2%3D3")
    page.wait(f"{ROWS} >= 50")
    page.click(".go-on")
    page.wait(f"{ROWS} > 60")


def test_a_hostile_completion_is_text(page: Page):
    page.open(f"#run?run={OTHER}&open=29.1.2")
    page.wait(f"{ROWS} === 50 && document.querySelector('#completion-text')?.textContent")
    assert page.text("#completion-text") == HOSTILE
    assert page.value("document.querySelectorAll('#completion-text *').length") == 0
    page.press("k")  # the one before it in the list
    page.wait("location.hash.includes('open=29.1.1')")
    page.wait("document.querySelectorAll('#completion-text .code').length === 3")
    assert page.text("#completion-text") == "2*2=4 U+202EabcU+200BU+001B[31m"
    page.picture("hostile", whole=False)
    page.open(f"#run?run={OTHER}&verdict=failed")
    page.wait("document.querySelector('.snippet')?.textContent.includes('<script>')")
    assert page.value("window.hacked === undefined")


def test_injected_markup_would_be_refused_by_the_browser(page: Page):
    page.open("#runs")
    page.wait("document.querySelector('.list')")
    refused = page.value(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'taken'; } catch (e) { return e.name; } })()"
    )
    assert refused == "TypeError"
    assert any("TrustedHTML" in entry["message"] for entry in page.driver.get_log("browser"))


@pytest.mark.slow
def test_two_runs_stand_side_by_side(page: Page, live: str):
    page.open("#runs")
    page.wait("document.querySelectorAll('.list input').length === 2")
    page.driver.execute_script("document.querySelectorAll('.list input').forEach((box) => box.click())")
    page.click("main button.main")
    page.wait("document.querySelectorAll('.curve.run1').length > 0")
    page.wait("document.querySelectorAll('.column .rows').length === 2")
    page.wait(f"{ROWS} > 50")
    assert "trainer.num_steps" in page.text("[aria-label='Settings that differ']")
    page.picture("two")


@pytest.mark.parametrize(
    ("name", "state", "ready"),
    [
        ("list", "#runs", "document.querySelectorAll('.list input').length > 0"),
        ("run", f"#run?run={OTHER}", f"{ROWS} > 0 && document.querySelector('.curve')"),
        ("completion", f"#run?run={OTHER}&open=29.1.1", "document.querySelector('.why')"),
        ("two", f"#compare?a={OTHER}&b={OTHER}", f"{ROWS} > 0 && document.querySelector('.curve')"),
    ],
)
def test_axe_finds_nothing_serious_and_a_phone_needs_no_scrolling_sideways(
    page: Page, name: str, state: str, ready: str
):
    page.open(state)
    page.wait(ready)
    for theme, background in (("light", "rgb(246, 247, 249)"), ("dark", "rgb(16, 19, 26)")):
        page.prefer(theme)
        page.wait(f"getComputedStyle(document.body).backgroundColor === '{background}'")
        assert page.findings() == [], theme
    browser.set_window(page.driver, 360, 740, mobile=True)
    page.wait("document.documentElement.clientWidth === 360")
    assert page.value("document.documentElement.scrollWidth") <= 360
    assert page.value("(document.querySelector('dialog[open]') ?? document.body).scrollWidth") <= 360
    page.picture(f"phone-{name}", whole=name != "completion")


def test_the_keyboard_alone_does(page: Page):
    page.open(f"#run?run={OTHER}")
    page.wait(f"{ROWS} === 50")
    page.press("\ue004")  # Tab
    assert page.value("document.activeElement.id") == "skip"
    page.press("/")
    assert page.value("document.activeElement.id") == "search"
    page.press(*"onerror", "\ue007")  # Enter
    page.wait("[...document.querySelectorAll('.snippet')].every((each) => each.textContent.includes('onerror'))")
    page.press("\ue00c")  # Esc leaves the field
    page.press("j", "j")
    key = page.value("document.activeElement.dataset.key")
    assert key == page.value("document.querySelectorAll('a.row')[1].dataset.key")
    outline = page.value("getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px"
    page.press("\ue007")
    page.wait(f"location.hash.includes('open={key}') && document.querySelector('#completion-text')")
    page.press("j")
    page.wait(f"!location.hash.includes('open={key}')")
    page.press("\ue00c")
    page.wait("!location.hash.includes('open=') && !document.querySelector('dialog[open]')")
    page.wait("document.activeElement.classList.contains('row')")
    page.driver.execute_script("document.querySelector('svg.plot').focus()")
    page.press("\ue012")  # left arrow: the step before the newest
    assert "step 3" in page.text(".chart .legend")


def test_keys_that_are_quicker_than_the_server_still_show_the_completion_of_the_address(page: Page):
    page.open(f"#run?run={OTHER}")
    page.wait(f"{ROWS} === 50")
    page.driver.execute_script(
        "const quick = window.fetch; window.fetch = async (...given) => {"
        "if (given[0].includes('/api/group')) await new Promise((go) => setTimeout(go, 1000));"
        " return quick(...given); }"
    )
    page.driver.execute_script("document.querySelectorAll('a.row')[3].click()")  # the last answer of its group
    page.wait("document.querySelector('#completion-text')")
    page.press("j", "j")  # the next group's first answer, then its second
    page.wait("document.querySelector('#dialog-title').textContent.includes('answer 2')")
    assert page.value("location.hash.includes('open=29.5.1')")
    assert page.text("#dialog-title") == "Round 29, train/5, answer 2 of 4"
    assert page.text("#dialog details pre") == "use 1 2 3 make 5\n"
    page.wait("document.querySelector('.why')")  # scoring was asked for as well


def test_nothing_is_fetched_from_elsewhere_and_little_from_here(page: Page):
    page.driver.get_log("performance")
    page.open(f"#run?run={OTHER}")
    page.wait(f"{ROWS} === 50")
    events = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    urls = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert all(url.startswith((page.url, "about:blank")) for url in urls)
    assert any(url.endswith("/static/view.js") for url in urls)
    weight = sum(e["params"]["encodedDataLength"] for e in events if e["method"] == "Network.loadingFinished")
    assert 10_000 < weight < 1_000_000


def test_a_token_leaves_the_address_for_a_cookie(driver: Any, folder: Path):
    server = Server(str(folder), "--host", "0.0.0.0")
    port, token = re.search(r":(\d+)/\?token=([\w-]{43})$", server.url).groups()  # type: ignore[union-attr]
    driver.get(f"http://127.0.0.1:{port}/?token={token}#run?run={OTHER}")
    page = Page(driver, f"http://127.0.0.1:{port}/")
    page.wait(f"{ROWS} === 50")
    assert driver.current_url == f"http://127.0.0.1:{port}/#run?run={OTHER}"
    assert page.value("document.cookie") == ""
    driver.delete_all_cookies()
    page.open("")
    assert "The token is missing" in page.text("body")
    driver.get_log("browser")  # which tells of the 401
    assert server.stop() == 0
