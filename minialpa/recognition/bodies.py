"""Rewrites the bodies of scans, loops and branches, for attentions: equations of a program in, new ones out.

A scan over layers and the scan of its derivative are rewritten together. A row that the first stacks and the second
reads is a value of the same iteration, so one iteration of both is one program in two sections:

    first     p = softmax(q k), out = p v     stacks p
    second    reads p                         gradients of q, k, v

The new first scan stacks the log sum exp and the result instead of p, so memory grows linearly with the number of
positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from minialpa.ir.block import Block
from minialpa.ir.equations import (
    Atom,
    aval_of,
    fresh_var,
    live_equations,
    operand_vars,
    scan_counts,
    sub_jaxprs,
    type_of,
    with_each_body,
)
from minialpa.recognition.rewriting import NewEquation, Written
from minialpa.recognition.scan_bodies import Body, read_body, run, scan_of, variables_in, with_rows
from minialpa.tracing.flattening import flatten_calls

#: From equations, their results, `Written`, and the section of each equation (empty for one section), to the equations
#: in their place; None if they stay.
Rewrite = Callable[[Sequence[JaxprEqn], Sequence[Atom], Written, Sequence[int]], list[NewEquation] | None]
#: For the number of an equation, the equations that replace it.
Changed = dict[int, list[JaxprEqn]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    eqns: Sequence[JaxprEqn]
    outvars: Sequence[Atom]
    written: Written
    rewrite: Rewrite

    def rewritten(self, section: Sequence[int] = ()) -> list[NewEquation] | None:
        """Without bodies; None if they stay."""
        return self.rewrite(self.eqns, self.outvars, self.written, section)


def with_rewritten_bodies(flat: Block, outvars: Sequence[Atom], rewrite: Rewrite) -> list[NewEquation] | None:
    """None if they stay."""
    written = Written(consts=dict(zip(flat.constvars, flat.consts, strict=True)))
    return _rewritten_in_bodies(_Program(eqns=flat.eqns, outvars=outvars, written=written, rewrite=rewrite))


def _rewritten_in_bodies(program: _Program) -> list[NewEquation] | None:
    eqns = program.eqns
    if not any(sub_jaxprs(eqn) for eqn in eqns):
        return None
    producers = {**program.written.producers, **{var: eqn for eqn in eqns for var in eqn.outvars}}
    program = replace(program, written=replace(program.written, producers=producers))

    changed: Changed = {}
    partner = _partners(eqns)
    done_with_partner = set(partner.values())
    for i in range(len(eqns)):
        if i in partner:
            changed |= _changed_pair(program, i, partner[i])
        elif i not in done_with_partner:
            changed |= _changed_alone(program, i)
    if not changed:
        return None

    # A scan may have stacked an array that lost its readers.
    new = [NewEquation(eqn=one, place=i) for i, eqn in enumerate(eqns) for one in changed.get(i, [eqn])]
    is_live = live_equations([one.eqn for one in new], program.outvars)
    return [one for one, live in zip(new, is_live, strict=True) if live]


def _partners(eqns: Sequence[JaxprEqn]) -> dict[int, int]:
    """For each scan, a later scan of the same length that reads its stacks."""
    scan_of_array: dict[Var, int] = {}
    found: dict[int, int] = {}
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name != "scan":
            continue
        n_consts, n_carry = scan_counts(eqn)
        stacked = variables_in(eqn.invars[n_consts + n_carry :])
        sources = Counter(scan_of_array[var] for var in stacked if var in scan_of_array)
        for k, _ in sources.most_common(1):
            if eqns[k].params["length"] == eqn.params["length"] and k not in found and k not in found.values():
                found[k] = i
        scan_of_array.update((var, i) for var in eqn.outvars[n_carry:])
    return found


def _changed_alone(program: _Program, i: int) -> Changed:
    eqn = program.eqns[i]
    if eqn.primitive.name == "scan":
        scan = _scan_alone(program, eqn)
        return {} if scan is None else {i: scan}
    changed = with_each_body(lambda closed: _with_equations(closed, program.rewrite), eqn)
    return {} if changed is eqn else {i: [changed]}


def _changed_pair(program: _Program, i: int, k: int) -> Changed:
    together = _scan_pair(program, i, k)
    return {**_changed_alone(program, i), **_changed_alone(program, k)} if together is None else together


# ---- loops and branches --------------------------------------------------------------------------------------------


def _with_equations(closed: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
    flat = flatten_calls(closed.jaxpr, tuple(closed.consts))
    consts = dict(zip(flat.constvars, flat.consts, strict=True))
    written = Written(consts=consts)
    new = _rewritten_everywhere(_Program(eqns=flat.eqns, outvars=flat.outvars, written=written, rewrite=rewrite))
    if new is None:
        return closed

    def compute(*arrays: Any) -> list[Any]:
        return run(new, flat.outvars, {**consts, **dict(zip(flat.invars, arrays, strict=True))})

    structs = [type_of(aval_of(var)) for var in flat.invars]
    made = jax.make_jaxpr(compute)(*structs)
    same = [a.shape == b.shape and a.dtype == b.dtype for a, b in zip(made.out_avals, closed.out_avals, strict=True)]
    return made if all(same) and not made.consts else closed


def _rewritten_everywhere(program: _Program) -> list[JaxprEqn] | None:
    """Also inside bodies; None if they stay."""
    own = program.rewritten()
    chosen = list(program.eqns) if own is None else [one.eqn for one in own]
    inner = _rewritten_in_bodies(replace(program, eqns=chosen))
    if inner is not None:
        return [one.eqn for one in inner]
    return None if own is None else chosen


# ---- scans ---------------------------------------------------------------------------------------------------------


def _scan_alone(program: _Program, eqn: JaxprEqn) -> list[JaxprEqn] | None:
    body = read_body(eqn, {})
    new = _rewritten_everywhere(_program_of_bodies(program, body.eqns, body.results, body))
    return None if new is None else scan_of(replace(body, eqns=tuple(new)))


def _program_of_bodies(program: _Program, eqns: Sequence[JaxprEqn], results: Sequence[Atom], *bodies: Body) -> _Program:
    """It knows the captured arrays of the bodies."""
    consts = dict(program.written.consts)
    for body in bodies:
        consts |= body.consts
    return replace(program, eqns=eqns, outvars=results, written=replace(program.written, consts=consts))


def _scan_pair(program: _Program, i: int, k: int) -> Changed | None:
    """Scans i and k, which reads stacks of i, rewritten together; the new first scan stacks only what has a reader."""
    first = read_body(program.eqns[i], {})
    second = read_body(program.eqns[k], {array: atom for atom, array in first.stacked})
    first_only = replace(first, stacked=_stacks_read_elsewhere(program, first, k))

    n = len(first.eqns)
    results = [*first_only.results, *second.results]
    both = _program_of_bodies(program, [*first.eqns, *second.eqns], results, first, second)
    new = both.rewritten(section=[0] * n + [1] * len(second.eqns))
    if new is None:
        return None
    first = replace(first, eqns=tuple(one.eqn for one in new if one.place < n))
    second = replace(second, eqns=tuple(one.eqn for one in new if one.place >= n))

    # The second body reads rows of arrays: inputs of the first scan, or stacks that it makes.
    array_of_row = dict(first.rows)
    read = second.read
    shared = [var for var in first.variables if var in read]
    made = {var: _stacked_array(var, first) for var in shared if var not in array_of_row}
    arrays = array_of_row | made
    first = replace(first, stacked=tuple(dict.fromkeys([*first_only.stacked, *made.items()])))
    second = with_rows(second, [(var, fresh_var(aval_of(var)), arrays[var]) for var in shared])
    return {i: scan_of(first), k: scan_of(second)}


def _stacks_read_elsewhere(program: _Program, first: Body, k: int) -> tuple[tuple[Atom, Var], ...]:
    """Stacks of the first scan with a reader other than the rows of scan k."""
    n_consts, n_carry = scan_counts(program.eqns[k])
    read = {var for j, eqn in enumerate(program.eqns) if j != k for var in operand_vars(eqn)}
    read.update(variables_in([*program.outvars, *program.eqns[k].invars[: n_consts + n_carry]]))
    return tuple((atom, array) for atom, array in first.stacked if array in read)


def _stacked_array(var: Var, body: Body) -> Var:
    """It may exist already."""
    known = next((array for atom, array in body.stacked if atom is var), None)
    if known is not None:
        return known
    aval = aval_of(var)
    struct = jax.ShapeDtypeStruct((body.eqn.params["length"], *aval.shape), aval.dtype)
    return fresh_var(jax.make_jaxpr(lambda x: x)(struct).jaxpr.invars[0].aval)
