"""Sums inside of scans: the program of a pass in, the same program whose scans add to totals and sum them out.

A scan over layers stacks their gradients, so that all of them are complete only when it ends. In the last pass

    for each layer:  g = gradient          becomes          for each layer, with its row t of the total:
    sum(t + g) over devices                                     g = sum(t + gradient) over devices

so that the sums of one layer have the work of the next one beside them. A row is added and summed as the whole array
is: only scans that are planned as loops qualify, and sums that do not split the dimension of the layers.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.split_step import Accumulator
from minialpa.inter.staging.totals import adding
from minialpa.intra.spmd import ShardedEquations
from minialpa.intra.strategies.loops import ScanBody, scan_body
from minialpa.sharding import EquationSpecs, Spec
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.evaluation import eval_flat
from minialpa.tracing.flattening import flat_body
from minialpa.tracing.gradients import gradient_p
from minialpa.tracing.jaxprs import Atom, aval_of, bytes_of, fresh_var, is_literal, operand_vars, scan_counts
from minialpa.tracing.new_equations import equations_for


@dataclass(frozen=True, slots=True)
class SummedInScans:
    """A program whose scans sum totals.

    Attributes:
        program: the program.
        totals: what its scans add to and sum.
        loops: for the `id` of each scan that does so, that of the scan of the other passes.
    """

    program: ShardedEquations
    totals: frozenset[Var]
    loops: dict[int, int]


@dataclass(frozen=True, slots=True)
class _Sum:
    """A stacked result of a scan that is added to a total and summed over devices.

    Attributes:
        total: the total so far.
        number: of the result of the scan.
        marker: the equation that sums the total.
        result: what it makes.
        spec: of the total.
        specs: of the marker.
    """

    total: Var
    number: int
    marker: JaxprEqn
    result: Var
    spec: Spec
    specs: EquationSpecs


def sum_in_scans(
    program: ShardedEquations, added: Sequence[Accumulator], markers: Mapping[Var, JaxprEqn]
) -> SummedInScans:
    """`program`, whose scans sum those totals that they can.

    added: the totals, and what the program makes for them. markers: for totals, the equation that sums each of them.
    """
    n_reads = defaultdict[Var, int](int)
    for v in (*(v for eqn in program.eqns for v in operand_vars(eqn)), *program.outvars):
        if not is_literal(v):
            n_reads[v] += 1

    summed, loops = set[Var](), dict[int, int]()
    eqns, specs, equations = list[JaxprEqn](), dict(program.specs), dict(program.equations)
    for eqn in program.eqns:
        sums = _sums_of(eqn, program, added, markers, n_reads)
        made = _with_sums(eqn, program.equations[id(eqn)], sums) if sums else None
        if made is None:
            eqns.append(eqn)
            continue
        new, chosen = made
        eqns.append(new)
        equations[id(new)], loops[id(new)] = chosen, id(eqn)
        specs.update((one.total, one.spec) for one in sums)
        summed.update(one.total for one in sums)
    changed = dataclasses.replace(program, eqns=tuple(eqns), specs=specs, equations=equations)
    return SummedInScans(changed if summed else program, frozenset(summed), loops)


def _sums_of(
    eqn: JaxprEqn,
    program: ShardedEquations,
    added: Sequence[Accumulator],
    markers: Mapping[Var, JaxprEqn],
    n_reads: Mapping[Var, int],
) -> list[_Sum]:
    """The stacked results of a scan that nothing reads but their totals, if rows can be summed as the whole is."""
    if eqn.primitive.name != "scan" or not program.equations[id(eqn)].body:
        return []
    _, n_carry = scan_counts(eqn)
    numbers = {v: r for r, v in enumerate(eqn.outvars) if r >= n_carry}

    found = []
    for one in added:
        # Read once: the value leaves the program, for its total.
        if one.total not in markers or one.loop not in numbers or n_reads[one.loop] != 1:
            continue
        marker = markers[one.total]
        chosen, spec = program.equations[id(marker)], program.specs[one.loop]
        all_specs = (spec, *chosen.operands, *chosen.made, *chosen.results)
        if not any(spec.dims[0] for spec in all_specs):
            found.append(_Sum(one.total, numbers[one.loop], marker, marker.outvars[0], spec, chosen))
    return found


def _with_sums(eqn: JaxprEqn, chosen: EquationSpecs, sums: Sequence[_Sum]) -> tuple[JaxprEqn, EquationSpecs] | None:
    """A scan that makes the results of `sums`, with its specs; None if its body would not be the same equations."""
    body = scan_body(eqn)
    assert body is not None, eqn
    # Stand-ins for operands, as one array may be several of them.
    operands = [fresh_var(aval_of(atom)) for atom in eqn.invars]
    rows = [fresh_var(aval_of(one.total)) for one in sums]
    eqns, results = equations_for(lambda *arrays: _scan(eqn, sums, arrays), *operands, *rows)
    if [one.primitive.name for one in eqns] != ["scan"]:
        return None
    (new,) = eqns

    actual: dict[Atom, Atom] = dict(zip((*operands, *rows), (*eqn.invars, *(one.total for one in sums)), strict=True))
    spec_of = dict(zip((*operands, *rows), (*chosen.operands, *(one.spec for one in sums)), strict=True))
    wanted = list(eqn.outvars)
    left = list(chosen.results)
    for one in sums:
        wanted[one.number], left[one.number] = one.result, one.specs.results[0]
    names = dict(zip(results, wanted, strict=True))
    inner = _body_specs(body, scan_body(new), chosen, sums)
    if inner is None or len(names) < len(results) or any(v not in names for v in new.outvars):
        return None

    operand_specs = tuple(spec_of[v] if not is_literal(v) else Spec.replicated(0) for v in new.invars)
    renamed = new.replace(
        invars=[v if is_literal(v) else actual[v] for v in new.invars], outvars=[names[v] for v in new.outvars]
    )
    spec_of_result = dict(zip(wanted, left, strict=True))
    out_specs = tuple(spec_of_result[v] for v in renamed.outvars)
    return with_source_of(renamed, eqn), EquationSpecs(operand_specs, out_specs, out_specs, body=inner)


def _scan(eqn: JaxprEqn, sums: Sequence[_Sum], arrays: Sequence[Any]) -> list[Any]:
    """The scan on these operands and totals; its stacked results in `sums` are added to their totals, and marked."""
    closed, (n_consts, n_carry) = eqn.params["jaxpr"], scan_counts(eqn)
    flat = flat_body(closed.jaxpr, tuple(closed.consts))
    n_lead, n_operands = n_consts + n_carry, len(eqn.invars)
    types = [aval_of(atom).dtype for atom in flat.outvars[:n_carry]]

    def iterate(carry: Any, slices: Any) -> Any:
        own, rows = slices
        left = eval_flat(flat, [*arrays[:n_consts], *carry, *own])
        for one, row in zip(sums, rows, strict=True):
            (left[one.number],) = gradient_p.bind(adding(row, left[one.number]), call=0)
        # A scan wants the types that its carry has.
        return [lax.convert_element_type(x, t) for x, t in zip(left, types, strict=False)], left[n_carry:]

    end, stacked = lax.scan(
        iterate,
        list(arrays[n_consts:n_lead]),
        (list(arrays[n_lead:n_operands]), list(arrays[n_operands:])),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*end, *stacked]


def _body_specs(
    old: ScanBody, new: ScanBody | None, chosen: EquationSpecs, sums: Sequence[_Sum]
) -> tuple[EquationSpecs, ...] | None:
    """Specs of the equations of a body that ends with sums; None if it does not begin as the old one does."""
    if new is None:
        return None
    n = len(old.flat.eqns)
    pairs = zip(old.flat.eqns, new.flat.eqns, strict=False)
    if len(new.flat.eqns) < n or any(_kind(a) != _kind(b) for a, b in pairs):
        return None

    # Behind the old equations, those of one sum after the other: perhaps a conversion, an addition and the marker.
    specs, waiting = list(chosen.body), iter(sums)
    row, marked = Spec(()), EquationSpecs((), (), ())
    one = None
    for eqn in new.flat.eqns[n:]:
        if one is None:
            one = next(waiting)
            row, marked = _row(one.spec), one.specs
        if eqn.primitive is gradient_p:
            parts = (marked.operands, marked.made, marked.results)
            operands, made, results = (tuple(map(_row, part)) for part in parts)
            specs.append(EquationSpecs(operands, made, results))
            one = None
        else:
            specs.append(EquationSpecs((row,) * len(eqn.invars), (row,), (row,)))
    return tuple(specs)


def _row(spec: Spec) -> Spec:
    """The spec of a row of a stacked array."""
    return Spec(spec.dims[1:], spec.partial)


def _kind(eqn: JaxprEqn) -> tuple[object, ...]:
    shapes = [aval_of(atom).shape for atom in (*eqn.invars, *eqn.outvars)]
    return (eqn.primitive, *shapes, bytes_of(eqn.outvars[0]) if eqn.outvars else 0)
