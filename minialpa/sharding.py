"""Sharding specs: the distribution of one array over a logical mesh, as values, as text and as PartitionSpecs.

A spec lists, for each dimension of the array, the mesh axes that split it. Examples on a mesh of shape (2, 4):

    S0,R      axis 0 splits dimension 0; dimension 1 is whole
    S01,R     both axes split dimension 0 into 8 shards, axis 0 outermost
    R,R+P1    a partial sum: along axis 1 each device holds a summand, and the array is their sum
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from minialpa.errors import ShardingError

#: Names of the axes of every logical mesh, outermost (across hosts) first.
AXIS_NAMES = ("x", "y", "z")
_HOST_KIND = "pinned_host"


def device_mesh(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> Mesh:
    """`devices`, in row-major order, as a mesh with the axes `AXIS_NAMES`."""
    kinds = (AxisType.Auto,) * len(shape)
    mesh = Mesh(np.array(devices).reshape(shape), AXIS_NAMES[: len(shape)], axis_types=kinds)
    _PLANNED.add(mesh)
    return mesh


#: Meshes of plans. jax makes equal meshes once, and keeps them.
_PLANNED: set[Mesh] = set()


def is_planned_mesh(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a plan has arrays on this mesh, rather than the user alone."""
    return mesh in _PLANNED


def is_host_array(array: Any) -> bool:
    """Whether an array of jax is in host memory."""
    return isinstance(array, jax.Array) and array.sharding.memory_kind == _HOST_KIND


def placed(mesh: Mesh | AbstractMesh, spec: PartitionSpec, *, in_host: bool) -> NamedSharding:
    return NamedSharding(mesh, spec, memory_kind=_HOST_KIND) if in_host else NamedSharding(mesh, spec)


def abstract_mesh(shape: tuple[int, ...]) -> AbstractMesh:
    """The mesh of `device_mesh`, without devices."""
    return AbstractMesh(shape, AXIS_NAMES[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def axes_in(partition: Iterable[Any]) -> list[str]:
    """The axes that the entries of a PartitionSpec name."""
    names = [name for entry in partition for name in (entry if isinstance(entry, tuple) else (entry,))]
    return [name for name in names if isinstance(name, str)]


def axes_by_length(sizes: Mapping[str, int], mesh_shape: Sequence[int]) -> dict[str, int | None] | None:
    """For each named axis, the first free axis of `mesh_shape` of its length; None for length 1.

    None if axes of a mesh remain.
    """
    free = [(axis, length) for axis, length in enumerate(mesh_shape) if length > 1]
    if sorted(length for length in sizes.values() if length > 1) != sorted(length for _, length in free):
        return None
    numbers: dict[str, int | None] = dict.fromkeys(sizes)
    for name, length in sizes.items():
        if length > 1:
            found = next(pair for pair in free if pair[1] == length)
            free.remove(found)
            numbers[name] = found[0]
    return numbers


@contextmanager
def bare_specs_over(names: Sequence[str]) -> Iterator[None]:
    """In this context, a step may pass bare PartitionSpecs over these axes to `with_sharding_constraint`."""
    with ExitStack() as stack:
        if names:
            # `jax.set_mesh` would add this mesh to the types of all arrays of the step.
            mesh = Mesh(np.array(jax.local_devices()[:1]).reshape((1,) * len(names)), tuple(names))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                stack.enter_context(mesh)
        yield


@dataclass(frozen=True, slots=True)
class Spec:
    """Sharding of one array. Raises ShardingError if a mesh axis occurs twice.

    Attributes:
        dims: for each dimension, the mesh axes that split it, outermost first.
        partial: mesh axes, ascending, along which the devices hold summands.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        used = [axis for dim in (*self.dims, self.partial) for axis in dim]
        if len(used) != len(set(used)):
            raise ShardingError(
                f"The spec with the mesh axes {self.dims} for its dimensions and {self.partial} for partial sums has "
                "an axis twice. Use each axis once."
            )

    def __str__(self) -> str:
        text = ",".join("S" + "".join(map(str, dim)) if dim else "R" for dim in self.dims)
        return text + ("+P" + "".join(map(str, self.partial)) if self.partial else "")

    @staticmethod
    def parse(text: str) -> Spec:
        """The inverse of `str`. The empty text is the spec of a scalar."""
        text, _, partial = text.partition("+P")
        dims = text.split(",") if text else ()
        return Spec(
            tuple(() if part == "R" else tuple(int(c) for c in part[1:]) for part in dims), tuple(map(int, partial))
        )

    @staticmethod
    def of(partition: PartitionSpec, ndim: int) -> Spec:
        """The spec of an array with sharding `partition` over `AXIS_NAMES`. Raises ShardingError if it does not fit."""
        entries = (*partition, *(None,) * (ndim - len(partition)))
        names = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]
        unknown = [name for dim in names for name in dim if name not in AXIS_NAMES]
        if len(entries) > ndim or unknown:
            raise ShardingError(
                f"{partition} does not fit an array of {ndim} dimensions. Give at most {ndim} entries, with axes from "
                f"{', '.join(AXIS_NAMES)}."
            )
        return Spec(tuple(tuple(AXIS_NAMES.index(name) for name in dim) for dim in names))

    @staticmethod
    def replicated(ndim: int) -> Spec:
        return Spec(((),) * ndim)

    @property
    def axes(self) -> tuple[int, ...]:
        """Mesh axes that split a dimension, in the order of the dimensions."""
        return tuple(axis for dim in self.dims for axis in dim)

    def n_shards(self, mesh_shape: tuple[int, ...]) -> int:
        """Number of distinct shards; replicas do not count."""
        return math.prod(mesh_shape[axis] for axis in self.axes)

    def shard_shape(self, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the shard on one device. Raises ShardingError if its axes do not divide a dimension evenly."""
        out = []
        for size, axes in zip(shape, self.dims, strict=True):
            n = math.prod(mesh_shape[axis] for axis in axes)
            if size % n:
                raise ShardingError(
                    f"The spec {self} splits a dimension of length {size}, of an array of shape {shape}, into {n} "
                    f"parts. Choose a spec or a mesh whose axes divide {size}."
                )
            out.append(size // n)
        return tuple(out)

    def fits(self, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> bool:
        """Whether every split dimension divides evenly into parts that are not empty."""
        return len(shape) == len(self.dims) and all(
            not axes or (size > 0 and size % math.prod(mesh_shape[axis] for axis in axes) == 0)
            for size, axes in zip(shape, self.dims, strict=True)
        )

    def stored_shape(self, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the jax array that holds all shards.

        Each axis of `partial` adds one leading dimension for its summands: `R+P1` of shape (3,) on a (2, 4) mesh is
        stored as (4, 3).
        """
        return (*(mesh_shape[axis] for axis in self.partial), *shape)

    def partition_spec(self, names_of_axes: Sequence[str] = AXIS_NAMES) -> PartitionSpec:
        """The sharding of the array of `stored_shape`, over these axis names."""
        names: list[str | tuple[str, ...] | None] = []
        for dim in (*((axis,) for axis in self.partial), *self.dims):
            named = tuple(names_of_axes[axis] for axis in dim)
            names.append(None if not named else named[0] if len(named) == 1 else named)
        while names and names[-1] is None:
            names.pop()
        return PartitionSpec(*names)


@dataclass(frozen=True, slots=True)
class EquationSpecs:
    """Chosen specs of one equation.

    Attributes:
        operands: specs in which the equation reads its operands.
        made: specs of its results as computed on the shards, with partial sums.
        results: specs of its results after collectives, for later equations.
        body: for a loop, the specs of the equations of one iteration.
        is_balanced: whether devices exchange halves of their shards around the equation, for equal work.
    """

    operands: tuple[Spec, ...]
    made: tuple[Spec, ...]
    results: tuple[Spec, ...]
    body: tuple[EquationSpecs, ...] = ()
    is_balanced: bool = False


def specs_of(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Iterable[Spec]:
    """Every legal spec of an array of `shape` without partial sums. Each mesh axis splits at most one dimension."""

    def extend(axis: int, dims: tuple[tuple[int, ...], ...]) -> Iterable[Spec]:
        """`dims` with each choice for `axis` and later axes."""
        if axis == len(mesh_shape):
            if Spec(dims).fits(shape, mesh_shape):
                yield Spec(dims)
            return
        yield from extend(axis + 1, dims)
        if mesh_shape[axis] > 1:
            for d in range(len(shape)):
                yield from extend(axis + 1, (*dims[:d], (*dims[d], axis), *dims[d + 1 :]))

    yield from extend(0, ((),) * len(shape))
