"""Programs: found in a completion, run on their problem's tests in a sandbox, compared outside it."""

from oapl.grading.code.grader import CodeGrader as CodeGrader
from oapl.grading.code.problem_tests import Tests as Tests
from oapl.grading.code.problem_tests import parse_tests as parse_tests
from oapl.grading.code.sandbox import Limits as Limits
