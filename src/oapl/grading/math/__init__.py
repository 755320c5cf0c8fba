"""Answers to mathematics: found in a completion, read, and compared exactly with the gold answer."""
