"""Problems that are rows: mathematics, programs, or your own with a reward of your own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oapl.config import TaskConfig
from oapl.errors import TaskError
from oapl.tasks.problems import check_columns, make_prompt
from oapl.tasks.rewards import Reward, combine, make_reward, with_settings
from oapl.tasks.rows import hold_out, load_rows
from oapl.types import Prompt, Split, Verdict


class DatasetTask:
    """Rows of files, hub datasets or benchmarks, and the rewards that grade them."""

    def __init__(self, config: TaskConfig) -> None:
        assert config.dataset is not None
        self._config = config
        self._rewards: list[Reward] = [make_reward(name, config) for name in config.rewards]
        self._weights = config.reward_weights or (1.0,) * len(self._rewards)
        self.verifier = with_settings(" + ".join(reward.verifier for reward in self._rewards), config, "reward_weights")
        self.num_workers = config.num_workers
        self._rows: dict[Split, Any] = {}
        if config.eval_dataset is not None:
            self._rows["evaluation"] = self._load(config.eval_dataset, config.eval_split, "eval_dataset")
        if config.dataset == config.eval_dataset and config.split == config.eval_split:
            self._rows["train"] = self._rows["evaluation"]
        else:
            self._rows["train"] = self._load(config.dataset, config.split, "dataset")
        if config.validation_dataset is not None:
            self._rows["validation"] = self._load(
                config.validation_dataset, config.validation_split, "validation_dataset"
            )
        if config.eval_dataset is None:
            if len(self._rows["train"]) == 1:
                raise TaskError(
                    f"task.dataset = {config.dataset!r} has a single row, too few to hold one out for evaluation. "
                    f"Add rows, or name a held-out file as task.eval_dataset."
                )
            self._rows["evaluation"], self._rows["train"] = hold_out(self._rows["train"])

    def _load(self, source: str, split: str, key: str) -> Any:
        data_file = self._config.eval_data_file if source == self._config.eval_dataset else None
        rows = load_rows(source, split, f"task.{key}", data_file)
        check_columns(rows.column_names, self._config, f"task.{key} = {data_file or source!r}")
        return rows

    def num_prompts(self, split: Split) -> int:
        return len(self._rows[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        return make_prompt(f"{split}/{index}", self._rows[split][index], self._config)

    def grade(self, prompt: Prompt, completions: Sequence[str]) -> list[Verdict]:
        return combine(
            [reward.grade(prompt, completions) for reward in self._rewards],
            [reward.name for reward in self._rewards],
            self._weights,
            self._config.judged_by,
        )

    def start(self) -> None:
        for reward in self._rewards:
            reward.start()

    def close(self) -> None:
        for reward in self._rewards:
            reward.close()
