"""Tasks: where prompts come from and how completions earn their reward."""

from __future__ import annotations

from oapl.config import TaskConfig
from oapl.errors import TaskError
from oapl.tasks.base import Task as Task
from oapl.tasks.countdown import Countdown
from oapl.tasks.dataset import DatasetTask
from oapl.tasks.gym import ReasoningGymTask


def make_task(config: TaskConfig) -> Task:
    """Raises TaskError where the arguments, its data or its reward function will not do."""
    if config.dataset is not None:
        return DatasetTask(config)
    if config.name.startswith("reasoning_gym:"):
        return ReasoningGymTask(config.name.removeprefix("reasoning_gym:"), config.args, config.reward_timeout_s)
    try:
        return Countdown(**config.args)
    except TypeError as error:
        raise TaskError(
            f"task.args = {config.args} does not fit countdown, which takes min_numbers, max_numbers "
            f"and largest_number ({error})."
        ) from error
