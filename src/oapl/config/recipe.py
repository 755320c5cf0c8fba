"""Recipes as files and as overrides: read, laid over each other, compared, and written."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic_settings import CliSettingsSource

from oapl.config.messages import explain
from oapl.config.sections import Recipe, loss_kind
from oapl.errors import ConfigError
from oapl.paths import StorePath

RECIPES = Path(__file__).parent.parent / "recipes"
"""Those that ship with the package: in a clone a link, in a wheel a copy."""
MAY_CHANGE = (
    "engine.",
    "tracking.",
    "launch.kind",
    "launch.num_samplers",
    "launch.lease_s",
    "launch.ray_address",
    "launch.rounds_from",
    "trainer.num_steps",
    "model.attn_implementation",
    "trainer.max_tokens_per_microbatch",
    "trainer.gradient_checkpointing",
    "trainer.torch_compile",
    "trainer.device",
    "trainer.num_ranks",
    "trainer.num_threads",
    "trainer.save_",
    "trainer.on_collapse",
    "task.reward_timeout_s",
    "task.num_workers",
    "evaluation.num_workers",
)
"""How the settings begin that a resumed run may change: where, how fast and how long it runs, not what it does."""


def load_recipe(path: StorePath, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Reads a TOML recipe, with `overrides` (nested like the recipe) on top. Raises ConfigError."""
    values, text = read_toml(path, "recipe")
    return build_recipe(values, path, text, overrides or {})


def recipe_file(name: str) -> Path:
    """The file of that name, or the recipe that ships with the package under it, such as `countdown`."""
    shipped = RECIPES / f"{name}.toml"
    return shipped if not Path(name).is_file() and shipped.is_file() else Path(name)


def shipped_recipes() -> list[str]:
    """The names by which `recipe_file` finds those that read no file of the repository, as the miniatures do."""
    names = (path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.toml"))
    return sorted(name for name in names if not name.startswith("miniature/"))


def build_recipe(
    values: Mapping[str, Any], source: StorePath, text: str = "", overrides: Mapping[str, Any] | None = None
) -> Recipe:
    """A recipe from nested settings, whose `source` and its text errors speak of. Raises ConfigError."""
    given = overrides or {}
    try:
        return Recipe(**merge(values, given))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem, source, text, given) for problem in error.errors())) from error


def read_toml(path: StorePath, what: str) -> tuple[dict[str, Any], str]:
    """What a TOML file holds, and its text. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        shipped = f", or one that oapl has: {', '.join(shipped_recipes())}" if what == "recipe" else ""
        raise ConfigError(
            f"{path}: the {what} cannot be read ({error.strerror or error}). Give the path of a TOML file{shipped}."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML, which is UTF-8: {error}.") from error
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as TOML. `load_recipe` reads it back to an equal recipe."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top, section by section. A loss of another kind takes the whole section's place."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        if key == "loss" and _is_other_kind(inner, value):
            inner = None
        merged[key] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return merged


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names; an empty table has none."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value of a setting, named as `section.key`."""
    return key.startswith(MAY_CHANGE)


def differences(stored: Recipe, asked: Recipe) -> list[str]:
    """What a resumed run may not change but `asked` does, as `key: stored -> asked`."""
    return [text for key, text in all_differences(stored, asked).items() if not may_change(key)]


def all_differences(stored: Recipe, asked: Recipe) -> dict[str, str]:
    """Every setting that `asked` changes, as `key: stored -> asked`, by its key. Of another loss, only its kind."""
    old, new = flatten(stored.model_dump()), flatten(asked.model_dump())
    if old["loss.kind"] != new["loss.kind"]:
        old, new = ({key: value for key, value in of.items() if not is_loss_detail(key)} for of in (old, new))
    return {
        key: f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def is_loss_detail(key: str) -> bool:
    return key.startswith("loss.") and key != "loss.kind"


def command_line_source(parser: Any) -> CliSettingsSource[Any]:
    """Adds every setting to an argparse parser as `--section.key`; called with `args=`, holds what was given."""
    return CliSettingsSource(Recipe, root_parser=parser, cli_parse_none_str="none")


def _is_other_kind(loss: Any, over: Any) -> bool:
    kind = over.get("kind") if isinstance(over, Mapping) else None
    return kind is not None and isinstance(loss, Mapping) and kind != loss_kind(loss)
