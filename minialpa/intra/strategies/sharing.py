"""Equations in; the same equations out, with copies of values that several contractions of a task read.

Each reader of a value pays for resharding it, on an edge of the cost graph. The readers of a copy share one resharding.
The copy itself takes no time in the program.

    y = x @ a; z = x @ b       becomes       x' = copy(x); y = x' @ a; z = x' @ b
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import is_inexact, operand_vars, reading, shape_of
from minialpa.rules.expensive import has_contraction
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.new_equations import unary_equation

#: The `checkpoint_name` of a copy.
_SHARED_NAME = "minialpa_shared"


@dataclass(frozen=True, slots=True)
class Placed:
    """An equation, or a copy of `copied` in front of equation `number`."""

    eqn: JaxprEqn
    number: int
    copied: Var | None = None


def shared_copies() -> Callable[[Var], tuple[JaxprEqn, Var]]:
    """From a value to (the equation that copies it, the copy)."""
    return unary_equation(lambda x: checkpoint_name(x, _SHARED_NAME))


def is_shared_copy(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == _SHARED_NAME


def share_reads(eqns: Sequence[JaxprEqn], tasks: Sequence[Hashable]) -> list[Placed]:
    """`eqns` with the copies, each in front of its first reader. tasks: of each equation; None excludes it."""
    copy_of = shared_copies()
    copies: dict[int, list[Placed]] = defaultdict(list)
    renamed: dict[int, dict[Var, Any]] = defaultdict(dict)

    for var, numbers in _shared_reads(eqns, tasks):
        eqn, copy = copy_of(var)
        first = numbers[0]
        copies[first].append(Placed(with_source_of(eqn, eqns[first]), first, var))
        for i in numbers:
            renamed[i][var] = copy

    placed: list[Placed] = []
    for i, eqn in enumerate(eqns):
        placed += [*copies[i], Placed(reading(eqn, renamed[i]) if i in renamed else eqn, i)]
    return placed


def _shared_reads(eqns: Sequence[JaxprEqn], tasks: Sequence[Hashable]) -> list[tuple[Var, list[int]]]:
    made = {var for eqn, task in zip(eqns, tasks, strict=True) if task is not None for var in eqn.outvars}
    readers: dict[tuple[Var, Hashable], list[int]] = defaultdict(list)

    for i, (eqn, task) in enumerate(zip(eqns, tasks, strict=True)):
        if task is not None and has_contraction(eqn):
            for var in dict.fromkeys(operand_vars(eqn)):
                # Only operands of products: loops around products read other values.
                if var in made and len(shape_of(var)) > 1 and is_inexact(var):
                    readers[var, task].append(i)
    return [(var, numbers) for (var, _), numbers in readers.items() if len(numbers) > 1]
