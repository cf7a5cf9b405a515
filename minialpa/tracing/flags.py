"""`with_flags_as_tests` lets loops over examples test a flag that they carry, and leaves the results unchanged.

A loop over examples may carry a flag for each example, yet compute its test from the other carries:

    while any(c(x)):  x, flag = where(flag, n(x), x), flag and c(n(x))        with flag = c(x) before the loop

Then flag = c(x) before each iteration: where flag is set, x becomes n(x) and flag becomes c(n(x)); elsewhere both stay.
So the loop may test `any(flag)`, which shows that an iteration keeps the examples without a set flag. The loops of
equinox have this form. Carries without readers are removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from minialpa.ir.block import Block, block_of
from minialpa.ir.equations import (
    Atom,
    dtype_name,
    is_control_flow,
    is_literal,
    maker_of,
    operand_vars,
    shape_of,
    with_bodies,
    with_each_body,
)
from minialpa.tracing.flattening import flatten_calls
from minialpa.tracing.values import ELEMENTWISE, ValueNumbering, producers_of


def with_flags_as_tests(flat: Block) -> Block:
    """The program, in which loops test a flag that is proved to equal their test."""
    if not any(is_control_flow(eqn) for eqn in flat.eqns):
        return flat

    used = {atom for eqn in flat.eqns for atom in operand_vars(eqn)}
    used.update(atom for atom in flat.outvars if not is_literal(atom))
    values: ValueNumbering | None = None
    eqns = []
    for eqn in flat.eqns:
        loop = _loop_of(eqn) if eqn.primitive.name == "while" else None
        if loop is not None:
            values = values or _values_of(flat)
            eqn = _tested_by_flag(loop, values, used) or eqn
        eqns.append(with_each_body(_body_with_flags, eqn) if is_control_flow(eqn) else eqn)
    return flat.with_eqns(eqns)


def _values_of(flat: Block) -> ValueNumbering:
    values = ValueNumbering()
    for i, var in enumerate(flat.invars):
        values.name(var, ("input", i))
    values.run(flat)
    return values


def _body_with_flags(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The body, rewritten; the same object if no loop in it changes."""
    if not any(is_control_flow(inner) for inner in closed.jaxpr.eqns):
        return closed
    flat = block_of(closed)
    new = with_flags_as_tests(flat)
    if all(after is before for after, before in zip(new.eqns, flat.eqns, strict=True)):
        return closed
    return ClosedJaxpr(closed.jaxpr.replace(eqns=list(new.eqns)), list(closed.consts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlagLoop:
    """A `while` whose test is `any` of a condition for each example. `condition`: the equation of `test` with `any`."""

    eqn: JaxprEqn
    test: Block
    body: Block
    condition: JaxprEqn

    @property
    def n_carries(self) -> int:
        return len(self.eqn.outvars)

    def carries(self, inputs: Sequence[Atom]) -> list[Atom]:
        return list(inputs[len(inputs) - self.n_carries :])


def _loop_of(eqn: JaxprEqn) -> _FlagLoop | None:
    """The loop, if it carries an array of booleans of the condition's shape."""
    shapes = {shape_of(var) for var in eqn.outvars if dtype_name(var) == "bool" and shape_of(var)}
    if not shapes or eqn.effects:
        return None
    test, body = (
        flatten_calls(eqn.params[name].jaxpr, tuple(eqn.params[name].consts)) for name in ("cond_jaxpr", "body_jaxpr")
    )
    found = [one for one in test.eqns if one.primitive.name == "reduce_or" and shape_of(one.invars[0]) in shapes]
    if len(found) != 1 or shape_of(found[0].outvars[0]) or is_literal(found[0].invars[0]):
        return None
    return _FlagLoop(eqn=eqn, test=test, body=body, condition=found[0])


def _tested_by_flag(loop: _FlagLoop, values: ValueNumbering, used: set[Atom]) -> JaxprEqn | None:
    """The loop with a flag as its test and without dead carries; None if no carry is proved to be the condition.

    values: of the program around the loop.
    used: variables of that program with readers.
    """
    shape = shape_of(loop.condition.invars[0])
    for k, carry in enumerate(loop.carries(loop.body.invars)):
        is_flag = dtype_name(carry) == "bool" and shape_of(carry) == shape
        if is_flag and _holds_before(loop, values, k) and _holds_after(loop, values, k):
            return _without_dead_carries(_with_test(loop, k), used)
    return None


def _run_test(loop: _FlagLoop, values: ValueNumbering, carries: Sequence[Atom]) -> int:
    """The number of the condition's value for these carries."""
    n_consts = loop.eqn.params["cond_nconsts"]
    numbers = [values.read(atom) for atom in (*loop.eqn.invars[:n_consts], *carries)]
    values.of.update(zip(loop.test.invars, numbers, strict=True))
    values.run(loop.test)
    return values.read(loop.condition.invars[0])


def _holds_before(loop: _FlagLoop, values: ValueNumbering, k: int) -> bool:
    """Whether carry `k` equals the condition before the first iteration."""
    copied, initial = values.copy(), loop.carries(loop.eqn.invars)
    return _run_test(loop, copied, initial) == copied.read(initial[k])


def _holds_after(loop: _FlagLoop, values: ValueNumbering, k: int) -> bool:
    """Whether carry `k` equals the condition after an iteration, if it does before."""
    iteration = _Iteration(loop, producers_of(loop.body))
    goes_on = _and_of_flag(iteration, k)
    advanced = _advanced_carries(iteration, k)
    return goes_on is not None and advanced is not None and _is_test_of(loop, values, goes_on, advanced)


@dataclass(frozen=True, slots=True)
class _Iteration:
    """The body of a loop; a copy of a value counts as the value itself."""

    loop: _FlagLoop
    producers: Mapping[Atom, JaxprEqn]

    @property
    def carries(self) -> list[Atom]:
        return self.loop.carries(self.loop.body.invars)

    def source(self, atom: Atom) -> Atom:
        while (eqn := maker_of(atom, self.producers, "copy")) is not None:
            atom = eqn.invars[0]
        return atom

    def made_by(self, primitive: str, atom: Atom) -> JaxprEqn | None:
        """The equation that computes `atom`, if it has this primitive."""
        return maker_of(self.source(atom), self.producers, primitive)


def _and_of_flag(iteration: _Iteration, k: int) -> Atom | None:
    """X, if the next value of carry `k` is `flag and X`."""
    flag = iteration.carries[k]
    last = iteration.made_by("and", iteration.loop.body.outvars[k])
    if last is None:
        return None
    others = [atom for atom in last.invars if iteration.source(atom) is not flag]
    return others[0] if len(others) == 1 else None


def _advanced_carries(iteration: _Iteration, k: int) -> list[Atom] | None:
    """For each carry, N if its next value is `where(flag, N, carry)`, else the carry before the iteration.

    `flag` is carry `k`. None if a carry that the test reads neither has this form nor stays.
    """
    read = _read_by_condition(iteration.loop)
    if read is None:
        return None

    carries = iteration.carries
    advanced = list(carries)
    for i in read:
        new = iteration.loop.body.outvars[i]
        if iteration.source(new) is not carries[i]:
            chosen = _chosen_by(iteration, carries[k], new, carries[i])
            if chosen is None:
                return None
            advanced[i] = chosen
    return advanced


def _chosen_by(iteration: _Iteration, flag: Atom, new: Atom, old: Atom) -> Atom | None:
    """N, if `new` is `where(flag, N, old)` with a flag for each element."""
    select = iteration.made_by("select_n", new)
    if select is None or len(select.invars) != 3 or shape_of(new) != shape_of(flag):
        return None
    which, unset, chosen = select.invars
    return chosen if iteration.source(which) is flag and iteration.source(unset) is old else None


def _is_test_of(loop: _FlagLoop, values: ValueNumbering, goes_on: Atom, advanced: Sequence[Atom]) -> bool:
    """Whether `goes_on`, a value of the body, is the condition for the values `advanced` of the carries."""
    inside = values.copy()
    n_consts = loop.eqn.params["cond_nconsts"]
    constants = loop.eqn.invars[n_consts : len(loop.eqn.invars) - loop.n_carries]
    inside.of.update(zip(loop.body.invars, (inside.read(atom) for atom in constants), strict=False))

    # The carries before the iteration are unknown, so each is a new value.
    for i, carry in enumerate(loop.carries(loop.body.invars)):
        inside.name(carry, ("carry", loop, i))
    inside.run(loop.body)
    number = inside.read(goes_on)
    return _run_test(loop, inside, advanced) == number


def _read_by_condition(loop: _FlagLoop) -> list[int] | None:
    """Numbers of the carries in the condition; None if it mixes elements of an array."""
    condition = loop.condition.invars[0]
    shape, producers = shape_of(condition), producers_of(loop.test)
    carries = loop.carries(loop.test.invars)
    found, seen, todo = [], set(), [condition]
    while todo:
        atom = todo.pop()
        if is_literal(atom) or atom in seen:
            continue
        seen.add(atom)
        if atom in producers:
            eqn = producers[atom]
            is_filled = eqn.primitive.name == "broadcast_in_dim" and not shape_of(eqn.invars[0])
            if not (eqn.primitive.name in ELEMENTWISE or is_filled) or shape_of(atom) not in ((), shape):
                return None
            todo += eqn.invars
        elif atom in carries:
            found.append(carries.index(atom))
    return found


def _with_test(loop: _FlagLoop, k: int) -> _FlagLoop:
    flag = loop.carries(loop.test.invars)[k]
    condition = loop.condition.replace(invars=[flag])
    test = loop.test.with_eqns([condition if eqn is loop.condition else eqn for eqn in loop.test.eqns])
    return replace(loop, test=test.without_dead_operations(), condition=condition)


def _without_dead_carries(loop: _FlagLoop, used: set[Atom]) -> JaxprEqn:
    """The equation of a loop without carries that have no reader."""
    needed = _needed_carries(loop, used)

    def kept(inputs: Sequence[Any]) -> list[Any]:
        n_consts = len(inputs) - loop.n_carries
        return [*inputs[:n_consts], *(inputs[n_consts + i] for i in needed)]

    programs: dict[str, ClosedJaxpr] = {}
    for name, part in (("cond_jaxpr", loop.test), ("body_jaxpr", _body_of_carries(loop, needed))):
        jaxpr = loop.eqn.params[name].jaxpr
        new = jaxpr.replace(
            constvars=list(part.constvars),
            invars=kept(part.invars),
            eqns=list(part.eqns),
            outvars=list(part.outvars),
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        programs[name] = ClosedJaxpr(new, list(part.consts))
    changed = with_bodies(loop.eqn, programs)
    eqn: JaxprEqn = changed.replace(invars=kept(loop.eqn.invars), outvars=[loop.eqn.outvars[i] for i in needed])
    return eqn


def _needed_carries(loop: _FlagLoop, used: set[Atom]) -> list[int]:
    """Numbers of the carries that later equations or the test read, or that the body needs for these."""
    read = {atom for eqn in loop.test.eqns for atom in operand_vars(eqn)} | set(loop.test.outvars)
    pairs = zip(loop.eqn.outvars, loop.carries(loop.test.invars), strict=True)
    needed = {i for i, (result, tested) in enumerate(pairs) if result in used or tested in read}

    carries = loop.carries(loop.body.invars)
    while True:
        body = _body_of_carries(loop, sorted(needed))
        inside = {atom for eqn in body.eqns for atom in operand_vars(eqn)}
        inside.update(atom for atom in body.outvars if not is_literal(atom))
        grown = needed | {i for i, carry in enumerate(carries) if carry in inside}
        if grown == needed:
            return sorted(needed)
        needed = grown


def _body_of_carries(loop: _FlagLoop, needed: Sequence[int]) -> Block:
    return replace(loop.body, outvars=tuple(loop.body.outvars[i] for i in needed)).without_dead_operations()
