"""Disjoint sets, caches with a bound, and divisors, by their definitions."""

from __future__ import annotations

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from minialpa.support.disjoint_sets import DisjointSets
from minialpa.support.divisors import divisors
from minialpa.support.recent import Recent


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12))))
def test_disjoint_sets_are_connected_components_named_by_the_first_item(pairs: list[tuple[int, int]]) -> None:
    sets: DisjointSets[int] = DisjointSets()
    graph = nx.Graph()
    for first, second in pairs:
        named = sets.find(first), sets.find(second)
        joined = sets.join(first, second)
        assert joined == (named[1] if named[0] != named[1] else None)
        assert sets.find(first) == sets.find(second) == named[0]
        graph.add_edge(first, second)

    assert list(sets) == list(dict.fromkeys(item for pair in pairs for item in pair))
    for component in nx.connected_components(graph):
        (root,) = {sets.find(item) for item in component}
        assert root in component
    assert sets.find(99) == 99


@given(st.lists(st.integers(0, 9)), st.integers(0, 30))
def test_a_cache_holds_no_more_than_its_bound_except_the_last_value(keys: list[int], most: int) -> None:
    recent: Recent[list[int]] = Recent(most, lambda value: value[0])
    for n, key in enumerate(keys):
        assert recent.get_or_make(key, lambda key=key: [key])[0] == key
        assert recent.n_bytes <= max(most, key) and len(recent) <= len(set(keys[: n + 1]))


def test_a_cache_keeps_the_values_that_were_used_last_and_weighs_values_that_grow() -> None:
    made: list[str] = []
    recent: Recent[str] = Recent(2, len)
    for key in "abacab":
        recent.get_or_make(key, lambda key=key: made.append(key) or key)
    assert made == ["a", "b", "c", "b"]

    growing: Recent[list[int]] = Recent(3, len)
    value = growing.get_or_make("grows", list)
    value += [1, 2, 3, 4]
    growing.get_or_make("other", lambda: [1])
    assert len(growing) == 1 and growing.n_bytes == 1


@given(st.integers(1, 3000))
def test_divisors_divide(n: int) -> None:
    assert list(divisors(n)) == [d for d in range(1, n + 1) if n % d == 0]


def test_the_divisors_of_billions_take_no_time() -> None:
    assert list(divisors(2**40)) == [2**k for k in range(41)]
