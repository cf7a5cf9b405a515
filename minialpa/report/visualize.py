"""`visualize`: an array, or a planned argument, in; a drawing of its shards on each mesh out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from minialpa.arrays import RemoteArray
from minialpa.errors import ShardingError
from minialpa.plan import PlacementSpec, Plan
from minialpa.report.drawings import ShardPicture, shard_picture
from minialpa.report.page import environment
from minialpa.report.words import array_words
from minialpa.sharding import Spec


@dataclass(frozen=True, slots=True)
class ShardingDrawing:
    """Prints as text, and shows as pictures in a notebook. parts: (words, picture) for each mesh and block of rows."""

    title: str
    parts: tuple[tuple[str, ShardPicture], ...]

    def __str__(self) -> str:
        return "\n".join(
            [self.title, *(line for words, picture in self.parts for line in (words, _grid_text(picture)))]
        )

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return environment().get_template("shards.html.jinja").render(title=self.title, parts=self.parts)


def visualize(value: Any, *, plan: Plan | None = None) -> ShardingDrawing:
    """Draw which devices hold which shards of an array, on all its meshes.

    Args:
        value: an array of jax, on a cluster or in blocks of rows, or a `PlacementSpec`.
        plan: the plan of a `PlacementSpec`.

    Raises ShardingError for other values.
    """
    if isinstance(value, PlacementSpec):
        return _drawing_of_spec(value, plan)
    if not isinstance(value, jax.Array | RemoteArray):
        raise ShardingError(
            f"`visualize` draws an array or a `PlacementSpec`, and got a {type(value).__name__}. Pass one leaf of a "
            "pytree, such as `state.params['w']`."
        )
    parts = tuple(_array_parts(value))
    return ShardingDrawing(_title(str(value.dtype), value.shape), parts)


def _drawing_of_spec(value: PlacementSpec, plan: Plan | None) -> ShardingDrawing:
    if plan is None:
        raise ShardingError("`visualize` needs the `plan` of a PlacementSpec for its meshes. Pass `plan=`.")
    parts = []
    rows: Sequence[Any] = value.rows or (None,) * len(value.mesh_ids)
    for k, partition, block in zip(value.mesh_ids, value.partition_specs, rows, strict=True):
        stage = plan.stages[k]
        devices = range(stage.first_device, stage.first_device + stage.n_devices)
        where = f"stage {k}" + (f", rows {block[0]}-{block[1] - 1}" if block else "")
        parts.append(_part(where, stage.logical_shape, Spec.of(partition, len(value.shape)), devices))
    return ShardingDrawing(f"{value.path} {_title(value.dtype, value.shape)}", tuple(parts))


def _array_parts(value: Any) -> Iterator[tuple[str, ShardPicture]]:
    parts = value.stored_as if isinstance(value, RemoteArray) else (value,)
    for i, part in enumerate(parts):
        where = f"block {i}" if len(parts) > 1 else ""
        if isinstance(part, RemoteArray):
            for copy in getattr(part, "copies", ()):
                shape, first = copy.shape.logical_shape, copy.shape.first_device
                name = " ".join(filter(None, [where, f"mesh from device {first}"]))
                spec = Spec.of(copy.spec, len(part.shape))
                yield _part(name, shape, spec, range(first, first + math.prod(shape)))
        else:
            yield _part(where, *_named(part))


def _named(array: jax.Array) -> tuple[tuple[int, ...], Spec, list[int]]:
    """(shape of the mesh, spec, numbers of devices)."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        devices = sorted(device.id for device in sharding.device_set)  # type: ignore[attr-defined]
        if not sharding.is_fully_replicated:
            raise ShardingError(f"`visualize` cannot draw a {type(sharding).__name__}. Use `NamedSharding`.")
        return (len(devices),), Spec.replicated(array.ndim), devices
    names = list(sharding.mesh.axis_names)
    entries = [*sharding.spec, *(None,) * (array.ndim - len(sharding.spec))]
    dims = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]
    spec = Spec(tuple(tuple(names.index(name) for name in dim) for dim in dims))
    devices = [int(device.id) for device in sharding.mesh.devices.flat]
    return tuple(sharding.mesh.devices.shape), spec, devices


def _part(where: str, shape: tuple[int, ...], spec: Spec, devices: Sequence[int]) -> tuple[str, ShardPicture]:
    words = f"{array_words(spec, shape)} on a mesh of {' x '.join(map(str, shape))}"
    return (f"{where}: {words}" if where else words), shard_picture(shape, spec, devices)


def _title(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _grid_text(picture: ShardPicture) -> str:
    """The devices of each shard, between bars."""
    rows: list[list[str]] = [[] for _ in range(picture.n_rows)]
    for cell in picture.cells:
        rows[cell.row].append(cell.text or "...")
    width = max(len(text) for row in rows for text in row)
    return "\n".join(f"| {' | '.join(text.center(width) for text in row)} |" for row in rows)
