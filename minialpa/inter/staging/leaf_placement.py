"""Leaf placement: a staged step and its specs in, the meshes and specs of argument and result leaves of a plan out.

A step may have several parts of a leaf, each a block of rows; a plan lists the leaf once, with all parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.extend.core import Var

from minialpa.inter.staging.tasks import StagedStep
from minialpa.ir.equations import Atom, dtype_name, is_in_host, is_literal, shape_of
from minialpa.plan import PlacedValue
from minialpa.plan.record import MemoryKind
from minialpa.programs.program import BlockRows, LeafBlocks
from minialpa.sharding import Spec
from minialpa.tracing.trace import LeafPart, TracedStep


def merged_values(values: Sequence[PlacedValue], parts: Sequence[LeafPart]) -> tuple[PlacedValue, ...]:
    """One value for each leaf, from one value for each part; without `parts`, the values are the leaves."""
    if not parts:
        return tuple(values)

    of_leaf: dict[int, list[tuple[PlacedValue, LeafPart]]] = {}
    for value, part in zip(values, parts, strict=True):
        of_leaf.setdefault(part.leaf, []).append((value, part))
    return tuple(_merged_value(of_leaf[leaf]) for leaf in sorted(of_leaf))


def _merged_value(blocks: Sequence[tuple[PlacedValue, LeafPart]]) -> PlacedValue:
    first, part_of_first = blocks[0]
    if part_of_first.rows is None:
        return first

    n_rows = max(part.rows[1] for _, part in blocks if part.rows)
    return dataclasses.replace(
        first,
        shape=(n_rows, *first.shape[1:]),
        mesh_ids=tuple(mesh for value, _ in blocks for mesh in value.mesh_ids),
        specs=tuple(spec for value, _ in blocks for spec in value.specs),
        rows=tuple(part.rows for value, part in blocks for _ in value.mesh_ids if part.rows),
    )


def values_of_parts(values: Sequence[PlacedValue], parts: Sequence[LeafPart]) -> tuple[PlacedValue, ...]:
    """The inverse of `merged_values`."""
    return tuple(_value_of_part(values[part.leaf], part) for part in parts) if parts else tuple(values)


def _value_of_part(value: PlacedValue, part: LeafPart) -> PlacedValue:
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


def leaf_blocks(traced: TracedStep) -> LeafBlocks:
    return LeafBlocks(_rows_of_leaves(traced.in_parts), _rows_of_leaves(traced.out_parts))


def _rows_of_leaves(parts: Sequence[LeafPart]) -> tuple[BlockRows | None, ...]:
    rows: dict[int, tuple[tuple[int, int], ...]] = {}
    for part in parts:
        rows[part.leaf] = (*rows.get(part.leaf, ()), *((part.rows,) if part.rows else ()))
    return tuple(rows[leaf] or None for leaf in sorted(rows)) if any(rows.values()) else ()


def memory_kind_of(atom: Atom) -> MemoryKind:
    return "pinned_host" if is_in_host(atom.aval) else "device"


def _placed_value(path: str, atom: Atom, specs: Mapping[int, Spec | None]) -> PlacedValue:
    """specs: by mesh; None for a replicated value."""
    replicated = Spec.replicated(len(shape_of(atom)))
    return PlacedValue(
        path=path,
        shape=shape_of(atom),
        dtype=dtype_name(atom),
        mesh_ids=tuple(specs),
        specs=tuple(spec or replicated for spec in specs.values()),
        memory_kind=memory_kind_of(atom),
    )


def placed_inputs(staged: StagedStep, specs: Sequence[Mapping[Var, Spec]]) -> tuple[PlacedValue, ...]:
    """Argument leaves. specs: of the variables of each mesh."""
    traced = staged.split.traced
    micro_of = dict(staged.split.micro_inputs)
    meshes_of_argument = staged.input_meshes[len(traced.flat.constvars) :]

    placed = []
    for var, path, meshes in zip(traced.flat.invars, traced.in_paths, meshes_of_argument, strict=True):
        # A batch is on the meshes that read micro-batches of it, by the spec of a micro-batch.
        held = micro_of.get(var, var)
        if var in micro_of:
            meshes = tuple(sorted({task.mesh for task in staged.tasks if held in task.invars}))
        placed.append(_placed_value(path, var, {mesh: specs[mesh].get(held) for mesh in meshes}))
    return merged_values(placed, traced.in_parts)


def placed_outputs(staged: StagedStep, specs: Sequence[Mapping[Var, Spec]]) -> tuple[PlacedValue, ...]:
    """Result leaves. specs: of the results of the step at the end, on each mesh.

    A replacement of a donated argument has its spec, so the next call needs no resharding.
    """
    split = staged.split
    placed = []
    for atom, path, meshes in zip(split.outvars, split.traced.out_paths, staged.output_meshes, strict=True):
        results = {mesh: None if is_literal(atom) else specs[mesh].get(atom) for mesh in meshes}
        placed.append(_placed_value(path, atom, results))
    return merged_values(placed, split.traced.out_parts)
