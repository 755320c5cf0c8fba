"""How a row becomes a prompt: as it stands, or a mathematics or programming problem put into words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from oapl.config import TaskConfig
from oapl.errors import TaskError
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
        if "entry_point" in row:  # HumanEval's, whose problem is itself the beginning of the code to write
            text = fill_template(f"Complete the function `{row['entry_point']}`.", row["prompt"], config)
        else:
            columns.pop("prompt", None)
            if isinstance(text, str):
                text = fill_template(text, row.get("starter_code") or "", config)
    if "math" in config.rewards and not gold_answer(row):
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
    return template.replace("{starter_code}", starter_code).replace("{problem}", problem)


def gold_answer(row: Mapping[str, Any]) -> str:
    """What a mathematics problem is graded by; "" where a row has none."""
    if row.get("answer") is not None:
        return str(row["answer"]).strip()
    value = row.get("reward_model")
    if isinstance(value, str):
        value = json.loads(value)
    found = value.get("ground_truth") if isinstance(value, Mapping) else None
    return "" if found is None else str(found).strip()
