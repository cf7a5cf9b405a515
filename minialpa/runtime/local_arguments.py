"""Arguments of a step in one process: leaves go in, and the array of each `InputSlot` comes out.

A leaf in the right sharding is used in place. Donated arrays share no memory with arrays of the caller. No array shares
memory with a NumPy array.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from minialpa.arrays import RemoteArray, own_copy
from minialpa.programs.mesh_program import overwritten_rows
from minialpa.programs.program import InputSlot, Program, Run, reads
from minialpa.runtime.arrays import MicroBatchedArray, MicroRows, cover_all_rows, device_order
from minialpa.runtime.steps.compiled import paced
from minialpa.sharding import is_host_array, placed
from minialpa.support.private_jax import NO_MESH, ArrayImpl, addresses_of, under_mesh

#: Smaller arrays go to several CPU devices through a copy on the host.
_SMALL_BYTES = 2**24


class LocalArguments:
    """`buffers` and `leaves` are the numbers for each input."""

    def __init__(self, program: Program, meshes: Sequence[Mesh]) -> None:
        self._inputs, self._donated_leaves = program.inputs, program.donated_leaves
        self._shardings = [placed(meshes[slot.mesh], slot.spec, in_host=slot.in_host) for slot in program.inputs]
        self._is_donated = [slot.leaf in program.donated_leaves for slot in program.inputs]
        self._inputs_of_one_call = _find_inputs_of_one_call(program)
        self._inputs_of_cut_leaf = _find_cut_leaves(program)
        self._overwritten_rows = overwritten_rows(program)
        self.buffers = tuple(slot.buffer for slot in program.inputs)
        self.leaves = tuple(slot.leaf for slot in program.inputs)
        self._cutters = {
            number: RowCutter([(self._inputs[i].rows, self._shardings[i]) for i in inputs])
            for number, inputs in self._inputs_of_cut_leaf.items()
        }
        #: For each input, the sharding of the last leaf in place. Training loops repeat the same object.
        self._settled_shardings: list[Any] = [None] * len(program.inputs)

    def of_step(self, leaves: Sequence[Any]) -> list[Any]:
        values = [leaves[number] for number in self.leaves]
        if len(set(map(id, leaves))) == len(leaves):
            settled = self._settled_shardings
            work = [i for i, x in enumerate(values) if type(x) is not ArrayImpl or x.sharding is not settled[i]]
        else:  # of one array in two places, only one may take over its memory
            work = list(range(len(values)))
        if not work:
            return values

        self._fill(values, work, leaves)
        missing = [i for i in work if not self._is_placed(i, values[i])]
        self._copy_for_donation(values, work, set(missing))
        if missing:
            self._put_missing(values, missing, leaves)
        for i in work:
            value, slot = values[i], self._inputs[i]
            if type(value) is ArrayImpl and value is leaves[slot.leaf] and slot.rows is None:
                self._settled_shardings[i] = value.sharding if _has_sharding(value, self._shardings[i]) else None
        return values

    def kept(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves for `Runner.place`: laid out for their first reader or, if cut, as `MicroBatchedArray`s for all
        readers.

        A cut leaf stays unchanged if the program does not read all its rows. None stays None.
        """
        out = list(leaves)
        for slot, sharding in zip(self._inputs, self._shardings, strict=True):
            leaf = leaves[slot.leaf]
            if (
                leaf is not None
                and slot.leaf not in self._inputs_of_cut_leaf
                and out[slot.leaf] is leaf
                and getattr(leaf, "sharding", None) != sharding
            ):
                placed = jax.device_put(_copied_if_numpy(_value_in_this_process(leaf)), sharding)
                out[slot.leaf] = self._copied_if_shared(placed, leaf, slot)

        for number, slots in self._inputs_of_cut_leaf.items():
            if leaves[number] is not None and cover_all_rows(
                {self._inputs[i].rows for i in slots}, np.shape(leaves[number])
            ):
                out[number] = self._micro_batched(leaves[number], slots)
        return out

    def _micro_batched(self, leaf: Any, slots: Sequence[int]) -> Any:
        places = list(dict.fromkeys((self._inputs[i].rows, self._shardings[i]) for i in slots))
        if isinstance(leaf, MicroBatchedArray) and all(_placed_part(leaf, *place) is not None for place in places):
            return leaf

        here = _value_in_this_process(leaf)
        cut = {rows: _copied_if_numpy(_rows_of(here, rows)) for rows, _ in places}
        placed = jax.device_put([cut[rows] for rows, _ in places], [sharding for _, sharding in places])
        parts: dict[MicroRows, list[Any]] = {}
        for (rows, _), array in zip(places, placed, strict=True):
            parts.setdefault(rows, []).append(array)
        return MicroBatchedArray(parts)

    def _fill(self, values: list[Any], inputs: Sequence[int], leaves: Sequence[Any]) -> None:
        """Parts in the right sharding are not fetched."""
        here: dict[int, Any] = {}
        rows: dict[int, Any] = {}
        for i in inputs:
            slot, sharding = self._inputs[i], self._shardings[i]
            leaf = leaves[slot.leaf]
            part = _placed_part(leaf, slot.rows, sharding) if isinstance(leaf, MicroBatchedArray) else None
            if part is not None and i in self._overwritten_rows:
                part = _copy(part)

            if part is None and slot.leaf not in here:
                here[slot.leaf] = _value_in_this_process(leaf)
                if slot.leaf in self._inputs_of_cut_leaf and isinstance(here[slot.leaf], jax.Array):
                    cut = self._cutters[slot.leaf](here[slot.leaf])
                    rows.update(zip(self._inputs_of_cut_leaf[slot.leaf], cut, strict=True))
            if part is None:
                part = rows[i] if i in rows else _copied_if_numpy(_rows_of(here[slot.leaf], slot.rows))
            values[i] = part

    def _is_placed(self, i: int, value: Any) -> bool:
        """Whether input `i` has its sharding, or the function that reads it places it."""
        sharding = self._shardings[i]
        return (i in self._inputs_of_one_call and _is_loose(value, sharding)) or _has_sharding(value, sharding)

    def _copy_for_donation(self, values: list[Any], inputs: Sequence[int], missing: set[int]) -> None:
        """Copy donated inputs where a call must not take over their memory.

        Of one array in two places, a call can take over the buffer once, and not at all if another input reads it.
        An array on the right device that lacks the program's sharding comes from neither a step nor `preshard`: the
        caller keeps it.
        """
        donated = [i for i in inputs if self._is_donated[i] and i not in missing]
        if not donated:
            return
        seen = {id(value) for value, is_donated in zip(values, self._is_donated, strict=True) if not is_donated}
        for i in donated:
            if id(values[i]) in seen or values[i].sharding != self._shardings[i]:
                # In the program's sharding: it need not copy an array that it returns unchanged.
                values[i] = jax.device_put(_copy(values[i]), self._shardings[i])
            seen.add(id(values[i]))

    def _put_missing(self, values: list[Any], missing: Sequence[int], leaves: Sequence[Any]) -> None:
        shardings = [self._shardings[i] for i in missing]
        put = [_value_to_put(values[i], sharding) for i, sharding in zip(missing, shardings, strict=True)]
        for i, array in zip(missing, jax.device_put(put, shardings), strict=True):
            values[i] = self._copied_if_shared(array, leaves[self._inputs[i].leaf], self._inputs[i])

    def _copied_if_shared(self, array: Any, leaf: Any, slot: InputSlot) -> Any:
        """`device_put` may use the leaf's buffer on a device that has it."""
        if slot.leaf not in self._donated_leaves or not isinstance(leaf, jax.Array):
            return array
        return _copy(array) if _shares_buffer(array, leaf) else array


class RowCutter:
    """Cuts an array into the rows that inputs read, in one call. `places` has the rows and sharding of each input."""

    def __init__(self, places: Sequence[tuple[MicroRows, NamedSharding]]) -> None:
        self._is_cut = [rows is not None for rows, _ in places]
        cut = [(rows, sharding) for rows, sharding in places if rows is not None]
        self._devices = {device_order(sharding) for _, sharding in cut}
        self._cut_anywhere = jax.jit(functools.partial(_slices_of_rows, [rows for rows, _ in cut]))
        self._cut_in_shardings = jax.jit(self._cut_anywhere, out_shardings=[sharding for _, sharding in cut])

    def __call__(self, array: jax.Array) -> list[Any]:
        """In the inputs' shardings, if the array is on the same devices in their order."""
        cut = self._cut_in_shardings if self._devices == {device_order(array.sharding)} else self._cut_anywhere
        with under_mesh(NO_MESH):
            rows = iter(paced(cut, array.sharding.device_set)(array))
        return [next(rows) if is_cut else array for is_cut in self._is_cut]


def _slices_of_rows(rows: Sequence[tuple[int, int, int]], array: Any) -> list[Any]:
    return [jax.lax.slice_in_dim(array, start, stop, axis=dim) for start, stop, dim in rows]


def _find_cut_leaves(program: Program) -> dict[int, list[int]]:
    cut = {slot.leaf for slot in program.inputs if slot.rows is not None}
    return {leaf: [i for i, slot in enumerate(program.inputs) if slot.leaf == leaf] for leaf in sorted(cut)}


def _find_inputs_of_one_call(program: Program) -> frozenset[int]:
    """Inputs that only one `Run` reads, undonated. Its call places loose values faster than `device_put`."""
    readers = Counter(b for instruction in program.instructions for b in reads(instruction))
    by_run = {b for instruction in program.instructions if isinstance(instruction, Run) for b in instruction.inputs}
    results = {b for slot in program.outputs for b in slot.buffers}
    return frozenset(
        i
        for i, slot in enumerate(program.inputs)
        if slot.buffer in by_run - results and readers[slot.buffer] == 1 and slot.leaf not in program.donated_leaves
    )


def _is_loose(value: Any, sharding: NamedSharding) -> bool:
    """Compiled functions place numbers, NumPy arrays and, on several devices, uncommitted arrays."""
    if type(value) is ArrayImpl:
        return sharding.num_devices > 1 and not value.committed
    return isinstance(value, np.ndarray | np.number) or type(value) in (int, float, complex)


def _rows_of(leaf: Any, rows: MicroRows) -> Any:
    if rows is None:
        return leaf
    start, stop, dim = rows
    index = (slice(None),) * dim + (slice(start, stop),)
    return leaf[index] if isinstance(leaf, jax.Array | np.ndarray) else np.asarray(leaf)[index]


def _placed_part(leaf: MicroBatchedArray, rows: MicroRows, sharding: NamedSharding) -> Any:
    return next((part for part in leaf.parts(rows) if _has_sharding(part, sharding)), None)


def _copy(array: Any) -> Any:
    with under_mesh(NO_MESH):
        return array.copy()


def _copied_if_numpy(value: Any) -> Any:
    """The caller may write to NumPy arrays before jax reads them."""
    return own_copy(value) if isinstance(value, np.ndarray) else value


def _value_to_put(value: Any, sharding: NamedSharding) -> Any:
    """A NumPy copy of a small array on one CPU device: `device_put` would compile the cut of each shape into shards,
    which takes longer.
    """
    if not isinstance(value, jax.Array) or value.nbytes > _SMALL_BYTES or sharding.num_devices == 1:
        return value
    (device, *others) = value.devices()
    is_plain = isinstance(value.dtype, np.dtype) and value.dtype.kind in "biufc" and not value.weak_type
    return own_copy(np.asarray(value)) if is_plain and not others and device.platform == "cpu" else value


def _value_in_this_process(leaf: Any) -> Any:
    """Remote arrays are joined on the host: no device needs memory for all."""
    return leaf[...] if isinstance(leaf, RemoteArray) else leaf


def _has_sharding(value: Any, sharding: NamedSharding) -> bool:
    if not isinstance(value, jax.Array):
        return False
    current = value.sharding
    return current is sharding or current == sharding or (
        len(current.device_set) == len(sharding.device_set) == 1
        and current.device_set == sharding.device_set
        and is_host_array(value) == (sharding.memory_kind is not None)
    )  # fmt: skip


def _shares_buffer(array: jax.Array, leaf: jax.Array) -> bool:
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        return True
    return not addresses_of(array).isdisjoint(addresses_of(leaf))
