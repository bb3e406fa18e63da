# tocsin's everyday commands. Each installs what it needs first; that costs nothing when nothing has changed.
#
#   make demo [FAULT=s1|s2|s3|h1|h2|h3|none]   the whole loop on a throw-away cluster, with one of the faults
#   make test                      linters, then all tests but the long ones
#   make lint                      linters alone
#   make bench                     benchmarks; they print figures and judge nothing
#                                  (accuracy: a sample; `python -m tests.bench.bench_accuracy --part all` is all of it)
#   make acceptance                long runs and repeats; as root also a fresh Debian, and Slurm 24.11 and 26.05
#   make clean                     removes what the others made, .venv too
FAULT ?= s1
PYTHON := .venv/bin/python

.PHONY: install demo test lint bench acceptance clean

install:
	@tools/install.sh test

demo:
	@tools/install.sh demo
	@FAULT=$(FAULT) $(PYTHON) -m tests.lab.demo

test: lint
	$(PYTHON) -m pytest -m "not acceptance"

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

bench: install
	@for file in tests/bench/bench_*.py; do $(PYTHON) -m "$$(echo "$${file%.py}" | tr / .)" || exit 1; done

acceptance: install
	$(PYTHON) -m pytest -m acceptance

clean:
	rm -rf .venv build dist node_daemon/native/lib .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
