"""Placements of leaves in a plan, and of the parts that a step has of them: blocks of rows, or all of a leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.extend.core import Var

from minialpa.inter.staging.tasks import StagedStep
from minialpa.plan import PlacedValue
from minialpa.sharding import Spec
from minialpa.tracing.jaxprs import Atom, dtype_name, is_literal, shape_of
from minialpa.tracing.trace import Part


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


def _placed(path: str, atom: Atom, specs: Mapping[int, Spec | None]) -> PlacedValue:
    """A value on meshes; where its spec is not known it is whole."""
    whole = Spec.replicated(len(shape_of(atom)))
    return PlacedValue(
        path=path,
        shape=shape_of(atom),
        dtype=dtype_name(atom),
        mesh_ids=tuple(specs),
        specs=tuple(s or whole for s in specs.values()),
    )


def placed_inputs(staged: StagedStep, specs: Sequence[Mapping[Var, Spec]]) -> tuple[PlacedValue, ...]:
    """Argument leaves. `specs`: of the values of each mesh."""
    traced = staged.split.traced
    micro = dict(staged.split.micro_inputs)
    offset = len(traced.flat.constvars)
    out = []
    for i, (var, path) in enumerate(zip(traced.flat.invars, traced.in_paths, strict=True)):
        like, meshes = var, staged.input_meshes[offset + i]
        if var in micro:
            like = micro[var]
            meshes = tuple(sorted({task.mesh for task in staged.tasks if like in task.invars}))
        out.append(_placed(path, var, {mesh: specs[mesh].get(like) for mesh in meshes}))
    return merged_values(out, traced.in_parts)


def placed_outputs(staged: StagedStep, specs: Sequence[Mapping[Var, Spec]]) -> tuple[PlacedValue, ...]:
    """Result leaves. `specs`: in which results are left on each mesh; a replacement of a donated input as that input,
    so that the next step takes it as it is."""
    out = []
    for atom, path, meshes in zip(
        staged.split.outvars, staged.split.traced.out_paths, staged.output_meshes, strict=True
    ):
        results = [None if is_literal(atom) else specs[mesh].get(atom) for mesh in meshes]
        out.append(_placed(path, atom, dict(zip(meshes, results, strict=True))))
    return merged_values(out, staged.split.traced.out_parts)
