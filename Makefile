# The repository's commands. Everything is installed into .venv here; nothing else on the machine is changed,
# except that `make test` as root adds missing Debian packages (.ci/system-packages).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
OVERRIDES ?=
KILLS ?= 200
TORTURE_ARGS ?=
RUNS ?= 20
DRAWN_ARGS ?=
INTERLEAVINGS ?= 100000
LINEAGE_ARGS ?=
SEEDS ?= 3
MATRIX_ARGS ?=
SOAK_ARGS ?= --seconds 1800
SHAPE ?= 8b8
GPU_ARGS ?=
# A machine with a GPU may have no network to install from: its own Python then, where torch is.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

# What an installation depends on: a change of these files installs again, a second call does nothing.
PINS := pyproject.toml constraints.txt

.PHONY: help demo test test-all test-fast equivalence torture drawn-runs lineage matrix soak lint format bench gpu docs clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/installed ## install, then train a small Llama on this machine's own Python files (two minutes)
	$(BIN)/orchestra run experiment=demo $(OVERRIDES)
	@echo && echo 'what it writes after "import ":'
	-@$(BIN)/orchestra generate "$$(ls -td runs/*/ | head -1)" "import " --temperature 0.7 --max-tokens 150

test: prepared ## install what tests need, lint, run the tests
	@$(PYTHON) .ci/lanes $(BIN)/python --lint --durations=15 $(PYTEST_ARGS)

test-all: prepared ## `make test`, and the further examples that tests/left_to_test_all.txt names
	@$(PYTHON) .ci/lanes $(BIN)/python --all --lint --durations=15 $(PYTEST_ARGS)

test-fast: $(VENV)/installed-test ## the quick unit tests (two to six minutes on two cores)
	@$(PYTHON) .ci/lanes $(BIN)/python --fast $(PYTEST_ARGS)

equivalence: $(VENV)/installed-test ## compare every combination of the parallel methods with one process
	ORCHESTRA_EQUIVALENCE=all $(BIN)/python -m pytest --timeout 1000 tests/ranks/test_equivalence.py \
	  tests/ranks/test_pipeline.py tests/ranks/test_expert_parallel.py tests/ranks/test_drawn_layouts.py $(PYTEST_ARGS)

torture: $(VENV)/installed-test ## kill one run KILLS times (200) at every phase of a save and a restore
	$(BIN)/python tests/e2e/kill_points.py --kills $(KILLS) $(TORTURE_ARGS)

lineage: $(VENV)/installed-test ## freeze and thaw attempts between any two acts of a save, INTERLEAVINGS times (100000)
	$(BIN)/python tests/unit/checkpointing/lineage_model.py --interleavings $(INTERLEAVINGS) $(LINEAGE_ARGS)

drawn-runs: $(VENV)/installed-test ## hurt RUNS runs (20) of drawn layouts at random; each must end as if left alone
	$(BIN)/python tests/e2e/drawn_runs.py --runs $(RUNS) $(DRAWN_ARGS)

matrix: prepared ## hurt runs on a cluster in every way that can be shown here, SEEDS times (3)
	$(BIN)/python tests/slurm/matrix.py --seeds $(SEEDS) $(MATRIX_ARGS)

soak: prepared ## kill ranks, agents and nodes of one run for half an hour (SOAK_ARGS)
	$(BIN)/python tests/slurm/soak.py $(SOAK_ARGS)

lint: $(VENV)/installed-test ## ruff and mypy, as strict as pyproject.toml says
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-test ## rewrite the files as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed-bench ## time the training step against bare loops (benchmarks/RESULTS.md)
	$(BIN)/python benchmarks/train_step.py

gpu: ## on one GPU: SHAPE=tests, or 8b8 and others beside peers (docs/gpus.md)
ifeq ($(SHAPE),tests)
	PYTHONPATH=$(CURDIR):$(CURDIR)/launchers/plugin $(GPU_PYTHON) -m pytest tests/gpu --must-run gpu $(PYTEST_ARGS)
else
	$(GPU_PYTHON) benchmarks/gpu.py $(SHAPE) --output $(or $(OUT),runs)/gpu-$(SHAPE).json $(GPU_ARGS)
endif

docs: $(VENV)/installed-docs ## build the manual from docs/ into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean: ## remove .venv, caches and built files; runs/ stays
	rm -rf $(VENV) dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian's packages come while pip installs; they may bring what the environment itself is made with.
.PHONY: prepared
prepared: | $(BIN)/python
	@.ci/system-packages & $(MAKE) --no-print-directory $(VENV)/installed-test && wait $$!

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true); orchestra needs Python 3.11 or newer:" \
	    "make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || .ci/system-packages python3-venv
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "error: '$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# $(1): extras in brackets, or nothing. Quiet, because pip's own account fills a screen. The pip that comes with Python
# 3.11 needs 40 s more to read the index. It compiles on one core and all there is: two large packages of the tests
# are compiled as they are imported.
define install
	@echo "installing into $(VENV) (torch and its dependencies: some minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --upgrade pip
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e '.$(1)'
	@$(BIN)/python -m compileall -qq -j 0 -x '/(transformers|moto)/' $(VENV)/lib || true
endef

$(VENV)/installed: $(PINS) | $(BIN)/python
	$(call install)
	@touch $@

$(VENV)/installed-test: $(PINS) | $(BIN)/python
	$(call install,[test])
	@touch $@ $(VENV)/installed

$(VENV)/installed-bench: $(PINS) | $(BIN)/python
	$(call install,[bench])
	@touch $@ $(VENV)/installed

$(VENV)/installed-docs: $(PINS) | $(BIN)/python
	$(call install,[docs])
	@touch $@ $(VENV)/installed
