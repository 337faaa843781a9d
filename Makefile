# `make demo` and `make test` are all a fresh machine needs (Linux x86_64, Python 3.11+, gcc).
#
#   PYTHON       interpreter to make .venv from           make PYTHON=python3.12 demo
#   ARGS         more arguments for the command            make demo ARGS="--duration 60 --json out/r.json"
#   SEEDS        how many courses of events for sim-chaos  make SEEDS=10000 sim-chaos
#   MINUTES      how long soak runs                        make MINUTES=5 soak
#   TORCH_INDEX  index for the CPU build of torch, where pip does not find it by itself

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=
SEEDS ?= 2000
MINUTES ?= 30

# Without this, a script started in a folder would import whatever lies beside it.
export PYTHONSAFEPATH = 1
export PYTHON VENV TORCH_INDEX

RUN := $(VENV)/bin/python -m
.DEFAULT_GOAL := help
.PHONY: help demo test sim-chaos crash chaos soak check fmt bench fuzz fuzz-delta audit sbom docs gpu-check install \
    install-dev lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: install  ## run the whole system on this machine and print its report
	$(VENV)/bin/rose demo $(ARGS)

test: install-dev  ## all tests, real engines included
	$(RUN) pytest $(ARGS)

sim-chaos: install-dev  ## the scheduler's machine through SEEDS courses of faults, each healed in the end
	ROSE_CHAOS_SEEDS=$(SEEDS) $(RUN) pytest tests/property/test_cluster_machine.py -k chaos $(ARGS)

crash: install-dev  ## SIGKILL around light appliers at 250 moments, around a real vLLM engine at twelve
	ROSE_CRASH_POINTS=125 $(RUN) pytest tests/integration/test_weights_crash.py $(ARGS)
	ROSE_ENGINE_CRASH_POINTS=12 $(RUN) pytest tests/integration/test_engine_crash.py $(ARGS)

chaos: install  ## kill and stop real processes at random while agents work (ARGS="--seconds 120 --seed 1")
	$(VENV)/bin/python tests/chaos/run.py $(ARGS)

soak: install  ## are memory, descriptors and threads flat over MINUTES=30 of work?
	$(VENV)/bin/python tests/chaos/soak.py --minutes $(MINUTES) $(ARGS)

check: install-dev  ## lint, format, types, import contracts, spelling, CUDA sources
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell
	$(RUN) mypy
	@tools/cuda.sh

fmt: install-dev  ## fix what can be fixed by itself, and format
	$(RUN) ruff check --fix-only .
	$(RUN) ruff format .

bench: install  ## measure co-serving in seven modes, 16 minutes (ARGS=--quick: five)
	$(VENV)/bin/rose bench coserve $(ARGS)

fuzz: install  ## 100,000 damaged inputs to each reader of what comes from outside (ARGS="--inputs N --seed S")
	$(VENV)/bin/python tests/fuzz/run.py $(ARGS)

fuzz-delta: install  ## decode 200,000 damaged weight deltas under sanitizers (needs gcc's libasan)
	$(VENV)/bin/python kernels/fuzz/run.py $(ARGS)

audit: install  ## bandit over the sources, pip-audit over what is pinned (asks an index of vulnerabilities)
	@tools/install.sh --list audit
	$(RUN) bandit -q -ll -c pyproject.toml -r rose daemon kernels sim tools
	@echo bandit: nothing above low
	@tools/audit.sh

sbom: install  ## write out/sbom.json, the CycloneDX bill of what is installed
	@tools/install.sh --list audit
	@mkdir -p out
	$(VENV)/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
	    --of JSON -o out/sbom.json $(VENV)/bin/python
	@echo wrote out/sbom.json

docs: install  ## build the site of docs/ into out/site, strictly
	@tools/install.sh --list docs
	$(RUN) mkdocs build --clean $(ARGS)

gpu-check:  ## what can be checked on a GPU; does nothing where there is none
	@$(PYTHON) tests/gpu/check.py $(ARGS)

install:  ## make .venv and install what ROSE runs on
	@tools/install.sh

install-dev:  ## and what the checks and tests need
	@tools/install.sh --dev
	@tools/debian.sh

lock: install  ## write requirements/*.txt anew from requirements/*.in
	$(VENV)/bin/python tools/lock.py

clean:  ## remove caches, build outputs and reports (not .venv)
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -print0 | xargs -0 rm -rf
