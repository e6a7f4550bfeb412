# moefold. Every target makes .venv by itself and keeps it up to date; `make help` lists them.
#   PYTHON=...  the interpreter to build .venv on        VENV=...  where to build it
#   ARGS=...    passed on, e.g. make test ARGS="-k router", make demo ARGS="seed=2"

VENV   ?= .venv
PY     := $(VENV)/bin/python
INPUTS := pyproject.toml constraints.txt tools/install
RUN    := $(VENV)/.installed
TEST   := $(VENV)/.installed-test

.DEFAULT_GOAL := help
.PHONY: help demo test lint types pytest format golden plants matrix fuzz chaos gpu clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUN)  ## train a small mixture-of-experts model on real text: about five minutes
	@$(PY) -m moefold demo $(ARGS)

# Lint and types are checked beside the tests. They say something only where they fail, and last, so
# that pytest's closing line ends the output of a run in which all is well.
test: $(TEST)  ## lint, types and all tests that this machine can run
	@found=$$(mktemp); failed=; $(MAKE) --no-print-directory -k lint types >"$$found" 2>&1 & checks=$$!; \
	    $(MAKE) --no-print-directory pytest || failed=" pytest"; \
	    if wait $$checks; then grep "NOT checked" "$$found"; \
	    else failed="$$failed lint or types"; cat "$$found"; fi; rm -f "$$found"; \
	    test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

lint: $(TEST)  ## style: ruff's rules and its formatting
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .

types: $(TEST)  ## types: pyright
	@tools/types $(PY)

# Tests start many processes, of which each would compile what it imports.
pytest: $(TEST)  ## the tests alone
	@PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(ARGS)

format: $(TEST)  ## write the formatting and the safe fixes that lint asks for
	@$(PY) -m ruff check --fix . ; $(PY) -m ruff format .

golden: $(TEST)  ## rewrite the golden dumps of the recipes; look at the difference
	@$(PY) -m tests.refresh_golden

plants: $(TEST)  ## plant bugs in a copy and show that tests notice them: several minutes
	@$(PY) -m tests.plants $(ARGS)

matrix: $(TEST)  ## prove every layout of the matrix against one rank: half an hour on two cores
	@$(PY) -m moefold verify --matrix $(ARGS)
	@$(PY) -m tests.gloo.resharding
	@$(PY) -m pytest -q -m matrix tests/gloo tests/cpu tests/pure
	@$(PY) -m pytest -q -m matrix tests/triton/test_code_*.py

fuzz: $(TEST)  ## try 3,000 mutated inputs of a new seed, which is printed: about three minutes
	@$(PY) -m tests.fuzz $(ARGS)

chaos: $(RUN)  ## train under fire for half an hour, then as long in peace, and compare
	@$(PY) bench/chaos.py $(ARGS)

GPU := "-m pytest -q tests/gpu" "bench/on_gpu.py ceilings" "bench/on_gpu.py operations" \
    "bench/on_gpu.py steps" "bench/on_gpu.py state" "bench/on_gpu.py offload" \
    "bench/on_gpu.py memory" "bench/on_gpu.py capture" "bench/on_gpu.py stash" \
    "bench/on_gpu.py clones" "bench/on_gpu.py tables"

gpu: $(TEST)  ## test and measure on this machine's GPU, each part in ten minutes; without, a smoke run
	@failed=; for part in $(GPU); do timeout 600 $(PY) $$part || failed="$$failed; $$part"; done; \
	    test -z "$$failed" || { echo "failed$$failed" >&2; exit 1; }

clean:  ## remove .venv, caches and built packages; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN): $(INPUTS)
	@tools/install $(VENV)
	@touch $@

$(TEST): $(INPUTS)
	@tools/install $(VENV) test
	@touch $(RUN) $@

# Stamps mean nothing when the interpreter behind them is gone or an install was broken off.
ifneq ($(shell test ! -e $(VENV)/.unfinished && $(PY) -c "" 2>/dev/null && echo sound),sound)
.PHONY: $(RUN) $(TEST)
endif
