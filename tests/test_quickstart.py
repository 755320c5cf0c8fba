"""The shipped model is what its card says, and the shipped recipe teaches it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from oapl.cli import main
from oapl.model import resolve
from oapl.store.files import read_json

RECIPE = Path(__file__).parents[1] / "recipes" / "countdown.toml"
MODEL = Path(resolve("builtin:countdown"))


def test_the_shipped_model_is_a_small_llama():
    model = LlamaForCausalLM.from_pretrained(MODEL)
    assert 1e6 <= model.num_parameters() <= 3e6
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 6e6


def test_the_shipped_tokenizer_reads_back_what_it_is_given():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for text in ("use 4 9 12 make 30\n", "4*9=36\n36-12=24\n24/8=3"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_recipe_that_ships_is_found_by_its_name_from_anywhere(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "countdown", "--dry_run"]) == 0
    assert 'name_or_path = "builtin:countdown"' in capsys.readouterr().out
    assert main(["train", "countdwon", "--dry_run"]) == 2
    assert "Give the path of a TOML file, or one that oapl has: chain_sum, countdown, " in capsys.readouterr().err
    (tmp_path / "countdown").write_text("[model]")
    assert main(["train", "countdown", "--dry_run"]) == 2, "a file of that name comes first"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_quickstart_learns(tmp_path: Path):
    """The claims of docs/findings.md: pass@1 up by 0.10, for certain, and pass@64 down by no more than 0.10."""
    assert main(["train", str(RECIPE), "--run_dir", str(tmp_path)]) == 0
    summary = read_json(tmp_path / "summary.json")
    base, change = summary["base"]["pass_at_k"], summary["difference"]
    assert 0.15 <= base["1"][0] <= 0.35
    assert base["64"][0] > 0.9
    assert change["1"][0] >= 0.10
    assert change["1"][1] > 0
    assert change["64"][0] >= -0.10
