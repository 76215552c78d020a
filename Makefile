# Short names for plain commands; README.md shows the commands themselves.
PYTHON ?= python3
BIN := .venv/bin
PORT ?= 8000
# How many files run side by side, each with one thread: one more than two cores, as browsers wait a lot.
JOBS ?= 3
# JupyterLab refuses to run as root unless told; in a container there is often no other user.
LAB_FLAGS := $(if $(filter 0,$(shell id -u 2>/dev/null)),--allow-root)

.PHONY: help setup model lab test html book check lint format clean

help:
	@echo "make lab     set up, build the book, open the course in JupyterLab"
	@echo "make test    set up, run every test"
	@echo "make book    set up, build the book, serve it on port $(PORT)"
	@echo "make check   prove that minisgl/ is what the notebooks build"
	@echo "make lint    ruff and mypy      make format  ruff format      make clean  remove _build/"

setup: .venv/installed

.venv/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, and $(PYTHON) is older. Name another one: make PYTHON=python3.11 lab")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -r requirements.txt
	@touch $@

model: setup
	$(BIN)/python -m course model

lab: model html
	@echo "The book: _build/html/index.html. JupyterLab prints its address below; Ctrl-C ends it."
	$(BIN)/jupyter lab notebooks $(LAB_FLAGS)

test: model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

html: setup
	$(BIN)/jupyter-book build .

book: html
	@echo "The book is at http://127.0.0.1:$(PORT)/ until you press Ctrl-C."
	$(BIN)/python -m http.server --directory _build/html --bind 127.0.0.1 $(PORT)

check: setup
	$(BIN)/python -m course check

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf _build
