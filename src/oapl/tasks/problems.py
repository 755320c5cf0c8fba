"""How a row becomes a prompt: as it stands, or a mathematics or programming problem put into words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from oapl.config import TaskConfig
from oapl.errors import TaskError
from oapl.grading.code.problem_tests import HUMAN_EVAL_COLUMNS
from oapl.tasks.rows import first_of
from oapl.types import Prompt

PROBLEM_COLUMNS = ("problem", "question", "question_content", "prompt")
ANSWER_COLUMNS = ("answer", "reward_model")
"""What a mathematics problem is graded by; in verl's layout `reward_model.ground_truth`."""
TEST_COLUMNS = ("tests", "public_test_cases", "private_test_cases", "test", "reward_model")
"""What a program is graded by."""

MATH_TEMPLATE = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
"""The words that the model cards of Qwen and of the models trained from it advise."""
STDIN_TEMPLATE = (
    "{problem}\n\nWrite a Python program that solves the problem. It reads the input from standard input and writes "
    "the answer to standard output. Give the whole program in one block that begins with ```python."
)
CALL_TEMPLATE = (
    "{problem}\n\nWrite the Python code that solves the problem. Keep the names and arguments of this code:\n\n"
    "```python\n{starter_code}\n```\n\nGive the whole code in one block that begins with ```python."
)


def is_chat(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)


def check_columns(columns: Sequence[str], config: TaskConfig, what: str) -> None:
    """Raises TaskError where rows of these columns cannot be that task's. `what` names the setting and the rows."""
    needed: list[tuple[str, ...]] = [("prompt",) if config.name == "dataset" else PROBLEM_COLUMNS]
    if "math" in config.rewards:
        needed.append(ANSWER_COLUMNS)
    if "code" in config.rewards:
        needed.append(TEST_COLUMNS)
    for names in needed:
        if not first_of(names, columns):
            listed = " or ".join(f"`{name}`" for name in names)
            raise TaskError(f"{what} has no {listed} column; it has {', '.join(columns)}. Rename one to `{names[0]}`.")


def make_prompt(prompt_id: str, row: Mapping[str, Any], config: TaskConfig) -> Prompt:
    """The prompt of a row, with what grading needs as its columns. Raises TaskError where the row will not do."""
    columns = dict(row)
    if config.name == "dataset":
        text = columns.pop("prompt")
    else:
        text = row[first_of(PROBLEM_COLUMNS, row)]
        if row.keys() >= set(HUMAN_EVAL_COLUMNS):  # whose prompt begins the code to be written
            text = fill_template(f"Complete the function `{row['entry_point']}`.", row["prompt"], config)
        else:
            columns.pop("prompt", None)
            if isinstance(text, str):
                text = fill_template(text, row.get("starter_code") or "", config)
    if "math" in config.rewards:
        try:
            gold = gold_answer(row)
        except TaskError as error:
            raise TaskError(f"prompt {prompt_id}: {error}") from error
        if not gold:
            raise TaskError(f"prompt {prompt_id} has no answer to be graded by. Its columns are {', '.join(row)}.")
    if not isinstance(text, str) and not is_chat(text):
        raise TaskError(
            f"prompt {prompt_id}: the problem must be text or chat messages ([{{'role': …, 'content': …}}]), "
            f"found {text!r}."
        )
    return Prompt(prompt_id, text, columns)


def fill_template(problem: str, starter_code: str, config: TaskConfig) -> str:
    default = MATH_TEMPLATE if config.name == "math" else CALL_TEMPLATE if starter_code else STDIN_TEMPLATE
    template = config.prompt_template or default
    words = {"problem": problem, "starter_code": starter_code}
    return re.sub(r"\{(problem|starter_code)\}", lambda match: words[match[1]], template)  # which may hold such words


def gold_answer(row: Mapping[str, Any]) -> str:
    """What a mathematics problem is graded by; "" where a row has none. Raises TaskError where it has several."""
    truth = ground_truth(row)
    if isinstance(truth, list | tuple):
        if len(truth) > 1:
            raise TaskError(
                f"its answer is a list of {len(truth)}, {truth!r:.80}, and there can be one. Give it as text."
            )
        truth = truth[0] if truth else None
    return "" if truth is None else str(truth).strip()


def ground_truth(row: Mapping[str, Any]) -> Any:
    """What a row is graded by: verl's `reward_model.ground_truth`, or its `answer`; None where both are empty.

    Raises TaskError where there is no answer, and a `reward_model` that cannot be read.
    """
    verl, answer = row.get("reward_model"), row.get("answer")
    if isinstance(verl, str):
        try:
            verl = json.loads(verl)
        except ValueError:
            if is_empty(answer):
                raise TaskError(f"its `reward_model` is no JSON object with a `ground_truth`: {verl!r:.80}") from None
    truth = verl.get("ground_truth") if isinstance(verl, Mapping) else None
    found = answer if is_empty(truth) else truth
    return None if is_empty(found) else found


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
