"""What judges a completion: answers to mathematics, programs against their tests, and functions of one's own.

A grader gives one `Verdict` a completion. It never guesses: where it could not judge, it raises GradingError.
"""
