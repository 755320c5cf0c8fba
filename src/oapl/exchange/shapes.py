"""The shapes that completions with rewards have elsewhere, one row a completion, read and written.

Besides its own columns, each has room for those of the store (`OWN`), under the store's names: what is written here
has them, so that it is read back whole; of what comes from elsewhere those are taken that are there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from oapl.errors import ExchangeError
from oapl.exchange.files import read_rows
from oapl.tasks.problems import is_chat
from oapl.types import FinishReason, Messages

OWN = (
    *("round", "position", "index", "prompt_id", "prompt_ids", "token_ids", "logprobs", "finish_reason"),
    *("answer", "reason", "scores", "other_rewards", "policy_version", "policy_digest", "temperature", "verifier"),
)
"""Columns of the store that every shape carries as extra ones."""
OF_EXPORTS = ("round", "position", "index", "answer", "reason")
"""Those whose names mean something else elsewhere: they are read beside a `policy_digest`, as exports have it."""
LARGEST_LOGPROB = 1e-3
"""Nats above 0 that a rounded log-prob may be."""


@dataclass(frozen=True)
class Trace:
    """One completion as a file has it."""

    place: str
    """The file and the row, for messages."""
    prompt: str | Messages
    text: str
    reward: float
    key: tuple[Any, ...] = ()
    """What rows of one group have in common, besides the prompt."""
    scores: Mapping[str, float] = field(default_factory=dict)
    group_rewards: tuple[float, ...] | None = None
    """The rewards of the whole group, where the row says them."""
    lacks_special_tokens: bool = False
    """Whether the prompt was written without its special tokens, and so without where its messages begin."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """The store's columns that the row has, by name."""

    @property
    def group(self) -> tuple[Any, ...]:
        """The same for all rows of a group, and for no others."""
        prompt = self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, default=str, sort_keys=True)
        return (self.own.get("round"), self.own.get("position"), prompt, *self.key)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.own.get("finish_reason")


class Row:
    """A row's values, each of the kind that is asked for. Raises ExchangeError where one is not."""

    def __init__(self, place: str, values: Mapping[str, Any]) -> None:
        self.place, self.values = place, values

    def error(self, what: str) -> ExchangeError:
        return ExchangeError(f"{self.place}: {what}")

    def need(self, name: str) -> Any:
        if name not in self.values:
            raise self.error(f"`{name}` is missing. The row has {', '.join(self.values)}.")
        return self.values[name]

    def number(self, name: str) -> float:
        value = self.need(name)
        if not isinstance(value, int | float):
            raise self.error(f"`{name}` must be a number, not {value!r:.80}.")
        with np.errstate(over="ignore"):
            is_finite = bool(np.isfinite(np.float32(value)))
        if not is_finite:
            raise self.error(f"`{name}` is {value}, which is no finite reward. Leave its whole group out, or mend it.")
        return float(value)

    def text(self, name: str) -> str:
        value = self.need(name)
        if not isinstance(value, str):
            raise self.error(f"`{name}` must be text, not {value!r:.80}.")
        return value

    def prompt(self, name: str) -> str | Messages:
        value: Any = self.need(name)
        if not value or not (isinstance(value, str) or is_chat(value)):
            raise self.error(
                f"`{name}` must be text or chat messages ([{{'role': …, 'content': …}}]), not {value!r:.80}."
            )
        return value  # type: ignore[no-any-return]

    def answer(self, name: str) -> str:
        """A completion: text, or the one message of an assistant."""
        value = self.need(name)
        if isinstance(value, str):
            return value
        if not is_chat(value) or len(value) != 1 or not isinstance(value[0].get("content"), str):
            raise self.error(f"`{name}` must be text, or one message with text as `content`, not {value!r:.80}.")
        more = [each for each, inner in value[0].items() if inner and each not in ("role", "content")]
        if more and "token_ids" not in self.values:
            raise self.error(
                f"the message in `{name}` has, besides its `content`, {', '.join(more)}, which the model wrote too. "
                f"Put all that it wrote into `content`, as it wrote it, or give `token_ids`."
            )
        return str(value[0]["content"])

    def own(self) -> dict[str, Any]:
        """The store's columns that the row has, those checked that something is made of."""
        found = {name: self.values[name] for name in OWN if name in self.values}
        without = () if "policy_digest" in found else OF_EXPORTS
        if "token_ids" not in found:
            without = (*without, "logprobs")  # of which tokens, is not known
        found = {name: value for name, value in found.items() if name not in without}
        for name, kind in (
            ("prompt_ids", int),
            ("token_ids", int),
            ("logprobs", int | float),
            ("other_rewards", int | float),
        ):
            value = found.get(name, [])
            if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
                raise self.error(f"`{name}` must be a list of numbers, not {value!r:.80}.")
        if found.get("finish_reason", "stop") not in ("stop", "length"):
            raise self.error(f"`finish_reason` must be `stop` or `length`, not {found['finish_reason']!r}.")
        logprobs = found.get("logprobs", [])
        if not all(math.isfinite(each) and each < LARGEST_LOGPROB for each in logprobs):
            raise self.error("`logprobs` must be natural logs of probabilities, finite and not above 0.")
        if len(logprobs) not in (0, len(found.get("token_ids", ()))):
            raise self.error(f"{len(found['token_ids'])} `token_ids` and {len(logprobs)} `logprobs`.")
        if not isinstance(found.get("scores", {}), dict):
            del found["scores"]  # another's, of that name
        return found


def read_trl(row: Row, weights: Mapping[str, float]) -> Trace:
    """Of a table that GRPOTrainer writes with `log_completions`. The reward is the weighted sum of those columns that
    apply to the row, as TRL has it."""
    scores = {name: row.values[name] for name in weights if not math.isnan(row.values.get(name, math.nan))}
    if not scores:
        raise row.error(f"no reward: {', '.join(weights)} {'is' if len(weights) == 1 else 'are all'} empty or nan.")
    reward = sum(weights[name] * row.number(name) for name in scores)
    return Trace(
        row.place,
        row.prompt("prompt"),
        row.answer("completion"),
        reward,
        key=(row.need("step"),),
        scores=scores if len(weights) > 1 else {},
        own=row.own(),
    )


def read_verl(row: Row, _: Mapping[str, float]) -> Trace:
    """Of a file of `trainer.rollout_data_dir`, one a step."""
    return Trace(
        row.place,
        row.prompt("input"),
        row.text("output"),
        row.number("score"),
        key=(row.values.get("step"),),
        lacks_special_tokens=True,
        own=row.own(),
    )


def read_oapl(row: Row, _: Mapping[str, float]) -> Trace:
    """Of the authors' offline dataset: one response, and the rewards of the group that it is of."""
    rewards = row.need("response_rewards")
    if not isinstance(rewards, list) or not all(
        isinstance(each, int | float) and math.isfinite(each) for each in rewards
    ):
        raise row.error(f"`response_rewards` must be a list of finite rewards, not {rewards!r:.80}.")
    reward = row.number("precomputed_reward")
    if np.float32(reward) not in np.array(rewards, np.float32):
        raise row.error(f"`precomputed_reward` = {reward:g} is none of its `response_rewards`, {rewards}.")
    group_rewards = tuple(float(each) for each in rewards)
    return Trace(
        row.place,
        row.prompt("prompt"),
        row.text("response"),
        reward,
        key=group_rewards,
        group_rewards=group_rewards,
        own=row.own(),
    )


def read_chat(row: Row, _: Mapping[str, float]) -> Trace:
    """Of chat traces with feedback. The answer is `completion`, or the last message where that is an assistant's."""
    prompt = row.prompt("messages" if "messages" in row.values else "prompt")
    if "completion" in row.values:
        text = row.answer("completion")
    elif isinstance(prompt, str) or len(prompt) < 2 or prompt[-1]["role"] != "assistant":
        raise row.error("there is no `completion`, and the last message is not an assistant's.")
    else:
        prompt, text = prompt[:-1], Row(row.place, {**row.values, "messages": prompt[-1:]}).answer("messages")
    return Trace(row.place, prompt, text, row.number("reward"), own=row.own())


@dataclass(frozen=True)
class Shape:
    """One way to write completions down."""

    what: str
    needs: tuple[str, ...]
    """The columns that it is known by."""
    read: Callable[[Row, Mapping[str, float]], Trace]


SHAPES = {
    "trl": Shape("TRL's table of completions", ("step", "prompt", "completion", "advantage"), read_trl),
    "verl": Shape("verl's dump of rollouts", ("input", "output", "score"), read_verl),
    "oapl": Shape("the authors' rows", ("prompt", "response", "precomputed_reward", "response_rewards"), read_oapl),
    "chat": Shape("chat traces", ("messages", "reward"), read_chat),
    "text": Shape("traces of plain text", ("prompt", "completion", "reward"), read_chat),
}
"""In the order in which a file's columns are compared with them."""


def shape_of(path: Path, columns: Sequence[str]) -> str:
    """The name of the shape that has these columns. Raises ExchangeError where none has."""
    for name, shape in SHAPES.items():
        if set(shape.needs) <= set(columns):
            return name
    lacking = {name: [each for each in shape.needs if each not in columns] for name, shape in SHAPES.items()}
    nearest = min(SHAPES, key=lambda name: len(lacking[name]) / len(SHAPES[name].needs))
    raise ExchangeError(
        f"{path} has the columns {', '.join(columns)}, and no format that is known here: "
        + "; ".join(f"{shape.what}: {', '.join(shape.needs)}" for shape in SHAPES.values())
        + f". Nearest is {SHAPES[nearest].what}, which lacks {', '.join(lacking[nearest])}."
    )


def read_traces(
    paths: Sequence[Path], weights: Mapping[str, float] | None = None
) -> tuple[list[Trace], str, list[str]]:
    """The completions of some files, the name of their shape, and what should be known of how they were read.

    `weights` of columns make the reward of a table of TRL's; by default all of them at 1, or an export's `reward`.
    Raises ExchangeError where a file or a row cannot be read, or the files have several shapes.
    """
    rows: list[Row] = []
    shapes: dict[str, Path] = {}
    sums: dict[str, Path] = {}
    if len({path.resolve() for path in paths}) < len(paths):
        raise ExchangeError(f"a file is given twice among {', '.join(map(str, paths))}. Name each once.")
    for path in paths:
        found = [Row(place, values) for place, values in read_rows(path)]
        shape = shape_of(path, list(dict.fromkeys(name for row in found[:100] for name in row.values)))
        shapes.setdefault(shape, path)
        if len(shapes) > 1:
            which = " and ".join(f"{SHAPES[name].what} ({at})" for name, at in shapes.items())
            raise ExchangeError(f"the files have different formats: {which}. Import them one after the other.")
        if weights and shape != "trl":
            raise ExchangeError(
                f"--reward names columns of TRL's table of completions; {path} is {SHAPES[shape].what}."
            )
        chosen = reward_columns(path, [row.values for row in found], weights) if shape == "trl" else {}
        sums.setdefault(" + ".join(f"{weight:g} x {name}" for name, weight in sorted(chosen.items())), path)
        if len(sums) > 1:
            which = " and ".join(f"{how} ({at})" for how, at in sums.items())
            raise ExchangeError(f"the files have different columns of rewards: {which}. Name those meant by --reward.")
        rows += found
    told = [f"reward = {how}" for how in sums if how]
    if shape == "trl":
        rows = without_repeats(rows, told)
    return [SHAPES[shape].read(row, chosen) for row in rows], shape, told


def without_repeats(rows: Sequence[Row], told: list[str]) -> list[Row]:
    """TRL's completions, each once. Its table is of the last ones, as many as a batch has. So it has a batch again for
    every step that trains on it, and begins with the rest of the table before where fewer came, of an evaluation."""
    kept: list[Row] = []
    last: list[str] = []
    num_repeats = num_rests = 0
    for _, table in groupby(rows, key=lambda row: row.need("step")):
        found = list(table)
        logged = [json.dumps({**row.values, "step": None}, default=str, sort_keys=True) for row in found]
        starts = range(max(0, len(last) - len(logged)), len(last))
        again = next((len(last) - start for start in starts if last[start:] == logged[: len(last) - start]), 0)
        num_repeats += again == len(found)
        num_rests += 0 < again < len(found)
        kept += found[again:]
        last = logged
    if num_repeats:
        told.append(f"{num_repeats} steps repeat the completions of the step before, and are left out")
    if num_rests:
        told.append(
            f"{num_rests} steps begin with completions of the step before, each of which is taken once. So TRL logs "
            f"where it evaluates, and completions of evaluations are among the rows: leave these out if they are not "
            f"to be trained on"
        )
    return kept


def reward_columns(
    path: Path, rows: Sequence[Mapping[str, Any]], weights: Mapping[str, float] | None
) -> Mapping[str, float]:
    """The reward columns of a table of TRL's, with their weights: TRL writes numbers with a point for each function,
    and does not say which of the columns they are. A table that was exported has their sum too, as `reward`."""
    known = {*OWN, *SHAPES["trl"].needs}
    names = dict.fromkeys(name for row in rows for name in row if name not in known)
    found = [name for name in names if all(isinstance(row.get(name, 0.0), float) for row in rows)]
    has_sum = "reward" in found and all("policy_digest" in row for row in rows)
    chosen = weights or ({"reward": 1.0} if has_sum else dict.fromkeys(found, 1.0))
    if missing := [name for name in chosen if name not in found]:
        raise ExchangeError(
            f"{path} has no column of rewards {', '.join(missing)}; it has {', '.join(found) or 'none'}. Name them by "
            f"--reward NAME or NAME=WEIGHT."
        )
    if not chosen:
        raise ExchangeError(f"{path} has no column of rewards: numbers with a point, named after a reward function.")
    return chosen
