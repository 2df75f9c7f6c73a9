.DEFAULT_GOAL := help
SHELL := /bin/bash
# Compiled modules make every start of `yard` faster.
unexport PYTHONDONTWRITEBYTECODE

UV_VERSION := 0.13.8
PYTHON ?= python3.11
UV := .tools/bin/uv
VENV := .venv
export UV_COMPILE_BYTECODE := 1
# Tests wait more than they compute: four at once also where there are two cores. A file's tests share servers.
TESTS_AT_ONCE ?= -n 4 --dist loadfile --no-loadscope-reorder
# The tests end with make, also when it is killed.
PYTEST := setpriv --pdeathsig=KILL $(VENV)/bin/python -m pytest
export UV_PYTHON_DOWNLOADS := never
READY := $(VENV)/.ready

.PHONY: help run up test test-all testbed lint format proto bench dialects setup clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

$(UV):
	$(PYTHON) -m venv .tools
	.tools/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(READY): $(UV) uv.lock pyproject.toml $(wildcard libs/*/pyproject.toml services/*/pyproject.toml)
	$(UV) sync --frozen --python $(PYTHON)
	$(VENV)/bin/python -m compileall -q libs services
	@touch $@

setup: $(READY)  ## make .venv with everything the project needs

run: $(READY)  ## train the digits example: the main job, end to end
	$(VENV)/bin/yard run examples/digits/job.yaml

up: $(READY)  ## start a yard on this machine and leave it running
	$(VENV)/bin/yard up

test: $(READY) lint testbed  ## run every check and every test
	$(PYTEST) $(TESTS_AT_ONCE)

test-all: $(READY) lint testbed  ## the same, and every kill point, both databases, the worker's image (hours)
	$(PYTEST) $(TESTS_AT_ONCE) -m "exhaustive or not exhaustive"

testbed: $(READY)  ## get the real servers that tests use: Kubernetes, Redis, PostgreSQL, S3, nginx, Prometheus
	$(VENV)/bin/python -m scripts.testbed

lint: $(READY)  ## formatting, lint, types, dependency directions, generated code
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy libs services
	$(VENV)/bin/lint-imports
	scripts/codegen --check
	scripts/crds --check
	$(VENV)/bin/python -m scripts.grafana --check
	$(VENV)/bin/python -m scripts.dialects --lint

format: $(READY)  ## format the sources
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

proto: $(READY)  ## generate libs/protos from proto/
	scripts/codegen

bench: $(READY)  ## run every benchmark
	@for b in scripts/bench/[a-z]*.py; do echo "== $$b"; $(VENV)/bin/python $$b || exit 1; done

dialects: $(READY)  ## count the rows of other libraries' specifications that tests prove, and write docs/dialects
	$(VENV)/bin/python -m scripts.dialects

clean:  ## remove what make built
	rm -rf $(VENV) .tools
