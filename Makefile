# Everything on a fresh Debian or Ubuntu machine with python3 (with venv) and make:
#   make run    sets up and runs the main job        make test   sets up and runs all tests
.DEFAULT_GOAL := help
.PHONY: help setup run test test-unit soak simulate check bench clean

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

help:  ## this text
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## make .venv, install the project, compile the kernels

$(READY): pyproject.toml constraints.txt scripts/find-python
	PYTHON=$$(scripts/find-python) && "$$PYTHON" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m tidegate.layers.warm_up
	touch $@

run: setup  ## the main job: a broker with its page, stations, a queue, Spark; until Ctrl-C, or MINUTES=2
	$(BIN)/tidegate demo $(if $(MINUTES),--minutes $(MINUTES))

test: setup  ## all tests
	scripts/ensure-packages curl:curl redis-server:redis-server /usr/share/zookeeper/bin/zkServer.sh:zookeeper \
		chromium:chromium
	$(BIN)/python -m pytest

test-unit: setup  ## the tests that run in seconds
	$(BIN)/python -m pytest tests/unit

soak: setup  ## kills brokers and slices of a cluster 240 times while messages pass through them; about 25 minutes
	TIDEGATE_TEST_KILLS=120 $(BIN)/python -m pytest -s tests/integration/test_queue_crash.py -k killed
	TIDEGATE_TEST_KILLS=120 $(BIN)/python -m pytest -s tests/integration/test_cluster_crash.py

simulate: setup  ## seeded runs of the layers with crashes and changes of configuration; SEEDS=20000 to look harder
	TIDEGATE_TEST_SEEDS=$(or $(SEEDS),2000) $(BIN)/python -m pytest -q \
		tests/unit/test_layers_simulation.py tests/unit/test_elastic_simulation.py

check: setup  ## formatting, lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup  ## benchmarks, with Mosquitto, NATS, Redis and RabbitMQ beside us
	scripts/ensure-packages mosquitto:mosquitto nats-server:nats-server \
		redis-server:redis-server rabbitmq-server:rabbitmq-server
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/run.py

clean:  ## remove what setup made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
