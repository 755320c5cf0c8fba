"""Packages that do not fit together are named before they break anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oapl import installation


def doctor(packages: Path) -> subprocess.CompletedProcess[str]:
    """`oapl doctor` where a folder of broken packages comes before those that are installed."""
    return subprocess.run(
        [sys.executable, "-m", "oapl", "doctor"],
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
    )


def broken_package(folder: Path, name: str, version: str, requirement: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: {requirement}\n"
    )


@pytest.mark.parametrize(
    ("package", "messages"),
    [
        pytest.param(
            ("torchvision", "0.28.0", "torch==2.13.0"),
            ["InstallationError: torchvision cannot be imported beside torch", "pip uninstall torchvision"],
            id="one that does not fit torch",
        ),
        pytest.param(
            ("vllm", "99.0", "numpy>=99"),
            [
                "`import vllm` fails (RuntimeError: operator torchvision::nms does not exist)",
                "it requires numpy>=99, here ",
            ],
            id="a vLLM that requires others",
        ),
    ],
)
def test_a_package_that_cannot_be_imported_is_told_with_its_remedy(
    tmp_path: Path, package: tuple[str, str, str], messages: list[str]
):
    broken_package(tmp_path, *package)
    said = doctor(tmp_path)
    assert said.returncode == 1
    for message in messages:
        assert message in said.stderr


def test_what_is_installed_here_fits():
    assert installation.problem() is None
