"""Refuses host memory, `shard_map`, `pmap` and Explicit axes in a step, and removes the user's meshes from it.

A plan keeps arrays in device memory, has its own meshes, and decides what each device computes. A mesh with Auto axes,
from `jax.set_mesh`, `jax.sharding.use_abstract_mesh` or a constraint, changes no value: `without_meshes` keeps it in
constraints only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, Sharding

from minialpa.arrays import RemoteArray
from minialpa.errors import TraceError
from minialpa.ir.equations import Atom, dtype_name, is_constraint, is_literal, shape_of, source_line, sub_jaxprs
from minialpa.support.private_jax import NO_MESH, compute_place, is_ref, mesh_of, under_mesh, with_no_mesh

_HOST_KINDS = ("pinned_host", "unpinned_host")
_KEPT = "minialpa keeps the arrays of a step in device memory."


def _all_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for body in sub_jaxprs(eqn):
            yield from _all_equations(body)


# ---- host memory -----------------------------------------------------------------------------------------------------


def host_kind(array_or_sharding: Any) -> str | None:
    """The memory kind of an array, a `jax.ShapeDtypeStruct` or a sharding, if it is in host memory."""
    if isinstance(array_or_sharding, RemoteArray):
        return None  # asking for the sharding of keys on workers would fetch them
    sharding = getattr(array_or_sharding, "sharding", array_or_sharding)
    kind = getattr(sharding, "memory_kind", None)
    return kind if kind in _HOST_KINDS else None


def refuse_argument_in_host(leaf: Any, path: str) -> None:
    kind = host_kind(leaf)
    if kind is not None:
        raise TraceError(
            f"The argument `{path}` is in host memory (`{kind}`). {_KEPT} Pass "
            "`jax.device_put(x, jax.memory.Space.Device)`, or a NumPy array."
        )


def refuse_host_memory(closed: ClosedJaxpr) -> None:
    """Raise TraceError for the first operation with arrays or work on the host."""
    for eqn in _all_equations(closed.jaxpr):
        what = _use_of_host(eqn)
        if what is not None:
            raise TraceError(
                f"`{eqn.primitive.name}` at {source_line(eqn)} {what}. {_KEPT} Remove it: move results to the host "
                "after the step, use a checkpoint policy that saves, such as `save_only_these_names`, instead of one "
                "that offloads, and save memory with `Zero3Parallel`, `remat` or more devices."
            )
    if any(map(_is_in_host, closed.jaxpr.constvars)):
        raise TraceError(
            f"The step reads an array in host memory that is not one of its arguments. {_KEPT} Pass it as an "
            "argument, in device memory."
        )


def _use_of_host(eqn: JaxprEqn) -> str | None:
    """The use of the host by an equation, as words for a message."""
    if compute_place(eqn) == "device_host":
        return "runs on the host by `compute_on`"
    for var in filter(_is_in_host, eqn.outvars):
        return f"makes {dtype_name(var)}{list(shape_of(var))} in host memory (`jax.memory.Space.Host`)"

    shardings = [eqn.params.get("sharding")]
    for name in ("devices", "in_shardings", "out_shardings"):  # of `device_put` and of `jax.jit`
        shardings += eqn.params.get(name, ())
    kinds = filter(None, map(host_kind, shardings))
    return next((f"has a sharding with the memory kind `{kind}`" for kind in kinds), None)


def _is_in_host(atom: Atom) -> bool:
    return getattr(atom.aval, "memory_space", None) is jax.memory.Space.Host


# ---- programs for devices --------------------------------------------------------------------------------------------


def refuse_programs_of_devices(jaxpr: Jaxpr) -> None:
    """Raise TraceError for the first `shard_map`, `pmap`, mutable array or Explicit axis."""
    # Mutable arrays inside loops and branches are allowed.
    for eqn in jaxpr.eqns:
        if any(is_ref(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
            raise TraceError(
                f"The step uses a mutable array (a Ref, as from `jax.new_ref`){_place(eqn)}. Pass its value `ref[...]` "
                "as an argument instead, and return the new value."
            )
    for eqn in _all_equations(jaxpr):
        if eqn.primitive.name == "shard_map":
            name = "pmap" if "pmap" in str(eqn.params.get("mesh")) else "shard_map"
            raise TraceError(
                f"`jax.{name}`{_place(eqn)} decides what each device computes, which the planner does in a "
                "parallelized step. Write the step for one device, on whole arrays, with sums and means instead of "
                "`psum` and `pmean`."
            )
        if any(AxisType.Explicit in mesh.axis_types for mesh in _meshes(eqn)):
            raise TraceError(
                f"`{eqn.primitive.name}`{_place(eqn)} is on a mesh with Explicit axes, but the planner decides the "
                "shardings of a parallelized step. Remove the mesh, or make it with "
                "`axis_types=(jax.sharding.AxisType.Auto, ...)` for `jax.lax.with_sharding_constraint`."
            )


def _place(eqn: JaxprEqn) -> str:
    line = source_line(eqn)
    return f" at {line}" if line else ""


# ---- meshes ----------------------------------------------------------------------------------------------------------


def without_meshes(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with the user's meshes in constraints only; the same object if it has no others."""
    if not _has_mesh(closed.jaxpr):
        return closed
    with under_mesh(NO_MESH):
        cleaned: ClosedJaxpr = _without_meshes(closed, {})
        return cleaned


def _has_mesh(jaxpr: Jaxpr) -> bool:
    if any(map(_meshes_of_type, (*jaxpr.constvars, *jaxpr.invars))):
        return True
    return any(_meshes(eqn) or any(map(_has_mesh, sub_jaxprs(eqn))) for eqn in jaxpr.eqns)


def _meshes(eqn: JaxprEqn) -> list[Any]:
    of_eqn = mesh_of(eqn)
    found = [] if of_eqn is None or of_eqn.empty else [of_eqn]
    return found + [mesh for var in eqn.outvars for mesh in _meshes_of_type(var)]


def _meshes_of_type(atom: Atom) -> list[Any]:
    mesh = getattr(getattr(atom.aval, "sharding", None), "mesh", None)
    return [] if mesh is None or mesh.empty else [mesh]


def _without_meshes(program: Any, known: dict[Any, Any]) -> Any:
    """known: cleaned programs, so that equations keep sharing them."""
    if program not in known:
        is_closed = isinstance(program, ClosedJaxpr)
        inner = program.jaxpr if is_closed else program
        # From jax 0.12 on, a closed program is its own jaxpr.
        cleaned = _jaxpr_without_meshes(inner, known) if inner is program else _without_meshes(inner, known)
        known[program] = ClosedJaxpr(cleaned, program.consts) if is_closed else cleaned
    return known[program]


def _jaxpr_without_meshes(jaxpr: Jaxpr, known: dict[Any, Any]) -> Jaxpr:
    """A jaxpr with fresh variables, whose types have no mesh."""
    env: dict[Var, Var] = {}

    def new(var: Var) -> Var:
        env[var] = Var(_clean_type(var.aval))
        return env[var]

    def read(atom: Atom) -> Atom:
        return Literal(_clean_value(atom.val), _clean_type(atom.aval)) if is_literal(atom) else env[atom]

    ends = {name: list(map(new, getattr(jaxpr, name))) for name in ("constvars", "invars")}
    eqns = []
    for eqn in jaxpr.eqns:
        params = {name: _clean_param(eqn, value, known) for name, value in eqn.params.items()}
        invars, outvars = list(map(read, eqn.invars)), list(map(new, eqn.outvars))
        eqns.append(with_no_mesh(eqn).replace(invars=invars, outvars=outvars, params=params))
    cleaned: Jaxpr = jaxpr.replace(eqns=eqns, outvars=list(map(read, jaxpr.outvars)), **ends)
    return cleaned


def _clean_param(eqn: JaxprEqn, value: Any, known: dict[Any, Any]) -> Any:
    match value:
        case Sharding() if not is_constraint(eqn):
            return None
        case ClosedJaxpr() | Jaxpr():
            return _without_meshes(value, known)
        case tuple() if any(isinstance(one, ClosedJaxpr) for one in value):
            cleaned = [_without_meshes(one, known) if isinstance(one, ClosedJaxpr) else one for one in value]
            make: Any = getattr(type(value), "_make", tuple)  # a linear solve has a named tuple of programs
            return make(cleaned)
        case _:
            return value


def _clean_value(value: Any) -> Any:
    """A NumPy array of jax's own class caches its first type, so it is copied."""
    if isinstance(value, np.ndarray):
        value = value.copy()
        jax.typeof(value)
    return value


def _clean_type(aval: Any) -> Any:
    if not isinstance(aval, jax.core.ShapedArray) or aval.sharding.mesh.empty:
        return aval
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
