"""Sums over the iterations of a scan: the carries to which each iteration adds something, and nothing else.

The region of a body goes in, and the numbers of these carries come out; None if some other carry changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn

from minialpa.ir.equations import Atom, operand_vars
from minialpa.rules.body_region import Region


def summed_carries(region: Region) -> frozenset[int] | None:
    """The carries of a body to which each iteration adds something, if all others pass unchanged; else None.

    Nothing but these sums reads what another iteration has made, so the iterations may run in any order and apart.
    """
    (body,) = region.parts
    readers: dict[Atom, list[JaxprEqn]] = defaultdict(list)
    for eqn in body.eqns:
        for atom in operand_vars(eqn):
            readers[atom].append(eqn)

    sums = set()
    for r, i in region.carried:
        if region.results[r][0] is region.inputs[i]:
            continue
        if not _is_summed(region.inputs[i], region.results[r][0], readers, [atom for (atom,) in region.results]):
            return None
        sums.add(r)
    return frozenset(sums)


def _is_summed(carry: Atom, new: Atom, readers: Mapping[Atom, list[JaxprEqn]], results: Sequence[Atom]) -> bool:
    """Whether a carry is only added to on its way to its next value."""
    value = carry
    while not any(value is result for result in results):
        # One operand of one addition reads it, or it would count twice or for something else.
        if [eqn.primitive.name for eqn in readers.get(value, [])] not in (["add"], ["add_any"]):
            return False
        value = readers[value][0].outvars[0]
    return value is new and value not in readers and sum(value is result for result in results) == 1
