"""How a sampler parts its work: blocks of shards, several workers, and what is stored already."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import make_group, make_shard
from oapl.config import EngineConfig, Recipe, load_recipe
from oapl.engines.embedded import EmbeddedEngine
from oapl.errors import GradingError, StoreError, TaskError
from oapl.judging import Judge
from oapl.model import load_model, load_tokenizer, probe_gap, save_policy, score
from oapl.plan import plan_evaluation, plan_round, plan_validation
from oapl.sampler import Sampler
from oapl.store import RoundFolder
from oapl.tasks.countdown import Countdown
from oapl.types import Draft, PolicyRef, Prompt, Round, Split, Verdict

POLICY = PolicyRef(0, 0, "digest")


@pytest.fixture
def recipe(write_recipe) -> Recipe:
    """Rounds of 12 shards of 2 prompts x 4 completions, of which the engine holds two at once."""
    return load_recipe(
        write_recipe(
            trainer={"weight_sync_steps": 12},
            engine={"max_num_seqs": 16},
            evaluation={"num_prompts": 32, "num_generations": 4},
        )
    )


def fill(recipe: Recipe, model: Path, folder: RoundFolder, round: Round) -> None:
    sampler = Sampler(recipe, lambda _: model)
    try:
        sampler.fill(folder, round)
    finally:
        sampler.close()


def completions(folder: RoundFolder) -> list[tuple[int, list[int], list[float], float]]:
    return [
        (group.position, completion.token_ids.tolist(), completion.logprobs.tolist(), float(reward))
        for number in folder.stored_shards()
        for group in folder.read_shard(number).groups
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]


def test_a_round_filled_in_pieces_is_bitwise_the_round_filled_at_once(recipe: Recipe, tiny_model: Path, tmp_path: Path):
    round = plan_round(recipe, Countdown(), POLICY, 0)
    whole, pieces = RoundFolder(tmp_path / "whole"), RoundFolder(tmp_path / "pieces")
    fill(recipe, tiny_model, whole, round)
    fill(recipe, tiny_model, pieces, round)
    before = completions(whole)
    assert completions(pieces) == before
    for number in (1, 4, 5, 11):  # parts of three blocks, and one whole block
        pieces.seal_path(number).unlink()
    fill(recipe, tiny_model, pieces, round)
    assert completions(pieces) == before
    assert pieces.is_sealed()


@pytest.mark.parametrize("num_workers", [2, 3])
def test_samplers_together_make_what_one_makes_and_each_has_a_part(
    recipe: Recipe, tiny_model: Path, tmp_path: Path, num_workers: int
):
    """Each waits with its first shard for the others to have one, so that none can be done before the rest begin."""
    round = plan_evaluation(recipe, Countdown(), POLICY)
    alone, together = RoundFolder(tmp_path / "alone"), RoundFolder(tmp_path / "together")
    fill(recipe, tiny_model, alone, round)
    met, stored = threading.Barrier(num_workers, timeout=60), [[] for _ in range(num_workers)]

    def on_shard(worker: int, event: Mapping[str, Any]) -> None:
        if not stored[worker]:
            met.wait()
        stored[worker].append(event["shard"])

    samplers = [
        Sampler(recipe, lambda _: tiny_model, on_shard=partial(on_shard, worker)) for worker in range(num_workers)
    ]
    for sampler in samplers:
        sampler.hold(POLICY)  # models are not loaded side by side in one process
    with ThreadPoolExecutor(num_workers) as pool:
        list(pool.map(lambda sampler: sampler.fill(together, round), samplers))
    for sampler in samplers:
        sampler.close()
    assert all(stored)
    assert sorted(chain(*stored)) == together.stored_shards() == list(range(round.num_shards))  # each once
    assert completions(together) == completions(alone)
    assert together.is_sealed()


def test_what_scores_weights_is_truncated_and_what_they_learn_from_is_not(write_recipe):
    truncation = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    recipe = load_recipe(write_recipe(evaluation=truncation, selection={"eval_steps": 4}))
    sampled = [plan(recipe, Countdown(), POLICY).sampling for plan in (plan_evaluation, plan_validation)]
    assert [(sampling.temperature, sampling.top_p, sampling.top_k) for sampling in sampled] == [(0.6, 0.95, 20)] * 2
    training = plan_round(recipe, Countdown(), POLICY, 0).sampling
    assert (training.temperature, training.top_p, training.top_k) == (1.0, 1.0, 0)


def test_however_large_the_engine_training_may_start_after_a_quarter_of_the_round(
    write_recipe, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = load_recipe(write_recipe(trainer={"weight_sync_steps": 12}, engine={"max_num_seqs": 10_000}))
    asked: list[int] = []
    sampler = Sampler(recipe, lambda _: tiny_model)
    generate = sampler.engine.generate
    monkeypatch.setattr(
        sampler.engine, "generate", lambda requests, p: asked.append(len(requests)) or generate(requests, p)
    )
    sampler.fill(RoundFolder(tmp_path / "round"), plan_round(recipe, Countdown(), POLICY, 0))
    sampler.close()
    assert asked == [6, 6, 6, 6]  # of 24 prompts


def test_told_to_stop_it_ends_after_the_shard_at_hand(recipe: Recipe, tiny_model: Path, tmp_path: Path):
    folder, stored = RoundFolder(tmp_path / "round"), []
    sampler = Sampler(
        recipe, lambda _: tiny_model, lambda: len(stored) == 3, lambda event: stored.append(event["shard"])
    )
    sampler.fill(folder, plan_round(recipe, Countdown(), POLICY, 0))
    sampler.close()
    assert folder.stored_shards() == [0, 1, 2]


def test_each_worker_of_a_broken_reward_says_so_and_stores_nothing(
    write_recipe, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also the one with fewer prompts than others, all of which fail."""
    (tmp_path / "broken_reward.py").write_text("def reward(prompts, completions, **_):\n    raise OSError('down')\n")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "use {n} 2 make 3\\n"}}\n' for n in range(1, 10)))
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = str(tmp_path / "rows.jsonl")
    task = {"name": "dataset", "dataset": rows, "eval_dataset": rows, "reward_funcs": "broken_reward:reward"}
    recipe = load_recipe(
        write_recipe(task=task, engine={"max_num_seqs": 4}, evaluation={"num_prompts": 9, "num_generations": 4})
    )
    folder = RoundFolder(tmp_path / "evaluation")
    for _ in range(2):
        sampler = Sampler(recipe, lambda _: tiny_model)
        with pytest.raises(TaskError, match="groups in a row could not be graded"):
            sampler.fill(folder, plan_evaluation(recipe, sampler.task, POLICY))
        sampler.close()
    assert folder.stored_shards() == []


def test_one_problem_that_cannot_be_graded_does_not_end_the_sampler_that_has_nothing_else(
    write_recipe, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Four samplers with one problem each: the third's is all that it sees of the evaluation."""
    recipe = load_recipe(write_recipe(engine={"max_num_seqs": 4}, evaluation={"num_prompts": 4, "num_generations": 4}))
    round, folder = plan_evaluation(recipe, Countdown(), POLICY), RoundFolder(tmp_path / "evaluation")
    grade, met = Countdown.grade, threading.Barrier(4, timeout=60)

    def fail_at_the_third(self: Countdown, prompt: Any, completions: Any) -> Any:
        met.wait()  # so that each has one
        if prompt.id == "evaluation/2":
            raise GradingError("its answer cannot be read")
        return grade(self, prompt, completions)

    monkeypatch.setattr(Countdown, "grade", fail_at_the_third)
    samplers = [Sampler(recipe, lambda _: tiny_model) for _ in range(4)]
    for sampler in samplers:
        sampler.hold(POLICY)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda sampler: sampler.fill(folder, round), samplers))
    for sampler in samplers:
        sampler.close()
    assert folder.is_sealed()
    assert [(failed.prompt_id, failed.cause) for failed in folder.failures()] == [
        ("evaluation/2", "its answer cannot be read")
    ]


def test_a_sampler_does_not_add_to_an_evaluation_that_another_grader_began(
    recipe: Recipe, tiny_model: Path, tmp_path: Path
):
    """As where a reward was mended after the round was made ready, and before this sampler read it."""
    round, folder = plan_evaluation(recipe, Countdown(), POLICY), RoundFolder(tmp_path / "evaluation")
    folder.open(replace(round, verifier="countdown/0"))
    with pytest.raises(StoreError, match="was begun by countdown/0, and the task, which has countdown/1"):
        fill(recipe, tiny_model, folder, round)
    assert folder.stored_shards() == []


def test_a_late_sampler_leaves_the_verdicts_of_the_grader_that_took_over(
    recipe: Recipe, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It had opened the round before its verdicts were taken back."""
    round, folder = plan_evaluation(recipe, Countdown(), POLICY), RoundFolder(tmp_path / "evaluation")
    newer = replace(round, verifier="countdown/2")
    folder.open(newer)
    for number in range(round.num_shards):
        folder.write_shard(newer, number, make_shard([make_group(p, [0.0] * 4) for p in round.positions(number)]))
    monkeypatch.setattr(Sampler, "_open", lambda *_: None)
    sampler = Sampler(recipe, lambda _: tiny_model)
    assert not sampler.work_on(folder, round)
    sampler.close()
    assert folder.stored_shards() == list(range(round.num_shards))


class Slow:
    """A task that takes about as long as a look at it."""

    num_workers = 4

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(f"{split}/{index}", "")

    def grade(self, prompt: Prompt, completions: Sequence[str]) -> list[Verdict]:
        time.sleep(0.001 + 0.0005 * (int(prompt.id.partition("/")[2]) % 4))
        return [Verdict(1.0) for _ in completions]


def test_a_verdict_that_comes_between_two_looks_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("oapl.judging.LOOK_S", 0.001)
    sampled = tuple(make_group(position, [0.0]).without_verdicts() for position in range(400))
    shard = Judge(Slow()).grade(Draft(sampled, (), 0.0, 0.0), patience=8)
    assert shard is not None
    assert len(shard.groups) == 400


def test_sampling_seconds_of_a_block_are_shared_by_its_shards(recipe: Recipe, tiny_model: Path, tmp_path: Path):
    folder = RoundFolder(tmp_path / "round")
    fill(recipe, tiny_model, folder, plan_round(recipe, Countdown(), POLICY, 0))
    seals = [folder.shard_seal(number) for number in range(4)]
    generation = [seal["sampling_s"] - seal["grading_s"] for seal in seals]
    np.testing.assert_allclose(generation[::2], generation[1::2])


@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_a_completion_that_does_not_fit_is_refused_before_anything_is_sampled(
    write_recipe, tiny_model: Path, tmp_path: Path, split: str
):
    """The model's context is 64; evaluations have a limit of their own, and come last."""
    sections = {"sampling" if split == "train" else "evaluation": {"max_completion_length": 63}}
    recipe, folder = load_recipe(write_recipe(**sections)), RoundFolder(tmp_path / "round")
    sampler = Sampler(recipe, lambda _: tiny_model)
    with pytest.raises(TaskError, match=rf"prompt {split}/\d+ has .* max_completion_length = 63 passes"):
        sampler.fill(folder, plan_round(recipe, Countdown(), POLICY, 0))
    sampler.close()
    assert folder.stored_shards() == []


# New weights in the engine


class StuckEngine(EmbeddedEngine):
    """Takes weights when it starts, and keeps them until it is closed."""

    starts = 0
    is_started = False

    def load(self, policy: Path) -> None:
        if not self.is_started:
            super().load(policy)
            self.is_started, self.starts = True, self.starts + 1

    def close(self) -> None:
        self.is_started = False


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_kept_its_old_weights_is_started_anew(recipe: Recipe, tmp_path: Path, tiny_model: Path, dtype):
    """The second policy differs by less than bfloat16's tolerance, and the scores that stay the same tell of it. Each
    policy has a probe of its own, as in a run."""
    policies = {version: tmp_path / str(version) for version in (0, 1, 2)}
    probe = [[3, 8, 5, 9, 4]]
    model, tokenizer = load_model(str(tiny_model), "float32", "cpu"), load_tokenizer(str(tiny_model))
    for version, folder in policies.items():
        with torch.no_grad():
            model.model.embed_tokens.weight += 0.01 * (version == 1)
        save_policy(model, tokenizer, folder, probe=[[3 + version, *probe[0]]])
    asked = recipe.model_copy(update={"engine": EngineConfig(dtype=dtype)})
    sampler = Sampler(asked, lambda policy: policies[policy.version])
    sampler.engine = engine = StuckEngine(asked.engine)
    try:
        for version, digest, starts in ((0, "a", 1), (1, "b", 2), (2, "b", 2)):  # the third has the second's weights
            sampler.hold(PolicyRef(version, 0, digest))
            assert engine.starts == starts
            held = load_model(str(policies[version]), dtype, "cpu")
            assert engine.score(probe)[0] == pytest.approx(score(held, probe)[0], abs=0.05)
            assert probe_gap(policies[version], engine.score([[3 + version, *probe[0]]])) <= asked.probe_tolerance
    finally:
        sampler.close()
