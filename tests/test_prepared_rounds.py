"""What is left of a round that scores weights, before its samplers start again: one grader is to judge all of it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from helpers import make_group, make_round, make_shard
from oapl.config import TaskConfig
from oapl.errors import StoreError
from oapl.evaluation import read_scores
from oapl.store import RoundFolder, RunFolder, Unscored, put_in_order
from oapl.store.files import json_bytes, move_aside, write_json
from oapl.store.rounds import ADOPTING
from oapl.types import PolicyRef, Round, SamplingParams

POLICY = PolicyRef(version=4, step=200, digest="ab" * 32)


def contents(path: Path) -> Counter[bytes]:
    """Every file's bytes, wherever it lies."""
    return Counter(file.read_bytes() for file in path.rglob("*") if file.is_file())


def scored(folder: Path, shards: int = 3) -> tuple[RoundFolder, Round]:
    """A complete round that scores weights."""
    stored, round = RoundFolder(folder), make_round(4, POLICY, num_shards=shards)
    round = replace(round, problems="12" * 32, gold="34" * 32)
    stored.open(round)
    for number in range(shards):
        stored.write_shard(round, number, make_shard([make_group(number, [0.0, 1.0])]))
    stored.seal(round)
    return stored, round


@pytest.mark.parametrize("change", [{"verifier": "countdown/2"}, {"gold": "56" * 32}])
def test_another_grader_s_verdicts_are_taken_back_and_what_was_sampled_is_kept(tmp_path: Path, change: dict[str, str]):
    folder, round = scored(tmp_path / "000004")
    before = contents(tmp_path)
    asked = replace(round, **change)
    assert "was graded otherwise" in str(folder.prepare(asked))
    assert not folder.is_sealed()
    assert folder.stored_shards() == []
    assert folder.load() == asked
    assert [group.position for first in range(3) for group in folder.read_drafts(round)[first].sampled] == [0, 1, 2]
    lost = before - contents(tmp_path)
    assert lost == Counter([json_bytes(asdict(round))])  # the description alone is written anew
    assert folder.prepare(asked) is None


def test_verdicts_of_several_graders_in_one_round_are_noticed_by_their_seals(tmp_path: Path):
    folder, round = scored(tmp_path / "000004")
    folder.set_shard_aside(1)
    folder.write_shard(replace(round, verifier="countdown/2"), 1, make_shard([make_group(1, [0.0, 1.0])]))
    assert folder.is_judged_otherwise(round)
    with pytest.raises(StoreError, match="some of its shards were graded otherwise than the others"):
        read_scores(folder, TaskConfig(name="countdown"))
    assert folder.set_strange_shards_aside(round) == [1]  # as one that came late does not count
    assert not folder.is_judged_otherwise(round)


def test_what_is_trained_on_may_have_verdicts_of_several(tmp_path: Path):
    folder, round = RoundFolder(tmp_path), make_round(4, POLICY, num_shards=1)
    folder.open(round)
    folder.write_shard(round, 0, make_shard([make_group(0, [0.0, 1.0])]))
    assert folder.set_strange_shards_aside(replace(round, verifier="countdown/2")) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"problems": "56" * 32}, "problems or prompts"),
        ({"prompt_ids": ("train/0",)}, "prompts or seed"),
        ({"seed": 1}, "prompts or seed"),
        ({"sampling": SamplingParams(0.5, 8, 2)}, r"settings of sampling \(temperature 1.0 and not 0.5\)"),
    ],
)
def test_answers_to_other_problems_are_not_graded_again(tmp_path: Path, change: dict[str, Any], what: str):
    folder, round = scored(tmp_path / "000004")
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=f"planned with other {what} than asked for now"):
        folder.prepare(replace(round, verifier="countdown/2", **change))
    assert contents(tmp_path) == before


def test_a_round_of_before_there_was_a_digest_of_answers_stands(tmp_path: Path):
    folder, round = scored(tmp_path / "000004")
    described = json.loads((folder.path / "round.json").read_text())
    (folder.path / "round.json").write_text(json.dumps({k: v for k, v in described.items() if k != "gold"}))
    for number in folder.stored_shards():
        seal = json.loads(folder.seal_path(number).read_text())
        folder.seal_path(number).write_text(json.dumps({k: v for k, v in seal.items() if k != "gold"}))
    assert folder.prepare(round) is None
    assert folder.is_sealed()


def test_a_kill_while_verdicts_are_taken_back_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After each of the files that it moves."""
    aside = move_aside
    for killed_at in range(1, 8):
        folder, round = scored(tmp_path / str(killed_at))
        asked, count = replace(round, verifier="countdown/2"), 0

        def move(path: Path, killed_at: int = killed_at) -> Path:
            nonlocal count
            count += 1
            if count == killed_at:
                raise KeyboardInterrupt
            return aside(path)

        monkeypatch.setattr("oapl.store.rounds.move_aside", move)
        with pytest.raises(KeyboardInterrupt):
            folder.prepare(asked)
        monkeypatch.setattr("oapl.store.rounds.move_aside", aside)
        folder.prepare(asked)
        assert folder.stored_shards() == []
        drafts = folder.read_drafts(round).values()
        assert sorted(position for draft in drafts for position in draft.positions) == [0, 1, 2]


def half_adopted(path: Path) -> tuple[RoundFolder, Round]:
    """A round whose new verdicts were about to take the place of the old when a kill came."""
    folder, round = scored(path)
    new = replace(round, verifier="countdown/2")
    for number in folder.stored_shards():
        folder.write_regraded(new, number, make_shard([make_group(number, [1.0, 1.0])]))
    write_json(folder.path / ADOPTING, asdict(new))
    return folder, new


def test_new_verdicts_that_were_being_adopted_are_adopted_before_anything_else(tmp_path: Path):
    folder, new = half_adopted(tmp_path / "000004")
    assert folder.prepare(new) is None
    assert folder.is_sealed()
    assert folder.load() == new
    assert [group.rewards.tolist() for n in range(3) for group in folder.read_shard(n).groups] == [[1.0, 1.0]] * 3


def test_a_run_ends_an_adoption_when_it_is_put_in_order(tmp_path: Path):
    """So that its samplers, of which there may be several, find it ended."""
    run = RunFolder(tmp_path)
    folder, new = half_adopted(run.evaluation(4).path)
    put_in_order(
        run, steps_per_round=2, shards_per_round=2, num_rounds=2, policy_of_round=lambda index: index, unscored=Unscored
    )
    assert not (folder.path / ADOPTING).exists()
    assert folder.is_sealed()
    assert folder.load() == new
