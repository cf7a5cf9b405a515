"""Strategies: an equation in, the ways to run it on a logical mesh (candidates.py) with their prices out.

Cost is in seconds: max(flops / peak, bytes / bandwidth) on each device, plus collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import JaxprEqn, Var
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.intra.strategies.candidates import Bill, Specs, Ways, enumerate_ways, follow_ways
from minialpa.intra.strategies.reshard import Step, reshard_table
from minialpa.rules.factors import Factors
from minialpa.sharding import EquationSpecs, Spec
from minialpa.tracing.jaxprs import bytes_of, dtype_name, shape_of, sub_jaxprs

#: The `checkpoint_name` of a copy that several contractions read.
SHARED_NAME = "minialpa_shared"


@dataclass(frozen=True, slots=True, eq=False)
class StrategySet:
    """Strategies of one equation as columns: entry s of each tuple or array belongs to strategy s.

    operands[k], made[r], results[r]: specs of operand k, of result r as the shards compute it, and as it is left.
    compute_s, communication_s: seconds of the equation itself, and of turning what is made into the results.
    """

    operands: tuple[tuple[Spec, ...], ...]
    made: tuple[tuple[Spec, ...], ...]
    results: tuple[tuple[Spec, ...], ...]
    compute_s: NDArray[np.float64]
    communication_s: NDArray[np.float64]

    @property
    def seconds(self) -> NDArray[np.float64]:
        return self.compute_s + self.communication_s

    def read(self, s: int) -> EquationSpecs:
        """Strategy number `s`."""

        def row(columns: tuple[Specs, ...]) -> Specs:
            return tuple(column[s] for column in columns)

        return EquationSpecs(row(self.operands), row(self.made), row(self.results))

    def select(self, keep: Sequence[int]) -> StrategySet:
        """The strategies of these numbers."""

        def kept(columns: tuple[Specs, ...]) -> tuple[Specs, ...]:
            return tuple(tuple(column[s] for s in keep) for column in columns)

        numbers = list(keep)
        compute, communication = self.compute_s[numbers], self.communication_s[numbers]
        return StrategySet(kept(self.operands), kept(self.made), kept(self.results), compute, communication)


def enumerate_strategies(
    eqn: JaxprEqn,
    factors: Factors,
    mesh: LogicalMesh,
    required: Mapping[int, int | None] | None = None,
    n_pending: Mapping[int, int] | None = None,
    *,
    scatter: bool = True,
    kept: frozenset[int] = frozenset(),
) -> StrategySet:
    """All strategies of `eqn` on `mesh`.

    required[axis]: the factor that this axis and no other must split (None: a sum may pass). n_pending[axis]: how many
    operands may come as partial sums along an axis. scatter: whether partial sums may be reduce-scattered. kept:
    factors that only the axes in `required` may split.
    """
    ways = enumerate_ways(
        eqn, factors, mesh.shape, required or {}, n_pending or {}, scatter=scatter, most_splits=splits_most(eqn, mesh),
        kept=kept,
    )  # fmt: skip
    return priced(eqn, factors, mesh, ways)


def follow(
    eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, given: Mapping[int, Specs], n: int, *, whole: bool = False
) -> StrategySet:
    """`n` strategies, of which number s takes each operand in `given` as its spec s, as far as the rule allows.

    An axis that splits operands splits the same factor here; where operands disagree, the largest one wins and the
    others are resharded. A factor that may not be split is gathered. Partial sums pass where the equation is linear;
    `whole`: the results are not left as partial sums.
    """
    return priced(eqn, factors, mesh, follow_ways(eqn, factors, mesh.shape, given, n, whole=whole))


def splits_most(eqn: JaxprEqn, mesh: LogicalMesh) -> bool:
    """Whether only the ways that split most count: with compute for nothing, everything everywhere is cheapest."""
    return mesh.device is None and has_contraction(eqn)


def priced(
    eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, ways: Ways, gather_s: float | None = None
) -> StrategySet:
    """The strategies of `ways`: the cheapest way of each.

    gather_s: where all-gathers are forbidden, the seconds of a reduction that no other collective can do.
    """
    compute = work_s(eqn, factors, mesh) / ways.n_shares
    bills = np.array([_bill_s(eqn, bill, mesh) for bill in ways.bills], np.float64)
    if gather_s is not None:
        bills[[any(map(_is_gathered, eqn.outvars, bill.finish)) for bill in ways.bills]] = gather_s
    communication = bills[ways.bill_of]
    picks, made = ways.first, ways.made
    if ways.has_choice:
        seconds = (compute + communication).tolist()
        picks = np.array([min(choice, key=seconds.__getitem__) for choice in ways.strategies], np.int64)
        made = tuple(tuple(column[w] for w in picks) for column in made)
    return StrategySet(ways.operands, made, ways.results, compute[picks], communication[picks])


def _is_gathered(v: Var, step: Step | None) -> bool:
    """Whether a reduction gathers its parts on every device: there is no other collective for it."""
    bitwise = step is not None and step.reduction in ("and", "or") and dtype_name(v) != "bool"
    return bitwise or (step is not None and step.reduction == "prod")


def _bill_s(eqn: JaxprEqn, bill: Bill, mesh: LogicalMesh) -> float:
    seconds = sum(
        _collective_s(step, bytes_of(v), mesh)
        for step, v in zip(bill.finish, eqn.outvars, strict=True)
        if step is not None
    )
    for r, made, left in bill.moves:
        v = eqn.outvars[r]
        seconds += reshard_table(shape_of(v), bytes_of(v), mesh).cost(made, left)
    return seconds


def _collective_s(step: Step, n_bytes: float, mesh: LogicalMesh) -> float:
    collective = step.collective(n_bytes, mesh.shape)
    return collective.seconds(mesh) if collective else 0.0


def work_s(eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh) -> float:
    """Seconds on one device that does all of the work.

    Contractions read and write memory; other operations count what they write, as XLA fuses their reads. What takes
    the only row of an array, or makes one of a row, writes nothing. On a mesh without a device, compute has no price.
    """
    if mesh.device is None or _is_row(eqn):
        return 0.0
    dtype = dtype_name(eqn.invars[0]) if eqn.invars else "float32"
    written = sum(bytes_of(v) for v in eqn.outvars)
    read = sum(bytes_of(v) for v in eqn.invars) if is_contraction(eqn) else 0
    return max(factors.flops / mesh.device.flops_per_s(dtype), (read + written) / mesh.device.memory_bandwidth)


def _is_row(eqn: JaxprEqn) -> bool:
    """Whether an array of one row becomes the row, or the other way round."""
    if eqn.primitive.name not in ("reshape", "squeeze"):
        return False
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    return before == (1, *after) or after == (1, *before)


def is_contraction(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("dot_general", "conv_general_dilated")


def is_shared_copy(eqn: JaxprEqn) -> bool:
    """Whether an equation copies a value for several contractions to read."""
    return eqn.primitive.name == "name" and eqn.params["name"] == SHARED_NAME


def has_contraction(eqn: JaxprEqn) -> bool:
    """Whether the equation, or one inside it, is a contraction."""
    return is_contraction(eqn) or any(has_contraction(e) for inner in sub_jaxprs(eqn) for e in inner.eqns)
