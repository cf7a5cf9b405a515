"""What several contractions read is resharded once: a split step in, the same with copies for them to read out.

The price of resharding is on the edge between a value and each of its readers. Where several matrix products or
convolutions of one task read a value, they read a copy of it, so that its way into their layout is paid for, and gone,
once. The copy costs nothing in the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.split_step import Op, Phase, SplitStep
from minialpa.intra.strategies import SHARED_NAME, has_contraction
from minialpa.jaxprs import equations_for, is_inexact, is_literal, shape_of


def share_reads(split: SplitStep, *, by_direction: bool) -> SplitStep:
    """Insert the copies. `by_direction`: forward and backward pass are tasks of their own."""
    origins = split.traced.origins

    def task_of(op: Op) -> str:
        return origins[op.source].direction if by_direction and op.source >= 0 else ""

    made = {v for op in split.ops if op.phase is Phase.LOOP for v in op.eqn.outvars}
    readers: dict[tuple[Var, str], list[int]] = defaultdict(list)
    for i, op in enumerate(split.ops):
        if op.phase is Phase.LOOP and has_contraction(op.eqn):
            for v in dict.fromkeys(v for v in op.eqn.invars if not is_literal(v) and v in made):
                if len(shape_of(v)) > 1 and is_inexact(v):
                    readers[v, task_of(op)].append(i)
    copies: dict[int, list[Op]] = defaultdict(list)  # in front of an operation
    renamed: dict[int, dict[Var, Any]] = defaultdict(dict)
    batch_dims = dict(split.batch_dims)
    for (v, _), numbers in readers.items():
        if len(numbers) < 2:
            continue
        (eqn,), (copy,) = equations_for(lambda x: checkpoint_name(x, SHARED_NAME), v)
        first = split.ops[numbers[0]]
        copies[numbers[0]].append(Op(eqn.replace(source_info=first.eqn.source_info), Phase.LOOP, first.source))
        if v in batch_dims:
            batch_dims[copy] = batch_dims[v]
        for i in numbers:
            renamed[i][v] = copy
    ops: list[Op] = []
    for i, op in enumerate(split.ops):
        ops += [*copies[i], replace(op, eqn=_reading(op.eqn, renamed[i])) if i in renamed else op]
    return replace(split, ops=tuple(ops), batch_dims=batch_dims)


def _reading(eqn: JaxprEqn, names: dict[Var, Any]) -> JaxprEqn:
    invars: Sequence[Any] = [v if is_literal(v) else names.get(v, v) for v in eqn.invars]
    out: JaxprEqn = eqn.replace(invars=list(invars))
    return out
