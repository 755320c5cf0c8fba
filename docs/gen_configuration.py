"""An mkdocs hook that writes the tables of docs/configuration.md from `oapl.config`, so that they cannot drift."""

from __future__ import annotations

import json
import math
from typing import Any

from oapl.config import Recipe, may_change

MARK = "<!-- SETTINGS -->"
LIMITS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
NAMES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARK, settings()) if MARK in markdown else markdown


def settings() -> str:
    """One table a section, in the order of the recipe; where a section has kinds, one table a kind."""
    schema = Recipe.model_json_schema()
    tables = [table("The run", "", {"seed": schema["properties"]["seed"]}, required=())]
    for section, value in schema["properties"].items():
        definitions = [schema["$defs"][name] for name in definition_names(value)]
        for definition in definitions:
            fields = definition["properties"]
            heading = f'{section}, kind = "{fields["kind"]["const"]}"' if len(definitions) > 1 else section
            if {"type": "null"} in value.get("anyOf", []):
                heading += " (may be left out)"
            tables.append(table(heading, section, fields, required=definition.get("required", ())))
    return "\n".join(tables)


def definition_names(value: dict[str, Any]) -> list[str]:
    """The definitions that a property of the schema refers to: none for a plain value, several for a union."""
    if "$ref" in value:
        return [value["$ref"].rpartition("/")[2]]
    return [
        name
        for key in ("allOf", "anyOf", "oneOf")
        for option in value.get(key, ())
        for name in definition_names(option)
    ]


def table(heading: str, section: str, fields: dict[str, Any], required: Any) -> str:
    lines = [f"### {heading}\n"]
    lines += ["| key | default | values | meaning | resume |", "|---|---|---|---|---|"]
    for key, field in fields.items():
        default = "required" if key in required else f"`{as_toml(field.get('default'))}`"
        change = "may change" if may_change(f"{section}.{key}") else ""
        lines.append(f"| `{key}` | {default} | {values(field)} | {field['description']} | {change} |")
    return "\n".join([*lines, ""])


def as_toml(value: Any) -> str:
    """A default as one would write it in a recipe; `none` for a setting that is left out."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, -inf, nan: TOML's words, which JSON lacks
    return "none" if value is None else json.dumps(value)


def values(field: dict[str, Any]) -> str:
    """What a key takes, from its JSON schema."""
    if "anyOf" in field:
        return " or ".join(values(option) for option in field["anyOf"] if option.get("type") != "null")
    if choices := field.get("enum", [field["const"]] if "const" in field else []):
        return ", ".join(f"`{as_toml(value)}`" for value in choices)
    if field.get("type") == "array":
        return f"list of {values(field['items'])}"
    if field.get("type") == "object":
        return "table"
    limits = [f"{sign} {field[name]}" for name, sign in LIMITS.items() if name in field]
    return " ".join([NAMES[field["type"]], " and ".join(limits)]).strip()
