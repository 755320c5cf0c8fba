"""The command line. It imports what a command needs when that command runs, so that help is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic_settings import SettingsError

from oapl import installation
from oapl.config import (
    BENCHMARKS,
    PlanConfig,
    Recipe,
    command_line_source,
    dump_recipe,
    load_plan,
    load_recipe,
    merge,
    nearest_setting,
    recipe_file,
)
from oapl.errors import CollapseError, ConfigError, InstallationError, OaplError
from oapl.paths import StorePath, store_path

RECIPE = "a TOML recipe, or the name of one that ships with oapl, such as countdown"
STOPPED = 130
FORMATS = ("chat", "trl", "verl", "oapl", "pairs")
"""What `oapl export` can write."""
EXIT_CODES = {ConfigError: 2, CollapseError: 4}
"""1 for every other error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, 2 for a wrong recipe or option, 4 for a run that its guard stopped,
    1 for any other failure."""
    try:
        arguments, overrides = parse(sys.argv[1:] if argv is None else list(argv))
        return int(arguments.run(arguments, overrides) or 0)
    except OaplError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_CODES.get(type(error), 1)
    except KeyboardInterrupt:
        print("Stopped; everything so far is kept. The same command continues from there.", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:
        return 1
    except ImportError:
        if (problem := installation.problem()) is None:
            raise
        print(f"InstallationError: {problem}", file=sys.stderr)
        return 1


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Mapping[str, Any]]:
    """The command's own arguments, and the recipe settings given as `--section.key VALUE`, nested."""
    parser = argparse.ArgumentParser(prog="oapl", description="Off-policy post-training of language models by OAPL.")
    parser.add_argument("--version", action="version", version=f"oapl {version('oapl')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = add_command(commands, "train", train_command, "train a recipe, or continue its run")
    train.add_argument("recipe", type=recipe_file, help=RECIPE)
    train.add_argument(
        "--run_dir", type=store_path, help="the run's folder, or its URL such as s3://…; runs/<recipe> by default"
    )
    train.add_argument(
        "--dry_run", action="store_true", help="print the resolved recipe and what it will take, and end"
    )

    sample = add_command(commands, "sample", sample_command, "sample for a run that is trained elsewhere, or not yet")
    sample.add_argument(
        "recipe", type=recipe_file, nargs="?", help=f"{RECIPE}, to fill a run's rounds without training"
    )
    sample.add_argument(
        "--run_dir",
        type=store_path,
        help="the run's folder or URL, runs/<recipe> by default; without a recipe: the run to sample for until it ends",
    )

    plan = add_command(commands, "plan", plan_command, "simulate a recipe's run on some GPUs, before it is paid for")
    plan.add_argument("recipe", type=recipe_file, help=RECIPE)
    plan.add_argument("--from_run", type=store_path, help="a run folder whose rates are taken; options win over it")
    plan.add_argument("--rates", type=Path, help="a TOML file with any of the options below; options win over it")
    plan.add_argument("--output", type=Path, default=Path("plan"), help="name of the .png and .json to write")
    for name, field in PlanConfig.model_fields.items():
        plan.add_argument(f"--{name}", help=str(field.description).replace("%", "%%"))

    trainer = add_command(
        commands,
        "trainer",
        trainer_command,
        "train on a run's rounds, which `oapl sample` fills; by torchrun, in ranks",
    )
    trainer.add_argument("recipe", type=recipe_file, help=RECIPE)
    trainer.add_argument("--run_dir", type=store_path, help="the run's folder or URL; runs/<recipe> by default")

    study = add_command(commands, "study", study_command, "runs of several settings and seeds", settings=False)
    study.add_argument("study", type=Path, help="a TOML study: a recipe, methods, a grid, seeds")
    study.add_argument("--study_dir", type=Path, help="the study's folder; runs/studies/<study> by default")
    study.add_argument("--num_workers", type=int, help="runs side by side; by default one a core")

    evaluate = add_command(commands, "eval", eval_command, "pass@k of a model, or of a run's policy")
    evaluate.add_argument("target", help="a run folder, a model folder, a hub name or builtin:countdown")
    evaluate.add_argument("recipe", type=recipe_file, nargs="?", help=f"for a model: {RECIPE}, for its task")
    evaluate.add_argument(
        "--benchmark",
        action="append",
        metavar="NAME",
        help=f"a benchmark's problems, with or without a recipe; may be repeated: {', '.join(BENCHMARKS)}",
    )
    evaluate.add_argument(
        "--data", type=Path, help="a file with the benchmark's rows; alone, of any mathematics problems"
    )
    evaluate.add_argument(
        "--regrade", action="store_true", help="grade what was sampled again, by the task as it is now"
    )
    evaluate.add_argument("--policy", type=int, help="for a run: the policy's version; the newest by default")
    evaluate.add_argument("--output_dir", type=Path, help="where samples and summary go; in the run by default")

    compare = add_command(commands, "compare", compare_command, "evaluations of the same problems", settings=False)
    compare.add_argument("folders", type=Path, nargs="+", metavar="EVALUATION", help="folders that `oapl eval` made")
    compare.add_argument("--output", type=Path, default=Path("comparison"), help="name of the .png and .json to write")

    bring = add_command(commands, "import", import_command, "make rounds of others' completions, to train on")
    bring.add_argument("recipe", type=recipe_file, help="a TOML recipe: model, task, sampling and the shape of a round")
    bring.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="Parquet or JSON lines: TRL's completions, verl's rollouts, the authors' rows, or chat traces",
    )
    bring.add_argument("--run_dir", type=store_path, help="a new run's folder or URL; runs/<recipe> by default")
    bring.add_argument(
        "--reward",
        action="append",
        metavar="COLUMN[=WEIGHT]",
        help="of TRL's completions, a column that is part of the reward; may be repeated; all by default",
    )
    bring.add_argument(
        "--no_sampling", action="store_true", help="leave groups of fewer than sampling.num_generations as they are"
    )

    export = add_command(commands, "export", export_command, "write a round for others to read", settings=False)
    export.add_argument("run_dir", type=store_path, metavar="RUN", help="the run's folder or URL")
    export.add_argument("--round", type=int, help="the round's index; the newest that is sealed by default")
    export.add_argument("--format", choices=FORMATS, default="chat", help="`chat` by default")
    export.add_argument("--output", type=Path, required=True, help="the .parquet or .jsonl file to write")

    inspect = add_command(commands, "inspect", inspect_command, "what is in a run folder", settings=False)
    inspect.add_argument("run_dir", type=store_path)
    inspect.add_argument("--groups", type=int, default=2, help="prompts to show with their completions")
    inspect.add_argument("--rounds", type=int, default=20, help="rounds to show, the newest; older ones are not read")

    report = add_command(commands, "report", report_command, "one HTML page on runs or on a study", settings=False)
    report.add_argument("paths", type=store_path, nargs="+", metavar="RUN", help="run folders, or one study folder")
    report.add_argument("--output", type=Path, help="the page; report.html in the folder, or here for several runs")
    report.add_argument("--groups", type=int, default=60, help="prompts of each run to show with their completions")
    report.add_argument("--no_scores", action="store_true", help="load no model: completions without colours")

    view = add_command(commands, "view", view_command, "a page on this machine that follows runs", settings=False)
    view.add_argument("paths", type=store_path, nargs="+", metavar="RUN", help="run folders, or folders that hold runs")
    view.add_argument("--host", default="127.0.0.1", help="where to listen; other machines reach it by a token alone")
    view.add_argument("--port", type=int, default=8760, help="0 for any that is free")
    view.add_argument("--no_scores", action="store_true", help="load no model: completions without log-ratios")

    doctor = add_command(
        commands,
        "doctor",
        doctor_command,
        "versions, cores, and the engine's agreement with the trainer",
        settings=False,
    )
    doctor.add_argument("model", nargs="?", default="builtin:countdown", help="a model folder or hub name")

    arguments, unknown = parser.parse_known_args(argv)
    for word in unknown:
        name = word.partition("=")[0].lstrip("-")
        if word.startswith("--") and (guess := nearest_setting(name)):
            raise ConfigError(f"--{name} is not a setting; did you mean --{guess}?")
    if unknown:
        raise ConfigError(f"not understood: {' '.join(unknown)}. `oapl COMMAND --help` lists what there is.")
    source = getattr(arguments, "source", None)
    try:
        return arguments, source(parsed_args=settings_given(arguments))() if source else {}
    except SettingsError as error:
        raise ConfigError(
            f"a setting on the command line cannot be read as JSON: {error.__cause__ or error}."
        ) from error


def add_command(commands: Any, name: str, run: Any, help: str, *, settings: bool = True) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    source = command_line_source(parser) if settings else None
    parser.set_defaults(run=run, source=source)
    return parser


def settings_given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The recipe settings among parsed arguments: `section.key`, and a whole `section` as JSON."""
    return {name: value for name, value in vars(arguments).items() if name.partition(".")[0] in Recipe.model_fields}


def run_dir_of(arguments: argparse.Namespace) -> StorePath:
    run_dir: StorePath | None = arguments.run_dir
    return run_dir or Path("runs") / arguments.recipe.stem


def train_command(arguments: argparse.Namespace, overrides: Mapping[str, Any]) -> int:
    recipe = load_recipe(arguments.recipe, overrides)
    if arguments.dry_run:
        print(dump_recipe(recipe), end="", flush=True)
        from oapl.estimate import estimate

        print("\n" + "\n".join(f"# {line}".rstrip() for line in estimate(recipe)))
        return 0
    from rich.console import Console

    from oapl import launch
    from oapl.inspection import print_summary
    from oapl.progress import Progress
    from oapl.store import RunFolder

    console, run = Console(), RunFolder(run_dir_of(arguments))
    with Progress(recipe, console) as progress:
        summary = launch.train(recipe, run, progress)
    print_summary(summary, console)
    console.print(f"picture: {run.path / 'pass_at_k.png'}", highlight=False)
    console.print(f"summary: {run.summary_path}   more: oapl inspect {run.path}", highlight=False)
    return 0


def sample_command(arguments: argparse.Namespace, overrides: Mapping[str, Any]) -> int:
    from rich.console import Console

    from oapl import launch
    from oapl.progress import Progress
    from oapl.store import RunFolder

    console = Console()
    if arguments.recipe is None:
        if arguments.run_dir is None:
            raise ConfigError("oapl sample: name a recipe, or the --run_dir of a run to sample for.")
        run = RunFolder(arguments.run_dir)
        console.print(f"{run.path} {launch.assist(run, overrides, console)}", highlight=False, soft_wrap=True)
        return 0
    recipe = load_recipe(arguments.recipe, overrides)
    run = RunFolder(run_dir_of(arguments))
    with Progress(recipe, console) as progress:
        waiting = launch.sample(recipe, run, progress)
    if waiting is None:
        console.print(f"every round of {run.path} is sampled")
    else:
        version, command = recipe.policy_of_round(waiting), f"oapl train {arguments.recipe} --run_dir {run.path}"
        console.print(
            f"round {waiting} waits for policy {version}: `{command}` makes it, with the settings given here",
            soft_wrap=True,
        )
    return 0


def plan_command(arguments: argparse.Namespace, overrides: Mapping[str, Any]) -> int:
    options = {name: getattr(arguments, name) for name in PlanConfig.model_fields}
    plan = load_plan(options, arguments.rates)
    from rich.console import Console

    from oapl.planning import TABLE_WIDTH, make_plan

    console = Console(width=max(Console().width, TABLE_WIDTH))
    make_plan(arguments.recipe, overrides, plan, arguments.from_run, arguments.output, console)
    return 0


def trainer_command(arguments: argparse.Namespace, overrides: Mapping[str, Any]) -> int:
    from rich.console import Console

    from oapl import launch
    from oapl.progress import Progress
    from oapl.store import RunFolder

    rank, recipe = int(os.environ.get("RANK", 0)), recipe_of_ranks(arguments.recipe, overrides)
    console, run = Console(quiet=rank > 0), RunFolder(run_dir_of(arguments))
    with Progress(recipe, console) as progress:
        launch.train_alone(recipe, run, progress)
    console.print(f"{run.path} is trained: `oapl train {arguments.recipe}` evaluates it", highlight=False)
    return 0


def recipe_of_ranks(path: Path, overrides: Mapping[str, Any]) -> Recipe:
    """A recipe with as many ranks as torchrun started. Raises ConfigError where it asks for others."""
    recipe, started = load_recipe(path, overrides), int(os.environ.get("WORLD_SIZE", 1))
    if recipe.trainer.num_ranks not in (1, started):
        raise ConfigError(
            f"trainer.num_ranks = {recipe.trainer.num_ranks}, but {started} process{'es' * (started > 1)} "
            f"{'were' if started > 1 else 'was'} started. Start as many: torchrun --nproc_per_node "
            f"{recipe.trainer.num_ranks} -m oapl trainer {path}; or leave num_ranks out."
        )
    return load_recipe(path, merge(overrides, {"trainer": {"num_ranks": started}}))


def study_command(arguments: argparse.Namespace, _: Mapping[str, Any]) -> int:
    from rich.console import Console

    from oapl.study import load_study, run_study

    study = load_study(arguments.study)
    folder = arguments.study_dir or Path("runs") / "studies" / arguments.study.stem
    return 0 if run_study(study, folder, arguments.num_workers, Console()) else 1


def eval_command(arguments: argparse.Namespace, overrides: Mapping[str, Any]) -> int:
    from rich.console import Console

    from oapl.assessment import evaluate, find_target

    target = find_target(arguments.target, arguments.policy, arguments.output_dir)
    evaluate(
        target,
        arguments.recipe,
        arguments.benchmark or [],
        arguments.data,
        overrides,
        Console(),
        regrade=arguments.regrade,
    )
    return 0


def compare_command(arguments: argparse.Namespace, _: Mapping[str, Any]) -> int:
    from rich.console import Console

    from oapl.comparison import compare

    console = Console()
    compare(arguments.folders, arguments.output, console)
    console.print(f"picture: {arguments.output}.png", highlight=False)
    return 0


def import_command(arguments: argparse.Namespace, overrides: Mapping[str, Any]) -> int:
    recipe, weights = load_recipe(arguments.recipe, overrides), weights_of(arguments.reward or ())
    from oapl.exchange.importing import import_files
    from oapl.store import RunFolder

    run, samples = RunFolder(run_dir_of(arguments)), not arguments.no_sampling
    import_files(recipe, run, arguments.files, print, weights=weights, samples=samples)
    print(
        f"train on it: oapl train {arguments.recipe} --run_dir {run.path}, or any with --launch.rounds_from {run.path}"
    )
    return 0


def weights_of(columns: Sequence[str]) -> dict[str, float]:
    """Of `COLUMN[=WEIGHT]`. Raises ConfigError where a weight is no number."""
    weights = {}
    for column in columns:
        name, _, weight = column.partition("=")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            raise ConfigError(f"--reward {column}: {weight!r} is no number. Give NAME or NAME=WEIGHT.") from None
    return weights


def export_command(arguments: argparse.Namespace, _: Mapping[str, Any]) -> int:
    from oapl.exchange.exporting import export_round
    from oapl.store import RunFolder

    export_round(RunFolder(arguments.run_dir), arguments.round, arguments.format, arguments.output, print)
    return 0


def inspect_command(arguments: argparse.Namespace, _: Mapping[str, Any]) -> int:
    from rich.console import Console

    from oapl.inspection import inspect
    from oapl.store import RunFolder

    if arguments.rounds < 1:
        raise ConfigError(f"--rounds {arguments.rounds}: give the number of rounds to show, 1 or more.")
    inspect(RunFolder(arguments.run_dir), Console(), max(0, arguments.groups), arguments.rounds)
    return 0


def report_command(arguments: argparse.Namespace, _: Mapping[str, Any]) -> int:
    from oapl.report.page import write_report

    groups = arguments.groups
    if groups < 0:
        raise ConfigError(f"--groups {groups}: give 0 for none, or a number of prompts.")
    if arguments.output is not None and arguments.output.is_dir():
        raise ConfigError(f"--output {arguments.output} is a folder: name the HTML file to write.")
    scorer = lazy_scorer() if groups and not arguments.no_scores else None
    path = write_report(arguments.paths, arguments.output, scorer, groups)
    print(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB; open it in a browser)")
    return 0


def view_command(arguments: argparse.Namespace, _: Mapping[str, Any]) -> int:
    missing = [name for name in ("duckdb", "starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise InstallationError(f"oapl view needs {', '.join(missing)}: pip install 'oapl[view]'")
    if not 0 <= arguments.port < 65536:
        raise ConfigError(f"--port {arguments.port} must be at least 0 and below 65536.")
    from oapl.view.app import serve

    serve(arguments.paths, None if arguments.no_scores else lazy_scorer(), arguments.host, arguments.port)
    return 0


def lazy_scorer() -> Any:
    """Scores completions, importing torch when there are some to score."""

    def score(run: Any, sampled: Any) -> Any:
        from oapl.scoring import score_groups

        return score_groups(run, sampled)

    return score


def doctor_command(arguments: argparse.Namespace, _: Mapping[str, Any]) -> int:
    from rich.console import Console

    if (problem := installation.problem()) is not None:  # before anything is imported that may not be there
        raise InstallationError(problem)
    from oapl.doctor import examine

    return 0 if examine(arguments.model, Console()) else 1
