"""Host memory in steps and arguments, which is refused: arrays of a plan are in the memory of devices.

jax offers it in four ways: types of arrays in host memory, which `jax.device_put` and checkpoint policies that offload
make; the memory kind of a sharding; `compute_on`; and arguments that are already there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from minialpa.arrays import RemoteArray
from minialpa.errors import TraceError
from minialpa.ir.equations import aval_of, dtype_name, shape_of, source_line, sub_jaxprs
from minialpa.support.private_jax import compute_place

_HOST_KINDS = ("pinned_host", "unpinned_host")
_KEPT = "minialpa keeps the arrays of a step in device memory."


def host_kind(array_or_sharding: Any) -> str | None:
    """The memory kind of an array, a `jax.ShapeDtypeStruct` or a sharding, if it is one of the host."""
    if isinstance(array_or_sharding, RemoteArray):
        return None  # keys on workers would be fetched for their sharding
    sharding = getattr(array_or_sharding, "sharding", array_or_sharding)
    kind = getattr(sharding, "memory_kind", None)
    return kind if kind in _HOST_KINDS else None


def refuse_host_memory(closed: ClosedJaxpr) -> None:
    """Raise TraceError that names the first operation of a traced step that puts arrays or work on the host."""
    for eqn in _all_equations(closed.jaxpr.eqns):
        what = _use_of_host(eqn)
        if what is not None:
            raise TraceError(
                f"`{eqn.primitive.name}` at {source_line(eqn)} {what}. {_KEPT} Leave it out: results can be moved "
                "after the step; instead of a checkpoint policy that offloads, use one that saves, such as "
                "`save_only_these_names`; `Zero3Parallel`, `remat` and more devices save memory, too."
            )
    if any(_is_in_host(var.aval) for var in closed.jaxpr.constvars):
        raise TraceError(
            f"The step reads an array in host memory by closure. {_KEPT} Pass it as an argument on devices."
        )


def why_in_host(leaf: Any, path: str) -> str | None:
    """The message for an argument leaf that is in host memory; None for all others."""
    kind = host_kind(leaf)
    if kind is None:
        return None
    return (
        f"Argument leaf `{path}` is in host memory (`{kind}`). {_KEPT} Pass "
        "`jax.device_put(x, jax.memory.Space.Device)`, or a NumPy array."
    )


def _use_of_host(eqn: JaxprEqn) -> str | None:
    """How an equation uses the host, for a message; None if it does not."""
    if compute_place(eqn) == "device_host":
        return "runs on the host, as `compute_on` says"

    for var in eqn.outvars:
        if _is_in_host(aval_of(var)):
            return f"makes {dtype_name(var)}{list(shape_of(var))} in host memory (`jax.memory.Space.Host`)"

    params = eqn.params
    shardings = [params.get("sharding")]
    for name in ("devices", "in_shardings", "out_shardings"):  # of `device_put` and of `jax.jit`
        shardings += params.get(name, ())
    kinds = filter(None, map(host_kind, shardings))
    return next((f"has a sharding with the memory kind `{kind}`" for kind in kinds), None)


def _is_in_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def _all_equations(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Equations, and the equations inside them."""
    for eqn in eqns:
        yield eqn
        for body in sub_jaxprs(eqn):
            yield from _all_equations(body.eqns)
