"""Arguments of a step in one process: lays leaves out as the program reads them, without touching the caller's memory.

A leaf that already has the right sharding is used as it is. What the program donates never shares memory with an array
that the caller keeps, and nothing does with a NumPy array.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from minialpa.arrays import RemoteArray, own_copy
from minialpa.programs.program import InputSlot, Program, Run, reads
from minialpa.support.private_jax import addresses_of


class LocalArguments:
    """The inputs of a program on the devices of this process.

    Attributes:
        buffers: the buffer of each input.
    """

    def __init__(self, program: Program, meshes: Sequence[Mesh]) -> None:
        self._inputs, self._donated_leaves = program.inputs, program.donated_leaves
        self._shardings = [NamedSharding(meshes[slot.mesh], slot.spec) for slot in program.inputs]
        self._read_as_numpy = _read_by_one_call(program)
        self._read = {slot.leaf for slot in program.inputs}
        self.buffers = tuple(slot.buffer for slot in program.inputs)
        self._may_settle = all(slot.rows is None for slot in program.inputs)
        #: Shardings of the last leaves that needed nothing.
        self._settled: list[Any] = []

    def of_step(self, leaves: Sequence[Any]) -> list[Any]:
        """The array of each input slot. Leaves that already have the right sharding are used as they are.

        If all leaves have, and none is cut into micro-batches, later leaves with the same shardings skip the checks.
        """
        shardings = [getattr(leaf, "sharding", type(leaf)) for leaf in leaves]
        if shardings == self._settled and len(set(map(id, leaves))) == len(leaves):
            return [_owned_here(leaves[slot.leaf]) for slot in self._inputs]

        here = {leaf: _in_this_process(leaves[leaf]) for leaf in self._read}
        values = [_value(here[slot.leaf], slot) for slot in self._inputs]
        missing = [i for i, value in enumerate(values) if not self._is_placed(i, value)]
        copied = self._copy_for_donation(values, set(missing))
        if missing:
            self._put(values, missing, leaves)
        elif not copied and self._may_settle and not any(isinstance(leaf, RemoteArray) for leaf in leaves):
            self._settled = shardings
        return values

    def kept(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves, laid out as the first of their readers wants them; batches, of which micro-batches are cut, stay
        as they are, and so does None, for a leaf that is not given."""
        out = list(leaves)
        for slot, sharding in zip(self._inputs, self._shardings, strict=True):
            leaf = leaves[slot.leaf]
            if (
                leaf is not None
                and slot.rows is None
                and out[slot.leaf] is leaf
                and getattr(leaf, "sharding", None) != sharding
            ):
                placed = jax.device_put(_owned_here(_in_this_process(leaf)), sharding)
                out[slot.leaf] = self._owned(placed, leaf, slot)
        return out

    def _is_placed(self, i: int, value: Any) -> bool:
        """Whether input `i` needs no `device_put`: its sharding is right, or its readers take NumPy arrays."""
        if isinstance(value, np.ndarray) and i in self._read_as_numpy:
            return True
        return _lies(value, self._shardings[i])

    def _copy_for_donation(self, values: list[Any], missing: set[int]) -> bool:
        """Copy the donated inputs that a call must not take over, in place; whether there are any.

        One array passed for two donated arguments: only one of them can take over its buffer. And on one device, as on
        several, a caller keeps the arrays that no step or `preshard` has laid out.
        """
        copied = False
        seen: set[int] = set()
        for i, (slot, sharding) in enumerate(zip(self._inputs, self._shardings, strict=True)):
            value = values[i]
            if i in missing or isinstance(value, np.ndarray) or slot.leaf not in self._donated_leaves:
                continue
            if id(value) in seen or value.sharding != sharding:
                values[i], copied = value.copy(), True
            seen.add(id(values[i]))
        return copied

    def _put(self, values: list[Any], missing: Sequence[int], leaves: Sequence[Any]) -> None:
        """Put the inputs `missing` where the program reads them, in place."""
        shardings = [self._shardings[i] for i in missing]
        for i, array in zip(missing, jax.device_put([values[i] for i in missing], shardings), strict=True):
            values[i] = self._owned(array, leaves[self._inputs[i].leaf], self._inputs[i])

    def _owned(self, array: Any, leaf: Any, slot: InputSlot) -> Any:
        """`array`, not sharing memory with the caller's `leaf` if the program would donate it.

        `device_put` may keep the leaf's own buffer for the device where it already lies; donating that one would
        destroy an array that the caller has not given in this layout.
        """
        if slot.leaf not in self._donated_leaves or not isinstance(leaf, jax.Array):
            return array
        return array.copy() if _shares_buffer(array, leaf) else array


def _read_by_one_call(program: Program) -> frozenset[int]:
    """Input slots that only one run reads, on one device: it takes NumPy arrays itself, faster than `device_put`."""
    readers = Counter(b for instruction in program.instructions for b in reads(instruction))
    by_run = {b for instruction in program.instructions if isinstance(instruction, Run) for b in instruction.inputs}
    results = {b for slot in program.outputs for b in slot.buffers}
    return frozenset(
        i
        for i, slot in enumerate(program.inputs)
        if slot.buffer in by_run - results
        and readers[slot.buffer] == 1
        and math.prod(program.meshes[slot.mesh].logical_shape) == 1
    )


def _value(leaf: Any, slot: InputSlot) -> Any:
    """What an input slot is of a leaf in this process."""
    if slot.rows is None:
        return _owned_here(leaf)
    start, stop, dim = slot.rows
    index = (slice(None),) * dim + (slice(start, stop),)
    return _owned_here(leaf[index] if isinstance(leaf, jax.Array | np.ndarray) else np.asarray(leaf)[index])


def _owned_here(value: Any) -> Any:
    """The value, if it is a NumPy array as a copy: the caller may write to its memory before jax has read it."""
    return own_copy(value) if isinstance(value, np.ndarray) else value


def _in_this_process(leaf: Any) -> Any:
    """The value of a remote array, put together on the host: no device need have room for it."""
    return leaf[...] if isinstance(leaf, RemoteArray) else leaf


def _lies(value: Any, sharding: NamedSharding) -> bool:
    if not isinstance(value, jax.Array):
        return False
    own = value.sharding
    return own is sharding or own == sharding or (
        len(own.device_set) == len(sharding.device_set) == 1
        and own.device_set == sharding.device_set
    )  # fmt: skip


def _shares_buffer(array: jax.Array, leaf: jax.Array) -> bool:
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        return True
    return not addresses_of(array).isdisjoint(addresses_of(leaf))
