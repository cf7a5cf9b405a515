"""What the equations of a mesh say about its variables, whatever the mesh, the options and the specs.

`facts_of` walks the equations once, those inside planned loops included, before any cost is collected. Scans with one
body share its jaxpr, and so the variables inside, which count once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.intra.strategies.combining import n_together
from minialpa.intra.strategies.loops import scan_body
from minialpa.tracing.jaxprs import is_gradient_marker, operand_vars


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableFacts:
    """Facts about all variables of a mesh.

    Attributes:
        n_gradients: number of gradients, whose sums start together; at least 1.
        n_together: for each result of a reduction, the number of reductions that start together with it.
        n_readers: for each variable that is read, how many operands read it.
    """

    n_gradients: int
    n_together: Mapping[Var, int]
    n_readers: Mapping[Var, int]

    def is_shared(self, var: Var) -> bool:
        """Whether several operands read `var`."""
        return self.n_readers.get(var, 0) > 1


def facts_of(eqns: Sequence[JaxprEqn], *, plans_loops: bool) -> VariableFacts:
    """The facts about the variables of `eqns`, and with `plans_loops` about those inside their loops."""
    together: dict[Var, int] = {}
    n_readers: Counter[Var] = Counter()
    for body in (eqns, *(_loop_bodies(eqns) if plans_loops else ())):
        together.update(n_together(body))
        n_readers.update(var for eqn in body for var in operand_vars(eqn))

    n_gradients = sum(map(is_gradient_marker, eqns))
    return VariableFacts(n_gradients=max(1, n_gradients), n_together=together, n_readers=n_readers)


def _loop_bodies(eqns: Sequence[JaxprEqn]) -> Iterator[Sequence[JaxprEqn]]:
    """The equations inside each loop that is planned, loops inside loops included; each body once."""
    seen: set[int] = set()
    pending = [eqns]
    while pending:
        for scan in map(scan_body, pending.pop()):
            if scan is not None and id(scan.flat) not in seen:
                seen.add(id(scan.flat))
                pending.append(scan.flat.eqns)
                yield scan.flat.eqns
