# Needs Python 3.11 or later, pip and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= What is the capital of France?
SOAK_SECONDS ?= 120

.PHONY: serve run test check format docs soak bench wheel clean help

help:  ## show the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

serve: $(VENV)/run.stamp  ## install, fetch the built-in model, serve it on port 8000 (ARGS: options of tamis serve)
	@$(BIN)/tamis serve $(ARGS)

# Through the environment, so that no shell reads what is in the question.
run: export TAMIS_QUESTION := $(value PROMPT)
run: $(VENV)/run.stamp  ## install, fetch the built-in model, answer PROMPT
	@$(BIN)/tamis generate --prompt "$$TAMIS_QUESTION"

test: $(VENV)/dev.stamp  ## fetch the built-in model, run the tests (ARGS='-m slow': the slow ones)
	@$(BIN)/tamis pull
	$(BIN)/python -m pytest -m 'not slow' $(ARGS)

check: $(VENV)/dev.stamp  ## lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp  ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/dev.stamp  ## build the documentation into build/docs; warnings are errors
	$(BIN)/python docs/docs_pages.py
	$(BIN)/python -m sphinx -W --keep-going -q -E -b html docs build/docs

soak: $(VENV)/dev.stamp  ## 64 clients at once for SOAK_SECONDS
	TAMIS_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest tests/soak -n 0 -s

bench: $(VENV)/dev.stamp  ## throughput of the server (ARGS: --short, --llama-server PATH, --m3 GGUF)
	$(BIN)/python benchmarks/serving.py $(ARGS)

wheel: $(VENV)/dev.stamp  ## build dist/tamis-*.whl
	$(BIN)/python -m build --wheel

clean:  ## remove the virtual environment and build products
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tamis needs Python 3.11 or later; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/run.stamp: pyproject.toml | $(BIN)/python
	@echo "Installing torch and the rest into $(VENV): about 1 GB, up to 5 GB where pip takes torch with CUDA."
	@echo "It takes a minute or more; pip is silent while it unpacks."
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	@echo "Installing torch and what the tests need into $(VENV): a minute or more; pip is silent while it unpacks."
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/run.stamp
