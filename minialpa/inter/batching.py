"""Which values of a step depend on the examples, and how: the analysis behind micro-batches and data parallelism.

In: a flat full-batch program and the batch dimension of each input. Out: for each variable one of
  * absent: the same for every micro-batch (parameters, keys, constants, and what is computed from them);
  * an int d: dimension d holds the examples;
  * AGGREGATE: computed from examples by a reduction over them (losses, gradients, batch statistics).
The batch dimension is followed through each equation by its rule of named factors.
"""

from __future__ import annotations

from typing import Final, Literal

from jax.extend.core import JaxprEqn, Var

from minialpa.errors import TraceError
from minialpa.intra import rules as _rules  # noqa: F401  (registers the rules)
from minialpa.intra.factors import Factors, factors_of
from minialpa.jaxprs import is_literal, source_line
from minialpa.trace import TracedStep

AGGREGATE: Final = "aggregate"
Kind = int | Literal["aggregate"]
Kinds = dict[Var, Kind]


def batch_factor(eqn: JaxprEqn, factors: Factors, kinds: Kinds, n: int) -> int:
    """The factor of `eqn` that holds the examples. Raises TraceError where they cannot be told apart.

    n: number of micro-batches, which must divide the factor into contiguous blocks.
    """
    found: set[int] = set()
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
        found.add(leading)
    if len(found) != 1:
        raise TraceError(
            f"`{eqn.primitive.name}` at {source_line(eqn)} pairs examples of the batch with each other, so micro-batches "
            "would change its meaning. Use `num_micro_batches=1`."
        )
    return found.pop()


def result_kind(factors: Factors, factor: int, result: int) -> Kind:
    """Kind of a result of an equation whose batch factor is `factor`."""
    for d, dim in enumerate(factors.results[result]):
        if factor in dim:
            return d
    return AGGREGATE


def batch_kinds(step: TracedStep, n: int, *, strict: bool = True) -> Kinds:
    """Kinds of all variables that depend on the batch, for `n` micro-batches.

    With `strict` an equation that mixes examples raises TraceError; otherwise its results count as AGGREGATE.
    """
    kinds: Kinds = {}
    for var, dim in zip(step.flat.invars, step.batch_dims, strict=True):
        if dim is not None:
            kinds[var] = dim
    for eqn in step.flat.eqns:
        mine = [kinds[v] for v in eqn.invars if not is_literal(v) and v in kinds]
        if not mine or not eqn.outvars:
            continue
        if all(kind == AGGREGATE for kind in mine):
            kinds.update((v, AGGREGATE) for v in eqn.outvars)
            continue
        factors = factors_of(eqn)
        try:
            factor = batch_factor(eqn, factors, kinds, n)
        except TraceError:
            if strict:
                raise
            kinds.update((v, AGGREGATE) for v in eqn.outvars)
            continue
        kinds.update((v, result_kind(factors, factor, r)) for r, v in enumerate(eqn.outvars))
    return kinds
