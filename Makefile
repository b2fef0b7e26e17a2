# Two commands do everything, alone or after each other, and offline once set up:
#
#   make demo    install into .venv, fetch the default model, watch ten requests share a small cache
#   make test    the same set-up, then lint, types and tests (minutes)
#
# Others: test-full (the large counts), lint, lines (the line table), clean. PYTHON=python3.12 picks
# the interpreter for a new .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The stamp carries a checksum of what was installed, so only a change of pyproject.toml installs anew.
STAMP := $(VENV)/.installed-$(shell cksum < pyproject.toml | tr ' ' '-')
# Two threads that wait for a busy core are ten times slower than one; tests do not need two.
TEST_ENV := OMP_NUM_THREADS=1

.PHONY: demo test test-full lint lines model clean
.DEFAULT_GOAL := demo

demo: model
	$(BIN)/minivllm demo

test: lint model
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow"

test-full: lint model
	$(TEST_ENV) $(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lines: $(STAMP)
	$(BIN)/python -m minivllm.course.house

model: $(STAMP)
	@$(BIN)/minivllm fetch smollm2

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Python 3.11 or newer is needed, this is %d.%d: make PYTHON=python3.11" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@rm -f $(VENV)/.installed-*
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
