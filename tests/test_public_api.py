"""The public names and their signatures are those that are written down; see docs/versions.md.

python tests/test_public_api.py > tests/public_api.txt    # where a change is meant; the changelog says so too
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from oapl.config import setting_names

HERE = Path(__file__).parent
REFERENCE = re.findall(r"^::: (\S+)$", (HERE.parent / "docs" / "reference.md").read_text(), re.MULTILINE)


def public_api() -> list[str]:
    lines = [line for module in REFERENCE for line in lines_of(module)]
    return sorted({*lines, *(f"setting {name}" for name in setting_names())})


def lines_of(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or [
        key for key, value in vars(module).items() if getattr(value, "__module__", None) == name
    ]
    for key in names:
        value = getattr(module, key)
        if key.startswith("_") or not callable(value):
            continue
        if is_dataclass(value) and isinstance(value, type):  # of what it inherits others decide
            yield from (f"{name}.{key}.{field}" for field in vars(value).get("__annotations__", {}))
        else:
            yield f"{name}.{key}{signature(value)}"
        if inspect.isclass(value):
            for method, body in vars(value).items():
                if not method.startswith("_") and inspect.isfunction(body):
                    yield f"{name}.{key}.{method}{signature(body)}"


def signature(value: Any) -> str:
    """Names, kinds and defaults of the arguments; types are for type checkers."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return re.sub(r"<function .*? at \w+>", "…", str(inspect.Signature(plain)))


def test_public_names_and_signatures_are_as_written_down():
    written = (HERE / "public_api.txt").read_text().splitlines()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, when they are imported
        found = public_api()
    gone, new = sorted(set(written) - set(found)), sorted(set(found) - set(written))
    assert not gone and not new, f"gone: {gone}\nnew: {new}\n{__doc__}"  # noqa: PT018


if __name__ == "__main__":
    print("\n".join(public_api()))
