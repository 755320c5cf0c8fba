"""Several ranks train as one process does: real processes over gloo, each with its share of the weights."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from conftest import make_tiny_model
from oapl.cli import main
from oapl.config import load_recipe
from oapl.errors import ConfigError, StoreError
from oapl.model import score
from oapl.sharding import ALONE, Place, Ranks, joined
from oapl.store import RunFolder
from oapl.store.files import read_json
from oapl.train_loop import start_or_resume
from oapl.trainer import Trainer
from oapl.types import PolicyRef, Shard
from test_trainer import sampled_shard

PATIENCE_S = 120
LARGE_EPSILON = {"adam_epsilon": 1e-3}
"""AdamW divides a gradient by its own size, so that where one is nearly zero the last bit of a sum decides about a
whole step. With an epsilon above most gradients a step differs by as little as the sums do."""
ROUNDING = 1e-6
"""How far weights of about 1 may be apart where sums were taken in another order: a few units of their last bit."""


# Ranks


def in_ranks(count: int, job: Callable[..., Any], *arguments: Any) -> Any:
    """What `job(ranks, *arguments)` returns on the first of so many ranks, which are forks of one warm process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_sharding", "transformers.models.llama.modeling_llama"])
    meeting = f"file://{arguments[0].parent}/meeting-{time.monotonic_ns()}"
    ours, theirs = zip(*(context.Pipe(duplex=False) for _ in range(count)), strict=True)
    processes = [
        context.Process(target=rank_main, args=(theirs[rank], Place(rank, count, rank, count, meeting), job, arguments))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for end in theirs:
        end.close()
    try:
        answers = [receive(end) for end in ours]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not any(isinstance(answer, str) for answer in answers), "\n".join(map(str, answers))
    return answers[0]


def receive(end: Connection) -> Any:
    assert wait([end], PATIENCE_S), "a rank hangs"
    return pickle.loads(end.recv_bytes())


def rank_main(end: Connection, place: Place, job: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    try:
        with joined(place, "cpu") as ranks:
            answer = job(ranks, *arguments)
        end.send_bytes(pickle.dumps(answer if place.rank == 0 else None))  # `send` would share tensors
    except BaseException:
        end.send_bytes(pickle.dumps(traceback.format_exc()))


@dataclass
class Trained:
    start: dict[str, Tensor]
    state: dict[str, Tensor]
    """Weights, and AdamW's moments, each whole."""
    metrics: list[dict[str, float]]


def train(
    ranks: Ranks, recipe: Path, overrides: dict[str, Any], shards: Sequence[Shard], run: Path | None = None
) -> Trained:
    """Steps on these shards: of a run from its newest checkpoint, if there is one, and to the next."""
    config, folder = load_recipe(recipe, overrides), RunFolder(run or recipe.parent / "none")
    if folder.checkpoint_steps():
        trainer = start_or_resume(config, folder, ranks)
    else:
        trainer = Trainer(config, config.model.name_or_path, ranks)
    if trainer.anchor is not None:
        trainer.anchor.load(PolicyRef(0, 0, "digest"), Path(config.model.name_or_path), trainer.lm)
    start = state_of(trainer)
    metrics = [trainer.train_step(shard, "digest") for shard in shards]
    if run is not None:
        in_folder(ranks, trainer.write_checkpoint, lambda write: folder.write_checkpoint(trainer.step, write))
    return Trained(start, state_of(trainer), metrics)


def in_folder(ranks: Ranks, write: Callable[[Path], None], seal: Callable[[Callable[[Path], None]], None]) -> None:
    """Has all ranks write into the folder that the first one makes, and seals."""

    def write_all(folder: Path) -> None:
        write(ranks.agree(folder))
        ranks.gather(None)

    if ranks.is_first:
        seal(write_all)
    else:
        write_all(Path())


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    tensors = {name: parameter.detach() for name, parameter in trainer.parameters.items()}
    for name, parameter in trainer.parameters.items():
        tensors |= {f"{name}.{kind}": value for kind, value in trainer.optimizer.state.get(parameter, {}).items()}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in tensors.items()}


def largest_gap(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return math.sqrt(sum((a[name] - b[name]).square().sum().item() for name in a if "exp_avg" not in name))


@pytest.fixture(scope="module")
def shards(tiny_model: Path) -> list[Shard]:
    """The last has a single group, of 4 completions: row by row, some of three ranks have nothing to do at times."""
    return [sampled_shard(tiny_model, seed=10 * i, num_prompts=count) for i, count in enumerate((3, 2, 1))]


@pytest.fixture
def recipe(write_recipe) -> Path:
    return write_recipe(trainer=LARGE_EPSILON)


# The same steps

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rows one by one": {"trainer": {"max_tokens_per_microbatch": 1}},
    "gradient checkpointing": {"trainer": {"gradient_checkpointing": True}},
    "anchor": {"loss": {"anchor": "trainer"}},
    "lora": {"model": {"use_peft": True, "lora_r": 2}},
    "compiled": {"trainer": {"torch_compile": True}},
}


@pytest.mark.parametrize(
    ("num_ranks", "case"),
    [
        (2, "plain"),
        (3, "rows one by one"),
        (2, "gradient checkpointing"),
        (2, "anchor"),
        (3, "lora"),
        pytest.param(2, "compiled", marks=pytest.mark.slow),
    ],
)
def test_ranks_take_the_steps_of_one_process(recipe: Path, shards: list[Shard], num_ranks: int, case: str):
    """In float32, up to the order of sums, and tell the same of them. LoRA's tensors of 2 rows leave a third rank no
    share."""
    alone = in_ranks(1, train, recipe, CASES[case], shards)
    together = in_ranks(num_ranks, train, recipe, CASES[case], shards)
    assert together.start.keys() == alone.start.keys()
    assert distance(alone.start, alone.state) > 1000 * ROUNDING
    assert largest_gap(alone.state, together.state) < ROUNDING
    for mine, theirs in zip(alone.metrics, together.metrics, strict=True):
        assert theirs.keys() == mine.keys()
        del mine["num_computed_tokens"], theirs["num_computed_tokens"]  # alone, prompts are computed once for all rows
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_hundred_steps_drift_no_further_than_with_other_micro_batches(recipe: Path, shards: list[Shard]):
    many = shards[:2] * 50
    alone = train(ALONE, recipe, {}, many)
    regrouped = train(ALONE, recipe, {"trainer": {"max_tokens_per_microbatch": 60}}, many)
    together = in_ranks(2, train, recipe, {}, many)
    assert distance(alone.start, alone.state) > 0.1
    assert largest_gap(alone.state, together.state) < 4 * max(ROUNDING, largest_gap(alone.state, regrouped.state))


def test_ranks_compute_in_bfloat16_as_one_process_does(recipe: Path, shards: list[Shard]):
    """Rounding in bfloat16 differs with what is computed together: by a few hundredths of the way that weights move,
    here as with other micro-batches of one process."""
    bf16 = {"trainer": {"bf16": True}}
    alone, together = train(ALONE, recipe, bf16, shards), in_ranks(2, train, recipe, bf16, shards)
    regrouped = train(ALONE, recipe, {"trainer": {"bf16": True, "max_tokens_per_microbatch": 60}}, shards)
    assert all(tensor.dtype == torch.float32 for tensor in together.state.values())
    moved = distance(alone.start, alone.state)
    assert 0 < distance(alone.state, regrouped.state) < 0.05 * moved
    assert 0 < distance(alone.state, together.state) < 0.05 * moved


# Checkpoints and policies


def test_a_checkpoint_of_two_ranks_is_continued_by_any_number(recipe: Path, shards: list[Shard], tmp_path: Path):
    straight = in_ranks(2, train, recipe, {}, shards)
    first = in_ranks(2, train, recipe, {}, shards[:2], tmp_path / "run")
    files = {path.name for path in RunFolder(tmp_path / "run").checkpoint_path(2).iterdir()}
    of_ranks = {f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)}
    assert files == {*of_ranks, "state.json", "sealed.json"}
    for num_ranks in (1, 2, 3):
        run = shutil.copytree(tmp_path / "run", tmp_path / f"run-{num_ranks}")
        arguments = (recipe, {}, shards[2:], run)
        resumed = train(ALONE, *arguments) if num_ranks == 1 else in_ranks(num_ranks, train, *arguments)
        assert largest_gap(first.state, resumed.start) == 0
        gap = largest_gap(straight.state, resumed.state)
        assert gap == 0 if num_ranks == 2 else gap < ROUNDING


def test_a_checkpoint_of_one_process_is_continued_by_ranks(recipe: Path, shards: list[Shard], tmp_path: Path):
    first = train(ALONE, recipe, {}, shards[:2], tmp_path / "run")
    resumed = in_ranks(2, train, recipe, {}, shards[2:], tmp_path / "run")
    assert largest_gap(first.state, resumed.start) == 0
    assert largest_gap(train(ALONE, recipe, {}, shards).state, resumed.state) < ROUNDING


def test_a_checkpoint_of_ranks_of_another_model_is_refused(recipe: Path, shards: list[Shard], tmp_path: Path):
    in_ranks(2, train, recipe, {}, shards[2:], tmp_path / "run")
    other = make_tiny_model(tmp_path / "other", intermediate_size=48)
    with pytest.raises(StoreError, match=r"is of another model than this run's: they differ in model\.layers\.0\.mlp"):
        train(ALONE, recipe, {"model": {"name_or_path": str(other)}}, [], tmp_path / "run")


def publish(ranks: Ranks, recipe: Path, overrides: dict[str, Any], shard: Shard, run: Path) -> None:
    trainer = Trainer(load_recipe(recipe, overrides), load_recipe(recipe).model.name_or_path, ranks)
    trainer.train_step(shard, "digest")
    write = partial(trainer.write_policy, probe=PROBE)
    in_folder(ranks, write, lambda write: RunFolder(run).publish_policy(1, 1, write))


def refusal(ranks: Ranks, recipe: Path, folder: Path) -> list[str]:
    trainer = Trainer(load_recipe(recipe), load_recipe(recipe).model.name_or_path, ranks)
    with pytest.raises(StoreError) as caught:
        trainer.write_checkpoint(folder)
    return ranks.gather(str(caught.value))


def test_what_keeps_a_rank_from_writing_is_told_on_all(recipe: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    for message in in_ranks(2, refusal, recipe, tmp_path / "file"):
        assert message.startswith(f"cannot write {tmp_path / 'file'}: File exists")


PROBE = [[3, 4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize(
    "overrides",
    [{}, {"model": {"use_peft": True}, "trainer": {"bf16": True}}],
    ids=["float32, tied", "merged, bfloat16"],
)
def test_policies_of_ranks_are_plain_model_folders(
    recipe: Path, shards: list[Shard], tmp_path: Path, overrides: dict[str, Any]
):
    publish(ALONE, recipe, overrides, shards[0], tmp_path / "alone")
    in_ranks(2, publish, recipe, overrides, shards[0], tmp_path / "together")
    alone, together = (RunFolder(tmp_path / name).policy_path(1) for name in ("alone", "together"))
    assert {path.name for path in together.iterdir()} == {path.name for path in alone.iterdir()}
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (alone, together))
    assert {name: t.dtype for name, t in theirs.items()} == {name: t.dtype for name, t in mine.items()}
    assert largest_gap(mine, theirs) < (0.01 if overrides else ROUNDING)
    model = AutoModelForCausalLM.from_pretrained(together, dtype="auto")
    assert model.dtype == next(iter(mine.values())).dtype
    for scores, recorded in zip(score(model, PROBE), read_json(together / "probe.json")["logprobs"], strict=True):
        assert scores == pytest.approx(recorded, abs=0.1 if overrides else 1e-5)


# Runs


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.05)


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_death_of_a_rank_ends_the_run_and_the_same_run_goes_on(write_recipe, tmp_path: Path):
    """Here with one rank less, which is one process."""
    run = RunFolder(tmp_path / "run")
    recipe = write_recipe(trainer={"num_steps": 400}, launch={"kind": "processes"}, evaluation={"eval_on_start": False})
    launcher = start("oapl", "train", recipe, "--run_dir", run.path, "--trainer.num_ranks", 2)
    wait_for(lambda: len(run.metrics()) >= 5, launcher)
    first, second = (int((run.path / f".trainer{name}.lock").read_text()) for name in ("", "-1"))
    os.kill(second, signal.SIGKILL)
    output, _ = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 1
    assert "WorkerError: the trainer-1 process was killed by SIGKILL; its output is in" in output
    assert not Path(f"/proc/{first}").exists()
    num_steps = (len(run.metrics()) // 4 + 1) * 4
    changes = ["--trainer.num_ranks", "1", "--launch.kind", "inline", "--trainer.num_steps", str(num_steps)]
    assert main(["train", str(recipe), "--run_dir", str(run.path), *changes]) == 0
    assert [record["step"] for record in run.metrics()] == list(range(1, num_steps + 1))
    assert read_json(run.summary_path)["resumed_from_step"] >= 4


def test_ranks_of_torchrun_train_what_is_sampled_elsewhere(write_recipe, tmp_path: Path):
    run = RunFolder(tmp_path / "run")
    recipe = write_recipe(
        model={"name_or_path": "builtin:countdown"}, trainer={"num_steps": 8}, launch={"kind": "processes"}
    )
    sample = ["sample", str(recipe), "--run_dir", str(run.path)]
    torchrun = ("torch.distributed.run", "--standalone", "--nproc_per_node", 2, "-m", "oapl", "trainer", recipe)

    assert main(sample) == 0
    ranks = start(*torchrun, "--run_dir", run.path)
    wait_for(lambda: run.policy(1) is not None, ranks)  # and now they wait for its round
    ranks.terminate()
    output, _ = ranks.communicate(timeout=PATIENCE_S)
    assert output.count("Stopped; everything so far is kept") == 2
    assert run.checkpoint_steps() == [0, 4]

    assert main(sample) == 0
    ranks = start(*torchrun, "--run_dir", run.path)
    output, _ = ranks.communicate(timeout=PATIENCE_S)
    assert ranks.returncode == 0, output
    assert run.policy_versions() == [0, 1, 2]
    assert [record["step"] for record in run.metrics()] == list(range(1, 9))
    assert load_recipe(run.config_path).trainer.num_ranks == 2


# What is refused


def test_ranks_need_processes_and_devices_of_their_own(write_recipe):
    with pytest.raises(ConfigError, match=r"trainer.num_ranks = 2: launch.kind = 'inline' is one process"):
        load_recipe(write_recipe(trainer={"num_ranks": 2}))
    with pytest.raises(ConfigError, match=r"trainer.device = 'cuda:1' is one device"):
        load_recipe(write_recipe(trainer={"num_ranks": 2, "device": "cuda:1"}, launch={"kind": "processes"}))


def test_the_trainer_alone_needs_as_many_processes_as_ranks(write_recipe, tmp_path: Path, capsys):
    recipe = write_recipe(trainer={"num_ranks": 4}, launch={"kind": "processes"})
    assert main(["trainer", str(recipe), "--run_dir", str(tmp_path / "run")]) == 2
    assert "Start as many: torchrun --nproc_per_node 4 -m oapl trainer" in capsys.readouterr().err
