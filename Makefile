# `make` prints this list. Everything is built inside the virtual environment VENV, from constraints.txt.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
STEPS ?= 1500
JOBS ?= 2
T ?= tests/test_tiny.py

BIN := $(VENV)/bin
USABLE := $(VENV)/.usable
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv browser demo docs test test-slow test-all seconds test-one test-tiny zoo ports compat check wheel bench clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## set up .venv: fxpipe, editable, with the tools of development

$(USABLE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e .
	touch $@

$(INSTALLED): $(USABLE)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,lightning,onnxruntime,packed,peft,transformers,trl,zoo]'
	# Their own needs may replace torch, and torchvision may be for another build of it: apart, where only the zoo looks.
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps --upgrade --target $(VENV)/zoo torchvision timm
	touch $@

browser: ## install Chromium, Debian's package, for the tests of the report
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
		test "$$(id -u)" = 0 || { echo 'Chromium is not here, and to install it takes root: sudo make browser' >&2; exit 1; }; \
		apt-get update -q && apt-get install -qy --no-install-recommends chromium; }

demo: $(USABLE) ## compile a GPT for two workers and train it, in minutes; installs only what that takes
	$(BIN)/fxpipe compile examples/gpt.py -n 2 -o build-demo --verify
	$(BIN)/fxpipe run build-demo --steps $(STEPS) --out out-demo
	@echo
	@echo 'stages    build-demo/stage_0.py, build-demo/stage_1.py'
	@echo 'plan      build-demo/plan.json'
	@echo 'metrics   out-demo/metrics.jsonl'
	@echo 'weights   out-demo/model.safetensors'

docs: venv ## build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo 'read it: python -m http.server -d site 8000'

# --dist worksteal: each of the two takes half of the files in order, and whoever ends first takes from the other.
# An empty PYTHONDONTWRITEBYTECODE lets pytest keep the tests as it has rewritten them: else each of the two does so anew.
TESTS = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

test: venv ## run the quick tests, on two cores in minutes
	$(TESTS) -m 'not slow' $(BUDGETS)

# Where time is short, as in CI, the slow tests of what changed come first; which others are left out differs from
# day to day.
test-slow: venv ## run the slow tests; or as many as begin WITHIN=900 seconds, those of changed rooms first
	$(TESTS) -m slow $(if $(WITHIN),--within $(WITHIN) --shuffle "$$(git log -1 --format=%cs)" --first "$$($(BIN)/python tests/changed.py)")

test-all: venv ## run all tests, on two cores in less than an hour
	$(TESTS) --hypothesis-profile ci

seconds: venv ## run all tests, and write what each takes into tests/seconds.json
	$(TESTS) --write-seconds

test-one: venv ## run T=tests/passes/test_defer.py, or with any arguments of pytest: T='tests/ir -k law -x'
	$(BIN)/python -m pytest $(T)

test-tiny: venv ## run the first test there is: capture to training, in 10 seconds
	$(BIN)/python -m pytest tests/test_tiny.py

zoo: venv ## check every model of the zoo, or ONLY='llama|t5', JOBS=2 at a time; writes docs/reference/coverage.md
	$(if $(ONLY),,$(BIN)/python -m pytest zoo)
	$(BIN)/python zoo/run.py --only '$(ONLY)' --jobs $(JOBS)

ports: venv ## compare the ports of training scripts in examples/ports with the scripts
	$(BIN)/python -m pytest examples/ports

compat: venv ## run the quick tests that lean on torch with every version tested, or VERSIONS='2.11.0 2.12.1'; several GB each
	$(BIN)/python tests/compat.py --jobs $(JOBS) $(if $(VERSIONS),--versions $(VERSIONS) --)

check: venv ## lint, formatting, and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: venv ## build dist/fxpipe-*.whl, by way of a source distribution
	$(BIN)/python -m build --no-isolation

bench: venv ## measure the pipeline against one process and data parallel
	$(BIN)/python benchmarks/efficiency/main.py

clean: ## remove what was built; keeps .venv
	rm -rf build build-* dist out out-* *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
