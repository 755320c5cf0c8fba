"""The guard: what it takes for a collapse, what it leaves alone, and how a run ends by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from oapl.cli import main
from oapl.guard import LEAST_STEPS, Guard, beta2_warning
from oapl.store import RunFolder
from oapl.store.files import read_json


def step(
    success: float, log_ratio: float = 0.0, ratio: float | None = None, surprise: float = 5.0, num_completions: int = 32
) -> dict[str, Any]:
    """A record whose right completions all have one log-ratio, unless their mean exp is given apart."""
    return {
        "success": success,
        "log_ratio_right": log_ratio,
        "ratio_right": math.exp(log_ratio) if ratio is None else ratio,
        "surprise": surprise,
        "num_completions": num_completions,
    }


def first_sign(records: Iterable[dict[str, Any]]) -> int | None:
    guard = Guard()
    return next((number for number, record in enumerate(records) if guard.observe(record) is not None), None)


def test_a_steady_run_is_left_alone():
    assert first_sign([step(0.2)] * 100) is None


def test_a_run_that_learns_and_sharpens_is_left_alone():
    """Most right answers lose a little to a few that gain much: their chance together grows."""
    assert first_sign(step(0.2 + 0.003 * n, log_ratio=-1.0, ratio=1.5) for n in range(100)) is None


def test_right_answers_that_fade_are_seen_while_the_sampler_still_gives_them():
    """The weights of ten steps, exp(-0.1 n) at the n-th, average 0.403 at 5 to 14 and 0.365 at 6 to 15."""
    fading = [math.exp(-0.1 * n) for n in range(5, 16)]
    assert sum(fading[:-1]) / 10 > 0.4 > sum(fading[1:]) / 10
    assert first_sign([step(0.2)] * 20 + [step(0.2, log_ratio=-0.1 * n) for n in range(1, 50)]) == 20 + 15 - 1


def test_hard_prompts_are_no_fading():
    """Success of a few steps halves with the prompts they hold, while right answers stay as likely."""
    assert first_sign([step(0.5)] * 20 + [step(0.1)] * 10 + [step(0.5)] * 30) is None


def test_a_sampler_that_got_worse_is_seen_without_weights():
    """At a lag of one step there is no log-ratio to look at. Fifty steps of 32 make the window: 34 of 0.1 and 16 of
    0.4 average 0.196."""
    assert first_sign([step(0.4)] * 50 + [step(0.1)] * 50) == 50 + 34 - 1
    assert first_sign([step(0.4)] * 50 + [step(0.25)] * 80) is None


def test_scattered_weights_of_long_answers_are_not_believed():
    """Noise of 5 nats in thousands of tokens makes the mean weight tiny, while nothing is lost."""
    assert first_sign([step(0.2, log_ratio=-12.5, ratio=0.01, surprise=3000.0)] * 100) is None
    assert first_sign([step(0.2, log_ratio=-400.0, ratio=0.0, surprise=3000.0)] * 100) == LEAST_STEPS - 1


def test_it_waits_for_a_whole_window():
    assert first_sign([step(0.2, log_ratio=-40.0)] * (LEAST_STEPS - 1)) is None


def test_small_steps_make_a_longer_window():
    """256 completions at least: 32 steps of 8, lest chance look like a collapse."""
    assert first_sign([step(0.2, log_ratio=-40.0, num_completions=8)] * 31) is None
    assert first_sign([step(0.2, log_ratio=-40.0, num_completions=8)] * 32) == 31


def test_a_step_whose_right_answers_were_not_trained_on_is_no_sign():
    """`drop_uniform_groups` may leave a step without any; it has then no `ratio_right`."""
    untrained = {"success": 1.0, "surprise": 5.0, "num_completions": 32}
    trained = step(0.6, log_ratio=-0.6, ratio=0.95)
    assert first_sign([untrained, trained] * 50) is None


def test_both_windows_go_on_while_one_of_them_speaks():
    guard = Guard()
    for _ in range(60):
        guard.observe(step(0.4, log_ratio=-5.0))
    signs = [guard.observe(step(0.05)) for _ in range(60)]
    assert any("the sampler's share of right answers fell" in sign for sign in signs if sign)


def test_steps_without_a_graded_group_are_passed_over():
    assert first_sign([{"num_completions": 0}] * 50) is None


@pytest.mark.parametrize(
    ("hold", "effect"), [(0.049, "hardly holds"), (0.05, None), (10.0, None), (10.1, "learn little"), (None, None)]
)
def test_a_first_step_tells_of_a_beta2_that_does_not_fit(hold: float | None, effect: str | None):
    """Only a loss with a beta2 has a `hold`; 0.5 over 4 nats is 0.125."""
    warning = beta2_warning({"surprise": 4.0} | ({} if hold is None else {"hold": hold}))
    if effect is None:
        assert warning is None
    else:
        assert effect in warning
        assert "With 4.0 nats an answer, try loss.beta2 = 0.1." in warning


@pytest.fixture
def collapsing(write_recipe) -> Path:
    """A threshold that all completions pass, and steps so large that they are forgotten within a round."""
    return write_recipe(
        trainer={"num_steps": 40, "weight_sync_steps": 40, "learning_rate": 0.05},
        loss={"beta1": 1.0, "beta2": 1e-3},
        task={"success_threshold": 0.0},
    )


@pytest.mark.parametrize("kind", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_collapsing_run_is_stopped_and_its_old_policy_kept(collapsing: Path, tmp_path: Path, capsys, kind: str):
    run = RunFolder(tmp_path / "run")
    command = ["train", str(collapsing), "--run_dir", str(run.path), "--launch.kind", kind]
    assert main(command) == 4
    error = capsys.readouterr().err
    assert "CollapseError: stopped at step" in error
    surprise = run.metrics()[-1]["surprise"]
    assert (
        f"The best policy is the model it began with. Begin a new run_dir, with loss.beta2 = {0.5 / surprise:.1g}"
        in error
    )
    facts = read_json(run.collapse_path)
    assert facts["best_policy"] == 0
    assert run.has_policy(0)
    assert max(run.checkpoint_steps()) < facts["step"] == run.metrics()[-1]["step"]
    assert main(command) == 4  # again, without training
    assert len(run.metrics()) == facts["step"]


def test_a_stopped_run_goes_on_when_told_to(collapsing: Path, tmp_path: Path, capsys):
    run = RunFolder(tmp_path / "run")
    command = ["train", str(collapsing), "--run_dir", str(run.path)]
    assert main(command) == 4
    capsys.readouterr()
    assert main([*command, "--trainer.on_collapse", "warn"]) == 0
    out = capsys.readouterr().out
    assert out.count("right answers are being unlearnt") == 2  # once in its one round, and once at the end
    assert "sign of a collapse at step" in out
    assert len({record["step"] for record in run.metrics()}) == 40
    assert not run.collapse_path.exists()
