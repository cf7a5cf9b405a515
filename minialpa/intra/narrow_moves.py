"""A `ShardedEquations` in; the same program out, with fewer bytes in collectives next to conversions.

A conversion has the spec of its operand. Resharding does not change elements, so the narrower array can move:
    to a wider type        bfloat16 -> convert -> all-gather of float32     becomes   all-gather of bfloat16 -> convert
    to a narrower type     all-gather of float32 -> convert -> bfloat16     becomes   convert -> all-gather of bfloat16
Partial sums stay: a sum in another type has another value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from jax.extend.core import JaxprEqn, Var

from minialpa.intra.spmd import ShardedEquations
from minialpa.ir.equations import Atom, aval_of, is_literal
from minialpa.sharding import EquationSpecs, Spec

#: The specs in which a variable is read, by reader (None for results of the program) and number of the operand.
_Readers = dict[tuple[JaxprEqn | None, int], Spec]


def with_narrow_moves(program: ShardedEquations) -> ShardedEquations:
    readers = _readers(program)
    equations, specs = dict(program.equations), dict(program.specs)
    # Backwards: a move passes several conversions in a row.
    for eqn in reversed(program.eqns):
        if eqn.primitive.name != "convert_element_type":
            continue
        (operand,), (result,) = eqn.invars, eqn.outvars
        if is_literal(operand):
            continue
        chosen, others = equations[eqn], dict(readers[operand])
        others.pop((eqn, 0))
        spec = _better_spec(eqn, specs[operand], chosen, set(readers[result].values()), set(others.values()))
        if spec is not None:
            equations[eqn] = EquationSpecs((spec,), (spec,), (spec,))
            specs[result] = readers[operand][eqn, 0] = spec
    return replace(program, equations=equations, specs=specs)


def _readers(program: ShardedEquations) -> Mapping[Var, _Readers]:
    found = defaultdict[Var, _Readers](dict)
    for eqn in program.eqns:
        for k, (atom, spec) in enumerate(zip(eqn.invars, program.equations[eqn].operands, strict=True)):
            if not is_literal(atom):
                found[atom][eqn, k] = spec
    for k, (atom, spec) in enumerate(zip(program.outvars, program.out_specs, strict=True)):
        if not is_literal(atom):
            found[atom][None, k] = spec
    return found


def _better_spec(
    eqn: JaxprEqn, before: Spec, chosen: EquationSpecs, required: set[Spec], read_before: set[Spec]
) -> Spec | None:
    """A spec for a conversion that moves fewer bytes than `chosen`, or None.

    before: the spec in which the operand is made.
    required: the specs in which the result is read.
    read_before: the specs in which other equations read the operand.
    """
    converted = chosen.operands[0]
    after = next(iter(required), converted)
    if len(required) != 1 or {*chosen.made, *chosen.results} != {converted}:
        return None
    if before.partial or converted.partial or after.partial:
        return None

    grows = _width(eqn.outvars[0]) - _width(eqn.invars[0])
    if grows > 0 and before == converted != after:
        return after
    # If others read the operand in `converted`, it moves in any case.
    if grows < 0 and before != converted == after and converted not in read_before:
        return before
    return None


def _width(atom: Atom) -> int:
    return int(aval_of(atom).dtype.itemsize)
