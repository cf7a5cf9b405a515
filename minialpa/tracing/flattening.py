"""Programs as flat lists of equations, without jit, custom_jvp, custom_vjp, remat or closed_call around them.

`trace_flat` traces a function, and `flatten_calls` flattens a jaxpr. Primitives that no rule knows are written out as
the equations that they are compiled as.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import Sharding

from minialpa.arrays import own_copy
from minialpa.ir.block import Block
from minialpa.ir.equations import (
    CALLS,
    Atom,
    aval_of,
    called,
    dtype_name,
    fresh_var,
    is_call,
    is_control_flow,
    is_literal,
    is_weak,
    shape_of,
    source_line,
    sub_jaxprs,
    with_each_body,
)
from minialpa.ir.op import Op
from minialpa.support.private_jax import (
    compiled_function,
    name_stack,
    under_settings_of,
    with_some_line,
    with_source_of,
)
from minialpa.tracing.host_memory import refuse_host_memory
from minialpa.tracing.ragged_products import dense_product
from minialpa.tracing.users_meshes import refuse_programs_of_devices, without_meshes

#: Names of the primitives that have a rule of their own, which `keep` adds. All others are written out if they can be.
_KEPT: set[str] = set()
_JITS = ("jit", "pjit", "closed_call", "core_call")
_REMATS = ("remat2", "checkpoint")

#: Collectives, and the reductions that they become once `vmap` has turned their axis into a dimension.
_OVER_AXES: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "pmax": lambda x, axes: jnp.max(x, axes),
    "pmin": lambda x, axes: jnp.min(x, axes),
    "psum": lambda x, axes: jnp.sum(x, axes),
}


def keep(primitive: str) -> None:
    """Let `flatten_calls` keep equations of the primitive of this name as they are."""
    _KEPT.add(primitive)


def trace_flat(fun: Callable[..., Any], *args: Any) -> tuple[Block, Any]:
    """Trace `fun` on abstract or concrete arguments. Returns the flat program and the pytree of output shapes.

    Copies the NumPy arrays that `fun` captures, so that the program keeps their current values. Raises TraceError if
    it uses host memory, or is a program for several devices already.
    """
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    refuse_host_memory(closed)
    refuse_programs_of_devices(closed.jaxpr)
    closed = without_meshes(closed)
    flat = flatten_calls(closed.jaxpr, tuple(closed.consts))
    return replace(flat, consts=_own_constants(flat.consts)), out_shape


def _own_constants(consts: Sequence[Any]) -> tuple[Any, ...]:
    """The constants, with NumPy arrays replaced by copies; equal views of the same memory share one copy."""
    copies: dict[Hashable, Any] = {}
    out = []
    for value in consts:
        if isinstance(value, np.ndarray):
            view = (value.ctypes.data, value.shape, value.strides, value.dtype)
            if view not in copies:
                copies[view] = own_copy(value)
            value = copies[view]
        out.append(value)
    return tuple(out)


def flatten_calls(
    jaxpr: Jaxpr, consts: Sequence[Any], *, only_jit: bool = False, always_barriers: bool = False
) -> Block:
    """Inline call-like equations, with fresh variables for each of them.

    only_jit: inline jit and the like, but not custom derivatives, remat and primitives of other libraries, so that what
        is left has the derivatives that were defined for it.
    always_barriers: also put a barrier before recomputed blocks that ask for none, because they are in a scan.

    Inlining keeps rematerialisation: the inputs of a recomputed block pass through an `optimization_barrier`, so that
    XLA does not merge the block with the forward computation.

    Primitives that no rule knows, such as those of other libraries, are written out: as the equations that they are
    compiled as, if these are a function of jax, here and in the bodies of loops and branches.
    """
    flattener = _Flattener(_JITS if only_jit else tuple(CALLS), always_barriers)
    env: dict[Var, Atom] = {var: var for var in (*jaxpr.constvars, *jaxpr.invars)}
    flattener.run(jaxpr.eqns, env, "")
    return Block(
        constvars=(*jaxpr.constvars, *flattener.constvars),
        consts=(*consts, *flattener.consts),
        invars=tuple(jaxpr.invars),
        ops=tuple(flattener.ops),
        outvars=tuple(flattener.read(env, atom) for atom in jaxpr.outvars),
    )


def _warn_of_shardings(eqn: JaxprEqn) -> None:
    """Warn of a `jax.jit` inside the step whose operands or results have shardings. They change no number."""
    given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(isinstance(sharding, Sharding) for sharding in given):
        warnings.warn(
            f"The shardings of `jax.jit` at {source_line(eqn)}, inside the step, are left out: the planner decides. "
            "`jax.lax.with_sharding_constraint`, or `AutoShardingOption(fixed_specs=...)`, fixes shardings.",
            UserWarning,
            stacklevel=2,
        )


def _only_places(eqn: JaxprEqn) -> bool:
    """Whether an equation only moves arrays to devices or a mesh of the user. The plan decides where arrays are."""
    places = eqn.params["devices"] if eqn.primitive.name == "device_put" else ()
    return eqn.primitive.name == "reshard" or any(isinstance(place, Sharding | jax.Device) for place in places)


class _Flattener:
    """Collects the equations of a program; the consts of inner closed jaxprs become additional constvars."""

    def __init__(self, calls: Sequence[str], always_barriers: bool = False) -> None:
        self.calls, self.always_barriers = calls, always_barriers
        self.writes_out = calls is not _JITS
        self.ops: list[Op] = []
        self.constvars: list[Var] = []
        self.consts: list[Any] = []

    @staticmethod
    def read(env: Mapping[Var, Atom], atom: Atom) -> Atom:
        return atom if is_literal(atom) else env[atom]

    def run(self, eqns: Iterable[JaxprEqn], env: dict[Var, Atom], scope: str, caller: JaxprEqn | None = None) -> None:
        """Add equations, whose variables `env` renames.

        caller: the equation that wraps these. Its line stands in for a missing line of the user's code.
        """
        for eqn in eqns:
            own = f"{scope}/{name_stack(eqn)}"
            if caller is not None:
                eqn = with_some_line(eqn, caller)
            if eqn.primitive.name in self.calls:
                self._inline(eqn, env, own)
            elif eqn.primitive.name in _OVER_AXES and all(isinstance(axis, int) for axis in eqn.params["axes"]):
                self._reduce(eqn, env, own)
            elif self.writes_out and (written := written_out(eqn)) is not None:
                self._replace(eqn, env, own, written)
            elif _only_places(eqn):
                env.update((var, self.read(env, atom)) for var, atom in zip(eqn.outvars, eqn.invars, strict=True))
            else:
                self.emit(eqn, env, own)

    def _reduce(self, eqn: JaxprEqn, env: dict[Var, Atom], scope: str) -> None:
        """Add a collective over an axis of `vmap` as a reduction over a dimension."""
        axes, reduce = eqn.params["axes"], _OVER_AXES[eqn.primitive.name]
        structs = [jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype) for atom in eqn.invars]
        traced = jax.make_jaxpr(lambda *arrays: [reduce(array, axes) for array in arrays])(*structs)
        self._replace(eqn, env, scope, traced)

    def _replace(self, eqn: JaxprEqn, env: dict[Var, Atom], scope: str, traced: ClosedJaxpr) -> None:
        """Add a program in the place of an equation, whose source line and scopes its equations have."""
        inner_env: dict[Var, Atom] = {
            var: self.read(env, atom) for var, atom in zip(traced.jaxpr.invars, eqn.invars, strict=True)
        }
        for var, value in zip(traced.jaxpr.constvars, traced.consts, strict=True):
            inner_env[var] = self._const(var, value)
        for inner_eqn in traced.jaxpr.eqns:
            self.run([with_source_of(inner_eqn, eqn)], inner_env, scope)
        self._name_results(eqn, env, traced.jaxpr.outvars, inner_env)

    def emit(self, eqn: JaxprEqn, env: dict[Var, Atom], scope: str) -> None:
        """Add one equation, with fresh variables for its results."""
        if self.writes_out and is_control_flow(eqn):
            eqn = _with_bodies_written_out(eqn)
        outvars = [fresh_var(var.aval) for var in eqn.outvars]
        operands = [self.read(env, atom) for atom in eqn.invars]
        self.ops.append(Op(eqn.replace(invars=operands, outvars=outvars), scope))
        env.update(zip(eqn.outvars, outvars, strict=True))

    def _inline(self, eqn: JaxprEqn, env: dict[Var, Atom], scope: str) -> None:
        """Add the equations inside a call."""
        _warn_of_shardings(eqn)
        inner, invars = called(eqn)
        consts = tuple(getattr(inner, "consts", ()))
        body = getattr(inner, "jaxpr", inner)

        operands = [self.read(env, atom) for atom in invars]
        is_recomputed = eqn.primitive.name in _REMATS and eqn.params.get("differentiated")
        if is_recomputed and (self.always_barriers or eqn.params.get("prevent_cse")):
            operands = self._barrier(operands, scope)

        inner_env: dict[Var, Atom] = dict(zip(body.invars, operands, strict=True))
        for var, value in zip(body.constvars, consts, strict=True):
            inner_env[var] = self._const(var, value)
        self.run(body.eqns, inner_env, scope, eqn)
        self._name_results(eqn, env, body.outvars, inner_env)

    def _name_results(
        self, eqn: JaxprEqn, env: dict[Var, Atom], inner_results: Sequence[Atom], inner_env: Mapping[Var, Atom]
    ) -> None:
        """Let the results of a replaced equation stand for those of the equations that replace it."""
        env.update((var, self.read(inner_env, inner)) for var, inner in zip(eqn.outvars, inner_results, strict=True))

    def _const(self, var: Var, value: Any) -> Var:
        new = fresh_var(var.aval)
        self.constvars.append(new)
        self.consts.append(value)
        return new

    def _barrier(self, operands: list[Atom], scope: str) -> list[Atom]:
        """Add an `optimization_barrier` on all operands that are not literals; returns what is behind it."""
        variables = [atom for atom in operands if not is_literal(atom)]
        if not variables:
            return operands
        barrier = jax.make_jaxpr(lambda *arrays: jax.lax.optimization_barrier(arrays))(
            *[jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in variables]
        )
        env: dict[Var, Atom] = dict(zip(barrier.jaxpr.invars, variables, strict=True))
        self.run(barrier.jaxpr.eqns, env, scope)
        behind = iter([self.read(env, atom) for atom in barrier.jaxpr.outvars])
        return [atom if is_literal(atom) else next(behind) for atom in operands]


def written_out(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation of a primitive without a rule is compiled as; None if it is kept as it is."""
    compiled = _compiled_as(eqn)
    if compiled is None or eqn.effects:
        return None

    # Traced here, on whole arrays and outside of any mesh: parameters may hold shapes, types and shardings.
    structs = [
        jax.ShapeDtypeStruct(shape_of(atom), aval_of(atom).dtype, weak_type=is_weak(aval_of(atom)))
        for atom in eqn.invars
    ]
    with under_settings_of(eqn):
        traced = jax.make_jaxpr(lambda *arrays: compiled(*arrays, **eqn.params))(*structs)

    types = [[(shape_of(var), dtype_name(var)) for var in some] for some in (traced.jaxpr.outvars, eqn.outvars)]
    return None if traced.effects or types[0] != types[1] else traced


def _compiled_as(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
    """The function that an equation of a primitive without a rule is compiled as, if it is a function of jax."""
    if eqn.primitive.name == "ragged_dot_general":
        return dense_product
    return None if eqn.primitive.name in _KEPT else compiled_function(eqn.primitive)


def _is_to_be_written_out(eqns: Iterable[JaxprEqn]) -> bool:
    """Whether equations, or those inside them, have a primitive that is written out or left out."""
    for eqn in eqns:
        if is_call(eqn) or is_control_flow(eqn):
            if any(_is_to_be_written_out(inner.eqns) for inner in sub_jaxprs(eqn)):
                return True
        elif _only_places(eqn) or _compiled_as(eqn) is not None:
            return True
    return False


def _with_bodies_written_out(eqn: JaxprEqn) -> JaxprEqn:
    """A loop or branches whose bodies have no primitive that can be written out."""
    if not _is_to_be_written_out([eqn]):
        return eqn
    return with_each_body(_body_written_out, eqn)


def _body_written_out(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A body without primitives that can be written out."""
    if not _is_to_be_written_out(closed.jaxpr.eqns):
        return closed
    # Whoever takes the loop apart later has to find what is recomputed behind a barrier.
    flat = flatten_calls(closed.jaxpr, tuple(closed.consts), always_barriers=True)
    body = closed.jaxpr.replace(constvars=list(flat.constvars), eqns=list(flat.eqns), outvars=list(flat.outvars))
    return ClosedJaxpr(body, list(flat.consts))


def flat_body(jaxpr: Jaxpr, consts: Sequence[Any]) -> Block:
    """The body of a loop or branch as equations, without those that a checkpoint computes again and nothing reads."""
    return flatten_calls(jaxpr, consts).without_dead_operations()
