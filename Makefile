# The commands of a working day. `make install` once, in a virtual environment.
.PHONY: install test lint types ci

install:
	python -m pip install -e ".[dev]"

test:
	python -m pytest

lint:
	ruff check

types:
	mypy

ci:
	bash .ci/run
