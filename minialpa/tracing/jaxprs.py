"""Programs of jax as flat lists of equations.

`flatten_calls` turns a closed jaxpr into a list of equations without jit, custom_jvp, custom_vjp, remat or closed_call
around them. `eval_equation` runs one equation again. Everything builds on `jax.extend.core`, and on
`support.private_jax` for the name scopes, source line and settings of an equation.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Sharding

from minialpa.arrays import own_copy
from minialpa.support.private_jax import (
    bind_again,
    compiled_function,
    frames_of,
    innermost_line,
    name_stack,
    result_avals,
    settings_of,
    under_settings_of,
    with_some_line,
    with_source_of,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Atom = Any  # Var | Literal

_LINEAR_SOLVE = "custom_linear_solve"
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
    _LINEAR_SOLVE: "jaxprs",  # those of four functions, of which only `solve` computes anything
}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatJaxpr:
    """A program as a flat list of equations, in which every variable is defined once.

    Attributes:
        constvars: variables for the arrays that the program captured by closure.
        consts: their values.
        invars: operands.
        eqns: in an order in which they can run.
        scopes: for each equation, the name scope that it was traced in, as text.
        outvars: results.
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
    """The operands of an equation that are not literals."""
    return [atom for atom in eqn.invars if not is_literal(atom)]


def fresh_var(aval: Any) -> Var:
    return Var(aval)


def reading(eqn: JaxprEqn, names: Mapping[Var, Atom]) -> JaxprEqn:
    """A copy of an equation that reads `names[v]` in place of each operand `v` that has such a name."""
    copy: JaxprEqn = eqn.replace(invars=[v if is_literal(v) else names.get(v, v) for v in eqn.invars])
    return copy


def shape_of(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_name(atom: Atom) -> str:
    return _name_of(getattr(atom.aval, "dtype", "token"))


_name_of = functools.lru_cache(str)


def aval_bytes(aval: Any) -> int:
    """Bytes of an array of this aval; a typed PRNG key counts as 16 bytes."""
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else math.prod(aval.shape) * _itemsize(dtype)


@functools.lru_cache
def _itemsize(dtype: Any) -> int:
    return 16 if is_extended(dtype) else np.dtype(dtype).itemsize


def is_extended(dtype: Any) -> bool:
    """Whether this is one of jax's own dtypes, such as that of typed PRNG keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))


def is_weak(aval: Any) -> bool:
    """Whether a value takes on the dtype of what it is combined with, as Python numbers do."""
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


def keep(primitive: str) -> None:
    """Let `flatten_calls` keep equations of the primitive of this name as they are."""
    _KEPT.add(primitive)


def is_control_flow(eqn: JaxprEqn) -> bool:
    """Whether the equation is a loop or a choice between branches."""
    return eqn.primitive.name in ("cond", "scan", "while")


def called(eqn: JaxprEqn) -> tuple[Any, list[Atom]]:
    """The program that a call runs, and the operands that it runs it on."""
    inner = eqn.params[_CALLS[eqn.primitive.name]]
    if eqn.primitive.name != _LINEAR_SOLVE:
        return inner, list(eqn.invars)

    # The operands are the constants of each function, then the right-hand sides. The other functions are derivatives.
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    return inner.solve, [*eqn.invars[start : start + lengths.solve], *eqn.invars[sum(lengths) :]]


def with_called(eqn: JaxprEqn, inner: Any) -> JaxprEqn:
    """A call of another program of the same type."""
    name = eqn.primitive.name
    held = eqn.params[_CALLS[name]]._replace(solve=inner) if name == _LINEAR_SOLVE else inner
    new: JaxprEqn = eqn.replace(params={**eqn.params, _CALLS[name]: held})
    return new


def with_bodies(eqn: JaxprEqn, bodies: Mapping[str, Any]) -> JaxprEqn:
    """The equation with these programs, or tuples of programs, as parameters; itself, if they are its own.

    Planning knows equations and bodies by identity.
    """

    def is_own(name: str) -> bool:
        old, new = eqn.params[name], bodies[name]
        return all(a is b for a, b in zip(old, new, strict=True)) if isinstance(old, tuple) else old is new

    if all(is_own(name) for name in bodies):
        return eqn
    new: JaxprEqn = eqn.replace(params={**eqn.params, **bodies})
    return new


def with_each_body(fun: Callable[[ClosedJaxpr], ClosedJaxpr], eqn: JaxprEqn) -> JaxprEqn:
    """A loop or branches with `fun(program)` for each program inside; itself, if these are the same programs."""
    bodies: dict[str, Any] = {}
    for name, value in eqn.params.items():
        if isinstance(value, ClosedJaxpr):
            bodies[name] = fun(value)
        elif name == "branches":
            bodies[name] = tuple(map(fun, value))
    return with_bodies(eqn, bodies)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Number of consts and of carries."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.11 and later
    return len(consts), len(carry)


#: Appears in tracebacks between the frames of the user, whose functions it wraps.
_MARKS_FILE = str(Path(__file__).with_name("gradients.py"))
_LIBRARIES = ("site-packages", "dist-packages")


def source_line(eqn: JaxprEqn) -> str:
    """`file:line` of the user's code that made this equation; frames of installed libraries only if there are no other.

    Libraries of layers are called by the user's code, which is the place that a message should name.
    """
    frames = [frame for frame in frames_of(eqn) if frame.file_name != _MARKS_FILE]
    own = (frame for frame in frames if not any(name in frame.file_name for name in _LIBRARIES))
    found = next(own, next(iter(frames), None))
    if found is None:
        return innermost_line(eqn)
    return f"{found.file_name}:{found.start_line} ({found.function_name})"


def trace_flat(fun: Callable[..., Any], *args: Any) -> tuple[FlatJaxpr, Any]:
    """Trace `fun` on abstract or concrete arguments. Returns the flat program and the pytree of output shapes.

    Copies the NumPy arrays that `fun` captures, so that the program keeps their current values.
    """
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
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
) -> FlatJaxpr:
    """Inline call-like equations, with fresh variables for each of them.

    only_jit: inline jit and the like, but not custom derivatives, remat and primitives of other libraries, so that what
        is left has the derivatives that were defined for it.
    always_barriers: also put a barrier before recomputed blocks that ask for none, because they are in a scan.

    Inlining keeps rematerialisation: the inputs of a recomputed block pass through an `optimization_barrier`, so that
    XLA does not merge the block with the forward computation.

    Primitives that no rule knows, such as those of other libraries, are written out: as the equations that they are
    compiled as, if these are a function of jax, here and in the bodies of loops and branches.
    """
    flattener = _Flattener(_JITS if only_jit else tuple(_CALLS), always_barriers)
    env: dict[Var, Atom] = {var: var for var in (*jaxpr.constvars, *jaxpr.invars)}
    flattener.run(jaxpr.eqns, env, "")
    return FlatJaxpr(
        constvars=(*jaxpr.constvars, *flattener.constvars),
        consts=(*consts, *flattener.consts),
        invars=tuple(jaxpr.invars),
        eqns=tuple(flattener.eqns),
        scopes=tuple(flattener.scopes),
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


class _Flattener:
    """Collects the equations of a program; the consts of inner closed jaxprs become additional constvars."""

    def __init__(self, calls: Sequence[str], always_barriers: bool = False) -> None:
        self.calls, self.always_barriers = calls, always_barriers
        self.writes_out = calls is not _JITS
        self.eqns: list[JaxprEqn] = []
        self.scopes: list[str] = []
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
            elif self.writes_out and (written := _written_out(eqn)) is not None:
                self._replace(eqn, env, own, written)
            elif eqn.primitive.name == "reshard":  # to a mesh of the user; the plan decides on shardings
                env[eqn.outvars[0]] = self.read(env, eqn.invars[0])
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
        self.eqns.append(eqn.replace(invars=[self.read(env, atom) for atom in eqn.invars], outvars=outvars))
        self.scopes.append(scope)
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


def _written_out(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation of a primitive without a rule is compiled as; None if it is kept as it is."""
    if eqn.primitive.name in _KEPT or eqn.effects:
        return None
    compiled = compiled_function(eqn.primitive)
    if compiled is None:
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


def _is_to_be_written_out(eqns: Iterable[JaxprEqn]) -> bool:
    """Whether equations, or those inside them, have a primitive that is written out."""
    for eqn in eqns:
        if is_call(eqn) or is_control_flow(eqn):
            if any(_is_to_be_written_out(inner.eqns) for inner in sub_jaxprs(eqn)):
                return True
        elif eqn.primitive.name not in _KEPT and compiled_function(eqn.primitive) is not None:
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


def eval_equation(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
    """Bind the equation's primitive again on new arguments; new equations keep the source line of the old one."""
    out = bind_again(eqn, args, eqn.params if params is None else params)
    return list(out) if eqn.primitive.multiple_results else [out]


def eval_on_shards(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """`eval_equation` in the program of one device, where shardings on a mesh of the user have no meaning."""
    if is_constraint(eqn):
        return list(args)
    local = {name: None if isinstance(value, jax.sharding.Sharding) else value for name, value in params.items()}
    return eval_equation(eqn, args, local)


def is_gradient_marker(eqn: JaxprEqn) -> bool:
    """Whether this marks where a gradient is summed over devices, once for all micro-batches."""
    return eqn.primitive.name == "minialpa_gradient"


def is_constraint(eqn: JaxprEqn) -> bool:
    """Whether this is `jax.lax.with_sharding_constraint`."""
    return eqn.primitive.name == "sharding_constraint"


def eval_flat(flat: FlatJaxpr, args: Sequence[Any]) -> list[Any]:
    """Run a flat program on values or tracers."""
    env: dict[Var, Any] = dict(zip(flat.constvars, flat.consts, strict=True))
    env.update(zip(flat.invars, args, strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in flat.eqns:
        out = eval_equation(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in flat.outvars]


class EquationMaker:
    """Makes equations and caches what jax says about each kind of them.

    The cache holds for one configuration of jax.
    """

    def __init__(self) -> None:
        self._avals: dict[Hashable, Sequence[Any]] = {}
        self._flat: dict[Hashable, FlatJaxpr] = {}

    def rebuild(self, eqn: JaxprEqn, invars: Sequence[Atom], params: Mapping[str, Any] | None = None) -> JaxprEqn:
        """The same primitive on other operands, with fresh result variables of the shapes that follow."""
        new_params = dict(eqn.params) if params is None else dict(params)
        operands = tuple(atom.aval for atom in invars)
        try:
            key = (eqn.primitive, tuple(new_params.items()), operands, settings_of(eqn))
            if key not in self._avals:
                self._avals[key] = result_avals(eqn, operands, new_params)
            avals = self._avals[key]
        except TypeError:  # a parameter that cannot be hashed
            avals = result_avals(eqn, operands, new_params)
        outvars = [fresh_var(aval) for aval in avals]
        new: JaxprEqn = eqn.replace(invars=list(invars), outvars=outvars, params=new_params)
        return new

    def compute(self, key: Hashable, fun: Callable[..., Any], *operands: Atom) -> tuple[list[JaxprEqn], list[Atom]]:
        """`equations_for`, cached by `key` and operand types: functions with equal keys must do the same."""
        kind = key, tuple(atom.aval for atom in operands)
        if kind not in self._flat:
            self._flat[kind] = _flat_of(fun, operands)
        return _on_atoms(self._flat[kind], operands)


def equations_for(fun: Callable[..., Any], *operands: Atom) -> tuple[list[JaxprEqn], list[Atom]]:
    """Equations that compute `fun` on existing atoms, and the atoms of its results."""
    return _on_atoms(_flat_of(fun, operands), operands)


def _flat_of(fun: Callable[..., Any], operands: Sequence[Atom]) -> FlatJaxpr:
    flat, _ = trace_flat(fun, *[jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in operands])
    assert not flat.constvars, flat.constvars
    return flat


def _on_atoms(flat: FlatJaxpr, operands: Sequence[Atom]) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations of a program on these operands, with fresh variables."""
    env: dict[Var, Atom] = dict(zip(flat.invars, operands, strict=True))

    def read(atom: Atom) -> Atom:
        return atom if is_literal(atom) else env[atom]

    eqns = []
    for eqn in flat.eqns:
        outvars = [fresh_var(var.aval) for var in eqn.outvars]
        eqns.append(eqn.replace(invars=[read(atom) for atom in eqn.invars], outvars=outvars))
        env.update(zip(eqn.outvars, outvars, strict=True))
    return eqns, [read(atom) for atom in flat.outvars]


def unary_equation(fun: Callable[[Any], Any]) -> Callable[[Var], tuple[JaxprEqn, Var]]:
    """A function that makes the equation `fun(operand)` and its result variable.

    `fun` must be one equation of one array. It is traced once for each shape and dtype.
    """
    known: dict[tuple[tuple[int, ...], str], JaxprEqn] = {}

    def make(operand: Var) -> tuple[JaxprEqn, Var]:
        key = shape_of(operand), dtype_name(operand)
        if key not in known:
            ((known[key],), _) = equations_for(fun, operand)
        result = fresh_var(known[key].outvars[0].aval)
        return known[key].replace(invars=[operand], outvars=[result]), result

    return make


def flat_body(jaxpr: Jaxpr, consts: Sequence[Any]) -> FlatJaxpr:
    """The body of a loop or branch as equations, without those that a checkpoint computes again and nothing reads."""
    flat = flatten_calls(jaxpr, consts)
    live = live_equations(flat.eqns, flat.outvars)
    pairs = [pair for pair, keep in zip(zip(flat.eqns, flat.scopes, strict=True), live, strict=True) if keep]
    return replace(flat, eqns=tuple(eqn for eqn, _ in pairs), scopes=tuple(scope for _, scope in pairs))


def live_equations(eqns: Sequence[JaxprEqn], outputs: Iterable[Atom]) -> list[bool]:
    """Which equations are needed for `outputs`; equations with side effects always are."""
    needed = {atom for atom in outputs if not is_literal(atom)}
    is_live = [False] * len(eqns)
    for i in range(len(eqns) - 1, -1, -1):
        if eqns[i].effects or any(var in needed for var in eqns[i].outvars):
            is_live[i] = True
            needed.update(operand_vars(eqns[i]))
    return is_live


_TAG = re.compile(r"minialpa\.(\d+)\.(\d+)\.(\d+)")


def tag_scope(call: int, layer: int, index: int) -> str:
    """Name scope for forward equation `index`, in `layer`, of gradient call number `call` of a step."""
    return f"minialpa.{call}.{layer}.{index}"


def read_tag(scope: str) -> tuple[int, int, int] | None:
    """(call, layer, index) of the innermost tag of a scope. Autodiff keeps scopes, also in backward equations."""
    found = _TAG.findall(scope)
    return (int(found[-1][0]), int(found[-1][1]), int(found[-1][2])) if found else None


def is_transposed(scope: str) -> bool:
    """Whether autodiff made this equation in the backward pass."""
    return "transpose(" in scope


def is_second_derivative(scope: str) -> bool:
    """Whether autodiff made this equation from a backward pass."""
    return "(transpose(" in scope
