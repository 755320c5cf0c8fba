"""The recipes of the paper's experiments run, on a model of the same architecture that fits a test."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from helpers import NEEDS_SANDBOX
from make_miniature_data import MathProblem, code_problems, code_row, math_problems, math_row
from oapl.cli import main
from oapl.store import RunFolder

PAPER = Path(__file__).parents[1] / "recipes" / "paper"
RECIPES = sorted(path.stem for path in PAPER.glob("*.toml"))
SHAPES = {
    "Qwen/Qwen3-4B-Thinking-2507": ("Qwen3-4B-Thinking-2507", 4.02e9),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": ("DeepSeek-R1-Distill-Qwen-14B", 14.77e9),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
)
ANSWERS = ("7", "8")


def written(name: str) -> dict[str, Any]:
    """The recipe as its file has it."""
    return tomllib.loads((PAPER / f"{name}.toml").read_text())


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Training, held-out and validation rows of each task: a few easy problems, which have few different answers."""
    folder = tmp_path_factory.mktemp("problems")
    easy: list[MathProblem] = [p for p in math_problems()[""] if p.answer in ANSWERS]
    rows = {"math": [math_row(p) for p in easy], "code": [code_row(p) for p in code_problems()[""][:12]]}
    return {
        task: [write_rows(folder / f"{task}{i}.jsonl", given[4 * i : 4 * i + 4]) for i in range(3)]
        for task, given in rows.items()
    }


def words_of(task: str) -> list[str]:
    """Whole answers that are one token each, in many spellings, so that a model often says one, and now and then the
    right one."""
    if task == "math":
        said = [f"\\boxed{{{answer}}}" for answer in ANSWERS]
    else:
        said = [f"```python\n{problem.solution}```\n" for problem in code_problems()[""][:4]]
    return [f"</think>{' ' * spaces}\n{answer}" for answer in said for spaces in range(80 // len(said))]


def make_model(folder: Path, shape: str, task: str) -> Path:
    """Two layers of random weights in the shape's architecture, with a tokenizer of bytes and whole answers."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words = words_of(task)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = CHAT_TEMPLATE
    config = AutoConfig.from_pretrained(PAPER / "shapes" / shape)
    config.update(
        {
            "vocab_size": len(fast),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention"] * 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 1024,
            "bos_token_id": None,
            "eos_token_id": fast.eos_token_id,
            "pad_token_id": fast.pad_token_id,
        }
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_tells_what_the_recipe_takes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shape, num_parameters = SHAPES[written(name)["model"]["name_or_path"]]
    options = ["--model.name_or_path", str(PAPER / "shapes" / shape), "--run_dir", str(tmp_path / "run"), "--dry_run"]
    assert main(["train", str(PAPER / f"{name}.toml"), *options]) == 0
    told = capsys.readouterr().out
    (line,) = [line for line in told.splitlines() if line.startswith("# model: ")]
    found = int(line.split(" parameters")[0].rsplit(" ", 1)[1].replace(",", ""))
    assert found == pytest.approx(num_parameters, rel=1e-3)
    assert "trainer's memory:" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[NEEDS_SANDBOX] if name.startswith("code") else []) for name in RECIPES]
)
def test_the_recipe_runs(name: str, problems: dict[str, list[Path]], tmp_path: Path):
    recipe = written(name)
    task = recipe["task"]["name"]
    shape, _ = SHAPES[recipe["model"]["name_or_path"]]
    train, evaluation, validation = map(str, problems[task])
    smaller = {
        "model.name_or_path": make_model(tmp_path / "model", shape, task),
        "task.dataset": train,
        "task.eval_dataset": evaluation,
        "task.num_workers": 2,
        "sampling.max_completion_length": 12,
        "trainer.num_steps": 2,
        "trainer.weight_sync_steps": 1,
        "trainer.prompts_per_step": 4,
        "trainer.bf16": "false",
        "trainer.gradient_checkpointing": "false",
        "trainer.max_tokens_per_microbatch": 4096,
        "trainer.device": "cpu",
        "engine": json.dumps({"kind": "embedded", "dtype": "float32", "device": "cpu", "max_model_len": None}),
        "launch.kind": "inline",
        "evaluation.num_prompts": 2,
        "evaluation.num_generations": 2,
        "evaluation.max_completion_length": 12,
    }
    if "selection" in recipe:
        smaller |= {
            "task.validation_dataset": validation,
            "selection.eval_steps": 1,
            "selection.num_prompts": 2,
            "selection.num_generations": 2,
        }
    run = RunFolder(tmp_path / "run")
    options = [text for key, value in smaller.items() for text in (f"--{key}", str(value))]
    assert main(["train", str(PAPER / f"{name}.toml"), "--run_dir", str(run.path), *options]) == 0

    used = tomllib.loads(run.config_path.read_text())
    for section in ("task", "sampling", "loss", "trainer", "evaluation", "launch"):
        for key, value in recipe.get(section, {}).items():
            if f"{section}.{key}" not in smaller:
                assert used[section][key] == value, f"{section}.{key}"

    groups = [group for index in range(2) for group in run.round(index).read_shard(0).groups]
    assert len(groups) == 8
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    assert {verdict.reward for verdict in verdicts} == {0.0, 1.0}
    right = "the gold answer itself" if task == "math" else "passed 6 tests"
    assert all(verdict.reason for verdict in verdicts)
    assert all(verdict.reason.startswith(right) == (verdict.reward == 1) for verdict in verdicts)
    steps = list(run.metrics())
    assert len(steps) == 2
    assert all(math.isfinite(step["loss"]) and step["learning_rate"] > 0 for step in steps)


def test_the_values_of_the_paper():
    """Beside the files' own comments, those that a careless edit must not change."""
    mathematics, code = written("math"), written("code")
    for recipe in (mathematics, code):
        assert recipe["loss"]["beta1"] == 1.0
        assert recipe["loss"]["beta2"] == 1e-3
        assert recipe["sampling"]["num_generations"] == 8
        assert recipe["trainer"]["learning_rate"] == 1e-6
    assert mathematics["trainer"]["weight_sync_steps"] == 50
    assert mathematics["trainer"]["max_grad_norm"] == 1e-3
    assert code["trainer"]["num_steps"] == 2 * code["trainer"]["weight_sync_steps"]
    assert code["trainer"]["max_grad_norm"] == 1.0
    assert code["loss"]["anchor"] == "trainer"
