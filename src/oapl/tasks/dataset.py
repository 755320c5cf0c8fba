"""Your own rows and your own reward: a JSONL, Parquet or hub dataset with a `prompt` column, and a function
with TRL's signature, `reward(prompts, completions, **columns) -> list[float | None]`.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oapl.config import DATASET_SUFFIXES, TaskConfig
from oapl.errors import GradingError, TaskError
from oapl.grading.worker import FunctionWorker
from oapl.types import Prompt, Split

LARGEST_REWARD = 3.4e38
"""Rewards are stored in float32."""

RESERVED = ("prompts", "completions")
"""What a reward function is given besides the dataset's columns."""


class DatasetTask:
    """Rows of a file or hub dataset, graded by a user's function in a worker process."""

    def __init__(self, config: TaskConfig) -> None:
        assert config.dataset is not None
        assert config.reward_func is not None
        self.verifier = f"{config.reward_func}/{source_digest(config.reward_func)}"
        self._rows: dict[Split, Any] = {"train": load_rows(config.dataset, config.split, "task.dataset")}
        if config.eval_dataset is not None:
            self._rows["evaluation"] = load_rows(config.eval_dataset, config.eval_split, "task.eval_dataset")
        else:
            if len(self._rows["train"]) == 1:
                raise TaskError(
                    f"task.dataset = {config.dataset!r} has a single row, too few to hold one out for evaluation. "
                    f"Add rows, or name a held-out file as task.eval_dataset."
                )
            self._rows["evaluation"], self._rows["train"] = hold_out(self._rows["train"])
        if config.validation_dataset is not None:
            self._rows["validation"] = load_rows(
                config.validation_dataset, config.validation_split, "task.validation_dataset"
            )
        self._worker = FunctionWorker(config.reward_func, config.reward_timeout_s)

    def num_prompts(self, split: Split) -> int:
        return len(self._rows[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        row = dict(self._rows[split][index])
        text = row.pop("prompt")
        if not isinstance(text, str) and not is_chat(text):
            raise TaskError(
                f"row {index} of the {split} prompts: `prompt` must be text or chat messages "
                f"([{{'role': …, 'content': …}}]), found {text!r}."
            )
        return Prompt(f"{split}/{index}", text, row)

    def rewards(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        count = len(completions)
        chat = not isinstance(prompt.text, str)
        answers: list[Any] = [[{"role": "assistant", "content": text}] if chat else text for text in completions]
        columns = {name: [value] * count for name, value in prompt.columns.items()}
        values = self._worker.call(prompts=[prompt.text] * count, completions=answers, **columns)
        return checked_rewards(values, count, self._worker.function)

    def start(self) -> None:
        self._worker.start()

    def close(self) -> None:
        self._worker.close()


def source_digest(function: str) -> str:
    """The beginning of the SHA-256 of the file that defines a reward function: its version, as far as it shows."""
    module = function.partition(":")[0].replace(".", "/")
    for folder in (os.getcwd(), *sys.path):
        for path in (Path(folder, f"{module}.py"), Path(folder, module, "__init__.py")):
            if path.is_file():
                return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return "unknown"


def checked_rewards(values: Any, count: int, function: str) -> list[float]:
    """What a reward function gave, as floats. A wrong number of them is an error of the function, so TaskError;
    a value that is no reward concerns this group alone, so GradingError."""
    if not hasattr(values, "__len__") or isinstance(values, str | Mapping):
        raise TaskError(f"{function} must return a list of {count} numbers, one a completion; it returned {values!r}.")
    if len(values) != count:
        raise TaskError(
            f"{function} returned {len(values)} rewards for {count} completions; it must return one for each."
        )
    rewards = []
    for index, value in enumerate(values):
        if value is None:
            raise GradingError(f"{function} returned None for completion {index}: it gave no verdict")
        try:
            reward = float(value)
        except (TypeError, ValueError):
            raise GradingError(f"{function} returned {value!r} for completion {index}: not a number") from None
        if not abs(reward) <= LARGEST_REWARD:
            raise GradingError(f"{function} returned {reward} for completion {index}: not finite in float32")
        rewards.append(reward)
    return rewards


def is_chat(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)


HELD_OUT_SHARE = 10


def hold_out(rows: Any) -> tuple[Any, Any]:
    """Every tenth row for evaluation and the others for training, where no held-out file is named."""
    every = range(len(rows))
    held_out = [i for i in every if i % HELD_OUT_SHARE == 0]
    return rows.select(held_out), rows.select([i for i in every if i % HELD_OUT_SHARE])


def load_rows(source: str, split: str, setting: str) -> Any:
    """The rows of a .jsonl or .parquet file, or of a split on the hub. Raises TaskError where they will not do."""
    import datasets

    path = Path(source)
    datasets.disable_progress_bars()
    try:
        if path.suffix in DATASET_SUFFIXES:
            if not path.is_file():
                raise TaskError(f"{setting} = {source!r}: there is no such file.")
            if path.stat().st_size == 0:
                raise TaskError(f"{setting} = {source!r} has no rows.")
            kind = "parquet" if path.suffix == ".parquet" else "json"
            rows = datasets.load_dataset(kind, data_files=str(path), split="train")
        else:
            rows = datasets.load_dataset(source, split=split)
    except TaskError:
        raise
    except Exception as error:  # the library raises its own, pyarrow's and the network's errors
        cause = error.__cause__ or error
        raise TaskError(
            f"{setting} = {source!r} cannot be read. Give a .jsonl or .parquet file, or a dataset's name on the hub. "
            f"({type(cause).__name__}: {cause})"
        ) from error
    if "prompt" not in rows.column_names:
        raise TaskError(
            f"{setting} = {source!r} has no `prompt` column; it has {', '.join(rows.column_names)}. "
            f"Rename one to `prompt`."
        )
    for name in set(RESERVED).intersection(rows.column_names):
        raise TaskError(
            f"{setting} = {source!r} has a column `{name}`, the name of an argument that every reward function has. "
            f"Rename it."
        )
    if len(rows) == 0:
        raise TaskError(f"{setting} = {source!r} has no rows.")
    return rows
