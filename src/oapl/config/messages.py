"""What is said of a wrong recipe: where, what, the value, and the nearest name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from oapl.config.sections import Recipe
from oapl.paths import StorePath


def setting_names(model: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Every key of a recipe, dotted: `loss.beta2`."""
    names = []
    for name, field in model.model_fields.items():
        sections = sections_of(field.annotation)
        for section in sections:
            names += [key for key in setting_names(section, f"{prefix}{name}.") if key not in names]
        if not sections:
            names.append(prefix + name)
    return names


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field may hold: one, the members of a union, or none for a plain value."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [section for argument in get_args(annotation) for section in sections_of(argument)]


def nearest_setting(name: str) -> str | None:
    """The key or section most like a misspelt one: first by its whole name, then by its last part."""
    names = [*setting_names(), *Recipe.model_fields]
    if matches := difflib.get_close_matches(name, names, n=1, cutoff=0.75):
        return matches[0]
    last = {key.rpartition(".")[2]: key for key in reversed(names)}
    matches = difflib.get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.75)
    return last[matches[0]] if matches else None


def explain(problem: Any, path: StorePath, text: str, overrides: Mapping[str, Any]) -> str:
    """One line on one thing wrong with a recipe: where, what, the value, and what to do."""
    location: Sequence[Any] = problem["loc"]
    if location[:1] == ("loss",):
        location = ("loss", *location[2:])  # without the kind, which is no part of a key
    if problem["type"] == "union_tag_invalid":
        location = (*location, "kind")
    name = ".".join(str(part) for part in location)
    message = problem["msg"].removeprefix("Value error, ")
    # The checks of a whole section begin their message with the key at fault.
    place = [*location, *message.split()[0].split(".")] if problem["type"] == "value_error" else location
    if _is_given(overrides, place):
        where = f"--{'.'.join(str(part) for part in place)}"
    else:
        where = f"{path}{_line_of(text, place) or _line_of(text, location)}" + (f": {name}" if name else "")
    if problem["type"] == "extra_forbidden":
        if name in setting_names():
            return f"{where} is a setting of another loss.kind than {problem['loc'][1]!r}."
        guess = nearest_setting(name)
        return f"{where} is not a setting" + (
            f"; did you mean {guess}?" if guess else ". `oapl train --help` lists them."
        )
    if problem["type"] == "union_tag_invalid":
        return f"{where} = {problem['ctx']['tag']!r} is not a loss; there are {problem['ctx']['expected_tags']}."
    if problem["type"] == "missing":
        return f"{where} is missing: add it to the recipe."
    if problem["type"] == "value_error":
        return f"{where}: {message}."
    message = message[0].lower() + message[1:]
    hint = {"loss.beta1": "; 5 is the default", "loss.beta2": "; 0.1 is the default"}.get(name, "")
    return f"{where} = {problem['input']!r}: {message}{hint}."


def _is_given(overrides: Mapping[str, Any], location: Sequence[Any]) -> bool:
    value: Any = overrides
    for part in location:
        if not isinstance(value, Mapping):
            return True  # an item of a list that was given
        if part not in value:
            return False
        value = value[part]
    return True


def _line_of(text: str, location: Sequence[Any]) -> str:
    """`:14` where the recipe sets the key on line 14, else nothing."""
    section, name = "", ".".join(part for part in location if isinstance(part, str))
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[([\w.]+)\]", line):
            section = match[1]
            if section == name:
                return f":{number}"
        elif match := re.match(r"\s*([\w.]+)\s*=", line):
            dotted = f"{section}.{match[1]}" if section else match[1]
            if dotted == name:
                return f":{number}"
    return ""
