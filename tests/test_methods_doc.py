"""docs/methods.md agrees with compiled programs."""

from __future__ import annotations

import jax
import pytest

from tests.methods_doc import ENTRIES, N_MICRO_BATCHES, PATH, Entry, page, promise_of, rows
from tests.skips import skip

#: Methods that always run: with a pipeline, and without.
SHORT = ("PipeshardParallel", "Zero2Parallel")


@pytest.fixture(autouse=True)
def same_jax() -> None:
    if f"jax\n{jax.__version__}, " not in PATH.read_text():
        skip(
            f"docs/methods.md was made with another jax than {jax.__version__}, whose compiler may combine collectives "
            "differently: python -m tests.methods_doc"
        )


@pytest.mark.parametrize(
    "entry",
    [pytest.param(one, marks=() if one.name in SHORT else pytest.mark.slow, id=one.name) for one in ENTRIES],
)
def test_a_row_of_each_method_is_up_to_date(entry: Entry) -> None:
    section = PATH.read_text().split(f"## `{entry.name}`\n")[1].split("\n## ")[0]
    assert promise_of(entry) in section
    lines = section.splitlines()
    assert set(rows(entry, entry.meshes[0], 1)) <= set(lines)
    tables = 2
    assert sum(line.startswith("| ") for line in lines) == tables * (1 + len(entry.meshes) * len(N_MICRO_BATCHES))


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    assert PATH.read_text() == page()
