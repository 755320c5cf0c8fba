"""Answers to mathematics: found in a completion, read, and compared exactly with the gold answer."""

from oapl.grading.math.grader import MathGrader as MathGrader
from oapl.grading.math.verdicts import grade_answer as grade_answer
