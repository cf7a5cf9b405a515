"""`trace_flat` traces a function to a flat program, with jit, custom_jvp, custom_vjp, remat and closed_call inlined.

A primitive without a rule, such as one of another library, is replaced by the equations that jax compiles for it, also
in the bodies of loops and branches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import Sharding

from minialpa.arrays import own_copy
from minialpa.errors import TraceError
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
    is_in_host,
    is_literal,
    moves_memory,
    shape_of,
    source_line,
    sub_jaxprs,
    type_of,
    with_each_body,
)
from minialpa.ir.op import Op
from minialpa.support.private_jax import (
    NO_MESH,
    compiled_function,
    in_scope,
    name_stack,
    under_mesh,
    under_settings_of,
    warn,
    with_some_line,
    with_source_of,
)
from minialpa.tracing.host_memory import move_of, refuse_work_on_host
from minialpa.tracing.manual_regions import REGION, Border, border_of, whole_program
from minialpa.tracing.ragged_products import grouped_product
from minialpa.tracing.refs import StepRefs, on_values, without_unchanged
from minialpa.tracing.user_meshes import is_on_explicit_axes, without_meshes

#: Primitives with a rule, which `keep` adds. Others are written out if possible.
_KEPT: set[str] = set()
_JITS = ("jit", "pjit", "closed_call", "core_call")
_REMATS = ("remat2", "checkpoint")

#: Collectives over an axis of `vmap`, as reductions over a dimension.
_OVER_AXES: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "pmax": lambda x, axes: jnp.max(x, axes),
    "pmin": lambda x, axes: jnp.min(x, axes),
    "psum": lambda x, axes: jnp.sum(x, axes, dtype=x.dtype),
}


def keep(primitive: str) -> None:
    """Make `flatten_calls` keep equations of this primitive, because it has a rule."""
    _KEPT.add(primitive)


def trace_flat(fun: Callable[..., Any], *args: Any) -> tuple[Block, Any]:
    """Trace `fun` on abstract or concrete arguments. Returns the flat program and the pytree of output shapes.

    Copies captured NumPy arrays, which may change later. Raises TraceError if `fun` uses host memory, is already a
    program for several devices, or reads a value of another trace.
    """
    flat, out_shape, refs, _ = trace_with_refs(fun, *args)
    if refs:
        raise TraceError("A function with a sharding rule reads a Ref. Pass `ref[...]` to it instead.")
    return flat, out_shape


def trace_with_refs(fun: Callable[..., Any], *args: Any) -> tuple[Block, Any, StepRefs, Border]:
    """`trace_flat` of a function that may read and write Refs, as a program on their values."""
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    border = border_of(closed.jaxpr)
    closed, refs = on_values(closed, len(args))
    for value in closed.consts:
        _refuse_traced_value(value)
    refuse_work_on_host(closed)
    closed = without_meshes(closed)
    with under_mesh(NO_MESH):  # also for equations that replace others
        flat = flatten_calls(closed.jaxpr, tuple(closed.consts))
    flat, refs = without_unchanged(replace(flat, consts=_own_constants(flat.consts)), refs)
    return flat, out_shape, refs, border


def _refuse_traced_value(value: Any) -> None:
    if not isinstance(value, jax.core.Tracer):
        return
    jax.jit(lambda x: x)(value)  # raises UnexpectedTracerError, with the line of the value, if its trace is over
    raise TraceError(
        f"The step reads a traced value of type {value.aval.str_short()} from an enclosing function, such as one under "
        "`jax.jit` or `jax.grad`. Call the parallelized function outside of it, and pass the value as an argument."
    )


def _own_constants(consts: Sequence[Any]) -> tuple[Any, ...]:
    """Copies NumPy arrays; equal views of one memory share a copy."""
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
    """Inline call-like equations, each with fresh variables.

    only_jit: custom derivatives, remat and primitives without a rule stay.
    always_barriers: put a barrier before each recomputed block, also in scans, where jax can do without.

    The inputs of a recomputed block pass through an `optimization_barrier`, so that XLA does not merge the block with
    the forward computation.
    """
    flattener = _Flattener(only_jit=only_jit, always_barriers=always_barriers)
    env: dict[Var, Atom] = {var: var for var in (*jaxpr.constvars, *jaxpr.invars)}
    flattener.run(jaxpr.eqns, env, scope="")
    return Block(
        constvars=(*jaxpr.constvars, *flattener.constvars),
        consts=(*consts, *flattener.consts),
        invars=tuple(jaxpr.invars),
        ops=tuple(flattener.ops),
        outvars=tuple(_read(env, atom) for atom in jaxpr.outvars),
    )


def _warn_of_shardings(eqn: JaxprEqn) -> None:
    """Shardings of an inner `jax.jit` change no number, so a warning is enough."""
    given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(isinstance(sharding, Sharding) for sharding in given):
        warn(
            f"The shardings of `jax.jit` at {source_line(eqn)}, inside the step, have no effect, because the planner "
            "decides shardings. To fix one, use `jax.lax.with_sharding_constraint` or "
            "`AutoShardingOption(fixed_specs=...)`.",
        )


def _only_places(eqn: JaxprEqn) -> bool:
    """Whether an equation only moves arrays to devices or a mesh of the user, in their memory."""
    places = eqn.params["devices"] if eqn.primitive.name == "device_put" and not moves_memory(eqn) else ()
    kinds = Sharding | jax.Device | jax.memory.Space
    return eqn.primitive.name == "reshard" or any(isinstance(place, kinds) for place in places)


def _moves_like_others(eqn: JaxprEqn) -> bool:
    """Whether an equation moves arrays between memories in the form of `host_memory.move_of`."""
    return moves_memory(eqn) and len(eqn.invars) == 1 and isinstance(eqn.params["devices"][0], jax.memory.Space)


def _read(env: Mapping[Var, Atom], atom: Atom) -> Atom:
    return atom if is_literal(atom) else env[atom]


class _Flattener:
    """Collects operations; constants of inner jaxprs become additional constvars."""

    def __init__(self, *, only_jit: bool, always_barriers: bool) -> None:
        self.calls = _JITS if only_jit else tuple(CALLS)
        self.writes_out, self.always_barriers = not only_jit, always_barriers
        self.ops: list[Op] = []
        self.constvars: list[Var] = []
        self.consts: list[Any] = []

    def run(self, eqns: Iterable[JaxprEqn], env: dict[Var, Atom], scope: str, caller: JaxprEqn | None = None) -> None:
        """Add equations, with their variables renamed by `env`.

        caller: the call that contains them. Equations without a line of the user's code get its source line.
        """
        for eqn in eqns:
            inner_scope = f"{scope}/{name_stack(eqn)}"
            if caller is not None:
                eqn = with_some_line(eqn, caller)
            if eqn.primitive.name == "concatenate":
                eqn = _without_empty_operands(eqn)
            if eqn.primitive.name in self.calls:
                self._inline(eqn, env, inner_scope)
            elif _is_over_dimensions(eqn):
                self._replace(eqn, env, scope, _as_reduction(eqn))
            elif eqn.primitive.name == REGION and (self.writes_out or not is_on_explicit_axes(eqn)):
                self._inline_region(eqn, env, inner_scope)
            elif self.writes_out and (written := written_out(eqn)) is not None:
                self._replace(eqn, env, scope, written)
            elif moves_memory(eqn):
                self._add_moves(eqn, env, inner_scope)
            elif self.writes_out and _only_places(eqn):
                env.update((var, _read(env, atom)) for var, atom in zip(eqn.outvars, eqn.invars, strict=True))
            else:
                self._add(eqn, env, inner_scope)

    def _add(self, eqn: JaxprEqn, env: dict[Var, Atom], scope: str) -> None:
        if self.writes_out and is_control_flow(eqn):
            eqn = with_each_body(_body_written_out, eqn)
        outvars = [fresh_var(var.aval) for var in eqn.outvars]
        operands = [_read(env, atom) for atom in eqn.invars]
        self.ops.append(Op(in_scope(eqn.replace(invars=operands, outvars=outvars), scope), scope))
        env.update(zip(eqn.outvars, outvars, strict=True))

    def _add_moves(self, eqn: JaxprEqn, env: dict[Var, Atom], scope: str) -> None:
        for k, (old, new) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
            if is_in_host(old.aval) == is_in_host(new.aval):
                env[new] = _read(env, old)
            else:
                self._add(move_of(eqn, k), env, scope)

    def _replace(self, eqn: JaxprEqn, env: dict[Var, Atom], scope: str, traced: ClosedJaxpr) -> None:
        operands = [_read(env, atom) for atom in eqn.invars]
        eqns = [with_source_of(inner, eqn) for inner in traced.jaxpr.eqns]
        results = self._body(traced.jaxpr, traced.consts, operands, scope, eqns)
        env.update(zip(eqn.outvars, results, strict=True))

    def _inline_region(self, eqn: JaxprEqn, env: dict[Var, Atom], scope: str) -> None:
        whole = whole_program(eqn)
        operands = [_read(env, atom) for atom in eqn.invars]
        results = self._body(whole.jaxpr, whole.consts, operands, scope, whole.jaxpr.eqns, eqn)
        env.update(zip(eqn.outvars, results, strict=True))

    def _inline(self, eqn: JaxprEqn, env: dict[Var, Atom], scope: str) -> None:
        _warn_of_shardings(eqn)
        inner, invars = called(eqn)
        body = getattr(inner, "jaxpr", inner)

        operands = [_read(env, atom) for atom in invars]
        is_recomputed = eqn.primitive.name in _REMATS and eqn.params.get("differentiated")
        if is_recomputed and (self.always_barriers or eqn.params.get("prevent_cse")):
            operands = self._after_barrier(operands, scope)
        results = self._body(body, getattr(inner, "consts", ()), operands, scope, body.eqns, eqn)
        env.update(zip(eqn.outvars, results, strict=True))

    def _body(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        operands: Sequence[Atom],
        scope: str,
        eqns: Iterable[JaxprEqn],
        caller: JaxprEqn | None = None,
    ) -> list[Atom]:
        """Add `eqns`, the equations of `jaxpr`, on these operands. Returns the results."""
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = fresh_var(var.aval)
            self.constvars.append(env[var])
            self.consts.append(value)

        self.run(eqns, env, scope, caller)
        return [_read(env, atom) for atom in jaxpr.outvars]

    def _after_barrier(self, operands: list[Atom], scope: str) -> list[Atom]:
        """The operands as results of an `optimization_barrier`."""
        variables = [atom for atom in operands if not is_literal(atom)]
        if not variables:
            return operands
        barrier = jax.make_jaxpr(lambda *arrays: jax.lax.optimization_barrier(arrays))(
            *[type_of(var.aval, keeps_weak=False) for var in variables]
        )
        after = iter(self._body(barrier.jaxpr, (), variables, scope, barrier.jaxpr.eqns))
        return [atom if is_literal(atom) else next(after) for atom in operands]


def _without_empty_operands(eqn: JaxprEqn) -> JaxprEqn:
    """Devices do not share arrays without elements, nor, beside one, the other operands."""
    full = [atom for atom in eqn.invars if shape_of(atom)[eqn.params["dimension"]]]
    new: JaxprEqn = eqn.replace(invars=full or list(eqn.invars[:1]))
    return new


def _is_over_dimensions(eqn: JaxprEqn) -> bool:
    """Whether an equation is a collective over axes of `vmap`, which are dimensions."""
    return eqn.primitive.name in _OVER_AXES and all(isinstance(axis, int) for axis in eqn.params["axes"])


def _as_reduction(eqn: JaxprEqn) -> ClosedJaxpr:
    axes, reduce = eqn.params["axes"], _OVER_AXES[eqn.primitive.name]
    structs = [jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype) for atom in eqn.invars]
    return jax.make_jaxpr(lambda *arrays: [reduce(array, axes) for array in arrays])(*structs)


def written_out(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program that jax compiles for an equation without a rule; None if the equation stays."""
    compiled = _compiled_as(eqn)
    if compiled is None or eqn.effects:
        return None

    # Traced on whole arrays outside any mesh, since parameters may hold shapes and shardings.
    structs = [type_of(aval_of(atom)) for atom in eqn.invars]
    with under_settings_of(eqn):
        traced = jax.make_jaxpr(lambda *arrays: compiled(*arrays, **eqn.params))(*structs)

    types = [[(shape_of(var), dtype_name(var)) for var in some] for some in (traced.jaxpr.outvars, eqn.outvars)]
    return None if traced.effects or types[0] != types[1] else traced


def _compiled_as(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
    if eqn.primitive.name == "ragged_dot_general":
        return grouped_product
    return None if eqn.primitive.name in _KEPT else compiled_function(eqn.primitive)


def _is_to_be_written_out(eqns: Iterable[JaxprEqn]) -> bool:
    """Whether flattening replaces an equation among or inside these."""
    for eqn in eqns:
        if is_call(eqn) or is_control_flow(eqn):
            if any(_is_to_be_written_out(inner.eqns) for inner in sub_jaxprs(eqn)):
                return True
        elif moves_memory(eqn):
            if not _moves_like_others(eqn):
                return True
        elif (
            eqn.primitive.name == REGION
            or _is_over_dimensions(eqn)
            or _only_places(eqn)
            or _compiled_as(eqn) is not None
        ):
            return True
    return False


def _body_written_out(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The body with its primitives written out; the same object without such primitives."""
    if not _is_to_be_written_out(closed.jaxpr.eqns):
        return closed
    # A pass that unrolls the loop later finds recomputed equations by their barrier.
    flat = flatten_calls(closed.jaxpr, tuple(closed.consts), always_barriers=True)
    body = closed.jaxpr.replace(constvars=list(flat.constvars), eqns=list(flat.eqns), outvars=list(flat.outvars))
    return ClosedJaxpr(body, list(flat.consts))


def flat_body(jaxpr: Jaxpr, consts: Sequence[Any]) -> Block:
    """The body of a loop or branch as a flat program without dead operations, which checkpoints leave."""
    return flatten_calls(jaxpr, consts).without_dead_operations()
