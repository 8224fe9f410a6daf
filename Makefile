# `make help` lists what can be done. Everything that is installed goes into .venv.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
PYTEST_ARGS ?= -n 2

# torch_npu, if it is installed, would otherwise take over every `import torch`.
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0

.PHONY: help venv test demo lint format bench clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1: /p' Makefile

venv: $(VENV)/.test ## set up .venv

$(RUN):
	$(PYTHON) -m venv $(VENV)

# One stamp for each extra of pyproject.toml. The constraints keep pip from a torch of several GB.
$(VENV)/.%: pyproject.toml constraints.txt | $(RUN)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

test: $(VENV)/.test ## run the tests; PYTEST_ARGS="-k name" picks some
	$(RUN) tests/torchair/prepare.py
	$(RUN) tests/readers/prepare.py
	$(RUN) -m pytest $(PYTEST_ARGS) -m "not alone"
	$(RUN) -m pytest $(PYTEST_ARGS) -n 0 -m alone || [ $$? -eq 5 ] # 5: none is picked

demo: $(VENV)/.demo ## dump one layer of a compiled sentence encoder
	$(RUN) examples/demo.py

lint: $(VENV)/.dev ## check style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/.dev ## put the code into shape
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(VENV)/.test ## run every benchmark; BENCH_ARGS="--quick" the smallest cases only
	$(RUN) benchmarks/run.py $(BENCH_ARGS)

clean: ## remove .venv and everything that tools left
	rm -rf $(VENV) .venv-torchair .venv-readers build dist dump *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
