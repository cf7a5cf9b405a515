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
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # `with mesh:` in a script
    # Donated batches, constraints on a mesh that a stage does not have, results that move between meshes.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

#: Errors of methods that cannot run a script.
REFUSED = {
    ("many_steps", "micro"): (TraceError, "batch_argnums"),
    ("many_steps", "stages"): (TraceError, "batch_argnums"),
    ("muon", "stages"): (InfeasibleError, "out_shardings"),
    ("ppo", "micro"): (TraceError, "batch_argnums"),
    ("ppo", "stages"): (TraceError, "batch_argnums"),
}

#: Scripts whose evaluation in `pmap` fixes shardings that the state does not have after training.
NOT_EVALUATED = ("gpt_pmap",)

#: The pairs that are not slow.
FAST = {
    "data_parallel_by_hand": ("zero3", "micro"),
    "expert_dispatch": ("zero3",),
    "explicit_sharded_data": ("shard",),
    "fsdp_by_hand": ("shard", "stages"),
    "host_optimizer": ("zero3", "stages"),
    "jax_cookbook": ("zero3",),
    "many_steps": ("shard", "micro"),
    "muon": ("zero3", "stages"),
    "nnx_metrics": ("shard", "micro"),
    "offloaded_activations": ("micro", "stages"),
    "pipeline_by_hand": ("stages",),
    "refs_accumulation": ("micro", "stages"),
    "refs_statistics": ("micro", "stages"),
    "ring_attention": ("shard",),
    "synced_batch_norm": ("shard",),
    "tensor_parallel_by_hand": ("zero3",),
    "three_axes": ("micro", "stages"),
}


@pytest.fixture
def loose_jax() -> Iterator[None]:
    """The defaults of jax, which authors have."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def by_author(name: str) -> Any:
    return script.train(script.as_written(name), name not in NOT_EVALUATED)


def cases() -> Iterator[Any]:
    for name in script.NAMES:
        for method in METHODS:
            marks = [] if method in FAST.get(name, ()) else [pytest.mark.slow]
            yield pytest.param(name, method, marks=marks)


@pytest.mark.parametrize(("name", "method"), list(cases()))
def test_a_script_trains_as_its_author_trains_it(name: str, method: str) -> None:
    changed = script.under_minialpa(name, METHODS[method])
    if (name, method) in REFUSED:
        error, words = REFUSED[name, method]
        with pytest.raises(error, match=words):
            script.train(changed)
        return

    of_minialpa = script.train(changed, name not in NOT_EVALUATED)
    for actual, expected in zip(of_minialpa, by_author(name), strict=True):
        assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)


def test_at_most_three_lines_of_a_script_change() -> None:
    assert {name: n for name in script.NAMES if (n := script.changed_lines(name)) > 3} == {}
