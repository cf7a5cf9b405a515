"""Batch kinds: a traced step in, the dependence of each variable on the examples out.

`batch_kinds` gives a variable the kind

  * d, an int: dimension d holds the examples;
  * AGGREGATE: a reduction over examples, or a function of one (losses, gradients, batch statistics);
  * no entry: the same for every micro-batch (functions of parameters, random keys and constants).

Named factors carry the dimension: in x[b, i] @ w[i, o] with kind 0 for x, factor b holds the examples, so the product
has kind 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from jax.extend.core import JaxprEqn, Var

from minialpa.errors import TraceError
from minialpa.ir.equations import Atom, is_literal, operand_vars, shape_of, source_line
from minialpa.rules import table as _rules  # noqa: F401  (registers the rules)
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of
from minialpa.tracing.trace import TracedStep

AGGREGATE: Final = "aggregate"
Kind = int | Literal["aggregate"]
Kinds = dict[Var, Kind]


def batch_factors(eqn: JaxprEqn, factors: Factors, kinds: Kinds, n: int) -> tuple[int, ...]:
    """The factors of `eqn` that hold the examples: one, or several in independent arrays, such as operands of a loop.

    n: number of micro-batches, which must divide each factor into contiguous blocks.
    Raises TraceError if the equation mixes or pairs examples.
    """
    rows = [(k, kind) for k, atom in enumerate(eqn.invars) if isinstance(kind := _kind(atom, kinds), int)]
    found = list(dict.fromkeys(_batch_factor(eqn, factors, k, dim, n) for k, dim in rows))

    # Two factors in one array, or in the operands of one result, would pair examples with each other.
    for array in (*factors.operands, *factors.results):
        _refuse_pairs(eqn, [factor for factor in found if any(factor in dim for dim in array)])
    for r in range(len(factors.results)):
        _refuse_pairs(eqn, [factor for factor in found if factors.affects(factor, r)])
    return tuple(found)


def _kind(atom: Atom, kinds: Kinds) -> Kind | None:
    return None if is_literal(atom) else kinds.get(atom)


def _batch_factor(eqn: JaxprEqn, factors: Factors, k: int, dim: int, n: int) -> int:
    """The leading factor of dimension `dim` of operand `k`, if `n` cuts it."""
    leading = factors.leading_factor(k, dim)
    if leading is None:
        leading = next(iter(factors.operands[k][dim]), None)
    if leading is None or leading in factors.blocked or not factors.may_split(leading, n):
        raise TraceError(
            f"`{eqn.primitive.name}` at {source_line(eqn)} mixes the examples of the batch (dimension {dim} of its "
            f"operand {k}, of shape {shape_of(eqn.invars[k])}), so it cannot run on one micro-batch at a time. Set "
            "`num_micro_batches=1`, or move it out of the gradient computation."
        )
    return leading


def per_example_in(eqn: JaxprEqn, kinds: Kinds) -> list[Var]:
    return [var for var in operand_vars(eqn) if isinstance(kinds.get(var), int)]


def aggregates_in(eqn: JaxprEqn, kinds: Kinds) -> list[Var]:
    return [var for var in operand_vars(eqn) if kinds.get(var) == AGGREGATE]


def _refuse_callback(eqn: JaxprEqn, kinds: Kinds) -> None:
    # A loop or a branch with a callback inside has its effects.
    if eqn.effects and per_example_in(eqn, kinds):
        raise TraceError(
            f"`{eqn.primitive.name}` at {source_line(eqn)} passes values of each example to a Python callback, such as "
            "`jax.debug.print`, which would run once for each micro-batch. Pass a sum or mean over the batch, return "
            "the values from the step and print them there, or set `num_micro_batches=1`."
        )


def _refuse_pairs(eqn: JaxprEqn, factors_in_array: Sequence[int]) -> None:
    if len(factors_in_array) > 1:
        raise TraceError(
            f"`{eqn.primitive.name}` at {source_line(eqn)} pairs examples of the batch with each other, so "
            "micro-batches would change its result. Set `num_micro_batches=1`."
        )


def result_kind(factors: Factors, split: Sequence[int], result: int) -> Kind | None:
    """The kind of a result, given the batch factors `split`; None if it does not depend on examples."""
    for d, dim in enumerate(factors.results[result]):
        if any(factor in dim for factor in split):
            return d
    return AGGREGATE if any(factors.affects(factor, result) for factor in split) else None


def dim_of(dims: Sequence[tuple[int, ...]], factors: Sequence[int]) -> int | None:
    """The dimension with one of `factors`. dims: the factors of each dimension."""
    return next((d for d, dim in enumerate(dims) if any(factor in dim for factor in factors)), None)


def is_barrier(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "optimization_barrier"


def batch_kinds(step: TracedStep, n: int) -> Kinds:
    """The kinds of all variables that depend on the batch, for `n` micro-batches. Mixed examples are AGGREGATE.

    Raises TraceError for a callback into Python that would run on micro-batches.
    """
    kinds: Kinds = {var: dim for var, dim in zip(step.flat.invars, step.batch_dims, strict=True) if dim is not None}
    for eqn in step.flat.eqns:
        if n > 1:
            _refuse_callback(eqn, kinds)
        if is_barrier(eqn):
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            kinds.update((out, kinds[var]) for var, out in pairs if not is_literal(var) and var in kinds)
        elif eqn.outvars and any(not is_literal(var) and var in kinds for var in eqn.invars):
            found = zip(eqn.outvars, _result_kinds(eqn, kinds, n), strict=True)
            kinds.update((var, kind) for var, kind in found if kind is not None)
    return kinds


def _result_kinds(eqn: JaxprEqn, kinds: Kinds, n: int) -> list[Kind | None]:
    operand_kinds = [kinds[var] for var in operand_vars(eqn) if var in kinds]
    all_aggregates: list[Kind | None] = [AGGREGATE] * len(eqn.outvars)
    if all(kind == AGGREGATE for kind in operand_kinds):
        return all_aggregates

    # Without batch factors, each result depends on all examples.
    factors = factors_of(eqn).in_time(eqn)
    try:
        split = batch_factors(eqn, factors, kinds, n)
    except TraceError:
        return all_aggregates

    found = [result_kind(factors, split, r) for r in range(len(eqn.outvars))]
    # A result without a batch factor may still depend on an AGGREGATE operand.
    all_depend = AGGREGATE in operand_kinds or all(kind is None for kind in found)
    return [AGGREGATE if kind is None and all_depend else kind for kind in found]
