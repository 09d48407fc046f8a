# Everything on a fresh Debian or Ubuntu machine with python3 (with venv) and make:
#   make run    sets up and runs the main job        make test   sets up and runs all tests
.DEFAULT_GOAL := help
.PHONY: help setup run packages test test-deep test-all coverage test-unit soak faults simulate check audit bench clean

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
KERNELS := $(VENV)/.kernels

help:  ## this text
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## make .venv, install the project, compile the kernels

$(READY): pyproject.toml lab/pyproject.toml constraints.txt scripts/find-python
	PYTHON=$$(scripts/find-python) && "$$PYTHON" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e lab
	$(BIN)/python -m tidegate.broker.warm_up
	touch $@

# Compiled kernels contain these modules too: their constants, and the laws that simulations compile.
COMPILED := $(shell find src lab -name '*_kernel.py') $(wildcard src/tidegate/client/control/*.py) \
	$(addprefix src/tidegate/,frames.py notification.py index/tables.py kernels/cache.py knowledge/pace.py layers/subscription_table.py)

$(KERNELS): $(READY) $(COMPILED)
	$(BIN)/python -m tidegate.broker.warm_up
	$(BIN)/python -m tidegate_lab.warm_up
	touch $@

run: setup  ## the main job: a broker with its page, stations, a queue, Spark; until Ctrl-C, or MINUTES=2
	$(BIN)/tidegate demo $(if $(MINUTES),--minutes $(MINUTES))

# Three workers on two cores, since many tests wait; tests/conftest.py says which tests stay together. Durations of all tests: build/tests-*.xml.
PYTEST := $(BIN)/python -m pytest -n 3 --durations=10

packages:
	scripts/ensure-packages curl:curl redis-server:redis-server /usr/share/zookeeper/bin/zkServer.sh:zookeeper \
		chromium:chromium cc:gcc

test: $(KERNELS) packages  ## every capability and every law once
	$(PYTEST) -m "not deep" --junit-xml=build/tests-first.xml

test-deep: $(KERNELS) packages  ## what `make test` leaves out: series of crashes, experiments, cold Spark drivers, kernels without the compiler
	$(PYTEST) -m deep --junit-xml=build/tests-deep.xml

test-all: test test-deep  ## both

coverage: $(KERNELS) packages  ## which lines `make test` runs, brokers and commands in processes of their own included
	rm -f build/coverage*
	$(PYTEST) -m "not deep" --cov --cov-report=
	-$(BIN)/python -m coverage combine --quiet --append
	$(BIN)/python -m coverage report --sort=cover

test-unit: setup  ## the tests without processes; single files take seconds
	$(BIN)/python -m pytest tests/unit

soak: setup  ## kills brokers and slices of a cluster 240 times while messages pass through them; about 25 minutes
	TIDEGATE_TEST_KILLS=120 $(BIN)/python -m pytest -s tests/integration/test_queue_crash.py -k killed
	TIDEGATE_TEST_KILLS=120 $(BIN)/python -m pytest -s tests/integration/test_cluster_crash.py

faults: setup  ## kills, pauses, cuts and clock jumps under load, with an independent ledger; FAULTS=200, SEED=… repeats
	scripts/ensure-packages cc:gcc redis-server:redis-server /usr/share/zookeeper/bin/zkServer.sh:zookeeper
	$(BIN)/python tests/faults/fault_series.py --faults $(or $(FAULTS),200) $(if $(SEED),--seed $(SEED)) \
		--page docs/results/reliability.md

simulate: setup  ## seeded runs of the layers with crashes and changes of configuration; SEEDS=20000 to look harder
	TIDEGATE_TEST_SEEDS=$(or $(SEEDS),2000) $(BIN)/python -m pytest -q \
		tests/unit/test_layers_simulation.py tests/unit/test_elastic_simulation.py

check: setup  ## formatting, lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

audit:  ## known holes in the pinned versions, by pip-audit; it asks a service in the network, so it is not in check
	PYTHON=$$(scripts/find-python) && "$$PYTHON" -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(VENV)/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

bench: setup  ## benchmarks, with Mosquitto, NATS, Redis and RabbitMQ beside us
	scripts/ensure-packages mosquitto:mosquitto nats-server:nats-server \
		redis-server:redis-server rabbitmq-server:rabbitmq-server
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/run.py

clean:  ## remove what setup made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
