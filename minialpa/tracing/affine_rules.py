"""What operations make of arrays that are affine in the position: a rule for each primitive.

A rule reads the operands as `Affine` values, and answers None if the result is no such value. Comparisons that hold
everywhere are constants: so `jnp`'s `where(i < 0, i + n, i)` of positions i is i.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import Atom, aval_of, shape_of
from minialpa.tracing.affine import Affine, At, at_place, combined, filled, has_same_values, reshaped

#: What an operand is as a whole, or at one place.
Read = Callable[[Atom, At | None], Affine | None]
Rule = Callable[[Read, JaxprEqn, At | None], Affine | None]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of the primitives with these names."""

    def register(fun: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, fun))
        return fun

    return register


def _shape(eqn: JaxprEqn, at: At | None) -> tuple[int, ...]:
    """The shape of the result of an equation `at` one place."""
    shape = shape_of(eqn.outvars[0])
    return shape if at is None else (*shape[: at.dim], 1, *shape[at.dim + 1 :])


def _operands(read: Read, eqn: JaxprEqn, at: At | None) -> list[Affine] | None:
    """The operands of an elementwise equation; scalars have the shape of the others."""
    shape, found = _shape(eqn, at), list[Affine]()
    for atom in eqn.invars:
        operand = read(atom, at if shape_of(atom) else None)
        if operand is None:
            return None
        found.append(operand if operand.shape else filled(shape, operand.offset))
    return found


@_rule("convert_element_type", "copy")
def _unchanged(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    return read(eqn.invars[0], at)


@_rule("iota")
def _iota(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    whole, dim = shape_of(eqn.outvars[0]), eqn.params["dimension"]
    strides = tuple(int(d == dim) for d in range(len(whole)))
    if at is not None and at.dim == dim:
        return filled(_shape(eqn, at), at.position)
    return Affine(0, strides, _shape(eqn, at))


@_rule("add", "sub")
def _sum(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    found = _operands(read, eqn, at)
    return None if found is None else combined(found[0], found[1], 1 if eqn.primitive.name == "add" else -1)


@_rule("neg")
def _negative(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    found = _operands(read, eqn, at)
    return None if found is None else combined(filled(found[0].shape, 0), found[0], -1)


@_rule("mul")
def _product(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    found = _operands(read, eqn, at)
    if found is None:
        return None
    for one, other in (found, found[::-1]):
        if other.constant is not None:
            return combined(filled(one.shape, 0), one, other.constant)
    return None


@_rule("rem")
def _remainder(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """x % n is x where all x are in [0, n)."""
    found = _operands(read, eqn, at)
    if found is None:
        return None
    x, n = found
    return x if x.bounds[0] >= 0 and n.constant is not None and x.bounds[1] < n.constant else None


@_rule("max", "min")
def _extremum(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """One of the operands, if it is the larger or smaller one everywhere."""
    found = _operands(read, eqn, at)
    if found is None:
        return None
    low, high = combined(found[0], found[1], -1).bounds
    first, second = found if eqn.primitive.name == "max" else found[::-1]
    return first if low >= 0 else second if high <= 0 else None


@_rule("clamp")
def _clamp(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """The array itself, if it is within the limits everywhere."""
    found = _operands(read, eqn, at)
    if found is None:
        return None
    least, x, most = found
    return x if combined(x, least, -1).bounds[0] >= 0 and combined(most, x, -1).bounds[0] >= 0 else None


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "ne": operator.ne,
}


@_rule(*_COMPARISONS)
def _comparison(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """True or false, if it is the same everywhere: so it is if the difference is, or has one sign."""
    found = _operands(read, eqn, at)
    if found is None:
        return None
    low, high = combined(found[0], found[1], -1).bounds
    holds = {_COMPARISONS[eqn.primitive.name](end, 0) for end in (low, high)}
    is_decided = low == high or low > 0 or high < 0 or (eqn.primitive.name not in ("eq", "ne") and len(holds) == 1)
    return filled(found[0].shape, int(holds.pop())) if is_decided else None


@_rule("and", "or")
def _logic(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """One false operand decides "and", and one true operand "or", whatever the other is."""
    if aval_of(eqn.outvars[0]).dtype != np.bool_:
        return None
    found = [read(atom, at if shape_of(atom) else None) for atom in eqn.invars]
    constants = [None if one is None else one.constant for one in found]
    deciding = int(eqn.primitive.name == "or")
    if deciding in constants:
        return filled(_shape(eqn, at), deciding)
    return None if None in constants else filled(_shape(eqn, at), 1 - deciding)


@_rule("not")
def _negation(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    x = read(eqn.invars[0], at)
    is_flag = aval_of(eqn.outvars[0]).dtype == np.bool_
    return filled(x.shape, 1 - x.constant) if is_flag and x is not None and x.constant is not None else None


@_rule("select_n")
def _choice(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """The case that is chosen everywhere."""
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


@_rule("rev")
def _reverse(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    x = read(eqn.invars[0], None)
    if x is None:
        return None
    turned = eqn.params["dimensions"]
    strides = tuple(-s if d in turned else s for d, s in enumerate(x.strides))
    return at_place(Affine(x.offset + sum(x.strides[d] * (x.shape[d] - 1) for d in turned), strides, x.shape), at)


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
    """The array that goes on from one operand to the next as it does inside of them."""
    along = eqn.params["dimension"]
    sizes = [shape_of(atom)[along] for atom in eqn.invars]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]

    # A place in the joined dimension is in one operand.
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
    """The stride of arrays that are joined along a dimension: that of the first one, or from it to the second."""
    first, *more = parts
    return more[0].offset - first.offset if first.shape[along] == 1 and more else first.strides[along]


@_rule("reshape", "squeeze")
def _reshape(read: Read, eqn: JaxprEqn, at: At | None) -> Affine | None:
    x = read(eqn.invars[0], None)
    if x is not None:
        return at_place(reshaped(x, shape_of(eqn.outvars[0])), at)

    # A place can be asked for in the last dimension, if it stays the last one.
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if at is None or not before or at.dim != len(after) - 1 or before[-1] != after[-1]:
        return None
    x = read(eqn.invars[0], At(len(before) - 1, at.position))
    return None if x is None else reshaped(x, _shape(eqn, at))
