"""`oapl study`: a recipe under several settings and seeds, each combination a run of its own."""

from oapl.study.conduct import run_study as run_study
from oapl.study.matrix import load_study as load_study
