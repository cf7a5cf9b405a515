"""Arrays move between devices in the narrower of two types: a program in, the same program out with fewer bytes moved.

A conversion has the spec of its operand, so the solver prices a move only after it. A move does not change elements, so
it may come before a conversion to a wider type, or after one to a narrower type: the same bits arrive. Partial sums are
left alone, since a sum in another type is another sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from jax.extend.core import JaxprEqn, Var

from minialpa.intra.spmd import ShardedEquations
from minialpa.ir.equations import Atom, aval_of, is_literal
from minialpa.sharding import EquationSpecs, Spec

#: The specs in which a variable is read, by reader and number of the operand; results have no equation.
_Readers = dict[tuple[JaxprEqn | None, int], Spec]


def with_narrow_moves(program: ShardedEquations) -> ShardedEquations:
    """`program` with moves before conversions to wider types and after conversions to narrower ones."""
    readers = _readers(program)
    equations, specs = dict(program.equations), dict(program.specs)
    # Backwards, so that a move passes several conversions in a row.
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
    """A spec of a conversion that moves less than `chosen`, or None.

    before: the spec of its operand. required: specs in which its result is read. read_before: specs in which others
    read its operand.
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
    # The operand moves to this spec anyway if others want it.
    if grows < 0 and before != converted == after and converted not in read_before:
        return before
    return None


def _width(atom: Atom) -> int:
    return int(aval_of(atom).dtype.itemsize)
