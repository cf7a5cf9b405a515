"""The only module that touches how jax represents programs: flat equations in, flat equations out.

`flatten_calls` turns a closed jaxpr into a list of equations without jit, custom_jvp, custom_vjp, remat or closed_call
around them. `eval_equation` runs one equation again. Everything is on `jax.extend.core`, but for the name stack, source
line and context of an equation, which have no public accessor.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax.extend import core as jex
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from minialpa.arrays import own_copy

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Atom = Any  # Var | Literal

#: Primitives that only wrap other equations, and the parameter that holds them.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_lin": "call_jaxpr",
}
_JITS = ("jit", "pjit", "closed_call", "core_call")
_REMATS = ("remat2", "checkpoint")


#: Collectives, and what they are over an axis that `vmap` has made a dimension.
_OVER_AXES: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "pmax": lambda x, axes: jnp.max(x, axes),
    "pmin": lambda x, axes: jnp.min(x, axes),
    "psum": lambda x, axes: jnp.sum(x, axes),
}


@dataclass(frozen=True, slots=True)
class FlatJaxpr:
    """A program as a flat list of equations. `consts` are the values of `constvars`, arrays captured by closure.

    Every variable is defined once; `scopes[i]` is the name scope that equation `i` was traced in, as text.
    """

    constvars: tuple[Var, ...]
    consts: tuple[Any, ...]
    invars: tuple[Var, ...]
    eqns: tuple[JaxprEqn, ...]
    scopes: tuple[str, ...]
    outvars: tuple[Atom, ...]


def aval_of(atom: Atom) -> Any:
    """The aval of an atom, which for an array has a shape and a dtype."""
    return atom.aval


def is_literal(atom: Atom) -> TypeIs[Literal]:
    return isinstance(atom, Literal)


def operand_vars(eqn: JaxprEqn) -> list[Var]:
    """The operands of an equation that are no literals."""
    return [v for v in eqn.invars if not is_literal(v)]


def fresh_var(aval: Any) -> Var:
    return Var(aval)


def shape_of(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_name(atom: Atom) -> str:
    return _name_of(getattr(atom.aval, "dtype", "token"))


_name_of = functools.lru_cache(str)


def aval_bytes(aval: Any) -> int:
    """Bytes of an array of this aval; typed PRNG keys count as 16 bytes each."""
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else math.prod(aval.shape) * _itemsize(dtype)


@functools.lru_cache
def _itemsize(dtype: Any) -> int:
    return 16 if is_extended(dtype) else np.dtype(dtype).itemsize


def is_extended(dtype: Any) -> bool:
    """Whether this is a dtype of jax's own, as that of typed PRNG keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))


def is_weak(aval: Any) -> bool:
    """Whether a value yields to the dtypes of others, as Python's numbers do."""
    return bool(getattr(aval, "weak_type", False))


def bytes_of(atom: Atom) -> int:
    return aval_bytes(atom.aval)


def is_inexact(atom: Atom) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def sub_jaxprs(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Jaxprs that the equation carries in its parameters (bodies of scan, while, cond)."""
    return tuple(jex.jaxprs_in_params(eqn.params))


def is_call(eqn: JaxprEqn) -> bool:
    """Whether the equation only wraps others, as jit and remat do."""
    return eqn.primitive.name in _CALLS


#: Its functions call those of the user, and are called by them.
_MARKS_FILE = str(Path(__file__).with_name("gradients.py"))
_LIBRARIES = ("site-packages", "dist-packages")


def source_line(eqn: JaxprEqn) -> str:
    """`file:line` of the user's code that made this equation, as good as jax knows it: behind libraries of layers."""
    frames = [f for f in source_info_util.user_frames(eqn.source_info.traceback) if f.file_name != _MARKS_FILE]
    frame = next((f for f in frames if not any(name in f.file_name for name in _LIBRARIES)), next(iter(frames), None))
    if frame is None:
        return str(source_info_util.summarize(eqn.source_info))
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def innermost_line(eqn: JaxprEqn) -> str:
    """`file:line` outside of jax that made this equation: derivatives have that of what they are derivatives of."""
    return str(source_info_util.summarize(eqn.source_info))


@functools.lru_cache(maxsize=4096)
def _has_user_line(traceback: Any) -> bool:
    """Whether a frame outside of jax made this. Equations of functions that jax compiles and keeps have none."""
    return next(source_info_util.user_frames(traceback), None) is not None


def trace_flat(fun: Callable[..., Any], *args: Any) -> tuple[FlatJaxpr, Any]:
    """Trace `fun` on abstract or concrete arguments. Returns the flat program and the pytree of output shapes.

    NumPy arrays that `fun` captures are copied, so that the program keeps the values that they have now.
    """
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    flat = flatten_calls(closed.jaxpr, tuple(closed.consts))
    return replace(flat, consts=_own_constants(flat.consts)), out_shape


def _own_constants(consts: Sequence[Any]) -> tuple[Any, ...]:
    """The constants with copies in place of NumPy arrays, one for all views of the same memory."""
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
) -> FlatJaxpr:
    """Inline call-like equations, with fresh variables for each. `only_jit` keeps custom derivatives and remat whole.

    Rematerialisation stays meaningful after inlining: the inputs of a recomputed block pass through an
    `optimization_barrier`, so that XLA does not merge it with the forward computation. Where a block says that it needs
    none, because it is in a scan, it has one with `always_barriers` only.
    """
    flattener = _Flattener(_JITS if only_jit else tuple(_CALLS), always_barriers)
    env: dict[Var, Atom] = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
    flattener.run(jaxpr.eqns, env, "")
    outvars = tuple(flattener.read(env, v) for v in jaxpr.outvars)
    return FlatJaxpr(
        (*jaxpr.constvars, *flattener.constvars),
        (*consts, *flattener.consts),
        tuple(jaxpr.invars),
        tuple(flattener.eqns),
        tuple(flattener.scopes),
        outvars,
    )


class _Flattener:
    """Collects equations; consts of inner closed jaxprs become further constvars."""

    def __init__(self, calls: Sequence[str], always_barriers: bool = False) -> None:
        self.calls, self.always_barriers = calls, always_barriers
        self.eqns: list[JaxprEqn] = []
        self.scopes: list[str] = []
        self.constvars: list[Var] = []
        self.consts: list[Any] = []

    @staticmethod
    def read(env: Mapping[Var, Atom], atom: Atom) -> Atom:
        return atom if is_literal(atom) else env[atom]

    def run(self, eqns: Iterable[JaxprEqn], env: dict[Var, Atom], scope: str, caller: Any = None) -> None:
        """`caller`: source of the equation that wraps these. What a library computes has no line of the user's."""
        for eqn in eqns:
            own = f"{scope}/{eqn.source_info.name_stack}"
            if caller is not None and not _has_user_line(eqn.source_info.traceback):
                eqn = eqn.replace(source_info=eqn.source_info.replace(traceback=caller.traceback))
            if eqn.primitive.name in self.calls:
                self._inline(eqn, env, own)
            elif eqn.primitive.name in _OVER_AXES and all(isinstance(axis, int) for axis in eqn.params["axes"]):
                self._reduce(eqn, env, own)
            elif eqn.primitive.name == "reshard":  # to a mesh of the user, or, where a gradient begins, to nowhere
                env[eqn.outvars[0]] = self.read(env, eqn.invars[0])
            else:
                self.emit(eqn, env, own)

    def _reduce(self, eqn: JaxprEqn, env: dict[Var, Atom], scope: str) -> None:
        """A collective over an axis of `vmap` is a reduction over a dimension."""
        axes, reduce = eqn.params["axes"], _OVER_AXES[eqn.primitive.name]
        shapes = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in eqn.invars]
        traced = jax.make_jaxpr(lambda *xs: [reduce(x, axes) for x in xs])(*shapes)
        inner = dict(zip(traced.jaxpr.invars, [self.read(env, v) for v in eqn.invars], strict=True))
        for one in traced.jaxpr.eqns:
            self.run([one.replace(source_info=eqn.source_info)], inner, scope)
        env.update((v, self.read(inner, o)) for v, o in zip(eqn.outvars, traced.jaxpr.outvars, strict=True))

    def emit(self, eqn: JaxprEqn, env: dict[Var, Atom], scope: str) -> None:
        outvars = [fresh_var(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=[self.read(env, v) for v in eqn.invars], outvars=outvars))
        self.scopes.append(scope)
        env.update(zip(eqn.outvars, outvars, strict=True))

    def _inline(self, eqn: JaxprEqn, env: dict[Var, Atom], scope: str) -> None:
        inner = eqn.params[_CALLS[eqn.primitive.name]]
        consts = tuple(getattr(inner, "consts", ()))
        body = getattr(inner, "jaxpr", inner)
        args = [self.read(env, v) for v in eqn.invars]
        is_again = eqn.primitive.name in _REMATS and eqn.params.get("differentiated")
        if is_again and (self.always_barriers or eqn.params.get("prevent_cse")):
            args = self._barrier(args, scope)
        inner_env: dict[Var, Atom] = dict(zip(body.invars, args, strict=True))
        for var, value in zip(body.constvars, consts, strict=True):
            inner_env[var] = self._const(var, value)
        self.run(body.eqns, inner_env, scope, eqn.source_info)
        env.update((v, self.read(inner_env, o)) for v, o in zip(eqn.outvars, body.outvars, strict=True))

    def _const(self, var: Var, value: Any) -> Var:
        new = fresh_var(var.aval)
        self.constvars.append(new)
        self.consts.append(value)
        return new

    def _barrier(self, args: list[Atom], scope: str) -> list[Atom]:
        variables = [v for v in args if not is_literal(v)]
        if not variables:
            return args
        barrier = jax.make_jaxpr(lambda *xs: jax.lax.optimization_barrier(xs))(
            *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
        )
        env: dict[Var, Atom] = dict(zip(barrier.jaxpr.invars, variables, strict=True))
        self.run(barrier.jaxpr.eqns, env, scope)
        held = iter([self.read(env, v) for v in barrier.jaxpr.outvars])
        return [v if is_literal(v) else next(held) for v in args]


def eval_equation(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
    """Bind the equation's primitive again on new arguments; what comes of it keeps the equation's source line."""
    bind_params = eqn.primitive.get_bind_params(dict(eqn.params) if params is None else dict(params))
    with source_info_util.user_context(eqn.source_info.traceback), eqn.ctx.manager:
        out = eqn.primitive.bind(*args, **bind_params)
    return list(out) if eqn.primitive.multiple_results else [out]


def context_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """The settings of jax that the equation was traced under, such as how threefry counts."""
    manager: AbstractContextManager[Any] = eqn.ctx.manager
    return manager


def eval_on_shards(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """`eval_equation` in the program of one device, where shardings on a mesh of the user have no meaning."""
    if is_constraint(eqn):
        return list(args)
    local = {k: None if isinstance(v, jax.sharding.Sharding) else v for k, v in params.items()}
    return eval_equation(eqn, args, local)


def is_gradient_marker(eqn: JaxprEqn) -> bool:
    """Whether this is where a gradient is summed over devices, once for all micro-batches."""
    return eqn.primitive.name == "minialpa_gradient"


def is_constraint(eqn: JaxprEqn) -> bool:
    """Whether this is `jax.lax.with_sharding_constraint`."""
    return eqn.primitive.name == "sharding_constraint"


def eval_flat(flat: FlatJaxpr, args: Sequence[Any]) -> list[Any]:
    """Run a flat program on values or tracers."""
    env: dict[Var, Any] = dict(zip(flat.constvars, flat.consts, strict=True))
    env.update(zip(flat.invars, args, strict=True))
    for eqn in flat.eqns:
        out = eval_equation(eqn, [v.val if is_literal(v) else env[v] for v in eqn.invars])
        env.update(zip(eqn.outvars, out, strict=True))
    return [v.val if is_literal(v) else env[v] for v in flat.outvars]


class EquationMaker:
    """Makes equations, and asks jax about each kind of them once: `rebuild` and `equations_for`, by what they are.

    To be used under one configuration of jax.
    """

    def __init__(self) -> None:
        self._avals: dict[Hashable, Sequence[Any]] = {}
        self._flat: dict[Hashable, FlatJaxpr] = {}

    def rebuild(self, eqn: JaxprEqn, invars: Sequence[Atom], params: Mapping[str, Any] | None = None) -> JaxprEqn:
        """The same primitive on other operands, with fresh result variables of the shapes that follow."""
        new_params = dict(eqn.params) if params is None else dict(params)
        operands = tuple(v.aval for v in invars)
        try:
            key = (eqn.primitive, tuple(new_params.items()), operands, eqn.ctx)
            if key not in self._avals:
                self._avals[key] = _result_avals(eqn, operands, new_params)
            avals = self._avals[key]
        except TypeError:  # a parameter that cannot be hashed
            avals = _result_avals(eqn, operands, new_params)
        new: JaxprEqn = eqn.replace(invars=list(invars), outvars=[fresh_var(a) for a in avals], params=new_params)
        return new

    def compute(self, key: Hashable, fun: Callable[..., Any], *operands: Atom) -> tuple[list[JaxprEqn], list[Atom]]:
        """`equations_for`; functions of one `key` do the same."""
        kind = key, tuple(v.aval for v in operands)
        if kind not in self._flat:
            self._flat[kind] = _flat_of(fun, operands)
        return _on_atoms(self._flat[kind], operands)


def _result_avals(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    out: Any
    with eqn.ctx.manager:
        out, _ = eqn.primitive.abstract_eval(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def equations_for(fun: Callable[..., Any], *operands: Atom) -> tuple[list[JaxprEqn], list[Atom]]:
    """Equations that compute `fun` on existing atoms, and the atoms of its results."""
    return _on_atoms(_flat_of(fun, operands), operands)


def _flat_of(fun: Callable[..., Any], operands: Sequence[Atom]) -> FlatJaxpr:
    flat, _ = trace_flat(fun, *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands])
    assert not flat.constvars, flat.constvars
    return flat


def _on_atoms(flat: FlatJaxpr, operands: Sequence[Atom]) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations of a program on these operands, with fresh variables."""
    env: dict[Var, Atom] = dict(zip(flat.invars, operands, strict=True))
    eqns = []
    for eqn in flat.eqns:
        new = [fresh_var(v.aval) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=[v if is_literal(v) else env[v] for v in eqn.invars], outvars=new))
        env.update(zip(eqn.outvars, new, strict=True))
    return eqns, [v if is_literal(v) else env[v] for v in flat.outvars]


def unary_equation(fun: Callable[[Any], Any]) -> Callable[[Var], tuple[JaxprEqn, Var]]:
    """For `fun`, one equation of one array: what makes it for a variable. Traced once for each shape and dtype."""
    known: dict[tuple[tuple[int, ...], str], JaxprEqn] = {}

    def make(v: Var) -> tuple[JaxprEqn, Var]:
        key = shape_of(v), dtype_name(v)
        if key not in known:
            ((known[key],), _) = equations_for(fun, v)
        out = fresh_var(known[key].outvars[0].aval)
        return known[key].replace(invars=[v], outvars=[out]), out

    return make


def live_equations(eqns: Sequence[JaxprEqn], outputs: Iterable[Atom]) -> list[bool]:
    """Which equations are needed for `outputs`; equations with side effects always are."""
    needed = {v for v in outputs if not is_literal(v)}
    keep = [False] * len(eqns)
    for i in range(len(eqns) - 1, -1, -1):
        if eqns[i].effects or any(v in needed for v in eqns[i].outvars):
            keep[i] = True
            needed.update(operand_vars(eqns[i]))
    return keep


_TAG = re.compile(r"minialpa\.(\d+)\.(\d+)\.(\d+)")


def tag_scope(call: int, layer: int, index: int) -> str:
    """Name scope for forward equation `index`, in `layer`, of the `call`-th gradient of a step."""
    return f"minialpa.{call}.{layer}.{index}"


def read_tag(scope: str) -> tuple[int, int, int] | None:
    """(call, layer, index) of the innermost tag of a scope. Autodiff keeps the scope, so backward equations have it."""
    found = _TAG.findall(scope)
    return (int(found[-1][0]), int(found[-1][1]), int(found[-1][2])) if found else None


def is_transposed(scope: str) -> bool:
    """Whether autodiff made this equation in the backward pass."""
    return "transpose(" in scope


def is_second_derivative(scope: str) -> bool:
    """Whether autodiff made this equation from a backward pass."""
    return "(transpose(" in scope
