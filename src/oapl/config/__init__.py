"""The recipe: every setting of a run, read from TOML and the command line, checked before anything starts.

This package imports nothing heavy, so help and checks are instant.
"""

from oapl.config.messages import nearest_setting, sections_of, setting_names
from oapl.config.recipe import (
    all_differences,
    command_line_source,
    differences,
    dump_recipe,
    flatten,
    load_recipe,
    may_change,
    merge,
    read_toml,
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
    TaskConfig,
    TrackingConfig,
    TrainerConfig,
)

__all__ = [
    "DATASET_SUFFIXES",
    "EngineConfig",
    "GRPOConfig",
    "GRPOPlusConfig",
    "LossSection",
    "ModelConfig",
    "OAPLConfig",
    "Recipe",
    "ReinforceConfig",
    "TaskConfig",
    "TrackingConfig",
    "TrainerConfig",
    "all_differences",
    "command_line_source",
    "differences",
    "dump_recipe",
    "flatten",
    "load_recipe",
    "may_change",
    "merge",
    "nearest_setting",
    "read_toml",
    "sections_of",
    "setting_names",
]
