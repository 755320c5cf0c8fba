"""Recipes and the command line: what is read, what wins, and what a mistake is answered with."""

from __future__ import annotations

import math
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from oapl.cli import main
from oapl.config import Recipe, differences, dump_recipe, load_recipe
from oapl.errors import ConfigError

RECIPE = """\
seed = 7

[model]
name_or_path = "builtin:countdown"

[task]
name = "countdown"

[loss]
beta1 = 5.0
beta2 = 0.1

[trainer]
num_steps = 100
learning_rate = 1e-4
"""

WriteRecipe = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteRecipe:
    def write_text(text: str) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


def line_number(text: str, line: str) -> int:
    return text.splitlines().index(line) + 1


# What a mistake in the file is answered with


@pytest.mark.parametrize(
    ("line", "replacement", "message"),
    [
        pytest.param(
            "beta2 = 0.1",
            "beta_2 = 0.1",
            "loss.beta_2 is not a setting; did you mean loss.beta2?",
            id="misspelt key",
        ),
        pytest.param(
            "learning_rate = 1e-4",
            "learning_rat = 1e-4",
            "trainer.learning_rat is not a setting; did you mean trainer.learning_rate?",
            id="misspelt key of another section",
        ),
        pytest.param("seed = 7", "sed = 7", "sed is not a setting; did you mean seed?", id="misspelt top-level key"),
        pytest.param(
            "learning_rate = 1e-4",
            "num_generations = 8",
            "trainer.num_generations is not a setting; did you mean sampling.num_generations?",
            id="key in the wrong section",
        ),
        pytest.param("[loss]", "[los]", "los is not a setting; did you mean loss?", id="misspelt section"),
        pytest.param(
            "[loss]",
            "[reference_model]",
            "reference_model is not a setting. `oapl train --help` lists them.",
            id="unknown section",
        ),
        pytest.param(
            "beta1 = 5.0",
            "beta1 = 0",
            "loss.beta1 = 0: input should be greater than 0; 5 is the default.",
            id="beta1 = 0",
        ),
        pytest.param(
            "beta2 = 0.1", "beta2 = -0.1", "loss.beta2 = -0.1: input should be greater than 0", id="beta2 < 0"
        ),
        pytest.param("beta1 = 5.0", "beta1 = nan", "loss.beta1 = nan: input should be", id="beta1 = nan"),
        pytest.param(
            "num_steps = 100",
            'num_steps = "many"',
            "trainer.num_steps = 'many': input should be a valid integer",
            id="text for a number",
        ),
        pytest.param(
            "num_steps = 100",
            "num_steps = 1.5",
            "trainer.num_steps = 1.5: input should be a valid integer",
            id="a fraction for a count",
        ),
        pytest.param(
            "num_steps = 100",
            "num_steps = 0",
            "trainer.num_steps = 0: input should be greater than or equal to 1",
            id="no steps",
        ),
        pytest.param(
            'name = "countdown"',
            'name = "countup"',
            "task: name = 'countup' is unknown: use math, code, dataset, countdown or reasoning_gym",
            id="an unknown task",
        ),
        pytest.param(
            'name = "countdown"', "name = 3", "task.name = 3: input should be a valid string", id="a number for text"
        ),
        pytest.param(
            "learning_rate = 1e-4",
            'lr_scheduler_type = "linear"',
            "trainer.lr_scheduler_type = 'linear': input should be 'constant' or 'cosine'",
            id="unknown choice",
        ),
        pytest.param(
            "seed = 7",
            "sampling = 3",
            "sampling = 3: input should be a valid dictionary",
            id="a number for a section",
        ),
        pytest.param(
            "num_steps = 100",
            "num_steps = 120",
            "trainer: num_steps = 120 must be a multiple of weight_sync_steps = 50",
            id="an unfinished round",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line_its_value_and_the_remedy(
    write: WriteRecipe, line: str, replacement: str, message: str
):
    text = RECIPE.replace(line, replacement)
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert f"{path}:{line_number(text, replacement)}: {message}" in str(caught.value)


def test_one_completion_a_prompt_is_refused_since_its_advantage_is_always_zero(write: WriteRecipe):
    path = write(RECIPE + "\n[sampling]\nnum_generations = 1\n")
    with pytest.raises(ConfigError, match=r"num_generations = 1 must be at least 2: .* The paper uses 8"):
        load_recipe(path)


def test_steps_that_leave_a_round_unfinished_are_refused_with_the_nearest_that_do_not(write: WriteRecipe):
    path = write(RECIPE.replace("num_steps = 100", "num_steps = 120"))
    with pytest.raises(ConfigError, match=r"num_steps = 120 must be a multiple of .* = 50, .*: try 100 or 150"):
        load_recipe(path)
    path = write(RECIPE.replace("num_steps = 100", "num_steps = 20"))
    with pytest.raises(ConfigError, match=r"num_steps = 20 must be a multiple .*: try 50"):
        load_recipe(path)


def test_a_mistaken_item_of_a_list_is_named_with_its_line(write: WriteRecipe):
    text = RECIPE + '\n[tracking]\nreport_to = ["mlflow"]\n'
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    line = line_number(text, 'report_to = ["mlflow"]')
    assert f"{path}:{line}: tracking.report_to.0 = 'mlflow': input should be" in str(caught.value)


def test_every_mistake_is_told_at_once(write: WriteRecipe):
    path = write(RECIPE.replace("beta1 = 5.0", "beta1 = 0").replace("learning_rate", "learning_rat"))
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert [line.split(": ")[1].split(" ")[0] for line in str(caught.value).splitlines()] == [
        "loss.beta1",
        "trainer.learning_rat",
    ]


def test_what_a_recipe_must_hold_is_asked_for(write: WriteRecipe):
    with pytest.raises(ConfigError, match="trainer is missing: add it to the recipe"):
        load_recipe(write(RECIPE.partition("[trainer]")[0]))
    with pytest.raises(ConfigError, match=r"trainer\.num_steps is missing: add it to the recipe"):
        load_recipe(write(RECIPE.replace("num_steps = 100\n", "")))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ('name = "dataset"', "dataset is missing"),
        ('name = "dataset"\ndataset = "x.jsonl"', "reward_funcs is missing"),
        (
            'name = "dataset"\ndataset = "x.jsonl"\nreward_funcs = "rewards.py"',
            r"'rewards\.py' must be math, code, `module:func",
        ),
        (
            'name = "countdown"\ndataset = "x.jsonl"',
            'needs rows of your own: `name = "dataset"`, "math" or "code", not \'countdown\'',
        ),
        ('name = "dataset"\ndataset = "x.jsonl"\nreward_funcs = "a:b"\nargs = {c = 1}', "args .* has no use with"),
    ],
)
def test_a_task_that_does_not_fit_together_is_refused(write: WriteRecipe, task: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(RECIPE.replace('name = "countdown"', task)))


OWN = 'name = "dataset"\ndataset = "rows.jsonl"\nreward_funcs = "r:f"\n'
HUB = 'name = "dataset"\ndataset = "some/name"\nreward_funcs = "r:f"\neval_dataset = "some/name"\n'


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (OWN, "selection needs problems of its own to choose by: name them as task.validation_dataset"),
        (OWN + 'validation_dataset = "./rows.jsonl"', r"validation_dataset = './rows.jsonl' holds the rows of dataset"),
        (
            OWN + 'eval_dataset = "held_out.jsonl"\nvalidation_dataset = "held_out.jsonl"',
            "validation_dataset = 'held_out.jsonl' holds the rows of eval_dataset too",
        ),
        (HUB + 'validation_dataset = "some/name"\nvalidation_split = "test"', "holds the rows of eval_dataset too"),
        (HUB + 'validation_dataset = "some/name"\nvalidation_split = "train"', "holds the rows of dataset too"),
    ],
)
def test_weights_are_not_chosen_by_problems_that_are_trained_on_or_reported(
    write: WriteRecipe, task: str, message: str
):
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(RECIPE.replace('name = "countdown"', task) + "[selection]\n"))


def test_other_splits_of_the_hub_dataset_may_be_chosen_by(write: WriteRecipe):
    text = RECIPE.replace('name = "countdown"', HUB + 'validation_dataset = "some/name"')
    assert load_recipe(write(text + "[selection]\n")).task.validation_split == "validation"


def test_snapshots_that_would_leave_the_last_step_out_are_refused_with_the_nearest_that_do_not(write: WriteRecipe):
    path = write(RECIPE + "[selection]\neval_steps = 30\n")
    line = line_number(path.read_text(), "eval_steps = 30")
    with pytest.raises(ConfigError) as refused:
        load_recipe(path)
    assert str(refused.value) == (
        f"{path}:{line}: selection.eval_steps = 30 must divide trainer.num_steps = 100, so that the last weights are "
        f"among those to choose from: try 25 or 50."
    )


def test_a_missing_recipe_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: the recipe cannot be read \(No such file"):
        load_recipe(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=r"the recipe cannot be read \(Is a directory\)"):
        load_recipe(tmp_path)


def test_invalid_toml_is_told_with_its_place(write: WriteRecipe):
    with pytest.raises(ConfigError, match=rf"recipe\.toml is not valid TOML: .*line {line_number(RECIPE, '[loss]')}"):
        load_recipe(write(RECIPE.replace("[loss]", "[loss")))


def test_a_recipe_in_another_encoding_is_told(tmp_path: Path):
    path = tmp_path / "recipe.toml"
    path.write_bytes(RECIPE.encode() + "# café\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not valid TOML, which is UTF-8"):
        load_recipe(path)


# What a mistake on the command line is answered with


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--trainer.learning_rat", "1"],
            "--trainer.learning_rat is not a setting; did you mean --trainer.learning_rate?",
        ),
        (
            ["--trainer.learning_rat=1"],
            "--trainer.learning_rat is not a setting; did you mean --trainer.learning_rate?",
        ),
        (["--learning_rate", "1"], "--learning_rate is not a setting; did you mean --trainer.learning_rate?"),
        (["--los.beta1", "1"], "--los.beta1 is not a setting; did you mean --loss.beta1?"),
        (["--nonsense", "1"], "not understood: --nonsense 1. `oapl COMMAND --help` lists what there is."),
        (
            ["--selection.eval_step", "1"],
            "--selection.eval_step is not a setting; did you mean --selection.eval_steps?",
        ),
        (["--selection.eval_steps", "30"], "--selection.eval_steps: selection.eval_steps = 30 must divide trainer"),
        (["stray"], "not understood: stray."),
        (["--loss.beta1", "0"], "--loss.beta1 = '0': input should be greater than 0; 5 is the default."),
        (["--loss.beta1", "one"], "--loss.beta1 = 'one': input should be a valid number"),
        (["--sampling.num_generations", "1"], "--sampling.num_generations: num_generations = 1 must be at least 2"),
        (
            ["--trainer.num_steps", "120"],
            "--trainer.num_steps: num_steps = 120 must be a multiple of weight_sync_steps",
        ),
        (["--tracking.report_to", '["mlflow"]'], "--tracking.report_to.0 = 'mlflow': input should be 'tensorboard'"),
        (
            ["--loss.kind", "ppo"],
            "--loss.kind = 'ppo' is not a loss; there are 'oapl', 'grpo', 'grpo_plus', 'reinforce'.",
        ),
        (["--loss.epsilon", "0.3"], "--loss.epsilon is a setting of another loss.kind than 'oapl'."),
        (["--loss.kind", "grpo", "--loss.beta2", "1"], "--loss.beta2 is a setting of another loss.kind than 'grpo'."),
        (["--loss", "3"], "--loss = 3: input should be a valid dictionary"),
        (["--launch.kind", "slurm"], "--launch.kind = 'slurm': input should be 'processes', 'inline' or 'ray'"),
    ],
)
def test_a_mistaken_option_is_named_and_ends_with_code_2(
    write: WriteRecipe, capsys: pytest.CaptureFixture[str], words: list[str], message: str
):
    assert main(["train", str(write(RECIPE)), "--dry_run", *words]) == 2
    output = capsys.readouterr()
    assert f"ConfigError: {message}" in output.err
    assert output.out == ""


def test_a_mistake_in_the_recipe_reaches_the_user_through_the_command_line(
    write: WriteRecipe, capsys: pytest.CaptureFixture[str]
):
    path = write(RECIPE.replace("beta2", "beta_2"))
    assert main(["train", str(path), "--dry_run"]) == 2
    assert capsys.readouterr().err == (
        f"ConfigError: {path}:{line_number(RECIPE, 'beta2 = 0.1')}: loss.beta_2 is not a setting; "
        f"did you mean loss.beta2?\n"
    )


def test_an_option_is_not_blamed_for_its_section(write: WriteRecipe, capsys: pytest.CaptureFixture[str]):
    path = write(RECIPE.replace("num_steps = 100", "num_steps = 120"))
    assert main(["train", str(path), "--dry_run", "--trainer.learning_rate", "1e-3"]) == 2
    line = line_number(RECIPE, "num_steps = 100")
    assert f"{path}:{line}: trainer: num_steps = 120 must be a multiple" in capsys.readouterr().err


def test_a_missing_recipe_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(tmp_path / "nowhere.toml")]) == 2
    assert "nowhere.toml: the recipe cannot be read" in capsys.readouterr().err


# What wins


def dry_run(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, object]]:
    assert main(["train", str(path), "--dry_run", *words]) == 0
    return tomllib.loads(capsys.readouterr().out)


def test_the_command_line_beats_the_file_and_the_file_beats_the_default(
    write: WriteRecipe, capsys: pytest.CaptureFixture[str]
):
    resolved = dry_run(write(RECIPE), capsys, "--loss.beta1", "2", "--sampling.temperature=0.7", "--seed", "3")
    assert (resolved["loss"]["beta1"], resolved["loss"]["beta2"]) == (2.0, 0.1)  # command line, file
    assert resolved["sampling"]["temperature"] == 0.7  # command line, in a section that the file lacks
    assert resolved["sampling"]["num_generations"] == 8  # default
    assert resolved["seed"] == 3


def test_a_setting_of_the_file_can_be_taken_back_to_none(write: WriteRecipe, capsys: pytest.CaptureFixture[str]):
    path = write(RECIPE + "save_steps = 10\n")
    assert dry_run(path, capsys)["trainer"]["save_steps"] == 10
    assert "save_steps" not in dry_run(path, capsys, "--trainer.save_steps", "none")["trainer"]


def test_an_optional_section_is_there_once_one_of_its_settings_is(
    write: WriteRecipe, capsys: pytest.CaptureFixture[str]
):
    path = write(RECIPE)
    assert "selection" not in dry_run(path, capsys)
    whole = {"eval_steps": 25, "num_prompts": 64, "num_generations": 16}
    assert dry_run(path, capsys, "--selection.eval_steps", "25")["selection"] == whole


def test_task_arguments_and_lists_can_be_given_on_the_command_line(
    write: WriteRecipe, capsys: pytest.CaptureFixture[str]
):
    resolved = dry_run(
        write(RECIPE), capsys, "--task.args", '{"max_numbers": 5}', "--tracking.report_to", '["tensorboard"]'
    )
    assert resolved["task"]["args"] == {"max_numbers": 5}
    assert resolved["tracking"]["report_to"] == ["tensorboard"]


def test_the_environment_does_not_change_a_run(write: WriteRecipe, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEED", "99")
    monkeypatch.setenv("LOSS", '{"beta1": 99}')
    recipe = load_recipe(write(RECIPE.replace("seed = 7\n", "").partition("[loss]")[0] + "[trainer]\nnum_steps = 50\n"))
    assert (recipe.seed, recipe.loss.beta1) == (0, 5.0)


def test_defaults_are_the_paper_s_but_for_the_betas(write: WriteRecipe):
    recipe = load_recipe(write(RECIPE.replace("beta1 = 5.0\nbeta2 = 0.1\n", "")))
    assert (recipe.loss.beta1, recipe.loss.beta2) == (5.0, 0.1)
    assert (recipe.sampling.num_generations, recipe.trainer.weight_sync_steps) == (8, 50)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "recipes").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_recipe_that_ships_is_valid_and_names_no_machine(path: Path):
    name = load_recipe(path).model.name_or_path
    assert name.startswith(("builtin:", "runs/"))


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"model": {"use_peft": True}, "engine": {"dtype": "bfloat16"}}, "would round away most of what LoRA learns"),
        (
            {"engine": {"kind": "vllm"}, "sampling": {"temperature": 0.005}},
            r"sampling\.temperature = 0\.005: vLLM samples no colder than 0\.01",
        ),
        (
            {"engine": {"kind": "vllm"}, "evaluation": {"temperature": 0.005}},
            r"evaluation\.temperature = 0\.005: vLLM samples no colder than 0\.01",
        ),
    ],
)
def test_what_the_engine_would_change_in_silence_is_refused(write: WriteRecipe, added: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(RECIPE), added)


def test_a_recipe_cannot_be_changed_once_made(write: WriteRecipe):
    recipe = load_recipe(write(RECIPE))
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 8


# One of several losses

LOSSES = {
    "": ("oapl", {"beta1": 5.0, "beta2": 0.1, "leave_one_out": False, "rescale": False}),
    'kind = "oapl"\nbeta1 = inf\nleave_one_out = true': ("oapl", {"beta1": math.inf, "leave_one_out": True}),
    'kind = "grpo"': ("grpo", {"epsilon": 0.2, "importance_sampling": "none", "loss_type": "dapo"}),
    'kind = "grpo"\nimportance_sampling = "token_mask"': ("grpo", {"importance_sampling": "token_mask"}),
    'kind = "grpo_plus"': ("grpo_plus", {}),
    'kind = "reinforce"': ("reinforce", {}),
}


@pytest.mark.parametrize(("section", "expected"), LOSSES.items(), ids=lambda value: str(value).replace("\n", " "))
def test_a_loss_of_every_kind_is_read_and_reads_back_the_same(
    write: WriteRecipe, tmp_path: Path, section: str, expected: tuple[str, dict[str, object]]
):
    recipe = load_recipe(write(RECIPE.replace("beta1 = 5.0\nbeta2 = 0.1", section)))
    kind, settings = expected
    assert recipe.loss.kind == kind
    assert settings.items() <= recipe.loss.model_dump().items()
    dumped = tmp_path / "config.toml"
    dumped.write_text(dump_recipe(recipe))
    assert load_recipe(dumped) == recipe
    assert differences(load_recipe(dumped), recipe) == []


def test_another_kind_of_loss_on_the_command_line_replaces_the_file_s_section(
    write: WriteRecipe, capsys: pytest.CaptureFixture[str]
):
    path = write(RECIPE)
    grpo = dry_run(path, capsys, "--loss.kind", "grpo", "--loss.epsilon", "0.3")["loss"]
    assert (grpo["kind"], grpo["epsilon"]) == ("grpo", 0.3)
    assert "beta2" not in grpo
    assert dry_run(path, capsys, "--loss", '{"kind": "reinforce"}')["loss"] == {"kind": "reinforce"}


def test_the_same_kind_of_loss_on_the_command_line_keeps_the_file_s_settings(
    write: WriteRecipe, capsys: pytest.CaptureFixture[str]
):
    loss = dry_run(write(RECIPE), capsys, "--loss.kind", "oapl", "--loss.beta1", "inf")["loss"]
    assert (loss["beta1"], loss["beta2"]) == (math.inf, 0.1)


@pytest.mark.parametrize("key", ["importance_sampling", "scale_rewards"])
def test_a_choice_called_none_can_be_given_on_the_command_line(
    write: WriteRecipe, capsys: pytest.CaptureFixture[str], key: str
):
    other = {"importance_sampling": "token_mask", "scale_rewards": "group"}[key]
    path = write(RECIPE.replace("beta1 = 5.0\nbeta2 = 0.1", f'kind = "grpo"\n{key} = "{other}"'))
    assert dry_run(path, capsys)["loss"][key] == other
    assert dry_run(path, capsys, f"--loss.{key}", "none")["loss"][key] == "none"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            'kind = "grpo"\nimportance_sampling = "token_mask"\nepsilon = 0.3',
            ":{}: loss: epsilon = 0.3 has no use with importance_sampling = 'token_mask': weights take the place "
            "of the clip. Leave one of them out.",
        ),
        (
            'kind = "grpo"\nimportance_sampling_clip_max = 4.0',
            ":{}: loss: importance_sampling_clip_max = 4.0 has no use with importance_sampling = 'none': there are no "
            "weights to cap. Leave it out, or ask for weights.",
        ),
        (
            'kind = "grpo"\nimportance_sampling = "sequence_mask"\nepsilon_high = 0.3',
            ":{}: loss: epsilon_high = 0.3 has no use with importance_sampling = 'sequence_mask': weights take the "
            "place of the clip. Leave one of them out.",
        ),
        ('kind = "grpo"\nbeta2 = 0.1', ":{}: loss.beta2 is a setting of another loss.kind than 'grpo'."),
        ("epsilon = 0.2", ":{}: loss.epsilon is a setting of another loss.kind than 'oapl'."),
        ('kind = "grpo"\nepsilom = 0.2', ":{}: loss.epsilom is not a setting; did you mean loss.epsilon?"),
        ('kind = "grpo"\nepsilon = 1.5', ":{}: loss.epsilon = 1.5: input should be less than 1."),
        (
            'kind = "ppo"',
            ":{}: loss.kind = 'ppo' is not a loss; there are 'oapl', 'grpo', 'grpo_plus', 'reinforce'.",
        ),
    ],
)
def test_a_mistaken_loss_is_named_with_its_line(write: WriteRecipe, section: str, message: str):
    text = RECIPE.replace("beta1 = 5.0\nbeta2 = 0.1", section)
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert str(caught.value) == str(path) + message.format(line_number(text, section.splitlines()[-1]))


def test_a_loss_that_is_no_table_is_refused(write: WriteRecipe):
    path = write("loss = 3\n" + RECIPE.replace("[loss]\nbeta1 = 5.0\nbeta2 = 0.1\n", ""))
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert f"{path}:1: loss = 3: input should be a valid dictionary" in str(caught.value)


def test_a_resumed_run_may_not_change_its_loss(write: WriteRecipe):
    stored, asked = changed(write(RECIPE), loss={"kind": "reinforce"})
    assert differences(stored, asked) == ["loss.kind: 'oapl' -> 'reinforce'"]


# What is stored with a run


def test_a_dumped_recipe_reads_back_as_the_same_recipe(write: WriteRecipe, tmp_path: Path):
    recipe = load_recipe(
        write(RECIPE),
        {
            "task": {"args": {"max_numbers": 5}},
            "tracking": {"report_to": ["tensorboard"], "project": "café ✓"},
            "trainer": {"save_steps": 25},
        },
    )
    dumped = tmp_path / "config.toml"
    dumped.write_bytes(dump_recipe(recipe).encode())
    assert load_recipe(dumped) == recipe
    assert dump_recipe(load_recipe(dumped)) == dump_recipe(recipe)


def changed(path: Path, **overrides: dict[str, object]) -> tuple[Recipe, Recipe]:
    return load_recipe(path), load_recipe(path, overrides)


def test_differences_name_what_a_resumed_run_may_not_change(write: WriteRecipe):
    stored, asked = changed(
        write(RECIPE), loss={"beta1": 1.0}, task={"args": {"max_numbers": 5}}, sampling={"temperature": 0.7}
    )
    assert differences(stored, asked) == [
        "loss.beta1: 5.0 -> 1.0",
        "sampling.temperature: 1.0 -> 0.7",
        "task.args.max_numbers: None -> 5",
    ]
    assert differences(stored, stored) == []


def test_a_resumed_run_may_change_where_and_how_long_it_runs(write: WriteRecipe):
    stored, asked = changed(
        write(RECIPE),
        trainer={"num_steps": 200, "max_tokens_per_microbatch": 512, "num_threads": 2, "save_steps": 5},
        engine={"max_num_seqs": 4},
        launch={"kind": "inline"},
        tracking={"report_to": ["wandb"]},
    )
    assert differences(stored, asked) == []


def test_a_resumed_run_may_not_change_what_its_weights_are_chosen_by(write: WriteRecipe):
    stored, asked = changed(write(RECIPE), selection={"eval_steps": 25})
    assert differences(stored, asked)[0] == "selection.eval_steps: None -> 25"
    assert differences(asked, stored)[0] == "selection.eval_steps: 25 -> None"


def test_a_resumed_run_may_not_change_its_lag(write: WriteRecipe):
    stored, asked = changed(write(RECIPE), launch={"rounds_ahead": 1})
    assert differences(stored, asked) == ["launch.rounds_ahead: 0 -> 1"]


# What must stay instant


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--help"], 0), (["train", "--help"], 0), (["train", "RECIPE", "--dry_run", "--trainer.num_steps", "7"], 2)],
)
def test_help_and_checks_import_no_torch(write: WriteRecipe, words: list[str], code: int):
    words = [str(write(RECIPE)) if word == "RECIPE" else word for word in words]
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "oapl", *words], capture_output=True, text=True, check=False
    )
    assert process.returncode == code
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "oapl.config" in imported
    assert not imported & {"torch", "transformers", "datasets", "pyarrow", "matplotlib"}
    assert process.stdout if code == 0 else "num_steps = 7 must be a multiple" in process.stderr


def test_help_lists_every_command_and_every_setting(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    commands = capsys.readouterr().out
    assert all(name in commands for name in ("train", "sample", "eval", "inspect", "doctor"))
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    settings = capsys.readouterr().out
    assert all(f"--{name}" in settings for name in ("loss.beta1", "trainer.num_steps", "seed", "run_dir", "dry_run"))


def test_a_whole_section_can_be_given_as_json(write: WriteRecipe, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(write(RECIPE)), "--dry_run", "--loss", '{"beta1": 3, "beta2": 0.5}']) == 0
    out = capsys.readouterr().out
    assert "beta1 = 3" in out
    assert "beta2 = 0.5" in out


def test_json_that_is_none_is_refused(write: WriteRecipe, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(write(RECIPE)), "--dry_run", "--task.args", "{bad"]) == 2
    assert "cannot be read as JSON" in capsys.readouterr().err
