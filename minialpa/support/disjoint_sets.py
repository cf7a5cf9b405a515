"""Disjoint sets: a union-find forest in which the first of two joined sets names the result.

`networkx.utils.UnionFind` names sets of equal size by the order of a Python set, which depends on addresses of objects;
and it is half as fast.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class DisjointSets(Generic[T]):
    """Items in disjoint sets. An item that was never joined is its own set."""

    __slots__ = ("_parents",)

    def __init__(self) -> None:
        #: For each joined item another item of its set; for the root itself.
        self._parents: dict[T, T] = {}

    def __iter__(self) -> Iterator[T]:
        """All joined items, in order of their first join."""
        return iter(self._parents)

    def find(self, item: T) -> T:
        """The root of the set of `item`, which names the set."""
        parents = self._parents
        parent = parents.get(item, item)
        while parent != (above := parents.get(parent, parent)):
            parents[item] = parent = above  # shortens the path of later calls
        return parent

    def join(self, first: T, second: T) -> T | None:
        """Make one set of two, with the root of `first`. Returns the other, former root."""
        root, other = self.find(first), self.find(second)
        self._parents.setdefault(root, root)
        self._parents[other] = root
        return None if root == other else other
