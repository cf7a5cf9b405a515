"""The laws of rule_laws.py on generated contractions and reshapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import minialpa.rules.table  # noqa: F401 (fills the rule table)
from tests.rules.rule_laws import cases_of, check_all

sizes = st.sampled_from([1, 2, 4, 6])
few = settings(max_examples=10, deadline=None)


@few
@given(st.data())
def test_dot_general_halves(data: st.DataObject) -> None:
    roles = data.draw(st.lists(st.sampled_from(["batch", "contract", "lhs", "rhs"]), min_size=2, max_size=6))
    dims = {i: (role, data.draw(sizes)) for i, role in enumerate(roles)}
    lhs = data.draw(st.permutations([i for i, (role, _) in dims.items() if role != "rhs"]))
    rhs = data.draw(st.permutations([i for i, (role, _) in dims.items() if role != "lhs"]))

    def where(role: str, side: Sequence[int]) -> tuple[int, ...]:
        return tuple(side.index(i) for i, (r, _) in dims.items() if r == role)

    numbers = tuple((where(role, lhs), where(role, rhs)) for role in ("contract", "batch"))
    x, y = (np.random.default_rng(0).random([dims[i][1] for i in side], np.float32) for side in (lhs, rhs))
    check_all(cases_of(lambda x, y: lax.dot_general(x, y, numbers), x, y))


@st.composite
def _grouped(draw: st.DrawFn, primes: Sequence[int]) -> tuple[int, ...]:
    """A shape whose dimensions are products of neighbours in `primes`, with ones in between."""
    cuts = draw(st.lists(st.integers(0, len(primes)), max_size=4).map(sorted))
    bounds = [0, *cuts, len(primes)]
    return tuple(int(np.prod(primes[a:b])) for a, b in itertools.pairwise(bounds))


@few
@given(st.data(), st.lists(st.sampled_from([2, 3]), min_size=1, max_size=6))
def test_reshape_halves_and_keeps_common_factors(data: st.DataObject, primes: list[int]) -> None:
    source, target = data.draw(_grouped(primes)), data.draw(_grouped(data.draw(st.permutations(primes))))
    x = np.arange(np.prod(source), dtype=np.float32).reshape(source)
    check_all(cases_of(lambda x: lax.reshape(x, target), x))
