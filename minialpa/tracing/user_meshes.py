"""A traced program goes in; the same program without the user's meshes comes out.

A plan has its own meshes, and decides what each device computes. The user's meshes change no value: they come from
`jax.set_mesh`, `jax.sharding.use_abstract_mesh`, constraints, and arrays. Their shardings become constraints where the
user writes them: `jax.lax.with_sharding_constraint` and, on Explicit axes, `jax.sharding.reshard` and `out_sharding`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from minialpa.arrays import RemoteArray
from minialpa.ir.equations import Atom, is_constraint, is_literal, shape_of, sub_jaxprs
from minialpa.ir.op import is_transposed
from minialpa.support.private_jax import NO_MESH, mesh_of, name_stack, under_mesh, with_no_mesh, with_source_of


class UsersSharding(NamedTuple):
    """is_exact: later lines refuse other shardings, also on the same devices."""

    sharding: NamedSharding
    is_exact: bool


def explicit_sharding(array_or_type: Any) -> NamedSharding | None:
    """The sharding on Explicit axes of an array, a type or a sharding, with an entry for each dimension of an array."""
    if isinstance(array_or_type, RemoteArray):
        sharding = array_or_type.user_sharding
    else:
        sharding = array_or_type if isinstance(array_or_type, Sharding) else getattr(array_or_type, "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    n_missing = len(getattr(array_or_type, "shape", ())) - len(sharding.spec)
    if n_missing <= 0 or is_unreduced(sharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *[None] * n_missing))


def auto_mesh(mesh: Any) -> AbstractMesh:
    """The mesh without devices, with Auto axes only."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def is_unreduced(sharding: NamedSharding) -> bool:
    return bool(getattr(sharding.spec, "unreduced", None))


def without_meshes(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with the user's meshes in constraints only; the same object if it has no others."""
    if not _has_mesh(closed.jaxpr):
        return closed
    with under_mesh(NO_MESH):
        cleaned: ClosedJaxpr = without_meshes_inside(closed, {})
        return cleaned


def _has_mesh(jaxpr: Jaxpr) -> bool:
    if any(map(_meshes_of_type, (*jaxpr.constvars, *jaxpr.invars))):
        return True
    return any(_meshes(eqn) or any(map(_has_mesh, sub_jaxprs(eqn))) for eqn in jaxpr.eqns)


def _meshes(eqn: JaxprEqn) -> list[Any]:
    of_eqn = mesh_of(eqn)
    found = [] if of_eqn is None or of_eqn.empty else [of_eqn]
    return found + [mesh for var in eqn.outvars for mesh in _meshes_of_type(var)]


def is_on_explicit_axes(eqn: JaxprEqn) -> bool:
    """Whether the mesh of the context, or of an operand's type, has Explicit axes."""
    operands = [mesh for atom in eqn.invars for mesh in _meshes_of_type(atom)]
    return any(AxisType.Explicit in mesh.axis_types for mesh in (mesh_of(eqn), *operands) if mesh is not None)


def _meshes_of_type(atom: Atom) -> list[Any]:
    mesh = getattr(getattr(atom.aval, "sharding", None), "mesh", None)
    return [] if mesh is None or mesh.empty else [mesh]


def without_meshes_inside(program: Any, known: dict[Any, Any]) -> Any:
    """known: cleaned programs, so that equations keep sharing them."""
    if program not in known:
        is_closed = isinstance(program, ClosedJaxpr)
        inner = program.jaxpr if is_closed else program
        # From jax 0.12 on, a closed program is its own jaxpr.
        cleaned = _jaxpr_without_meshes(inner, known) if inner is program else without_meshes_inside(inner, known)
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
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        spec = _sharding_by_user(eqn)
        if eqn.primitive.name == "reshard":
            env.update(zip(eqn.outvars, map(read, eqn.invars), strict=True))
        else:
            params = {name: _clean_param(eqn, value, known) for name, value in eqn.params.items()}
            invars, outvars = list(map(read, eqn.invars)), list(map(new, eqn.outvars))
            eqns.append(with_no_mesh(eqn).replace(invars=invars, outvars=outvars, params=params))
        if spec is not None:
            before = env[eqn.outvars[0]]
            eqns.append(_constraint(eqn, before, new(eqn.outvars[0]), spec))
    cleaned: Jaxpr = jaxpr.replace(eqns=eqns, outvars=list(map(read, jaxpr.outvars)), **ends)
    return cleaned


def _sharding_by_user(eqn: JaxprEqn) -> NamedSharding | None:
    """The sharding on Explicit axes that the user's code gives to the result, and no derivative of it."""
    given = eqn.params.get("dst_sharding" if eqn.primitive.name == "reshard" else "out_sharding")
    if not isinstance(given, NamedSharding) or not shape_of(eqn.outvars[0]) or is_transposed(name_stack(eqn)):
        return None
    if is_unreduced(given):  # a matter of the user's devices: the value is the sum
        return None
    kinds = dict(zip(given.mesh.axis_names, given.mesh.axis_types, strict=True))
    if AxisType.Explicit not in kinds.values():
        return None

    # A dimension without axes may have axes that are not Explicit.
    rest = None if set(kinds.values()) == {AxisType.Explicit} else PartitionSpec.UNCONSTRAINED
    entries = [*given.spec, *[None] * (len(shape_of(eqn.outvars[0])) - len(given.spec))]
    mesh = auto_mesh(given.mesh)
    return NamedSharding(mesh, PartitionSpec(*[rest if entry is None else entry for entry in entries]))


def _constraint(eqn: JaxprEqn, value: Atom, result: Var, sharding: NamedSharding) -> JaxprEqn:
    """A `with_sharding_constraint` at the source line of `eqn`."""
    struct = jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)
    (made,) = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(struct).jaxpr.eqns
    return with_source_of(made.replace(invars=[value], outvars=[result]), eqn)


def _clean_param(eqn: JaxprEqn, value: Any, known: dict[Any, Any]) -> Any:
    match value:
        case Sharding() if not is_constraint(eqn):
            return None
        case NamedSharding() if AxisType.Manual in value.mesh.axis_types:
            return NamedSharding(auto_mesh(value.mesh), value.spec)
        case ClosedJaxpr() | Jaxpr():
            return without_meshes_inside(value, known)
        case tuple() if any(isinstance(one, ClosedJaxpr) for one in value):
            cleaned = [without_meshes_inside(one, known) if isinstance(one, ClosedJaxpr) else one for one in value]
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
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type, memory_space=aval.memory_space)
