"""Functions of one equation of jax: operands, results, types, source line and inner programs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from minialpa.support.private_jax import frames_of, innermost_line

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Atom = Any  # Var | Literal

_LINEAR_SOLVE = "custom_linear_solve"
#: Primitives that only wrap other equations, and the parameter that holds these.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_lin": "call_jaxpr",
    _LINEAR_SOLVE: "jaxprs",  # four functions, of which only `solve` computes anything
}


def aval_of(atom: Atom) -> Any:
    return atom.aval


def is_literal(atom: Atom) -> TypeIs[Literal]:
    return isinstance(atom, Literal)


def operand_vars(eqn: JaxprEqn) -> list[Var]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]  # called most often


def fresh_var(aval: Any) -> Var:
    return Var(aval)


def reading(eqn: JaxprEqn, names: Mapping[Var, Atom]) -> JaxprEqn:
    """The equation with operand `names[v]` for each operand `v` in `names`."""
    copy: JaxprEqn = eqn.replace(invars=renamed(eqn.invars, names))
    return copy


def renamed(atoms: Sequence[Atom], names: Mapping[Var, Atom]) -> list[Atom]:
    return [v if is_literal(v) else names.get(v, v) for v in atoms]


def maker_of(atom: Atom, producers: Mapping[Atom, JaxprEqn], *names: str) -> JaxprEqn | None:
    """The equation that makes the value; None for an input, or if its primitive is not one of `names`."""
    eqn = None if is_literal(atom) else producers.get(atom)
    return eqn if eqn is None or not names or eqn.primitive.name in names else None


def shape_of(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_name(atom: Atom) -> str:
    return _name_of(getattr(atom.aval, "dtype", "token"))


_name_of = functools.lru_cache(str)


def aval_bytes(aval: Any) -> int:
    """Bytes of an array; a typed PRNG key counts as 16 bytes."""
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else math.prod(aval.shape) * _itemsize(dtype)


@functools.lru_cache
def _itemsize(dtype: Any) -> int:
    return 16 if is_extended(dtype) else np.dtype(dtype).itemsize


def is_extended(dtype: Any) -> bool:
    """Whether only jax has this dtype, as for typed PRNG keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))


def is_weak(aval: Any) -> bool:
    """Whether the value takes the dtype of the other operand, as Python numbers do."""
    return bool(getattr(aval, "weak_type", False))


def bytes_of(atom: Atom) -> int:
    return aval_bytes(atom.aval)


def is_in_host(aval: Any) -> bool:
    """Whether an array is in host memory, which devices read over a link."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def device_bytes_of(atom: Atom) -> int:
    """0 in host memory."""
    return 0 if is_in_host(atom.aval) else bytes_of(atom)


def host_bytes_of(atom: Atom) -> int:
    """0 in device memory."""
    return bytes_of(atom) if is_in_host(atom.aval) else 0


def moves_memory(eqn: JaxprEqn) -> bool:
    """Whether an equation moves an array between device and host memory."""
    return eqn.primitive.name == "device_put" and any(
        is_in_host(old.aval) != is_in_host(new.aval) for old, new in zip(eqn.invars, eqn.outvars, strict=True)
    )


def type_of(aval: Any, shape: Sequence[int] | None = None, *, keeps_weak: bool = True) -> Any:
    """Shape, dtype, weak type and memory of an array, without sharding, as an argument for `jax.make_jaxpr`."""
    make = host_type if is_in_host(aval) else jax.ShapeDtypeStruct
    shape = aval.shape if shape is None else tuple(shape)
    return make(shape, aval.dtype, weak_type=keeps_weak and is_weak(aval))


def host_type(shape: Sequence[int], dtype: Any, weak_type: bool = False) -> Any:
    """The type of an array in host memory; `jax.ShapeDtypeStruct` has no memory."""
    return jax.core.ShapedArray(tuple(shape), dtype, weak_type=weak_type, memory_space=jax.memory.Space.Host)


def is_inexact(atom: Atom) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def has_all(wide: Any, narrow: Any) -> bool:
    """Whether `wide` has all floats of `narrow`."""
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return bool(a.nmant >= b.nmant and a.nexp >= b.nexp)


def sub_jaxprs(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Inner programs, such as bodies of scan, while and cond."""
    return tuple(jex.jaxprs_in_params(eqn.params))


def all_equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """The equations of a program, also inside bodies."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in sub_jaxprs(eqn):
            yield from all_equations(body)


def count_equations(eqns: Iterable[JaxprEqn]) -> int:
    """The number of equations, also inside bodies."""
    return sum(1 + sum(count_equations(body.eqns) for body in sub_jaxprs(eqn)) for eqn in eqns)


def is_call(eqn: JaxprEqn) -> bool:
    """Whether an equation only wraps others, as jit and remat do."""
    return eqn.primitive.name in CALLS


def is_control_flow(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("cond", "scan", "while")


def called(eqn: JaxprEqn) -> tuple[Any, list[Atom]]:
    """The program inside a call, and its operands."""
    inner = eqn.params[CALLS[eqn.primitive.name]]
    if eqn.primitive.name != _LINEAR_SOLVE:
        return inner, list(eqn.invars)

    # Operands: the constants of each function, then the right-hand sides.
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    return inner.solve, [*eqn.invars[start : start + lengths.solve], *eqn.invars[sum(lengths) :]]


def with_called(eqn: JaxprEqn, inner: Any) -> JaxprEqn:
    name = eqn.primitive.name
    held = eqn.params[CALLS[name]]._replace(solve=inner) if name == _LINEAR_SOLVE else inner
    new: JaxprEqn = eqn.replace(params={**eqn.params, CALLS[name]: held})
    return new


def with_bodies(eqn: JaxprEqn, bodies: Mapping[str, Any]) -> JaxprEqn:
    """The equation with these programs, or tuples of programs, as parameters.

    Returns the same object if no program changes, since planning compares by identity.
    """

    def is_own(name: str) -> bool:
        old, new = eqn.params[name], bodies[name]
        return all(a is b for a, b in zip(old, new, strict=True)) if isinstance(old, tuple) else old is new

    if all(is_own(name) for name in bodies):
        return eqn
    new: JaxprEqn = eqn.replace(params={**eqn.params, **bodies})
    return new


def with_each_body(fun: Callable[[ClosedJaxpr], ClosedJaxpr], eqn: JaxprEqn) -> JaxprEqn:
    """A loop or branch with `fun(program)` for each inner program; the same object if no program changes."""
    bodies: dict[str, Any] = {}
    for name, value in eqn.params.items():
        if isinstance(value, ClosedJaxpr):
            bodies[name] = fun(value)
        elif name == "branches":
            bodies[name] = tuple(map(fun, value))
    return with_bodies(eqn, bodies)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Numbers of constants and carries."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.11 and later
    return len(consts), len(carry)


#: Wraps functions of the user, so its frames are between frames of the user.
_MARKS_FILE = str(Path(__file__).parents[1] / "tracing" / "gradients.py")
_LIBRARIES = ("site-packages", "dist-packages")


def source_line(eqn: JaxprEqn) -> str:
    """`file:line (function)` of the user's code; a line of a library only if no other is known."""
    frames = [frame for frame in frames_of(eqn) if frame.file_name != _MARKS_FILE]
    user_frames = (frame for frame in frames if not any(name in frame.file_name for name in _LIBRARIES))
    found = next(user_frames, next(iter(frames), None))
    if found is None:
        return innermost_line(eqn)
    return f"{found.file_name}:{found.start_line} ({found.function_name})"


def is_gradient_marker(eqn: JaxprEqn) -> bool:
    """Whether this marks where a gradient is summed over devices, once after all micro-batches."""
    return eqn.primitive.name == "minialpa_gradient"


def is_constraint(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "sharding_constraint"


def live_equations(eqns: Sequence[JaxprEqn], outputs: Iterable[Atom]) -> list[bool]:
    """For each equation, whether `outputs` need it or it has side effects."""
    needed = {atom for atom in outputs if not is_literal(atom)}
    is_live = [False] * len(eqns)
    for i in range(len(eqns) - 1, -1, -1):
        if eqns[i].effects or any(var in needed for var in eqns[i].outvars):
            is_live[i] = True
            needed.update(operand_vars(eqns[i]))
    return is_live
