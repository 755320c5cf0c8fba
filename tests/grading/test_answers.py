r"""Which text of a completion is its answer."""

from __future__ import annotations

import pytest

from oapl.grading.math.answers import LONGEST_ANSWER, SEARCHED, final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so it is \boxed{5}.", "5"),
        (r"\boxed{4} was wrong, rather \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed 5", "5"),
        (r"$\boxed 17$", "17"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{1 + \fbox{2}}", r"1 + \fbox{2}"),
        (r"an old \boxed{ that was never closed, then \boxed{5}", "5"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed{x \\ y}", r"x \\ y"),
        (r"\boxed{5} } }", "5"),
    ],
)
def test_the_last_box_holds_the_answer(text: str, answer: str):
    assert final_answer(text).answer == answer


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("the answer is 5", "no box"),
        ("", "no box"),
        (r"\boxedness{5}", "no box"),
        (r"\boxed{5} and \boxed{}", "the last box is empty"),
        (r"\boxed{5} and \boxed{  }", "the last box is empty"),
        (r"\boxed{5} and \boxed", "the last box is empty"),
        (r"\boxed{5} and \boxed{\frac{1}{2}", "the last box is not closed"),
    ],
)
def test_a_last_box_without_content_is_no_answer_whatever_came_before(text: str, reason: str):
    found = final_answer(text)
    assert found.answer is None
    assert reason in found.reason


def test_a_box_within_the_thinking_does_not_count():
    assert final_answer(r"<think>\boxed{4}</think> It is \boxed{5}").answer == "5"
    assert final_answer(r"<think>\boxed{4}</think> It is five.").answer is None
    assert final_answer(r"\boxed{4}</think> It is five.").answer is None  # the prompt opened the thinking
    assert final_answer(r"<think>a</think>\boxed{4}<think>b</think>\boxed{5}").answer == "5"


def test_a_thinking_that_never_ends_has_no_answer():
    found = final_answer(r"<think> perhaps \boxed{5}")
    assert found.answer is None
    assert "the thinking never ends" in found.reason
    assert final_answer(r"<think>a</think> \boxed{4} <think> or \boxed{5}").answer is None


def test_a_model_that_begins_in_its_thinking_answers_after_it_alone():
    assert final_answer(r"perhaps \boxed{4} </think> \boxed{5}", answer_after="</think>").answer == "5"
    found = final_answer(r"perhaps \boxed{5}", answer_after="</think>")
    assert found.answer is None
    assert "never reaches '</think>'" in found.reason
    assert final_answer(r"\boxed{4} FINAL: \boxed{5}", answer_after="FINAL:").answer == "5"


def test_what_is_looked_at_is_bounded():
    assert final_answer(r"\boxed{" + "5" * LONGEST_ANSWER + "}").answer == "5" * LONGEST_ANSWER
    found = final_answer(r"\boxed{" + "5" * (LONGEST_ANSWER + 1) + "}")
    assert found.answer is None
    assert "2,001 characters" in found.reason
    assert final_answer("x" * 10_000_000 + r"\boxed{5}").answer == "5"
    assert final_answer(r"\boxed{5}" + "x" * SEARCHED).answer is None


def test_an_answer_can_be_stored_whatever_bytes_it_came_from():
    answer = final_answer("\\boxed{5\ud800\x00}").answer
    assert answer is not None
    assert answer.encode("utf-8") == b"5?\x00"
