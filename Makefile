# SPDX-License-Identifier: Apache-2.0
# `make run` serves on http://127.0.0.1:8000, `make test` runs every check; each makes what it needs first.
#
#   make run ARGS="--port 9000"      any flag of `sampan serve`
#   make test PYTEST="-k realtime"   any flag of pytest
#   make lint · make lock · make clean
#   make … PYTHON=python3.12         another interpreter (3.11 to 3.13) for a new .venv

PYTHON ?= python3
ARGS ?=
PYTEST ?=
BIN := .venv/bin
# Programs that some tests drive, as program:package. Without them those tests say so and are skipped.
PROGRAMS := chromium:chromium curl:curl nginx:nginx-light
NODE_PROGRAMS := wscat@6.1.0
NODE_BIN := $(CURDIR)/build/node/node_modules/.bin

.PHONY: run test lint lock clean
.DELETE_ON_ERROR:
.SUFFIXES:

run: .venv/.run
	@exec $(BIN)/python -m server serve $(ARGS)

test: .venv/.test build/.programs build/.node lint
	find tests -name '*.test.mjs' -not -path '*/node_modules/*' -print0 | xargs -0 --no-run-if-empty node --test
	PATH="$(NODE_BIN):$$PATH" $(BIN)/python -m pytest $(PYTEST)

lint: .venv/.test
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

# ---- what is needed; a stamp each, so that a second run takes no time -------------------------------------

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo 'Sampan needs Python 3.11, 3.12 or 3.13: make run PYTHON=/path/to/python3.12'; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
		echo 'python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv'; exit 1; }

.venv/.run: .venv/bin/python requirements.lock pyproject.toml
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

.venv/.test: .venv/bin/python requirements-test.lock pyproject.toml
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-test.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

build/.programs: Makefile
	@mkdir -p build
	@missing=''; for each in $(PROGRAMS); do \
		command -v "$${each%%:*}" >/dev/null || [ -x "/usr/sbin/$${each%%:*}" ] || missing="$$missing $${each#*:}"; \
	done; \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	else echo "not here, and only root can install them:$$missing; their tests are skipped"; fi
	@touch $@

build/.node: Makefile
	@mkdir -p build
	npm install --silent --no-audit --no-fund --prefix build/node $(NODE_PROGRAMS)
	@touch $@

lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet uv
	printf 'hatchling\neditables\n' > build/lock/build.in
	for extra in '' test; do \
		file=requirements$${extra:+-$$extra}.lock; verb=$${extra:-run}; \
		build/lock/bin/uv pip compile pyproject.toml build/lock/build.in $${extra:+--extra $$extra} \
			--universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet \
			$(UPGRADE) -o $$file && \
		sed -i "1i # What \`make $$verb\` installs. Made by \`make lock\` from pyproject.toml: exact versions and hashes, Python 3.11 to 3.13." $$file; \
	done

clean:
	rm -rf build .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find server tests -name __pycache__ -type d -prune -exec rm -rf {} +
