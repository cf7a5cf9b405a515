"""What several contractions read is resharded once: equations in, the same with copies for them to read out.

The price of resharding is on the edge between a value and each of its readers. Where several matrix products or
convolutions of one task read a value, they read a copy of it, so that its way into their layout is paid for, and gone,
once. The copy costs nothing in the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Var

from minialpa.intra.strategies.strategies import SHARED_NAME, has_contraction
from minialpa.tracing.jaxprs import is_inexact, is_literal, operand_vars, shape_of, unary_equation


@dataclass(frozen=True, slots=True)
class Placed:
    """An equation; `number` of the one that it was, or that it is a copy for; and what is copied, if it is a copy."""

    eqn: JaxprEqn
    number: int
    copied: Var | None = None


def share_reads(eqns: Sequence[JaxprEqn], tasks: Sequence[Hashable]) -> list[Placed]:
    """`eqns` with the copies, each in front of the first equation that reads it.

    tasks: for each equation the task that it belongs to, or None where nothing is shared.
    """
    made = {v for eqn, task in zip(eqns, tasks, strict=True) if task is not None for v in eqn.outvars}
    readers: dict[tuple[Var, Hashable], list[int]] = defaultdict(list)
    for i, (eqn, task) in enumerate(zip(eqns, tasks, strict=True)):
        if task is not None and has_contraction(eqn):
            for v in dict.fromkeys(v for v in operand_vars(eqn) if v in made):
                if len(shape_of(v)) > 1 and is_inexact(v):
                    readers[v, task].append(i)
    copy_of = unary_equation(lambda x: checkpoint_name(x, SHARED_NAME))
    copies: dict[int, list[Placed]] = defaultdict(list)
    renamed: dict[int, dict[Var, Any]] = defaultdict(dict)
    for (v, _), numbers in readers.items():
        if len(numbers) > 1:
            eqn, copy = copy_of(v)
            first = numbers[0]
            copies[first].append(Placed(eqn.replace(source_info=eqns[first].source_info), first, v))
            for i in numbers:
                renamed[i][v] = copy
    out: list[Placed] = []
    for i, eqn in enumerate(eqns):
        out += [*copies[i], Placed(_reading(eqn, renamed[i]) if i in renamed else eqn, i)]
    return out


def _reading(eqn: JaxprEqn, names: dict[Var, Any]) -> JaxprEqn:
    invars = [v if is_literal(v) else names.get(v, v) for v in eqn.invars]
    out: JaxprEqn = eqn.replace(invars=invars)
    return out
