# make demo   set up everything in .venv and send one real request through all stages
# make test   set up everything and run all checks
# Both are quick the second time. PYTHON=... chooses another interpreter.

VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python -m
# 3.11 where there is one: what the tests run on (a `python3.11` that cannot run, as a version manager's stub, is passed by)
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# The CPU build of torch is asked for by its own name first, so that no machine without a GPU downloads gigabytes of CUDA.
# pip looks where it is configured to, then in the index of the PyTorch project. TIDEMILL_ALLOW_CUDA=1 leaves torch to pip.
TORCH := $(shell sed -n 's/^ *"\(torch==[0-9.]*\)".*/\1/p' pyproject.toml)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

UNITS := $(addprefix tests/,codec kernels kv pipeline stages)

.PHONY: install demo test test-all test-slow lint bench clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "tidemill needs Python 3.11 or newer: install python3.11, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "PYTHON=$(PYTHON) is not a Python 3.11 or newer" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing tidemill into $(VENV)"
	@test -n "$(TIDEMILL_ALLOW_CUDA)" || $(RUN) pip install --quiet --no-deps '$(TORCH)+cpu' \
	  || $(RUN) pip install --quiet --no-deps --index-url $(TORCH_CPU_INDEX) '$(TORCH)+cpu' \
	  || { echo "no CPU build of $(TORCH) found: give pip an index that has one (PIP_EXTRA_INDEX_URL), or, for the build that pip would choose (on Linux with CUDA, 3 GB): TIDEMILL_ALLOW_CUDA=1 make" >&2; exit 1; }
	@$(RUN) pip install --quiet --editable .
	@test -n "$(TIDEMILL_ALLOW_CUDA)" || $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None and "$(VENV) has a CUDA build of torch: remove $(VENV) for the CPU build, or keep it with TIDEMILL_ALLOW_CUDA=1 make; see README.md")'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the tools of the tests into $(VENV)"
	@$(RUN) pip install --quiet --editable '.[dev]'
	@touch $@

demo: install
	@$(BIN)/tidemill demo

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# What starts whole pipelines and measures drains and deaths has the machine to itself; all else runs on two cores at once.
test: lint
	$(BIN)/pytest -m "not slow" -n 2 --dist loadfile $(UNITS)
	$(BIN)/pytest -m "not slow" tests $(addprefix --ignore=,$(UNITS))

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m slow

test-all: test test-slow

bench: $(VENV)/.installed-dev
	$(RUN) bench.hops --json

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
