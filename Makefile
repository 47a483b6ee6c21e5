# `make chat` and `make test` need Python 3.11 or newer, make, and the package index. Nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What others made, for the tests. Its versions stand in this folder.
FOREIGN := tests/acp_server/foreign

.DEFAULT_GOAL := help
.PHONY: help chat test lint bench stress transports conformance format clean

help: ## what there is to make
	@sed -n 's/^\([a-z]*\):.*## /\1  /p' $(MAKEFILE_LIST) | awk '{n=$$1; $$1=""; printf "  make %-8s%s\n", n, $$0}'

chat: $(READY) ## talk to the agent in this terminal
	@$(BIN)/acp-agent chat

test: $(READY)-dev $(READY)-python-sdk $(READY)-node ## run all tests
	@$(BIN)/python -m pytest -q -n auto --dist worksteal

lint: $(READY)-dev ## check style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(READY)-dev ## put the code into shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY)-dev ## measure, and print one table
	@$(BIN)/python -m benchmarks

stress: $(READY)-dev ## run every race test 200 times
	@$(BIN)/python -m pytest -q -n auto -m race --repeat 200 tests/agent_core
	@# Over the wire a repetition starts a process, and repeats its race inside.
	@$(BIN)/python -m pytest -q -n auto -m race --repeat 20 tests/acp_server

transports: $(READY)-dev ## run the black-box tests by WebSocket, and then by HTTP
	@for over in ws http; do \
	  $(BIN)/python -m pytest -q -n auto --dist worksteal --over $$over tests/acp_server || exit 1; \
	done

conformance: $(READY)-dev ## judge our own agent by stdio, WebSocket and HTTP, and the suite by its mutants
	@$(BIN)/python -m conformance run -- $(BIN)/acp-agent serve
	@for scheme in ws http; do \
	  $(BIN)/python -m conformance run --url $$scheme://127.0.0.1:7451/acp -- $(BIN)/acp-agent serve --listen 127.0.0.1:7451 || exit 1; \
	done
	@$(BIN)/python -m conformance run --only PRO -- $(BIN)/acp-agent serve
	@$(BIN)/python -m conformance run --script-model --only MOD --env ACP_AGENT_MODEL=openai:any -- $(BIN)/acp-agent serve
	@$(BIN)/python -m conformance selftest

clean: ## remove what was set up
	rm -rf $(VENV) build dist *.egg-info

# A stamp for each set-up: a second `make` starts at once, a changed pyproject.toml sets up anew.
$(READY): pyproject.toml
	@echo "Setting up $(VENV), once; this takes a minute." >&2
	@$(PYTHON) -c 'import sys; sys.exit("acp-agent needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . >&2
	@touch $@

$(READY)-dev: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' >&2
	@touch $@

# Without an index, or without npm, there are tests that are skipped and say so; the others run.
$(READY)-python-sdk: $(FOREIGN)/requirements.txt $(READY)-dev
	@rm -rf $(VENV)/foreign/python
	@if $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --target $(VENV)/foreign/python -r $< >&2; then touch $@; \
	else echo "NOT INSTALLED: $(FOREIGN)/requirements.txt; its tests will be skipped." >&2; fi

$(READY)-node: $(FOREIGN)/package.json $(FOREIGN)/package-lock.json $(READY)
	@mkdir -p $(VENV)/foreign
	@cp $(FOREIGN)/package.json $(FOREIGN)/package-lock.json $(VENV)/foreign
	@if npm install --prefix $(VENV)/foreign --ignore-scripts --no-audit --no-fund --fetch-retries 1 \
	  --loglevel error >&2; then touch $@; \
	else echo "NOT INSTALLED: $(FOREIGN)/package.json; its tests will be skipped." >&2; fi
