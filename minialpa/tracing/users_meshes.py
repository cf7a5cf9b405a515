"""Meshes of the user in a step: their types are taken out of it, and programs for them are refused.

`jax.set_mesh`, `jax.sharding.use_abstract_mesh` and constraints leave a mesh in the types, settings and parameters of
equations. With Auto axes it changes no value, and the plan has meshes of its own: `without_meshes` keeps the mesh in
constraints only. `shard_map`, `pmap` and Explicit axes fix what each device computes, which the planner decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, Sharding

from minialpa.errors import TraceError
from minialpa.ir.equations import Atom, is_constraint, is_literal, source_line, sub_jaxprs
from minialpa.support.private_jax import NO_MESH, is_ref, mesh_of, under_mesh, with_no_mesh

_PLANNER = "The planner decides what each device computes"


def refuse_programs_of_devices(jaxpr: Jaxpr) -> None:
    """Raise TraceError that names the first `shard_map`, `pmap`, mutable array or Explicit axis of a traced step."""
    # Loops and branches may make mutable arrays for themselves.
    own = [*jaxpr.constvars, *(atom for eqn in jaxpr.eqns for atom in (*eqn.invars, *eqn.outvars))]
    if any(is_ref(atom.aval) for atom in own):
        where = next((_place(eqn) for eqn in jaxpr.eqns if _has_ref(eqn)), "")
        raise TraceError(
            f"The step uses a mutable array (a Ref, as `jax.new_ref` makes them){where}. Plans have arrays only: pass "
            "its value as an argument, `ref[...]`, and return the new value."
        )
    for eqn in _all_equations(jaxpr):
        if eqn.primitive.name == "shard_map":
            name = "pmap" if "pmap" in str(eqn.params.get("mesh")) else "shard_map"
            raise TraceError(
                f"`jax.{name}`{_place(eqn)} is a program for the devices of its own mesh. {_PLANNER}: write "
                "the step for one device, as on whole arrays, with sums and means in the place of `psum` and `pmean`."
            )
        if any(AxisType.Explicit in mesh.axis_types for mesh in _meshes(eqn)):
            raise TraceError(
                f"`{eqn.primitive.name}`{_place(eqn)} is on a mesh with Explicit axes. {_PLANNER}: leave the "
                "mesh out, or make it with `axis_types=(jax.sharding.AxisType.Auto, ...)` for "
                "`jax.lax.with_sharding_constraint`."
            )


def without_meshes(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with meshes of the user in its constraints only; the same object if it has no mesh elsewhere."""
    if not _has_mesh(closed.jaxpr):
        return closed
    with under_mesh(NO_MESH):
        return ClosedJaxpr(_Cleaner().jaxpr(closed.jaxpr), closed.consts)


def _all_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "shard_map":
            for body in sub_jaxprs(eqn):
                yield from _all_equations(body)


def _has_ref(eqn: JaxprEqn) -> bool:
    return any(is_ref(atom.aval) for atom in (*eqn.invars, *eqn.outvars))


def _place(eqn: JaxprEqn) -> str:
    line = source_line(eqn)
    return f" at {line}" if line else ""


def _meshes(eqn: JaxprEqn) -> list[Any]:
    """The meshes in the settings and result types of an equation."""
    found = [mesh_of(eqn), *(_mesh_of_type(var) for var in eqn.outvars)]
    return [mesh for mesh in found if mesh is not None and not mesh.empty]


def _mesh_of_type(atom: Atom) -> Any:
    return getattr(getattr(atom.aval, "sharding", None), "mesh", None)


def _has_mesh(jaxpr: Jaxpr) -> bool:
    ends = [_mesh_of_type(var) for var in (*jaxpr.constvars, *jaxpr.invars)]
    if any(mesh is not None and not mesh.empty for mesh in ends):
        return True
    return any(_meshes(eqn) or any(map(_has_mesh, sub_jaxprs(eqn))) for eqn in jaxpr.eqns)


class _Cleaner:
    """Makes programs anew; a class because a program that several equations have stays one."""

    def __init__(self) -> None:
        self._known: dict[Jaxpr, Jaxpr] = {}
        self._closed_known: dict[ClosedJaxpr, ClosedJaxpr] = {}

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        if jaxpr not in self._known:
            self._known[jaxpr] = self._cleaned(jaxpr)
        return self._known[jaxpr]

    def _cleaned(self, jaxpr: Jaxpr) -> Jaxpr:
        env: dict[Var, Var] = {}

        def new(var: Var) -> Var:
            env[var] = Var(_clean_type(var.aval))
            return env[var]

        def read(atom: Atom) -> Atom:
            return Literal(_clean_value(atom.val), _clean_type(atom.aval)) if is_literal(atom) else env[atom]

        ends = {name: list(map(new, getattr(jaxpr, name))) for name in ("constvars", "invars")}
        eqns = []
        for eqn in jaxpr.eqns:
            params = {name: self._param(eqn, value) for name, value in eqn.params.items()}
            invars, outvars = list(map(read, eqn.invars)), list(map(new, eqn.outvars))
            eqns.append(with_no_mesh(eqn).replace(invars=invars, outvars=outvars, params=params))
        cleaned: Jaxpr = jaxpr.replace(eqns=eqns, outvars=list(map(read, jaxpr.outvars)), **ends)
        return cleaned

    def _param(self, eqn: JaxprEqn, value: Any) -> Any:
        match value:
            case Sharding() if not is_constraint(eqn):
                return None
            case ClosedJaxpr():
                return self._closed(value)
            case Jaxpr():
                return self.jaxpr(value)
            case tuple() if any(isinstance(one, ClosedJaxpr) for one in value):
                cleaned = [self._closed(one) if isinstance(one, ClosedJaxpr) else one for one in value]
                make: Any = getattr(type(value), "_make", tuple)  # a linear solve has a named tuple of programs
                return make(cleaned)
            case _:
                return value

    def _closed(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        if closed not in self._closed_known:
            self._closed_known[closed] = ClosedJaxpr(self.jaxpr(closed.jaxpr), closed.consts)
        return self._closed_known[closed]


def _clean_value(value: Any) -> Any:
    """A literal. NumPy arrays of jax's own class keep the type that they had first, and copies get a new one."""
    if isinstance(value, np.ndarray):
        value = value.copy()
        jax.typeof(value)
    return value


def _clean_type(aval: Any) -> Any:
    if not isinstance(aval, jax.core.ShapedArray) or aval.sharding.mesh.empty:
        return aval
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
