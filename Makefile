# Everything runs in a virtual environment of its own, made on first use: a fresh machine needs Python >= 3.11 and make.
# Variables: PYTHON (the interpreter), VENV (the environment's folder), ARGS (more options for the command), TORCH and
# TRANSFORMERS (other versions than those of constraints.txt, in an environment of their own).

PYTHON ?= python3
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))$(if $(TRANSFORMERS),-transformers-$(TRANSFORMERS))
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PINS := $(if $(TORCH),torch==$(TORCH)) $(if $(TRANSFORMERS),transformers==$(TRANSFORMERS))
# What another version may need in another version, too; a - is in no name before ==, so that nothing else is left out.
FREE := $(if $(TORCH),torch|setuptools|)$(if $(TRANSFORMERS),transformers|tokenizers|huggingface-hub|)-

# The runs of the tests, their ranks and their programs read what the first of them has compiled.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help train finetune test test-thorough test-all test-accelerator test-gpu test-synthesis docs package lint format bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile
	@echo 'With other versions, in an environment for them: make test TORCH=2.15.0 TRANSFORMERS=5.24.0 PYTHON=python3.13'

train: $(VENV)/.train ## train a small GPT in a pipeline (options: ARGS="--help")
	@trap : INT; echo $(BIN)/python examples/train_gpt.py $(ARGS); \
	$(BIN)/python examples/train_gpt.py $(ARGS) || test $$? = 130  # Ctrl-C is no error

finetune: $(VENV)/.hf ## train a small Llama of transformers in a pipeline (options: ARGS="--help")
	@echo $(BIN)/python examples/finetune.py $(ARGS); $(BIN)/python examples/finetune.py $(ARGS)

# Neighbours among the tests share fixtures and ranks, so that each worker gets a half of the list, and not small pieces.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Files or folders that are asked for are tested thoroughly.
test: $(VENV)/.test ## run the quick tests (thoroughly those of one file: ARGS=tests/test_pipe.py)
	$(PYTEST) -m "not slow$(if $(filter tests% pipework%,$(ARGS)),, and not thorough)" $(ARGS)

test-thorough: $(VENV)/.test ## run what `make test` leaves out, but for slow tests
	$(PYTEST) -m "thorough and not slow" $(ARGS)

test-all: $(VENV)/.test ## run all tests, the slow ones too
	$(PYTEST) -m "" $(ARGS)

# Built before pytest starts its workers; PyTorch gets one accelerator for the life of a process, so these run alone.
test-accelerator: $(VENV)/.test ## run the tests of accelerators on a simulated one (needs gcc or clang)
	$(BIN)/python -m tests.accelerator.build
	$(PYTEST) -p tests.accelerator.plugin -m "gpu and not slow" $(ARGS)

# An interpreter of your own has the PyTorch that fits your driver, and needs hypothesis, ninja, numpy, pytest, pytest-timeout
# and pytest-xdist beside it.
test-gpu: $(if $(GPU_PYTHON),,$(VENV)/.test) ## test on an NVIDIA GPU, five minutes (your own Python: GPU_PYTHON=python3)
	$(or $(GPU_PYTHON),$(BIN)/python) -m tests.gpu.run $(ARGS)

# A distribution of its own, which CI leaves out.
test-synthesis: $(VENV)/.dev ## test the schedules made by search, extras/synthesis
	$(PIP) --editable 'extras/synthesis[test]' --constraint $(VENV)/constraints.txt
	$(BIN)/mypy --strict extras/synthesis/pipework_synthesis
	$(BIN)/python -m pytest -n $(WORKERS) $(or $(ARGS),extras/synthesis)

lint: $(VENV)/.dev ## check style, format and types, and that no folder outgrows its cap
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict pipework
	$(BIN)/python .ci/code_lines.py

docs: $(VENV)/.docs ## build the documentation: docs/_build/html/index.html
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html $(ARGS)

# A checkout on the import path hides what is missing in the package, hence another folder.
package: $(VENV)/.created ## build the wheel (dist/) and try it in a clean environment
	rm -rf dist build/clean build/empty
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip --disable-pip-version-check install --quiet dist/*.whl numpy --constraint constraints.txt
	mkdir build/empty
	cd build/empty && ../clean/bin/python ../../tests/smoke.py
	rm -rf build/clean build/empty

format: $(VENV)/.dev ## fix style and format in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.train ## run the benchmarks, benchmarks/*/run.py (one of them: BENCH=name)
	@for script in benchmarks/$(or $(BENCH),*)/run.py; do \
	    test -f "$$script" || { echo "no benchmark $$script"; exit 1; }; \
	    echo "== $$script"; $(BIN)/python -m "$$(echo "$${script%.py}" | tr / .)" $(ARGS) || exit 1; \
	done

clean: ## remove the environment, caches and build results
	rm -rf $(VENV) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: .created says that the environment is whole; the others, such as .test, that this set is installed as
# pyproject.toml and constraints.txt want it now.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	sys.exit("pipework needs Python 3.11 or newer, and $(PYTHON) is " + v + ": try make PYTHON=python3.12" \
	if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.train $(VENV)/.hf $(VENV)/.test $(VENV)/.docs $(VENV)/.dev: $(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/.created
	@echo 'installing PyTorch and the tools, this takes a minute'
	{ grep -vE '^($(FREE))==' constraints.txt; printf '%s\n' $(PINS); } > $(VENV)/constraints.txt
	$(PIP) --editable '.[$*]' --constraint $(VENV)/constraints.txt
	@touch $@
