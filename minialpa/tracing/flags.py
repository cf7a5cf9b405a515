"""Loops whose test computes again what a carried flag already says.

A loop over examples may carry a flag for each of them, and have a test that is computed from the other carries:

    while any(c(x)):  x, flag = where(flag, n(x), x), flag and c(n(x))        with flag = c(x) before the loop

Then flag = c(x) before each iteration: where it is set, x becomes n(x) and the flag c(n(x)); elsewhere, both stay.
`with_flags_as_tests` lets the loop test `any(flag)`, which is the same program, and shows that an iteration leaves all
examples as they are whose flag is not set. The loops of equinox have this form. A carry that nothing reads goes, too.
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
    live_equations,
    operand_vars,
    shape_of,
    with_each_body,
)
from minialpa.tracing.flattening import flatten_calls
from minialpa.tracing.values import ELEMENTWISE, Values, producers_of


def with_flags_as_tests(flat: Block) -> Block:
    """The program with loops, those in other loops included, that test a flag where they can."""
    if not any(is_control_flow(eqn) for eqn in flat.eqns):
        return flat

    used = {atom for eqn in flat.eqns for atom in operand_vars(eqn)}
    used.update(atom for atom in flat.outvars if not is_literal(atom))
    values: Values | None = None
    eqns = []
    for eqn in flat.eqns:
        loop = _loop_of(eqn) if eqn.primitive.name == "while" else None
        if loop is not None:
            values = values or _values_of(flat)
            eqn = _tested_by_flag(loop, values, used) or eqn
        eqns.append(with_each_body(_body_with_flags, eqn) if is_control_flow(eqn) else eqn)
    return flat.with_eqns(eqns)


def _values_of(flat: Block) -> Values:
    values = Values()
    for i, var in enumerate(flat.invars):
        values.name(var, ("input", i))
    values.run(flat)
    return values


def _body_with_flags(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A body or branch with loops that test a flag where they can; itself, if no loop in it changes."""
    if not any(is_control_flow(inner) for inner in closed.jaxpr.eqns):
        return closed
    flat = block_of(closed)
    new = with_flags_as_tests(flat)
    if all(after is before for after, before in zip(new.eqns, flat.eqns, strict=True)):
        return closed
    return ClosedJaxpr(closed.jaxpr.replace(eqns=list(new.eqns)), list(closed.consts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """A `while` with a test that is `any` of something for each example.

    Attributes:
        eqn: the loop.
        test: its test, with the constants of the test before the carries.
        body: its body, with the constants of the body before the carries.
        condition: the equation of the test that reduces by `or`.
    """

    eqn: JaxprEqn
    test: Block
    body: Block
    condition: JaxprEqn

    @property
    def n_carries(self) -> int:
        return len(self.eqn.outvars)

    def carries(self, inputs: Sequence[Atom]) -> list[Atom]:
        """The carries among the inputs of the test, of the body or of the loop."""
        return list(inputs[len(inputs) - self.n_carries :])


def _loop_of(eqn: JaxprEqn) -> _Loop | None:
    """The loop, if it may carry a flag that says what its test computes."""
    shapes = {shape_of(var) for var in eqn.outvars if dtype_name(var) == "bool" and shape_of(var)}
    if not shapes or eqn.effects:
        return None
    test, body = (
        flatten_calls(eqn.params[name].jaxpr, tuple(eqn.params[name].consts)) for name in ("cond_jaxpr", "body_jaxpr")
    )
    found = [one for one in test.eqns if one.primitive.name == "reduce_or" and shape_of(one.invars[0]) in shapes]
    if len(found) != 1 or shape_of(found[0].outvars[0]) or is_literal(found[0].invars[0]):
        return None
    return _Loop(eqn=eqn, test=test, body=body, condition=found[0])


def _tested_by_flag(loop: _Loop, values: Values, used: set[Atom]) -> JaxprEqn | None:
    """The loop with a flag as its test, without carries that nothing reads; None if no flag says what it computes.

    values: of the program that the loop is in.
    used: variables of that program that something reads.
    """
    initial = loop.carries(loop.eqn.invars)
    shape = shape_of(loop.condition.invars[0])
    for k, carry in enumerate(loop.carries(loop.body.invars)):
        if dtype_name(carry) != "bool" or shape_of(carry) != shape:
            continue
        if _holds_before(loop, values, initial[k]) and _stays(loop, values, k):
            return _without_dead_carries(_with_test(loop, k), used)
    return None


def _run_test(loop: _Loop, values: Values, carries: Sequence[Atom]) -> int:
    """The number of what the test reduces, for these values of the carries."""
    n_consts = loop.eqn.params["cond_nconsts"]
    numbers = [values.read(atom) for atom in (*loop.eqn.invars[:n_consts], *carries)]
    values.of.update(zip(loop.test.invars, numbers, strict=True))
    values.run(loop.test)
    return values.read(loop.condition.invars[0])


def _holds_before(loop: _Loop, values: Values, flag: Atom) -> bool:
    """Whether the flag is what the test computes before the first iteration."""
    own = values.copy()
    return _run_test(loop, own, loop.carries(loop.eqn.invars)) == own.read(flag)


def _stays(loop: _Loop, values: Values, k: int) -> bool:
    """Whether carry `k` is what the test computes after an iteration, if it is before."""
    iteration = _Iteration(loop, producers_of(loop.body))
    goes_on = _and_of_flag(iteration, k)
    advanced = _advanced_carries(iteration, k)
    return goes_on is not None and advanced is not None and _is_test_of(loop, values, goes_on, advanced)


@dataclass(frozen=True, slots=True)
class _Iteration:
    """What one iteration of a loop makes of its carries, where a copy of a value is the value itself.

    Attributes:
        loop: the loop.
        producers: the equation that makes each variable of the body.
    """

    loop: _Loop
    producers: Mapping[Atom, JaxprEqn]

    @property
    def carries(self) -> list[Atom]:
        """The carries before the iteration; their next values are the results of the body, in the same order."""
        return self.loop.carries(self.loop.body.invars)

    def source(self, atom: Atom) -> Atom:
        """What an atom is a copy of."""
        while (eqn := self._producer(atom)) is not None and eqn.primitive.name == "copy":
            atom = eqn.invars[0]
        return atom

    def made_by(self, primitive: str, atom: Atom) -> JaxprEqn | None:
        """The equation that makes an atom, if it is one of this primitive."""
        eqn = self._producer(self.source(atom))
        return eqn if eqn is not None and eqn.primitive.name == primitive else None

    def _producer(self, atom: Atom) -> JaxprEqn | None:
        return None if is_literal(atom) else self.producers.get(atom)


def _and_of_flag(iteration: _Iteration, k: int) -> Atom | None:
    """X, if carry `k` goes on as `flag and X`; else None."""
    flag = iteration.carries[k]
    last = iteration.made_by("and", iteration.loop.body.outvars[k])
    if last is None:
        return None
    others = [atom for atom in last.invars if iteration.source(atom) is not flag]
    return others[0] if len(others) == 1 else None


def _advanced_carries(iteration: _Iteration, k: int) -> list[Atom] | None:
    """N for each carry that goes on as `where(flag, N, carry)`, and the others as they are before the iteration.

    None if a carry that the test reads neither goes on like this nor stays. `flag` is carry `k`.
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
    """N, if `new` is `where(flag, N, old)` with a flag for each element; else None."""
    select = iteration.made_by("select_n", new)
    if select is None or len(select.invars) != 3 or shape_of(new) != shape_of(flag):
        return None
    which, unset, chosen = select.invars
    return chosen if iteration.source(which) is flag and iteration.source(unset) is old else None


def _is_test_of(loop: _Loop, values: Values, goes_on: Atom, advanced: Sequence[Atom]) -> bool:
    """Whether `goes_on`, a value of the body, is what the test computes of the values `advanced` of the carries."""
    inside = values.copy()
    n_consts = loop.eqn.params["cond_nconsts"]
    constants = loop.eqn.invars[n_consts : len(loop.eqn.invars) - loop.n_carries]
    inside.of.update(zip(loop.body.invars, (inside.read(atom) for atom in constants), strict=False))

    # Nothing is known of the carries in the middle of the loop, so each is a value of its own.
    for i, carry in enumerate(loop.carries(loop.body.invars)):
        inside.name(carry, ("carry", loop, i))
    inside.run(loop.body)
    number = inside.read(goes_on)
    return _run_test(loop, inside, advanced) == number


def _read_by_condition(loop: _Loop) -> list[int] | None:
    """Numbers of the carries that the test reduces a function of; None if that mixes the elements of an array."""
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


def _with_test(loop: _Loop, k: int) -> _Loop:
    """The loop with a test of carry `k`."""
    flag = loop.carries(loop.test.invars)[k]
    condition = loop.condition.replace(invars=[flag])
    test = loop.test.with_eqns([condition if eqn is loop.condition else eqn for eqn in loop.test.eqns])
    return replace(loop, test=test.without_dead_operations(), condition=condition)


def _without_dead_carries(loop: _Loop, used: set[Atom]) -> JaxprEqn:
    """The loop as an equation, without carries that neither the test nor what follows needs."""
    needed = _needed_carries(loop, used)

    def kept(inputs: Sequence[Any]) -> list[Any]:
        n_consts = len(inputs) - loop.n_carries
        return [*inputs[:n_consts], *(inputs[n_consts + i] for i in needed)]

    before = loop.eqn.params["cond_jaxpr"].jaxpr, loop.eqn.params["body_jaxpr"].jaxpr
    test = before[0].replace(
        constvars=list(loop.test.constvars), invars=kept(loop.test.invars), eqns=list(loop.test.eqns),
        outvars=list(loop.test.outvars), debug_info=before[0].debug_info.with_unknown_names(),
    )  # fmt: skip
    eqns, outvars = _body_of_carries(loop, needed)
    body = before[1].replace(
        constvars=list(loop.body.constvars), invars=kept(loop.body.invars), eqns=eqns, outvars=outvars,
        debug_info=before[1].debug_info.with_unknown_names(),
    )  # fmt: skip
    params = dict(
        loop.eqn.params,
        cond_jaxpr=ClosedJaxpr(test, list(loop.test.consts)),
        body_jaxpr=ClosedJaxpr(body, list(loop.body.consts)),
    )
    new: JaxprEqn = loop.eqn.replace(
        invars=kept(loop.eqn.invars), outvars=[loop.eqn.outvars[i] for i in needed], params=params
    )
    return new


def _needed_carries(loop: _Loop, used: set[Atom]) -> list[int]:
    """Numbers of the carries that the test or what follows needs, or that the body needs to compute one of these."""
    read = {atom for eqn in loop.test.eqns for atom in operand_vars(eqn)} | set(loop.test.outvars)
    rows = zip(loop.eqn.outvars, loop.carries(loop.test.invars), strict=True)
    needed = {i for i, (result, tested) in enumerate(rows) if result in used or tested in read}

    carries = loop.carries(loop.body.invars)
    while True:
        eqns, outvars = _body_of_carries(loop, sorted(needed))
        inside = {atom for eqn in eqns for atom in operand_vars(eqn)}
        inside.update(atom for atom in outvars if not is_literal(atom))
        grown = needed | {i for i, carry in enumerate(carries) if carry in inside}
        if grown == needed:
            return sorted(needed)
        needed = grown


def _body_of_carries(loop: _Loop, needed: Sequence[int]) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations of the body that compute the next values of these carries, and the next values."""
    outvars = [loop.body.outvars[i] for i in needed]
    is_live = live_equations(loop.body.eqns, outvars)
    return [eqn for eqn, live in zip(loop.body.eqns, is_live, strict=True) if live], outvars
