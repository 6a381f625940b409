# `make demo` and `make test` set up everything themselves, in .venv, from nothing but python3.11 and pip.
# A second call installs nothing unless pyproject.toml or constraints.txt has changed.
#
# `make docs` builds the documentation into site/, `make coverage` a report of what the tests run into htmlcov/.
#
# torch from PyPI brings CUDA libraries of several GB. Without a GPU, the CPU build is enough and much smaller:
#   make demo PIP_ARGUMENTS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3.11
VENV ?= .venv
PIP_ARGUMENTS ?=
TESTS ?= tests
MARKED := -m "not thorough"

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGUMENTS)
DEMO_STAMP := $(VENV)/.installed-demo
TEST_STAMP := $(VENV)/.installed-test
DOCS_STAMP := $(VENV)/.installed-docs
TRITON_STAMP := $(VENV)/.installed-triton
RAY_STAMP := $(VENV)/.installed-ray
BROWSER_STAMP := $(VENV)/.installed-browser
PEERS ?= .peers
VLLM ?= vllm
VLLM_STAMP := $(PEERS)/.installed-$(VLLM)
SOURCES := vsched policies workers tests docs/examples

.PHONY: demo test test-all install format format-check lint types layers unit kernels ray browser vllm wheel coverage docs clean
.NOTPARALLEL:

# Tests start hundreds of processes, which would each compile their modules again.
unexport PYTHONDONTWRITEBYTECODE

demo: $(DEMO_STAMP)
	$(BIN)/vsched demo

# The order is the price of each check: what fails fast comes first. Types are checked, on one core, while tests run.
test: format-check lint layers wheel
	$(MAKE) types & types=$$!; $(MAKE) unit; status=$$?; wait $$types && exit $$status

# As CI: further cases of claims that `make test` covers by a faster case.
test-all:
	$(MAKE) test MARKED=

install: $(TEST_STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing vsched with its workers into $(VENV); the first time takes minutes."
	$(INSTALL) -e '.[workers,demo]'
	@touch $@

# Everything that the demo needs is in here too, so its stamp is set as well.
$(TEST_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing vsched with workers and development tools into $(VENV); the first time takes minutes."
	$(INSTALL) -e '.[workers,demo,dev]'
	@touch $@ $(DEMO_STAMP)

$(DOCS_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the tools of the documentation into $(VENV)."
	$(INSTALL) -e '.[docs]'
	@touch $@

$(TRITON_STAMP): $(TEST_STAMP)
	@echo "Installing Triton into $(VENV): 250 MB."
	$(INSTALL) -e '.[kernels]'
	@touch $@

$(BROWSER_STAMP): $(TEST_STAMP)
	@echo "Installing Playwright into $(VENV): 50 MB. It uses the Chromium or Chrome of the system."
	$(INSTALL) -e '.[browser]'
	@touch $@

$(RAY_STAMP): $(TEST_STAMP)
	@echo "Installing Ray into $(VENV)."
	$(INSTALL) -e '.[ray]'
	@touch $@

format: $(TEST_STAMP)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

format-check: $(TEST_STAMP)
	$(BIN)/ruff format --check $(SOURCES)

lint: $(TEST_STAMP)
	$(BIN)/ruff check $(SOURCES)

types: $(TEST_STAMP)
	$(BIN)/mypy $(SOURCES)

layers: $(TEST_STAMP)
	$(BIN)/lint-imports

# Three at a time, for some of them wait; not more, also where there are more cores: some tests start eight ranks.
unit: $(TEST_STAMP)
	$(BIN)/python -m pytest -n 3 --dist worksteal $(MARKED)

# What of the path for a GPU wants Triton: its interpreter, and its compiler for an H100. `make unit` skips these.
kernels: $(TRITON_STAMP)
	$(BIN)/python -m pytest tests/workers/backends/cuda

# Replicas on a Ray cluster of three nodes, which are processes of this machine. `make unit` skips these without Ray.
ray: $(RAY_STAMP)
	$(BIN)/python -m pytest tests/e2e/test_ray.py tests/unit/rank/test_ray_calls.py tests/unit/rank/test_on_ray.py

# The live page and the simulation report in Chromium. `make unit` skips these without Playwright.
browser: $(BROWSER_STAMP)
	$(BIN)/python -m pytest tests/browser

wheel: $(TEST_STAMP)
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist
	$(BIN)/check-wheel-contents --toplevel vsched,vsched_policies,vsched_workers dist

# Open site/index.html, or serve the folder to have the search. Every warning is an error: a link that leads nowhere, say.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# A report, and no gate: measuring slows the tests down several times, and `make unit` judges them. Rank processes
# are measured as well; what numba compiles, and what CUDA runs, is not.
coverage: $(TEST_STAMP)
	rm -f .coverage .coverage.*
	-$(BIN)/coverage run -m pytest -n 2 --dist worksteal --timeout 600 --ignore tests/e2e $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report

# vLLM's CPU build, in an environment of its own, as for the benchmarks; `make vllm VLLM=vllm-0.31.0` takes another
# version of VLLM_VERSIONS in tests/bench/servers/peers.py.
$(VLLM_STAMP): pyproject.toml $(TEST_STAMP)
	$(BIN)/python -m tests.bench setup --peer $(VLLM) --peers $(PEERS)
	$(PEERS)/$(VLLM)/bin/python -m pip install --quiet pytest pytest-asyncio pytest-timeout
	@touch $@

# An engine starts in 5 s, or in a minute on a busy machine, and a test starts several.
vllm: $(VLLM_STAMP)
	VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
		PYTHONPATH=.:policies:workers $(PEERS)/$(VLLM)/bin/python -m pytest -o filterwarnings=ignore --timeout 1800 tests/vllm

clean:
	rm -rf $(VENV) $(PEERS) dist build site htmlcov .coverage .coverage.*
