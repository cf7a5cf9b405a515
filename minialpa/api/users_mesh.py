"""Arrays on the user's meshes go in; the shardings of results there, and pins for the plan, come out.

Later lines of the user's script expect results where `jax.jit` leaves them. On Explicit axes, types have shardings,
which the script reads. A `pmap` refuses other shardings than its own, and a `shard_map` other devices: arrays that
they read or make count as placed by the user. On Auto axes, the new value of an array has the array's sharding, if the
plan has it, too. Under `jax.set_mesh`, jax refuses arrays on other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from minialpa.api.pins import NO_PINS, Pins
from minialpa.calls import Call
from minialpa.ir.equations import shape_of
from minialpa.plan import Plan
from minialpa.sharding import is_planned_mesh
from minialpa.support.private_jax import ArrayImpl, value_of_ref, warn
from minialpa.tracing.trace import TracedStep
from minialpa.tracing.user_meshes import UsersSharding, explicit_sharding


def _arguments(call: Call, traced: TracedStep) -> list[Any]:
    return [value_of_ref(leaf) for leaf in (*call.leaves, *traced.refs.captured)]


def _placed(array: Any) -> NamedSharding | None:
    """The user's sharding of an array on several devices."""
    sharding = array.sharding if type(array) is ArrayImpl else getattr(array, "user_sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1 or is_planned_mesh(sharding.mesh):
        return None
    return sharding


def shardings_of_results(call: Call, traced: TracedStep) -> list[UsersSharding | None]:
    """For each result, and each new value of a Ref, its sharding on the user's mesh; empty without such a mesh."""
    arguments = _arguments(call, traced)
    by_user = list(map(_by_user, arguments, [*traced.border.arguments, *[None] * len(traced.refs.captured)]))
    meshes = _meshes(call, [*by_user, *traced.border.results])
    typed = [*traced.out_shardings, *(explicit_sharding(arguments[i]) for i in traced.refs.updated)]
    others = _of_others(traced, meshes)
    if not others:
        return []

    devices_of = {mesh.abstract_mesh: mesh for mesh in reversed(meshes)}
    found: list[UsersSharding | None] = []
    for sharding, region, replaced, other in zip_longest(typed, traced.border.results, traced.layouts, others):
        if sharding is None:
            found.append(region or (None if replaced is None else by_user[replaced]) or other)
        else:
            mesh = devices_of.get(sharding.mesh.abstract_mesh)
            found.append(None if mesh is None else UsersSharding(NamedSharding(mesh, sharding.spec), True))
    return found


def _by_user(array: Any, region: UsersSharding | None) -> UsersSharding | None:
    """The sharding of an argument on the user's mesh. region: the one in which a region reads it."""
    placed = _placed(array)
    if placed is None or (region is not None and region.is_exact):
        return region
    return _kept(placed)


def _kept(sharding: NamedSharding) -> UsersSharding:
    return UsersSharding(sharding, explicit_sharding(sharding) is not None)


def _meshes(call: Call, by_user: Sequence[UsersSharding | None]) -> list[Mesh]:
    given = call.mesh.devices
    set_mesh = [given] if isinstance(given, Mesh) and not given.empty else []
    return [*set_mesh, *(s.sharding.mesh for s in by_user if s is not None and isinstance(s.sharding.mesh, Mesh))]


def _of_others(traced: TracedStep, meshes: Sequence[Mesh]) -> list[UsersSharding]:
    """For each result, its sharding if it replaces no array of the user's mesh; empty without such a mesh."""
    mesh = traced.border.of_pmap
    every = [*meshes, *([] if mesh is None else [mesh])]
    if not every:
        return []
    on_all = _kept(NamedSharding(every[0], PartitionSpec()))
    if mesh is None:
        return [on_all] * len(traced.layouts)
    stacked = UsersSharding(NamedSharding(mesh, PartitionSpec(mesh.axis_names)), True)
    return [stacked if shape_of(var)[:1] == (mesh.size,) else on_all for var in traced.flat.outvars]


def warn_of_moves(plan: Plan, shardings: Sequence[UsersSharding | None]) -> None:
    """Warn if each step moves its results from the devices of the stages to the user's mesh."""
    n_devices = max((len(one.sharding.device_set) for one in shardings if one is not None), default=0)
    if len(plan.stages) > 1 and n_devices > 1:
        warn(
            f"Each call moves its results from the devices of {len(plan.stages)} stages to the user's mesh of "
            f"{n_devices} devices, where the script expects them, and the next call moves them back. To keep them in "
            "place, call the step outside `jax.set_mesh`, on arrays without a mesh of the user, and with `shard_map` "
            "and `pmap` only inside its gradients."
        )


def border_pins(call: Call, traced: TracedStep) -> Pins:
    """Pins with which no array moves at the border of the step.

    They are types of arguments and results, and shardings of a `pmap`. Where neither has a sharding, they are shardings
    of arrays on the user's mesh that results replace.
    """
    results = zip(traced.out_paths, traced.out_shardings, _of_pmaps(traced), strict=False)
    types = [
        *(("in_shardings", *pair) for pair in zip(traced.in_paths, map(explicit_sharding, call.leaves), strict=False)),
        *(("out_shardings", path, typed or pmapped) for path, typed, pmapped in results),
    ]
    if any(sharding is not None for _, _, sharding in types):
        return _pins(types)

    placed = list(map(_placed, _arguments(call, traced)))
    replacing = [(path, i) for path, i in zip(traced.out_paths, traced.layouts, strict=True) if i is not None]
    arguments = [("in_shardings", traced.in_paths[i], placed[i]) for _, i in replacing]
    return _pins([*arguments, *(("out_shardings", path, placed[i]) for path, i in replacing)])


def _of_pmaps(traced: TracedStep) -> list[NamedSharding | None]:
    """For each result, the sharding that the user's next `pmap` requires."""
    read = dict(enumerate(traced.border.arguments))
    pairs = zip_longest(traced.border.results, traced.layouts)
    regions = [region or (None if replaced is None else read.get(replaced)) for region, replaced in pairs]
    return [region.sharding if region is not None and region.is_exact else None for region in regions]


def _pins(found: Sequence[tuple[str, str, NamedSharding | None]]) -> Pins:
    """NO_PINS if the shardings are on meshes of several shapes."""
    given = [(side, path, sharding) for side, path, sharding in found if sharding is not None]
    axes = {tuple(sharding.mesh.shape.items()) for _, _, sharding in given}
    specs = {(side, path): PartitionSpec(*sharding.spec) for side, path, sharding in given}
    if len(axes) != 1:
        return NO_PINS
    return Pins(specs=tuple((side, path, spec) for (side, path), spec in specs.items()), axes=axes.pop())
