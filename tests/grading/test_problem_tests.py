"""The layouts in which problems come with tests."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from oapl.errors import TaskError
from oapl.grading.code import problem_tests
from oapl.grading.code.problem_tests import Tests, parse_tests

ADD = Tests("stdin", (("1 2\n", "3\n"), ("5 6\n", "11\n")))
ADD_CALL = Tests("call", (("[1, 2]", "3"), ("[5, 6]", "11")), "add")


def lcb_cases(*cases: tuple[str, str], testtype: str = "stdin", **more: Any) -> list[Mapping[str, Any]]:
    return [{"input": given, "output": expected, "testtype": testtype, **more} for given, expected in cases]


def packed(value: Any) -> str:
    """As LiveCodeBench hides its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


STDIN_CASES = lcb_cases(*ADD.cases)
CALL_CASES = lcb_cases(("1\n2", "3"), ("5\n6", "11"), testtype="functional")
PRIME = [{"type": "stdin_stdout", "input": given, "output": expected} for given, expected in ADD.cases]
PRIME_CALL = [
    {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]},
    {"type": "function_call", "fn_name": "add", "input": [5, 6], "output": [11]},
]
WRAPPED = Tests("call", (("[1, 2]", "[3]"), ("[5, 6]", "[11]")), "add", wrapped=True)


@pytest.mark.parametrize("pack", [str, packed], ids=["json", "packed"])
def test_livecodebench(pack: Callable[[str], str]) -> None:
    public, private = json.dumps(STDIN_CASES[:1]), json.dumps(STDIN_CASES[1:])
    row = {"public_test_cases": public, "private_test_cases": pack(private), "metadata": "{}"}
    assert parse_tests(row) == ADD


def test_livecodebench_with_a_function() -> None:
    metadata = json.dumps({"func_name": "add"})
    row = {"public_test_cases": json.dumps(CALL_CASES), "private_test_cases": packed("[]"), "metadata": metadata}
    assert parse_tests(row) == ADD_CALL


@pytest.mark.parametrize("encode", [json.dumps, lambda value: value], ids=["text", "values"])
@pytest.mark.parametrize(
    ("value", "tests"),
    [
        ({"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}, ADD),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, Tests("stdin", (("1\n2", "3"),))),
        ({"inputs": [[1, 2], [5, 6]], "outputs": [[3], [11]], "fn_name": "add"}, WRAPPED),
        (PRIME, ADD),
        (PRIME_CALL, WRAPPED),
        (STDIN_CASES, ADD),
        (lcb_cases(*ADD.cases, testtype="stdin_stdout"), ADD),
        (lcb_cases(("1\n2", "3"), ("5\n6", "11"), testtype="functional", metadata={"func_name": "add"}), ADD_CALL),
    ],
    ids=["taco", "taco-lines", "taco-call", "primeintellect", "primeintellect-call", "lcbv5", "rllm", "lcbv5-call"],
)
def test_deepcoder(value: Any, tests: Tests, encode: Any) -> None:
    assert parse_tests({"problem": "Add.", "tests": encode(value)}) == tests
    assert parse_tests({"reward_model": {"style": "rule", "ground_truth": encode(value)}}) == tests


def test_integers_of_any_length_can_be_read() -> None:
    long = "9" * 5000
    text = f'{{"inputs": [[{long}, {{"a": [1.5, "x", null]}}]], "outputs": [{long}], "fn_name": "f"}}'
    assert parse_tests({"tests": text}) == Tests("call", ((f'[{long}, {{"a": [1.5, "x", null]}}]', long),), "f", True)
    cases = lcb_cases((long, long), testtype="functional", metadata={"func_name": "f"})
    assert parse_tests({"tests": cases}) == Tests("call", ((f"[{long}]", long),), "f")


def test_humaneval_checks_may_use_what_the_prompt_defines() -> None:
    row = {"prompt": "def f(x):\n    '''Doc.'''\n", "test": "def check(candidate): ...", "entry_point": "f"}
    checks = "def f(x):\n    '''Doc.'''\n\ndef check(candidate): ..."
    assert parse_tests(row) == Tests("check", ((checks, ""),), "f")


def test_the_longest_inputs_are_kept_in_their_order() -> None:
    tests = Tests("stdin", (("1", "a"), ("333", "b"), ("22", "c"), ("4444", "d")))
    assert tests.longest(2).cases == (("333", "b"), ("4444", "d"))
    assert tests.longest(9) == tests.longest(None) == tests


@pytest.mark.parametrize(
    "row",
    [
        {"tests": "[]"},
        {"tests": '{"inputs": [], "outputs": []}'},
        {"public_test_cases": "[]", "private_test_cases": "[]", "metadata": "{}"},
    ],
)
def test_a_row_without_tests_is_refused(row: Mapping[str, Any]) -> None:
    with pytest.raises(TaskError, match="the row has no tests"):
        parse_tests(row)


@pytest.mark.parametrize(
    "row",
    [
        {"tests": {"inputs": ["1", "2"], "outputs": ["", " \n"]}},
        {"tests": {"inputs": [[1]], "outputs": [[None]], "fn_name": "f"}},
        {"tests": lcb_cases(("1", "null"), testtype="functional", metadata={"func_name": "f"})},
    ],
)
def test_a_row_whose_tests_expect_nothing_is_refused(row: Mapping[str, Any]) -> None:
    with pytest.raises(TaskError, match="what does nothing would pass"):
        parse_tests(row)


def test_some_tests_may_expect_nothing() -> None:
    cases = (("1", ""), ("2", "2"))
    assert parse_tests({"tests": lcb_cases(*cases)}) == Tests("stdin", cases)


class Executes:
    def __reduce__(self) -> Any:
        return print, ("a pickle was obeyed",)


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "Add."},
        {"tests": None},
        {"tests": "no JSON"},
        {"tests": "3"},
        {"tests": '{"inputs": ["1"], "outputs": []}'},
        {"tests": json.dumps([*PRIME, *PRIME_CALL])},
        {"tests": json.dumps(CALL_CASES)},
        {"public_test_cases": json.dumps(CALL_CASES), "metadata": "{}"},
        {"private_test_cases": "no base64"},
        {"private_test_cases": base64.b64encode(b"no zlib").decode()},
        {"private_test_cases": packed(Executes())},
        {"private_test_cases": base64.b64encode(zlib.compress(b"\x80\x04\x8d" + b"\xff" * 8)).decode()},  # its length
        {"reward_model": {}},
        {"entry_point": "f"},
        {"prompt": None, "test": "def check(candidate): ...", "entry_point": "f"},
        {"prompt": "", "test": None, "entry_point": "f"},
        {"prompt": "", "test": "def check(candidate): ...", "entry_point": ""},
        {"tests": {"inputs": [[1, 2]], "outputs": [3], "fn_name": ""}},
        {"tests": lcb_cases(("1", "2"), testtype="functional", metadata={"func_name": ""})},
        {"tests": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "Solution().add"}},
        {"tests": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "class"}},
        {"tests": lcb_cases(("1", "2"), testtype="interactive", metadata={"func_name": "f"})},
        {"tests": [{"type": "function_call", "input": [1, 2], "output": [3]}]},
        {"tests": [{"type": "function_call", "fn_name": None, "input": [1, 2], "output": [3]}]},
        {"tests": [{"type": "interactive", "input": "1", "output": "2"}]},
        {"tests": {"inputs": "12", "outputs": "34"}},
        {"tests": {"inputs": {"a": "1"}, "outputs": {"a": "2"}}},
        {"tests": {"inputs": [[["1"]]], "outputs": ["2"]}},
        {"tests": {"inputs": ["1"], "outputs": [{"a": 1}]}},
        {"tests": {"inputs": [None], "outputs": ["2"]}},
        {"tests": {"inputs": ["1"], "outputs": [None]}},
        {"tests": {"inputs": [[1]], "outputs": [None], "fn_name": "f"}},
        {"tests": {"inputs": [None], "outputs": [1], "fn_name": "f"}},
    ],
)
def test_tests_that_cannot_be_read_are_refused(row: Mapping[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TaskError, match="the row's tests cannot be read"):
        parse_tests(row)
    assert capsys.readouterr().out == ""


def test_private_tests_that_unpack_to_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_tests, "MAX_PRIVATE_BYTES", 1000)
    with pytest.raises(TaskError, match="more than 1000 bytes"):
        parse_tests({"private_test_cases": packed("[" + " " * 5000 + "]")})
