# Every target works alone on a fresh machine with Python 3.11 or newer: it makes .venv and installs what is missing,
# in two stages: what a run needs (requirements.txt), then what tests and checks need (the extra `test`).
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Bytecode is kept, but only of what is imported: that of all files is 330 MB.
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile
WORKERS ?= 3
# Bytecode is kept: without it each of hundreds of programs compiles the sources that it imports.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile \
    --no-loadscope-reorder --max-worker-restart=0
# Files whose tests take long come first, so that no process is left alone with one.
FIRST = tests/end_to_end tests/golden tests/unit/training tests/unit/optimizer tests/unit/model
TESTS = $(FIRST) $(filter-out $(FIRST) %conftest.py %__pycache__,$(wildcard tests/unit/*)) tests/gpu
BENCHMARKS = $(filter-out _%,$(basename $(notdir $(wildcard toolkits/benchmarks/*.py))))

.PHONY: help quickstart test test-all test-newest checks docs upstream-faults bench gpu-check gpu-bench

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / - /'

# torch goes first and alone: with a CPU build in reach of pip (TORCH='torch==2.13.0+cpu', PIP_FIND_LINKS, an index
# of CPU wheels) the packages after it find it there and do not pull the CUDA build. The
# project itself, for the command llama-patch, is only linked to: the code of this folder runs.
$(VENV)/installed: requirements.txt
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (minutes): 1 of 4, $(TORCH)"
	@$(PIP) "$(TORCH)"
	@echo "installing into $(VENV) (minutes): 2 of 4, requirements.txt"
	@$(PIP) -r requirements.txt
	@echo "installing into $(VENV): 3 of 4, this project"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@echo "installing into $(VENV): 4 of 4, the C++ kernel of the optimizer"
	@$(VENV)/bin/python patch/optimizer/kernels/build.py
	@touch $@

$(VENV)/tests-installed: $(VENV)/installed pyproject.toml
	@echo "installing into $(VENV) (minutes): what tests and checks need"
	@$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

$(VENV)/docs-installed: $(VENV)/installed pyproject.toml
	@echo "installing into $(VENV): what the site needs"
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

quickstart: $(VENV)/installed  ## fine-tune a small LLaMA on JSON and question it (minutes on 2 cores); LORA=1: by adapters, QLORA=1: beside 4 bits; MODEL=smollm2: a real model of 135M, FULL=1: all its weights
	PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m toolkits.quickstart $(if $(LORA)$(QLORA),--lora) $(if $(QLORA),--quantize-base nf4) $(if $(MODEL),--model $(MODEL)) $(if $(FULL),--full)

test: $(VENV)/tests-installed  ## the tests of a change, but those that are long and those of `checks`: minutes on two cores
	$(PYTEST) -m "not long" $(TESTS)

test-all: $(VENV)/tests-installed  ## all tests of this machine, as CI; GPU tests skip themselves without one
	$(PYTEST) $(TESTS) tests/architecture

# What depends on megatron-core, for an environment with another release: VENV=.venv-newest PYTHON=python3.12.
test-newest: $(VENV)/tests-installed
	$(PYTEST) -m "not long" tests/unit/compat tests/unit/checkpoint tests/unit/model tests/unit/training tests/unit/convert \
	    tests/golden tests/end_to_end/test_sft.py
	COVERED_EVERY=10 $(PYTEST) -n 0 tests/unit/training/test_covered_layouts.py tests/end_to_end/test_pretrain.py \
	    -k "trains_as_one_process or preprocessed"

checks: $(VENV)/tests-installed  ## style, types, and the rules of the house
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest tests/architecture

upstream-faults: $(VENV)/tests-installed  ## what megatron-core computes wrongly, and what is right here: a table (a minute or two)
	$(VENV)/bin/python -m pytest -q -s -n 0 tests/unit/compat/test_faults.py

docs: $(VENV)/docs-installed  ## the documentation site in site/; `python3 -m http.server -d site` shows it
	$(VENV)/bin/python -m mkdocs build --strict

bench: $(VENV)/installed  ## every benchmark in toolkits/benchmarks
	set -e; for name in $(BENCHMARKS); do $(VENV)/bin/python -m toolkits.benchmarks $$name; done

# GPU_PYTHON=python3: that interpreter and its packages; installs nothing and makes no .venv.
gpu-check: $(if $(GPU_PYTHON),,$(VENV)/installed)  ## the tests that need a GPU (up to 8 minutes)
	$(or $(GPU_PYTHON),$(VENV)/bin/python) tests/gpu/run.py $(if $(LOGS),--logs $(LOGS))

gpu-bench: $(if $(GPU_PYTHON),,$(VENV)/installed)  ## the tables of a GPU, quickly; a section for RESULTS.md (up to 10 minutes)
	$(or $(GPU_PYTHON),$(VENV)/bin/python) -m toolkits.benchmarks._gpu_tables $(if $(LOGS),--folder $(LOGS)) $(if $(PARTS),--parts $(PARTS))
