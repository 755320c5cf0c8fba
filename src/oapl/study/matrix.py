"""The study file, and the runs that it asks for: every method under every combination of the grid, for every seed."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from oapl.config import Recipe, dump_recipe, flatten, load_recipe, merge, read_toml
from oapl.errors import ConfigError

BESIDE_OTHERS = {"launch": {"kind": "inline"}, "trainer": {"num_threads": 1}, "engine": {"num_threads": 1}}
"""Laid over the recipe, and under the study's own settings: runs side by side have one core each."""

MAX_NAME = 32
"""Characters of a grid's value in the name of a run."""


class StudyFile(BaseModel):
    """A study as it is written down. Paths are relative to its file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str
    seeds: tuple[int, ...] = Field(min_length=1)
    methods: dict[str, dict[str, Any]] = Field(min_length=1)
    settings: dict[str, Any] = {}
    grid: dict[str, Any] = {}
    skip: tuple[dict[str, Any], ...] = ()
    keep: Literal["all", "results"] = "results"


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    method: str
    grid: Mapping[str, Any]
    """The value of each of the grid's settings, by its dotted name, as the study file has it."""
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        """Of its folder. No two cells of a study share one."""
        return "-".join([self.method, *map(short_name, self.grid.values()), f"seed{self.seed}"])

    @property
    def setting(self) -> str:
        """All but the seed, for a message."""
        return describe(self.method, self.grid)


@dataclass(frozen=True)
class Study:
    path: Path
    keep: Literal["all", "results"]
    grid_keys: tuple[str, ...]
    cells: tuple[Cell, ...]
    """By method, then grid, then seed: the order of the tables."""

    def in_order_of_work(self) -> list[Cell]:
        """All cells of one seed before those of the next, so that a stopped study has whole seeds."""
        seeds = list(dict.fromkeys(cell.seed for cell in self.cells))
        return sorted(self.cells, key=lambda cell: seeds.index(cell.seed))

    def settings(self) -> list[tuple[Cell, ...]]:
        """The cells that differ in nothing but their seed, together."""
        return [tuple(cells) for _, cells in itertools.groupby(self.cells, key=lambda cell: cell.setting)]


def load_study(path: Path) -> Study:
    """Reads a study and resolves the recipe of each of its runs. Raises ConfigError for whatever could not be run."""
    file = read_study_file(path)
    grid = flatten(file.grid)
    check_study(path, file, grid)
    combinations = [
        (method, dict(zip(grid, values, strict=True)))
        for method in file.methods
        for values in itertools.product(*grid.values())
    ]
    chosen = [(method, values, seed) for method, values in combinations for seed in file.seeds]
    for number, skipped in enumerate(map(flatten, file.skip), 1):
        left = [place for place in chosen if not matches(skipped, *place)]
        if len(left) == len(chosen):
            raise ConfigError(
                f"{path}: skip table {number}, {skipped}, matches no run (any more). Correct or remove it."
            )
        chosen = left
    if not chosen:
        raise ConfigError(f"{path}: the skip tables leave no run. Remove one of them.")
    cells = tuple(resolve_cells(path, file, chosen))
    check_distinct(path, cells)
    return Study(path, file.keep, tuple(grid), cells)


def read_study_file(path: Path) -> StudyFile:
    values, _ = read_toml(path, "study")
    try:
        return StudyFile(**values)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem, path) for problem in error.errors())) from error


def explain(problem: Any, path: Path) -> str:
    """One line on one thing wrong with a study file."""
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = list(StudyFile.model_fields)
        guess = difflib.get_close_matches(name, known, n=1)
        return f"{path}: {name} is not a key of a study" + (
            f"; did you mean {guess[0]}?" if guess else f"; it has {', '.join(known)}. A recipe's go under [settings]."
        )
    if problem["type"] == "missing":
        return f"{path}: {name} is missing: add it to the study."
    if problem["type"] == "too_short":
        return f"{path}: {name} = {problem['input']!r} is empty: give at least one."
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{path}: {name} = {problem['input']!r}: {message}."


def check_study(path: Path, file: StudyFile, grid: Mapping[str, Any]) -> None:
    """Raises ConfigError for what the shape of the file alone cannot rule out."""
    if not (recipe := path.parent / file.recipe).is_file():
        raise ConfigError(
            f"{path}: recipe = {file.recipe!r}: there is no file {recipe}. Give its path relative to the study file."
        )
    if repeated := [seed for seed in file.seeds if file.seeds.count(seed) > 1]:
        raise ConfigError(
            f"{path}: seeds has {repeated[0]} {file.seeds.count(repeated[0])} times. Give each seed once."
        )
    for method in file.methods:
        if not re.fullmatch(r"\w[\w.-]*", method):
            raise ConfigError(
                f"{path}: methods.{method!r} names folders: use letters, digits, dots, hyphens and underscores alone."
            )
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: grid.{key} = {values!r} must be a list of at least one value.")
    layers = {"settings": file.settings} | {f"methods.{name}": given for name, given in file.methods.items()}
    for name, given in [*layers.items(), ("grid", dict.fromkeys(grid))]:
        if "seed" in given:
            raise ConfigError(f"{path}: {name} sets `seed`. Remove it: `seeds` lists the seeds of every setting.")
    for method, given in file.methods.items():
        if twice := [key for key in grid if key in flatten(given)]:
            raise ConfigError(
                f"{path}: methods.{method} sets {twice[0]}, and so does the grid. Remove it from one of them."
            )
    check_skip(path, file, grid)


def check_skip(path: Path, file: StudyFile, grid: Mapping[str, Any]) -> None:
    known = ["method", "seed", *grid]
    for number, skipped in enumerate(map(flatten, file.skip), 1):
        if not skipped:
            raise ConfigError(f"{path}: skip table {number} is empty and would leave out every run. Remove it.")
        if unknown := [key for key in skipped if key not in known]:
            raise ConfigError(
                f"{path}: skip table {number} has {unknown[0]}, which does not tell runs apart; "
                f"what does is {', '.join(known)}."
            )


def matches(skipped: Mapping[str, Any], method: str, values: Mapping[str, Any], seed: int) -> bool:
    """Whether all entries of a skip table hold for a run; a list holds where one of its values does."""
    run = {"method": method, "seed": seed, **values}
    return all(run[key] in (value if isinstance(value, list) else [value]) for key, value in skipped.items())


def resolve_cells(path: Path, file: StudyFile, chosen: Sequence[tuple[str, Mapping[str, Any], int]]) -> Iterator[Cell]:
    """Each run with its recipe. Raises ConfigError that names every setting whose recipe is wrong."""
    wrong: dict[str, str] = {}
    for method, values, seed in chosen:
        settings = merge(BESIDE_OTHERS, nested(file.settings))
        for layer in (file.methods[method], values, {"seed": seed}):
            settings = merge(settings, nested(layer))
        try:
            recipe = load_recipe(path.parent / file.recipe, with_model_path(settings, path.parent))
        except ConfigError as error:
            wrong.setdefault(describe(method, values), str(error))
            continue
        yield Cell(method, values, seed, recipe)
    if wrong:
        raise ConfigError("\n".join(f"{path}: {setting}: {message}" for setting, message in wrong.items()))


def check_distinct(path: Path, cells: Sequence[Cell]) -> None:
    """Raises ConfigError where two runs would be the same, or share a folder."""
    recipes: dict[str, Cell] = {}
    names: dict[str, Cell] = {}
    for cell in cells:
        if (other := recipes.setdefault(dump_recipe(cell.recipe), cell)) is not cell:
            raise ConfigError(
                f"{path}: {other.setting} and {cell.setting} have the same settings throughout. Remove one of them."
            )
        if (other := names.setdefault(cell.name, cell)) is not cell:
            raise ConfigError(
                f"{path}: {other.setting} and {cell.setting} would both run in a folder {cell.name}. "
                f"Give one of the methods another name."
            )


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with every dotted key unfolded: `"loss.beta2" = 1` as `loss.beta2 = 1`."""
    unfolded: dict[str, Any] = {}
    for key, value in settings.items():
        inner = nested(value) if isinstance(value, Mapping) else value
        for part in reversed(key.split(".")):
            inner = {part: inner}
        unfolded = merge(unfolded, inner)
    return unfolded


def with_model_path(settings: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """A model that is a path from the study's folder is found from everywhere."""
    model = settings.get("model")
    name = model.get("name_or_path") if isinstance(model, Mapping) else None
    if not isinstance(name, str) or not (folder / name).exists():
        return settings
    return merge(settings, {"model": {"name_or_path": str((folder / name).resolve())}})


def describe(method: str, values: Mapping[str, Any]) -> str:
    return ", ".join([f"method {method}", *(f"{key} = {value!r}" for key, value in values.items())])


def short_name(value: Any) -> str:
    """A setting's value as part of a folder's name: `0.001`, `bases-early`."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    clean = re.sub(r"[^\w.]+", "-", text).strip("-.")
    return clean[:MAX_NAME].rstrip("-.") or "none"
