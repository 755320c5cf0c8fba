"""The HTML report: what it says, what it leaves out, and how it behaves in a real browser.

The browser tests leave pictures for a person in tests/screenshots.
"""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import browser
from helpers import flip_a_bit, make_group, make_round
from oapl.cli import main
from oapl.config import dump_recipe, load_recipe
from oapl.report.completions import TokenScores, cut_text, ends_first, sample_groups, spread, token_fields, within_bytes
from oapl.report.figures import curves, thin
from oapl.report.page import write_report
from oapl.report.study import across
from oapl.scoring import score_groups, token_pieces
from oapl.store import RunFolder
from oapl.types import Completion, Group, PolicyRef, Shard

SCREENSHOTS = Path(__file__).parent / "screenshots"
RECIPE = Path(__file__).parent.parent / "recipes" / "countdown.toml"
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'><b>bold</b>"
ANSWERS = ("1+2=3\n3*4=12", "2*2=4", HOSTILE, "4-1=3\n")
REWARDS = (1.0, 0.0, 0.0, 1.0)


# Runs and studies to report on


def make_run(
    folder: Path,
    *,
    rounds: int = 2,
    sync: int = 3,
    prompts: int = 2,
    trained: int | None = None,
    policy: Path | None = None,
    summary: bool = True,
    seed: int = 0,
) -> RunFolder:
    """A run of `rounds` rounds of `sync` steps of `prompts` groups of four answers, trained for `trained` steps."""
    sizes = {"num_steps": rounds * sync, "weight_sync_steps": sync, "prompts_per_step": prompts}
    recipe = load_recipe(RECIPE, {"seed": seed, "trainer": sizes, "sampling": {"num_generations": 4}})
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.config_path.write_text(dump_recipe(recipe))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "oapl": "0.1.0", "torch": "2.13.0"}))
    for index in range(rounds):
        round = make_round(index, PolicyRef(index, index * sync, "0" * 64), num_shards=sync, prompts_per_shard=prompts)
        run.round(index).open(round)
        for number in range(sync):
            groups = tuple(answers_group(position) for position in round.positions(number))
            run.round(index).write_shard(round, number, Shard(groups, (), 1.5, 0.25, 0.0))
    for step in range(1, 1 + (rounds * sync if trained is None else trained)):
        run.append_metrics(metrics_line(step, sync, seed))
    if policy:
        run.publish_policy(rounds, rounds * sync, lambda path: shutil.copytree(policy, path, dirs_exist_ok=True))
    if summary:
        run.summary_path.write_text(json.dumps(summary_of(rounds * sync, seed)))
    return run


def answers_group(position: int) -> Group:
    completions = [
        Completion(np.array([8, 9, 10 + i], np.int32), np.array([-0.5, -1.0, -0.25], np.float32), reason)
        for i, reason in enumerate(("stop", "stop", "length", "stop"))
    ]
    group = make_group(position, REWARDS, prompt_ids=[3, 8, 4], completions=completions)
    return replace(group, texts=ANSWERS, prompt=f"use 1 2 3 make {position}\n")


def metrics_line(step: int, sync: int, seed: int) -> dict[str, Any]:
    return {
        "step": step,
        "round": (step - 1) // sync,
        "lag": (step - 1) % sync,
        "time": 1.8e9 + step,
        "reward": 0.2 + 0.02 * step + 0.1 * seed + 0.03 * math.sin(5 * step),
        "num_completions": 8,
        "num_tokens": 24,
        "uniform_share": 0.25,
        "truncated_share": 0.25,
        "completion_length": 3.0,
        "entropy": 0.5 / step,
        "log_ratio_right": 0.01 * step,
        "log_ratio_wrong": -0.02 * step,
        "residual": 0.01,
        "grad_norm": 1.0 / step,
        "sampling_s": 1.5,
        "grading_s": 0.25,
        "wait_s": 0.5,
        "step_s": 1.0,
        "save_s": 0.125,
    }


def summary_of(num_steps: int, seed: int) -> dict[str, Any]:
    base = {"1": [0.2, 0.15, 0.25], "2": [0.35, 0.3, 0.4], "4": [0.5, 0.42, 0.58]}
    final = {"1": [0.4, 0.33, 0.46], "2": [0.5, 0.44, 0.57], "4": [0.55, 0.46, 0.62]}
    facts = {"num_prompts": 16, "num_generations": 4, "num_failed": 0}
    return {
        "base": {"policy_version": 0, **facts, "pass_at_k": base},
        "final": {"policy_version": 2, **facts, "pass_at_k": final},
        "difference": {"1": [0.2, 0.15, 0.24], "2": [0.15, 0.1, 0.2], "4": [0.05, -0.02, 0.1]},
        "num_steps": num_steps,
        "seed": seed,
        "selection": {"step": 3, "pass@1": {"0": 0.2, "3": 0.45, "6": 0.4}},
    }


def make_study(folder: Path) -> Path:
    """Two methods, two values of L, two seeds; the run of grpo, L = 20, seed 1 collapses at step 4 of 8."""
    folder.mkdir()
    rows = []
    for method in ("oapl", "grpo"):
        for sync in ("10", "20"):
            for seed in (0, 1):
                collapsed = (method, sync, seed) == ("grpo", "20", 1)
                run = RunFolder(folder / "runs" / f"{method}-{sync}-{seed}")
                run.path.mkdir(parents=True)
                for step in range(1, 5 if collapsed else 9):
                    run.append_metrics(metrics_line(step, int(sync), seed))
                rows.append(study_row(method, sync, seed, collapsed, run.path.relative_to(folder)))
    write_csv(folder / "results.csv", rows)
    cells = []
    for method, sync, mean, collapsed in (("oapl", 10, 0.5, 0), ("oapl", 20, 0.45, 0), ("grpo", 10, 0.4, 0)):
        cells.append(table_row(method, sync, mean, collapsed))
    write_csv(folder / "table.csv", [*cells, table_row("grpo", 20, 0.3, 1)])
    return folder


def study_row(method: str, sync: str, seed: int, collapsed: bool, run: Path) -> dict[str, Any]:
    reason = f"reward fell {HOSTILE}" if collapsed else ""
    row = {"method": method, "trainer.weight_sync_steps": sync, "seed": seed}
    row |= {"status": "collapsed" if collapsed else "finished", "reason": reason, "run": str(run)}
    row |= {"step": 4 if collapsed else 8, "num_steps": 8}
    for k, base in ((1, 0.2), (4, 0.5)):
        row[f"base_pass@{k}"] = base
        for name, shift in (("final", base + 0.2), ("difference", 0.2)):
            for suffix, width in (("", 0.0), ("_low", -0.05), ("_high", 0.05)):
                row[f"{name}_pass@{k}{suffix}"] = "" if collapsed else shift + width
    return row | {"last_reward": 0.4}


def table_row(method: str, sync: int, mean: float, collapsed: int) -> dict[str, Any]:
    row = {"method": method, "trainer.weight_sync_steps": sync, "num_seeds": 2, "num_collapsed": collapsed}
    row["num_failed"] = 1 - collapsed
    for k, shift in ((1, 0.0), (4, 0.2)):
        for suffix, width in (("", 0), ("_low", -0.05), ("_high", 0.05), ("_min", -0.02), ("_max", 0.02)):
            row[f"pass@{k}{suffix}"] = mean + shift + width
    return row


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def data_of(page: Path) -> dict[str, Any]:
    """What the page's own scripts read."""
    text = page.read_text(encoding="utf-8")
    start = text.index(">", text.index('id="data"')) + 1
    return json.loads(text[start : text.index("</script>", start)])


def report(*paths: Path, options: Sequence[str] = ("--no_scores",)) -> dict[str, Any]:
    output = paths[0].parent / "report.html"
    assert main(["report", *map(str, paths), "--output", str(output), *options]) == 0
    return data_of(output)


# What a run's page says


def test_curves_have_three_x_axes_that_add_up(tmp_path: Path):
    columns = report(make_run(tmp_path / "run").path)["runs"][0]["columns"]
    assert columns["step"] == [1, 2, 3, 4, 5, 6]
    assert columns["samples"] == [8, 16, 24, 32, 40, 48]
    assert columns["wall_s"] == [1.625 * step for step in range(1, 7)]  # save 0.125, wait 0.5, step 1.0
    assert columns["entropy"] == pytest.approx([0.5 / step for step in range(1, 7)], rel=1e-5)


def test_a_chart_is_there_only_if_its_metrics_are(tmp_path: Path):
    run = make_run(tmp_path / "run")
    charts = {chart["id"]: chart for chart in report(run.path)["charts"]}
    assert "r2" not in charts
    assert "effective_share" not in charts
    assert [line["metric"] for line in charts["residual"]["lines"]] == ["residual"]
    run.append_metrics({**metrics_line(7, 3, 0), "r2": 0.5, "residual_std": 0.1, "effective_share": 0.9})
    charts = {chart["id"]: chart for chart in report(run.path)["charts"]}
    assert {"r2", "effective_share"} <= charts.keys()
    assert [line["metric"] for line in charts["residual"]["lines"]] == ["residual", "residual_std"]
    assert all(chart["shows"] and chart["bad"] for chart in charts.values())


def test_numbers_that_are_missing_or_not_finite_are_gaps():
    records = [{"step": 1, "reward": 0.5}, {"step": 2}, {"step": 3, "reward": math.nan}, {"step": 4, "reward": 1.0}]
    assert curves(records)["reward"] == [0.5, None, None, 1.0]


def test_success_is_drawn_only_where_it_is_not_the_reward():
    same = [{"step": 1, "reward": 0.5, "success": 0.5}]
    assert "success" not in curves(same)
    assert curves([{"step": 1, "reward": 0.5, "success": 0.25}])["success"] == [0.25]


def test_a_long_curve_is_thinned_to_means():
    values = np.arange(4001.0)
    thinned = thin(values)
    assert len(thinned) == 1334  # ceil(4001 / 3), since 2000 points hold at most two neighbours each
    assert thinned[0] == 1.0  # of 0, 1, 2
    assert thinned[-1] == 3999.5  # of 3999, 4000


def test_a_run_whose_last_point_averages_fewer_steps_than_the_others_has_its_curves():
    columns = curves([metrics_line(step, 50, 0) for step in range(1, 2002)])
    # 2000 points hold at most two neighbours each, and the last of 2001 steps stands alone.
    assert columns["step"][:2] == [1.5, 3.5]
    assert columns["step"][-1] == 2001
    assert columns["samples"][:2] == [12.0, 28.0]  # 8 a step
    assert columns["samples"][-1] == 8 * 2001


def test_seconds_are_summed_by_round_and_grading_is_not_counted_twice(tmp_path: Path):
    rounds = report(make_run(tmp_path / "run").path)["runs"][0]["rounds"]
    assert rounds["round"] == [0, 1]
    assert rounds["sampling_s"] == [3 * 1.25] * 2
    assert rounds["grading_s"] == [3 * 0.25] * 2
    assert rounds["step_s"] == [3.0] * 2


def test_a_run_says_how_far_it_came(tmp_path: Path):
    finished = make_run(tmp_path / "finished")
    unfinished = make_run(tmp_path / "unfinished", trained=4, summary=False)
    collapsed = make_run(tmp_path / "collapsed", trained=5, summary=False)
    (collapsed.path / "collapse.json").write_text(
        json.dumps({"step": 5, "reason": "no reward is left", "advice": "Raise beta2."})
    )
    runs = report(finished.path, unfinished.path, collapsed.path)["runs"]
    states = [run["status"] for run in runs]
    assert states == [
        {"kind": "finished", "text": "finished, 6 steps"},
        {"kind": "unfinished", "text": "unfinished: step 4 of 6"},
        {"kind": "collapsed", "text": "collapsed at step 5 of 6: no reward is left"},
    ]
    assert runs[2]["notes"] == ["Raise beta2."]


def test_an_unfinished_run_shows_the_evaluations_it_has(tmp_path: Path):
    run = make_run(tmp_path / "run", trained=0, summary=False)
    round = make_round(0, PolicyRef(0, 0, "0" * 64), num_shards=1, prompts_per_shard=2, num_generations=4)
    run.evaluation(0).open(round)
    run.evaluation(0).write_shard(round, 0, Shard((answers_group(0), answers_group(1)), (), 1.0, 0.1, 0.0))
    run.evaluation(0).seal(round)
    scores = report(run.path)["runs"][0]["scores"]
    assert list(scores) == ["base"]
    assert scores["base"]["pass_at_k"]["1"][0] == 0.5  # two of four answers are right, to both problems


def test_a_run_before_its_first_step_has_a_page(tmp_path: Path):
    run = make_run(tmp_path / "run", rounds=1, trained=0, summary=False)
    shutil.rmtree(run.path / "rounds")
    data = report(run.path)
    assert data["runs"][0]["completions"] is None
    assert data["charts"] == []


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path):
    runs = [make_run(tmp_path / parent / "run", rounds=1).path for parent in ("a", "b")]
    assert [run["name"] for run in report(*runs)["runs"]] == ["a/run", "b/run"]


def test_a_run_that_was_not_evaluated_at_its_start_shows_what_came_after(tmp_path: Path):
    run = make_run(tmp_path / "run")
    run.summary_path.write_text(json.dumps({"final": summary_of(6, 0)["final"], "num_steps": 6}))
    assert list(report(run.path)["runs"][0]["scores"]) == ["final"]


@pytest.mark.parametrize("damage", ["{", '{"base": {}}'])
def test_a_damaged_summary_is_noted_with_its_remedy(tmp_path: Path, damage: str):
    run = make_run(tmp_path / "run")
    run.summary_path.write_text(damage)
    assert "`oapl train` on this folder makes it again" in report(run.path)["runs"][0]["notes"][0]


# Completions


def test_the_sample_is_bounded_fixed_and_holds_the_first_and_the_last_step(tmp_path: Path):
    run = make_run(tmp_path / "run", rounds=10, sync=5)
    sampled, num_groups, notes = sample_groups(run, 5, 30)
    assert (len(sampled), num_groups, notes) == (30, 100, [])
    steps = {item.step for item in sampled}
    assert {1, 50} <= steps
    assert {(step - 1) // 5 for step in steps} == set(range(10))
    again, _, _ = sample_groups(run, 5, 30)
    assert [(item.step, item.group.position) for item in sampled] == [(i.step, i.group.position) for i in again]


def test_with_several_epochs_a_group_is_shown_at_the_first_step_that_trains_on_it(tmp_path: Path):
    run = make_run(tmp_path / "run", rounds=2, sync=3)
    assert {item.step for item in sample_groups(run, 6, 12)[0]} == {1, 2, 3, 7, 8, 9}  # two epochs of three shards


def test_only_the_shards_of_the_sample_are_opened(tmp_path: Path):
    run = make_run(tmp_path / "run", rounds=10, sync=5)
    steps = {item.step for item in sample_groups(run, 5, 8)[0]}
    for step in set(range(1, 51)) - steps:
        run.round((step - 1) // 5).parquet_path((step - 1) % 5).unlink()
    data = report(run.path, options=("--groups", "8", "--no_scores"))["runs"][0]
    assert len(data["completions"]["groups"]) == 8
    assert not [note for note in data["completion_notes"] if "left out" in note]


def test_a_damaged_shard_is_left_out_and_named(tmp_path: Path):
    run = make_run(tmp_path / "run", rounds=1)
    flip_a_bit(run.round(0).parquet_path(1))
    data = report(run.path)["runs"][0]
    assert {group["step"] for group in data["completions"]["groups"]} == {1, 3}
    assert any("Step 2 is left out" in note and "does not match its seal" in note for note in data["completion_notes"])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 24])
def test_the_order_of_filling_names_each_place_once_and_the_ends_first(count: int):
    order = ends_first(count)
    assert sorted(order) == list(range(count))
    assert order[:2] == [0, count - 1][:count]
    assert ends_first(0) == []


def test_spread_holds_both_ends():
    assert spread(100, 5) == [0, 25, 50, 74, 99]
    assert spread(3, 5) == [0, 1, 2]
    assert spread(100, 1) == [99]


def test_groups_fill_their_bytes_and_no_more():
    groups = [{"text": "x" * 100}] * 10
    size = len(json.dumps(groups[0]))
    assert len(within_bytes(groups, 3 * size)) == 3
    assert within_bytes(groups, size - 1) == []


def test_the_middle_of_a_very_long_completion_is_left_out_and_counted():
    pieces = [str(i) for i in range(3000)]
    fields = token_fields(pieces, np.full(3000, 0.5, np.float32), np.zeros(3000, np.float32))
    assert fields["tokens"] == pieces[:1500] + pieces[-500:]
    assert fields["omitted"] == 1000
    assert fields["ratio"] == 1500.0  # of all tokens
    assert "[… 2000 characters …]" in cut_text("x" * 10_000)


def test_token_log_ratios_are_those_of_the_newest_policy(tmp_path: Path, tiny_model: Path):
    run = make_run(tmp_path / "run", rounds=1, policy=tiny_model)
    shown = report(run.path, options=())["runs"][0]["completions"]
    answer = shown["groups"][0]["answers"][1]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    ids = torch.tensor([[3, 8, 4, 8, 9, 11]])  # the prompt's three tokens and the second answer's
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, 2:5].gather(-1, ids[0, 3:, None])[:, 0]
    expected = logprobs.numpy() - np.array([-0.5, -1.0, -0.25])
    assert answer["ratios"] == pytest.approx(expected, abs=1e-3)
    assert answer["ratio"] == pytest.approx(expected.sum(), abs=2e-3)
    assert "".join(answer["tokens"]) == tokenizer.decode([8, 9, 11])
    assert shown["policy"] == 1


def test_without_time_to_score_all_groups_the_others_are_there_uncoloured(tmp_path: Path, tiny_model: Path):
    run = make_run(tmp_path / "run", rounds=1, policy=tiny_model)
    page = write_report([run.path], None, lambda run, sampled: score_groups(run, sampled, seconds=0.0))
    data = data_of(page)["runs"][0]
    first, *others = data["completions"]["groups"]
    assert "tokens" in first["answers"][0]
    assert all(group["answers"][0]["text"] == ANSWERS[0] for group in others)
    assert "in 1 of the 6 groups" in data["completion_notes"][0]


def test_pieces_of_tokens_read_as_the_whole_even_within_a_character():
    class Bytes:
        """One token a byte, as byte-level tokenizers have them."""

        def decode(self, ids: Sequence[int]) -> str:
            return bytes(ids).decode("utf-8", "replace")

    text = "a€b🙂"
    pieces = token_pieces(Bytes(), list(text.encode()))  # type: ignore[arg-type]
    assert pieces == ["a", "", "", "€", "b", "", "", "", "🙂"]


def test_without_a_policy_the_answers_are_there_and_the_reason_too(tmp_path: Path):
    data = report(make_run(tmp_path / "run").path, options=())["runs"][0]
    assert any("holds no policy any more" in note for note in data["completion_notes"])
    assert data["completions"]["groups"][0]["answers"][0]["text"] == ANSWERS[0]


def test_without_scores_torch_is_not_imported(tmp_path: Path):
    run = make_run(tmp_path / "run")
    command = f"""
import sys
from oapl.cli import main
assert main(["report", {str(run.path)!r}, "--no_scores"]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", command], check=True)
    assert (run.path / "report.html").exists()


# The file


def test_no_text_of_a_run_can_end_the_script_that_holds_it(tmp_path: Path):
    run = make_run(tmp_path / "run")
    report(run.path)
    harmless = make_run(tmp_path / "harmless", rounds=1, trained=0, summary=False)
    shutil.rmtree(harmless.path / "rounds")
    pages = {}
    for name in (run.path, harmless.path):
        pages[name.name] = write_report([name], tmp_path / f"{name.name}.html", None).read_text()
    assert pages["run"].count("</script") == pages["harmless"].count("</script")
    assert "<img src=x" not in pages["run"]
    assert data_of(tmp_path / "run.html")["runs"][0]["completions"]["groups"][0]["answers"][2]["text"] == HOSTILE


def test_a_page_allows_no_script_but_its_own_and_no_network(tmp_path: Path):
    page = write_report([make_run(tmp_path / "run").path], None, None).read_text()
    assert "default-src 'none'; script-src 'nonce-" in page
    assert "unsafe-eval" not in page


@pytest.mark.parametrize("make", ["nothing", "empty", "file"])
def test_what_is_no_run_is_refused(tmp_path: Path, make: str, capsys):
    path = tmp_path / "what"
    if make == "empty":
        path.mkdir()
    elif make == "file":
        path.write_text("")
    assert main(["report", str(path)]) == 2
    assert f"{path} is neither a run folder (it has no config.toml) nor a study folder" in capsys.readouterr().err


def test_a_run_given_twice_is_refused(tmp_path: Path, capsys):
    run = str(make_run(tmp_path / "run", rounds=1).path)
    assert main(["report", run, run]) == 2
    assert "Name each run once" in capsys.readouterr().err


# Studies


def test_a_study_has_a_cell_for_each_method_and_setting(tmp_path: Path):
    study = report(make_study(tmp_path / "study"))["study"]
    assert study["keys"] == ["trainer.weight_sync_steps"]
    assert study["ks"] == [1, 4]
    cells = {(cell["method"], cell["grid"]["trainer.weight_sync_steps"]): cell for cell in study["cells"]}
    assert cells["oapl", "10"]["pass"]["1"] == pytest.approx([0.5, 0.45, 0.55, 0.48, 0.52])
    assert (cells["grpo", "20"]["num_collapsed"], cells["grpo", "20"]["num_failed"]) == (1, 0)
    assert (cells["oapl", "10"]["num_collapsed"], cells["oapl", "10"]["num_failed"]) == (0, 1)
    assert study["base"] == pytest.approx({"1": 0.2, "4": 0.5})


def test_a_studys_curves_are_means_over_seeds(tmp_path: Path):
    study = report(make_study(tmp_path / "study"))["study"]
    curve = next(curve for curve in study["curves"] if curve["method"] == "oapl")
    rewards = [metrics_line(step, 10, 0)["reward"] for step in range(1, 9)]
    assert curve["columns"]["reward"]["low"] == pytest.approx(rewards, rel=1e-5)
    assert curve["columns"]["reward"]["mean"] == pytest.approx([r + 0.05 for r in rewards], rel=1e-5)


def test_a_collapsed_run_counts_on_with_its_last_value():
    curve = across([([1.0, 1.0, 1.0, 1.0], False), ([1.0, 0.0], True)])
    assert curve["mean"] == [1.0, 0.5, 0.5, 0.5]
    assert across([([1.0, 1.0, 1.0], False), ([0.0], False)])["mean"] == [0.5, 1.0, 1.0]


def test_a_study_without_its_table_or_its_runs_shows_what_is_left(tmp_path: Path):
    folder = make_study(tmp_path / "study")
    (folder / "table.csv").unlink()
    shutil.rmtree(folder / "runs")
    study = report(folder)["study"]
    assert study["cells"][0]["pass"]["1"] == pytest.approx([0.4, None, None, 0.4, 0.4])
    assert [curve["columns"] for curve in study["curves"]] == [{}] * 4
    assert "table.csv is missing" in study["notes"][0]


def test_a_table_of_other_columns_is_refused(tmp_path: Path, capsys):
    (tmp_path / "results.csv").write_text("a,b\n1,2\n")
    assert main(["report", str(tmp_path)]) == 2
    assert "has no column 'method'" in capsys.readouterr().err


def test_a_study_and_a_run_do_not_go_on_one_page(tmp_path: Path, capsys):
    study, run = make_study(tmp_path / "study"), make_run(tmp_path / "run", rounds=1)
    assert main(["report", str(study), str(run.path)]) == 2
    assert "is a study folder, which has a report of its own" in capsys.readouterr().err


# In a browser


class Page:
    """A page in Chromium."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, *, width: int = 1280, theme: str = "light") -> Page:
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.logs()
        self.driver.get(path.as_uri())
        self.run("localStorage.clear()")
        self.wait("document.documentElement.dataset.ready === 'true'")
        return self

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def value(self, expression: str) -> Any:
        return self.run(f"return {expression}")

    def wait(self, condition: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 60).until(lambda _: self.value(condition), f"{condition} did not come true")

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((n) => n.textContent)", selector)

    def type(self, selector: str, text: str) -> None:
        self.run(
            "const box = document.querySelector(arguments[0]); box.value = arguments[1];"
            "box.dispatchEvent(new Event(box.tagName === 'SELECT' ? 'change' : 'input'))",
            selector,
            text,
        )

    def logs(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> set[str]:
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return self.value("document.documentElement.scrollWidth - window.innerWidth")

    def picture(self, name: str) -> None:
        path = SCREENSHOTS / f"{name}.png"
        browser.take_picture(self.driver, path)
        print(f"screenshot: {path}")


@pytest.fixture
def page(driver: Any) -> Page:
    return Page(driver)


def hostile_pieces(run: RunFolder, sampled: Sequence[Any]) -> TokenScores:
    """Scores whose tokens are as hostile as a tokenizer can make them."""
    pieces = [[[HOSTILE, "\n", "<eos>"] for _ in item.group.completions] for item in sampled]
    ratios = [[np.array([0.5, -0.5, 0.0], np.float32) for _ in item.group.completions] for item in sampled]
    return TokenScores(2, pieces, ratios)


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("one") / "run<i>", rounds=4, sync=10)
    return write_report([run.path], None, None)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    runs = [make_run(folder / f"seed-{seed}", seed=seed, rounds=4, sync=10) for seed in (0, 1)]
    runs[1].summary_path.unlink()
    (runs[1].path / "collapse.json").write_text(json.dumps({"step": 40, "reason": HOSTILE}))
    return write_report([run.path for run in runs], folder / "report.html", hostile_pieces)


@pytest.fixture(scope="module")
def study_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([make_study(tmp_path_factory.mktemp("study") / "study")], None, None)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_runs_page_is_whole_silent_and_asks_the_network_for_nothing(page: Page, one_run: Path, theme: str):
    page.requests()
    page.open(one_run, theme=theme)
    assert page.requests() == {one_run.as_uri()}
    assert page.logs() == []
    assert page.value("document.documentElement.dataset.theme") == theme
    background = page.value("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(246, 247, 249)", "dark": "rgb(16, 19, 26)"}[theme]
    ids = page.run("return [...document.querySelectorAll('.chart')].map((n) => n.id.slice(6))")
    assert ids == [
        "passk", "reward", "validation", "entropy", "log_ratio", "residual", "grad_norm", "lag", "shares",
        "completion_length", "time",
    ]  # fmt: skip
    assert page.value(
        "[...document.querySelectorAll('.plot')].every((p) => p.querySelector('.main-svg') && p.data.length)"
    )
    assert page.texts("#summary tbody tr:first-child td")[1].startswith("0.200[0.150, 0.250]")
    assert page.overflow() <= 0
    page.picture(f"run-{theme}")


def test_the_theme_button_turns_the_page_and_its_charts(page: Page, one_run: Path):
    page.open(one_run)
    before = page.value("document.getElementById('plot-reward').layout.paper_bgcolor")
    page.click("#theme")
    assert page.value("document.documentElement.dataset.theme") == "dark"
    assert page.value("document.getElementById('plot-reward').layout.paper_bgcolor") != before
    page.run("localStorage.clear()")


@pytest.mark.parametrize("name", ["one_run", "two_runs", "study_page"])
def test_on_a_phone_nothing_is_wider_than_the_screen(page: Page, name: str, request):
    page.open(request.getfixturevalue(name), width=390)
    assert page.overflow() <= 0
    assert page.logs() == []
    assert (
        page.value(
            "Math.max(...[...document.querySelectorAll('.card, .plot')].map((n) => n.getBoundingClientRect().right))"
        )
        <= 390
    )
    page.picture(f"phone-{name.replace('_', '-')}")


def test_the_x_axis_can_be_switched(page: Page, one_run: Path):
    page.open(one_run)
    last = "document.getElementById('plot-entropy').data[0].x.at(-1)"
    assert page.value(last) == 40
    page.click("[data-value=samples]")
    assert page.value(last) == 320
    page.click("[data-value=wall_s]")
    assert page.value(last) == pytest.approx(65.0)  # 40 steps of 1.625 s
    assert "wall time" in page.value("document.getElementById('plot-entropy').layout.xaxis.title.text")


def test_what_starts_anew_with_a_round_is_not_smoothed_across_rounds(page: Page, one_run: Path):
    page.open(one_run)
    assert page.value("moving([1, 1, 1, 5, 5, 5], [0, 0, 0, 1, 1, 1])") == [1, 1, 1, 5, 5, 5]
    assert page.value("moving([1, 1, 1, 5, 5, 5])") == [1, 1, pytest.approx(7 / 3), pytest.approx(11 / 3), 5, 5]


def test_a_run_can_be_taken_out_of_all_charts(page: Page, two_runs: Path):
    page.open(two_runs)
    count = "document.getElementById('plot-entropy').data.length"
    both = page.value(count)
    page.click(".chip")
    assert page.value(count) == both / 2
    page.click(".chip")
    assert page.value(count) == both
    page.picture("two-runs")


def test_the_browser_of_completions_filters_and_searches(page: Page, one_run: Path):
    page.open(one_run)
    rewards = "#stage .answer-head .badge:first-child"
    assert page.texts(rewards) == ["✓ reward 1", "✗ reward 0", "✗ reward 0", "✓ reward 1"]
    page.click("#filter [data-value=right]")
    assert page.texts(rewards) == ["✓ reward 1"] * 2
    page.click("#filter [data-value=wrong]")
    assert page.texts(rewards) == ["✗ reward 0"] * 2
    page.click("#filter [data-value=truncated]")
    assert page.texts("#stage .answer") == [HOSTILE]
    page.click("#filter [data-value=all]")
    page.type("#search", "3*4")
    assert page.texts("#stage .answer") == [ANSWERS[0]]
    page.type("#search", "not to be found")
    assert page.texts("#stage .answer") == []
    page.type("#search", "")
    first = page.texts("#stage .prompt")
    page.click("#next")
    assert page.texts("#stage .prompt") != first
    page.type("select[aria-label=round]", "3")
    assert page.texts("#stage .group > p")[0].startswith("Round 3, ")
    page.type("select[aria-label=step]", "40")
    assert page.texts("#stage .group > p")[0].startswith("Round 3, step 40, ")


def test_hostile_text_stays_text(page: Page, two_runs: Path, one_run: Path, study_page: Path):
    shown = {
        one_run: lambda: HOSTILE in page.texts("#stage .answer") and page.texts("h1") == ["run<i>"],
        two_runs: lambda: (
            page.texts("#stage .answer")[0] == f"{HOSTILE}↵\n<eos>" and HOSTILE in page.texts(".badge.collapsed")[0]
        ),
        study_page: lambda: HOSTILE in page.texts("#list li")[0],
    }
    for path, is_shown in shown.items():
        page.open(path)
        assert is_shown()
        assert page.value("window.hacked") is None
        assert page.value("document.querySelectorAll('main img, main script, main i:not(.scale i)').length") == 0
        assert page.logs() == []


def test_a_token_is_coloured_by_its_log_ratio_and_shows_its_numbers(page: Page, two_runs: Path):
    page.open(two_runs)
    colors = page.run(
        "return [...document.querySelectorAll('#stage .answer')[0].children].map((n) => n.style.backgroundColor)"
    )
    assert colors == ["rgba(var(--up), 0.750)", "rgba(var(--down), 0.750)", "rgba(var(--up), 0.000)"]
    page.click("#stage .answer span:nth-child(2)")
    assert page.texts("#stage .token-info")[0] == (r'token 2 "\n": log-ratio −0.500, sampled at −1.00 nats (37 %)')


def test_a_studys_page_compares_methods_and_marks_what_collapsed(page: Page, study_page: Path):
    page.requests()
    page.open(study_page)
    assert page.requests() == {study_page.as_uri()}
    assert page.logs() == []
    rows = page.run("return [...document.querySelectorAll('#heat tbody tr')].map((r) => r.innerText)")
    assert len(rows) == 2
    assert "0.500" in rows[0]
    assert "✕ 1 collapsed" in rows[1]
    curves_shown = "document.getElementById('plot-reward').data.filter((t) => t.mode === 'lines' && t.name).length"
    assert page.value(curves_shown) == 4
    crosses = "document.getElementById('plot-reward').data.filter((t) => t.mode === 'markers').map((t) => t.x[0])"
    assert page.value(crosses) == [4]
    page.type("#study-filter select", "10")
    assert page.value(curves_shown) == 2
    page.type("#study-filter select", "")
    page.click("#table [data-value='4']")
    assert "0.700" in page.texts("#heat tbody tr")[0]
    points = page.value("document.getElementById('plot-setting-trainer-weight_sync_steps-1').data.map((t) => t.y)")
    assert points == [[pytest.approx(0.5), pytest.approx(0.45)], [pytest.approx(0.4), pytest.approx(0.3)]]
    page.picture("study")


def test_an_output_that_is_a_folder_and_less_than_no_groups_are_refused(tmp_path: Path, capsys):
    assert main(["report", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "is a folder: name the HTML file to write" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--groups", "-1"]) == 2
    assert "--groups -1: give 0 for none" in capsys.readouterr().err


def test_steps_that_were_sampled_and_not_trained_on_are_left_out(tmp_path: Path):
    run = make_run(tmp_path / "run", rounds=2, sync=5)
    sampled, num_groups, _ = sample_groups(run, 5, 30, last_step=7)
    assert {item.step for item in sampled} == {1, 2, 3, 4, 5, 6, 7}
    assert num_groups == sample_groups(run, 5, 30)[1] * 7 / 10
