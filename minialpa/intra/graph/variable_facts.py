"""What the equations of a mesh say about its variables, whatever the mesh, the options and the specs.

`facts_of` walks the equations once, those inside planned loops included, before any cost is collected. Scans with one
body share its jaxpr, and so the variables inside, which count once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.intra.strategies.combining import WITH_GRADIENTS, n_together, sum_groups
from minialpa.intra.strategies.loops import ScanBody, scan_body
from minialpa.ir.block import Block
from minialpa.ir.equations import operand_vars


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableFacts:
    """Facts about all variables of a mesh.

    Attributes:
        with_gradients: the variables whose sums start with those of the gradients.
        n_together: for each variable whose sum starts together with others, how many these are, itself included.
        n_readers: for each variable that is read, how many operands read it.
    """

    with_gradients: Set[Var]
    n_together: Mapping[Var, int]
    n_readers: Mapping[Var, int]

    def is_shared(self, var: Var) -> bool:
        """Whether several operands read `var`."""
        return self.n_readers.get(var, 0) > 1


def facts_of(eqns: Sequence[JaxprEqn], *, plans_loops: bool) -> VariableFacts:
    """The facts about the variables of `eqns`, and with `plans_loops` about those inside their loops."""
    together: dict[Var, int] = {}
    with_gradients: set[Var] = set()
    n_readers: Counter[Var] = Counter()
    for body in (eqns, *((scan.flat.eqns for scan in loop_scans(eqns)) if plans_loops else ())):
        groups = sum_groups(body)
        together.update(n_together(body, groups))
        with_gradients.update(var for var, group in groups.items() if group == WITH_GRADIENTS)
        n_readers.update(var for eqn in body for var in operand_vars(eqn))

    return VariableFacts(with_gradients=with_gradients, n_together=together, n_readers=n_readers)


def loop_scans(eqns: Sequence[JaxprEqn]) -> Iterator[ScanBody]:
    """Each loop that is planned, loops inside loops included; each body once."""
    seen: set[Block] = set()
    pending = [eqns]
    while pending:
        for scan in map(scan_body, pending.pop()):
            if scan is not None and scan.flat not in seen:
                seen.add(scan.flat)
                pending.append(scan.flat.eqns)
                yield scan
