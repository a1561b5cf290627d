# Everything a checkout can do. The first call makes the virtual environment; after that nothing needs the network.
#
#   make demo     the page view pipeline on generated input, or on an access log: make demo LOG=/path/to/access.log
#   make test     lint, types, all tests, Spark, the code in the documentation, coverage: under eight minutes
#   make check    the inner loop, under two minutes: lint, types, fast tests
#   make proof    the proof of reliability, with its table: under half an hour; LOGLIB_SOAK=20 make proof goes on for hours
#   make bench    the benchmarks; writes bench/RESULTS.md
#   make clean    remove the environment and what the tools left

VENV_PYTHON := .venv/bin/python
# Named by its content, so that a checkout that only touches pyproject.toml does not install again.
STAMP := .venv/installed-$(shell cat pyproject.toml scripts/venv.sh | cksum | cut -d ' ' -f 1)
PYTEST := $(VENV_PYTHON) -m pytest -q
# The proof makes and deletes files by the million: in memory where there is room, since a disk would be busy with that alone.
PROOF_FILES := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000000 { print "TMPDIR=/dev/shm" }')

.PHONY: help demo test check lint types tools proof bench clean venv java

help:
	@sed -n 's/^#  //p' Makefile

$(STAMP):
	@scripts/venv.sh
	@touch $@

venv: $(STAMP)

java:
	@scripts/java-home.sh --install >/dev/null

demo: venv java
	@JAVA_HOME="$$(scripts/java-home.sh)" $(VENV_PYTHON) examples/pageviews.py $(if $(LOG),"$(LOG)")

tools: venv
	@scripts/proof-tools.sh

lint: venv
	@echo "== ruff"
	@$(VENV_PYTHON) -m ruff check

types: venv
	@echo "== mypy"
	@$(VENV_PYTHON) -m mypy

check: lint types tools
	@echo "== fast tests"
	@$(PYTEST) -n 2 -m "not slow and not spark and not reliability"

# Coverage counts what child processes run, too. The Spark tests go without: it would slow each of Spark's workers.
test: lint types tools java
	@rm -f .coverage .coverage.*
	@echo "== fast tests, measured"
	@$(PYTEST) -n 2 -m "not slow and not spark and not reliability" --cov --cov-report=
	@echo "== coverage of the log itself (adapters stand in packages of their own)"
	@$(VENV_PYTHON) -m coverage report --include="src/loglib/*.py,src/loglib/append/*.py,src/loglib/format/*.py,src/loglib/groups/*.py,src/loglib/system/*.py" --fail-under=100
	@echo "== slow tests"
	@$(PYTEST) -n 2 -m "slow and not spark"
	@if [ -n "$$(scripts/java-home.sh)" ]; then \
	    echo "== Spark tests"; \
	    JAVA_HOME="$$(scripts/java-home.sh)" $(PYTEST) -m spark; \
	else \
	    echo "== Spark tests left out: no Java"; \
	fi

proof: venv tools
	@rm -rf .reliability
	@echo "== reliability tests"
	@status=0; \
	$(PROOF_FILES) $(PYTEST) -n 2 --dist worksteal --timeout=$(if $(LOGLIB_SOAK),0,600) \
	    -o faulthandler_timeout=$(if $(LOGLIB_SOAK),0,660) -m reliability tests/reliability || status=$$?; \
	$(VENV_PYTHON) tests/reliability/counts.py; \
	exit $$status

bench: venv
	@$(VENV_PYTHON) bench/run.py --write

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* pageviews-out
