# Everything a developer or CI runs. Needs python3 (3.11 or newer), make and git; the rest goes into .venv.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
TOOLS := .tools/ready
AXE_VERSION := 4.14.0
AXE := .tools/axe/axe-$(AXE_VERSION).min.js
LABEL_STUDIO := .tools-label-studio/ready
# Each worker begins with one half of the files, in order; whoever has ended takes half of what is left.
SIDE_BY_SIDE := -n 2 --dist worksteal
PIP := -m pip install --quiet --disable-pip-version-check

# Where this is set, every command that a test starts would compile all its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test coverage check format docs site screenshots lock sbom audit clean

# The suites of `make test SUITE=…`, and below them what some need beside .venv.
SUITE := default
PYTEST := $(BIN)/python -m pytest -q
suite-default := $(PYTEST) -m "not slow and not long and not browser" $(SIDE_BY_SIDE) ## what `make test` runs: under five minutes on two cores
suite-long := $(PYTEST) -m "(long or browser) and not slow" $(SIDE_BY_SIDE) ## tests of seconds each, and those in a browser: six minutes; CI runs them after `make test`
suite-faults := $(PYTEST) -m slow tests/faults tests/e2e ## kills, power cuts, full disks, flipped bits, races, hundreds of swaps: minutes, and a table at the end
suite-abuse := $(PYTEST) -m slow tests/abuse ## hostile images, slow clients, endless bodies, made-up requests: minutes, and a table at the end
suite-scale := $(PYTEST) -m slow tests/scale ## ten thousand versions; fleets on a bucket behind HAProxy and nginx; Prometheus: half an hour and more, and a table at the end
suite-pages := $(PYTEST) -m slow tests/e2e/test_accessibility.py ## every page in every state, wide and narrow, in both themes, judged by axe-core: minutes, needs chromium and npm
suite-deploy := $(PYTEST) $(addprefix tests/packaging/test_,deploy.py kubernetes.py helm.py helm_values.py monitoring.py) tests/dne_serve/http/test_generated_client.py ## the files of deploy/ against the schemas of Compose and Kubernetes, helm and promtool, and a client generated from OpenAPI
suite-benchmark := status=0; for one in store engine serving serving.default_settings; do $(BIN)/python -m benchmarks.$$one || status=1; done; exit $$status ## store, engine, and the server beside its peers: an hour of a quiet machine, and tables
suite-contracts := $(BIN)/python tests/broken_on_purpose.py ## break each contract of the design on purpose and see its test fail
suite-lab := $(PYTEST) tests/lab ## the lab, killed everywhere, and a mini comparison of all methods; LAB_DATA=<zip> takes its images
suite-wheel := $(PYTEST) -m slow tests/packaging/test_wheel.py ## build the wheel, install it into empty environments, and run the client alone and the whole demo from it
suite-docs := $(PYTEST) -m slow tests/docs ## execute every command of the guides, and the notebook: minutes, on stores made by the real trainer
suite-label-studio := DNE_LABEL_STUDIO_BIN=.tools-label-studio/bin/label-studio $(PYTEST) -m slow tests/e2e/test_label_studio.py ## push to a real Label Studio 1.23, connect the backend, annotate with its SDK, pull: minutes
needs-pages := $(AXE)
needs-deploy := $(TOOLS)
needs-label-studio := $(LABEL_STUDIO)

ifeq ($(suite-$(SUITE)),)
$(error there is no suite '$(SUITE)'; choose one of $(sort $(patsubst suite-%,%,$(filter suite-%,$(.VARIABLES)))))
endif

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'
	@echo 'Suites of make test SUITE=…'
	@grep -h '^suite-' $(MAKEFILE_LIST) | awk -F '^suite-| := .*## ' '{ printf "  %-17s %s\n", $$2, $$3 }'

demo: $(READY) ## three tasks of handwritten digits, learnt and served on http://127.0.0.1:8000
	@$(BIN)/dne demo

test: $(READY) $(needs-$(SUITE)) ## the default tests, or with SUITE=<name> one of the suites below
	$(suite-$(SUITE))

coverage: $(READY) ## branch coverage of the suites default and long, with the lines that none of them runs: under 92 % fails
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest -q -m "not slow" $(SIDE_BY_SIDE) -o timeout=600
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

check: $(READY) ## lint, formatting, types, and which package may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases benchmarks/*.py benchmarks/*/*.py benchmarks/serving/peers/model.py
	$(BIN)/lint-imports

format: $(READY) ## rewrite the sources in the project's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## write the pages and drawings that come from the code
	$(BIN)/python -m docs.configuration
	$(BIN)/python -m docs.drawing
	$(BIN)/python -m docs.network_drawing

site: $(TOOLS) ## build the documents as a site in build/site, and check every link
	.tools/bin/python -m docs.site

screenshots: $(READY) ## pictures of every page in every state, in screenshots/; PHOTOS=<zip of CIFAR-100> PRETRAINED=<file> take photos
	$(BIN)/python -m docs.screenshots $(if $(PHOTOS),--photos "$(PHOTOS)") $(if $(PRETRAINED),--pretrained "$(PRETRAINED)")

lock: $(READY) $(TOOLS) ## write the hashes of what constraints.txt pins anew
	.tools/bin/python deploy/lock.py

sbom: $(READY) $(TOOLS) ## write what is installed as CycloneDX: sbom.json
	.tools/bin/cyclonedx-py environment --pyproject pyproject.toml --sv 1.6 --output-reproducible --of JSON -o sbom.json $(BIN)/python
	.tools/bin/python deploy/check_sbom.py sbom.json

audit: $(TOOLS) ## look up known vulnerabilities of every pin; ADVISORIES=<OSV export> asks no network
	.tools/bin/python deploy/audit.py $(if $(ADVISORIES),--advisories "$(ADVISORIES)")

clean: ## remove .venv, caches and what the demo made; ./models stays
	rm -rf .venv .tools .tools-label-studio screenshots .coverage .coverage.* sbom.json demo build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted installation is taken up again by the next `make`. pip
# checks the hash of everything that is pinned. torch comes first and is fetched without hashes: with
# them pip would pass over a build in a folder of wheels and take the index's gigabytes of CUDA. The
# last installation adds what only other machines need, such as those libraries.
$(READY): pyproject.toml constraints.txt requirements.lock deploy/torch.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python 3.11 or newer is needed; set PYTHON=…")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -c constraints.txt -d .venv/torch torch
	$(BIN)/python $(PIP) --require-hashes --no-deps --no-index --find-links .venv/torch -r deploy/torch.lock
	rm -rf .venv/torch
	$(BIN)/python $(PIP) --require-hashes --no-deps -r requirements.lock
	$(BIN)/python $(PIP) --no-build-isolation -c constraints.txt -e '.[onnx,dev,demo]'
	touch $@

$(TOOLS): deploy/tools.lock
	$(PYTHON) -m venv .tools
	.tools/bin/python $(PIP) --require-hashes --no-deps -r deploy/tools.lock
	touch $@

# Checked against the digest that tests/e2e/axe.py pins, and never part of the repository.
$(AXE): tests/e2e/axe.py | $(READY)
	mkdir -p .tools/axe
	npm pack --silent --pack-destination .tools/axe axe-core@$(AXE_VERSION)
	$(BIN)/python -m tests.e2e.axe .tools/axe/axe-core-$(AXE_VERSION).tgz

# For one test only, so its two hundred dependencies are not locked.
$(LABEL_STUDIO):
	$(PYTHON) -m venv .tools-label-studio
	.tools-label-studio/bin/python $(PIP) label-studio==1.23.2
	touch $@
