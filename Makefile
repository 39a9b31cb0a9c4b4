# Two commands do everything on a machine with Python 3.11+ and make: `make test` and `make reproduce`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Bytecode is written when a module is first imported: most of what is installed never is, and tests start hundreds of
# processes.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/pip install --quiet --no-compile

.PHONY: test check reproduce docs lint format clean

# The linters take one core for a while, in which the tests have the others.
test: $(READY)
	$(MAKE) --no-print-directory --jobs=2 lint check

check: $(READY)
	$(BIN)/pytest -n auto --dist worksteal

reproduce: $(READY)
	$(BIN)/fastweights reproduce all --scale small

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

# torch first and pinned, so that nothing else decides which build is installed; triton without its dependencies, because
# the CPU build of torch comes without it and the kernels are tested in its interpreter.
$(READY): pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fastweights needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 test")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) torch==2.13.0
	[ "$$(uname)" != Linux ] || $(INSTALL) --no-deps triton==3.7.1
	$(INSTALL) --editable '.[dev]'
	touch $@
