"""The files of `deploy/` and the commands of docs/clusters.md, against the command line and the recipes as they are."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from oapl.cli import parse
from oapl.config import Recipe, load_recipe

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
BATCH_FILES = sorted(DEPLOY.glob("slurm/*.sbatch"))
PAGE = (ROOT / "docs" / "clusters.md").read_text()


def commands_of_page() -> Iterator[list[str]]:
    for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def understood(words: list[str]) -> Recipe | None:
    """What `oapl WORDS` would begin with: the recipe, if it names one of the repository's."""
    arguments, overrides = parse(words)
    recipe = getattr(arguments, "recipe", None)
    return load_recipe(ROOT / recipe, overrides) if recipe and recipe.parts[0] == "recipes" else None


OAPL = [
    words[place + 1 :]
    for words in commands_of_page()
    for place, word in enumerate(words)
    if word == "oapl" and words[:place][-1:] in ([], ["--"])
]
SUBMITTED = [words for words in commands_of_page() if "sbatch" in words]


@pytest.mark.parametrize("words", OAPL, ids=" ".join)
def test_each_command_of_the_page_is_understood(words: list[str]):
    understood(words)


@pytest.mark.parametrize("file", BATCH_FILES, ids=lambda file: file.name)
def test_a_batch_file_is_proper_bash(file: Path):
    subprocess.run(["bash", "-n", file], check=True)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Words that SLURM would give a job, and an `srun` that notes what it is to run."""
    srun, scontrol = tmp_path / "srun", tmp_path / "scontrol"
    srun.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" "" >> {tmp_path}/steps\n')
    scontrol.write_text("#!/bin/bash\necho first\n")
    for tool in (srun, scontrol):
        tool.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "first", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "1"}
    return {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}", "steps": f"{tmp_path}/steps"}


def steps_of(submitted: list[str], slurm: dict[str, str]) -> list[list[str]]:
    """The steps of a job, for a command that submits it."""
    start = submitted.index("sbatch")
    variables = dict(word.split("=", 1) for word in submitted[:start])
    script = next(index for index, word in enumerate(submitted) if word.endswith(".sbatch"))
    subprocess.run(["bash", *submitted[script:]], cwd=ROOT, env={**slurm, **variables}, check=True)
    return [step.split("\n") for step in Path(slurm["steps"]).read_text().strip().split("\n\n")]


@pytest.mark.parametrize("submitted", SUBMITTED, ids=" ".join)
def test_the_steps_of_each_submitted_job_are_understood(submitted: list[str], slurm: dict[str, str]):
    steps = steps_of(submitted, slurm)
    for step in steps:
        if "torchrun" in step:
            ranks = get_args_parser().parse_args(step[step.index("torchrun") + 1 :])
            assert (ranks.module, ranks.training_script) == (True, "oapl")
            understood(ranks.training_script_args)
        else:
            understood(step[step.index("oapl") + 1 :])
    assert len(steps) == (2 if "deploy/slurm/train.sbatch" in submitted else 1)
    if len(steps) == 2:  # else samplers that join would not be let near the recipe's servers
        assert all(step[-2:] == ["--launch.num_samplers", "0"] for step in steps)


# Kubernetes


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def patched() -> dict[str, Any]:
    """The RayJob of `base`, with what `cpu` replaces in it."""
    job = read_yaml(DEPLOY / "kuberay" / "base" / "rayjob.yaml")
    (patch,) = (
        each["patch"]
        for each in read_yaml(DEPLOY / "kuberay" / "cpu" / "kustomization.yaml")["patches"]
        if each["target"]["kind"] == job["kind"]
    )
    for change in yaml.safe_load(patch):
        *parents, last = (int(key) if key.isdigit() else key for key in change["path"].split("/")[1:])
        place: Any = job
        for key in parents:
            place = place[key]
        assert change["op"] == "replace"
        assert last in place
        place[last] = change["value"]
    return job


JOBS = {"base": read_yaml(DEPLOY / "kuberay" / "base" / "rayjob.yaml"), "cpu": patched()}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_run_of_a_rayjob_fits_its_workers(job: dict[str, Any]):
    program, *words = shlex.split(job["spec"]["entrypoint"])
    recipe = understood(words)
    assert program == "oapl"
    assert recipe is not None
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    has = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    samplers, ranks = recipe.launch.num_samplers, recipe.trainer.num_ranks
    takes = {"cpu": samplers * recipe.engine.num_threads + ranks * recipe.trainer.num_threads}
    takes["nvidia.com/gpu"] = samplers * recipe.engine.tensor_parallel_size * (recipe.engine.device == "cuda")
    takes["nvidia.com/gpu"] += ranks * (recipe.trainer.device == "cuda")
    for resource, number in takes.items():
        assert number <= group["replicas"] * int(has.get(resource, 0))


def test_the_image_has_the_ray_that_the_job_speaks_to_and_extras_that_exist():
    image = (DEPLOY / "kuberay" / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f'"ray=={JOBS["base"]["spec"]["rayClusterSpec"]["rayVersion"]}"' in image
    for chosen in re.findall(r"EXTRAS=(\S+?)[ :\n]", image + PAGE):
        assert set(chosen.split(",")) <= set(extras)
    for copied in re.findall(r"^COPY (.+) \S+$", image, re.MULTILINE):
        assert all((ROOT / path).exists() for path in copied.split())
