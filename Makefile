# Everything a checkout can do. The first call makes the virtual environment; after that nothing needs the network.
#
#   make demo     page views as a live stream of generated lines, or of an access log: make demo LOG=/path/to/access.log
#   make test     lint, types, tests, Spark, the code in the documentation: about twenty minutes on two cores
#   make check    the inner loop, about sixteen minutes: lint, types, fast tests
#   make coverage the fast tests again, measured: they must run every branch of the log itself; about twenty-two minutes
#   make proof-sample  a fixed part of the proof, with something of each goal: about fifteen minutes
#   make proof    the proof of reliability, with its table, the coverage, and the tests that take long: almost
#                 three hours; LOGLIB_SOAK=20 make proof goes on for hours
#   make bench    the benchmarks; writes bench/RESULTS.md and the chart of the landing page
#   make bench-spark   those of the connector for Spark, about ten minutes; writes the last section of that file
#   make paper    the experiment of the Kafka paper, beside other systems; writes the appendix of docs/guarantees.md and its charts
#   make docs     the documentation as a site, in site/; needs no network
#   make spark-archive   one file with all that the executors of a Spark cluster need, in dist/
#   make clean    remove the environment and what the tools left

VENV_PYTHON := .venv/bin/python
# Named by its content, so that a checkout that only touches pyproject.toml does not install again.
STAMP := .venv/installed-$(shell cat pyproject.toml scripts/venv.sh | cksum | cut -d ' ' -f 1)
PYTEST := $(VENV_PYTHON) -m pytest -q
# Three processes for two cores: the tests wait for disks and for other processes almost a third of the time.
FAST := -n 3 -m "not slow and not spark and not reliability"
# The JVMs of the tests live for seconds: the second compiler and threads for garbage would cost more than they bring.
SHORT_LIVED := -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
# PROOF_FILES, the variable below, makes their files cost no disk. A module's session lives in one process of the two.
SPARK = JAVA_HOME="$$(scripts/java-home.sh)" SPARK_SUBMIT_OPTS="$(SHORT_LIVED)" SPARK_DAEMON_JAVA_OPTS="$(SHORT_LIVED)" $(PYTEST)
# The proof makes and deletes files by the million: in memory where there is room, since a disk would be busy with that alone.
PROOF_FILES := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000000 { print "TMPDIR=/dev/shm" }')

.PHONY: help demo test check coverage lint types tools browser proof reliability slow slow-spark proof-sample bench bench-spark paper docs spark-archive clean venv java

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

browser: venv
	@scripts/proof-tools.sh --browser

lint: venv
	@echo "== ruff"
	@$(VENV_PYTHON) -m ruff check

types: venv
	@echo "== mypy"
	@$(VENV_PYTHON) -m mypy

check: lint types tools
	@echo "== fast tests"
	@$(PYTEST) $(FAST)

test: check java
	@if [ -n "$$(scripts/java-home.sh)" ]; then \
	    echo "== Spark tests"; \
	    $(PROOF_FILES) $(SPARK) -n 2 --dist loadfile -m "spark and not slow"; \
	else \
	    echo "== Spark tests left out: no Java"; \
	fi

# Coverage counts what child processes run, too. Measuring doubles the time of many tests, so `make proof` does it, and not
# `make test`. The tests that are left out run adapters only, or read source code.
NOT_MEASURED := --ignore-glob='*/test_spark*' --ignore=tests/project/test_docs.py --ignore=tests/project/test_types.py
ADAPTERS := aio audit cli metrics spark testing ui
coverage: venv tools
	@rm -f .coverage .coverage.*
	@echo "== fast tests, measured"
	@$(PYTEST) $(FAST) $(NOT_MEASURED) --cov --cov-report=
	@echo "== coverage of the log itself (adapters stand in packages of their own)"
	@$(VENV_PYTHON) -m coverage report --include="src/loglib/**" --omit="$$(printf 'src/loglib/%s/**,' $(ADAPTERS))" --fail-under=100

RELIABILITY = $(PROOF_FILES) $(PYTEST) -n 2 tests/reliability

# What chance decides is marked slow, and left to the whole proof.
proof-sample: venv tools
	@rm -rf .reliability
	@echo "== a sample of the reliability tests"
	@status=0; \
	LOGLIB_SOAK=0.2 $(RELIABILITY) --sample -m "reliability and not slow" || status=$$?; \
	$(VENV_PYTHON) tests/reliability/counts.py || status=$$?; \
	exit $$status

# The stages of the proof. The file `proved` has the commits on which they passed last; from it the sample knows what has
# changed since.
proof: venv tools browser java
	@status=0; \
	for stage in reliability coverage slow slow-spark; do \
	    MAKE="$(MAKE)" scripts/prove.sh $$stage || status=$$?; \
	done; \
	exit $$status

reliability: venv tools
	@rm -rf .reliability
	@echo "== reliability tests"
	@status=0; \
	$(RELIABILITY) --dist worksteal --timeout=$(if $(LOGLIB_SOAK),0,600) \
	    -o faulthandler_timeout=$(if $(LOGLIB_SOAK),0,660) -m reliability || status=$$?; \
	$(VENV_PYTHON) tests/reliability/counts.py || status=$$?; \
	exit $$status

slow: venv tools browser
	@echo "== tests that take long"
	@$(PYTEST) -n 2 -m "slow and not spark and not reliability"

slow-spark: venv java
	@echo "== Spark tests that take long: clusters, streams"
	@[ -n "$$(scripts/java-home.sh)" ] || { echo "they need Java"; exit 1; }
	@$(PROOF_FILES) $(SPARK) -n 2 --dist loadfile -m "spark and slow"

bench: venv
	@$(VENV_PYTHON) bench/run.py --write
	@$(VENV_PYTHON) scripts/speed_chart.py

bench-spark: venv java
	@JAVA_HOME="$$(scripts/java-home.sh)" $(VENV_PYTHON) bench/spark.py --write

paper: venv
	@$(VENV_PYTHON) -m pip install --quiet --editable '.[paper]'
	@$(VENV_PYTHON) bench/paper.py --write

docs: venv
	@NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build -q && echo "site/index.html"

spark-archive: venv
	@$(VENV_PYTHON) scripts/spark_archive.py

clean:
	rm -rf dist site .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* pageviews-out
