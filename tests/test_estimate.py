"""What a dry run says of memory, disk and tokens, against what a trainer, an engine and a run really take."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import make_completion, make_group, make_shard
from oapl.batching import collate, group_rows, micro_batches
from oapl.cli import main
from oapl.config import Recipe, dump_recipe, load_recipe
from oapl.engines import embedded
from oapl.engines.embedded import EmbeddedEngine
from oapl.engines.slots import Slots
from oapl.estimate import count_lines, disk_bytes, estimate, facts_of, sampler_bytes, trainer_bytes
from oapl.store import RunFolder
from oapl.trainer import Trainer
from oapl.types import PolicyRef, Request, SamplingParams, Shard

ACTIVATIONS = "activations"


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Each tensor once, by the memory that it lies in."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def longest_shard(recipe: Recipe) -> Shard:
    """Completions of full length, after prompts of two tokens."""
    length, each = recipe.sampling.max_completion_length, recipe.sampling.num_generations
    made = [make_completion([3 + i % 9 for i in range(length)], [-2.0] * length) for _ in range(each)]
    rewards = (np.arange(each) % 2).tolist()
    return make_shard([make_group(i, rewards, completions=made) for i in range(recipe.trainer.prompts_per_step)])


SETTINGS = [
    {},
    {"trainer": {"bf16": True}},
    {"model": {"use_peft": True, "lora_r": 4}},
    {"model": {"use_peft": True, "lora_r": 4}, "trainer": {"bf16": True}},
    {"loss": {"anchor": "trainer"}},
    {"loss": {"anchor": "trainer"}, "trainer": {"bf16": True}, "model": {"use_peft": True}},
]


@pytest.mark.parametrize("sections", SETTINGS, ids=str)
def test_what_a_trainer_holds_is_told_to_the_byte(write_recipe, tiny_model: Path, sections: dict[str, Any]):
    """Weights, float32 weights of bfloat16 ones, gradients, two moments, a frozen copy: all that a step has made."""
    if "model" in sections:
        pytest.importorskip("peft")
    recipe = load_recipe(write_recipe(**sections))
    trainer = Trainer(recipe, str(tiny_model))
    if trainer.anchor is not None:
        trainer.anchor.load(PolicyRef(0, 0, ""), tiny_model, trainer.lm)
    trainer.train_step(longest_shard(recipe), "digest")
    parameters = list(trainer.parameters.values())
    states = [trainer.optimizer.state[parameter] for parameter in parameters]
    copy = [] if trainer.anchor is None else list(trainer.anchor._lm.model.parameters())
    held = [
        num_bytes([*trainer.model.parameters(), *parameters]),
        num_bytes(parameter.grad for parameter in parameters),
        num_bytes(state[moment] for state in states for moment in ("exp_avg", "exp_avg_sq")),
        num_bytes(copy),
    ]
    told = trainer_bytes(recipe, facts_of(recipe))
    assert sum(size for name, size in told.items() if not name.startswith(ACTIVATIONS)) == sum(held)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"trainer": {"bf16": True}},
        {"model": {"attn_implementation": "eager"}},
        {"model": {"use_peft": True}},
        {"trainer": {"max_tokens_per_microbatch": 256}},
    ],
    ids=str,
)
def test_activations_are_what_a_full_micro_batch_keeps(write_recipe, tiny_model: Path, sections: dict[str, Any]):
    """By the tensors that autograd saves. The estimate has the head's working memory besides, and no prompts: 32
    completions of 24 tokens, 1 of 2 of a prompt computed once for 4 of them."""
    sections = {**sections, "sampling": {"max_completion_length": 24}}
    sections["trainer"] = {"prompts_per_step": 8, **sections.get("trainer", {})}
    if "use_peft" in sections.get("model", {}):
        pytest.importorskip("peft")
    recipe = load_recipe(write_recipe(**sections))
    facts, trainer = facts_of(recipe), Trainer(recipe, str(tiny_model))
    rows = group_rows(longest_shard(recipe).groups, trainer.objective)
    largest = micro_batches(rows, recipe.trainer.max_tokens_per_microbatch, share_prompts=True)[0]
    saved: list[torch.Tensor] = []
    if trainer.chooses_attention:
        trainer.model.set_attn_implementation("oapl_kept")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        trainer.lm.logprobs(collate(largest, "cpu", share_prompts=True), 1.0)
    weights = {parameter.data_ptr() for parameter in trainer.model.parameters()}
    kept = num_bytes(tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in weights)
    assert (facts.rows, facts.tokens) == (10 if recipe.trainer.max_tokens_per_microbatch == 256 else 32, 24)
    assert 0.9 * kept < facts.activations < 2 * kept


def test_a_row_beyond_the_budget_is_told_in_pieces(write_recipe):
    recipe = load_recipe(write_recipe(trainer={"max_tokens_per_microbatch": 5}))
    piece, whole = facts_of(recipe), facts_of(load_recipe(write_recipe()))
    assert (piece.rows, piece.tokens) == (1, 5)
    assert (whole.rows, whole.tokens) == (8, 10)
    assert piece.activations < whole.activations


def test_ranks_are_told_to_hold_a_share_of_all_but_what_is_whole_for_a_while(write_recipe):
    """Of a tied model: embeddings and last norm, and two layers, each of which are gathered, with their gradients."""
    alone, shared = (
        load_recipe(write_recipe(trainer={"num_ranks": count}, launch={"kind": "processes"})) for count in (1, 4)
    )
    facts = facts_of(shared)
    all_of_it, share = trainer_bytes(alone, facts), trainer_bytes(shared, facts)
    for name in ("gradients, float32", "AdamW's two moments, float32"):
        assert share[name] == all_of_it[name] // 4
    assert share["weights that are trained, float32"] == all_of_it["weights, float32"] // 4
    (whole,) = (size for name, size in share.items() if name.startswith("whole for a while"))
    assert whole == 2 * 4 * facts.num_parameters  # this one has two layers alone
    assert "memory of each of the trainer's 4 ranks:" in estimate(shared)


def test_checkpointing_is_told_to_take_less(write_recipe):
    plain, checkpointed = (
        facts_of(load_recipe(write_recipe(trainer={"gradient_checkpointing": on}))) for on in (False, True)
    )
    assert checkpointed.activations < plain.activations


def test_what_an_engine_holds_is_told_to_the_byte(write_recipe, tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    """2 layers x keys and values x 2 heads x 8 = 64 numbers a token. The prompt of 3 tokens comes on top."""
    recipe = load_recipe(write_recipe(engine={"max_num_seqs": 4}))
    engine, made = EmbeddedEngine(recipe.engine), []
    monkeypatch.setattr(embedded, "Slots", lambda *sizes: made.append(Slots(*sizes)) or made[-1])
    engine.load(tiny_model)
    engine.generate([Request(np.array([3, 4, 5], np.int32), 0)], SamplingParams(1.0, 10, 8))
    cache = num_bytes(state for layer in made[0].cache.layers for state in (layer.keys, layer.values))
    facts = facts_of(recipe)
    weights, told = sampler_bytes(recipe, facts).values()
    assert facts.cache_numbers == 64
    assert weights == num_bytes(engine._model.parameters())
    assert told + 4 * 3 * 64 * 4 == cache
    capped = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"kv_cache_memory_bytes": 4000})})
    assert list(sampler_bytes(capped, facts).values()) == [weights, 4000]


def test_a_sampler_of_servers_holds_no_weights(write_recipe):
    recipe = load_recipe(write_recipe(engine={"kind": "vllm_server", "server_urls": ["http://node1:8000"]}))
    assert not any("sampler's memory" in line for line in estimate(recipe))


@pytest.mark.parametrize("bf16", [False, True])
def test_a_runs_files_and_counts_are_as_told(write_recipe, tmp_path: Path, bf16: bool):
    """Files have a header of a few kilobytes besides, and the state of the random generator."""
    path, run = write_recipe(trainer={"bf16": bf16}, selection={"eval_steps": 6}), RunFolder(tmp_path / "run")
    assert main(["train", str(path), "--run_dir", str(run.path)]) == 0
    recipe = load_recipe(path)
    policy, all_policies, checkpoint = disk_bytes(recipe, facts_of(recipe)).values()
    files = [file.stat().st_size for file in run.path.glob("[ps][on][la][ip]*/*/model.safetensors")]
    assert len(files) == 4 + 2  # policies 0 to 3, snapshots 6 and 12
    assert all(policy < size < policy + 5_000 for size in files)
    assert all_policies == 6 * policy
    saved = sum(file.stat().st_size for file in run.checkpoint_path(12).glob("*.safetensors"))
    assert checkpoint < saved < checkpoint + 25_000
    lines = "\n".join(count_lines(recipe))
    num_completions = sum(record["num_completions"] for record in run.metrics())
    assert f"the run  samples {num_completions} completions, {10 * num_completions} tokens" in lines
    assert sum(record["num_tokens"] for record in run.metrics()) <= 10 * num_completions
    assert "evaluations: 2 of 4 problems x 4, 32 completions, 320 tokens" in lines
    assert "validations: 3 of 64 problems x 16, 3,072 completions, 30,720 tokens" in lines


def test_epochs_sample_less_than_they_train_on(write_recipe):
    """12 steps of 8 completions, each trained on twice."""
    lines = "\n".join(count_lines(load_recipe(write_recipe(trainer={"num_epochs": 2}))))
    assert "the run  samples 48 completions" in lines
    assert "a step   trains on 8 completions" in lines


# The command


def dry_run(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["train", str(path), "--dry_run", *options]) == 0
    return capsys.readouterr().out


def test_what_a_dry_run_prints_is_a_recipe(write_recipe, tmp_path: Path, capsys):
    path = write_recipe(selection={"eval_steps": 6}, evaluation={"top_p": 0.95, "top_k": 20})
    out = dry_run(path, capsys)
    printed = tmp_path / "printed.toml"
    printed.write_text(out)
    assert load_recipe(printed) == load_recipe(path)
    assert tomllib.loads(out) == tomllib.loads(dump_recipe(load_recipe(path)))
    for words in ("# model: LlamaForCausalLM, 19,", "# trainer's memory:", "# sampler's memory:", "# disk:"):
        assert words in out


def test_what_a_sampler_takes_is_told_of_each(write_recipe, capsys):
    assert "# sampler's memory:" in dry_run(write_recipe(), capsys)
    told = "# sampler's memory, for each of the 3 that evaluate at once:"
    assert told in dry_run(write_recipe(evaluation={"num_workers": 3}), capsys)


def test_a_config_is_all_that_an_estimate_reads(write_recipe, tiny_model: Path, tmp_path: Path):
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text((tiny_model / "config.json").read_text())
    recipe = load_recipe(write_recipe())
    of_shape = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name_or_path": str(folder)})})
    assert estimate(of_shape) == estimate(recipe)


def test_a_large_model_is_estimated_without_its_weights(write_recipe, tmp_path: Path):
    """Llama 3.1 405B by its sizes: 16 bytes a parameter are 6.5 TB."""
    config = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = load_recipe(write_recipe(model={"name_or_path": str(tmp_path)}))
    facts = facts_of(recipe)
    layer = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248 + 2 * 16384
    assert facts.num_parameters == 126 * layer + 2 * 128256 * 16384 + 16384
    held = {name: size for name, size in trainer_bytes(recipe, facts).items() if not name.startswith(ACTIVATIONS)}
    assert sum(held.values()) == 16 * facts.num_parameters
    assert facts.cache_numbers == 126 * 2 * 8 * 128


@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "./no/such/folder", "builtin:none"])
def test_without_a_config_a_dry_run_counts_tokens_alone(write_recipe, capsys, name: str):
    out = dry_run(write_recipe(), capsys, "--model.name_or_path", name)
    assert tomllib.loads(out)["model"]["name_or_path"] == name
    assert f"# Memory and disk are not known, as the shape of {name} is not: " in out
    assert "#   the run  samples 96 completions, 960 tokens" in out
    assert "trainer's memory" not in out


def test_sizes_are_readable():
    from oapl.estimate import readable

    assert [readable(size) for size in (0, 999, 1000, 2**20, 5 * 2**30, math.ceil(1.5 * 2**40))] == [
        "0 B",
        "999 B",
        "0.977 KiB",
        "1 MiB",
        "5 GiB",
        "1.5 TiB",
    ]
