"""The studies that ship: each can be read, and a miniature goes all the way to a comparison and a page."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oapl.cli import main
from oapl.study.matrix import load_study

STUDIES = Path(__file__).parents[1] / "studies"


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_study_that_ships_can_be_run(path: Path):
    assert load_study(path).cells


def test_a_miniature_study_ends_with_tables_a_comparison_and_a_page(tmp_path: Path):
    study = STUDIES / "miniature.toml"
    assert main(["study", str(study), "--study_dir", str(tmp_path / "study")]) == 0
    rows = list(csv.DictReader((tmp_path / "study" / "results.csv").read_text().splitlines()))
    assert [(row["method"], row["trainer.weight_sync_steps"]) for row in rows] == [
        (method, steps) for method in ("oapl", "grpo") for steps in ("2", "8")
    ]
    assert all(row["status"] == "finished" and 0 <= float(row["final_pass@4"]) <= 1 for row in rows)

    command = [sys.executable, "studies/compare.py", str(study), str(tmp_path / "study"), "--reference", "grpo"]
    compared = subprocess.run(
        [*command, "--output", str(tmp_path / "compared.json")],
        cwd=STUDIES.parent,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert compared.returncode == 0, compared.stderr
    result = json.loads((tmp_path / "compared.json").read_text())
    assert [row["trainer.weight_sync_steps"] for row in result["differences"]] == [2, 8]
    assert result["reference"] == "grpo"

    command = [sys.executable, "studies/guard.py", str(tmp_path / "study"), "--output", str(tmp_path / "guard.json")]
    scanned = subprocess.run(command, cwd=STUDIES.parent, capture_output=True, text=True)
    assert scanned.returncode == 0, scanned.stderr
    result = json.loads((tmp_path / "guard.json").read_text())
    assert {f"runs/{row['run']}" for row in result["runs"]} == {row["run"] for row in rows}
    assert sum(result["ended"].values()) == 4
    assert all(line["collapsed"] <= result["ended"]["collapsed"] for line in result["thresholds"])

    for script, options, message in (
        (
            "compare",
            [str(study), str(tmp_path / "study"), "--reference", "gpro"],
            "gpro: has no finished run; there are",
        ),
        ("compare", [str(study), str(tmp_path), "--reference", "grpo"], "holds no finished run"),
        ("guard", [str(tmp_path)], "is not the folder of a study with finished runs"),
    ):
        command = [sys.executable, f"studies/{script}.py", *options]
        refused = subprocess.run(command, cwd=STUDIES.parent, capture_output=True, text=True)
        assert refused.returncode == 2
        assert message in refused.stderr

    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "study"), "--output", str(page)]) == 0
    assert "weight_sync_steps" in page.read_text()
