r"""Which answers say the same as a gold answer. Each row is (answer, gold)."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from oapl.errors import GradingError
from oapl.grading.math.verdicts import check_gold, grade_answer, plain_gold


def reward(answer: str, gold: str) -> float:
    return grade_answer(rf"The answer is \boxed{{{answer}}}.", gold).reward


def right(*rows: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("answer", "gold"), rows)


wrong = right
"""Rows of answers that are wrong, for the reader."""


# Numbers


@right(
    ("0.5", r"\frac{1}{2}"),
    (".5", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    ("-0.125", r"-\frac18"),
    (r"-\frac{1}{8}", r"\frac{-1}{8}"),
    ("0.50", "0.5"),
    (r"0.\overline{3}", r"\frac13"),
    (r"0.1\overline{6}", r"\frac16"),  # 0.1666… = 15/90
    (r"3 \times 10^5", "300000"),
    ("5!", "120"),
    (r"\binom{5}{2}", "10"),
    (r"\log_2 8", "3"),
    ("2(3)", "6"),
    (r"(2)(3)", "6"),
    ("-2^2", "-4"),
    ("2^{3^2}", "512"),
    ("2^-1", "0.5"),
    ("2^10", "1024"),
    ("|-5|", "5"),
    (r"\lfloor 2.7 \rfloor", "2"),
    (r"\gcd(12, 18)", "6"),
    (r"e^{i\pi}", "-1"),
    (r"\infty", r"+\infty"),
    ("2025", "2025.0"),
    ("6:4", "3:2"),
    ("1{:}2", "1:2"),
    (r"\arctan 2 + \arctan 3", r"\frac{3\pi}{4}"),
    (r"\sin 18^\circ", r"\frac{\sqrt5-1}{4}"),
    (r"\tan^{-1}(1)", r"\frac{\pi}{4}"),
)
def test_the_same_number_written_otherwise_is_right(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("0.333", r"\frac13"),
    ("0.3333333333333333", r"\frac13"),
    ("3.141592653589793", r"\pi"),
    ("22/7", r"\pi"),
    (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),  # both are 0 to a float
    ("0", r"\frac{1}{2004!}"),
    ("1", "1 + 10^{-50}"),
    (r"\sqrt{2} + 10^{-400}", r"\sqrt{2}"),
    ("262537412640768744", r"e^{\pi\sqrt{163}}"),  # 262537412640768743.99999999999925…
    ("9007199254740993", "9007199254740992"),  # the first two whole numbers that a float takes for one
    ("-5", "5"),
    (r"-\infty", r"\infty"),
    (r"\infty", "10^{100}"),
)
def test_a_number_that_is_only_near_is_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right((r"1\frac{4}{5}", "1.8"), ("1 4/5", r"\frac95"), (r"137 \frac{1}{2}", "137.5"), (r"-1\frac12", "-1.5"))
def test_a_mixed_number_is_a_sum(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong((r"1\frac{4}{5}", "0.8"), (r"2\frac{x}{3}", r"2 + \frac{x}{3}"))
def test_a_mixed_number_is_no_product_and_a_product_no_mixed_number(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    ("1,080", "1080"),
    ("1{,}080", "1080"),
    (r"1\,080", "1080"),
    (r"1,\!080", "1080"),
    ("1 080", "1080"),
    ("11111111100", r"11,\! 111,\! 111,\! 100"),
    ("1,234,567", "1234567"),
    (r"\frac{1,000}{3}", r"\frac{1000}{3}"),
)
def test_thousands_may_be_marked(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(("1, 80", "1080"), ("1,80", "1080"), ("1,080", "1, 80"), ("1, 080", "1,080"), ("(1,080)", "1080"), ("5 6", "56"))
def test_a_list_is_no_number_with_thousands(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"\sqrt2", r"\sqrt{2}"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}"),
    (r"\sqrt{2}\sqrt{3}", r"\sqrt6"),
    (r"\sqrt{5+2\sqrt6}", r"\sqrt2+\sqrt3"),
    (r"\sqrt[3]{8}", "2"),
    (r"\sqrt[3]{-8}", "-2"),
    (r"\frac{9 \sqrt{23}}{23}", r"\frac{9}{\sqrt{23}}"),
)
def test_surds_are_compared_by_value(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong((r"\sqrt3", r"\sqrt2"), ("1.41421356237309504880168872420969807856967187537694807317667973799", r"\sqrt2"))
def test_a_surd_is_none_of_its_decimals(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    ("1+2i", "2i+1"), (r"3\text{i}", "3i"), (r"\mathrm{e}^2", "e^2"), (r"\text{i}", "i"), ("i^2", "-1"), ("1/i", "-i")
)
def test_e_and_i_are_the_constants_upright_or_not(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


def test_conjugates_differ():
    assert reward("1-2i", "1+2i") == 0.0


# How it is set


@right(
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\tfrac12", r"\frac{1}{2}"),
    (r"\frac 59", r"\frac{5}{9}"),
    (r"\frac9{19}", r"\frac{9}{19}"),
    (r"\left( 3,\, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
    (r"\displaystyle \frac12", "0.5"),
    ("$5$", "5"),
    (r"\(5\)", "5"),
    ("5.", "5"),
    (r"\boxed{5}", "5"),
    (r"\mathbf{5}", "5"),
    ("2\u221a3", r"2\sqrt3"),
    ("\u22125", "-5"),
    (r"x\cdot y", "x \u00d7 y"),
)
def test_looks_do_not_matter(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


# Units


@right(
    (r"5 \text{ cm}", "5"),
    ("5 cm", "5"),
    (r"5\,\mathrm{cm}", "5"),
    ("18 dollars", "18"),
    (r"\$18", "18"),
    ("18 apples", "18"),
    (r"15\text{ cm}^2", r"15\mbox{ cm}^2"),
    ("15", r"15\mbox{ cm}^2"),
    (r"864 \text{ square inches}", r"864 \mbox{ inches}^2"),
    (r"32348", r"\$32,\!348"),
    ("5.4", r"5.4 \text{ cents}"),
    (r"36^\circ", "36"),
    ("36\u00b0", r"36^{\circ}"),
    (r"36\text{ degrees}", r"36^\circ"),
    (r"10\%", r"10\%"),
    ("10", r"10\%"),
    ("10 percent", r"10\%"),
    (r"10\%", "10"),
    (r"\text{5 cm}", "5"),
    (r"5 \text{ million}", "5000000"),
    (r"20^\circ \text{C}", "20"),
    (r"\$5 \text{ million}", "5000000"),
    (r"60\text{ km}/\text{h}", "60"),
)
def test_a_unit_may_be_left_out_or_added(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("5.4 dollars", r"5.4 \text{ cents}"),
    ("100 cm", r"100 \text{ m}"),
    (r"15\text{ cm}^3", r"15\mbox{ cm}^2"),
    ("0.1", r"10\%"),
    (r"10\%", "0.1"),
    (r"\frac{\pi}{5}", r"36^\circ"),
    ("5m", "5"),
    ("5", "5m"),
    ("5abc", "5"),
    (r"2\mathbf{v}", "2"),
    ("2", r"2\mathbf{v}"),
    (r"5 \text{ thousand}", "5"),
    (r"5 \text{ to } 6", "5"),
    (r"5 \text{ feet } 6 \text{ inches}", "5"),
    (r"10{:}30 \text{ a.m.}", r"10:30 \text{ p.m.}"),
)
def test_another_unit_and_a_converted_one_are_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


def test_degrees_within_a_function_are_degrees():
    assert reward(r"\sin 30^\circ", "0.5") == 1.0


# Names and equations


@right(
    ("x = 5", "5"),
    ("5", "x=5"),
    (r"\angle ABC = 30^\circ", "30"),
    ("AB = 5", "5"),
    (r"P(A) = \frac12", "0.5"),
    (r"\text{Area} = 5", "5"),
    ("x_1 = 3", "3"),
    ("x = 2 + 3 = 5", "5"),
    ("2 + 3 = 5", "5"),
    (r"\frac13 \approx 0.333", r"\frac13"),
    ("f(x) = 2x+3", "2x+3"),
    ("2x+3", "y = 2x + 3"),
)
def test_the_name_of_what_is_asked_may_stand_before_it(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("x = 5, y = 6", "5"),
    ("x=5", "y=5"),
    ("2 = 3", "3"),
    ("x = 5 = 6", "6"),
    ("x = 5 = 6", "5"),
    ("2x = 5", "5"),
    (r"x \ne 5", "5"),
    ("x > 5", "5"),
    (r"\frac13 \approx 0.333", "0.333"),
)
def test_what_says_more_or_something_else_is_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    ("2y = 4x", "y = 2x"),
    ("x = y/2", "y = 2x"),
    ("2x - y = 0", "y = 2x"),
    ("5x-7y+11z=-4", "5x - 7y + 11z + 4 = 0"),
    ("4 + 11z = 7y - 5x", "5x - 7y + 11z + 4 = 0"),
    ("x + y < 3", "2x + 2y < 6"),
    ("3 > x + y", "x + y < 3"),
)
def test_a_multiple_of_an_equation_is_that_equation(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("y = 2x + 1", "y = 2x + 3"),
    ("y = 3", "y = 2x + 3"),
    ("0 = 0", "y = 2x"),
    (r"y\infty = 2x", "y = 2x"),
    (r"5x - 7y\infty + 11z + 4 = 0", "5x - 7y + 11z + 4 = 0"),
    ("x = x", "y = 2x"),
    ("2x = 2x", "x + 1 = x + 1"),  # both sides' differences are zero
    ("x + y > 3", "x + y < 3"),
    ("-x - y < -3", "x + y < 3"),
    (r"x + y \le 3", "x + y < 3"),
)
def test_an_equation_is_compared_on_both_sides(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


# Expressions in variables


@right(
    ("(a+5)(b+2)", "ab+2a+5b+10"),
    ("q(-1)+p", "p - q"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"\frac{x^6-1}{x+1}", "x^5 - x^4 + x^3 - x^2 + x - 1"),
    (r"\sin^2 x + \cos^2 x", "1"),
    (r"\cot x", r"\frac{\cos x}{\sin x}"),
    (r"\cos x \cdot 2", r"2\cos x"),
    ("n(n+1)/2", r"\frac{n^2+n}{2}"),
    (r"2^{n+1}", r"2 \cdot 2^n"),
    ("|x-3|", "|3-x|"),
    (r"\ln(2x)", r"\ln 2x"),
    ("x_1+x_{2}", "x_2 + x_1"),
    (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
)
def test_expressions_are_compared_by_their_values(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("p + q", "p - q"),
    ("q - p", "p - q"),
    ("2k", "2m"),
    ("20 - x", "|x - 20|"),
    ("xy", r"\sqrt{x^2y^2}"),
    ("x", "X"),
    ("x^3", "x^2"),
    (r"\sqrt{x^2}", "x"),
    (r"\cos 2x", r"2 \cos x"),
    ("5x", "5"),
    ("1/2x", "x/2"),  # or 1/(2x): open, so it is not read
)
def test_expressions_that_differ_somewhere_are_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


# Several answers


@right(
    ("3, 1, 2", "1, 2, 3"),
    (r"\{3, 1, 2\}", "1, 2, 3"),
    ("1, 2, and 3", r"\{1,2,3\}"),
    (r"x=1 \text{ or } x=2", "1, 2"),
    ("x=2, x=1", "1, 2"),
    (r"\pm 2", "-2, 2"),
    (r"x = \pm 2", "2, -2"),
    (r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}"),
    (r"\frac{-1\pm\sqrt{17}}{2}", r"\frac{-1+\sqrt{17}}{2}, \frac{-1-\sqrt{17}}{2}"),
    (r"\{-2, 1-\sqrt5, 1+\sqrt5\}", r"\{1\pm\sqrt{5},-2\}"),
    ("(3,4), (1,2)", "(1,2), (3,4)"),
    (r"(1,2) \text{ or } (3,4)", "(1,2), (3,4)"),
    (r"\varnothing", r"\emptyset"),
    (r"\{\}", r"\emptyset"),
    (r"\{5\}", "5"),
)
def test_a_list_and_a_set_have_no_order(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(("1, 2, 3, 4", "1, 2, 3"), ("5, 6", "5"), ("5 or 6", "5"), ("5, 5", "5"), ("1, 2, 3", r"\pm 1"))
def test_a_superset_is_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@wrong(
    ("1, 2", "1, 2, 3"), ("2", r"\pm 2"), (r"1+\sqrt{19}", r"1 \pm \sqrt{19}"), ("2, 3", "2, 2, 3"), ("0", r"\emptyset")
)
def test_a_subset_is_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    ("(x,y) = (1,2)", "(1,2)"),
    ("x = 1, y = 2", "(1,2)"),
    (r"\langle 1, 2 \rangle", "(1,2)"),
    (r"\left(\frac15, -3.6\right)", r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}"),
    (r"\left[\begin{array}{cc} 1 & 0 \\ 0 & 1 \end{array}\right]", r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}"),
    (r"\begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix}", r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}"),
    ("(1, 200)", "(1,200)"),
)
def test_a_tuple_is_compared_in_order(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("(2,1)", "(1,2)"),
    ("x=1, y=2", "(2,1)"),
    ("y=1, x=2", "(1,2)"),
    ("(1,2,3)", "(1,2)"),
    (r"(1,2\text{ or })", "(1,2)"),
    ("1, 2", "(1,2)"),
    (r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"),
)
def test_swapped_coordinates_are_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    ("[-2,7]", r"x \in [-2,7]"),
    (r"-2 \le x \le 7", r"x \in [-2,7]"),
    (r"7 \ge x \ge -2", "[-2,7]"),
    ("x > 2", r"(2,\infty)"),
    (r"2 \leq x", r"[2, +\infty)"),
    (r"(9,36) \cup (0,9)", r"(0,9) \cup (9,36)"),
    (r"x < 2 \text{ or } x > 3", r"(-\infty,2) \cup (3,\infty)"),
)
def test_an_interval_may_be_an_inequality(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("(3,4)", "(3,4]"),
    ("[3,4]", "(3,4]"),
    ("x > 2", r"[2,\infty)"),
    ("x < 2", r"(2,\infty)"),
    ("x > 2", r"y > 2"),
    ("(0,9)", r"(0,9) \cup (9,36)"),
    (r"(0,9) \cup (9,36) \cup (40,41)", r"(0,9) \cup (9,36)"),
)
def test_an_interval_has_its_ends(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


# Words, and digits in a base


@right(
    (r"\text{evelyn}", r"\text{Evelyn}"),
    ("Evelyn.", r"\text{Evelyn}"),
    ("EAST", r"\text{east}"),
    (r"\text{an ellipse}", r"\text{ellipse}"),
    ("A", r"\text{(A)}"),
    ("(A)", "A"),
    (r"\textbf{(E)}", r"\text{(E)}"),
    ("B)", "B"),
    (r"\text{e}", r"\text{(E)}"),
    ("no solution", r"\text{No solution}"),
)
def test_words_are_compared_without_case_and_brackets(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(("B", r"\text{(A)}"), (r"\text{not even}", r"\text{even}"), ("tsae", "east"), ("A and B", "A"), ("5", "A"))
def test_other_words_are_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


def test_digits_in_a_base_need_that_base():
    assert reward("2516_{8}", "2516_8") == 1.0
    assert reward("70_{10}", "70") == 1.0
    # 2516 in base 8 is 2·512 + 5·64 + 1·8 + 6 = 1358: the number that the problem itself may name.
    assert [reward(answer, "2516_8") for answer in ("1358", "2516", "2516_9", "2561_8", "251 6_8")] == [0.0] * 5


# What an attacker found


@wrong(
    ("1", r"2^{\gcd(m,n)}-1"),
    ("1", r"\gcd(a,b)"),
    ("1", r"\gcd(n,6)"),
    ("mn", r"\text{lcm}(m,n)"),
    (r"x^{\gcd(m,n)}-1", "x-1"),
    (r"\gcd(n,7)", r"\gcd(n,1001)"),
    ("n", r"\gcd(n,6)"),
)
def test_divisors_of_variables_are_no_polynomials(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"\gcd(n,m)", r"\gcd(m,n)"),
    (r"2\gcd(m,n)", r"\gcd(2m,2n)"),
    (r"\operatorname{lcm}(m,n)", r"\text{lcm}(n,m)"),
)
def test_divisors_are_compared_at_whole_numbers(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    (r"\lfloor n/2 \rfloor + 1", r"\lceil n/2 \rceil"),
    (r"\lfloor n/3 \rfloor", r"\lceil n/3\rceil -1"),
    (r"\lceil n^2/4\rceil-1", r"\lfloor n^2/4\rfloor"),
    ("-1", r"\lfloor x\rfloor+\lfloor -x\rfloor"),
    ("x", r"\lfloor x\rfloor"),
    (r"\lfloor 2x\rfloor", r"2\lfloor x\rfloor"),
    ("0", r"\lfloor n/1000\rfloor"),
)
def test_floors_that_differ_at_some_whole_number_are_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"\lfloor (n+1)/2\rfloor", r"\lceil n/2\rceil"),
    (r"\lfloor n^2/4\rfloor", r"\lfloor n/2\rfloor\lceil n/2\rceil"),
    (r"\lfloor x+1\rfloor", r"\lfloor x\rfloor+1"),
    (r"\binom{n}{\lfloor n/2\rfloor}", r"\binom{n}{\lceil n/2\rceil}"),
)
def test_floors_of_a_whole_number_are_compared_at_whole_numbers(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("2024-x", "|x-2024|"),
    ("1000", r"\max(x,1000)"),
    ("|2x-3000|", "|x-1000|+|x-2000|"),
    ("10^{200}-x", "|x-10^{200}|"),
    ("2024-x", r"\sqrt{(x-2024)^2}"),
    ("e^{10}-x", "|x-e^{10}|"),
    ("1000-xy", "|xy-1000|"),
    ("10", r"\min(x,10)"),
)
def test_expressions_are_compared_past_the_numbers_in_them(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    ("4^{2^{n-1}}", "2^{2^n}"),
    (r"2\cdot2^{n!}", "2^{n!+1}"),
)
def test_points_whose_values_are_too_large_are_left_out(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    (r"2^{2^x}-2^{2^{x-1}\cdot 2}+2024-x", "|x-2024|"),
)
def test_an_answer_without_a_value_where_the_gold_has_one_is_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@wrong(
    (r"2:15 \text{ p.m.}", r"4:30 \text{ p.m.}"),
    (r"1:10 \text{ PM}", r"2:20 \text{ PM}"),
    ("430", r"4:30 \text{ PM}"),
    ("4 PM", "4:30 PM"),
    ("0.5", r"10:20 \text{ a.m.}"),
    ("4:00 AM", "4:00 PM"),
    ("3:00", "3"),
)
def test_another_time_is_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    ("4:30", "4:30 PM"),
    (r"4:00 \text{ PM}", r"4:00 \text{ p.m.}"),
    ("10:00", r"10:00 \text{ a.m.}"),
    ("4 PM", "4:00 PM"),
    ("4", r"4 \text{ p.m.}"),
    ("8:05", "8:05"),
)
def test_a_time_of_the_day_is_no_ratio(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    (r"\{1,3\},\{2,4\}", r"\{1,2\},\{3,4\}"),
    (r"\{1,2,3\}", r"\{1,2\},\{3\}"),
    (r"\{\emptyset\}", r"\emptyset"),
    (r"\{\{1\}\}", r"\{1\}"),
    (r"\{\{1\},\{2\}\}", r"\{1,2\}"),
    (r"(\{1\},2)", "(1,2)"),
)
def test_sets_within_sets_stay_sets(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"\{3,4\},\{2,1\}", r"\{1,2\},\{3,4\}"),
    (r"\{\{1,2\},\{3\}\}", r"\{1,2\},\{3\}"),
    (r"\{1,2\}\cup\{3\}", r"\{1,2,3\}"),
)
def test_sets_of_sets_have_no_order(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    (r"2\pi\mathrm{r}", r"2\pi"),
    (r"2\pi\mathrm{R}", r"2\pi\mathrm{r}"),
    (r"3\mathrm{a}^2", r"3\mathrm{b}^2"),
    (r"\frac34\mathrm{R}", r"\frac34"),
    (r"\text{X}", "x"),
    (r"\text{E}", "e"),
    (r"\text{I}", "i"),
)
def test_an_upright_letter_is_no_unit(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"5\mathrm{x}", "5x"),
    (r"\pi r^2", r"\pi\mathrm{r}^2"),
    (r"3\text{ m}", "3"),
    (r"20^\circ\text{C}", "20"),
    ("50°F", "50"),
)
def test_an_upright_letter_is_that_letter(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    (r"5 \text{ or 6}", "5"),
    (r"5 \text{ and also 7}", "5"),
    (r"5 \text{ if n is even, 6 if n is odd}", "5"),
    (r"5 \text{ is not the answer}", "5"),
    (r"5 \text{ and a half}", "5"),
    (r"5 \text{ tenths}", "5"),
    (r"5 \text{ factorial}", "5"),
    (r"5 \text{ or more}", "5"),
    (r"5 \text{ or so}", "5"),
    (r"5 \text{ minus 1}", "5"),
    (r"5\text{ halves}", "5"),
    (r"5 \text{ six}", "5"),
    (r"5 \text{ squared}", "5"),
    (r"5 \text{ cm 6}", "5"),
    ("5 factorial", "5"),
    ("5 dollars and 50 cents", "5"),
    (r"123 \text{ (base 5)}", "123"),
    (r"p \text{ prime}", "p"),
    (r"n \text{ even}", "n"),
)
def test_words_that_change_a_value_are_no_unit(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"5 \text{ years old}", "5"),
    (r"5 \text{ positive integers}", "5"),
    (r"5\text{ units}^2", "5"),
    (r"5 \text{ square units}", "5"),
    (r"\text{7 ways}", "7"),
    ("7 ways", "7"),
    ("90 eggs", "90"),
    (r"7^{\text{th}}", "7"),
    (r"\text{\$}12", "12"),
)
def test_words_that_are_like_a_unit_are_not_compared(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    (r"5 \text{ km/h}", r"5 \text{ m/s}"),
    (r"60 \text{ mph}", r"60 \text{ km/h}"),
    (r"5 \text{ km}", r"5 \text{ km/h}"),
    (r"5 \text{ m/s^2}", r"5 \text{ m/s}"),
)
def test_compound_units_are_compared(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"60\text{ km/h}", r"60 \text{ kilometers per hour}"),
    ("60 mph", r"60 \text{ miles per hour}"),
    ("60", r"60 \text{ miles per hour}"),
    (r"9.8 \text{ m/s}^2", r"9.8 \text{ m/s^2}"),
    (r"5 \frac{\text{m}}{\text{s}}", r"5 \text{ m/s}"),
    ("90", r"90 \text{ min}"),
    ("30 sec", r"30 \text{ sec}"),
    ("90 m", r"90\text{ m}"),
)
def test_compound_units_may_be_written_otherwise(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("(y,x)=(2,3)", "(2,3)"),
    ("(b,a)=(3,2)", "(a,b)=(3,2)"),
    ("y=2, x=1", "(2,1)"),
    ("x=y=5", "5"),
    ("k=2,m=1", "(1,2)"),
    ("A(2,-3)", "(-3,2)"),
)
def test_names_say_which_coordinate_is_which(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    ("(b,a)=(3,2)", "(a,b)=(2,3)"),
    ("y=2, x=1", "(1,2)"),
    ("(1,2)", "x=1, y=2"),
    ("(x,y)=(1,2)", "x=1, y=2"),
    ("(2,2,2)", "x=y=z=2"),
    ("x=y=5", "(5,5)"),
    ("x_1=3, x_2=2", "2, 3"),
    ("A(2,-3)", "(2,-3)"),
    (r"(r,\theta)=(3,2)", "(3,2)"),
    ("(m,b)=(2,3)", "(2,3)"),
)
def test_named_coordinates_may_come_in_any_order(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("1", "xy=1"),
    ("6", "xy = 6"),
    ("6", "mn = 6"),
    ("6", "p(q+1)=6"),
    ("6", "A(B+C)=6"),
    ("6", r"\alpha\beta = 6"),
    ("6", "x(x+1)=6"),
    ("2", "n(n-1)=2"),
    ("f=5", "f(2)=10"),
    ("42", "m+n=42"),
)
def test_a_product_is_no_name(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    ("m+n=42", "42"),
    ("100a+10b+c=42", "42"),
    (r"\frac{m}{n}=\frac34", r"\frac34"),
    (r"\tan\theta=2", "2"),
    ("|S|=42", "42"),
    ("[ABC]=42", "42"),
    ("f^{-1}(2)=5", "5"),
    ("AB^2=42", "42"),
    (r"P(X=2)=\frac12", r"\frac12"),
    ("E[X]=5", "5"),
    (r"|\vec{a}|=5", "5"),
    ("a(n)=2^n", "2^n"),
    ("x(t)=2t", "2t"),
    ("=5", "5"),
)
def test_an_equation_may_say_what_is_asked(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("2x=5", "5"),
    ("x+3=5", "5"),
    ("x^2=5", "5"),
    ("|x|=5", "5"),
    ("2A=10", "10"),
)
def test_an_equation_in_one_variable_says_no_value(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@wrong(
    (r"\infty+5", r"\infty"),
    (r"2\infty", r"\infty"),
    (r"\infty/2", r"\infty"),
    (r"(2\infty, 3)", r"(\infty,3)"),
)
def test_infinity_is_not_computed_with(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@wrong(
    (r"\frac{1}{2}{3}", r"\frac32"),
    ("1/2/3", r"\frac16"),
    (r"\frac{1}{2}3", r"\frac32"),
    ("2 3", "6"),
    ("x2", "2x"),
    ("2^33", "24"),
)
def test_what_could_mean_two_things_is_not_read(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"\frac{10!}{3!3!2!2!}", "25200"),
    (r"\frac{8!}{4!4!}", "70"),
    ("2^{3}3^{2}", "72"),
    ("2^{10}5^{10}", "10^{10}"),
    (r"\sqrt2\,3", r"3\sqrt2"),
    ("(3)5", "15"),
    ("2^n n!", r"n!\,2^n"),
)
def test_digits_may_follow_a_factor_that_has_ended(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@right(
    (r"\textbf{(B) } 12", r"\text{(B)}"),
    (r"\textbf{(B) } 12", "12"),
    (r"\text{(D)}\ \frac34", r"\frac34"),
    (r"\text{C. }12", "C"),
    (r"\text{C. }12", "12"),
    (r"(A)\ 5", "A"),
    (r"(A)\ 5", "5"),
)
def test_a_choice_may_come_with_its_value(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    (r"\text{(B) }12", r"\text{(A)}"),
    (r"\textbf{(B) }12", "13"),
    (r"\text{(B) }12", r"\text{(B) }13"),
    ("(B) 12", "12B"),
)
def test_another_choice_or_another_value_beside_it_is_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"\,58,500", "58500"),
    (r"\$\,58,500", "58500"),
    (r"x=\,1,234", "1234"),
)
def test_thousands_may_follow_a_space(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@right(
    (r"2^n-1 \text{ for } n\ge1", "2^n-1"),
    (r"f(x)=x^2 \text{ for all } x", "x^2"),
    (r"k\pi, k\in\mathbb{Z}", r"k\pi"),
    (r"k\pi", r"k\pi, k\in\mathbb{Z}"),
)
def test_a_formula_may_say_for_which_values_it_holds(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    (r"2^n-1 \text{ for } n\ge1", "2^n"),
    (r"5 \text{ for } n=6", "5"),
    (r"2^n \text{ for even } n", "2^n"),
)
def test_one_case_of_several_is_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"x\ge1 \text{ and } x\le3", "[1,3]"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"\text{all real numbers}", r"(-\infty,\infty)"),
)
def test_intervals_may_be_said_in_words(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    (r"x>2 \text{ and } x<3", r"(-\infty,3)\cup(2,\infty)"),
    (r"x\ge 3 \text{ and } x \le 1", "[1,3]"),
)
def test_both_bounds_are_not_either(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"{5 \choose 2}", "10"),
    (r"{1 \over 2}", "0.5"),
    (r"\nicefrac{1}{2}", "0.5"),
    (r"\underline{5}", "5"),
    (r"\large 5", "5"),
    (r"\textcolor{red}{5}", "5"),
    (r"\mathtt{5}", "5"),
    (r"\emph{5}", "5"),
    ("**42**", "42"),
    ("x**2", "x^2"),
    ("¼", "0.25"),
    ("1.5e3", "1500"),
    (r"\max\{2,3\}", "3"),
    (r"\begin{pmatrix}1\\[4pt]2\end{pmatrix}", "(1,2)"),
    (r"\text{x = 5}", "5"),
    (r"\text{(3, 4)}", "(3,4)"),
)
def test_more_commands_are_read(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@right(
    (r"\text{Bob and Alice}", r"\text{Alice and Bob}"),
    ("A, C", r"\text{A and C}"),
    (r"\text{no solutions}", r"\text{no solution}"),
    (r"(\pm1,\pm2)", "(1,2),(1,-2),(-1,2),(-1,-2)"),
)
def test_names_in_a_list_have_no_order(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("Alice", r"\text{Alice and Bob}"),
    ("A, B", r"\text{A and C}"),
    (r"(\pm1,\pm2)", "(1,2),(-1,-2)"),
)
def test_other_names_and_signs_are_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@wrong(
    (r"\text{-}5", "5"),
    (r"5\text{!}", "5"),
    (r"x\text{+}y", "xy"),
    (r"2\text{/}x", "2x"),
    (r"\text{>}5", "5"),
    (r"5\text{?}", "5"),
)
def test_signs_in_a_text_are_not_left_out(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"\text{-}5", "-5"), (r"5\text{!}", "120"), (r"1\text{, }2", "1,2"), (r"1\text{ \& }2", "1,2"), (r"5\text{.}", "5")
)
def test_signs_in_a_text_are_those_signs(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    (r"(A)\ 5, (B)\ 6", "A"),
    (r"\text{(A) }\text{(B)}", "A"),
    (r"\text{(A) 5 or (B) 6}", "A"),
    (r"\text{(C) } D", "C"),
    (r"\text{(C) or (D)}", "C"),
    (r"\text{(C) }12 \text{ or D}", "C"),
)
def test_two_choices_are_none(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"\text{A)}", "A"),
    (r"\text{A) }5", "A"),
    ("A. 5", "A"),
    ("A. 5", "5"),
    (r"\text{(B) 12.}", "12"),
    (r"\text{Choice A}", "A"),
    (r"\text{Option (C)}", r"\text{(C)}"),
    (r"\textbf{(C) }\text{an ellipse}", "C"),
    (r"\textbf{(B) } 12\text{ and }13", "B"),
)
def test_a_choice_may_be_written_in_more_ways(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(
    ("1, 2, 3, ...", "1, 2, 3"),
    ("1, 2, 3…", "1, 2, 3"),
    ("3.14...", "3.14"),
    ("0.333...", "0.333"),
)
def test_what_goes_on_is_not_what_ends(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@wrong(
    (r"5\text{ sixteenths}", "5"),
    (r"5\text{ fortytwo}", "5"),
    (r"5\text{ eighty-two}", "5"),
    (r"5\text{ twentieths}", "5"),
    (r"5\text{ tens}", "5"),
    (r"2\mathrm{AB}", "2"),
    (r"2\text{ xy}", "2"),
    (r"5\mathrm{M}", "5"),
    (r"\pi\mathrm{S}", r"\pi"),
)
def test_numbers_in_words_and_upright_letters_are_no_units(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"5\text{ L}", r"5\text{ liters}"),
    (r"5\text{ of them}", "5"),
    (r"5\text{ parties}", "5"),
    (r"36\degree", "36"),
    (r"36^{\degree}", "36"),
    (r"36{}^\circ", "36"),
    (r"\sin 30\degree", "0.5"),
    ("5^{th}", "5"),
    ("€1,000", "1000"),
    (r"\pounds 5", r"5\text{ pounds}"),
    ("5¢", r"5\text{ cents}"),
)
def test_more_units_are_read(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(("€5", r"\$5"), (r"\$5 €", "5"), ("5¢", r"\$5"))
def test_another_currency_is_wrong(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@wrong(
    (r"\tanh(1000)", "1"),  # 1 - 2e^{-2000}
    (r"\cosh(2900)", r"\sinh(2900)"),  # their difference is e^{-2900}
    (r"\cos(e^{-500})", "1"),
    (r"\sqrt{1+e^{-1500}}", "1"),
)
def test_exponentials_are_told_apart_however_small_the_difference(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"10\;000", "10000"),
    (r"10\text{,}000", "10000"),
    (r"0.\bar3", r"\frac13"),
    (r"0.1\dot{6}", r"\frac16"),
    ("(2516)_8", "2516_8"),
    ("DEF_{16}", "(DEF)_{16}"),
    (r"(0,1) \bigcup (2,3)", r"(0,1) \cup (2,3)"),
    (r"k\pi, k\in\mathbb Z", r"k\pi"),
)
def test_more_ways_to_write_a_number_or_a_set_are_read(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong((r"0.\bar35", r"\frac13"), (r"0.\dot1\dot2", r"\frac19"), ("EDF_{16}", "DEF_{16}"), ("(2516)_8", "2516"))
def test_other_digits_are_another_number(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


@right(
    (r"e = \frac12", "0.5"),  # of an ellipse
    ("i = 5", "5"),
    (r"\det A = 5", "5"),
    (r"\det(A) = 5", "5"),
    (r"\deg f = 5", "5"),
    (r"\Pr(A) = \frac12", "0.5"),
    (r"\sin\angle ABC = \frac12", "0.5"),
)
def test_more_names_may_stand_before_the_value(answer: str, gold: str):
    assert reward(answer, gold) == 1.0


@wrong(("e = 2.718281828", "e"), ("i = -1", "i"), (r"\sin\angle ABC = 30", r"\angle ABC = 30"))
def test_a_name_does_not_make_a_value_right(answer: str, gold: str):
    assert reward(answer, gold) == 0.0


def test_a_space_cut_off_at_the_end_does_not_matter():
    assert grade_answer(r"\boxed{42\ }", "42").reward == 1.0


@wrong((r"\arcsin(\sin(10^{200}))", "5"), (r"\lfloor 10^{300}\pi" * 10 + r"\rfloor" * 10, "5"))
def test_what_sympy_cannot_compute_is_wrong_and_says_so(answer: str, gold: str):
    verdict = grade_answer(rf"\boxed{{{answer}}}", gold)
    assert verdict.reward == 0.0
    assert "not understood" in verdict.reason
    with pytest.raises(GradingError, match="gold answer"):
        check_gold(answer)


# Nonsense


@wrong(
    *(
        (answer, "5")
        for answer in (
            "5+",
            "5)",
            "((5)",
            "{5",
            "5^",
            "5_2",
            "1/0",
            "0/0",
            r"\frac{5}{}",
            r"\foo",
            "#",
            "~",
            "''",
            ".",
            ".+5",
            r"5 \approx",
        )
    )
)
def test_what_cannot_be_read_is_wrong_and_says_so(answer: str, gold: str):
    verdict = grade_answer(rf"\boxed{{{answer}}}", gold)
    assert verdict.reward == 0.0
    assert "no answer" in verdict.reason or "not understood" in verdict.reason or "not equal" in verdict.reason


# What a verdict says, and golds


def test_a_verdict_tells_the_answer_and_why():
    verdict = grade_answer(r"<think>\boxed{1}</think>\boxed{0.75}", r"\frac34")
    assert (verdict.reward, verdict.answer, verdict.reason) == (1.0, "0.75", r"equal to \frac34")
    verdict = grade_answer(r"\boxed{0.7}", r"\frac34")
    assert (verdict.reward, verdict.answer, verdict.reason) == (0.0, "0.7", r"not equal to \frac34")
    verdict = grade_answer("3/4", r"\frac34")
    assert (verdict.reward, verdict.answer) == (0.0, None)
    assert "no box" in verdict.reason
    assert grade_answer(r"\boxed{0.75}", r"\frac34", answer_after="</think>").reward == 0.0


def test_a_gold_answer_may_come_with_its_solution():
    gold = "He has 3 * 360 = <<3*360=1080>>1080 left.\n#### 1,080"
    assert plain_gold(gold) == "1,080"
    assert reward("1080", gold) == 1.0
    assert reward("360", gold) == 0.0
    assert reward("5", r"so that \boxed{5}") == 1.0


@pytest.mark.parametrize("gold", ["", "  ", "#### ", r"\boxed{}", r"\foo{5}", "5 +", "1/0", "3 = 4", "x" * 5_000])
def test_a_gold_answer_that_is_not_understood_is_an_error_of_the_problem(gold: str):
    with pytest.raises(GradingError, match="gold answer"):
        check_gold(gold)
    with pytest.raises(GradingError, match="gold answer"):
        grade_answer(r"\boxed{5}", gold)


def test_a_large_factorial_is_exact():
    assert reward(str(math.factorial(100)), "100!") == 1.0
    assert reward(str(math.factorial(100) + 1), "100!") == 0.0


# The documentation

TABLE = (Path(__file__).parents[2] / "docs" / "grading_math.md").read_text().partition("## What is the same")[2]


@pytest.mark.parametrize("row", re.findall(r"^\|(.*\|.*`.*)\|$", TABLE.partition("Choices that")[0], re.MULTILINE))
def test_the_examples_of_the_documentation_hold(row: str):
    _, gold, accepted, rejected = (re.findall("`([^`]+)`", cell) for cell in row.split("|"))
    assert [reward(answer, gold[0]) for answer in accepted] == [1.0] * len(accepted)
    assert [reward(answer, gold[0]) for answer in rejected] == [0.0] * len(rejected)
