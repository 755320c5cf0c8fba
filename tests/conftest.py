"""Shared fixtures: a real, tiny Hugging Face checkpoint with random weights, and recipes that train it in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import browser
from oapl.model import resolve

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama of 20 thousand random weights with the shipped model's tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))


def make_tiny_model(folder: Path, **sizes: Any) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(resolve("builtin:countdown"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            **{
                "vocab_size": len(tokenizer),
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
                "initializer_range": 0.3,
                **sizes,
            }
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


RecipeWriter = Callable[..., Path]


def write_recipe_file(path: Path, model: Path, /, **sections: dict[str, Any]) -> Path:
    """A recipe of 3 rounds of 4 steps, 2 prompts x 4 completions each; sections given are laid on top."""
    recipe: dict[str, Any] = {
        "model": {"name_or_path": str(model)},
        "task": {"name": "countdown"},
        "sampling": {"num_generations": 4, "max_completion_length": 10},
        "loss": {"beta1": 1.0, "beta2": 0.1},
        "trainer": {"num_steps": 12, "weight_sync_steps": 4, "prompts_per_step": 2, "learning_rate": 1e-3},
        "launch": {"kind": "inline"},
        "evaluation": {"num_prompts": 4, "num_generations": 4},
    }
    if "kind" in sections.get("loss", {}):
        del recipe["loss"]  # whose settings are another loss's
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values} if isinstance(values, dict) else values
    path.write_text(tomli_w.dumps(recipe))
    return path


@pytest.fixture
def write_recipe(tmp_path: Path, tiny_model: Path) -> RecipeWriter:
    """`write_recipe_file` into a folder of the test's own."""
    return partial(write_recipe_file, tmp_path / "recipe.toml", tiny_model)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    if (problem := browser.missing()) is not None:
        pytest.skip(problem)
    driver = browser.open_chromium()
    yield driver
    driver.quit()
