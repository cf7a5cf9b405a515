"""Calls of a program whose arrays are on the user's mesh: each result comes back in a sharding of that mesh.

A result moves if it is on other devices than the mesh, or if later lines need exactly this sharding.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from minialpa.arrays import RemoteArray
from minialpa.runtime.arrays import BlockedArray, device_order
from minialpa.runtime.runner import BlockedCalls, Runner
from minialpa.sharding import axes_in
from minialpa.tracing.user_meshes import UsersSharding


class CallsOnMesh:
    """`BlockedCalls` with results in `shardings`. A result with None stays where the program leaves it."""

    def __init__(self, calls: Runner | BlockedCalls, shardings: Sequence[UsersSharding | None]) -> None:
        self._calls, self._shardings = calls, shardings
        #: For each result: its sharding after the last call, and its target, or None if it stays.
        self._targets: list[tuple[Any, NamedSharding | None]] = [(None, None)] * len(shardings)
        #: By `id` of an array on the user's mesh: a reference to it, and the array with the same shards in the plan's
        #: sharding, which the next call may donate.
        self._planned: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def __call__(self, leaves: Sequence[Any], *, traced: bool = False) -> list[Any]:
        results = self._calls([self._as_planned(leaf) for leaf in leaves], traced=traced)
        targets = {k: target for k, array in enumerate(results) if (target := self._target(k, array)) is not None}
        if targets:
            made = [np.asarray(x) if isinstance(x, BlockedArray) else x for x in (results[k] for k in targets)]
            for k, shown in zip(targets, jax.device_put(made, list(targets.values())), strict=True):
                self._note(shown, results[k])
                results[k] = shown
        return results

    def turn(self) -> AbstractContextManager[None]:
        return self._calls.turn()

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        return self._calls.place(leaves)

    def _target(self, number: int, array: Any) -> NamedSharding | None:
        wanted = self._shardings[number]
        if wanted is None:
            return None
        if isinstance(array, BlockedArray) and isinstance(array.blocks[0], jax.Array):  # on several stages
            return wanted.sharding
        if isinstance(array, RemoteArray):  # on workers
            array.user_sharding = wanted.sharding
            return None

        left_in, target = self._targets[number]
        if left_in is not array.sharding:
            target = _target_of(array, *wanted)
            self._targets[number] = array.sharding, target
        return target

    def _as_planned(self, leaf: Any) -> Any:
        known = self._planned.get(id(leaf))
        # jax gives the array of a Ref other contents in place.
        is_same = known is not None and known[0]() is leaf and not known[1].is_deleted()
        return known[1] if known is not None and is_same else leaf

    def _note(self, shown: Any, made: Any) -> None:
        """Keep the plan's array for the next call, if both have the same shards and so share memory."""
        if isinstance(made, jax.Array) and made.sharding.is_equivalent_to(shown.sharding, made.ndim):
            key = id(shown)
            self._planned[key] = weakref.ref(shown, lambda _: self._planned.pop(key, None)), made


def _target_of(array: jax.Array, sharding: NamedSharding, is_exact: bool) -> NamedSharding | None:
    """None if the array stays."""
    spec: PartitionSpec | None = sharding.spec
    if not is_exact and device_order(array.sharding) == device_order(sharding):
        spec = _on_finer_mesh(array.sharding, sharding.mesh)
    return None if spec is None else NamedSharding(sharding.mesh, spec, memory_kind=array.sharding.memory_kind)


def _on_finer_mesh(planned: Any, mesh: Any) -> PartitionSpec | None:
    """The same shards on a mesh of the same devices that splits axes of the plan, if possible.

    A program of jax has the mesh of its first argument, and fails if it makes shards that this mesh lacks.
    """
    if not isinstance(planned, NamedSharding):
        return None
    axes: dict[str, tuple[str, ...]] = {}
    lengths = list(mesh.shape.items())
    for name, length in planned.mesh.shape.items():
        n_taken = next(n for n in range(len(lengths) + 1) if math.prod(size for _, size in lengths[:n]) >= length)
        if math.prod(size for _, size in lengths[:n_taken]) != length:
            return None
        axes[name], lengths = tuple(axis for axis, _ in lengths[:n_taken]), lengths[n_taken:]
    if all(len(taken) == 1 for taken in axes.values()):
        return None
    return PartitionSpec(*(tuple(axis for name in axes_in([entry]) for axis in axes[name]) for entry in planned.spec))
