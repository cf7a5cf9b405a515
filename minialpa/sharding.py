"""Sharding specs: how one array is distributed over a logical mesh.

A spec says, for each dimension of the array, which mesh axes split it, outermost first. As text, `S0,R` means that
mesh axis 0 splits dimension 0 and nothing splits dimension 1; `S01` means that both axes split a dimension, axis 0
outermost. `R,R+P1` is a partial sum: along mesh axis 1 the devices hold summands, and the array is their sum.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from minialpa.errors import ShardingError

#: Names of the axes of every logical mesh, outermost (across hosts) first.
AXIS_NAMES = ("x", "y")


def device_mesh(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> Mesh:
    """`devices`, in row-major order, as a mesh whose axes have the names that specs use."""
    return Mesh(np.array(devices).reshape(shape), AXIS_NAMES[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def abstract_mesh(shape: tuple[int, ...]) -> AbstractMesh:
    """A mesh as `device_mesh` makes it, without devices."""
    return AbstractMesh(shape, AXIS_NAMES[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


@contextmanager
def bare_specs_over(names: Sequence[str]) -> Iterator[None]:
    """While open, a PartitionSpec that a step gives to `with_sharding_constraint` may name these axes."""
    with ExitStack() as stack:
        if names:
            # Under `jax.set_mesh`, all arrays of the step would have this mesh in their types.
            mesh = Mesh(np.array(jax.local_devices()[:1]).reshape((1,) * len(names)), tuple(names))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                stack.enter_context(mesh)
        yield


@dataclass(frozen=True, slots=True)
class Spec:
    """Sharding of one array.

    Attributes:
        dims: for each dimension the mesh axes that split it, outermost first.
        partial: mesh axes, ascending, along which the devices hold summands.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        used = [axis for dim in (*self.dims, self.partial) for axis in dim]
        if len(used) != len(set(used)):
            raise ShardingError(f"A mesh axis is used twice in {self.dims}, partial {self.partial}; use each once.")

    def __str__(self) -> str:
        text = ",".join("S" + "".join(map(str, dim)) if dim else "R" for dim in self.dims)
        return text + ("+P" + "".join(map(str, self.partial)) if self.partial else "")

    @staticmethod
    def parse(text: str) -> Spec:
        """The spec that `str` printed as `text`; the empty text is the spec of a scalar."""
        text, _, partial = text.partition("+P")
        dims = text.split(",") if text else ()
        return Spec(
            tuple(() if part == "R" else tuple(int(c) for c in part[1:]) for part in dims), tuple(map(int, partial))
        )

    @staticmethod
    def of(partition: PartitionSpec, ndim: int) -> Spec:
        """The spec that `partition`, over `AXIS_NAMES`, gives an array of `ndim` dimensions."""
        entries = (*partition, *(None,) * (ndim - len(partition)))
        names = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]
        unknown = [name for dim in names for name in dim if name not in AXIS_NAMES]
        if len(entries) > ndim or unknown:
            raise ShardingError(
                f"{partition} does not fit an array of {ndim} dimensions, over the axes {', '.join(AXIS_NAMES)}."
            )
        return Spec(tuple(tuple(AXIS_NAMES.index(name) for name in dim) for dim in names))

    @staticmethod
    def replicated(ndim: int) -> Spec:
        return Spec(((),) * ndim)

    @property
    def axes(self) -> tuple[int, ...]:
        """Mesh axes that split a dimension, in order of dimension."""
        return tuple(axis for dim in self.dims for axis in dim)

    def n_shards(self, mesh_shape: tuple[int, ...]) -> int:
        """Number of different shards of the array on a mesh of `mesh_shape`."""
        return math.prod(mesh_shape[axis] for axis in self.axes)

    def shard_shape(self, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the shard on one device. Raises ShardingError for a dimension that its axes do not divide."""
        out = []
        for size, axes in zip(shape, self.dims, strict=True):
            n = math.prod(mesh_shape[axis] for axis in axes)
            if size % n:
                raise ShardingError(f"Dimension of size {size} in shape {shape} is not divisible by {n} ({self}).")
            out.append(size // n)
        return tuple(out)

    def fits(self, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> bool:
        """Whether every split dimension of `shape` divides evenly, into parts that are not empty."""
        return len(shape) == len(self.dims) and all(
            not axes or (size > 0 and size % math.prod(mesh_shape[axis] for axis in axes) == 0)
            for size, axes in zip(shape, self.dims, strict=True)
        )

    def stored_shape(self, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the jax array that holds all shards. Each axis of summands is one more dimension, in front."""
        return (*(mesh_shape[axis] for axis in self.partial), *shape)

    def partition_spec(self, names_of_axes: Sequence[str] = AXIS_NAMES) -> PartitionSpec:
        """The sharding of the array of `stored_shape`, as a `jax.sharding.PartitionSpec` over these axes."""
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
        operands: what the equation reads.
        made: its results as the shards compute them, with partial sums.
        results: its results as later equations find them.
        body: for a loop, the specs of the equations of an iteration.
        is_balanced: whether devices exchange halves of their shards around the equation, so that they have equal work.
    """

    operands: tuple[Spec, ...]
    made: tuple[Spec, ...]
    results: tuple[Spec, ...]
    body: tuple[EquationSpecs, ...] = ()
    is_balanced: bool = False


def specs_of(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Iterable[Spec]:
    """Every legal spec of an array of `shape` without partial sums: each mesh axis splits one dimension or none."""

    def extend(axis: int, dims: tuple[tuple[int, ...], ...]) -> Iterable[Spec]:
        if axis == len(mesh_shape):
            if Spec(dims).fits(shape, mesh_shape):
                yield Spec(dims)
            return
        yield from extend(axis + 1, dims)
        if mesh_shape[axis] > 1:
            for d in range(len(shape)):
                yield from extend(axis + 1, (*dims[:d], (*dims[d], axis), *dims[d + 1 :]))

    yield from extend(0, ((),) * len(shape))
