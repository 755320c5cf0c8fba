"""When two outputs are the same."""

from __future__ import annotations

import time

import pytest

from oapl.grading.code.outputs import same_output, same_result

BIG = 10**30


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("3\n", "3"),
        ("  3  \n\n", "3\n"),
        ("1 2\n3", "1  2 \r\n\n3\n"),
        ("Yes", "Yes"),
        ("1.0", "1"),
        ("1", "1.0"),
        ("1e3", "1000"),
        ("007", "7"),
        ("0.3333333", "0.33333333333"),
        ("0.9999999", "1"),
        ("2000000.5", "2000001.0"),
        ("-0", "0"),
        ("nan", "nan"),
        (f"{BIG}.0", f"{BIG}"),
        ("9" * 5000, "9" * 5000 + ".0"),
        ("5e-7", "0"),
        ("1e-7", "0.0"),
        (".5", "0.5"),
        ("0.5", ".5"),
        ("1e-3", "0.001"),
        ("0.000123456", "0.000123"),
        ("0010", "0010"),
    ],
)
def test_outputs_that_are_the_same(got: str, expected: str) -> None:
    assert same_output(got, expected)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("", "3"),
        ("3", ""),
        ("yes", "Yes"),
        ("1 2 3", "1\n2\n3"),
        ("1\n2", "2\n1"),
        ("1 2", "1"),
        ("12", "1 2"),
        ("0.99999", "1"),
        ("2000000", "2000001"),
        (f"{BIG + 1}", f"{BIG}"),
        (f"{BIG}.1", f"{BIG}"),
        ("1e400", "1e401"),
        ("nan", "0.5"),
        ("nan", "NaN"),
        ("inf", "1e400"),
        ("1_0", "10"),
        ("１", "1"),
        ("True", "1"),
        ("0x1", "1"),
        ("10", "0010"),
        ("7", "-07"),
        ("5", "+5"),
        ("0.5", "00.5"),
        ("0", "9.9e-7"),
        ("0", "."),
        ("-9e-7", "9e-7"),
        ("0.0", "0.0000004"),
    ],
)
def test_outputs_that_differ(got: str, expected: str) -> None:
    assert not same_output(got, expected)


def test_a_large_output_is_compared_in_time_linear_in_it() -> None:
    """The worst case: a hundred thousand numbers, each written in another way."""
    numbers = range(100_000)
    start = time.perf_counter()
    assert same_output("\n".join(f"{n}.0" for n in numbers), "\n".join(map(str, numbers)))
    assert not same_output("1" * 10**6, "2" * 10**6)
    assert not same_output("1e999999", "1")
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("[1, [2, null]]", "[1,[2,null]]"),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}'),
        ("1.0", "1"),
        ("1", "1.0"),
        ("true", "1"),
        ("0.30000000000000004", "0.3"),
        ("1" * 6000, "1" * 6000),
        ('"x"', '"x"'),
        ("[]", "[]"),
    ],
)
def test_results_that_are_the_same(got: str, expected: str) -> None:
    assert same_result(got, expected)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("", "1"),
        ("1", "2"),
        ('"1"', "1"),
        ("[1, 2]", "[2, 1]"),
        ("[1]", "1"),
        ("1", "[1]"),
        ("null", "0"),
        ("null", "false"),
        ("NaN", "NaN"),
        ("Infinity", "1e308"),
        ("0.31", "0.3"),
        (f"{BIG}", f"{BIG + 1}"),
        (f"{float(BIG)}", f"{BIG + 1}"),
        ('{"a": 1}', '{"a": 1, "b": 2}'),
        ("[" * 100_000, "[]"),
        ("no JSON", "1"),
    ],
)
def test_results_that_differ(got: str, expected: str) -> None:
    assert not same_result(got, expected)


def test_a_wrapped_result_may_come_without_its_list() -> None:
    assert same_result("5", "[5]", wrapped=True)
    assert same_result("[5]", "[5]", wrapped=True)
    assert not same_result("5", "[5, 6]", wrapped=True)
    assert not same_result("[[5]]", "[5]", wrapped=True)
