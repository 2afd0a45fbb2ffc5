SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
SERVE_FLAGS := --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) \
	$(if $(CHECKPOINT),--checkpoint $(CHECKPOINT)) $(if $(MODEL),--model $(MODEL)) $(ARGS)

.PHONY: help serve test test-fast check format kernels-gate clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade "pip>=24"
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install -e ".[dev]"
	touch $@

serve: $(VENV)/.installed ## Start the server: HTTP_PORT= GRPC_PORT= METRICS_PORT= CHECKPOINT=dir MODEL=smollm2
	exec $(BIN)/python -m netra_backend.serve $(SERVE_FLAGS)

test: $(VENV)/.installed ## Run every test (the kernels interpreted, then compiled, in processes of their own)
	PYTHON=$(BIN)/python tests/run_all.sh

test-fast: $(VENV)/.installed ## Run the tests that need neither a server nor more than seconds
	$(BIN)/python -m pytest -q -m "not slow and not server" --ignore=tests/kernels

check: $(VENV)/.installed ## Format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove what the targets above made
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
