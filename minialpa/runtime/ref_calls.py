"""Calls of a step with Refs: their arrays go in as arguments, and new arrays go back into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minialpa.runtime.calls_on_mesh import CallsOnMesh
from minialpa.runtime.runner import BlockedCalls, Runner
from minialpa.support.private_jax import set_ref, value_of_ref
from minialpa.tracing.refs import StepRefs, check_distinct, is_ref_leaf


class RefCalls:
    """Thread-safe. A step that fails changes no Ref."""

    def __init__(self, calls: Runner | BlockedCalls | CallsOnMesh, refs: StepRefs, paths: Sequence[str]) -> None:
        """paths: of the argument leaves and of captured Refs."""
        self._calls, self._refs = calls, refs
        self._numbers = (*refs.arguments, *range(len(paths) - len(refs.captured), len(paths)))
        self._paths = [paths[i] for i in self._numbers]

    def __call__(self, leaves: Sequence[Any], *, traced: bool = False) -> list[Any]:
        given = [*leaves, *self._refs.captured]
        check_distinct([given[i] for i in self._numbers], self._paths)
        with self._calls.turn():  # another thread may update the same Refs
            arrays = list(given)
            for number in self._numbers:
                arrays[number] = value_of_ref(given[number])
            results = self._calls(arrays, traced=traced)
            n_returned = len(results) - len(self._refs.updated)
            for number, array in zip(self._refs.updated, results[n_returned:], strict=True):
                set_ref(given[number], array)
        return results[:n_returned]

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Refs stay unchanged: the next call places their arrays."""
        arrays = [None if is_ref_leaf(leaf) else leaf for leaf in leaves]
        placed = self._calls.place([*arrays, *[None] * len(self._refs.captured)])
        return [leaf if is_ref_leaf(leaf) else array for leaf, array in zip(leaves, placed, strict=False)]
