# `make train` sets up .venv and trains; `make help` lists the rest.
# On a machine without a GPU, PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU builds> spares several GB of CUDA packages.

PYTHON3 ?= python3
PYTHON := .venv/bin/python
WORKERS ?= 3
INSTALLED := .venv/installed
PIP_INSTALL := $(PYTHON) -m pip install -qq --disable-pip-version-check
HASHED := $(PIP_INSTALL) --require-hashes --no-deps --no-build-isolation --requirement .venv/hashed.txt
# pins,NAMES and pins_but,NAMES: their entries in constraints.txt, with the lines of hashes that follow each
pins = awk '/^[^ ]/ { is_named = /^($(1))==/ } is_named' constraints.txt > .venv/hashed.txt
pins_but = awk '/^[^ ]/ { is_named = /^($(1))==/ } !is_named' constraints.txt > .venv/hashed.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help train fork test test-quick lint types format bench constraints tables clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 20
	@echo '  ARGS="..."        is handed to train.py by train, and to pytest by test'

train: $(INSTALLED) ## run train.py: make train ARGS="strategy=ddp trainer.devices=2"
	$(PYTHON) train.py $(ARGS)

fork: ## make a project of your own: make fork NAME=birdsong INTO=../birdsong ARGS=--bare
	@PYTHONPATH=src $(PYTHON3) -m lightswitch.fork "$(NAME)" "$(INTO)" $(ARGS)

test: lint types ## run all that CI runs: make test ARGS="tests/project -k compose" selects tests
	$(PYTHON) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-quick: lint types ## run what takes few minutes, while working on something
	$(PYTHON) -m pytest --numprocesses $(WORKERS) --dist loadfile -m "not slow" $(ARGS)

lint: $(INSTALLED) ## check format, lint and shell scripts
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	.venv/bin/shellcheck .ci/run slurm/*.sh

types: $(INSTALLED) ## check types
	$(PYTHON) -m mypy

format: $(INSTALLED) ## format the code, and mend what ruff can mend
	$(PYTHON) -m ruff check --fix --exit-zero --quiet .
	$(PYTHON) -m ruff format .

bench: $(INSTALLED) ## measure the speed, in about ten minutes of a quiet machine (docs/speed.md)
	$(PYTHON) -m benchmarks.startup
	$(PYTHON) -m benchmarks.step
	$(PYTHON) -m benchmarks.data
	$(PYTHON) -m benchmarks.save

# torch has no hash, as its build differs by platform and index, and what it alone needs has no line: it names that itself
constraints: $(INSTALLED) ## pin the newest versions that pyproject.toml allows, with their hashes, for every Python from 3.10
	$(PYTHON) -m pip install -qq --disable-pip-version-check uv
	@echo '# made by `make constraints`: the versions that make installs and the tests ran with, by the hashes of PyPI'\''s files' > .venv/constraints.txt
	printf '%s\n' pip setuptools wheel | .venv/bin/uv pip compile --quiet --universal --python-version 3.10 \
	  --no-python-downloads --default-index https://pypi.org/simple --all-extras --generate-hashes --no-header \
	  --no-annotate pyproject.toml - \
	  | awk '/^[^ ]/ { is_torch = /^(torch==|nvidia|cuda|triton)/ } /^torch==/ { print $$1 } !is_torch' >> .venv/constraints.txt
	mv .venv/constraints.txt constraints.txt

tables: $(INSTALLED) ## run every strategy at every precision, from each to each other, and every failure, for docs/ (an hour)
	$(PYTHON) -m tests.engine.tables.matrix
	$(PYTHON) -m tests.engine.tables.resume
	$(PYTHON) -m tests.engine.tables.failures

clean: ## remove .venv and every cache; runs/ stays
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info

# deepspeed's build looks at the installed torch, hence torch first and no build isolation
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo \
	  "found $$($(PYTHON3) --version 2>&1), expected Python 3.10 or newer; type make PYTHON3=/path/to/python3" >&2; exit 2; }
	@$(PYTHON3) -c 'import ensurepip, venv' 2> /dev/null || { echo \
	  "found $(PYTHON3) without venv; on Debian or Ubuntu type: apt-get install python3-venv" >&2; exit 2; }
	@echo "setting up .venv with the packages of constraints.txt (about two minutes, once)" >&2
	@[ -x .venv/bin/pip ] || $(PYTHON3) -m venv .venv
	@$(call pins,pip|setuptools|wheel) && $(HASHED)
	@$(call pins_but,torch|deepspeed) && $(HASHED)
	@$(PIP_INSTALL) $$(grep '^torch==' constraints.txt)
	@$(call pins,deepspeed) && DS_BUILD_OPS=0 $(HASHED)
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@$(PYTHON) -m pip check --disable-pip-version-check > .venv/conflicts || { cat .venv/conflicts >&2; exit 2; }
	@touch $(INSTALLED)
