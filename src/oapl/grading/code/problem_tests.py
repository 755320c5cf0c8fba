"""The tests of a programming problem, from a row of a data set in the layouts that are about.

LiveCodeBench: `public_test_cases`, `private_test_cases` and `metadata`. DeepCoder, in all of its parts: `tests`, or
verl's `reward_model` with a `ground_truth`. HumanEval: `prompt`, `test` and `entry_point`.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from keyword import iskeyword
from typing import Any

from oapl.errors import TaskError
from oapl.grading.code.outputs import same_output, same_result
from oapl.grading.code.sandbox import Kind

MAX_PRIVATE_BYTES = 512 << 20
"""Of LiveCodeBench's hidden tests, unpacked: a small file must not fill the memory."""
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
"""What looking for tests in a value of another shape raises."""


@dataclass(frozen=True)
class Tests:
    """What a program has to do. Example: `Tests("call", (("[2, 3]", "5"),), "add")`."""

    kind: Kind
    cases: tuple[tuple[str, str], ...]
    """Input and expected output of each test. `stdin`: both as text. `call`: the list of arguments and the result, both
    as JSON. `check`: code that defines `check(candidate)`, and nothing."""
    fn_name: str = ""
    """The function that is called or checked."""
    wrapped: bool = False
    """An expected list of one element stands for that element as well, as in APPS and TACO."""

    __test__ = False  # the name looks like a test case to pytest

    def longest(self, max_tests: int | None) -> Tests:
        """Those with the longest inputs, in their order."""
        if max_tests is None or len(self.cases) <= max_tests:
            return self
        by_length = sorted(range(len(self.cases)), key=lambda index: -len(self.cases[index][0]))
        return replace(self, cases=tuple(self.cases[index] for index in sorted(by_length[:max_tests])))


HUMAN_EVAL_COLUMNS = ("prompt", "test", "entry_point")


def parse_tests(row: Mapping[str, Any]) -> Tests:
    """Raises TaskError where the row holds no tests, or none that can be read."""
    try:
        if "private_test_cases" in row or "public_test_cases" in row:
            tests = _livecodebench(row)
        elif row.keys() >= set(HUMAN_EVAL_COLUMNS):
            prompt, test, name = (_demand_text(row, column) for column in HUMAN_EVAL_COLUMNS)
            function = _demand_name(name)
            tests = Tests("check", ((f"{prompt}\n{test}", ""),), function)  # checks may use what the prompt defines
        elif "reward_model" in row:
            tests = _deepcoder(_decoded(row["reward_model"])["ground_truth"])
        else:
            tests = _deepcoder(row["tests"])
    except (*MALFORMED, pickle.UnpicklingError, zlib.error, EOFError, MemoryError) as error:
        raise TaskError(
            f"the row's tests cannot be read ({type(error).__name__}: {error}). Its columns are {', '.join(row)}; "
            f"the layouts are in docs/grading_code.md."
        ) from error
    if not tests.cases:
        raise TaskError(f"the row has no tests. Its columns are {', '.join(row)}. Leave such rows out.")
    if all(_expects_nothing(tests, expected) for _, expected in tests.cases):
        raise TaskError(
            "none of the row's tests expects any result: what does nothing would pass. Leave such rows out."
        )
    return tests


def _expects_nothing(tests: Tests, expected: str) -> bool:
    """As some tests may, but not all of a problem's."""
    match tests.kind:
        case "stdin":
            return same_output("", expected)
        case "call":
            return same_result("null", expected, tests.wrapped)
    return False


def _livecodebench(row: Mapping[str, Any]) -> Tests:
    cases = [*_decoded(row.get("public_test_cases") or "[]"), *_private(row.get("private_test_cases") or "[]")]
    return _typed(cases, _decoded(row.get("metadata") or "{}").get("func_name"))


def _private(value: Any) -> Any:
    """JSON, or base64 of zlib of a pickled string of JSON."""
    try:
        return _decoded(value)
    except json.JSONDecodeError:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(value), MAX_PRIVATE_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"more than {MAX_PRIVATE_BYTES} bytes of private tests") from None
        return _decoded(_StringUnpickler(io.BytesIO(data)).load())


class _StringUnpickler(pickle.Unpickler):
    """A pickle may name any function to be called; one of a string names none."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _deepcoder(value: Any) -> Tests:
    value = _decoded(value)
    if isinstance(value, Mapping):
        return _parallel(_demand_list(value["inputs"]), _demand_list(value["outputs"]), value.get("fn_name"))
    if _demand_list(value) and "testtype" in value[0]:
        return _typed(value, (_decoded(value[0].get("metadata") or "{}")).get("func_name"))
    kind = _only({case.get("type", "stdin_stdout") for case in value} or {"stdin_stdout"})
    if kind not in ("stdin_stdout", "function_call"):
        raise ValueError(f"tests of an unknown type: {kind}")
    fn_name = _only({case["fn_name"] or "" for case in value}) if kind == "function_call" else None
    return _parallel([case["input"] for case in value], [case["output"] for case in value], fn_name)


def _parallel(inputs: Sequence[Any], outputs: Sequence[Any], fn_name: str | None) -> Tests:
    """APPS, TACO and PrimeIntellect: text may come as a list of lines, arguments as the list of them."""
    if fn_name is None:
        texts = [[_text(value) for value in column] for column in (inputs, outputs)]
        return Tests("stdin", tuple(zip(*texts, strict=True)))
    return _calls(zip(inputs, outputs, strict=True), fn_name, wrapped=True)


def _typed(cases: Sequence[Mapping[str, Any]], fn_name: str | None) -> Tests:
    """LiveCodeBench: each test says how it is run; arguments and results are JSON, an argument a line."""
    testtype = _only({case["testtype"] for case in cases}) if cases else "stdin"
    if testtype in ("stdin", "stdin_stdout"):  # the latter is what the converters of rllm and verl write
        return Tests("stdin", tuple((_text(case["input"]), _text(case["output"])) for case in cases))
    if testtype != "functional":
        raise ValueError(f"tests of an unknown type: {testtype}")
    return _calls([(case["input"], case["output"]) for case in cases], fn_name)


def _text(value: Any) -> str:
    lines = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(line, str | int | float) for line in lines):
        raise ValueError(f"input or output that is neither text nor lines: {value!r:.80}")
    return "\n".join(map(str, lines))


def _calls(pairs: Iterable[tuple[Any, Any]], fn_name: Any, wrapped: bool = False) -> Tests:
    return Tests("call", tuple(_call(given, expected) for given, expected in pairs), _demand_name(fn_name), wrapped)


def _call(given: Any, expected: Any) -> tuple[str, str]:
    """Arguments and result. Arguments as text are JSON, one a line, and the result is then JSON as well."""
    if expected is None:  # a missing value, or a result that a function gives which only ends
        raise ValueError("a test without a result")
    if isinstance(given, str):
        given, expected = [_decoded(line) for line in given.split("\n") if line.strip()], _decoded(expected)
    return _json(_demand_list(given)), _json(expected)


def _demand_list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"not a list: {value!r:.80}")
    return list(value)


def _demand_name(value: Any) -> str:
    """Of a function. What is none, `Solution().add` say, no program could define."""
    if not (isinstance(value, str) and value.isidentifier() and not iskeyword(value)):
        raise ValueError(f"tests of a function without its name: {value!r:.80}")
    return value


def _demand_text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"no text in column {column}: {value!r:.80}")
    return value


def _decoded(value: Any) -> Any:
    if not isinstance(value, str | bytes):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of more digits than `int` reads, which Decimal does not mind
        return json.loads(value, parse_int=lambda digits: int(Decimal(digits)))


def _json(value: Any) -> str:
    """`json.dumps`, of integers of any length."""
    try:
        return json.dumps(value)
    except ValueError:
        if isinstance(value, int):
            return str(Decimal(value))
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(_json, value))}]"
        return f"{{{', '.join(f'{_json(str(key))}: {_json(item)}' for key, item in value.items())}}}"


def _only(values: set[Any]) -> Any:
    if len(values) > 1:
        raise ValueError(f"tests of several kinds: {', '.join(sorted(map(str, values)))}")
    return next(iter(values))
