"""`RULES`: for each primitive, how its result follows from affine operands (`Affine`).

A rule returns None if the result is not affine. A comparison with the same outcome everywhere is a constant. So
`where(i < 0, i + n, i)`, which `jnp` writes around indices, is i for positions i.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import Atom, aval_of, shape_of
from minialpa.tracing.affine import Affine, At, at_place, combined, filled, has_same_values, reshaped, stretched

#: An operand, or its slice, as an affine function.
Read = Callable[[Atom, At | None], Affine | None]
#: (reader of operands, equation, slice of the result) -> the result, or its slice.
Rule = Callable[[Read, JaxprEqn, At | None], Affine | None]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(fun: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, fun))
        return fun

    return register


def _shape(eqn: JaxprEqn, at: At | None) -> tuple[int, ...]:
    shape = shape_of(eqn.outvars[0])
    return shape if at is None else (*shape[: at.dim], 1, *shape[at.dim + 1 :])


def _read_operand(read: Read, atom: Atom, at: At | None) -> Affine | None:
    """Of an elementwise equation; it may have length 1 where the result is longer."""
    shape = shape_of(atom)
    if at is None or not shape:
        return read(atom, None)
    return read(atom, At(at.dim, 0) if shape[at.dim] == 1 else at)


def _elementwise(*names: str) -> Callable[[Callable[..., Affine | None]], Callable[..., Affine | None]]:
    """Register `fun(eqn, *operands)` for elementwise primitives; operands are broadcast first."""

    def register(fun: Callable[..., Affine | None]) -> Callable[..., Affine | None]:
        @_rule(*names)
        def rule(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
            shape, found = _shape(eqn, at), list[Affine]()
            for atom in eqn.invars:
                operand = _read_operand(read, atom, at)
                if operand is None:
                    return None
                found.append(stretched(operand, shape))
            return fun(eqn, *found)

        return fun

    return register


@_rule("convert_element_type", "copy")
def _unchanged(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    return read(eqn.invars[0], at)


@_rule("iota")
def _iota(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    whole, dim = shape_of(eqn.outvars[0]), eqn.params["dimension"]
    if at is not None and at.dim == dim:
        return filled(_shape(eqn, at), at.position)
    return Affine(0, tuple(int(d == dim) for d in range(len(whole))), _shape(eqn, at))


@_elementwise("add", "sub")
def _sum(eqn: JaxprEqn, x: Affine, y: Affine) -> Affine:
    return combined(x, y, 1 if eqn.primitive.name == "add" else -1)


@_elementwise("neg")
def _negative(eqn: JaxprEqn, x: Affine) -> Affine:
    return combined(filled(x.shape, 0), x, -1)


@_elementwise("mul")
def _product(eqn: JaxprEqn, x: Affine, y: Affine) -> Affine | None:
    for one, other in ((x, y), (y, x)):
        if other.constant is not None:
            return combined(filled(one.shape, 0), one, other.constant)
    return None


@_elementwise("max", "min")
def _extremum(eqn: JaxprEqn, x: Affine, y: Affine) -> Affine | None:
    low, high = combined(x, y, -1).bounds
    first, second = (x, y) if eqn.primitive.name == "max" else (y, x)
    return first if low >= 0 else second if high <= 0 else None


@_elementwise("clamp")
def _clamp(eqn: JaxprEqn, least: Affine, x: Affine, most: Affine) -> Affine | None:
    return x if combined(x, least, -1).bounds[0] >= 0 and combined(most, x, -1).bounds[0] >= 0 else None


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "ne": operator.ne,
}


@_elementwise(*_COMPARISONS)
def _comparison(eqn: JaxprEqn, x: Affine, y: Affine) -> Affine | None:
    low, high = combined(x, y, -1).bounds
    holds = {_COMPARISONS[eqn.primitive.name](end, 0) for end in (low, high)}
    is_decided = low == high or low > 0 or high < 0 or (eqn.primitive.name not in ("eq", "ne") and len(holds) == 1)
    return filled(x.shape, int(holds.pop())) if is_decided else None


@_elementwise("not")
def _negation(eqn: JaxprEqn, x: Affine) -> Affine | None:
    is_flag = aval_of(eqn.outvars[0]).dtype == np.bool_
    return filled(x.shape, 1 - x.constant) if is_flag and x.constant is not None else None


@_rule("and", "or")
def _logic(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    if aval_of(eqn.outvars[0]).dtype != np.bool_:
        return None
    found = [_read_operand(read, atom, at) for atom in eqn.invars]
    constants = [None if one is None else one.constant for one in found]
    deciding = int(eqn.primitive.name == "or")
    if deciding in constants:
        return filled(_shape(eqn, at), deciding)
    return None if None in constants else filled(_shape(eqn, at), 1 - deciding)


@_rule("select_n")
def _choice(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    which = read(eqn.invars[0], at if shape_of(eqn.invars[0]) else None)
    if which is None or which.constant is None or not 0 <= which.constant < len(eqn.invars) - 1:
        return None
    return read(eqn.invars[1 + which.constant], at)


# ---- layout ----------------------------------------------------------------------------------------------------------


@_rule("broadcast_in_dim")
def _broadcast(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    dims, shape = eqn.params["broadcast_dimensions"], shape_of(eqn.invars[0])
    inner = None
    if at is not None and at.dim in dims:
        k = dims.index(at.dim)
        inner = At(k, at.position if shape[k] > 1 else 0)

    x = read(eqn.invars[0], inner)
    if x is None:
        return None
    out = _shape(eqn, at)
    strides = [0] * len(out)
    for stride, size, d in zip(x.strides, shape, dims, strict=True):
        strides[d] = stride if size > 1 else 0
    return Affine(x.offset, tuple(strides), out)


@_rule("transpose")
def _transpose(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    order = eqn.params["permutation"]
    x = read(eqn.invars[0], None if at is None else At(order[at.dim], at.position))
    return None if x is None else Affine(x.offset, tuple(x.strides[d] for d in order), _shape(eqn, at))


@_rule("slice")
def _slice(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    starts = eqn.params["start_indices"]
    steps = eqn.params["strides"] or (1,) * len(starts)
    if at is not None:
        inner = At(at.dim, starts[at.dim] + at.position * steps[at.dim])
        starts = tuple(0 if d == at.dim else start for d, start in enumerate(starts))
    x = read(eqn.invars[0], None if at is None else inner)
    if x is None:
        return None
    offset = x.offset + sum(stride * start for stride, start in zip(x.strides, starts, strict=True))
    return Affine(offset, tuple(s * step for s, step in zip(x.strides, steps, strict=True)), _shape(eqn, at))


@_rule("concatenate")
def _concatenate(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """The joined operands, if each continues the one before it."""
    along = eqn.params["dimension"]
    sizes = [shape_of(atom)[along] for atom in eqn.invars]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]

    if at is not None and at.dim == along:
        k = max(k for k, start in enumerate(starts) if start <= at.position and sizes[k])
        return read(eqn.invars[k], At(along, at.position - starts[k]))

    sized = [(start, atom) for start, atom, size in zip(starts, eqn.invars, sizes, strict=True) if size]
    parts = [part for _, atom in sized if (part := read(atom, at)) is not None]
    if len(parts) != len(sized):
        return None

    first = parts[0]
    strides = (*first.strides[:along], _joint_step(parts, along), *first.strides[along + 1 :])
    for (start, _), part in zip(sized, parts, strict=True):
        expected = Affine(first.offset + start * strides[along], strides, part.shape)
        if not has_same_values(part, expected):
            return None
    return Affine(first.offset, strides, _shape(eqn, at))


def _joint_step(parts: Sequence[Affine], along: int) -> int:
    """The stride of the first operand or, if its length is 1, the step to the second operand."""
    first, *more = parts
    return more[0].offset - first.offset if first.shape[along] == 1 and more else first.strides[along]


@_rule("reshape", "squeeze")
def _reshape(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    x = read(eqn.invars[0], None)
    if x is not None:
        return at_place(reshaped(x, shape_of(eqn.outvars[0])), at)

    # A slice along the last dimension, if the reshape keeps that dimension.
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if at is None or not before or at.dim != len(after) - 1 or before[-1] != after[-1]:
        return None
    x = read(eqn.invars[0], At(len(before) - 1, at.position))
    return None if x is None else reshaped(x, _shape(eqn, at))
