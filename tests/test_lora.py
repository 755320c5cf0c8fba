"""LoRA: what is trained, what the sampler gets, and an exact resume; with what saves memory or time beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from oapl.attention import KEPT, KEPT_COMPILED
from oapl.config import EngineConfig, Recipe, load_recipe
from oapl.engines.embedded import EmbeddedEngine
from oapl.errors import ConfigError, ModelError, StoreError
from oapl.model import compile_parts, load_model, save_policy, score
from oapl.store import RunFolder
from oapl.train_loop import start_or_resume
from oapl.trainer import Trainer
from test_trainer import assert_same, gradients, in_float64, sampled_shard

LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 16.0}


@pytest.fixture
def recipe(write_recipe, tiny_model: Path) -> Recipe:
    return load_recipe(write_recipe(model={"name_or_path": str(tiny_model), **LORA}, trainer={"learning_rate": 1e-2}))


def trained(recipe: Recipe, num_steps: int = 3) -> Trainer:
    trainer = Trainer(recipe, recipe.model.name_or_path)
    for step in range(num_steps):
        trainer.train_step(sampled_shard(Path(recipe.model.name_or_path), seed=10 * step), "digest")
    return trainer


def saved(trainer: Trainer, folder: Path) -> Path:
    folder.mkdir()
    save_policy(trainer.model, trainer.tokenizer, folder, probe=[[3, 4, 5, 6]])
    return folder


def test_only_the_matrices_are_trained(recipe: Recipe, tiny_model: Path):
    before, trainer = load_model(str(tiny_model), "float32", "cpu").state_dict(), trained(recipe)
    assert all(".lora_" in name for name in trainer.parameters)
    for name, weight in trainer.model.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(weight, before[name.replace(".base_layer", "")]), name


def test_the_sampler_gets_a_plain_model_that_computes_the_same(recipe: Recipe, tiny_model: Path, tmp_path: Path):
    trainer = trained(recipe)
    policy = saved(trainer, tmp_path / "policy")
    names = load_file(policy / "model.safetensors").keys()
    assert names == load_file(tiny_model / "model.safetensors").keys()
    engine, sequence = EmbeddedEngine(EngineConfig()), [[3, 9, 4, 12, 5, 8]]
    engine.load(policy)
    ours, before = (
        score(model, sequence)[0] for model in (trainer.model, load_model(str(tiny_model), "float32", "cpu"))
    )
    assert engine.score(sequence)[0] == pytest.approx(ours, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(ours, before, strict=True)) > 1e-3


def test_saving_a_policy_leaves_the_trainer_as_it_was(recipe: Recipe, tmp_path: Path):
    trainer = trained(recipe)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    saved(trainer, tmp_path / "policy")
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_the_first_policy_is_the_model_itself(recipe: Recipe, tiny_model: Path, tmp_path: Path):
    policy = saved(Trainer(recipe, recipe.model.name_or_path), tmp_path / "policy")
    ours, theirs = load_file(policy / "model.safetensors"), load_file(tiny_model / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_resume_is_exact(recipe: Recipe, tiny_model: Path, tmp_path: Path):
    straight, run = trained(recipe), RunFolder(tmp_path / "run")
    run.write_checkpoint(3, straight.write_checkpoint)
    resumed = start_or_resume(recipe, run)
    for trainer in (straight, resumed):
        trainer.train_step(sampled_shard(tiny_model, seed=99), "digest")
    for name, parameter in straight.parameters.items():
        assert torch.equal(parameter, resumed.parameters[name]), name


def test_a_checkpoint_holds_the_matrices_alone_and_is_refused_on_another_model(
    recipe: Recipe, tiny_model: Path, tmp_path: Path
):
    trainer, run = trained(recipe), RunFolder(tmp_path / "run")
    run.write_checkpoint(3, trainer.write_checkpoint)
    assert load_file(run.checkpoint_path(3) / "model.safetensors").keys() == trainer.parameters.keys()
    other = load_model(str(tiny_model), "float32", "cpu")
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    trainer.tokenizer.save_pretrained(tmp_path / "other")
    changed = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"name_or_path": str(tmp_path / "other")})}
    )
    with pytest.raises(StoreError, match="was trained on other frozen weights"):
        start_or_resume(changed, run)


def test_in_bfloat16_the_matrices_stay_float32(write_recipe, tiny_model: Path):
    recipe = load_recipe(write_recipe(model={"name_or_path": str(tiny_model), **LORA}, trainer={"bf16": True}))
    trainer = trained(recipe)
    assert {p.dtype for p in trainer.parameters.values()} == {torch.float32}
    assert trainer.model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_a_policy_in_bfloat16_keeps_what_is_less_than_a_rounding(write_recipe, tiny_model: Path, tmp_path: Path):
    """LoRA adds a fraction of a bfloat16 step to most weights: to the nearest, all of that would be lost."""
    recipe = load_recipe(write_recipe(model={"name_or_path": str(tiny_model), **LORA}, trainer={"bf16": True}))
    trainer = Trainer(recipe, str(tiny_model))
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 5e-4)
    trainer.update_model()
    before = load_file(tiny_model / "model.safetensors")
    after = load_file(saved(trainer, tmp_path / "policy") / "model.safetensors")
    modules = dict(trainer.model.named_modules())
    for name in (name for name in before if "proj.weight" in name):
        base = before[name].bfloat16().float()
        delta = modules[name.removesuffix(".weight")].get_delta_weight("default").detach().float()
        step = torch.exp2((base + delta).abs().log2().floor() - 7)
        assert (delta.abs() < step / 2).float().mean() > 0.6  # this many a nearest rounding would leave out
        gained = after[name].float() - base
        assert ((gained - delta).abs() <= step).all()
        slope = (gained * delta).sum() / delta.square().sum()
        error = (gained - delta).std() * delta.square().sum().rsqrt()  # of the slope, one deviation
        assert abs(slope - 1) < 4 * error < 0.6


def test_layers_that_the_model_lacks_are_named(write_recipe, tiny_model: Path):
    recipe = load_recipe(
        write_recipe(model={"name_or_path": str(tiny_model), **LORA, "lora_target_modules": ["q_projection"]})
    )
    with pytest.raises(ConfigError, match=r"model.lora_target_modules = \['q_projection'\]"):
        Trainer(recipe, str(tiny_model))


def test_the_output_head_is_not_for_lora(write_recipe, tiny_model: Path):
    recipe = load_recipe(
        write_recipe(model={"name_or_path": str(tiny_model), **LORA, "lora_target_modules": ["q_proj", "lm_head"]})
    )
    with pytest.raises(ConfigError, match="names the output head"):
        Trainer(recipe, str(tiny_model))


def test_a_row_in_pieces_has_the_gradient_of_the_whole(write_recipe, tiny_model: Path):
    """Of queries and values alone, so that the first layer's keys need no gradient."""
    model = {"name_or_path": str(tiny_model), **LORA, "lora_target_modules": ["q_proj", "v_proj"]}
    trainer = in_float64(load_recipe(write_recipe(model=model)), tiny_model)
    shard = sampled_shard(tiny_model)
    assert_same(gradients(trainer, shard, 10**6), gradients(trainer, shard, 5))


@pytest.mark.parametrize("lora", [{}, LORA], ids=["whole", "lora"])
def test_gradient_checkpointing_does_not_change_the_gradient(write_recipe, tiny_model: Path, lora: dict[str, object]):
    found = []
    for on in (False, True):
        recipe = load_recipe(
            write_recipe(model={"name_or_path": str(tiny_model), **lora}, trainer={"gradient_checkpointing": on})
        )
        trainer = in_float64(recipe, tiny_model)
        found.append(gradients(trainer, sampled_shard(tiny_model), 10**6))
    assert_same(*found)


@pytest.mark.filterwarnings("default")  # torch warns of its own ways while it compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_compiling_does_not_change_the_gradient(
    write_recipe, tiny_model: Path, lora: dict[str, object], checkpointing: bool
):
    found = []
    for on in (False, True):
        settings = {"torch_compile": on, "gradient_checkpointing": checkpointing}
        recipe = load_recipe(write_recipe(model={"name_or_path": str(tiny_model), **lora}, trainer=settings))
        trainer = in_float64(recipe, tiny_model)
        trainer.chooses_attention = True
        compiled = {name for name, part in trainer.model.named_modules() if part._compiled_call_impl is not None}
        parts = {name for name, _ in trainer.model.named_modules() if name.endswith(("norm", "mlp"))}
        assert compiled == (parts if on else set())
        assert len(parts) == 2 * 3 + 1
        found.append(gradients(trainer, sampled_shard(tiny_model), 40))
        assert trainer.model.config._attn_implementation == (KEPT_COMPILED if on else KEPT)
    assert_same(*found)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_model_without_parts_to_compile_is_refused():
    config = AutoConfig.for_model("bloom", vocab_size=40, hidden_size=8, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(config)
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith(("Norm", "MLP")):
            model.set_submodule(name, torch.nn.Identity())
    with pytest.raises(ModelError, match="BloomForCausalLM has nothing to compile"):
        compile_parts(model)


def test_a_machine_that_cannot_compile_is_told_so_at_the_start(write_recipe, tiny_model: Path):
    """In a process of its own, since what one has compiled, it does not compile again."""
    path = write_recipe(model={"name_or_path": str(tiny_model)}, trainer={"torch_compile": True})
    code = (
        "import sys; from pathlib import Path; from oapl.config import load_recipe; from oapl.trainer import Trainer\n"
        f"Trainer(load_recipe(Path({str(path)!r})), {str(tiny_model)!r})"
    )
    env = {**os.environ, "CXX": "no-such-compiler", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "ModelError: trainer.torch_compile: torch cannot compile for cpu here" in done.stderr
