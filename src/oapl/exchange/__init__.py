"""Rounds from and to the files of others: TRL, verl, the authors' rows, chat traces, preference pairs."""
