"""Whether an answer is the one asked for, part by part."""

from __future__ import annotations

import re
from collections.abc import Sequence

import sympy

from oapl.grading.math.equality import are_equal, are_proportional
from oapl.grading.math.expressions import read_expression
from oapl.grading.math.latex import Unreadable, tokenize
from oapl.grading.math.reading import Answer, Group, Matrix, Named, Numeral, Relation, Value, Words


def is_same(gold: Answer, answer: Answer) -> bool:
    """Whether `answer` says what `gold` says: no more, no less, and in the form that was asked for."""
    if isinstance(gold, Words) or isinstance(answer, Words):
        return _plain_words(gold) == _plain_words(answer) is not None
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _same_relation(gold, answer)
    if isinstance(gold, Named) and isinstance(answer, Named):
        if gold.name == answer.name:
            return is_same(gold.answer, answer.answer)
        return _same_relation(gold, answer)
    if isinstance(gold, Named) or isinstance(answer, Named):
        return is_same(_unnamed(gold), _unnamed(answer))
    if isinstance(gold, Group) or isinstance(answer, Group):
        return _same_group(_as_group(gold), _as_group(answer))
    match gold, answer:
        case Value(), Value():
            if gold.unit and answer.unit and gold.unit != answer.unit:
                return False
            return are_equal(gold.expression, answer.expression)
        case Matrix(), Matrix():
            return (
                _same_in_order(gold.rows[0], answer.rows[0])
                and len(gold.rows) == len(answer.rows)
                and all(_same_in_order(row, other) for row, other in zip(gold.rows, answer.rows, strict=True))
            )
        case Numeral(), Numeral():
            return gold == answer
    return False


def _unnamed(answer: Answer) -> Answer:
    return answer.answer if isinstance(answer, Named) else answer


def _plain_words(answer: Answer) -> str | None:
    """Words without what does not matter. A letter may be a choice, so it counts as a word."""
    answer = _unnamed(answer)
    if isinstance(answer, Value) and (answer.expression.is_Symbol or answer.expression in (sympy.E, sympy.I)):
        text = str(answer.expression)
    elif isinstance(answer, Words):
        text = answer.text
    else:
        return None
    text = " ".join(text.casefold().split()).rstrip(".")
    bracketed = re.fullmatch(r"\((.*)\)", text)
    return re.sub(r"^(?:an?|the) (?=.)", "", bracketed.group(1) if bracketed else text)


def _same_relation(gold: Answer, answer: Answer) -> bool:
    """Equations are the same where one is a multiple of the other; inequalities, where it is a positive one."""
    one, other = _as_relation(gold), _as_relation(answer)
    if one is None or other is None or one.sign != other.sign:
        return False
    return are_proportional(one.difference, other.difference, positively=one.sign not in ("=", r"\ne"))


def _as_relation(answer: Answer) -> Relation | None:
    if isinstance(answer, Named) and isinstance(answer.answer, Value):
        try:
            return Relation("=", read_expression(tokenize(answer.name)) - answer.answer.expression)
        except Unreadable:  # a name that is no variable, such as \angle ABC
            return None
    return answer if isinstance(answer, Relation) else None


def _as_group(answer: Answer) -> Group:
    return answer if isinstance(answer, Group) else Group("{}", (answer,))


def _same_group(gold: Group, answer: Group) -> bool:
    if gold.brackets == "{}" == answer.brackets:
        names = _names(gold), _names(answer)
        if all(names) or not any(names):
            return _same_in_any_order(gold.items, answer.items)
        if len(set(names[0] or names[1])) == 1:  # x = 1 or x = 2
            return _same_in_any_order(gold.items, answer.items)
        return _in_order(names[0] or names[1]) and _same_in_order(gold.items, answer.items)  # x = 1, y = 2
    if gold.brackets == "()" and answer.brackets == "{}" and _names(answer):  # the point (1, 2), as x = 1, y = 2
        return _in_order(_names(answer)) and _same_in_order(gold.items, answer.items)
    return gold.brackets == answer.brackets and _same_in_order(gold.items, answer.items)


def _names(group: Group) -> list[str]:
    """The items' names, where each has one."""
    names = [item.name for item in group.items if isinstance(item, Named)]
    return names if len(names) == len(group.items) else []


def _in_order(names: list[str]) -> bool:
    """Whether names say by themselves which comes first."""
    return names == sorted(set(names))


def _same_in_order(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
    return len(gold) == len(answer) and all(map(is_same, gold, answer))


def _same_in_any_order(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
    """As many, and each once. Being the same is an equivalence, so whichever partner is taken will do."""
    left = list(answer)
    for item in gold:
        partner = next((place for place, other in enumerate(left) if is_same(item, other)), None)
        if partner is None:
            return False
        left.pop(partner)
    return not left
