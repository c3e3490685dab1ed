# Everything a developer or CI runs. Needs python3 (3.11 or newer), make and git; the rest goes into .venv.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-faults test-abuse test-scale test-benchmark test-contracts check format clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-15s %s\n", $$1, $$2 }'

demo: $(READY) ## three tasks of handwritten digits, learnt and served on http://127.0.0.1:8000
	@$(BIN)/python deploy/demo.py

test: $(READY) ## the default tests: under five minutes on two cores
	$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile

test-faults: $(READY) ## kills, power cuts, full disks, flipped bits, races: minutes, and a table at the end
	$(BIN)/python -m pytest -q -m slow tests/faults

test-abuse: $(READY) ## hostile images, slow clients, endless bodies, made-up requests: minutes, and a table at the end
	$(BIN)/python -m pytest -q -m slow tests/abuse

test-scale: $(READY) ## a store of ten thousand versions: what list and GET /versions cost, and a table at the end
	$(BIN)/python -m pytest -q -m slow tests/scale

test-benchmark: $(READY) ## store, engine, and the server beside its peers: an hour of a quiet machine, and tables
	status=0; for one in store engine serving; do $(BIN)/python -m benchmarks.$$one || status=1; done; exit $$status

test-contracts: $(READY) ## break each contract of the design on purpose and see its test fail
	$(BIN)/python tests/broken_on_purpose.py

check: $(READY) ## lint, formatting, types, and which package may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases benchmarks/*.py benchmarks/peers/model.py
	$(BIN)/lint-imports

format: $(READY) ## rewrite the sources in the project's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and what the demo made; ./models stays
	rm -rf .venv demo build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted installation is taken up again by the next `make`.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python 3.11 or newer is needed; set PYTHON=…")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[onnx,dev,demo]'
	touch $@
