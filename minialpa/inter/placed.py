"""Placements of leaves in a plan, and of the parts that a step has of them: blocks of rows, or all of a leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from minialpa.plan import PlacedValue
from minialpa.trace import Part


def merged_values(values: Sequence[PlacedValue], parts: Sequence[Part]) -> tuple[PlacedValue, ...]:
    """One value for each leaf, from one for each part; without `parts`, the values are the leaves."""
    if not parts:
        return tuple(values)
    of_leaf: dict[int, list[tuple[PlacedValue, Part]]] = {}
    for value, part in zip(values, parts, strict=True):
        of_leaf.setdefault(part.leaf, []).append((value, part))
    return tuple(_merged(of_leaf[leaf]) for leaf in sorted(of_leaf))


def _merged(found: Sequence[tuple[PlacedValue, Part]]) -> PlacedValue:
    first = found[0][0]
    if found[0][1].rows is None:
        return first
    n_rows = max(part.rows[1] for _, part in found if part.rows)
    return dataclasses.replace(
        first,
        shape=(n_rows, *first.shape[1:]),
        mesh_ids=tuple(mesh for value, _ in found for mesh in value.mesh_ids),
        specs=tuple(spec for value, _ in found for spec in value.specs),
        rows=tuple(part.rows for value, part in found for _ in value.mesh_ids if part.rows),
    )


def values_of_parts(values: Sequence[PlacedValue], parts: Sequence[Part]) -> tuple[PlacedValue, ...]:
    """The inverse of `merged_values`."""
    return tuple(_part(values[part.leaf], part) for part in parts) if parts else tuple(values)


def _part(value: PlacedValue, part: Part) -> PlacedValue:
    if part.rows is None:
        return value
    mine = [i for i, rows in enumerate(value.rows) if rows == part.rows]
    return dataclasses.replace(
        value,
        shape=(part.rows[1] - part.rows[0], *value.shape[1:]),
        mesh_ids=tuple(value.mesh_ids[i] for i in mine),
        specs=tuple(value.specs[i] for i in mine),
        rows=(),
    )
