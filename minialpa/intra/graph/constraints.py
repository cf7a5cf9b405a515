"""Shardings that the user fixes: `jax.lax.with_sharding_constraint` in the model, and specs by path in the options.

In: a PartitionSpec over named axes. Out: a `Constraint`, which says which specs of an array are allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from minialpa.errors import ShardingError
from minialpa.sharding import AXIS_NAMES, Spec
from minialpa.tracing.jaxprs import shape_of, source_line


@dataclass(frozen=True, slots=True)
class Constraint:
    """`spec` for all dimensions but those in `free`."""

    spec: Spec
    free: frozenset[int] = frozenset()

    def allows(self, spec: Spec) -> bool:
        """Whether an array may have `spec`. Partial sums are no sharding of an array."""
        pairs = enumerate(zip(spec.dims, self.spec.dims, strict=True))
        return not spec.partial and all(d in self.free or own == wanted for d, (own, wanted) in pairs)


def constraint_of_path(
    path: str, shape: tuple[int, ...], fixed: Iterable[tuple[str, PartitionSpec]], mesh_shape: tuple[int, ...]
) -> Constraint | None:
    """The first entry of `fixed` whose pattern matches `path`, over the axes `AXIS_NAMES` of the logical mesh.

    In a pattern `*` stands for any text.
    """
    for pattern, partition in fixed:
        if matches(pattern, path):
            axes: dict[str, int | None] = {name: axis for axis, name in enumerate(AXIS_NAMES[: len(mesh_shape)])}
            return _constraint(partition, shape, axes, mesh_shape, f"the spec of `{path}`")
    return None


def matches(pattern: str, path: str) -> bool:
    """Whether `path` is `pattern`, in which `*` stands for any text."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), path, re.DOTALL) is not None


def constraint_of_equation(eqn: JaxprEqn, mesh_shape: tuple[int, ...]) -> Constraint:
    """What a `with_sharding_constraint` asks for. The axes of its mesh are those of the logical mesh, in order."""
    sharding = eqn.params["sharding"]
    where = f"`with_sharding_constraint` at {source_line(eqn)}"
    if not isinstance(sharding, NamedSharding):
        raise ShardingError(f"{where} has a {type(sharding).__name__}. Use a NamedSharding, or a PartitionSpec.")
    axes = _axis_numbers(dict(sharding.mesh.shape), mesh_shape, where)
    constraint = _constraint(sharding.spec, shape_of(eqn.invars[0]), axes, mesh_shape, where)
    return Constraint(constraint.spec, constraint.free | frozenset(eqn.params.get("unconstrained_dims") or ()))


def _axis_numbers(sizes: Mapping[str, int], mesh_shape: Sequence[int], where: str) -> dict[str, int | None]:
    """Axis of the logical mesh for each named axis; axes of length 1 split nothing."""
    named = [(name, n) for name, n in sizes.items() if n > 1]
    live = [(axis, n) for axis, n in enumerate(mesh_shape) if n > 1]
    if [n for _, n in named] != [n for _, n in live]:
        raise ShardingError(
            f"{where} is for a mesh of {dict(sizes)} and is planned for a logical mesh of {tuple(mesh_shape)}. Use a "
            "mesh of the same shape, or ask for that logical shape."
        )
    numbers: dict[str, int | None] = dict.fromkeys(sizes)
    numbers.update((name, axis) for (name, _), (axis, _) in zip(named, live, strict=True))
    return numbers


def _constraint(
    partition: PartitionSpec,
    shape: tuple[int, ...],
    axes: Mapping[str, int | None],
    mesh_shape: tuple[int, ...],
    where: str,
) -> Constraint:
    if len(partition) > len(shape):
        raise ShardingError(f"{where} has {len(partition)} entries for an array of shape {shape}.")
    dims: list[tuple[int, ...]] = []
    free = set()
    for d, entry in enumerate((*partition, *(None,) * (len(shape) - len(partition)))):
        if entry is PartitionSpec.UNCONSTRAINED:
            free.add(d)
        names = entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
        unknown = [name for name in names if name not in axes]
        if unknown:
            raise ShardingError(f"{where} names the axes {unknown}; the mesh has {', '.join(axes)}.")
        numbers = tuple(axis for name in names if (axis := axes[name]) is not None and mesh_shape[axis] > 1)
        if list(numbers) != sorted(numbers):
            raise ShardingError(f"{where} lists axes {names} of one dimension; list them in the order of the mesh.")
        if shape[d] % math.prod(mesh_shape[axis] for axis in numbers):
            raise ShardingError(
                f"{where} splits dimension {d} of shape {shape} over {names}, which does not divide it. Choose another "
                "dimension, or pad the array."
            )
        dims.append(numbers)
    return Constraint(Spec(tuple(dims)), frozenset(free))
