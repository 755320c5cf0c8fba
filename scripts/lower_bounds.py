"""Prints constraints that pin what oapl depends on to the lowest versions that it allows.

python scripts/lower_bounds.py > lowest.txt
scripts/check_wheel.sh dist/*.whl lowest.txt
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement


def lowest(requirement: str) -> str:
    """Raises ValueError where a requirement has no lower bound."""
    parsed = Requirement(requirement)
    bounds = [each.version for each in parsed.specifier if each.operator in (">=", "==")]
    if not bounds:
        raise ValueError(f"{requirement} has no lower bound")
    return f"{parsed.name}=={bounds[0]}"


def main() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    print("\n".join(lowest(each) for each in project["dependencies"]))


if __name__ == "__main__":
    main()
