"""Strategies of an equation: its candidates on a logical mesh (candidates.py) with their prices.

seconds = arithmetic and bytes, a share of them on each device     -> work_of
        + what each product takes, however small it is             -> work_of
        + seconds of the collectives                              -> _bill_s
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.cost import as_one_of
from minialpa.intra.strategies.all_reduce import is_gathered
from minialpa.intra.strategies.attentions import blockwise_s, has_kernel
from minialpa.intra.strategies.balance import balance_of
from minialpa.intra.strategies.candidates import Bill, Candidates, Specs, enumerate_candidates, follow_candidates
from minialpa.intra.strategies.combining import ALONE, Sharing
from minialpa.intra.strategies.reshard import ReshardStep, reshard_table
from minialpa.intra.strategies.tiles import waste
from minialpa.ir.equations import aval_of, bytes_of, dtype_name, is_inexact, shape_of, sub_jaxprs
from minialpa.rules.factors import Factors
from minialpa.rules.heavy import has_contraction, is_attention, is_contraction
from minialpa.rules.known_rules import factors_of, is_kernel
from minialpa.sharding import EquationSpecs, Spec
from minialpa.tracing.flattening import flat_body

#: The `checkpoint_name` of a copy that several contractions read.
SHARED_NAME = "minialpa_shared"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StrategySet:
    """Strategies of one equation as columns: entry s of each tuple or array belongs to strategy s.

    Attributes:
        operands: for each operand, its spec under each strategy.
        made: for each result, its spec as the shards compute it.
        results: for each result, its spec as it is left.
        compute_s: seconds of the equation itself.
        communication_s: seconds of turning what is made into the results, and of balancing.
        balanced: the strategies in which devices exchange halves of their shards, see `balance.py`.
    """

    operands: tuple[tuple[Spec, ...], ...]
    made: tuple[tuple[Spec, ...], ...]
    results: tuple[tuple[Spec, ...], ...]
    compute_s: NDArray[np.float64]
    communication_s: NDArray[np.float64]
    balanced: frozenset[int] = frozenset()

    @property
    def seconds(self) -> NDArray[np.float64]:
        return self.compute_s + self.communication_s

    def read(self, s: int) -> EquationSpecs:
        """Strategy number `s`."""

        def row(columns: tuple[Specs, ...]) -> Specs:
            return tuple(column[s] for column in columns)

        return EquationSpecs(row(self.operands), row(self.made), row(self.results), is_balanced=s in self.balanced)

    def select(self, keep: Sequence[int]) -> StrategySet:
        """The strategies of these numbers."""

        def kept(columns: tuple[Specs, ...]) -> tuple[Specs, ...]:
            return tuple(tuple(column[s] for s in keep) for column in columns)

        numbers = list(keep)
        return StrategySet(
            operands=kept(self.operands),
            made=kept(self.made),
            results=kept(self.results),
            compute_s=self.compute_s[numbers],
            communication_s=self.communication_s[numbers],
            balanced=frozenset(i for i, s in enumerate(numbers) if s in self.balanced)
            if self.balanced
            else frozenset(),
        )


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

    Args:
        eqn: the equation.
        factors: its factors.
        mesh: the logical mesh.
        required: for some axes, the factor that this axis and no other must split; None if it splits no factor, but
            may pass a sum.
        n_pending: for each axis, how many operands may come as partial sums along it.
        scatter: whether partial sums may be reduce-scattered.
        kept: factors that only the axes in `required` may split.
    """
    candidates = enumerate_candidates(
        eqn, factors, mesh.shape, required or {}, n_pending or {}, scatter=scatter, most_splits=splits_most(eqn, mesh),
        kept=kept,
    )  # fmt: skip

    return priced(eqn, factors, mesh, candidates)


def follow(
    eqn: JaxprEqn,
    factors: Factors,
    mesh: LogicalMesh,
    given: Mapping[int, Specs],
    n: int,
    *,
    allow_partial: bool = True,
) -> StrategySet:
    """`n` strategies, of which number s takes each operand in `given` as its spec s, as far as the rule allows.

    An axis that splits operands splits the same factor here; if operands disagree, the largest one decides and the
    others are resharded. A factor that may not be split is gathered. Partial sums pass if the equation is linear;
    without `allow_partial`, no result is left as partial sums.
    """
    return priced(
        eqn, factors, mesh, follow_candidates(eqn, factors, mesh.shape, given, n, allow_partial=allow_partial)
    )


def splits_most(eqn: JaxprEqn, mesh: LogicalMesh) -> bool:
    """Whether only the candidates that split the work into most parts are considered.

    A mesh without a device has no price for compute, so that computing everything everywhere would be cheapest.
    """
    return mesh.device is None and has_contraction(eqn)


def priced(
    eqn: JaxprEqn,
    factors: Factors,
    mesh: LogicalMesh,
    candidates: Candidates,
    *,
    sharing: Sharing = ALONE,
    gather_s: float | None = None,
) -> StrategySet:
    """The strategies of an equation, each with the cheapest of its candidates.

    sharing: how many sums start with those of the results.
    gather_s: if all-gathers are forbidden, the seconds of a reduction that no other collective can do.
    """
    work = work_of(eqn, factors, mesh)
    compute = (work.shared_s + _idle_s(eqn, mesh, candidates)) / candidates.n_shares + work.fixed_s

    bills = np.array([_bill_s(eqn, bill, mesh, sharing) for bill in candidates.bills], np.float64)
    if gather_s is not None:
        bills[[any(map(_is_gathered, eqn.outvars, bill.finish)) for bill in candidates.bills]] = gather_s
    communication = bills[candidates.bill_of]

    # Most equations have one candidate for each strategy, and these columns stay as they are.
    picks, made = candidates.first, candidates.made
    if candidates.has_choice:
        seconds = (compute + communication).tolist()
        picks = np.array([min(choice, key=seconds.__getitem__) for choice in candidates.strategies], np.int64)
        made = tuple(tuple(column[number] for number in picks) for column in made)

    strategies = StrategySet(
        operands=candidates.operands,
        made=made,
        results=candidates.results,
        compute_s=compute[picks],
        communication_s=communication[picks],
    )
    return _balanced(eqn, factors, mesh, strategies) if factors.ramps else strategies


def _balanced(eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, strategies: StrategySet) -> StrategySet:
    """The same strategies, balanced where that saves more compute than it communicates.

    A mesh without a device has no price for compute, so that everything is balanced that can be.
    """
    compute_s, communication_s = strategies.compute_s.copy(), strategies.communication_s.copy()
    balanced = []

    for s in range(len(compute_s)):
        specs = strategies.read(s)
        balance = balance_of(factors, specs.operands, specs.made, mesh.shape)
        if balance is None:
            continue
        exchange_s = balance.seconds(eqn, mesh)
        if mesh.device is None or exchange_s < (1 - balance.share) * compute_s[s]:
            compute_s[s] *= balance.share
            communication_s[s] += exchange_s
            balanced.append(s)

    return replace(strategies, compute_s=compute_s, communication_s=communication_s, balanced=frozenset(balanced))


def _is_gathered(result: Var, step: ReshardStep | None) -> bool:
    """Whether a reduction gathers its parts on every device, as there is no other collective for it."""
    return step is not None and is_gathered(step.reduction, aval_of(result).dtype)


def _bill_s(eqn: JaxprEqn, bill: Bill, mesh: LogicalMesh, sharing: Sharing) -> float:
    """Seconds of the collectives of a candidate."""
    seconds = sum(
        _collective_s(step, bytes_of(result), mesh, sharing)
        for step, result in zip(bill.finish, eqn.outvars, strict=True)
        if step is not None
    )

    for r, made, left in bill.moves:
        result = eqn.outvars[r]
        table = reshard_table(shape_of(result), bytes_of(result), mesh, sharing=sharing)
        seconds += table.cost(made, left)
    return seconds


def _collective_s(step: ReshardStep, n_bytes: float, mesh: LogicalMesh, sharing: Sharing) -> float:
    collective = step.collective(n_bytes, mesh.shape)
    if collective is None:
        return 0.0
    return collective.seconds(as_one_of(sharing.of(collective.kind, collective.axes), mesh))


class Work(NamedTuple):
    """Seconds of an equation on one device.

    Attributes:
        shared_s: what devices that split it have a share of.
        fixed_s: what each of them takes.
    """

    shared_s: float
    fixed_s: float


def work_of(eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh) -> Work:
    """The work of one device that does all of it.

    Contractions read and write memory; other operations count what they write, as XLA fuses their reads. A reshape that
    only adds or drops a leading dimension of size 1 writes nothing. On GPUs, an attention without a kernel is computed
    block by block. A loop or branch takes as long as its body, whose products may be of other dtypes than its operands.
    On a mesh without a device, compute has no price.
    """
    device = mesh.device
    if device is None or _is_row(eqn):
        return Work(0.0, 0.0)
    if eqn.primitive.name in ("scan", "while", "cond"):
        return _work_inside(eqn, mesh)

    if is_attention(eqn) and device.kernels is not None and not has_kernel(eqn):
        return Work(blockwise_s(eqn, factors, device), device.launch_s)
    # XLA updates an array in place.
    written = sum(map(bytes_of, eqn.invars[1:2] if eqn.primitive.name == "dynamic_update_slice" else eqn.outvars))
    if is_contraction(eqn) or is_kernel(eqn):
        read = sum(map(bytes_of, eqn.invars))
        seconds_of = device.attention_s if is_attention(eqn) else device.product_s
        return Work(seconds_of(factors.flops, read + written, _rate_of(eqn)), device.launch_s)
    dtype = dtype_name(eqn.invars[0]) if eqn.invars else "float32"
    return Work(device.kernel_s(factors.flops, written, dtype), 0.0)


def _idle_s(eqn: JaxprEqn, mesh: LogicalMesh, candidates: Candidates) -> NDArray[np.float64] | float:
    """For each candidate of a matrix product, the seconds by which idle processors make the whole of it longer."""
    device = mesh.device
    if device is None or not device.n_processors or eqn.primitive.name != "dot_general":
        return 0.0
    (sums, _), (batch, _) = eqn.params["dimension_numbers"]
    n_batch, n_rows = len(batch), len(shape_of(eqn.invars[0])) - len(sums) - len(batch)
    if n_rows == 0 or n_batch + n_rows == len(shape_of(eqn.outvars[0])):
        return 0.0  # a product with a vector, which XLA computes as a sum, without tiles

    def waste_of(made: Spec) -> float:
        shape = made.shard_shape(shape_of(eqn.outvars[0]), mesh.shape)
        b, m, n = shape[:n_batch], shape[n_batch : n_batch + n_rows], shape[n_batch + n_rows :]
        # A sum that is split leaves a partial sum.
        k = n_summands / math.prod(mesh.shape[axis] for axis in made.partial)
        return waste(math.prod(b), math.prod(m), math.prod(n), int(k), device.n_processors)

    n_summands = math.prod(shape_of(eqn.invars[0])[dim] for dim in sums)
    computing_s = device.computing_s(factors_of(eqn).flops, _rate_of(eqn))
    wastes = np.array([waste_of(made) for made in candidates.made[0]])
    if candidates.has_choice:
        return computing_s * (wastes - 1)
    idle_s = np.zeros(len(candidates.n_shares))
    idle_s[candidates.first] = computing_s * (wastes - 1)
    return idle_s


def _rate_of(eqn: JaxprEqn) -> str:
    """The name of the rate at which a product computes: its dtype, or "tensorfloat32" for float32 by default.

    The first floating point operand counts, as kernels may read integers first, such as the sizes of groups.
    """
    floats = (atom for atom in eqn.invars if is_inexact(atom))
    dtype = dtype_name(next(floats, eqn.invars[0])) if eqn.invars else "float32"
    precision = eqn.params.get("precision")
    asked = {precision} if not isinstance(precision, tuple) else set(precision)
    return "tensorfloat32" if dtype == "float32" and asked <= {None, jax.lax.Precision.DEFAULT} else dtype


def _work_inside(eqn: JaxprEqn, mesh: LogicalMesh) -> Work:
    """The work of all iterations of a scan, of one of a `while`, or of the longest branch."""
    bodies = [_total(work_of(one, factors_of(one), mesh) for one in _equations_of(body)) for body in sub_jaxprs(eqn)]
    if eqn.primitive.name == "cond":
        return max(bodies, key=sum)
    n_times: int = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    once = _total(bodies)
    return Work(n_times * once.shared_s, n_times * once.fixed_s)


def _total(parts: Iterable[Work]) -> Work:
    shared_s = fixed_s = 0.0
    for part in parts:
        shared_s, fixed_s = shared_s + part.shared_s, fixed_s + part.fixed_s
    return Work(shared_s, fixed_s)


@functools.lru_cache(maxsize=256)
def _equations_of(body: Jaxpr) -> tuple[JaxprEqn, ...]:
    return flat_body(body, [None] * len(body.constvars)).eqns


def _is_row(eqn: JaxprEqn) -> bool:
    """Whether an equation only adds or drops a leading dimension of size 1."""
    if eqn.primitive.name not in ("reshape", "squeeze"):
        return False
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    return before == (1, *after) or after == (1, *before)


def is_shared_copy(eqn: JaxprEqn) -> bool:
    """Whether an equation copies a value for several contractions to read."""
    return eqn.primitive.name == "name" and eqn.params["name"] == SHARED_NAME
