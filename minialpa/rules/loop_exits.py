"""A loop's test and body in; for each condition of the test, the carries that stay constant once it is false, out.

`while any(active): x = where(active, step(x), x)` runs until the last example of a batch has ended. A shard may exit
earlier if the iterations that it skips would not change its carries. `loop_exits` proves that without algebra or
values: equal computations in test and body get equal numbers, and the body is evaluated with

    any(p) is false           -> p is false for each element
    not all(d) is false       -> d is true for each element
    where(p, new, old)        -> old, if p is false
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, dtype_name, is_literal, maker_of, shape_of
from minialpa.tracing.values import ValueNumbering, producers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopExit:
    """Facts about every iteration that begins with a false condition.

    kept: the carries that the iteration does not change.
    read: the carries from which the condition is computed.
    """

    kept: frozenset[int]
    read: frozenset[int]


def conditions(test: Block) -> list[Atom]:
    """The test joins them by `and`."""
    producers = producers_of(test)
    found, todo = [], list(test.outvars)
    while todo:
        atom = todo.pop()
        eqn = maker_of(atom, producers, "and")
        if eqn is not None and not shape_of(atom):
            todo += eqn.invars
        else:
            found.append(atom)
    return found


def loop_exits(test: Block, body: Block, n_carries: int, equal: Sequence[int]) -> dict[Atom, LoopExit]:
    """The exit of each condition of a loop.

    n_carries: the last inputs of `test` and of `body`.
    equal: the first input that is the same array, for each constant of the test and input of the body.
    """
    values = ValueNumbering()
    n_own = len(test.invars) - n_carries
    for k, var in enumerate((*test.invars[:n_own], *body.invars)):
        values.name(var, ("input", equal[k]))
    values.run(test)

    found: dict[Atom, LoopExit] = {}
    for condition in dict.fromkeys(conditions(test)):
        if is_literal(condition):
            continue
        inside = values.copy()
        inside.assume(condition, value=False, producers=producers_of(test))
        inside.run(body)
        carries = body.invars[len(body.invars) - n_carries :]
        pairs = enumerate(zip(carries, body.outvars, strict=True))
        read = _inputs_of(condition, test)
        found[condition] = LoopExit(
            kept=frozenset(i for i, (old, new) in pairs if inside.are_equal(old, new)),
            read=frozenset(i for i, carry in enumerate(carries) if carry in read),
        )
    return found


def counters(body: Block, n_carries: int) -> frozenset[int]:
    """The carries that every iteration raises by 1: of two shards, the later to exit has the larger one."""
    producers = producers_of(body)
    carries = body.invars[len(body.invars) - n_carries :]
    found = set()
    for i, (carry, new) in enumerate(zip(carries, body.outvars, strict=True)):
        eqn = maker_of(new, producers, "add")
        if eqn is None or not any(atom is carry for atom in eqn.invars):
            continue
        # Narrow integers may wrap around.
        is_wide = dtype_name(carry) in ("int32", "int64", "uint32", "uint64")
        if is_wide and any(is_literal(atom) and np.all(np.asarray(atom.val) == 1) for atom in eqn.invars):
            found.add(i)
    return frozenset(found)


def _inputs_of(atom: Atom, part: Block) -> set[Atom]:
    needed = {atom}
    for eqn in reversed(part.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(var for var in eqn.invars if not is_literal(var))
    return needed
