"""Which program of a completion is graded."""

from __future__ import annotations

import time

import pytest

from oapl.grading.code.programs import last_program

NO_BLOCK = (None, "no block of code")
CUT_OFF = (None, "the last block of code is cut off")


@pytest.mark.parametrize(
    "language",
    ["python", "py", "Python3", "", " Python 3", "python3.11", "python run", "{.python}", "python title=a.py"],
)
def test_a_block_is_taken_whatever_its_name_for_python(language: str) -> None:
    assert last_program(f"So:\n```{language}\nprint(1)\nprint(2)\n```\nDone.") == ("print(1)\nprint(2)", "")


def test_the_last_block_counts() -> None:
    assert last_program("```\nfirst\n```\nNo, better:\n```python\nsecond\n```") == ("second", "")


def test_blocks_of_other_languages_are_passed_over() -> None:
    text = "```python\nprint(5)\n```\nIt prints\n```text\n5\n```\nRun it by\n```bash\npython x.py\n```"
    assert last_program(text) == ("print(5)", "")


def test_a_block_that_names_python_comes_before_one_that_names_nothing() -> None:
    assert last_program("```python\nprint(5)\n```\nOutput:\n```\n5\n```") == ("print(5)", "")
    assert last_program("```python\nprint(5)\n```\nOutput:\n```\n5") == ("print(5)", "")  # a listing that is cut off


@pytest.mark.parametrize("language", ["pycon", "python-repl", "pypy", "cpp", "text"])
def test_what_only_resembles_python_is_another_language(language: str) -> None:
    assert last_program(f"```{language}\nprint(1)\n```") == NO_BLOCK


@pytest.mark.parametrize("after", ["<|im_end|>", " done", "  ", ".", "</answer>"])
def test_text_may_follow_a_closing_fence(after: str) -> None:
    assert last_program(f"```python\nprint(1)\n```{after}\nSo it is.") == ("print(1)", "")


def test_a_fence_with_endless_blanks_takes_no_time() -> None:
    start = time.perf_counter()
    assert last_program("```" + " " * 1_000_000 + "x\n" * 2) == NO_BLOCK
    assert time.perf_counter() - start < 2


def test_a_program_with_endless_blanks_takes_no_time() -> None:
    start = time.perf_counter()
    blanks = " " * 2_000_000
    assert last_program(f"```\n{blanks}x\n```") == ("x", "")
    assert time.perf_counter() - start < 1


def test_blanks_within_a_text_of_the_program_stay() -> None:
    assert last_program("```\nx = '''\n   \n'''\n```") == ("x = '''\n   \n'''", "")


def test_fences_in_a_docstring_do_not_close_the_block() -> None:
    docstring = "For example\n    ```\n    f()\n    ```\n    or\n    ```python\n    f()\n    ```\n    "
    program = f'def f():\n    """{docstring}"""\n    return 1'
    assert last_program(f"```python\n{program}\n```") == (program, "")


def test_a_program_that_is_cut_off_is_none_even_after_a_whole_one() -> None:
    assert last_program("```python\nprint(1)\n```\nor\n```python\nprint(") == CUT_OFF


@pytest.mark.parametrize("text", ["", "print(1)", "`print(1)`", "```print(1)```"])
def test_without_a_block_there_is_no_program(text: str) -> None:
    assert last_program(text)[0] is None


def test_a_longer_fence_holds_shorter_ones() -> None:
    assert last_program("````python\nprint('''\n```\n''')\n````") == ("print('''\n```\n''')", "")


def test_a_block_in_a_list_loses_its_indentation() -> None:
    assert last_program("1. So\n   ```python\n   if 1:\n       print(1)\n   ```") == ("if 1:\n    print(1)", "")


def test_what_is_thought_does_not_count() -> None:
    assert last_program("<think>\n```\nguess\n```\n</think>\nI give up.") == NO_BLOCK
    assert last_program("<think>\n```\nnever closed\n</think>\n```\nanswer\n```") == ("answer", "")
    assert last_program("<think>```\nguess\n``` so</think>```\nanswer\n```") == ("answer", "")


def test_a_program_may_print_the_end_of_thought() -> None:
    program = "print('</think>')"
    assert last_program(f"```python\n{program}\n```") == (program, "")
    assert last_program(f"<think>\n```\nguess\n```\n</think>\n```python\n{program}\n```") == (program, "")


def test_answer_after_names_what_has_to_come_before() -> None:
    assert last_program("```\na\n```\nFINAL\n```\nb\n```", answer_after="FINAL") == ("b", "")
    assert last_program("```\na\n```", answer_after="FINAL") == (None, "no FINAL")
