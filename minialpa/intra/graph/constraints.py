"""A PartitionSpec in; a `Constraint`, the specs that an array may have, out.

PartitionSpecs come from `jax.lax.with_sharding_constraint` in the model and from `AutoShardingOption.fixed_specs`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from minialpa.errors import InfeasibleError, ShardingError
from minialpa.ir.equations import is_constraint, shape_of, source_line
from minialpa.options import AutoShardingOption
from minialpa.sharding import AXIS_NAMES, Spec, axes_by_length, axes_in


@dataclass(frozen=True, slots=True)
class Constraint:
    """The array has `spec`, or another sharding in the dimensions `free`."""

    spec: Spec
    free: frozenset[int] = frozenset()

    def allows(self, spec: Spec) -> bool:
        pairs = enumerate(zip(spec.dims, self.spec.dims, strict=True))
        return not spec.partial and all(dim in self.free or axes == required for dim, (axes, required) in pairs)


def constraint_of_path(
    path: str, shape: tuple[int, ...], option: AutoShardingOption, mesh_shape: tuple[int, ...]
) -> Constraint | None:
    """Of the first fixed spec that matches `path`."""
    for pattern, partition in option.fixed_pairs:
        if pattern == path or ("*" in pattern and matches(pattern, path)):  # fast for thousands of paths
            axes = _numbers_of_axes(option.names_on(mesh_shape), axes_in(partition) if option.axis_names else ())
            try:
                return _constraint(partition, shape, axes, mesh_shape, f"`fixed_specs` for `{path}`")
            except ShardingError as error:
                if not option.axis_lengths:
                    raise
                raise InfeasibleError(str(error)) from None  # a mesh with other axes may hold the spec
    return None


def matches(pattern: str, path: str) -> bool:
    """`*` in `pattern` stands for any text."""
    return pattern == path or re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), path, re.DOTALL) is not None


def shape_of_constraints(eqns: Iterable[JaxprEqn], n_devices: int) -> tuple[int, ...] | None:
    """The shape, without 1s, of the first mesh of `n_devices` in a `with_sharding_constraint`."""
    for eqn in filter(is_constraint, eqns):
        sharding = eqn.params["sharding"]
        lengths = sharding.mesh.shape.values() if isinstance(sharding, NamedSharding) else ()
        shape = tuple(length for length in lengths if length > 1)
        if math.prod(shape) == n_devices and len(shape) <= len(AXIS_NAMES):
            return shape
    return None


def constraint_of_equation(eqn: JaxprEqn, mesh_shape: tuple[int, ...], option: AutoShardingOption) -> Constraint:
    """Raises InfeasibleError if the logical mesh cannot fulfil the constraint.

    Axes of the user's mesh match axes of the logical mesh by `AutoShardingOption.axis_names`, else by length.
    """
    if math.prod(mesh_shape) == 1:
        return Constraint(Spec(((),) * len(shape_of(eqn.invars[0]))))
    sharding = eqn.params["sharding"]
    where = f"`with_sharding_constraint` at {source_line(eqn)}"
    if not isinstance(sharding, NamedSharding):
        raise InfeasibleError(f"{where} has a {type(sharding).__name__}. Pass it a NamedSharding or a PartitionSpec.")
    try:
        names = option.names_on(mesh_shape) if option.axis_names else ()
        if names and set(names) <= set(sharding.mesh.axis_names):
            axes = _numbers_of_axes(names, sharding.mesh.axis_names)
        else:
            axes = _axis_numbers(dict(sharding.mesh.shape), mesh_shape, where)
        constraint = _constraint(sharding.spec, shape_of(eqn.invars[0]), axes, mesh_shape, where)
    except ShardingError as error:
        raise InfeasibleError(f'{error} With `AutoShardingOption(shardings="hint")`, it is a hint.') from None
    return Constraint(constraint.spec, constraint.free | frozenset(eqn.params.get("unconstrained_dims") or ()))


def _numbers_of_axes(names: Sequence[str], others: Iterable[str]) -> dict[str, int | None]:
    return {**dict.fromkeys(others), **{name: axis for axis, name in enumerate(names)}}


def _axis_numbers(sizes: Mapping[str, int], mesh_shape: Sequence[int], where: str) -> dict[str, int | None]:
    """A logical axis of the same length; None for length 1."""
    numbers = axes_by_length(sizes, mesh_shape)
    if numbers is None:
        raise ShardingError(
            f"{where} has a mesh of {dict(sizes)}, but the devices form a mesh of shape {tuple(mesh_shape)}. Use a "
            "mesh of this shape there, or set "
            f"`logical_shape={tuple(length for length in sizes.values() if length > 1)}`."
        )
    return numbers


def _constraint(
    partition: PartitionSpec,
    shape: tuple[int, ...],
    axes: Mapping[str, int | None],
    mesh_shape: tuple[int, ...],
    where: str,
) -> Constraint:
    if len(partition) > len(shape):
        raise ShardingError(
            f"{where}, {partition}, has {len(partition)} entries for an array of shape {shape}. Give at most "
            f"{len(shape)}."
        )

    dims: list[tuple[int, ...]] = []
    free: set[int] = set()
    for dim, entry in enumerate((*partition, *(None,) * (len(shape) - len(partition)))):
        if entry is PartitionSpec.UNCONSTRAINED:
            free.add(dim)
        names = entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
        numbers = _axes_of_entry(names, axes, mesh_shape, where)
        if shape[dim] % math.prod(mesh_shape[axis] for axis in numbers):
            raise ShardingError(
                f"{where} splits dimension {dim} of an array of shape {shape} over {' and '.join(names)}, "
                f"{math.prod(mesh_shape[axis] for axis in numbers)} devices, which do not divide {shape[dim]}. Split "
                "another dimension, or pad the array."
            )
        dims.append(numbers)
    return Constraint(Spec(tuple(dims)), frozenset(free))


def _axes_of_entry(
    names: tuple[str, ...], axes: Mapping[str, int | None], mesh_shape: tuple[int, ...], where: str
) -> tuple[int, ...]:
    unknown = [name for name in names if name not in axes]
    if unknown:
        raise ShardingError(
            f"{where} has the mesh axes {', '.join(map(str, unknown))}, but the mesh has {', '.join(axes)}. Use these, "
            "or set other names with `AutoShardingOption(axis_names=...)`."
        )

    numbers = tuple(axis for name in names if (axis := axes[name]) is not None and mesh_shape[axis] > 1)
    if list(numbers) != sorted(numbers):
        raise ShardingError(
            f"{where} splits one dimension over {names}, which is not the order of the mesh. Write "
            f"{tuple(sorted(names, key=lambda name: axes[name] or 0))}."
        )
    return numbers
