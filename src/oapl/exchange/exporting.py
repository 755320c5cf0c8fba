"""A round of a run becomes a file in the shape that others read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from oapl.config import Recipe, load_recipe
from oapl.errors import ExchangeError, OaplError, StoreError, TaskError
from oapl.exchange.files import check_suffix, write_rows
from oapl.exchange.shapes import OWN
from oapl.model import as_posed, encode_prompt, load_tokenizer
from oapl.objective import make_objective
from oapl.store import RunFolder
from oapl.store.rounds import groups_table
from oapl.tasks import Task, make_task
from oapl.tasks.problems import ground_truth
from oapl.types import Group, Messages, Prompt, Round, split_and_index

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Posed:
    """A group, with its problem as the task poses it."""

    task: str
    """Its name in the recipe."""
    round: Round
    group: Group
    prompt: str | Messages
    """Messages or text; of a problem that the task does not have, the text that the model was given."""
    columns: Mapping[str, Any]
    plain_prompt: str
    """What the model was given, without special tokens."""
    advantages: list[float]
    step: int
    """The optimizer step that the group is first trained in, from 1 on."""

    def answer(self, text: str) -> str | list[dict[str, str]]:
        """A completion in the form of the prompt."""
        return text if isinstance(self.prompt, str) else [{"role": "assistant", "content": text}]

    @property
    def gold(self) -> Any:
        try:
            return ground_truth(self.columns)
        except TaskError:
            return None


Rows = Iterator[dict[str, Any]]


def own_rows(posed: Posed) -> Rows:
    """What every shape carries of a completion: the store's columns."""
    for row in groups_table(posed.round, [posed.group]).to_pylist(maps_as_pydicts="strict"):
        yield {name: row[name] for name in OWN if row.get(name) not in (None, {})}


def trl_rows(posed: Posed) -> Rows:
    for own, text, verdict, advantage in each_completion(posed):
        yield {
            "step": posed.step,
            "prompt": posed.prompt,
            "completion": posed.answer(text),
            **verdict.scores,
            "reward": float(verdict.reward),
            **own,
            "advantage": advantage,
        }


def verl_rows(posed: Posed) -> Rows:
    for own, text, verdict, _ in each_completion(posed):
        yield {
            "input": posed.plain_prompt,
            "output": text,
            "gts": posed.gold,
            "score": float(verdict.reward),
            "step": posed.step,
            **own,
        }


def oapl_rows(posed: Posed) -> Rows:
    rewards = posed.group.all_rewards.tolist()
    for own, text, verdict, _ in each_completion(posed):
        yield {
            "data_source": posed.columns.get("data_source") or posed.task,
            "prompt": posed.prompt,
            "ability": posed.columns.get("ability") or "",
            "reward_model": {"style": "rule", "ground_truth": posed.gold},
            "extra_info": {"index": posed.group.prompt_id},
            "response": text,
            "precomputed_reward": float(verdict.reward),
            "response_rewards": rewards,
            **own,
        }


def chat_rows(posed: Posed) -> Rows:
    name = "prompt" if isinstance(posed.prompt, str) else "messages"
    for own, text, verdict, _ in each_completion(posed):
        yield {name: posed.prompt, "completion": text, "reward": float(verdict.reward), **own}


def pair_rows(posed: Posed) -> Rows:
    """The best of a group against its worst; of equals the first that ended by itself. None where all are equal."""
    group, rewards = posed.group, posed.group.rewards.tolist()
    if min(rewards) == max(rewards):
        return
    ended = [completion.finish_reason == "stop" for completion in group.completions]
    places = range(len(rewards))
    best = max(places, key=lambda place: (rewards[place], ended[place]))
    worst = max(places, key=lambda place: (-rewards[place], ended[place]))
    yield {
        "prompt": posed.prompt,
        "chosen": posed.answer(group.texts[best]),
        "rejected": posed.answer(group.texts[worst]),
    }


def each_completion(posed: Posed) -> Iterator[tuple[dict[str, Any], str, Any, float]]:
    group = posed.group
    return zip(own_rows(posed), group.texts, group.verdicts, posed.advantages, strict=True)


WRITERS: Mapping[str, Callable[[Posed], Rows]] = {
    "chat": chat_rows,
    "trl": trl_rows,
    "verl": verl_rows,
    "oapl": oapl_rows,
    "pairs": pair_rows,
}


def export_round(run: RunFolder, index: int | None, shape: str, output: Path, tell: Tell) -> None:
    """Writes the groups of a round, by default the newest that is sealed, into a file.

    Raises ExchangeError where there is nothing to write, StoreError where the round is missing or damaged.
    """
    check_suffix(output)
    if not run.config_path.exists():
        raise StoreError(f"{run.path} is not a run folder: it has no config.toml.")
    sealed = [each for each in run.round_indices() if run.round(each).is_sealed()]
    if not sealed or (index is not None and index not in sealed):
        what = "no sealed round" if index is None else f"no sealed round {index}"
        raise ExchangeError(f"{run.path} has {what}; sealed are {sealed}.")
    index = sealed[-1] if index is None else index
    recipe, folder = load_recipe(run.config_path), run.round(index)
    round = folder.load()
    rows: list[dict[str, Any]] = []
    num_groups = num_failed = 0
    with closing(Poser(recipe, run, tell)) as poser:
        for number in range(round.num_shards):
            shard = folder.read_shard(number)
            num_failed += len(shard.failed)
            for group in shard.groups:
                posed = poser.pose(round, group, step=index * recipe.trainer.weight_sync_steps + number + 1)
                found = list(WRITERS[shape](posed))
                num_groups += bool(found)
                rows += found
    if not rows:
        raise ExchangeError(f"round {index} of {run.path} has nothing to write: no group has different rewards.")
    write_rows(output, rows)
    if num_failed:
        tell(f"{num_failed} groups could not be graded, and are left out")
    tell(f"{output}: {len(rows)} rows of {num_groups} groups of round {index}")


class Poser:
    """Finds how a group's prompt was posed: as messages, where they were and the run's task has the problem."""

    def __init__(self, recipe: Recipe, run: RunFolder, tell: Tell) -> None:
        self.recipe, self.objective = recipe, make_objective(recipe.loss)
        kept = run.policy_versions()
        name = str(run.policy_path(kept[0])) if kept else recipe.model.name_or_path
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(name)
        self.task: Task | None = None
        try:
            self.task = make_task(recipe.task)
        except OaplError as error:
            tell(f"prompts are written as the text that the model was given, as the task cannot be had: {error}")

    def pose(self, round: Round, group: Group, step: int) -> Posed:
        prompt, columns = self.prompt(group)
        plain = self.tokenizer.decode(group.prompt_ids, skip_special_tokens=True)
        advantages = self.objective.advantages(torch.from_numpy(group.all_rewards).double()).tolist()
        return Posed(
            self.recipe.task.name, round, group, prompt, columns, plain, advantages[: len(group.completions)], step
        )

    def prompt(self, group: Group) -> tuple[str | Messages, Mapping[str, Any]]:
        """The prompt, and the problem's other columns; the text that the model was given where it is not the task's."""
        problem = self._problem(group.prompt_id)
        if (
            problem is None
            or encode_prompt(self.tokenizer, problem.text, self.recipe.task) != group.prompt_ids.tolist()
        ):
            return group.prompt, {}
        return as_posed(problem.text, self.recipe.task), problem.columns

    def _problem(self, prompt_id: str) -> Prompt | None:
        if self.task is None or not prompt_id.startswith("train/"):
            return None
        index, count = split_and_index(prompt_id)[1], self.task.num_prompts("train")
        return self.task.prompt("train", index) if count is None or index < count else None

    def close(self) -> None:
        if self.task is not None:
            self.task.close()
