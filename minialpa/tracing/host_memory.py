"""Arrays in host memory (`pinned_host`), in types and equations; uses of the host that a plan lacks are refused.

The type of a variable has its memory. A `device_put` equation of a flat program moves one array between device and
host memory: `devices=(Space.Host,)` or `(Space.Device,)`.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from minialpa.arrays import RemoteArray
from minialpa.errors import TraceError
from minialpa.ir.equations import all_equations, is_constraint, is_in_host, source_line
from minialpa.support.private_jax import compute_place

HOST_KIND = "pinned_host"
_UNPINNED = "unpinned_host"
_INSTEAD = "Use `pinned_host` (`jax.memory.Space.Host`), which GPUs have, too."


def memory_kind_of(array_or_sharding: Any) -> str | None:
    """The memory kind of an array, a `jax.ShapeDtypeStruct` or a sharding, if it is in host memory."""
    if isinstance(array_or_sharding, RemoteArray):
        return HOST_KIND if array_or_sharding.in_host else None
    if is_in_host(array_or_sharding):  # a type
        return HOST_KIND
    sharding = getattr(array_or_sharding, "sharding", array_or_sharding)
    kind = getattr(sharding, "memory_kind", None)
    return kind if kind in (HOST_KIND, _UNPINNED) else None


def argument_is_in_host(leaf: Any, path: str) -> bool:
    """Raises TraceError for a memory that plans lack."""
    kind = memory_kind_of(leaf)
    if kind == _UNPINNED:
        raise TraceError(f"The argument `{path}` is in host memory of the kind `{_UNPINNED}`. {_INSTEAD}")
    return kind is not None


def on_device(leaf: Any) -> Any:
    """The type of an array in host memory as if it were in device memory; another leaf itself."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if memory_kind_of(leaf) == HOST_KIND else leaf


def refuse_work_on_host(closed: ClosedJaxpr) -> None:
    """Raise TraceError for the first operation that runs on the host, or has a memory kind that plans lack."""
    for eqn in all_equations(closed.jaxpr):
        why = _why_refused(eqn)
        if why is not None:
            raise TraceError(f"`{eqn.primitive.name}` at {source_line(eqn)} {why}")
    if any(is_in_host(var.aval) for var in closed.jaxpr.constvars):
        raise TraceError(
            "The step reads an array in host memory that is not one of its arguments. Pass it as an argument."
        )


def _why_refused(eqn: JaxprEqn) -> str | None:
    if compute_place(eqn) == "device_host":
        return "runs on the host by `compute_on`, but minialpa computes on devices. Remove `compute_on`."

    if _UNPINNED in map(memory_kind_of, eqn.params.get("devices", ())):
        return f"moves an array to the memory kind `{_UNPINNED}`. {_INSTEAD}"
    shardings = [eqn.params.get("sharding")] if is_constraint(eqn) else []
    for name in ("in_shardings", "out_shardings"):
        shardings += eqn.params.get(name, ())
    kind = next(filter(None, map(memory_kind_of, shardings)), None)
    if kind is not None:
        return f"has a sharding with the memory kind `{kind}`. Move the array with `jax.device_put` instead."
    return None


def move_of(eqn: JaxprEqn, k: int) -> JaxprEqn:
    """The part of a `device_put` equation that moves operand `k` to another memory."""
    space = jax.memory.Space.Host if is_in_host(eqn.outvars[k].aval) else jax.memory.Space.Device
    params = {**eqn.params, "devices": (space,), "srcs": (None,)}
    params["copy_semantics"] = (eqn.params["copy_semantics"][k],)
    one: JaxprEqn = eqn.replace(invars=[eqn.invars[k]], outvars=[eqn.outvars[k]], params=params)
    return one
