"""Calls of a program whose arrays are on the user's mesh: each result comes back in a sharding of that mesh.

Where the program leaves the same shards, an array only changes its sharding object. Else it is moved, unless it is on
the devices of the mesh and its type has no sharding.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from minialpa.runtime.arrays import BlockedArray
from minialpa.runtime.runner import BlockedCalls, Runner
from minialpa.sharding import is_host_array
from minialpa.support.private_jax import ArrayImpl, on_sharding
from minialpa.tracing.user_meshes import explicit_sharding


class CallsOnMesh:
    """`BlockedCalls` with results in `shardings`. A result with None stays where the program leaves it."""

    def __init__(self, calls: Runner | BlockedCalls, shardings: Sequence[NamedSharding | None]) -> None:
        self._calls, self._shardings = calls, shardings
        #: By `id` of an array on the user's mesh: a reference to it, and the array with the same shards in the plan's
        #: sharding, whose memory the next call may take over.
        self._planned: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def __call__(self, leaves: Sequence[Any], *, traced: bool = False) -> list[Any]:
        results = self._calls([self._as_planned(leaf) for leaf in leaves], traced=traced)
        return [self._on_mesh(*pair) for pair in zip(results, self._shardings, strict=True)]

    def turn(self) -> AbstractContextManager[None]:
        return self._calls.turn()

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        return self._calls.place(leaves)

    def _as_planned(self, leaf: Any) -> Any:
        known = self._planned.get(id(leaf))
        return known[1] if known is not None and known[0]() is leaf else leaf

    def _on_mesh(self, array: Any, sharding: NamedSharding | None) -> Any:
        if sharding is None or not isinstance(array, jax.Array | BlockedArray):
            return array
        if isinstance(array, BlockedArray):  # on several stages
            return jax.device_put(np.asarray(array), sharding)
        target = NamedSharding(sharding.mesh, sharding.spec, memory_kind=array.sharding.memory_kind)
        if not array.sharding.is_equivalent_to(target, array.ndim):
            is_typed = explicit_sharding(sharding) is not None
            is_elsewhere = array.sharding.device_set != sharding.device_set
            return jax.device_put(array, target) if is_typed or is_elsewhere else array
        if type(array) is not ArrayImpl or is_host_array(array):
            return jax.device_put(array, target)

        shown = on_sharding(array, target)
        number = id(shown)
        self._planned[number] = weakref.ref(shown, lambda _: self._planned.pop(number, None)), array
        return shown
