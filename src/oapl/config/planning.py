"""What `oapl plan` is told besides a recipe: rates, GPUs and a grid, as options or as a TOML file of the same names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from oapl.config.recipe import read_toml
from oapl.config.sections import Count, NonNegative, Positive, Section
from oapl.errors import ConfigError


def split_at_commas(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


Share = Annotated[float, Field(ge=0, le=1)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(split_at_commas)]
Ahead = Annotated[int, Field(ge=0, le=1)]


class PlanConfig(Section):
    sampler_tokens_per_s: Positive | None = Field(
        None, description="Tokens a second of one sampler whose engine is full."
    )
    trainer_tokens_per_s: Positive | None = Field(
        None, description="Completion tokens a second that the trainer takes steps on, on --measured_gpus."
    )
    step_s: Positive | None = Field(
        None, description="Seconds of one optimizer step on --measured_gpus; in place of --trainer_tokens_per_s."
    )
    completion_tokens: Positive | None = Field(None, description="Mean tokens of a completion.")
    completion_spread: NonNegative = Field(
        0.5, description="Standard deviation of their lengths over the mean; lengths are log-normal, cut at the limit."
    )
    lengths_file: Path | None = Field(
        None, description="A text file of completions' lengths, one a line; in place of --completion_tokens."
    )
    engine_fixed_share: Share = Field(
        0.5,
        description="Share of a full engine's time for one token a row that stays when rows end: 1 where one row takes "
        "as long as all.",
    )
    grading_s: NonNegative | None = Field(
        None, description="Seconds of a sampler to grade and store one completion; 0 if not measured."
    )
    policy_gib: Positive | None = Field(
        None, description="GiB of one policy on disk; by default of the run, or of the model's shape."
    )
    sync_s: NonNegative | None = Field(
        None, description="Seconds from a sealed policy to its first token, reading it left out; 0 if not measured."
    )
    save_s: NonNegative | None = Field(
        None, description="Seconds of the trainer to save at a round's end, writing left out; 0 if not measured."
    )
    storage_gib_per_s: Positive | None = Field(
        None, description="GiB a second of the storage that all share; without one, reading and writing take no time."
    )
    shared_slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = Field(
        None,
        description="Times as long as alone that each side takes while the other works: more than 1 where they share a "
        "machine; by default 1, or as the run shows where nothing is said of GPUs or samplers.",
    )
    gpus: Count | None = Field(None, description="All GPUs, to be split between the trainer and the samplers.")
    gpus_per_sampler: Count | None = Field(
        None, description="GPUs of one sampler; by default engine.tensor_parallel_size."
    )
    measured_gpus: Count = Field(1, description="GPUs of the trainer whose rate is measured or given.")
    scaling_efficiency: Annotated[float, Field(gt=0.5, le=1)] = Field(
        0.9, description="Twice the trainer's GPUs take a step this many times 2 faster."
    )
    samplers: Counts = Field((), description="Numbers of samplers to try, as 1,2,4.")
    trainer_gpus: Counts = Field((), description="Numbers of the trainer's GPUs to try.")
    weight_sync_steps: Counts = Field((), description="L to try; by default the recipe's.")
    rounds_ahead: Annotated[tuple[Ahead, ...], BeforeValidator(split_at_commas)] = Field(
        (), description="rounds_ahead to try, as 0,1; by default the recipe's."
    )
    best_by: Literal["wall", "gpu_hours"] = Field(
        "wall", description="What the best layout has least of: wall time, or GPU hours."
    )

    @model_validator(mode="after")
    def _check_one_of_two(self) -> PlanConfig:
        for one, other in (("trainer_tokens_per_s", "step_s"), ("completion_tokens", "lengths_file")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"{one} and {other} say the same. Give one of them")
        if self.gpus is not None and self.samplers and self.trainer_gpus:
            raise ValueError(
                f"gpus = {self.gpus} leaves the trainer what the samplers do not take: give samplers or trainer_gpus, "
                f"not both"
            )
        return self


def load_plan(options: Mapping[str, Any], file: Path | None = None) -> PlanConfig:
    """Options, on top of a TOML file of the same names. Raises ConfigError."""
    given = {name: value for name, value in options.items() if value is not None}
    stored = read_toml(file, "file of rates")[0] if file is not None else {}
    try:
        return PlanConfig(**{**stored, **given})
    except ValidationError as error:
        raise ConfigError("\n".join(explain_plan(problem, given, file) for problem in error.errors())) from error


def explain_plan(problem: Any, given: Mapping[str, Any], file: Path | None) -> str:
    """One line on one thing wrong with rates, GPUs or a grid."""
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return f"oapl plan: {message}."
    name = str(problem["loc"][0])
    where = f"--{name}" if name in given else f"{file}: {name}"
    if problem["type"] == "extra_forbidden":
        return f"{where} is not known to `oapl plan`; its --help lists what is."
    return f"{where} = {problem['input']!r}: {message[0].lower()}{message[1:]}."
