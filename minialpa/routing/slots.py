"""Expert ids in; the slot of each row, and the row of each slot, out.

Each of x blocks of m rows has c slots for each of y owners; owner o has experts o e to (o + 1) e - 1. A row has a slot
of the owner of its expert; if these are full, a free slot of another owner. So y c >= m slots hold every routing.

    own slots       first, sorted by expert
    foreign slots   then, sorted by expert
    free slots      last; their rows are copies, which no product reads
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True, slots=True)
class SlotShape:
    """n_blocks x, n_rows m of a block, n_groups y e, n_owners y, capacity c."""

    n_blocks: int
    n_rows: int
    n_groups: int
    n_owners: int
    capacity: int

    @property
    def has_foreign_rows(self) -> bool:
        return self.capacity < self.n_rows


class Slots(NamedTuple):
    """row_of_slot [x y c], slot_of_row [x m], rows of a block and slots of a block; then bounds of slots of an owner:
    starts and ends [y x e] of its own experts, foreign_starts and foreign_ends [y x g] of all."""

    row_of_slot: Any
    slot_of_row: Any
    starts: Any
    ends: Any
    foreign_starts: Any
    foreign_ends: Any


def slots_of(ids: Any, shape: SlotShape) -> Slots:
    """ids: [x m], from 0 to n_groups: the last one has no group, and slots after the last group."""
    x, m, g, y, c = shape.n_blocks, shape.n_rows, shape.n_groups, shape.n_owners, shape.capacity
    ids = ids.astype(np.int32)
    places = lax.broadcasted_iota(np.int32, (x, m), 1)
    _, order = lax.sort((ids, places), dimension=1, num_keys=1)
    _, position = lax.sort((order, places), dimension=1, num_keys=1)
    id_of_row, groups = ids[..., None], lax.broadcasted_iota(np.int32, (1, 1, g), 2)
    starts, ends = (jnp.sum(one, axis=1, dtype=np.int32) for one in (id_of_row < groups, id_of_row <= groups))
    if y == 1:
        none = jnp.zeros((1, x, g), np.int32)
        return Slots(order[:, None], position, starts[None], ends[None], none, none)

    first = starts.reshape(x, y, -1)[..., 0]
    end = jnp.concatenate([first[:, 1:], jnp.full((x, 1), m, np.int32)], axis=1)
    kept = jnp.minimum(end - first, c)
    before = jnp.cumsum(end - first - kept, axis=1) - (end - first - kept)
    free = jnp.cumsum(c - kept, axis=1) - (c - kept)

    def of_overflow(q: Any, begins: Any, lengths: Any, values: Any) -> Any:
        """For numbers q [x ...] of rows without an own slot: values [x y] + q - begin, in the part with q."""
        shift = (x, *(1,) * (q.ndim - 1), y)
        begins, lengths, values = (array.reshape(shift) for array in (begins, lengths, values))
        place = q[..., None] - begins
        return jnp.sum(jnp.where((place >= 0) & (place < lengths), values + place, 0), axis=-1, dtype=np.int32)

    at = lax.broadcasted_iota(np.int32, (x, y, c), 2)
    foreign = of_overflow(free[..., None] + at - kept[..., None], before, end - first - kept, first + c)
    sorted_at = jnp.where(at < kept[..., None], first[..., None] + at, foreign)
    row_of_slot = jnp.take_along_axis(order, sorted_at.reshape(x, y * c), axis=1, mode="promise_in_bounds")

    owner, owners = jnp.minimum(ids // (g // y), y - 1), lax.broadcasted_iota(np.int32, (1, 1, y), 2)
    is_owner = owner[..., None] == owners
    rank, over = (jnp.sum(jnp.where(is_owner, array[:, None], 0), axis=-1, dtype=np.int32) for array in (first, before))
    rank = position - rank
    in_foreign = of_overflow(over + rank - c, free, c - kept, owners[0] * c + kept)
    slot_of_row = jnp.where(rank < c, owner * c + rank, in_foreign)

    def of_owners(bounds: Any) -> tuple[Any, Any]:
        """[y x e] of own slots, [y x g] of foreign slots."""
        ranks = bounds.reshape(x, y, -1) - first[..., None]
        own = jnp.minimum(ranks, kept[..., None])
        q = (before[..., None] + jnp.maximum(ranks, c) - c).reshape(x, 1, g)
        there = jnp.clip(q - free[..., None], 0, (c - kept)[..., None]) + kept[..., None]
        return own.swapaxes(0, 1), there.swapaxes(0, 1)

    (own_starts, foreign_starts), (own_ends, foreign_ends) = of_owners(starts), of_owners(ends)
    return Slots(row_of_slot.reshape(x, y, c), slot_of_row, own_starts, own_ends, foreign_starts, foreign_ends)


def to_slots(rows: Any, slots_rows: Any) -> Any:
    """[x m ...] to [y x c ...]. slots_rows: [x y c], rows of a block."""
    x, y, c = slots_rows.shape
    return _taken(rows, slots_rows.reshape(x, y * c)).reshape(x, y, c, *rows.shape[2:]).swapaxes(0, 1)


def from_slots(array: Any, slot_of_row: Any) -> Any:
    """[y x c ...] to [x m ...]."""
    y, x, c = array.shape[:3]
    return _taken(array.swapaxes(0, 1).reshape(x, y * c, *array.shape[3:]), slot_of_row)


def _taken(rows: Any, places: Any) -> Any:
    """[x m ...] and [x n] to [x n ...]."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(2, rows.ndim)),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    sizes = (1, 1, *rows.shape[2:])
    return lax.gather(rows, places[..., None], numbers, sizes, mode="promise_in_bounds")
