"""Rules from rules: that of an operation under `vmap`, and that of its derivative.

The rule of an operation and the shapes of a call go in; a rule for calls of these shapes comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minialpa.rules.factors import Shapes
from minialpa.rules.sharding_rule import ArrayRule, ShardingRule


def batched_rule(rule: ShardingRule, is_batched: Sequence[bool], operands: Shapes, results: Shapes) -> ShardingRule:
    """The rule under `vmap`: one more leading factor, of the operands that are batched and of all results.

    operands, results: the shapes without the new dimension.
    """
    named = rule.named_factors(operands, results, rule.text)
    new = next(name for name in (f"batch{i}" for i in range(len(named.sizes) + 1)) if name not in named.sizes)

    def array(own: ArrayRule, shape: Sequence[int], batched: bool) -> ArrayRule:
        dims = own.of_shape(shape).dims
        return ArrayRule(None, ((new,), *dims) if batched else dims)

    return replace(
        rule,
        operands=tuple(map(array, rule.operands, operands, is_batched)),
        results=tuple(array(own, shape, True) for own, shape in zip(rule.results, results, strict=True)),
    )


def derivative_rule(
    rule: ShardingRule, operands: Shapes, results: Shapes, inexact: tuple[Sequence[int], Sequence[int]]
) -> ShardingRule:
    """The rule of the derivative of an operation: operands and cotangents of results in, cotangents of operands out.

    If shards of the operands give shards or summands of the results, a shard's cotangents are those of its own
    operands, and an operand that all shards read has the sum of their cotangents. Other reductions have no such rule.

    inexact: the numbers of the operands and of the results that have cotangents.
    """
    named = rule.named_factors(operands, results, rule.text)
    how = dict(rule.reductions)
    blocked = named.blocked() | {name for name in named.sizes if how.get(name, "sum") != "sum"}

    read = tuple(map(ArrayRule.of_shape, rule.operands, operands))
    made = tuple(map(ArrayRule.of_shape, rule.results, results))
    of_operands, of_results = inexact
    return ShardingRule(
        text=f"derivative of {rule.text}",
        operands=(*read, *(made[r] for r in of_results)),
        results=tuple(read[k] for k in of_operands),
        reductions=tuple((name, "sum") for name in named.sizes if name not in blocked),
        replicated=tuple(sorted(blocked)),
        sizes=rule.sizes,
    )
