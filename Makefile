# One way to run things. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On Linux plain mlx has no backend; `cpu` brings one (and OpenBLAS). For an NVIDIA GPU: EXTRA=cuda13.
EXTRA ?= $(if $(filter Linux,$(shell uname -s)),cpu,)
MODEL ?= smollm2-135m
SECONDS ?= 60

.PHONY: help setup model demo serve test clients check format bench faults sim clean
help:
	@echo "make demo    8 chats at once on a real model, captured and replayed, then with a fault put in"
	@echo "make serve   serve $(MODEL) on 127.0.0.1:8080 (MODEL=path for your own)"
	@echo "make test    all tests        make check   format, lint and types"
	@echo "make clients real clients from PyPI and npm, installed into .clients, against a real server"
	@echo "make faults  put each known bug back and let replay find it"
	@echo "make sim     random loads for SECONDS=60, each clean at fold and plan"
	@echo "make bench   measure on this machine and beside other servers, in an hour (ROWS=1e7: replays of tapes up to that long)"

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlxtape needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@echo "installing into $(VENV) (a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --editable '.[dev$(if $(EXTRA),$(comma)$(EXTRA))]'
	@touch $@

comma := ,

model: setup
	@$(BIN)/python -m kernel.bundled > /dev/null

demo: model
	@$(BIN)/python -m tests.demo

serve: model
	@$(BIN)/mlxtape serve --model $(MODEL)

test: model
	$(BIN)/python -m pytest -n 2 --dist loadfile

clients: model
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/clients

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

sim: setup
	@$(BIN)/python -m tests.simulation --seconds $(SECONDS)

bench: model
	@$(BIN)/python -m tests.bench $(if $(ROWS),--rows $(ROWS))

faults: model
	@$(BIN)/python -m tests.faults

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
