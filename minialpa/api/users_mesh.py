"""Arrays on the user's meshes go in; the shardings of results there, and pins for the plan, come out.

Later lines of the user's script expect results where `jax.jit` leaves them. On Explicit axes, types have shardings,
which the script reads. Results of a `pmap` have its sharding, without which another `pmap` refuses them. On Auto axes,
the new value of an array has the array's sharding, if the plan has it, too. Under `jax.set_mesh`, jax refuses arrays on
other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from minialpa.api.pins import NO_PINS, Pins
from minialpa.calls import Call
from minialpa.plan import Plan
from minialpa.runtime.calls_on_mesh import UsersSharding
from minialpa.sharding import is_planned_mesh
from minialpa.support.private_jax import ArrayImpl, value_of_ref, warn
from minialpa.tracing.trace import TracedStep
from minialpa.tracing.user_meshes import explicit_sharding


def _arguments(call: Call, traced: TracedStep) -> list[Any]:
    """The leaves of the step, with the arrays of Refs."""
    return [value_of_ref(leaf) for leaf in (*call.leaves, *traced.refs.captured)]


def _placed(array: Any) -> NamedSharding | None:
    """The sharding that the user gave to an array on several devices."""
    sharding = array.sharding if type(array) is ArrayImpl else getattr(array, "user_sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1 or is_planned_mesh(sharding.mesh):
        return None
    return sharding


def shardings_of_results(call: Call, traced: TracedStep) -> list[UsersSharding | None]:
    """For each result, and each new value of a Ref, its sharding on the user's mesh; empty without such a mesh."""
    arguments = _arguments(call, traced)
    placed = list(map(_placed, arguments))
    meshes = _meshes(call, placed)
    typed = [*traced.out_shardings, *(explicit_sharding(arguments[i]) for i in traced.refs.updated)]
    if not meshes and not any(typed):
        return []

    on_all = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
    devices_of = {mesh.abstract_mesh: mesh for mesh in reversed(meshes)}
    found: list[UsersSharding | None] = []
    for sharding, replaced in zip(typed, traced.layouts, strict=True):
        if sharding is None:
            kept = (None if replaced is None else placed[replaced]) or on_all
            found.append(None if kept is None else UsersSharding(kept, explicit_sharding(kept) is not None))
        else:
            mesh = sharding.mesh if isinstance(sharding.mesh, Mesh) else devices_of.get(sharding.mesh.abstract_mesh)
            found.append(None if mesh is None else UsersSharding(NamedSharding(mesh, sharding.spec), True))
    return found


def _meshes(call: Call, placed: Sequence[NamedSharding | None]) -> list[Mesh]:
    """The mesh of `jax.set_mesh`, and then the meshes of arrays."""
    given = call.mesh.devices
    set_mesh = [given] if isinstance(given, Mesh) and not given.empty else []
    return [*set_mesh, *(s.mesh for s in placed if s is not None and isinstance(s.mesh, Mesh))]


def warn_of_moves(plan: Plan, shardings: Sequence[UsersSharding | None]) -> None:
    """Warn if each step moves its results from the devices of the stages to the user's mesh."""
    n_devices = max((len(one.sharding.device_set) for one in shardings if one is not None), default=0)
    if len(plan.stages) > 1 and n_devices > 1:
        warn(
            f"Each call moves its results from the devices of {len(plan.stages)} stages to the user's mesh of "
            f"{n_devices} devices, where the script expects them, and the next call moves them back. To keep them in "
            "place, call the step outside `jax.set_mesh`, on arrays without a mesh of the user."
        )


def border_pins(call: Call, traced: TracedStep) -> Pins:
    """Pins with which no array moves at the border of the step.

    They are types of arguments and results. Where no type has a sharding, they are shardings of arrays on the user's
    mesh that results replace.
    """
    types = [
        *(("in_shardings", *pair) for pair in zip(traced.in_paths, map(explicit_sharding, call.leaves), strict=False)),
        *(("out_shardings", *pair) for pair in zip(traced.out_paths, traced.out_shardings, strict=False)),
    ]
    if any(sharding is not None for _, _, sharding in types):
        return _pins(types)

    placed = list(map(_placed, _arguments(call, traced)))
    replacing = [(path, i) for path, i in zip(traced.out_paths, traced.layouts, strict=True) if i is not None]
    arguments = [("in_shardings", traced.in_paths[i], placed[i]) for _, i in replacing]
    return _pins([*arguments, *(("out_shardings", path, placed[i]) for path, i in replacing)])


def _pins(found: Sequence[tuple[str, str, NamedSharding | None]]) -> Pins:
    """NO_PINS if the shardings are on meshes of several shapes."""
    given = [(side, path, sharding) for side, path, sharding in found if sharding is not None]
    axes = {tuple(sharding.mesh.shape.items()) for _, _, sharding in given}
    specs = {(side, path): PartitionSpec(*sharding.spec) for side, path, sharding in given}
    if len(axes) != 1:
        return NO_PINS
    return Pins(specs=tuple((side, path, spec) for (side, path), spec in specs.items()), axes=axes.pop())
