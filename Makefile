PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --constraint constraints-cpu.txt --editable

STUDIES := tuning lag variants offline passk

.PHONY: quickstart test test-slow lint docs study clean

quickstart: .venv/installed  ## train the countdown recipe and show what it learned
	$(BIN)/oapl train recipes/countdown.toml --run_dir runs/quickstart

test: .venv/installed-dev  ## the tests that gate every change
	$(BIN)/pytest

test-slow: .venv/installed-dev  ## the long proofs: 60 kills, the shipped model and the quickstart themselves
	$(BIN)/pytest -m slow

lint: .venv/installed-dev  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/installed-dev  ## the documentation site, into site/
	$(BIN)/mkdocs build --strict

study: .venv/installed  ## the studies of docs/findings.md, hours on 2 cores; stopped, the same command goes on
	for study in $(STUDIES); do $(BIN)/oapl study studies/$$study.toml || exit 1; done

clean:  ## everything made here but .venv and runs
	rm -rf site build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints-cpu.txt | .venv/bin/pip
	@echo "Installing oapl into .venv; this takes a few minutes the first time."
	$(INSTALL) .
	touch $@

.venv/installed-dev: pyproject.toml constraints-cpu.txt | .venv/bin/pip
	@echo "Installing oapl and its development tools into .venv; this takes a few minutes the first time."
	$(INSTALL) ".[dev]"
	touch .venv/installed $@
