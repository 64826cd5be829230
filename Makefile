# One command each; all of them make the environment first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help env zoo-env lightning-env lightning25-env test-lightning25 slurm train test test-fast test-long docs lint types format bench clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing pipepart and what it needs into $(VENV) (once)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev,docs]"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps timm # it would pull torchvision
	@touch $@

env: $(STAMP) ## make the environment in .venv

# The libraries of the zoo, with the torch of the constraints. Without dependencies: theirs would bring torchvision and CUDA.
ZOO := .venv-zoo

$(ZOO)/.installed: pyproject.toml constraints.txt tools/bench/zoo/requirements.txt
	@test -x $(ZOO)/bin/python || $(PYTHON) -m venv $(ZOO)
	@echo "installing the libraries of the zoo into $(ZOO) (once)"
	@$(ZOO)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(ZOO)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@$(ZOO)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tools/bench/zoo/requirements.txt
	@touch $@

zoo-env: $(ZOO)/.installed ## make the environment for the zoo of libraries in .venv-zoo

# Libraries with LightningModules, likewise.
LIGHTNING := .venv-lightning

$(LIGHTNING)/.installed: pyproject.toml constraints.txt tools/bench/lightning/requirements.txt
	@test -x $(LIGHTNING)/bin/python || $(PYTHON) -m venv $(LIGHTNING)
	@echo "installing libraries with LightningModules into $(LIGHTNING) (once)"
	@$(LIGHTNING)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(LIGHTNING)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@$(LIGHTNING)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt pytorch-lightning
	@$(LIGHTNING)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tools/bench/lightning/requirements.txt
	@touch $@

lightning-env: $(LIGHTNING)/.installed ## make the environment for LightningModules of other libraries in .venv-lightning

# The oldest version of Lightning that is supported, with all other versions of the constraints.
OLDEST := .venv-lightning25

$(OLDEST)/.installed: pyproject.toml constraints.txt
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@echo "installing pipepart with Lightning 2.5 into $(OLDEST) (once)"
	@grep -Ev '^(pytorch-)?lightning==' constraints.txt > $(OLDEST)/constraints.txt
	@$(OLDEST)/bin/python -m pip install -q --disable-pip-version-check -c $(OLDEST)/constraints.txt torch
	@$(OLDEST)/bin/python -m pip install -q --disable-pip-version-check -c $(OLDEST)/constraints.txt -e ".[dev]" \
	    "lightning==2.5.*" "pytorch-lightning==2.5.*"
	@touch $@

lightning25-env: $(OLDEST)/.installed ## make an environment with Lightning 2.5 in .venv-lightning25

test-lightning25: $(OLDEST)/.installed ## run the tests of Lightning and of runs, without the long ones, with Lightning 2.5
	@$(OLDEST)/bin/python -m pytest $(TOGETHER) -m "not long" tests/lightning tests/cli/test_cli_runs.py $(ARGS)

slurm: ## install the daemons of SLURM for tests on a real cluster (Debian, as root); then: python -m tools.slurm
	@command -v slurmctld slurmd munged > /dev/null || \
	    (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge)

train: $(STAMP) ## train the default recipe on 2 stages; overrides: ARGS="strategy.schedule=gpipe"
	@$(BIN)/pipepart train $(ARGS)

# Side by side: tests wait for processes about as much as they compute. ARGS="-n 0" runs them one after the other.
TOGETHER := -n auto --dist loadscope
# The tests start many processes; all of them would compile the package and the tests again without bytecode.
test test-fast test-long: export PYTHONDONTWRITEBYTECODE :=

test: $(STAMP) ## run the whole test suite
	@$(BIN)/python -m pytest $(TOGETHER) -m "not long" $(ARGS)

test-long: $(STAMP) ## run only the long tests, which the whole suite leaves out
	@$(BIN)/python -m pytest $(TOGETHER) -m long $(ARGS)

test-fast: $(STAMP) ## run only the quick tests
	@$(BIN)/python -m pytest $(TOGETHER) -m "not slow and not long" $(ARGS)

docs: $(STAMP) ## build the documentation site into build/site; every warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@$(BIN)/python -m tools.docs.links build/site
	@echo build/site/index.html

lint: $(STAMP) types ## check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP) ## check only types
	@$(BIN)/mypy

format: $(STAMP) ## fix and format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP) ## run the benchmarks
	@$(BIN)/python -m tools.bench $(ARGS)

clean: ## remove the environment and all caches
	rm -rf $(VENV) $(ZOO) $(LIGHTNING) $(OLDEST) .venv-package build/site .pytest_cache .mypy_cache .ruff_cache .hypothesis
