"""Integer arrays that are affine in the position: x[i, j, ...] = offset + s_i i + s_j j + ..., as `jnp.arange` is.

`Program.affine` follows the equations that compute an array, as far as they keep it affine and no value overflows, and
answers None for all other arrays. Booleans are integers here, and comparisons that hold everywhere are constants: so
`jnp`'s `where(i < 0, i + n, i)` of positions i is i.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.tracing.jaxprs import Atom, aval_of, called, is_call, is_literal, scan_counts, shape_of

#: Constants of more elements are not looked at.
_MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Affine:
    """offset + sum over d of strides[d] * i_d, at the position i of an array of `shape`."""

    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest value."""
        ends = [stride * (size - 1) for stride, size in zip(self.strides, self.shape, strict=True)]
        return self.offset + sum(min(0, end) for end in ends), self.offset + sum(max(0, end) for end in ends)

    @property
    def constant(self) -> int | None:
        """The one value of all elements, or None."""
        low, high = self.bounds
        return low if low == high else None

    @property
    def dim(self) -> int | None:
        """The dimension along which each value is its own position; None if they are anything else."""
        moving = [d for d, (s, n) in enumerate(zip(self.strides, self.shape, strict=True)) if s and n > 1]
        return moving[0] if len(moving) == 1 and not self.offset and self.strides[moving[0]] == 1 else None


@dataclass(frozen=True, slots=True)
class At:
    """One position of one dimension: what is asked about is the array there, with that dimension of length 1."""

    dim: int
    position: int


@dataclass(frozen=True, slots=True)
class Outside:
    """What an input of a loop's body, of a branch or of a call is in the program around it.

    Attributes:
        atom: the operand.
        is_stacked: whether the input is a slice of it, another one in each iteration.
    """

    atom: Atom
    is_stacked: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Where the variables of one jaxpr come from.

    Attributes:
        producers: the equation that computes each variable.
        values: captured arrays.
        around: the program around this one, or None.
        inputs: what inputs are there; without those that differ between iterations and are no slices.
        branch: of a branch, the atom around it that chooses, and the number that chooses this one; else None.
    """

    producers: Mapping[Var, JaxprEqn]
    values: Mapping[Var, Any]
    around: Program | None = None
    inputs: Mapping[Var, Outside] = field(default_factory=dict)
    branch: tuple[Atom, int] | None = None
    _known: dict[tuple[Var, At | None], Affine | None] = field(default_factory=dict)

    def affine(self, atom: Atom, at: At | None = None) -> Affine | None:
        """`atom` as an affine function of the position, or what is left of it `at` one place; None if it is not one."""
        dtype = getattr(atom.aval, "dtype", None)
        if dtype is None or not (jnp.issubdtype(dtype, np.integer) or dtype == np.bool_) or 0 in shape_of(atom):
            return None
        if is_literal(atom):
            return _of_constant(np.asarray(atom.val), shape_of(atom), at)
        if (atom, at) not in self._known:
            found = self._found(atom, at)
            fits = found is not None and _fits(found, dtype)
            self._known[atom, at] = found if fits else None
        return self._known[atom, at]

    def _found(self, var: Var, at: At | None) -> Affine | None:
        if var in self.inputs:
            return self._of_input(self.inputs[var], at)
        if var in self.values:
            return _of_value(self.values[var], at)

        eqn = self.producers.get(var)
        if eqn is None:
            return None
        r = eqn.outvars.index(var)
        if is_call(eqn):
            inner, operands = called(eqn)
            return _result_inside(self, inner, [Outside(atom) for atom in operands], r, at)
        if eqn.primitive.name == "optimization_barrier":
            return self.affine(eqn.invars[r], at)
        if eqn.primitive.name == "scan":
            return _of_scan(self, eqn, r, at)
        if eqn.primitive.name == "cond":
            found = [_of_branch(self, eqn, k, r, at) for k in range(len(eqn.params["branches"]))]
            return found[0] if all(one == found[0] for one in found) else None
        rule = _RULES.get(eqn.primitive.name)
        return None if rule is None else rule(self, eqn, at)

    def _of_input(self, outside: Outside, at: At | None) -> Affine | None:
        around = self.around
        assert around is not None, outside
        if outside.is_stacked:
            x = around.affine(outside.atom, None if at is None else At(at.dim + 1, at.position))
            is_same = x is not None and (x.strides[0] == 0 or x.shape[0] == 1)
            return Affine(x.offset, x.strides[1:], x.shape[1:]) if x is not None and is_same else None

        # The forward pass of a branch leaves its indices to the backward pass of the same branch, and zeros elsewhere.
        eqn = None if is_literal(outside.atom) else around.producers.get(outside.atom)
        if self.branch is not None and eqn is not None and eqn.primitive.name == "cond":
            index, number = self.branch
            if eqn.invars[0] is index:
                return _of_branch(around, eqn, number, eqn.outvars.index(outside.atom), at)
        return around.affine(outside.atom, at)


def inside(
    closed: Any, around: Program, inputs: Sequence[Outside | None], branch: tuple[Atom, int] | None = None
) -> Program:
    """The program of a jaxpr, closed or not, from what its inputs are in the program around it; None: not known."""
    jaxpr = getattr(closed, "jaxpr", closed)
    known = {var: outside for var, outside in zip(jaxpr.invars, inputs, strict=True) if outside is not None}
    producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    values = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    return Program(producers, values, around, known, branch)


def inputs_of_scan(eqn: JaxprEqn) -> list[Outside | None]:
    """What the inputs of a scan's body are around it; None for carries that change."""
    n_consts, n_carry = scan_counts(eqn)
    jaxpr = eqn.params["jaxpr"].jaxpr
    inputs: list[Outside | None] = [Outside(atom, k >= n_consts + n_carry) for k, atom in enumerate(eqn.invars)]
    for r in range(n_carry):
        if jaxpr.outvars[r] is not jaxpr.invars[n_consts + r]:
            inputs[n_consts + r] = None
    return inputs


def _result_inside(
    around: Program,
    closed: Any,
    inputs: Sequence[Outside | None],
    r: int,
    at: At | None,
    branch: tuple[Atom, int] | None = None,
) -> Affine | None:
    """Result `r` of a jaxpr on these inputs."""
    return inside(closed, around, inputs, branch).affine(getattr(closed, "jaxpr", closed).outvars[r], at)


def _of_branch(around: Program, eqn: JaxprEqn, number: int, r: int, at: At | None) -> Affine | None:
    """Result `r` of a cond that takes one branch."""
    inputs = [Outside(atom) for atom in eqn.invars[1:]]
    return _result_inside(around, eqn.params["branches"][number], inputs, r, at, (eqn.invars[0], number))


def _of_scan(around: Program, eqn: JaxprEqn, r: int, at: At | None) -> Affine | None:
    """Result `r` of a scan: a carry that no iteration changes, or slices that are the same in all iterations."""
    n_consts, n_carry = scan_counts(eqn)
    inputs = inputs_of_scan(eqn)
    if r < n_carry:
        outside = inputs[n_consts + r]
        return None if outside is None else around.affine(outside.atom, at)

    inner = None if at is None or at.dim == 0 else At(at.dim - 1, at.position)
    x = _result_inside(around, eqn.params["jaxpr"], inputs, r, inner)
    n = 1 if at is not None and at.dim == 0 else eqn.params["length"]
    return None if x is None else Affine(x.offset, (0, *x.strides), (n, *x.shape))


def _fits(found: Affine, dtype: Any) -> bool:
    """Whether no value overflows."""
    low, high = found.bounds
    if dtype == np.bool_:
        return low >= 0 and high <= 1
    return int(jnp.iinfo(dtype).min) <= low and high <= int(jnp.iinfo(dtype).max)


# ---- constants -------------------------------------------------------------------------------------------------------


def _of_value(value: Any, at: At | None) -> Affine | None:
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.extended) or not value.is_fully_addressable:
            return None
    elif not isinstance(value, np.ndarray | np.generic | int):
        return None
    return _of_constant(np.asarray(value), np.shape(value), at)


def _of_constant(value: np.ndarray, shape: Sequence[int], at: At | None) -> Affine | None:
    """The affine function that has these values."""
    if value.size == 0 or value.size > _MOST_ELEMENTS:
        return None
    value = np.broadcast_to(value, shape)
    if at is not None:
        value = np.take(value, [at.position], at.dim)

    origin = (0,) * value.ndim
    offset = int(value[origin])
    strides = tuple(
        int(value[(*origin[:d], 1, *origin[d + 1 :])]) - offset if size > 1 else 0 for d, size in enumerate(value.shape)
    )

    # Compared as Python integers would be: a uint64 may be larger than any int64.
    found = Affine(offset, strides, value.shape)
    low, high = found.bounds
    if value.dtype != np.bool_ and not (np.iinfo(np.int64).min <= low and high <= np.iinfo(np.int64).max):
        return None
    expected = np.full(value.shape, offset, np.int64)
    for d, stride in enumerate(strides):
        along = np.arange(value.shape[d], dtype=np.int64) * stride
        expected += along.reshape((-1,) + (1,) * (value.ndim - d - 1))
    return found if np.array_equal(expected, value.astype(np.int64)) else None


# ---- operations ------------------------------------------------------------------------------------------------------

_Rule = Callable[[Program, JaxprEqn, "At | None"], "Affine | None"]
_RULES: dict[str, _Rule] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def register(fun: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, fun))
        return fun

    return register


def _shape(eqn: JaxprEqn, at: At | None) -> tuple[int, ...]:
    """The shape of the result of an equation `at` one place."""
    shape = shape_of(eqn.outvars[0])
    return shape if at is None else (*shape[: at.dim], 1, *shape[at.dim + 1 :])


def _operands(program: Program, eqn: JaxprEqn, at: At | None) -> list[Affine] | None:
    """The operands of an elementwise equation; scalars have the shape of the others."""
    shape, found = _shape(eqn, at), list[Affine]()
    for atom in eqn.invars:
        operand = program.affine(atom, at if shape_of(atom) else None)
        if operand is None:
            return None
        found.append(operand if operand.shape else Affine(operand.offset, (0,) * len(shape), shape))
    return found


def _combined(x: Affine, y: Affine, factor: int) -> Affine:
    """x + factor * y."""
    strides = tuple(s + factor * t for s, t in zip(x.strides, y.strides, strict=True))
    return Affine(x.offset + factor * y.offset, strides, x.shape)


def _same(shape: tuple[int, ...], value: int) -> Affine:
    return Affine(value, (0,) * len(shape), shape)


@_rule("convert_element_type", "copy")
def _unchanged(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    return program.affine(eqn.invars[0], at)


@_rule("iota")
def _iota(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    whole, dim = shape_of(eqn.outvars[0]), eqn.params["dimension"]
    strides = tuple(int(d == dim) for d in range(len(whole)))
    if at is not None and at.dim == dim:
        return _same(_shape(eqn, at), at.position)
    return Affine(0, strides, _shape(eqn, at))


@_rule("add", "sub")
def _sum(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    found = _operands(program, eqn, at)
    return None if found is None else _combined(found[0], found[1], 1 if eqn.primitive.name == "add" else -1)


@_rule("neg")
def _negative(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    found = _operands(program, eqn, at)
    return None if found is None else _combined(_same(found[0].shape, 0), found[0], -1)


@_rule("mul")
def _product(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    found = _operands(program, eqn, at)
    if found is None:
        return None
    for one, other in (found, found[::-1]):
        if other.constant is not None:
            return _combined(_same(one.shape, 0), one, other.constant)
    return None


@_rule("rem")
def _remainder(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """x % n is x where all x are in [0, n)."""
    found = _operands(program, eqn, at)
    if found is None:
        return None
    x, n = found
    return x if x.bounds[0] >= 0 and n.constant is not None and x.bounds[1] < n.constant else None


@_rule("max", "min")
def _extremum(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """One of the operands, if it is the larger or smaller one everywhere."""
    found = _operands(program, eqn, at)
    if found is None:
        return None
    low, high = _combined(found[0], found[1], -1).bounds
    first, second = found if eqn.primitive.name == "max" else found[::-1]
    return first if low >= 0 else second if high <= 0 else None


@_rule("clamp")
def _clamp(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """The array itself, if it is within the limits everywhere."""
    found = _operands(program, eqn, at)
    if found is None:
        return None
    least, x, most = found
    return x if _combined(x, least, -1).bounds[0] >= 0 and _combined(most, x, -1).bounds[0] >= 0 else None


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "ne": operator.ne,
}


@_rule(*_COMPARISONS)
def _comparison(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """True or false, if it is the same everywhere: so it is if the difference is, or has one sign."""
    found = _operands(program, eqn, at)
    if found is None:
        return None
    low, high = _combined(found[0], found[1], -1).bounds
    holds = {_COMPARISONS[eqn.primitive.name](end, 0) for end in (low, high)}
    is_decided = low == high or low > 0 or high < 0 or (eqn.primitive.name not in ("eq", "ne") and len(holds) == 1)
    return _same(found[0].shape, int(holds.pop())) if is_decided else None


@_rule("and", "or")
def _logic(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """One false operand decides "and", and one true operand "or", whatever the other is."""
    if aval_of(eqn.outvars[0]).dtype != np.bool_:
        return None
    found = [program.affine(atom, at if shape_of(atom) else None) for atom in eqn.invars]
    constants = [None if one is None else one.constant for one in found]
    deciding = int(eqn.primitive.name == "or")
    if deciding in constants:
        return _same(_shape(eqn, at), deciding)
    return None if None in constants else _same(_shape(eqn, at), 1 - deciding)


@_rule("not")
def _negation(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    x = program.affine(eqn.invars[0], at)
    is_flag = aval_of(eqn.outvars[0]).dtype == np.bool_
    return _same(x.shape, 1 - x.constant) if is_flag and x is not None and x.constant is not None else None


@_rule("select_n")
def _choice(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    """The case that is chosen everywhere."""
    which = program.affine(eqn.invars[0], at if shape_of(eqn.invars[0]) else None)
    if which is None or which.constant is None or not 0 <= which.constant < len(eqn.invars) - 1:
        return None
    return program.affine(eqn.invars[1 + which.constant], at)


# ---- layout ----------------------------------------------------------------------------------------------------------


@_rule("broadcast_in_dim")
def _broadcast(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    dims, shape = eqn.params["broadcast_dimensions"], shape_of(eqn.invars[0])
    inner = None
    if at is not None and at.dim in dims:
        k = dims.index(at.dim)
        inner = At(k, at.position if shape[k] > 1 else 0)

    x = program.affine(eqn.invars[0], inner)
    if x is None:
        return None
    out = _shape(eqn, at)
    strides = [0] * len(out)
    for stride, size, d in zip(x.strides, shape, dims, strict=True):
        strides[d] = stride if size > 1 else 0
    return Affine(x.offset, tuple(strides), out)


@_rule("transpose")
def _transpose(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    order = eqn.params["permutation"]
    x = program.affine(eqn.invars[0], None if at is None else At(order[at.dim], at.position))
    return None if x is None else Affine(x.offset, tuple(x.strides[d] for d in order), _shape(eqn, at))


@_rule("rev")
def _reverse(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    x = program.affine(eqn.invars[0])
    if x is None:
        return None
    turned = eqn.params["dimensions"]
    strides = tuple(-s if d in turned else s for d, s in enumerate(x.strides))
    return _place(Affine(x.offset + sum(x.strides[d] * (x.shape[d] - 1) for d in turned), strides, x.shape), at)


@_rule("slice")
def _slice(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    starts = eqn.params["start_indices"]
    steps = eqn.params["strides"] or (1,) * len(starts)
    if at is not None:
        inner = At(at.dim, starts[at.dim] + at.position * steps[at.dim])
        starts = tuple(0 if d == at.dim else start for d, start in enumerate(starts))
    x = program.affine(eqn.invars[0], None if at is None else inner)
    if x is None:
        return None
    offset = x.offset + sum(stride * start for stride, start in zip(x.strides, starts, strict=True))
    return Affine(offset, tuple(s * step for s, step in zip(x.strides, steps, strict=True)), _shape(eqn, at))


@_rule("concatenate")
def _concatenate(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    along = eqn.params["dimension"]
    sizes = [shape_of(atom)[along] for atom in eqn.invars]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    if at is not None and at.dim == along:
        k = max(k for k, start in enumerate(starts) if start <= at.position and sizes[k])
        return program.affine(eqn.invars[k], At(along, at.position - starts[k]))

    sized = [(start, atom) for start, atom, size in zip(starts, eqn.invars, sizes, strict=True) if size]
    parts = [(start, program.affine(atom, at)) for start, atom in sized]
    (_, first), *more = parts
    if first is None:
        return None

    # From one part to the next, the step is that inside of the parts.
    step = first.strides[along]
    if first.shape[along] == 1 and more:
        step = 0 if more[0][1] is None else more[0][1].offset - first.offset
    strides = (*first.strides[:along], step, *first.strides[along + 1 :])
    for start, part in parts:
        if part is None or part.offset != first.offset + start * step:
            return None
        if _moving(part) != _moving(Affine(part.offset, strides, part.shape)):
            return None
    return Affine(first.offset, strides, _shape(eqn, at))


def _moving(x: Affine) -> list[int]:
    """The strides, where a dimension is longer than 1."""
    return [stride for stride, size in zip(x.strides, x.shape, strict=True) if size > 1]


@_rule("reshape", "squeeze")
def _reshape(program: Program, eqn: JaxprEqn, at: At | None) -> Affine | None:
    x = program.affine(eqn.invars[0])
    if x is not None:
        return _place(_reshaped(x, shape_of(eqn.outvars[0])), at)

    # A place can be asked for in the last dimension, if it stays the last one.
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if at is None or not before or at.dim != len(after) - 1 or before[-1] != after[-1]:
        return None
    x = program.affine(eqn.invars[0], At(len(before) - 1, at.position))
    return None if x is None else _reshaped(x, _shape(eqn, at))


def _place(x: Affine | None, at: At | None) -> Affine | None:
    """An affine array at one place."""
    if x is None or at is None:
        return x
    one = [(s, n) if d != at.dim else (0, 1) for d, (s, n) in enumerate(zip(x.strides, x.shape, strict=True))]
    return Affine(x.offset + x.strides[at.dim] * at.position, tuple(s for s, _ in one), tuple(n for _, n in one))


def _reshaped(x: Affine, shape: tuple[int, ...]) -> Affine | None:
    """In row-major order, groups of neighbouring dimensions become groups of the same number of elements."""
    before = [(s, n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1]
    after = [(d, n) for d, n in enumerate(shape) if n > 1]
    strides = [0] * len(shape)
    i = j = 0
    while i < len(before):
        end, stop = i + 1, j + 1
        while (p := math.prod(n for _, n in before[i:end])) != (q := math.prod(n for _, n in after[j:stop])):
            end, stop = (end + 1, stop) if p < q else (end, stop + 1)

        # Merged, dimensions must count on where the next inner one ends.
        step = before[end - 1][0]
        if any(s != before[k + 1][0] * before[k + 1][1] for k, (s, _) in enumerate(before[i : end - 1], i)):
            return None
        for k in range(stop - 1, j - 1, -1):
            strides[after[k][0]] = step
            step *= after[k][1]
        i, j = end, stop
    return Affine(x.offset, tuple(strides), shape)
