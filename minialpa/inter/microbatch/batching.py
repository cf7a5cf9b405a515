"""Which values of a step depend on the examples, and how: the analysis behind micro-batches and data parallelism.

In: a flat full-batch program and the batch dimension of each input. Out: for each variable one of
  * absent: the same for every micro-batch (parameters, keys, constants, and what is computed from them);
  * an int d: dimension d holds the examples;
  * AGGREGATE: computed from examples by a reduction over them (losses, gradients, batch statistics).
The batch dimension is followed through each equation by its rule of named factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from jax.extend.core import JaxprEqn, Var

from minialpa.errors import TraceError
from minialpa.rules import table as _rules  # noqa: F401  (registers the rules)
from minialpa.rules.factors import Factors, factors_of
from minialpa.tracing.jaxprs import is_literal, operand_vars, source_line
from minialpa.tracing.trace import TracedStep

AGGREGATE: Final = "aggregate"
Kind = int | Literal["aggregate"]
Kinds = dict[Var, Kind]


def batch_factors(eqn: JaxprEqn, factors: Factors, kinds: Kinds, n: int) -> tuple[int, ...]:
    """The factors of `eqn` that hold the examples. Raises TraceError where they cannot be told apart.

    There is one, or several that no array has two of, such as those of two independent arrays carried by one loop.
    n: number of micro-batches, which must divide each factor into contiguous blocks.
    """
    found: dict[int, None] = {}
    for k, atom in enumerate(eqn.invars):
        kind = None if is_literal(atom) else kinds.get(atom)
        if not isinstance(kind, int):
            continue
        leading = factors.leading_factor(k, kind)
        if leading is None:
            leading = next(iter(factors.operands[k][kind]), None)
        if leading is None or leading in factors.blocked or not factors.may_split(leading, n):
            raise TraceError(
                f"`{eqn.primitive.name}` at {source_line(eqn)} mixes the examples of a batch (operand {k}, dimension "
                f"{kind}), so it cannot run on one micro-batch at a time. Use `num_micro_batches=1`, or move it out of "
                "the gradient computation."
            )
        found[leading] = None
    for array in (*factors.operands, *factors.results):
        _check_apart(eqn, [f for f in found if any(f in dim for dim in array)])
    for r in range(len(factors.results)):
        _check_apart(eqn, [f for f in found if factors.affects(f, r)])
    return tuple(found)


def _check_apart(eqn: JaxprEqn, meeting: Sequence[int]) -> None:
    if len(meeting) > 1:
        raise TraceError(
            f"`{eqn.primitive.name}` at {source_line(eqn)} pairs examples of the batch with each other, so "
            "micro-batches would change its meaning. Use `num_micro_batches=1`."
        )


def result_kind(factors: Factors, split: Sequence[int], result: int) -> Kind | None:
    """Kind of a result of an equation whose batch factors are `split`; None if it does not depend on examples."""
    for d, dim in enumerate(factors.results[result]):
        if any(f in dim for f in split):
            return d
    return AGGREGATE if any(factors.affects(f, result) for f in split) else None


def dim_of(dims: Sequence[tuple[int, ...]], factors: Sequence[int]) -> int | None:
    """The dimension that has one of `factors`."""
    return next((d for d, dim in enumerate(dims) if any(f in dim for f in factors)), None)


def is_barrier(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "optimization_barrier"


def batch_kinds(step: TracedStep, n: int) -> Kinds:
    """Kinds of all variables that depend on the batch, for `n` micro-batches; what mixes examples is AGGREGATE."""
    kinds: Kinds = {v: dim for v, dim in zip(step.flat.invars, step.batch_dims, strict=True) if dim is not None}
    for eqn in step.flat.eqns:
        if is_barrier(eqn):
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            kinds.update((out, kinds[v]) for v, out in pairs if not is_literal(v) and v in kinds)
        elif eqn.outvars and any(not is_literal(v) and v in kinds for v in eqn.invars):
            found = zip(eqn.outvars, _result_kinds(eqn, kinds, n), strict=True)
            kinds.update((v, kind) for v, kind in found if kind is not None)
    return kinds


def _result_kinds(eqn: JaxprEqn, kinds: Kinds, n: int) -> list[Kind | None]:
    """Kinds of the results of an equation that reads examples, or totals of them."""
    mine = [kinds[v] for v in operand_vars(eqn) if v in kinds]
    everything: list[Kind | None] = [AGGREGATE] * len(eqn.outvars)
    if all(kind == AGGREGATE for kind in mine):
        return everything
    factors = factors_of(eqn)
    try:
        split = batch_factors(eqn, factors, kinds, n)
    except TraceError:
        return everything
    found = [result_kind(factors, split, r) for r in range(len(eqn.outvars))]
    # What examples do not affect may still depend on an operand that comes from them all.
    all_depend = AGGREGATE in mine or all(kind is None for kind in found)
    return [AGGREGATE if kind is None and all_depend else kind for kind in found]
