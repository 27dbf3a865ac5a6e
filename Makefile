# `make train` sets up .venv and trains; `make help` lists the rest.
# On a machine without a GPU, PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU builds> spares several GB of CUDA packages.

PYTHON3 ?= python3
# the oldest that lightswitch allows, of those in PATH and of pyenv's
LOWEST_PYTHON3 ?= $(shell for minor in 11 12 13 14; do for python in python3.$$minor \
  $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.$$minor.*/bin/python3; do \
  "$$python" -c 'import ensurepip, venv' 2> /dev/null && echo "$$python" && exit; done; done)
VENV := .venv
PINS := constraints.txt
PYTHON = $(VENV)/bin/python
WORKERS ?= 3
# packages beside those that the defaults of conf/ need, by extras of pyproject.toml: make train EXTRAS=deepspeed,hf;
# EXTRAS= for none, or all, as tests need them
EXTRAS ?= deepspeed,digits
PINNED_EXTRAS := datasets deepspeed digits hf mlflow optuna parquet wandb
comma := ,
ifneq ($(filter-out all $(PINNED_EXTRAS),$(subst $(comma), ,$(EXTRAS))),)
$(error found EXTRAS=$(EXTRAS), expected all, or some of $(subst $() ,$(comma),$(PINNED_EXTRAS)))
endif
INSTALLED := .venv/installed$(if $(EXTRAS),-$(subst $(comma),-,$(EXTRAS)))
ALL_INSTALLED := .venv/installed-all
LOWEST_INSTALLED := .venv-lowest/installed
NEWEST_INSTALLED := .venv-newest/installed
SCHEMAS := .vscode/schemas/config.json
LOWEST_TESTS := tests/engine/test_patches.py tests/engine/test_same_run.py tests/engine/tours \
  tests/engine/checkpoints tests/engine/launch tests/engine/strategies
NEWEST_TESTS := $(LOWEST_TESTS) tests/engine/failures tests/engine/config tests/engine/preflight tests/engine/sweeps
# the newest that pyproject.toml allows, where make installs older ones: no CPU build yet, or a pre-release
NEWEST ?= torch==2.15.0 hydra-core==1.4.0rc3 hydra-optuna-sweeper==1.4.0rc3
# packages come from this folder, and nothing is asked of the internet: make train WHEELHOUSE=wheelhouse
WHEELHOUSE ?=
ifneq ($(WHEELHOUSE),)
export PIP_NO_INDEX := 1
export PIP_FIND_LINKS := $(abspath $(WHEELHOUSE))
endif
TORCH = $$(grep '^torch==' $(PINS))
PIP_INSTALL = $(PYTHON) -m pip install -qq --disable-pip-version-check
OF_HASHES = --require-hashes --no-deps --no-build-isolation --requirement $(VENV)/hashed.txt
HASHED = $(PIP_INSTALL) $(OF_HASHES)
PIP_DOWNLOAD = $(PYTHON) -m pip download -qq --disable-pip-version-check --dest wheelhouse
# the entries of the pins that are installed: the lines "# EXTRA: NAMES" at their top say which packages each needs
CHOSEN = $(if $(filter all,$(EXTRAS)),[^ ]*,$$(sed -nE 's/^# (default|$(subst $(comma),|,$(EXTRAS))): //p' $(PINS) | tr -s ' \n' '|')pip)
CHOOSE = awk '/^[^ ]/ { is_chosen = /^('"$(CHOSEN)"')==/ } is_chosen' $(PINS) > $(VENV)/chosen.txt
# pins,NAMES and pins_but,NAMES: their entries in those chosen, with the lines of hashes that follow each
pins = awk '/^[^ ]/ { is_named = /^($(1))==/ } is_named' $(VENV)/chosen.txt > $(VENV)/hashed.txt
pins_but = awk '/^[^ ]/ { is_named = /^($(1))==/ } !is_named' $(VENV)/chosen.txt > $(VENV)/hashed.txt
# uv,COMMAND: of all packages for every Python from 3.11, from PyPI
uv = .venv/bin/uv $(1) --quiet --no-python-downloads --default-index https://pypi.org/simple
# pinned,FILE: pins without the hash of torch, whose build differs by platform and index, and without what it alone
# needs: it names that itself
pinned = awk '/^[^ ]/ { is_torch = /^(torch==|nvidia|cuda|triton)/ } /^torch==/ { print $$1 } !is_torch' \
  >> .venv/$(1) && mv .venv/$(1) $(1)
# comet and float8 are for a service, and for newer GPUs
EXPORTED = --frozen --no-emit-project --no-header --no-annotate
# names,OPTIONS: of the packages that uv exports by them
names = $(call uv,export) $(EXPORTED) --no-hashes $(1) | sed -E 's/[=; ].*//' | sort --unique

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help train fork test test-nightly test-lowest test-newest lint types format bench gpu constraints wheelhouse tables docs clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 20
	@echo '  EXTRAS=hf,wandb   installs packages of these extras, too, or of all: make train EXTRAS=all'
	@echo '  ARGS="..."        is handed to train.py by train, and to pytest by test'

train: $(INSTALLED) ## run train.py: make train ARGS="strategy=ddp trainer.devices=2"
	$(PYTHON) train.py $(ARGS)

fork: ## make a project of your own: make fork NAME=birdsong INTO=../birdsong ARGS=--bare
	@PYTHONPATH=src $(PYTHON3) -m lightswitch.fork "$(NAME)" "$(INTO)" $(ARGS)

test: lint types ## run all that CI runs: make test ARGS="tests/project -k compose" selects tests
	$(PYTHON) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-nightly: $(ALL_INSTALLED) ## run what takes long: soaks, the environments of forks, benchmarks, what a GPU will run
	$(PYTHON) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --nightly $(or $(ARGS),tests/engine tests/nightly tests/project)

test-lowest: $(LOWEST_INSTALLED) ## run parity, checkpoints, launch and strategies on the lowest versions that pyproject.toml allows
	.venv-lowest/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(or $(ARGS),$(LOWEST_TESTS))

test-newest: $(NEWEST_INSTALLED) ## run parity, checkpoints, launch, strategies, config and sweeps on the newest torch and Hydra that pyproject.toml allows
	.venv-newest/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(or $(ARGS),$(NEWEST_TESTS))

lint: $(ALL_INSTALLED) $(SCHEMAS) ## check format, lint and shell scripts
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	.venv/bin/shellcheck .ci/run slurm/*.sh

types: $(ALL_INSTALLED) ## check types
	$(PYTHON) -m mypy

format: $(ALL_INSTALLED) ## format the code, and fix what ruff can fix
	$(PYTHON) -m ruff check --fix --exit-zero --quiet .
	$(PYTHON) -m ruff format .

bench: $(ALL_INSTALLED) ## measure the speed, in about half an hour of a quiet machine
	$(PYTHON) -m benchmarks.startup
	$(PYTHON) -m benchmarks.step
	$(PYTHON) -m benchmarks.ddp
	$(PYTHON) -m benchmarks.data
	$(PYTHON) -m benchmarks.shards
	$(PYTHON) -m benchmarks.streams
	$(PYTHON) -m benchmarks.save
	$(PYTHON) -m benchmarks.plan
	$(PYTHON) -m benchmarks.growth
	$(PYTHON) -m benchmarks.missed

# a PYTHON that is given has what it needs: a machine with a GPU may have no network
gpu: $(if $(filter command,$(firstword $(origin PYTHON))),,$(ALL_INSTALLED)) ## test and measure on GPUs: make gpu PIECE=matrix, for nine minutes
	PYTHONPATH="$${PYTHONPATH:+$$PYTHONPATH:}src:." $(PYTHON) -m tests.engine.gpu $(PIECE) $(if $(RESULTS),--results "$(RESULTS)") $(ARGS)

constraints: $(ALL_INSTALLED) ## lock the newest and the lowest versions that pyproject.toml allows, with their hashes
	$(PYTHON) -m pip install -qq --disable-pip-version-check uv
	$(call uv,lock) --upgrade
	@echo '# made by `make constraints` from uv.lock: the versions that make installs and the tests ran with' > .venv/constraints.txt
	@$(call names,--group make) > .venv/default.txt
	@echo "# default: $$(tr '\n' ' ' < .venv/default.txt)" >> .venv/constraints.txt
	@for extra in $(PINNED_EXTRAS); do echo "# $$extra: $$($(call names,--extra $$extra) | grep --line-regexp \
	  --invert-match --fixed-strings --file .venv/default.txt | tr '\n' ' ')" >> .venv/constraints.txt; done
	$(call uv,export) $(EXPORTED) $(PINNED_EXTRAS:%=--extra %) --all-groups | $(call pinned,constraints.txt)
	@echo '# made by `make constraints`: the lowest versions that pyproject.toml allows, for `make test-lowest`' > .venv/constraints-lowest.txt
	$(call uv,pip compile) --no-config --resolution lowest-direct --extra deepspeed --extra digits --group dev --group make \
	  --universal --python-version 3.11 --generate-hashes --no-header --no-annotate pyproject.toml \
	  | $(call pinned,constraints-lowest.txt)

# for a machine of the same kind and Python; what torch alone needs is not pinned
wheelhouse: $(ALL_INSTALLED) ## download all packages, for machines without internet: make train WHEELHOUSE=wheelhouse
	@$(CHOOSE) && $(call pins_but,torch) && DS_BUILD_OPS=0 $(PIP_DOWNLOAD) $(OF_HASHES)
	@$(PIP_DOWNLOAD) $$(grep '^torch==' $(PINS))

tables: $(ALL_INSTALLED) ## run every strategy at every precision, from each to each other, and every failure, for the measured tables (an hour)
	$(PYTHON) -m tests.engine.tables.matrix
	$(PYTHON) -m tests.engine.tables.resume
	$(PYTHON) -m tests.engine.tables.failures
	$(PYTHON) -m tests.engine.tables.guide
	$(PYTHON) -m tests.engine.tables.habits

$(SCHEMAS): $(ALL_INSTALLED) $(shell find conf -name '*.yaml') # what an editor knows of conf
	$(PYTHON) -m lightswitch.reference.schema conf .vscode/schemas

docs: $(ALL_INSTALLED) ## build the documentation site in site/; make docs SERVE=1 serves it
	$(PYTHON) -m tests.engine.tables.reference
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs $(if $(SERVE),serve,build)

# what lightning-hydra-template has
test-full clean-logs:
	@echo "found no target $@, expected $(if $(findstring test,$@),make test-nightly,rm -r runs/NAME/RUN_ID of a run)" >&2; exit 2

clean: ## remove .venv and every cache; runs/ stays
	rm -rf .venv .venv-lowest .venv-newest .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info

$(LOWEST_INSTALLED) $(NEWEST_INSTALLED) $(ALL_INSTALLED) wheelhouse: EXTRAS := all
$(LOWEST_INSTALLED): VENV := .venv-lowest
$(LOWEST_INSTALLED): PINS := constraints-lowest.txt
$(LOWEST_INSTALLED): PYTHON3 = $(LOWEST_PYTHON3)
$(NEWEST_INSTALLED): VENV := .venv-newest
$(NEWEST_INSTALLED): TORCH = $(NEWEST)
# PyPI alone: its torch comes with 5 GB of CUDA packages, and runs on CPUs
$(NEWEST_INSTALLED): export PIP_CONFIG_FILE := /dev/null
.venv/installed $(INSTALLED) $(ALL_INSTALLED) $(NEWEST_INSTALLED): constraints.txt
$(LOWEST_INSTALLED): constraints-lowest.txt

# deepspeed's build looks at the installed torch, hence torch first and no build isolation
$(sort .venv/installed $(INSTALLED) $(ALL_INSTALLED)) $(LOWEST_INSTALLED) $(NEWEST_INSTALLED): pyproject.toml
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "found $$($(PYTHON3) --version 2>&1), expected Python 3.11 or newer; type make PYTHON3=/path/to/python3" >&2; exit 2; }
	@$(PYTHON3) -c 'import ensurepip, venv' 2> /dev/null || { echo \
	  "found $(PYTHON3) without venv; on Debian or Ubuntu type: apt-get install python3-venv" >&2; exit 2; }
	@echo "setting up $(VENV) with the packages of $(PINS) (about two minutes, once)" >&2
	@[ -x $(VENV)/bin/pip ] || $(PYTHON3) -m venv $(VENV)
	@$(CHOOSE)
	@$(call pins,pip|setuptools|wheel) && $(HASHED)
	@$(call pins_but,torch|deepspeed) && $(HASHED)
	@$(PIP_INSTALL) $(TORCH)
	@$(call pins,deepspeed) && DS_BUILD_OPS=0 $(HASHED)
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@$(PYTHON) -m pip check --disable-pip-version-check > $(VENV)/conflicts || { cat $(VENV)/conflicts >&2; exit 2; }
	@touch $@ $(if $(filter all,$(EXTRAS)),$(VENV)/installed $(VENV)/installed-all)
