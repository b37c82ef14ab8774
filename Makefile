# Everything a contributor runs. `make` alone lists the targets.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CODE   := src tests bench demo examples

# The first interpreter that is new enough; override with `make PYTHON=/path/to/python …`.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

# Extra arguments for demo, bench, test and soak: `make bench ARGS="append_tail --quick"`.
ARGS ?=

# Two workers share the tests, and one of them has the Spark session. Who names files wants one process.
WORKERS = $(if $(filter tests% src%,$(ARGS)),,--numprocesses 2)

.DEFAULT_GOAL := help
.PHONY: help demo test spark matrix soak lint typecheck format bench tasks weight first versions release docs jar lock clean
.SUFFIXES:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## Show on real rows what works
	@$(BIN)/python -m demo $(ARGS)

test: lint typecheck ## Lint, type-check and run the tests
	@$(BIN)/python -m pytest $(WORKERS) $(ARGS)

spark: $(STAMP) ## Run the tests of the Spark pipeline alone
	@$(BIN)/python -m pytest tests/spark $(ARGS)

matrix: $(STAMP) ## Run the main tests of the Spark pipeline on each version of PySpark that is allowed
	@$(BIN)/python -m tests.spark.matrix $(ARGS)

soak: $(STAMP) ## Run the slow tests: long races, crashes, many rows; ends with a report
	@$(BIN)/python -m pytest -m soak $(ARGS); status=$$?; $(BIN)/python -m tests.report; exit $$status

lint: $(STAMP) ## Check style and formatting
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)

typecheck: $(STAMP) ## Check types, strictly
	@$(BIN)/mypy --strict src bench demo examples

format: $(STAMP) ## Format the code and apply safe fixes
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)

bench: $(STAMP) ## Measure against the peers and store the results
	@$(BIN)/python -m bench $(ARGS)

tasks: ## Count what users write for twenty tasks, with lancewal and its peers
	@"$(PYTHON)" -m venv .venv-peers
	@.venv-peers/bin/python -m pip --disable-pip-version-check --quiet install . deltalake duckdb lancedb "pyiceberg[pyarrow,sql-sqlite]" pandas
	@.venv-peers/bin/python -m bench.user_tasks --write

weight: $(STAMP) ## Measure what an installation weighs, beside LanceDB and Delta Lake
	@$(BIN)/python -m bench.weight --write

first: $(STAMP) ## Measure the way from an empty environment to the first put and the first search
	@$(BIN)/python -m bench.first_hour --write

versions: $(STAMP) ## Run core tests of the wheel on other versions of Python and pylance
	@$(BIN)/python -m bench.versions --write

release: $(STAMP) ## Build sdist, wheel and bill of materials, and check them in an empty environment
	@$(BIN)/python -m bench.release

docs: $(STAMP) ## Build the documentation site in site/
	@# Not --quiet: mkdocs counts no warning then that it does not print, and builds on.
	@said=$$(NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1) || { echo "$$said" >&2; exit 1; }
	@echo "site/index.html"

jar: $(STAMP) ## Compile the front of Spark's planner; needs a Java compiler, which users do not
	@$(BIN)/python java/build.py

clean: ## Remove the environment and everything that a run leaves behind
	rm -rf $(VENV) .venv-lock .venv-peers .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site demo-output spark-warehouse
	find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +

# The build tools come first, pinned like the rest, so that nothing that is built from
# source (PySpark, lancewal itself) fetches unpinned ones. The stamp is written last:
# an interrupted installation is repeated.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

$(STAMP): requirements-dev.lock requirements-build.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "lancewal needs Python 3.11 or newer; none was found. Install one, or pass PYTHON=/path/to/python." >&2; exit 1; }
	@echo "Installing the pinned packages into $(VENV); the first time this takes a few minutes."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@$(PIP) install --require-hashes -r requirements-build.lock
	@$(PIP) install --require-hashes --no-build-isolation -r requirements-dev.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# Three lock files. requirements.lock is what users get who install lancewal alone: `make release` installs exactly
# that and tries the wheel with it. requirements-dev.lock has all extras, the tests' tools and the documentation's: `.venv`,
# and so every other target. requirements-build.lock builds packages from source. The first two agree on every version.
# Hashes of every published file, for all platforms; no index is named, so the machine's own applies.
COMPILE := .venv-lock/bin/uv pip compile --quiet --no-config --universal --fork-strategy fewest --python-version 3.11 \
	--generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"

lock: ## Pin the newest versions that pyproject.toml allows
	@"$(PYTHON)" -m venv .venv-lock
	@.venv-lock/bin/python -m pip --disable-pip-version-check --quiet install uv
	@$(COMPILE) --upgrade --extra dev pyproject.toml --output-file requirements-dev.lock
	@$(COMPILE) --upgrade --constraint requirements-dev.lock pyproject.toml --output-file requirements.lock
	@$(COMPILE) --upgrade --constraint requirements-dev.lock requirements-build.in --output-file requirements-build.lock
