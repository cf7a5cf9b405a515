"""Sharding specs: how one array lies on a logical mesh.

A spec says, for each dimension of the array, which mesh axes split it, outermost first. `S0,R` in text means that
dimension 0 is split over mesh axis 0 and dimension 1 is whole; `S01` splits over both axes, axis 0 outermost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from minialpa.errors import ShardingError

#: Names of the axes of every logical mesh, outermost (across hosts) first.
AXIS_NAMES = ("x", "y")


@dataclass(frozen=True, slots=True)
class Spec:
    """Sharding of one array: `dims[d]` holds the mesh axes that split dimension `d`, outermost first."""

    dims: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        used = [axis for dim in self.dims for axis in dim]
        if len(used) != len(set(used)):
            raise ShardingError(f"A mesh axis splits two dimensions in {self.dims}; each axis may be used once.")

    def __str__(self) -> str:
        return ",".join("S" + "".join(map(str, dim)) if dim else "R" for dim in self.dims)

    @staticmethod
    def parse(text: str) -> Spec:
        """The spec that `str` printed as `text`; the empty text is the spec of a scalar."""
        if not text:
            return Spec(())
        return Spec(tuple(() if part == "R" else tuple(int(c) for c in part[1:]) for part in text.split(",")))

    @staticmethod
    def replicated(ndim: int) -> Spec:
        return Spec(((),) * ndim)

    @property
    def axes(self) -> tuple[int, ...]:
        """Mesh axes in use, in order of dimension."""
        return tuple(axis for dim in self.dims for axis in dim)

    def n_shards(self, mesh_shape: tuple[int, ...]) -> int:
        """Number of different shards of the array on a mesh of `mesh_shape`."""
        return math.prod(mesh_shape[axis] for axis in self.axes)

    def shard_shape(self, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the shard on one device. Raises ShardingError where a dimension does not divide."""
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

    def partition_spec(self) -> PartitionSpec:
        """The same sharding as a `jax.sharding.PartitionSpec` over `AXIS_NAMES`."""
        names: list[str | tuple[str, ...] | None] = []
        for dim in self.dims:
            named = tuple(AXIS_NAMES[axis] for axis in dim)
            names.append(None if not named else named[0] if len(named) == 1 else named)
        while names and names[-1] is None:
            names.pop()
        return PartitionSpec(*names)


def specs_of(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Iterable[Spec]:
    """Every legal spec of an array of `shape`: each mesh axis longer than 1 splits one dimension or none."""

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
