# Every target sets up what it needs: environments in .venv*, nothing outside this folder.

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
SEEDS ?= 200
CHAOS_KILLS ?= 200
SOAK_MINUTES ?= 30
PART ?= 10
# Many tests wait for time to pass: four workers keep two cores busy.
WORKERS ?= 4
CALLS ?= 20000
MESSAGES ?= 1000000

# Without it each of the many processes would compile every module it imports, torch's among them.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
INSTALL = $(BIN)/python .ci/install.py
PROTOS = $(wildcard proto/hypergpu/v1/*.proto)
SERVICES = $(shell grep -l '^service ' $(PROTOS))
PROTOC = PATH="$(CURDIR)/.venv-proto/bin:$$PATH" .venv-proto/bin/python -m grpc_tools.protoc -I proto
STUBS := build/stubs
PACKAGES := hypergpu coordinator gpu_node payments netsim dashboard_api
# A file's tests stay together and in order; the slow ones come first.
TESTS = $(BIN)/python .ci/with_postgres.py $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The program itself, not its wrapper in Node.
FORGE = "$$(ls ../node_modules/@foundry-rs/forge-*/bin/forge | head -1)"

WEB := dashboard_api/web
# The pinned Node where npm has one for this machine.
WEB_NODE = "$$(ls node_modules/node-*/bin/node 2>/dev/null | head -1 | grep . || echo node)"

# npm leaves packages out, without a word, that want a newer Node than it runs on: with Debian 12's
# that is Anvil. There it runs on the page's own Node. Exits with 1 where that is so.
IS_OLD_NODE = 'process.exit(process.versions.node.split(".")[0] < 20 ? 1 : 0)'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test fresh test-gpu bench-gpu gpu-wheels wheel node-pex api full check sim bench chaos fuzz proto fmt lock lint types layers schemas drift tree
.PHONY: bandit audit
.PHONY: collect static web web-drift web-test contracts contracts-audit contracts-drift contracts-gas contracts-test

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.installed ## Make .venv with everything pinned (about a minute the first time).

demo: setup node_modules/.installed ## Train digits on five nodes over five home lines, kill one on the way [SHORT=1] [NET=tunnel] [METERING=each] [FIXED=1 [SCALE=1]] [ATTACK=1] [BLOBS=s3]; or a model in stages [STAGES=1].
	@$(BIN)/$(if $(STAGES),python -m benchmarks.ours.demo stages,$(if $(SCALE),python -m benchmarks.ours.demo scale,hypergpu demo $(if $(BLOBS),--blobs $(BLOBS)))) $(if $(SHORT),--short) $(if $(NET),--net $(NET)) $(if $(METERING),--metering $(METERING)) $(if $(FIXED),--fixed) $(if $(ATTACK),--attack --nodes 6)

# What a machine lacks is installed, or its tests are left out and named at the end.
test: setup node_modules/.installed ## Run every test but the long ones; as root installs the programs that they drive [ARGS=...] [WORKERS=4].
	@$(BIN)/python .ci/test_programs.py
	@$(TESTS) $(ARGS)

fresh: ## Run the README's two commands in a bare Debian 12 (root; up to an hour) [FOLDER=...].
	@.ci/fresh $(FOLDER)

test-gpu: setup ## Run the tests that need a GPU: the worker on CUDA [ARGS=...].
	@$(BIN)/pytest tests/gpu $(ARGS)

# Several workers that compile the same modules at once do it once each: this does it before them.
# Which tests lack their program is told by the run itself.
collect: setup
	@mkdir -p build
	@env -u CI $(BIN)/pytest --collect-only -n 0 -qq >build/collect.txt 2>&1 || { tail -30 build/collect.txt >&2; exit 1; }

wheel: setup node_modules/.installed .venv-pex/.installed ## Build the wheel and the PEX and use them in fresh environments, outside of this folder [ARGS=...].
	@$(BIN)/pytest -n $(WORKERS) tests/wheel $(ARGS)

bench-gpu: ## Measure this machine's GPU with its own torch, in 8 minutes [PYTHON=python3] [WHEELS=FOLDER] [DRY=1] [OUT=FILE].
	@$(if $(filter file default undefined,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON)) .ci/bench_gpu.py $(if $(WHEELS),--wheels $(WHEELS)) $(if $(DRY),--dry) $(if $(OUT),--out $(OUT))

gpu-wheels: ## Fetch what bench-gpu needs beside torch, to be carried to a machine without an index [GPU_PYTHON=3.12].
	@$(PYTHON) .ci/gpu_wheels.py build/gpu-wheels $(or $(GPU_PYTHON),3.12)

node-pex: setup .venv-pex/.installed ## Build hypergpu-node as one file, dist/hypergpu-node.pex.
	@$(BIN)/python .ci/node_pex.py dist/hypergpu-node.pex

# It reads the packages of .venv, and lies beside them.
api: setup .venv-pdoc/.installed ## Build the reference of the Python client from its docstrings into build/api.
	@PYTHONWARNINGS=ignore PYTHONPATH="$$(echo $(CURDIR)/.venv-pdoc/lib/python3*/site-packages)" $(BIN)/python -m pdoc \
		--docformat google --output-directory build/api hypergpu.user.training hypergpu.client hypergpu.errors

# Before an issue is closed, on a clean clone. All mutants take ten minutes of a core, as does a million calls.
full: check wheel ## Run all there is: long tests, all mutants, 200 kills, both demos [ARGS=...] [WORKERS=4].
	@CHAOS_KILLS=$(CHAOS_KILLS) CHAOS_NODE_KILLS=50 $(TESTS) -m "" $(ARGS)
	@$(MAKE) faults
	@$(MAKE) contracts-test PART=1 CALLS=1000000
	@$(MAKE) demo
	@$(MAKE) demo SHORT=1 NET=tunnel

faults: setup node_modules/.installed ## Plant the faults of tests/faults, each in a clone: tests must find them [ARGS=NAME].
	@$(BIN)/python -m tests.faults --workers $(if $(filter file,$(origin WORKERS)),2,$(WORKERS)) $(ARGS)

check: static tree ## Everything but the tests (with -k: all that is wrong; with -j2: two at a time).

# The long ones first, for -j2.
static: types contracts-drift contracts-audit bandit lint layers schemas drift web-drift web-test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports --no-logo

schemas: node_modules/.installed
	node_modules/.bin/buf lint
	node_modules/.bin/buf format --diff --exit-code

bandit: .venv-audit/.installed
	.venv-audit/bin/bandit --quiet --configfile pyproject.toml --recursive .ci $(PACKAGES) contracts

audit: .venv-audit/.installed ## Look up what is known against the pinned versions (needs PyPI's own database).
	@$(BIN)/python .ci/audit.py

tree: setup
	$(BIN)/pytest -q tests/architecture

sim: setup ## Run seeded worlds on virtual time [SEEDS=200].
	@$(BIN)/python -m netsim.sim --seeds $(SEEDS)

bench: setup node_modules/.installed ## Print the tables behind the README's figures [ONLY=NAME or NAME/PART] [QUICK=1].
	@$(if $(filter scale%,$(or $(ONLY),scale)),$(BIN)/python .ci/with_postgres.py )$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY)) $(if $(QUICK),--quick)

chaos: setup node_modules/.installed ## Kill real processes at random instants; a long job of failing nodes [CHAOS_KILLS=200] [SOAK_MINUTES=30].
	@CHAOS_KILLS=$(CHAOS_KILLS) SOAK_MINUTES=$(SOAK_MINUTES) $(BIN)/python .ci/with_postgres.py $(BIN)/pytest -m "" tests/chaos

fuzz: setup ## Feed malformed messages to every parser and service that strangers reach [MESSAGES=1000000].
	@FUZZ_MESSAGES=$(MESSAGES) $(BIN)/pytest tests/properties/test_malformed.py tests/properties/test_malformed_calls.py

proto: .venv-proto/.installed ## Generate hypergpu/v1 from the schemas.
	@$(PROTOC) --python_out=. --mypy_out=quiet:. $(PROTOS)
	@$(PROTOC) --grpc_python_out=. --mypy_grpc_out=quiet:. $(SERVICES)

fmt: setup node_modules/.installed ## Format the code and the schemas.
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .
	@node_modules/.bin/buf format --write

contracts: setup node_modules/.installed ## Compile the contracts into contracts/artifacts.
	@$(BIN)/python -m contracts.compile

contracts-drift: setup node_modules/.installed
	@$(BIN)/python -m contracts.compile --check

contracts-audit: .venv-slither/.installed node_modules/.installed
	@$(BIN)/python -m contracts.tools.audit

contracts-gas: setup node_modules/.installed ## Measure what the contracts' transactions cost, into contracts/snapshots.
	@cd contracts && $(FORGE) test --offline --isolate --match-contract GasTest --gas-snapshot-check=false

contracts-test: contracts-drift contracts-audit ## Test the contracts: forge, gas, slither, one of ten mutants [CALLS=20000] [PART=10].
	@cd contracts && FOUNDRY_INVARIANT_RUNS=$$(( $(CALLS) / 100 )) $(FORGE) test --offline --no-match-contract GasTest
	@cd contracts && $(FORGE) test --offline --isolate --match-contract GasTest --gas-snapshot-check=true
	@$(BIN)/python -m contracts.tools.mutate --part $(PART)

lock: setup ## Resolve every lock file afresh.
	# redis asks for async-timeout on Python 3.11.0 to 3.11.2 alone.
	$(BIN)/python .ci/lock.py locks/dev.txt '.[dev]' async-timeout
	$(BIN)/python .ci/lock.py locks/proto.txt 'grpcio-tools==1.71.*' 'mypy-protobuf==3.6.0' 'setuptools<80'
	$(BIN)/python .ci/lock.py locks/flower.txt 'flwr==1.41.*'
	$(BIN)/python .ci/lock.py --beside locks/dev.txt locks/hivemind.txt 'hivemind==1.1.12'
	$(BIN)/python .ci/lock.py --beside locks/dev.txt locks/byzfl.txt 'byzfl==0.0.11'
	$(BIN)/python .ci/lock.py locks/slither.txt 'slither-analyzer==0.11.6'
	$(BIN)/python .ci/lock.py locks/audit.txt 'bandit[toml]' pip-audit
	$(BIN)/python .ci/lock.py locks/uv.txt uv
	$(BIN)/python .ci/lock.py locks/pex.txt pex
	$(BIN)/python .ci/lock.py --beside locks/dev.txt locks/pdoc.txt pdoc
	npm install --package-lock-only
	cd $(WEB) && rm -rf node_modules package-lock.json && npm install --package-lock-only
	@node -e 'const fs = require("fs"); \
		for (const path of ["package-lock.json", "$(WEB)/package-lock.json"]) { \
			const lock = JSON.parse(fs.readFileSync(path)); \
			for (const one of Object.values(lock.packages)) delete one.funding; \
			fs.writeFileSync(path, JSON.stringify(lock, null, 2) + "\n"); }'

# The committed stubs must be what the schemas give. They come from an old compiler on purpose:
# its code runs on newer protobuf, and newer code does not run on older protobuf.
drift: .venv-proto/.installed
	@rm -rf $(STUBS) && mkdir -p $(STUBS)
	@$(PROTOC) --python_out=$(STUBS) --mypy_out=quiet:$(STUBS) $(PROTOS)
	@$(PROTOC) --grpc_python_out=$(STUBS) --mypy_grpc_out=quiet:$(STUBS) $(SERVICES)
	@diff -r --exclude=__init__.py --exclude=__pycache__ $(STUBS)/hypergpu/v1 hypergpu/v1 \
		|| { echo "hypergpu/v1 differs from what the schemas give. Fix: make proto" >&2; exit 1; }

# The page of the dashboard. Its own Node, so that the same sources give the same bytes everywhere.
web: setup $(WEB)/node_modules/.installed ## Build the dashboard's page into dashboard_api/dist.
	@$(BIN)/python .ci/page_types.py
	@cd $(WEB) && $(WEB_NODE) node_modules/vite/bin/vite.js build --logLevel warn
	@cd $(WEB) && $(WEB_NODE) node_modules/vite/bin/vite.js build --logLevel warn --mode recorded

web-test: $(WEB)/node_modules/.installed ## Check the types of the dashboard's page and test what it computes.
	@cd $(WEB) && $(WEB_NODE) node_modules/svelte-check/bin/svelte-check --fail-on-warnings --output human
	@cd $(WEB) && $(WEB_NODE) node_modules/vitest/vitest.mjs run

# The committed page must be what the sources give.
web-drift: setup $(WEB)/node_modules/.installed
	@$(BIN)/python .ci/page_types.py --check
	@rm -rf build/dist && mkdir -p build
	@cd $(WEB) && $(WEB_NODE) node_modules/vite/bin/vite.js build --logLevel warn --outDir ../../build/dist --emptyOutDir
	@cd $(WEB) && $(WEB_NODE) node_modules/vite/bin/vite.js build --logLevel warn --mode recorded --outDir ../../build/dist/recorded
	@diff -r build/dist dashboard_api/dist \
		|| { echo "dashboard_api/dist differs from what dashboard_api/web gives. Fix: make web" >&2; exit 1; }

.venv/.installed: locks/dev.txt locks/uv.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later with venv was found. Fix: install" \
		"python3.11 and python3.11-venv, or name one: make setup PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Installing the pinned packages into .venv (about a minute the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(INSTALL) .venv locks/dev.txt --editable .
	@touch $@

.venv-proto/.installed: locks/proto.txt | .venv/.installed
	@echo "Installing the protobuf compiler into .venv-proto"
	@test -x .venv-proto/bin/python || $(BIN)/python -m venv --without-pip .venv-proto
	@$(INSTALL) .venv-proto $<
	@touch $@

.venv-pex/.installed: locks/pex.txt | .venv/.installed
	@echo "Installing pex into .venv-pex"
	@test -x .venv-pex/bin/python || $(BIN)/python -m venv --without-pip .venv-pex
	@$(INSTALL) .venv-pex $<
	@touch $@

.venv-pdoc/.installed: locks/pdoc.txt | .venv/.installed
	@echo "Installing pdoc into .venv-pdoc"
	@test -x .venv-pdoc/bin/python || $(BIN)/python -m venv --without-pip .venv-pdoc
	@$(INSTALL) .venv-pdoc $<
	@touch $@

# Its own environment: it wants an older web3 than ours.
.venv-slither/.installed: locks/slither.txt | .venv/.installed
	@echo "Installing slither into .venv-slither"
	@test -x .venv-slither/bin/python || $(BIN)/python -m venv --without-pip .venv-slither
	@$(INSTALL) .venv-slither $<
	@touch $@

# Their own environment: what they depend on would bind our versions.
.venv-audit/.installed: locks/audit.txt | .venv/.installed
	@echo "Installing bandit and pip-audit into .venv-audit"
	@test -x .venv-audit/bin/python || $(BIN)/python -m venv --without-pip .venv-audit
	@$(INSTALL) .venv-audit $<
	@touch $@

node_modules/.installed: package-lock.json
	@command -v npm >/dev/null || { echo "npm was not found. Fix: install nodejs and npm" >&2; exit 1; }
	@echo "Installing buf, Anvil, forge, solc, OpenZeppelin and axe into node_modules"
	@node -e $(IS_OLD_NODE) && exit; $(MAKE) --no-print-directory $(WEB)/node_modules/.installed
	@PATH="$$(node -e $(IS_OLD_NODE) || echo "$(CURDIR)/$(WEB)/node_modules/$$(cd $(WEB)/node_modules && echo node-*)/bin:")$$PATH" \
		npm install --no-save --silent
	@ls node_modules/@foundry-rs/anvil-*/bin/anvil >/dev/null 2>&1 || { echo "npm left Anvil out:" \
		"it has none for this machine. Fix: name its program: HYPERGPU_ANVIL=/path/to/anvil" >&2; }
	@touch $@

$(WEB)/node_modules/.installed: $(WEB)/package-lock.json
	@command -v npm >/dev/null || { echo "npm was not found. Fix: install nodejs and npm" >&2; exit 1; }
	@echo "Installing Vite, Svelte and a Node of their own into $(WEB)/node_modules"
	@cd $(WEB) && npm ci --silent
	@touch $@
