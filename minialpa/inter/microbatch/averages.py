"""Running averages: an equation without examples in; the moments and arguments in which its results are affine, out.

    new state = a * old state + b * moment + c          a, b, c do not depend on the examples

Equations pass on an `AffineValue`, so an average may have any form, such as a decay that is an argument, a choice by a
flag, or several layers in one array.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, aval_of, called, is_call, is_inexact, is_literal
from minialpa.support.identity import ById
from minialpa.tracing.trace import TracedStep

#: Primitives whose results have only entries of their operands.
_MOVES: Final = (
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "dynamic_update_slice",
    "gather",
    "neg",
    "pad",
    "reduce_precision",
    "reshape",
    "rev",
    "scatter",
    "select_n",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
)
_SUMS: Final = ("add", "add_any", "sub")
_SQUARES: Final = ("integer_pow", "square")


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of `x` over the examples, of degree 1, as mean(x), or 2, as mean(x * x).

    `x` is None for any other reduction.
    """

    x: Var | None
    degree: int


@dataclass(frozen=True, slots=True)
class AffineValue:
    """How a value without examples depends on arguments and moments.

    0.9 * state + 0.1 * mean(x) has the input `state` and the moment mean(x). exp(state) has neither.

    Attributes:
        inputs: numbers of the arguments in which the value is affine. Arguments on which it depends otherwise are
            missing.
        moments: all moments on which the value depends, in any form.
    """

    inputs: frozenset[int] = frozenset()
    moments: frozenset[Moment] = frozenset()

    @property
    def arrays(self) -> frozenset[Var | None]:
        return frozenset(moment.x for moment in self.moments)

    @property
    def is_average(self) -> bool:
        return bool(self.inputs) and bool(self.moments) and None not in self.arrays


#: A reduction that is not a moment.
OTHER: Final = AffineValue(moments=frozenset([Moment(None, 1)]))


def result_values(eqn: JaxprEqn, operands: Sequence[AffineValue]) -> list[AffineValue]:
    """The values of the results of an equation that reads no examples."""
    if eqn.primitive.name == "cond":
        index, *others = operands
        branches = [_program_results(branch.jaxpr, others) for branch in eqn.params["branches"]]
        return [_union([_moments_of_selector(index), *results]) for results in zip(*branches, strict=True)]
    if is_call(eqn):
        inner, atoms = called(eqn)
        by_atom = dict(zip(map(ById, eqn.invars), operands, strict=True))
        return _program_results(getattr(inner, "jaxpr", inner), [by_atom[ById(atom)] for atom in atoms])
    return [_result_value(eqn, operands)] * len(eqn.outvars)


def mixes(eqn: JaxprEqn, operands: Sequence[AffineValue], result: AffineValue) -> bool:
    """Whether a result mixes moments of different arrays, or moments with other reductions."""
    if None in result.arrays and len(result.arrays) > 1:
        return True
    is_control = eqn.primitive.name == "cond" or is_call(eqn)
    arrays = {operand.arrays for operand in operands if operand.moments}
    return len(arrays) > 1 and not (result.is_average or is_control or eqn.primitive.name in _MOVES)


def replaced_inputs(step: TracedStep, results: Sequence[AffineValue]) -> list[frozenset[int]]:
    """For each result, the arguments of its type in which it is affine and that it replaces in the next call."""
    invars, outvars = step.flat.invars, step.flat.outvars
    replaced: list[set[int]] = [set() for _ in outvars]
    affine_in = defaultdict[int, list[int]](list)
    for j, value in enumerate(results):
        for i in value.inputs:
            affine_in[i].append(j)
    for i, numbers in affine_in.items():
        array_type = aval_of(invars[i]).shape, aval_of(invars[i]).dtype
        may_replace = [j for j in numbers if (aval_of(outvars[j]).shape, aval_of(outvars[j]).dtype) == array_type]
        # If the step also returns the argument unchanged, other results that add to it are logs.
        unchanged = [j for j in may_replace if results[j] == AffineValue(inputs=frozenset([i]))]
        in_place = [j for j in may_replace if step.layouts[j] == i]
        for j in unchanged or in_place or may_replace:
            replaced[j].add(i)
    return [frozenset(inputs) for inputs in replaced]


def _program_results(jaxpr: Any, operands: Sequence[AffineValue]) -> list[AffineValue]:
    known: dict[Var, AffineValue] = dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Atom) -> AffineValue:
        return AffineValue() if is_literal(atom) else known.get(atom, AffineValue())

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, result_values(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def _result_value(eqn: JaxprEqn, operands: Sequence[AffineValue]) -> AffineValue:
    """The value of each result of an equation without a body."""
    name = eqn.primitive.name
    if name == "select_n":
        return _union([_moments_of_selector(operands[0]), *operands[1:]])
    if name in _MOVES or name in _SUMS:
        # Integers that move floats are positions, as in a gather.
        floats = [value for atom, value in zip(eqn.invars, operands, strict=True) if is_inexact(atom)]
        return _union(floats or operands)

    merged = _union(operands)
    if name in ("mul", "dot_general"):
        first, second = operands
        if first.moments and second.moments:  # mean(x) * mean(x)
            return replace(_with_degree(merged, 2), inputs=frozenset())
        if not merged.moments:  # decay * state
            return replace(merged, inputs=first.inputs | second.inputs)
        # In (1 - decay) * mean(x), `decay` only scales the moment.
        return replace(merged, inputs=first.inputs if first.moments else second.inputs)
    if name == "div":
        return replace(merged, inputs=frozenset() if operands[1].moments else operands[0].inputs)
    if name in _SQUARES:
        return replace(_with_degree(merged, 2), inputs=frozenset())
    return replace(merged, inputs=frozenset())


def _moments_of_selector(index: AffineValue) -> AffineValue:
    """The moments of a branch index or mask. Other reductions in it are only tested, so they are dropped."""
    return AffineValue(moments=frozenset(moment for moment in index.moments if moment.x is not None))


def _union(values: Sequence[AffineValue]) -> AffineValue:
    return AffineValue(
        frozenset[int]().union(*(value.inputs for value in values)),
        frozenset[Moment]().union(*(value.moments for value in values)),
    )


def _with_degree(value: AffineValue, degree: int) -> AffineValue:
    return replace(value, moments=frozenset(replace(moment, degree=degree) for moment in value.moments))
