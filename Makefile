# Forebay's commands; `make help` lists them. Each sets up what it needs in .venv, so the second run is fast.
#   VENV, PYTHON     the virtual environment (.venv), and the Python to make it with (the first suitable one)
#   PIP_FLAGS        more options for pip, for example an index of CPU builds of torch
#   PYTEST_FLAGS     more options for pytest, for example -k NAME -x
#   SEED, STEPS      of `make simulate`; SEED of `make campaign` repeats or continues one
#   FUZZ_SECONDS     how long `make fuzz` takes (240)
VENV ?= .venv
FUZZ_SECONDS ?= 240
STEPS ?= 20000
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PY := $(BIN)/python -m
PIP := $(PY) pip install -qq --disable-pip-version-check $(PIP_FLAGS)
PYTEST := $(PY) pytest $(PYTEST_FLAGS)
SEEDED := $(if $(SEED),--seed $(SEED))
ELSEWHERE := clients or torch or radosgw or azure or root or browser or deploy or api
LOWEST := tests/origin tests/config tests/admin tests/cli tests/test_cli.py tests/serve/test_{start,several_origins}.py
SHELL := bash
export PYTHONDONTWRITEBYTECODE :=# tests start hundreds of processes: each would compile the whole gateway
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-cluster drill load fuzz simulate check campaign clean test $(addprefix test-,clients clients-back clients-cluster clients-directory radosgw azure torch slow root browser deploy api package lowest)

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
demo: $(STAMPS)/demo  ## set up, then run a small training job directly and through Forebay
	@$(BIN)/forebay demo
demo-cluster: $(STAMPS)/demo  ## three nodes read one data set, alone and as a cluster
	@$(BIN)/forebay demo --nodes 3
test: $(STAMPS)/test tests/__pycache__  ## set up, then run the quick tests
	$(PYTEST) -n 4 --dist worksteal -m "not slow and not ($(ELSEWHERE))"
test-slow: $(STAMPS)/test  ## kills, large objects, long histories
	$(PYTEST) -n 4 --dist worksteal -m "slow and not ($(ELSEWHERE))"
test-root: $(STAMPS)/root  ## full, dead and powerless disks, cut networks, mounts; as root
	@tools/install_debian.sh ip iproute2
	@tools/install_debian.sh nft nftables
	@tools/install_debian.sh fusermount3 fuse3
	@tools/install_debian.sh s3fs
	@tools/install_debian.sh git
	$(PYTEST) -n 2 --dist worksteal -m root
test-clients: $(STAMPS)/clients  ## boto3, AWS CLI, s3fs, polars and more
	$(PYTEST) -n 3 --dist loadfile -m "clients and not torch"
test-clients-back: $(STAMPS)/clients  ## the same with everything written back
	FOREBAY_CLIENTS_WRITE=back $(PYTEST) -m "clients and not torch"
test-clients-cluster: $(STAMPS)/clients  ## the same with three nodes, which take turns
	FOREBAY_CLIENTS_WRITE=back FOREBAY_CLIENTS_NODES=3 $(PYTEST) -n 2 --dist loadfile -m "clients and not torch"
	FOREBAY_TRANSPARENCY_NODES=3 $(PYTEST) -m "not slow" tests/scenarios/test_transparency.py
test-clients-directory: $(STAMPS)/clients  ## the same with a directory as the origin
	FOREBAY_CLIENTS_ORIGIN=file $(PYTEST) -n 2 --dist loadfile -m "clients and not torch"
test-torch: $(STAMPS)/torch  ## the PyTorch S3 connector through a running gateway
	$(PYTEST) -n 2 --dist loadfile -m torch
test-radosgw: $(STAMPS)/clients  ## Ceph's radosgw as the origin
	$(PYTEST) -m radosgw
test-azure: $(STAMPS)/test  ## Azurite, an emulator of Azure Blob, as the origin; needs node
	@tools/install_azurite.sh $(VENV)/azurite
	FOREBAY_AZURITE=$(VENV)/azurite $(PYTEST) -m azure
test-browser: $(STAMPS)/browser  ## the dashboard in headless Chromium
	@tools/install_debian.sh chromium
	$(PYTEST) -n 2 --dist worksteal -m browser
test-deploy: $(STAMPS)/test  ## Prometheus' rules and the systemd unit
	@tools/install_debian.sh promtool prometheus usr/bin/promtool $(BIN)
	$(PYTEST) -m deploy tests/test_alerts.py tests/test_systemd_unit.py
test-api: $(STAMPS)/api  ## the admin port against its own OpenAPI document
	$(PYTEST) -m api tests/api/test_admin_api.py
test-package: $(STAMPS)/test  ## build the packages, install the wheel away from here, serve with it
	$(PY) tools.try_installation
test-lowest: $(STAMPS)/lowest  ## with the lowest versions that pyproject.toml allows
	$(VENV)-lowest/bin/python -m pytest $(PYTEST_FLAGS) -n 3 --dist worksteal -m "not slow and not ($(ELSEWHERE))" $(LOWEST)
load: $(STAMPS)/load  ## load tests, shortened: against JuiceFS, rclone; nginx, Varnish where installed
	$(PY) loadtests.all --quick
drill: $(STAMPS)/test  ## twelve incidents, and what gateways say of them
	@$(PY) tools.incident_drill --write build/incident-drill.md
fuzz: $(STAMPS)/dev  ## coverage-guided fuzzing of every parser and of whole connections
	$(PY) tests.fuzz.run --seconds $(FUZZ_SECONDS)
simulate: $(STAMPS)/dev  ## the write-back's life, simulated: make simulate SEED=1 STEPS=100000
	$(PY) tests.simulation $(SEEDED) --steps $(STEPS) --processes 2
campaign: $(STAMPS)/dev  ## hours: everything generated, kills, stops, harms
	@$(PY) tests.campaign $(SEEDED)
check: $(STAMPS)/dev  ## linter, formatter, types
	$(PY) ruff check .
	$(PY) ruff format --check .
	$(PY) mypy
clean:  ## remove the virtual environment and everything generated
	rm -f gateway/md5_lanes/md5_lanes.lib
	rm -rf $(VENV) $(VENV)-lowest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .campaign .fuzz
	find gateway tests -name __pycache__ -type d -prune -exec rm -rf {} +

# In a new clone each process that runs tests would prepare all of them for itself, which takes most of a minute.
tests/__pycache__: | $(STAMPS)/test
	@for some in 'tests/[a-o]*' 'tests/[p-z]*'; do $(PY) pytest -q --collect-only $$some > /dev/null & done; wait

# A stamp says that the dependency group of its name is installed.
WHAT_demo := '.[demo]'
# torch again, so that pip takes a CPU build of it from an index given
WHAT_torch := . --group torch 'torch==2.13.0'
AFTER_test := @$(PY) tools.install_helm
$(STAMPS)/venv:
	@tools/make_venv.sh "$(VENV)" $(PYTHON)
	@mkdir -p $(STAMPS) && touch $@
$(STAMPS)/%: $(STAMPS)/venv pyproject.toml hatch_build.py tools/install_helm.py $(wildcard gateway/md5_lanes/*.[pc]*)
	@echo "installing Forebay with what '$*' needs into $(VENV) (a minute the first time)"
	@$(PIP) 'pip>=25.1' && $(PIP) -e $(or $(WHAT_$*),. --group $*)
	$(AFTER_$*)
	@touch $@
$(STAMPS)/lowest: $(STAMPS)/test
	@tools/make_lowest_venv.sh $(VENV)-lowest $(BIN)
	@touch $@
