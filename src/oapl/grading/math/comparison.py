"""Whether an answer is the one asked for, part by part."""

from __future__ import annotations

import re
from collections.abc import Sequence

import sympy

from oapl.grading.math.equality import are_equal, are_proportional
from oapl.grading.math.expressions import read_expression
from oapl.grading.math.latex import Unreadable, tokenize
from oapl.grading.math.reading import (
    Answer,
    Choice,
    Clock,
    Group,
    Matrix,
    Named,
    Numeral,
    Relation,
    Value,
    Words,
    in_order,
)


def is_same(gold: Answer, answer: Answer) -> bool:
    """Whether `answer` says what `gold` says: no more, no less, and in the form that was asked for."""
    if isinstance(gold, Choice) or isinstance(answer, Choice):
        return _same_choice(gold, answer)
    if isinstance(gold, Words) or isinstance(answer, Words):
        return _same_words(gold, answer)
    if isinstance(answer, Relation) and answer.stated and isinstance(gold, Value) and gold.expression.is_number:
        return is_same(gold, answer.stated)
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
            if gold.unit and len(gold.unit) == 1 and not answer.unit and answer.expression.has(sympy.Symbol(gold.unit)):
                return are_equal(gold.expression * sympy.Symbol(gold.unit), answer.expression)  # 90 m
            return are_equal(gold.expression, answer.expression)
        case (Clock(), _) | (_, Clock()):
            return _same_time(gold, answer)
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


def _same_choice(gold: Answer, answer: Answer) -> bool:
    """A letter with its answer says both. Beside one that has but one of them, that one counts."""
    if isinstance(gold, Choice) and isinstance(answer, Choice):
        return gold.letter == answer.letter and is_same(gold.answer, answer.answer)
    choice, other = (gold, answer) if isinstance(gold, Choice) else (answer, gold)
    assert isinstance(choice, Choice)
    if (words := _plain_words(other)) is not None and len(words) == 1:
        return words == choice.letter.casefold()
    return is_same(other, choice.answer)


def _same_time(gold: Answer, answer: Answer) -> bool:
    """With a.m. or p.m. left out, at most. `4:30` is read as a ratio, and the `4` of 4 p.m. as a number."""
    if isinstance(gold, Clock) and isinstance(answer, Clock):
        same_half = gold.half == answer.half or None in (gold.half, answer.half)
        return same_half and (gold.hour, gold.minute) == (answer.hour, answer.minute)
    clock, other = (gold, answer) if isinstance(gold, Clock) else (answer, gold)
    if not (isinstance(clock, Clock) and isinstance(other, Value)) or (
        clock.half is None and other.expression.is_Integer
    ):
        return False
    return other.time == (clock.hour, clock.minute)


def _plain_words(answer: Answer) -> str | None:
    """Words without what does not matter. A letter may be a choice, so it counts as a word."""
    answer = _unnamed(answer)
    if isinstance(answer, Value) and (answer.expression.is_Symbol or answer.expression in (sympy.E, sympy.I)):
        text = _letter(answer.expression)
    elif isinstance(answer, Words):
        text = answer.text
    else:
        return None
    text = " ".join(text.casefold().split()).rstrip(".")
    text = re.sub(r"^(?:choice|option) (?=\W?\w\W?$)", "", text)
    bracketed = re.fullmatch(r"\((.*)\)|([a-z])\)", text)
    text = re.sub(r"^(?:an?|the) (?=.)", "", bracketed.group(1) or bracketed.group(2) or "" if bracketed else text)
    return text.removesuffix("s") if text.startswith("no ") else text


def _letter(value: sympy.Expr) -> str:
    """sympy writes its constants as `E` and `I`."""
    constants = {sympy.E: "e", sympy.I: "i"}
    return constants.get(value, str(value))


def _same_words(gold: Answer, answer: Answer) -> bool:
    """A letter in mathematics is a variable or a choice: beside an upright one without brackets, its case counts."""
    if _plain_words(gold) is None or _plain_words(gold) != _plain_words(answer):
        return False
    gold, answer = _unnamed(gold), _unnamed(answer)
    words, other = (gold, answer) if isinstance(gold, Words) else (answer, gold)
    if isinstance(words, Words) and isinstance(other, Value) and len(words.text) == 1:
        return words.text == _letter(other.expression)
    return True


def _same_relation(gold: Answer, answer: Answer) -> bool:
    """Equations are the same where one is a multiple of the other; inequalities, where it is a positive one."""
    one, other = _as_relation(gold), _as_relation(answer)
    if one is None or other is None or one.sign != other.sign:
        return False
    return are_proportional(one.difference, other.difference, positively=one.sign not in ("=", r"\ne"))


def _as_relation(answer: Answer) -> Relation | None:
    if isinstance(answer, Named) and isinstance(answer.answer, Value) and "(" not in answer.name:
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
        if len({name.partition("_")[0] for name in names[0] or names[1]}) == 1:  # x = 1 or x = 2, x_1 = 1 and x_2 = 2
            return _same_in_any_order(gold.items, answer.items)
        return (names[0] or names[1]) == sorted(names[0] or names[1]) and _same_in_order(gold.items, answer.items)
    if "()" in (gold.brackets, answer.brackets):  # the point (1, 2), as x = 1, y = 2
        gold, answer = _as_point(gold), _as_point(answer)
    return gold.brackets == answer.brackets != "{}" and _same_in_order(gold.items, answer.items)


def _as_point(group: Group) -> Group:
    """`y = 2, x = 1` as (1, 2), where the order of the names is certain."""
    names = _names(group)
    if group.brackets != "{}" or not names or (places := in_order(names)) is None:
        return group
    return Group("()", tuple(_unnamed(group.items[place]) for place in places))


def _names(group: Group) -> list[str]:
    """The items' names, where each has one."""
    names = [item.name for item in group.items if isinstance(item, Named)]
    return names if len(names) == len(group.items) else []


def _is_same_item(gold: Answer, answer: Answer) -> bool:
    """Within a set or tuple, the set {1} is not 1."""
    sets = [isinstance(one, Group) and one.brackets == "{}" for one in (_unnamed(gold), _unnamed(answer))]
    return sets[0] == sets[1] and is_same(gold, answer)


def _same_in_order(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
    return len(gold) == len(answer) and all(map(_is_same_item, gold, answer))


def _same_in_any_order(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
    """As many, and each once. Being the same is an equivalence, so whichever partner is taken will do."""
    left = list(answer)
    for item in gold:
        partner = next((place for place, other in enumerate(left) if _is_same_item(item, other)), None)
        if partner is None:
            return False
        left.pop(partner)
    return not left
