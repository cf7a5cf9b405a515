"""Training scripts in the style of public code compute with minialpa what they compute for their authors.

An author runs the script with plain jax on eight devices. At most three lines change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from minialpa import InfeasibleError, TraceError
from minialpa.testing import assert_allclose
from tests.modern import script
from tests.modern.methods import METHODS

pytestmark = [
    pytest.mark.usefixtures("fresh_session", "loose_jax"),
    # Of scripts with `with mesh:`.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Of constraints and states that a method places differently.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

#: What a method cannot do, by name.
REFUSED = {
    ("flax_lm1b", "stages"): (InfeasibleError, "in_shardings"),
    ("muon", "stages"): (InfeasibleError, "out_shardings"),
    ("nanodo", "stages"): (InfeasibleError, "in_shardings"),
    ("ppo", "micro"): (TraceError, "batch_argnums"),
    ("ppo", "stages"): (TraceError, "batch_argnums"),
}

#: The pairs that run always; all others are slow.
FAST = {}


@pytest.fixture
def loose_jax() -> Iterator[None]:
    """The defaults of jax, which authors have."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def by_author(name: str) -> Any:
    return script.train(script.as_written(name))


def cases() -> Iterator[Any]:
    for name in script.NAMES:
        for method in METHODS:
            slow = method not in FAST.get(name, ())
            yield pytest.param(name, method, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("name", "method"), cases())
def test_a_script_trains_as_its_author_trains_it(name: str, method: str) -> None:
    changed = script.under_minialpa(name, METHODS[method])
    if (name, method) in REFUSED:
        error, words = REFUSED[name, method]
        with pytest.raises(error, match=words):
            script.train(changed)
        return

    for actual, expected in zip(script.train(changed), by_author(name), strict=True):
        assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)


def test_at_most_three_lines_of_a_script_change() -> None:
    assert {name: script.changed_lines(name) for name in script.NAMES if script.changed_lines(name) > 3} == {}
