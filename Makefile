# Everything runs from a virtual environment in .venv, made on first use.
# Each target installs only what it needs; stamp files keep later calls free of pip.
# Another interpreter beside the usual one: make PYTHON=python3.13 VENV=.venv-3.13 test

PYTHON ?= python3
SECONDS_GIVEN ?= 86400
# Each process begins with a stretch of neighbours, which share servers and models, and takes over
# from the others when it is done. The fast tests compute; the slow ones wait for what they start, so
# they get more processes than there are cores.
CORES := $(shell $(PYTHON) -c "import os; print(os.cpu_count() or 1)")
PARALLEL ?= --dist worksteal --maxprocesses 8 --numprocesses $(CORES)
PARALLEL_SLOW ?= --dist worksteal --maxprocesses 8 --numprocesses $(shell expr $(CORES) + 2)
# To count lines takes half as long again as the tests themselves. COVER=--cov does so anywhere.
COVER ?= $(if $(CI),--cov)
VENV := .venv
PY := $(VENV)/bin/python

# Hundreds of processes import the package; without compiled files each would compile it again.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1
PIP := $(PY) -m pip --quiet --quiet
PROGRESS := $(PY) scripts/progress.py
SHELL := /bin/sh

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help test test-fast test-slow test-all-pythons test-distributed soak-distributed check format docs demo eval-local bench bench-core \
	bench-parts bench-smoke bench-pin bench-transports bench-gateway bench-log bench-distributed \
	bench-suspended bench-mcp bench-trace bench-view bench-context repeat soak mutants clean FORCE

help: ## list the targets
	@echo "usage: make <target>"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' Makefile

test: test-fast test-slow ## all tests on all cores

test-fast: $(VENV)/.stamp-test ## tests without processes, servers and models; with coverage in CI, or COVER=--cov
	@$(PY) -m pytest $(PARALLEL) --fast $(COVER)

test-slow: $(VENV)/.stamp-test .cache/aimock/.stamp .cache/mcp/.stamp ## the other tests
	@$(PY) -m pytest $(PARALLEL_SLOW) -m slow

test-distributed: $(VENV)/.stamp-test ## 200 runs on each engine, whose workers are killed; a minute or two
	@$(PY) -m tests.durable.kill_driver --engine store dbos temporal --runs 200 --pace 0.05 --lease 2 --blows 16

test-all-pythons: ## the core tests on every Python here; FAST=1 for a part of them
	@$(PYTHON) scripts/all_pythons.py $(if $(FAST),--fast)

# mkdocs is not --quiet: that would drop what --strict counts.
check: $(VENV)/.stamp-test $(VENV)/.stamp-docs ## lint, formatting, types and docs (not the tests)
	@echo "ruff check";    $(PY) -m ruff check --quiet .
	@echo "ruff format";   $(PY) -m ruff format --check --quiet .
	@echo "mypy, basedpyright, mkdocs"
	@$(PY) -m mypy & mypy=$$!; \
		$(PY) -m basedpyright & pyright=$$!; \
		$(PY) -m mkdocs build --strict || failed=1; \
		wait $$mypy || failed=1; wait $$pyright || failed=1; \
		test -z "$$failed"

format: $(VENV)/.stamp-lint ## format the code and apply safe lint fixes
	@$(PY) -m ruff check --fix-only --quiet .
	@$(PY) -m ruff format .

docs: $(VENV)/.stamp-docs ## build the documentation into site/
	@$(PY) -m mkdocs build --strict

demo: $(VENV)/.stamp-local ## watch a real model use real tools; needs no key and no network
	@$(PY) examples/demo.py

eval-local: $(VENV)/.stamp-local ## how well the packaged model drives tools; ten minutes
	@$(PY) -m benchmarks.eval_local $(EVAL)

bench: $(VENV)/.stamp-core ## compare with other frameworks, into docs/benchmarks; half an hour; ONLY=name for some
	@$(PY) -m benchmarks.compare $(if $(ONLY),--only $(ONLY)) $(BENCH)

bench-core: $(VENV)/.stamp-core ## compare with the bare loop, one line a workload; a minute
	@$(PY) -m benchmarks.core $(BENCH)

bench-transports: $(VENV)/.stamp-test ## what a transport adds to its SDK, for each delta
	@$(PY) -m benchmarks.transports $(BENCH)

bench-gateway: $(VENV)/.stamp-test ## many streams through the gateway, some clients vanishing
	@$(PY) -m benchmarks.gateway $(BENCH)

bench-log: $(VENV)/.stamp-core ## what it costs to log a run, and to find one again
	@$(PY) -m benchmarks.run_log $(BENCH)

bench-distributed: $(VENV)/.stamp-test ## turns a second on Postgres, DBOS and Temporal, into docs/benchmarks
	@$(PY) -m benchmarks.distributed $(BENCH)

bench-suspended: $(VENV)/.stamp-test ## 100,000 suspended runs in Postgres: their size, and how fast one wakes up
	@$(PY) -m benchmarks.suspended $(BENCH)

bench-mcp: $(VENV)/.stamp-test ## what a call of a tool of an MCP server adds to its SDK
	@$(PY) -m benchmarks.mcp_calls $(BENCH)

bench-trace: $(VENV)/.stamp-test ## what tracing adds to a turn, here and in pydantic-ai
	@$(PY) -m benchmarks.trace $(BENCH)

bench-view: $(VENV)/.stamp-test ## the page of runs on logs of 1, 20 and 200 MB, and on 10,000 runs
	@$(PY) -m benchmarks.view $(BENCH)

bench-context: $(VENV)/.stamp-test ## what a conversation of 500 turns sends, with and without compaction
	@$(PY) -m benchmarks.context $(BENCH)

bench-parts: $(VENV)/.stamp-core ## rates of the thinking filter and the message assembler
	@$(PY) -m benchmarks.parts

bench-smoke: $(VENV)/.stamp-core ## see that the benchmarks run, and count operations against their pins
	@$(PY) -m benchmarks.smoke

bench-pin: $(VENV)/.stamp-core ## write the operations of each workload; REASON="…" where a count has risen
	@$(PY) -m benchmarks.operations --pin --reason "$$REASON"

repeat: $(VENV)/.stamp-test ## repeat tests on one busy core, to show a race: REPEAT="tests/… -n 200"
	@$(PY) scripts/repeat.py $(REPEAT)

soak: $(VENV)/.stamp-test ## a million random lives, 5,000 kills, races, flipped bytes; SECONDS_GIVEN=60
	@CLARK_AGENT_SOAK=10 $(PY) -m pytest $(PARALLEL) -m soak
	@$(PY) -m tests.run_log.crash_driver --rounds 5000 --seconds $(SECONDS_GIVEN)
	@$(PY) -m tests.run_log.contention_driver --rounds 200
	@$(PY) -m tests.run_log.waiting_driver --rounds 500 --seconds $(SECONDS_GIVEN)
	@$(PY) -m tests.run_log.decision_driver --runs 200 --replays 50
	@$(PY) -m tests.run_log.damage_driver
	@$(PY) -m tests.model.soak --seconds $(SECONDS_GIVEN)

soak-distributed: $(VENV)/.stamp-test ## 5,000 runs on each engine, and how long they stand still after a kill
	@for engine in store dbos temporal; do \
		$(PY) -m tests.durable.kill_driver --engine $$engine --runs 5000 --every 3 --seconds 3600 || exit 1; \
	done
	@$(PY) -m tests.durable.kill_driver --runs 1000 --stop-postgres --every 5
	@$(PY) -m tests.durable.kill_driver --runs 1000 --drain

mutants: $(VENV)/.stamp-test ## break promises on purpose: the tests must notice; ONLY=name for one
	@$(PY) -m tests.model.mutants $(if $(ONLY),--only "$(ONLY)")

clean: ## remove the environments and everything generated
	@rm -rf $(VENV) .venv-3.* .bench .cache site dist htmlcov .coverage .coverage.* .hypothesis \
		.mypy_cache .pytest_cache .ruff_cache
	@find src tests examples benchmarks -name __pycache__ -type d -prune \
		-exec rm -rf {} + 2>/dev/null || true

# The environment. A stamp is written last, so an interrupted step is done again. The
# first one holds the directory it was made in: an environment that was moved, or whose
# interpreter no longer starts, is made anew.

ifneq ($(shell $(PY) -c "" 2>/dev/null && cat $(VENV)/.stamp-venv 2>/dev/null),$(CURDIR))
$(VENV)/.stamp-venv: FORCE
endif

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) -V 2>&1 | head -n 1)." >&2; \
		echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) scripts/progress.py "creating $(VENV)" $(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade "pip>=25.1"
	@pwd -P > $@

$(VENV)/.stamp-core: $(VENV)/.stamp-venv pyproject.toml src/clark_agent/_version.py
	@$(PROGRESS) "installing clark-agent" $(PIP) install --editable .
	@touch $@

# A model of 253 MB, and llama.cpp to run it.
$(VENV)/.stamp-local: $(VENV)/.stamp-core
	@$(PROGRESS) "installing llama.cpp and a small model (350 MB)" $(PIP) install --editable ".[local]"
	@touch $@

$(VENV)/.stamp-lint: $(VENV)/.stamp-core
	@$(PROGRESS) "installing the linters and type checkers" $(PIP) install --group lint
	@touch $@

# The typing tests run the type checkers, and the type checkers read the tests.
$(VENV)/.stamp-test: $(VENV)/.stamp-lint
	@$(PROGRESS) "installing the test tools" $(PIP) install --editable ".[all,local]" --group test
	@touch $@

# What the core tests need and no more, so that they also show what the core does without extras.
$(VENV)/.stamp-test-core: $(VENV)/.stamp-core
	@$(PROGRESS) "installing the tools of the core tests" $(PIP) install --group test-core
	@touch $@

# A mock provider for the tests of the transports. Without Node they are skipped, but not in
# continuous integration. No stamp is written then, so a machine that gets Node later gets the mock
# with the next call.
.cache/aimock/.stamp: tests/transports/servers/package.json | $(VENV)/.stamp-test
	@if $(PY) -m tests.transports.servers.aimock; then touch $@; else test -z "$$CI"; fi

# Servers and clients of others for the tests of MCP, on the same terms.
.cache/mcp/.stamp: tests/mcp/servers/package.json $(wildcard tests/mcp/servers/requirements-*.txt) \
		| $(VENV)/.stamp-test
	@if $(PY) -m tests.mcp.servers.install; then touch $@; else test -z "$$CI"; fi

$(VENV)/.stamp-docs: $(VENV)/.stamp-core
	@$(PROGRESS) "installing the documentation tools" $(PIP) install --group docs
	@touch $@
