"""The recipe: every setting of a run, read from TOML and the command line, checked before anything starts.

This package imports nothing heavy, so help and checks are instant.
"""

from oapl.config.benchmarks import BENCHMARKS, Benchmark, find_benchmark
from oapl.config.messages import nearest_setting, sections_of, setting_names
from oapl.config.planning import PlanConfig, load_plan
from oapl.config.recipe import (
    all_differences,
    build_recipe,
    command_line_source,
    differences,
    dump_recipe,
    flatten,
    load_recipe,
    may_change,
    merge,
    read_toml,
    recipe_file,
)
from oapl.config.sections import (
    DATASET_SUFFIXES,
    EngineConfig,
    GRPOConfig,
    GRPOPlusConfig,
    LossSection,
    ModelConfig,
    OAPLConfig,
    Recipe,
    ReinforceConfig,
    Rows,
    TaskConfig,
    TrackingConfig,
    TrainerConfig,
    hub_name,
    rows_of,
)

__all__ = [
    "BENCHMARKS",
    "DATASET_SUFFIXES",
    "Benchmark",
    "EngineConfig",
    "GRPOConfig",
    "GRPOPlusConfig",
    "LossSection",
    "ModelConfig",
    "OAPLConfig",
    "PlanConfig",
    "Recipe",
    "ReinforceConfig",
    "Rows",
    "TaskConfig",
    "TrackingConfig",
    "TrainerConfig",
    "all_differences",
    "build_recipe",
    "command_line_source",
    "differences",
    "dump_recipe",
    "find_benchmark",
    "flatten",
    "hub_name",
    "load_plan",
    "load_recipe",
    "may_change",
    "merge",
    "nearest_setting",
    "read_toml",
    "recipe_file",
    "rows_of",
    "sections_of",
    "setting_names",
]
