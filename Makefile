# The commands of a working day. `make install` once, in a virtual environment.
.PHONY: install test lint types docs ci

install:
	python -m pip install -e ".[dev]"

test:
	python -m pytest

lint:
	ruff check

types:
	mypy

docs:
	mkdocs build --strict

ci:
	bash .ci/run
