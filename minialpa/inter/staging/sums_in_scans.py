"""Sums inside of scans: a program in, the same program whose scans sum the gradients of their layers out.

In a last pass, or with one micro-batch, with a row t of the accumulator for each layer,

    for each layer:  g = gradient          becomes          for each layer:
    sum(t + g) over devices                                     g = sum(t + gradient) over devices

so the work of the next layer hides the sums of a layer. This needs scans that are planned as loops, and sums that do
not split the dimension of the layers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.split_step import Accumulator
from minialpa.inter.staging.accumulators import adding
from minialpa.intra.spmd import ShardedEquations
from minialpa.intra.strategies.loops import ScanBody, scan_body
from minialpa.ir.equations import (
    aval_of,
    bytes_of,
    fresh_var,
    is_gradient_marker,
    is_literal,
    operand_vars,
    scan_counts,
)
from minialpa.sharding import EquationSpecs, Spec
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.evaluation import eval_flat
from minialpa.tracing.flattening import flat_body
from minialpa.tracing.gradients import gradient_p
from minialpa.tracing.new_equations import equations_for


@dataclass(frozen=True, slots=True)
class SummedInScans:
    """A program whose scans sum the stacked gradients `summed` before they stack them.

    `loops` has, for each scan with sums, the scan that it replaces.
    """

    program: ShardedEquations
    summed: frozenset[Var]
    loops: dict[JaxprEqn, JaxprEqn]


@dataclass(frozen=True, slots=True)
class _Sum:
    """The sum over devices of the stacked result `value` of a scan, added to `accumulator` if not None.

    `spec` is of the value and the accumulator, `specs` of the identity whose result is the sum.
    """

    value: Var
    accumulator: Var | None
    result: Var
    spec: Spec
    specs: EquationSpecs


def sum_accumulators_in_scans(
    program: ShardedEquations, added: Sequence[Accumulator], markers: Mapping[Var, JaxprEqn]
) -> SummedInScans:
    """`program`, whose scans add to accumulators and sum these, if they can.

    added: the accumulators, with their values in the program.
    markers: for accumulators, the equation that sums each of them.
    """
    sums = [
        _Sum(one.loop, one.complete, marker.outvars[0], program.specs[one.loop], program.equations[marker])
        for one in added
        if (marker := markers.get(one.complete)) is not None
    ]
    return _with_sums_in_scans(program, sums)


def sum_gradients_in_scans(program: ShardedEquations) -> SummedInScans:
    """`program`, whose scans sum the gradients that the program itself sums, if they can."""
    sums = [
        _Sum(value, None, result, program.specs[value], _picked_specs(program.equations[eqn], [k]))
        for eqn in program.eqns
        if is_gradient_marker(eqn)
        for k, (value, result) in enumerate(zip(eqn.invars, eqn.outvars, strict=True))
        if not is_literal(value)
    ]
    made = _with_sums_in_scans(program, sums)
    if not made.summed:
        return made

    # The markers keep the other gradients.
    eqns, equations = list[JaxprEqn](), dict(made.program.equations)
    for eqn in made.program.eqns:
        kept = [k for k, v in enumerate(eqn.invars) if is_literal(v) or v not in made.summed]
        if is_gradient_marker(eqn) and len(kept) < len(eqn.invars):
            chosen = _picked_specs(equations[eqn], kept)
            eqn = eqn.replace(invars=[eqn.invars[k] for k in kept], outvars=[eqn.outvars[k] for k in kept])
            equations[eqn] = chosen
        if eqn.outvars or not is_gradient_marker(eqn):
            eqns.append(eqn)
    changed = dataclasses.replace(made.program, eqns=tuple(eqns), equations=equations)
    return dataclasses.replace(made, program=changed)


def _picked_specs(specs: EquationSpecs, numbers: Sequence[int]) -> EquationSpecs:
    parts = (specs.operands, specs.made, specs.results)
    operands, made, results = (tuple(part[k] for k in numbers) for part in parts)
    return EquationSpecs(operands, made, results)


def _with_sums_in_scans(program: ShardedEquations, sums: Sequence[_Sum]) -> SummedInScans:
    """`program`, with `sums` computed in scans where possible."""
    # The one reader is the marker or, for an accumulator, the program's results.
    reads = Counter(v for eqn in program.eqns for v in operand_vars(eqn))
    reads.update(v for v in program.outvars if not is_literal(v))
    possible = {one.value: one for one in sums if reads[one.value] == 1 and _sums_rows(one)}

    summed, loops = set[Var](), dict[JaxprEqn, JaxprEqn]()
    eqns, specs, equations = list[JaxprEqn](), dict(program.specs), dict(program.equations)
    for eqn in program.eqns:
        chosen = program.equations[eqn]
        mine = [possible[v] for v in eqn.outvars[scan_counts(eqn)[1] :] if v in possible] if chosen.body else []
        made = _scan_with_sums(eqn, chosen, mine) if mine else None
        if made is None:
            eqns.append(eqn)
            continue
        new, of_new = made
        eqns.append(new)
        equations[new], loops[new] = of_new, eqn
        specs.update((one.accumulator, one.spec) for one in mine if one.accumulator is not None)
        summed.update(one.value for one in mine)
    changed = dataclasses.replace(program, eqns=tuple(eqns), specs=specs, equations=equations)
    return SummedInScans(changed if summed else program, frozenset(summed), loops)


def _sums_rows(one: _Sum) -> bool:
    """Whether the sum over devices leaves the dimension of the layers whole. A scalar has no such dimension."""
    specs = (one.spec, *one.specs.operands, *one.specs.made, *one.specs.results)
    is_sum = bool(one.spec.partial) and not one.specs.results[0].partial
    return is_sum and all(spec.dims and not spec.dims[0] for spec in specs)


def _scan_with_sums(
    eqn: JaxprEqn, chosen: EquationSpecs, sums: Sequence[_Sum]
) -> tuple[JaxprEqn, EquationSpecs] | None:
    """A scan with the results of `sums`, and its specs; None if its body would not have the same equations."""
    accumulators = [(one.accumulator, one.spec) for one in sums if one.accumulator is not None]
    operands = [*eqn.invars, *(accumulator for accumulator, _ in accumulators)]
    specs = [*chosen.operands, *(spec for _, spec in accumulators)]

    # Stand-ins, since one array may be several operands.
    stand_ins = [fresh_var(aval_of(atom)) for atom in operands]
    eqns, results = equations_for(lambda *arrays: _run_scan(eqn, sums, arrays), *stand_ins)
    body, new = scan_body(eqn), eqns[0]
    assert body is not None, eqn
    inner = _body_specs(body, scan_body(new), chosen, sums) if len(eqns) == 1 else None
    if inner is None or set(results) != set(new.outvars):
        return None

    # Operands and results by stand-in, since jax may reorder them. Literals are scalars.
    read = dict(zip(stand_ins, zip(operands, specs, strict=True), strict=True))
    renaming = dict(zip(results, _results_with_sums(eqn, chosen, sums), strict=True))
    scalar = Spec.replicated(0)
    reads = [(v, scalar) if is_literal(v) else read[v] for v in new.invars]
    returned = [renaming[v] for v in new.outvars]
    renamed = new.replace(invars=[v for v, _ in reads], outvars=[v for v, _ in returned])
    out_specs = tuple(spec for _, spec in returned)
    of_operands = tuple(spec for _, spec in reads)
    return with_source_of(renamed, eqn), EquationSpecs(of_operands, out_specs, out_specs, body=inner)


def _results_with_sums(eqn: JaxprEqn, chosen: EquationSpecs, sums: Sequence[_Sum]) -> list[tuple[Var, Spec]]:
    summed = {one.value: (one.result, one.specs.results[0]) for one in sums}
    return [summed.get(v, (v, spec)) for v, spec in zip(eqn.outvars, chosen.results, strict=True)]


def _run_scan(eqn: JaxprEqn, sums: Sequence[_Sum], arrays: Sequence[Any]) -> list[Any]:
    """The results of `eqn` with `sums` in its body. arrays: the operands, then accumulators."""
    closed, (n_consts, n_carry) = eqn.params["jaxpr"], scan_counts(eqn)
    flat = flat_body(closed.jaxpr, tuple(closed.consts))
    n_lead, n_operands = n_consts + n_carry, len(eqn.invars)
    types = [aval_of(atom).dtype for atom in flat.outvars[:n_carry]]

    def iterate(carry: Any, slices: Any) -> Any:
        own, rows = slices
        left = eval_flat(flat, [*arrays[:n_consts], *carry, *own])
        waiting = iter(rows)
        for one in sums:
            number = eqn.outvars.index(one.value)
            value = left[number] if one.accumulator is None else adding(next(waiting), left[number])
            (left[number],) = gradient_p.bind(value, call=0)
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
    """Specs of the equations of a body that ends with sums; None if its beginning differs from the old body."""
    if new is None:
        return None
    n = len(old.flat.eqns)
    pairs = zip(old.flat.eqns, new.flat.eqns, strict=False)
    if len(new.flat.eqns) < n or any(_equation_kind(a) != _equation_kind(b) for a, b in pairs):
        return None

    # After the old equations, one sum after the other: perhaps a conversion, an addition and the marker.
    specs, waiting = list(chosen.body), iter(sums)
    row, marked = Spec(()), EquationSpecs((), (), ())
    one = None
    for eqn in new.flat.eqns[n:]:
        if one is None:
            one = next(waiting)
            row, marked = _row_spec(one.spec), one.specs
        if eqn.primitive is gradient_p:
            parts = (marked.operands, marked.made, marked.results)
            operands, made, results = (tuple(map(_row_spec, part)) for part in parts)
            specs.append(EquationSpecs(operands, made, results))
            one = None
        else:
            specs.append(EquationSpecs((row,) * len(eqn.invars), (row,), (row,)))
    return tuple(specs)


def _row_spec(spec: Spec) -> Spec:
    return Spec(spec.dims[1:], spec.partial)


def _equation_kind(eqn: JaxprEqn) -> tuple[object, ...]:
    shapes = [aval_of(atom).shape for atom in (*eqn.invars, *eqn.outvars)]
    return (eqn.primitive, *shapes, bytes_of(eqn.outvars[0]) if eqn.outvars else 0)
