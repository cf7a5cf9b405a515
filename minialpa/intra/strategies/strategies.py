"""The candidates of an equation (candidates.py) in; its strategies, with their seconds, out.

A *candidate* is a choice of specs for the operands and results of an equation. Its *bill* lists its collectives.
Candidates with equal specs that differ in the collectives between are one strategy, at the price of the cheapest. Each
device computes one of `n_shares` equal shares of the work; `further_s` depends on the candidate, such as work of
processors without a tile:

seconds = (shared_s + further_s) / n_shares + fixed_s      -> work.py
        + collectives                                   -> _bill_s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.extend.core import JaxprEqn, Var
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.cost import as_one_of
from minialpa.intra.strategies.all_reduce import is_gathered
from minialpa.intra.strategies.balance import balance_of
from minialpa.intra.strategies.candidates import Bill, Candidates, Specs
from minialpa.intra.strategies.combining import Sharing
from minialpa.intra.strategies.reshard import ReshardStep, reshard_table
from minialpa.intra.strategies.rings import passes_of
from minialpa.intra.strategies.rotation import rotation_of
from minialpa.intra.strategies.work import idle_s, not_shared_s, without_kernel_s, work_of
from minialpa.ir.equations import aval_of, bytes_of, shape_of
from minialpa.rules.expensive import has_contraction
from minialpa.rules.factors import Factors
from minialpa.sharding import EquationSpecs, Spec


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StrategySet:
    """Strategies of one equation, as columns with an entry per strategy.

    operands, made, results: [operand or result][strategy], see `EquationSpecs`.
    communication_s: seconds of resharding `made` to `results`, of eager reductions and of balancing.
    balanced: the strategies in which devices exchange halves of their shards (balance.py).
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
        def row(columns: tuple[Specs, ...]) -> Specs:
            return tuple(column[s] for column in columns)

        return EquationSpecs(row(self.operands), row(self.made), row(self.results), is_balanced=s in self.balanced)

    def select(self, numbers: Sequence[int]) -> StrategySet:
        def kept(columns: tuple[Specs, ...]) -> tuple[Specs, ...]:
            return tuple(tuple(column[s] for s in numbers) for column in columns)

        return StrategySet(
            operands=kept(self.operands),
            made=kept(self.made),
            results=kept(self.results),
            compute_s=self.compute_s[list(numbers)],
            communication_s=self.communication_s[list(numbers)],
            balanced=frozenset(i for i, s in enumerate(numbers) if s in self.balanced),
        )


def splits_most(eqn: JaxprEqn, mesh: LogicalMesh) -> bool:
    """Whether only the candidates with the most shards count.

    For an unknown kind of device, compute has no price, so replicated compute would be the cheapest.
    """
    return mesh.device is None and has_contraction(eqn)


def priced(
    eqn: JaxprEqn,
    factors: Factors,
    mesh: LogicalMesh,
    candidates: Candidates,
    *,
    sharing: Sharing,
    gather_s: float | None = None,
) -> StrategySet:
    """Each strategy with its cheapest candidate.

    sharing: how many reductions of one kind over the same axes start together and share one latency.
    gather_s: seconds of a reduction that needs an all-gather, if all-gathers are forbidden.
    """
    work = work_of(eqn, factors, mesh)
    further_s = (
        idle_s(eqn, mesh, candidates)
        + without_kernel_s(eqn, factors, mesh, candidates)
        + not_shared_s(eqn, factors, mesh, candidates)
    )
    compute = (work.shared_s + further_s) / candidates.n_shares + work.fixed_s

    bills = np.array([_bill_s(eqn, bill, mesh, sharing) for bill in candidates.bills], np.float64)
    if gather_s is not None:
        bills[[any(map(_is_gathered, eqn.outvars, bill.finish)) for bill in candidates.bills]] = gather_s
    communication = bills[candidates.bill_of]

    picks, made = candidates.first, candidates.made
    if candidates.has_choice:
        seconds = (compute + communication).tolist()
        picks = np.array([min(choice, key=seconds.__getitem__) for choice in candidates.strategies], np.int64)
        made = tuple(tuple(column[number] for number in picks) for column in made)

    communication = communication[picks]
    if factors.shifts:
        communication = communication + np.array(
            [_rotation_s(eqn, factors, spec, mesh) for spec in candidates.operands[0]]
        )
    strategies = StrategySet(
        operands=candidates.operands,
        made=made,
        results=candidates.results,
        compute_s=compute[picks],
        communication_s=communication,
    )
    strategies = _balanced(eqn, factors, mesh, strategies) if factors.ramps else strategies
    return _with_passes(eqn, factors, mesh, strategies) if factors.rings else strategies


def _with_passes(eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, strategies: StrategySet) -> StrategySet:
    """Each device of a ring computes with a slice while it passes the slice on."""
    rows = zip(*strategies.operands, strict=True)
    passes_s = [
        sum(times * one.seconds(mesh) for one, _, times in passes_of(eqn, factors, specs, mesh.shape)) for specs in rows
    ]
    exposed_s = np.maximum(np.array(passes_s) - strategies.compute_s, 0.0)
    return replace(strategies, communication_s=strategies.communication_s + exposed_s)


def _rotation_s(eqn: JaxprEqn, factors: Factors, operand: Spec, mesh: LogicalMesh) -> float:
    step = rotation_of(factors, operand, mesh.shape)
    collective = step.collective(bytes_of(eqn.invars[0]), mesh.shape) if step is not None else None
    return collective.seconds(mesh) if collective is not None else 0.0


def _balanced(eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, strategies: StrategySet) -> StrategySet:
    """Balanced where the exchange takes less time than it saves.

    For an unknown kind of device, compute has no price: every strategy that can be balanced is.
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
    return step is not None and is_gathered(step.reduction, aval_of(result).dtype)


def _bill_s(eqn: JaxprEqn, bill: Bill, mesh: LogicalMesh, sharing: Sharing) -> float:
    seconds = 0.0
    for step, result in zip(bill.finish, eqn.outvars, strict=True):
        collective = step.collective(bytes_of(result), mesh.shape) if step is not None else None
        if collective is not None:
            seconds += collective.seconds(as_one_of(sharing.of(collective.kind, collective.axes), mesh))

    for r, made, left in bill.moves:
        result = eqn.outvars[r]
        table = reshard_table(shape_of(result), bytes_of(result), mesh, sharing=sharing)
        seconds += table.cost(made, left)
    return seconds
