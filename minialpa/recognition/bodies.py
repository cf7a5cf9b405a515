"""Attentions in the bodies of scans, loops and branches.

A scan and the scan of its derivative are read together: what the first stacks and the second reads is one value of the
same iteration. So the probabilities that the first leaves for the second become the log sum exp and the result of the
attention, and memory grows linearly with the number of positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.recognition.emission import Operands
from minialpa.recognition.rewriting import NewEquation, Written, rewrite
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.jaxprs import (
    Atom,
    FlatJaxpr,
    aval_of,
    equations_for,
    eval_equation,
    flatten_calls,
    fresh_var,
    is_literal,
    is_weak,
    live_equations,
    operand_vars,
    sub_jaxprs,
)

IsWanted = Callable[[Operands], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """A scan with its body, in which outer arrays stand for themselves.

    Attributes:
        eqn: the scan.
        place: its number.
        carries: variables of the carry, in the body.
        rows: variables of the rows of stacked arrays, in the body, and these arrays.
        eqns: the equations of the body.
        new_carries: the carry for the next iteration.
        stacked: what is stacked, with the variable of the stacked array.
        consts: values of arrays that the body captured.
    """

    eqn: JaxprEqn
    place: int
    carries: tuple[Var, ...]
    rows: tuple[tuple[Var, Atom], ...]
    eqns: tuple[JaxprEqn, ...]
    new_carries: tuple[Atom, ...]
    stacked: tuple[tuple[Atom, Var], ...]
    consts: dict[Var, Any]

    @property
    def own(self) -> dict[Var, None]:
        """The variables of one iteration, in the order in which they are known."""
        made = (var for eqn in self.eqns for var in eqn.outvars)
        return dict.fromkeys([*self.carries, *(var for var, _ in self.rows), *made])


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Number of consts and of carries."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.11 and later
    return len(consts), len(carry)


def with_recognised_bodies(flat: FlatJaxpr, outvars: Sequence[Atom], is_wanted: IsWanted) -> list[NewEquation] | None:
    """The equations of a program with the attentions in their bodies as operations; None if there are none."""
    consts = dict(zip(flat.constvars, flat.consts, strict=True))
    return _in_bodies(flat.eqns, outvars, Written(consts=consts), is_wanted)


def _in_bodies(
    eqns: Sequence[JaxprEqn], outvars: Sequence[Atom], written: Written, is_wanted: IsWanted
) -> list[NewEquation] | None:
    if not any(sub_jaxprs(eqn) for eqn in eqns):
        return None
    producers = {**written.producers, **{var: eqn for eqn in eqns for var in eqn.outvars}}
    written = replace(written, producers=producers)
    partner = _partners(eqns)
    behind = set(partner.values())

    changed: dict[int, list[JaxprEqn]] = {}
    for i, eqn in enumerate(eqns):
        if i in behind or not sub_jaxprs(eqn):
            continue
        if eqn.primitive.name != "scan":
            with_parts = _with_parts(eqn, is_wanted)
            changed |= {} if with_parts is None else {i: [with_parts]}
            continue
        pair = _scan_pair(eqns, outvars, i, partner[i], written, is_wanted) if i in partner else None
        if pair is None:
            for k in (i, partner[i]) if i in partner else (i,):
                alone = _scan_alone(eqns[k], k, written, is_wanted)
                changed |= {} if alone is None else {k: alone}
        else:
            changed |= pair
    if not changed:
        return None

    new = [
        NewEquation(eqn=one, place=i, is_new=i in changed)
        for i, eqn in enumerate(eqns)
        for one in changed.get(i, [eqn])
    ]
    is_live = live_equations([one.eqn for one in new], outvars)
    return [one for one, live in zip(new, is_live, strict=True) if live]


def _partners(eqns: Sequence[JaxprEqn]) -> dict[int, int]:
    """For scans whose rows a later scan of the same length reads: that scan."""
    scan_of: dict[Var, int] = {}
    found: dict[int, int] = {}
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name != "scan":
            continue
        n_consts, n_carry = scan_counts(eqn)
        sources = Counter(scan_of[var] for var in eqn.invars[n_consts + n_carry :] if _is_key(var) and var in scan_of)
        for k, _ in sources.most_common(1):
            if eqns[k].params["length"] == eqn.params["length"] and k not in found and k not in found.values():
                found[k] = i
        scan_of.update((var, i) for var in eqn.outvars[n_carry:])
    return found


def _is_key(atom: Atom) -> bool:
    return not is_literal(atom)


# ---- loops and branches --------------------------------------------------------------------------------------------


def _with_parts(eqn: JaxprEqn, is_wanted: IsWanted) -> JaxprEqn | None:
    """A loop or branches, with the attentions in their bodies as operations."""
    params, is_new = dict(eqn.params), False
    for name, value in eqn.params.items():
        several = isinstance(value, tuple | list)
        parts = list(value) if several else [value]
        if not all(hasattr(part, "jaxpr") and hasattr(part, "consts") for part in parts) or not parts:
            continue
        new = [_with_equations(part, is_wanted) for part in parts]
        if any(part is not None for part in new):
            chosen = [old if part is None else part for old, part in zip(parts, new, strict=True)]
            params[name], is_new = (tuple(chosen) if several else chosen[0]), True
    changed: JaxprEqn = eqn.replace(params=params)
    return changed if is_new else None


def _with_equations(closed: Any, is_wanted: IsWanted) -> Any:
    """A closed jaxpr with its attentions as operations; None if it has none."""
    flat = flatten_calls(closed.jaxpr, tuple(closed.consts))
    new = _recognised(flat.eqns, flat.outvars, Written(consts=dict(zip(flat.constvars, flat.consts, strict=True))),
                      is_wanted)  # fmt: skip
    if new is None:
        return None
    consts = dict(zip(flat.constvars, flat.consts, strict=True))

    def compute(*arrays: Any) -> list[Any]:
        return _run(new, flat.outvars, {**consts, **dict(zip(flat.invars, arrays, strict=True))})

    structs = [
        jax.ShapeDtypeStruct(aval_of(var).shape, aval_of(var).dtype, weak_type=is_weak(aval_of(var)))
        for var in flat.invars
    ]
    made = jax.make_jaxpr(compute)(*structs)
    same = [a.shape == b.shape and a.dtype == b.dtype for a, b in zip(made.out_avals, closed.out_avals, strict=True)]
    return made if all(same) and not made.consts else None


def _recognised(
    eqns: Sequence[JaxprEqn], outvars: Sequence[Atom], written: Written, is_wanted: IsWanted
) -> list[JaxprEqn] | None:
    """Equations with the attentions in them and in their bodies as operations; None if there are none."""
    own = rewrite(eqns, outvars, written, lambda operands, _: is_wanted(operands))
    chosen = list(eqns) if own is None else [one.eqn for one in own]
    inner = _in_bodies(chosen, outvars, written, is_wanted)
    if inner is not None:
        return [one.eqn for one in inner]
    return None if own is None else chosen


def _run(eqns: Sequence[JaxprEqn], outvars: Sequence[Atom], env: dict[Var, Any]) -> list[Any]:
    def read(atom: Atom) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in eqns:
        env.update(zip(eqn.outvars, eval_equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in outvars]


# ---- scans ---------------------------------------------------------------------------------------------------------


def _body(eqn: JaxprEqn, place: int, linked: Mapping[Atom, Atom]) -> _Body:
    """The body of a scan. linked: for stacked arrays, the value of the same iteration that they have rows of."""
    closed = eqn.params["jaxpr"]
    flat = flatten_calls(closed.jaxpr, tuple(closed.consts))
    n_consts, n_carry = scan_counts(eqn)
    carries = [fresh_var(aval_of(var)) for var in flat.invars[n_consts : n_consts + n_carry]]
    rows, values = [], []
    for var, operand in zip(flat.invars[n_consts + n_carry :], eqn.invars[n_consts + n_carry :], strict=True):
        if _is_key(operand) and operand in linked:
            values.append(linked[operand])
            continue
        row = fresh_var(aval_of(var))
        rows.append((row, operand))
        values.append(row)
    names: dict[Var, Atom] = dict(zip(flat.invars, [*eqn.invars[:n_consts], *carries, *values], strict=True))
    names |= {var: fresh_var(aval_of(var)) for var in flat.constvars}

    def read(atom: Atom) -> Atom:
        return atom if is_literal(atom) else names[atom]

    eqns = []
    for one in flat.eqns:
        names |= {var: fresh_var(aval_of(var)) for var in one.outvars}
        eqns.append(one.replace(invars=[read(atom) for atom in one.invars], outvars=[read(v) for v in one.outvars]))
    results = [read(atom) for atom in flat.outvars]
    return _Body(
        eqn=eqn,
        place=place,
        carries=tuple(carries),
        rows=tuple(rows),
        eqns=tuple(eqns),
        new_carries=tuple(results[:n_carry]),
        stacked=tuple(zip(results[n_carry:], eqn.outvars[n_carry:], strict=True)),
        consts={names[var]: value for var, value in zip(flat.constvars, flat.consts, strict=True)},
    )


def _scan_alone(eqn: JaxprEqn, place: int, written: Written, is_wanted: IsWanted) -> list[JaxprEqn] | None:
    body = _body(eqn, place, {})
    outvars = [*body.new_carries, *(atom for atom, _ in body.stacked)]
    new = _recognised(body.eqns, outvars, _with_consts(written, body), is_wanted)
    return None if new is None else _new_scan(replace(body, eqns=tuple(new)))


def _with_consts(written: Written, *bodies: _Body) -> Written:
    consts = dict(written.consts)
    for body in bodies:
        consts |= body.consts
    return replace(written, consts=consts)


def _scan_pair(
    eqns: Sequence[JaxprEqn], outvars: Sequence[Atom], i: int, k: int, written: Written, is_wanted: IsWanted
) -> dict[int, list[JaxprEqn]] | None:
    """A scan and that of its derivative, with the attentions of their bodies as operations; None if there are none."""
    first = _body(eqns[i], i, {})
    # Stacked arrays are results: each is one variable of the program, whatever value of the body it has.
    second = _body(eqns[k], k, {stacked: atom for atom, stacked in first.stacked})
    read_elsewhere = {var for j, eqn in enumerate(eqns) if j != k for var in operand_vars(eqn)}
    read_elsewhere |= {atom for atom in outvars if not is_literal(atom)}
    n_consts, n_carry = scan_counts(eqns[k])
    read_elsewhere |= {atom for atom in eqns[k].invars[: n_consts + n_carry] if not is_literal(atom)}
    kept = tuple((atom, var) for atom, var in first.stacked if var in read_elsewhere)

    results = [*first.new_carries, *(atom for atom, _ in kept)]
    results += [*second.new_carries, *(atom for atom, _ in second.stacked)]
    n = len(first.eqns)
    new = rewrite(
        [*first.eqns, *second.eqns],
        results,
        _with_consts(written, first, second),
        lambda operands, _: is_wanted(operands),
        section=[0] * n + [1] * len(second.eqns),
    )
    if new is None:
        return None

    first = replace(first, eqns=tuple(one.eqn for one in new if one.place < n))
    second = replace(second, eqns=tuple(one.eqn for one in new if one.place >= n))
    # What the second body reads of the first is stacked, or has been before the first, if it is a row of an array.
    array_of_row = dict(first.rows)
    wanted = {var for eqn in second.eqns for var in operand_vars(eqn)}
    wanted |= {atom for atom in (*second.new_carries, *(a for a, _ in second.stacked)) if not is_literal(atom)}
    rows = []
    # In the order of the program, so that each run of Python stacks them in the same one.
    for var in [var for var in first.own if var in wanted]:
        aval = aval_of(var)
        known = next((stacked for atom, stacked in first.stacked if atom is var), None)
        if var in array_of_row:
            rows.append((fresh_var(aval), array_of_row[var], var))
            continue
        if known is None:
            length = eqns[i].params["length"]
            shaped = jax.ShapeDtypeStruct((length, *aval.shape), aval.dtype)
            known = fresh_var(jax.make_jaxpr(lambda x: x)(shaped).jaxpr.invars[0].aval)
        rows.append((fresh_var(aval), known, var))
    stacked = dict.fromkeys([*kept, *((var, known) for _, known, var in rows if var not in array_of_row)])
    first = replace(first, stacked=tuple(stacked))
    names = {var: row for row, _, var in rows}
    second = _renamed(second, names, [(row, known) for row, known, _ in rows])
    return {i: _new_scan(first), k: _new_scan(second)}


def _renamed(body: _Body, names: Mapping[Var, Var], rows: Sequence[tuple[Var, Atom]]) -> _Body:
    """A body that reads rows of stacked arrays in the place of values of another one."""

    def read(atom: Atom) -> Atom:
        return atom if is_literal(atom) else names.get(atom, atom)

    return replace(
        body,
        rows=(*body.rows, *rows),
        eqns=tuple(eqn.replace(invars=[read(atom) for atom in eqn.invars]) for eqn in body.eqns),
        new_carries=tuple(map(read, body.new_carries)),
        stacked=tuple((read(atom), var) for atom, var in body.stacked),
    )


def _new_scan(body: _Body) -> list[JaxprEqn]:
    """The equations of a scan with this body, under the line of the old one."""
    n_consts, n_carry = scan_counts(body.eqn)
    first_carries = body.eqn.invars[n_consts : n_consts + n_carry]
    results = [*body.new_carries, *(atom for atom, _ in body.stacked)]
    read = {var for eqn in body.eqns for var in operand_vars(eqn)} | {a for a in results if not is_literal(a)}
    made = body.own.keys() | body.consts.keys()
    outer = list(dict.fromkeys([
        *(atom for atom in (*first_carries, *(array for _, array in body.rows)) if not is_literal(atom)),
        *(var for eqn in body.eqns for var in operand_vars(eqn) if var not in made),
        *(atom for atom in results if not is_literal(atom) and atom not in made),
    ]))  # fmt: skip
    rows = [(row, array) for row, array in body.rows if row in read]
    params = body.eqn.params

    def compute(*arrays: Any) -> list[Any]:
        env = dict(zip(outer, arrays, strict=True))

        def value(atom: Atom) -> Any:
            return atom.val if is_literal(atom) else env[atom]

        def iterate(carry: Any, xs: Any) -> tuple[list[Any], list[Any]]:
            inner = {**env, **body.consts, **dict(zip(body.carries, carry, strict=True))}
            inner |= dict(zip([row for row, _ in rows], xs, strict=True))
            found = _run(body.eqns, results, inner)
            carries = [_like(new, old) for new, old in zip(found[:n_carry], carry, strict=True)]
            return carries, [lax.convert_element_type(x, aval_of(v).dtype) for x, (_, v) in
                             zip(found[n_carry:], body.stacked, strict=True)]  # fmt: skip

        carry = [_like(value(atom), aval_of(var)) for atom, var in zip(first_carries, body.carries, strict=True)]
        end, stacked = lax.scan(
            iterate,
            carry,
            [value(array) for _, array in rows],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*end, *stacked]

    eqns, atoms = equations_for(compute, *outer)
    targets = [*body.eqn.outvars[:n_carry], *(var for _, var in body.stacked)]
    # Where a scan stacks the rows that it reads, jax returns the array itself; then the result is a copy of it.
    names: dict[Atom, Var] = {}
    made_here = {var for eqn in eqns for var in eqn.outvars}
    for atom, target in zip(atoms, targets, strict=True):
        if not is_literal(atom) and atom in made_here and atom not in names:
            names[atom] = target
            continue
        copies, (copy,) = equations_for(jnp.copy, atom)
        eqns += copies
        names[copy] = target
    return [with_source_of(eqn.replace(outvars=[names.get(var, var) for var in eqn.outvars]), body.eqn) for eqn in eqns]


def _like(x: Any, other: Any) -> Any:
    """A value of the dtype of a carry, which is not weak."""
    return lax.convert_element_type(x, other.dtype)
