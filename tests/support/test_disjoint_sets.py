"""Disjoint sets are those of the connected items of a graph, and are named by the first item of each join."""

from __future__ import annotations

import hypothesis
import networkx as nx
from hypothesis import strategies as st

from minialpa.support.disjoint_sets import DisjointSets

PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)))


@hypothesis.given(PAIRS)
def test_sets_are_the_connected_components(pairs: list[tuple[int, int]]) -> None:
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
        assert {sets.find(item) for item in component} <= component
        assert len({sets.find(item) for item in component}) == 1


def test_an_item_that_was_never_joined_is_a_set_by_itself() -> None:
    sets: DisjointSets[str] = DisjointSets()
    assert sets.find("a") == "a" and list(sets) == []
