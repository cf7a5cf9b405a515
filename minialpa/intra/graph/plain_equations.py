"""An equation and the choices of its operands in; its strategies out, and its costs are added to a node.

An equation whose operands all come from one node *follows* this node: it has one strategy per strategy of the node. In
the update, elementwise equations follow the first optimizer value that they read, so each parameter has a handful of
nodes.

    h = x @ w       new node: strategies of a product
    y = tanh(h)     follows the node of h
    z = y + b       new node: y and b come from two nodes
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Var
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.intra.graph.constraints import constraint_of_equation
from minialpa.intra.graph.decisions import Choice, CostTable, Record
from minialpa.intra.graph.folding import Varied
from minialpa.intra.graph.option_constraints import OptionConstraints, Required
from minialpa.intra.graph.prices import MeshPrices, VariableFacts
from minialpa.intra.strategies.sharing import is_shared_copy
from minialpa.intra.strategies.strategies import StrategySet
from minialpa.intra.strategies.strategy_cache import StrategyCache, StrategyKey
from minialpa.ir.equations import Atom, is_constraint, is_gradient_marker, is_literal, operand_vars, shape_of
from minialpa.options import AutoShardingOption
from minialpa.rules.expensive import is_contraction
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import is_kernel
from minialpa.sharding import Spec

#: Seconds against a hint: below every difference between plans, above rounding.
_HINT_S = 1e-9


class Occurrence(NamedTuple):
    """An equation, and all equations that are sharded like it.

    times: runs per step, of all of them.
    varied: the operands in which they read different variables.
    """

    eqn: JaxprEqn
    times: int
    in_update: bool
    varied: Varied


class PlainEquations:
    def __init__(
        self,
        mesh: LogicalMesh,
        option: AutoShardingOption,
        *,
        costs: CostTable,
        choices: Mapping[Var, Choice],
        not_partial: AbstractSet[Var],
        constraints: OptionConstraints,
        facts: VariableFacts,
        cache: StrategyCache,
        prices: MeshPrices,
        stacked: frozenset[Var] = frozenset(),
        hidden: frozenset[Var] = frozenset(),
        hidden_price: float = 1.0,
    ) -> None:
        """See `CollectedCosts`.

        stacked: stacked results of loops. A loop can sum a gradient slice by slice, unless the sum splits dimension 0.
        hidden: variables whose collectives cost `hidden_price` times their seconds.
        """
        self._stacked, self._hidden, self._hidden_price = stacked, hidden, hidden_price
        self._mesh, self._option = mesh, option
        self._costs, self._choices, self._not_partial = costs, choices, not_partial
        self._constraints, self._facts, self._cache, self._prices = constraints, facts, cache, prices
        self._optimizer_nodes: set[int] = set()  # nodes of elementwise equations of the update
        self._sums: set[Var] = set()  # sums that follow their operand, and results that follow these

    def record(self, occurrence: Occurrence) -> Record:
        """Adds the costs of the strategies to a new node or to the node to follow."""
        eqn, varied = occurrence.eqn, occurrence.varied
        kind = self._cache.kind_of(eqn)
        chosen = self._chosen_operands(eqn)
        if not self._option.enable_auto_sharding or (not chosen and not _makes_array(eqn)):
            return self._only_strategy(eqn, kind, is_given=not chosen)

        if self._reads_one_node(occurrence, chosen) and not _has_own_strategies(eqn, kind.factors):
            is_sum = "sum" in kind.factors.reductions.values() or any(var in self._sums for var in operand_vars(eqn))
            # A new node can finish a pending sum once for all readers; edges price it once per reader.
            if not is_sum or not any(map(self._facts.is_shared, eqn.outvars)):
                self._sums.update(eqn.outvars if is_sum else ())
                return self._follow_node(occurrence, kind, chosen)

        if occurrence.in_update:
            lead = self._optimizer_operands(eqn, kind.factors, [k for k in chosen if k not in varied])
            if lead:
                return self._follow_node(occurrence, kind, lead)
        return self._add_node(occurrence, kind)

    def note_alike(self, eqn: JaxprEqn, leader: JaxprEqn) -> None:
        """Let the results of `eqn` count as sums if the results of `leader` do."""
        results = zip(eqn.outvars, leader.outvars, strict=True)
        self._sums.update(var for var, of_leader in results if of_leader in self._sums)

    # ---- what an equation reads -----------------------------------------------------------------------------------

    def _choice(self, atom: Atom) -> Choice:
        assert isinstance(atom, Var), atom
        return self._choices[atom]

    def _chosen_operands(self, eqn: JaxprEqn) -> list[int]:
        """Operands whose specs a node decides."""
        choices = self._choices
        return [k for k, atom in enumerate(eqn.invars) if not is_literal(atom) and choices[atom].node is not None]

    def _reads_one_node(self, occurrence: Occurrence, chosen: Sequence[int]) -> bool:
        eqn, varied = occurrence.eqn, occurrence.varied
        sources = {None if k in varied else self._choice(eqn.invars[k]).node for k in chosen}
        return len(sources) == 1 and None not in sources

    def _optimizer_operands(self, eqn: JaxprEqn, factors: Factors, chosen: Sequence[int]) -> list[int]:
        """The operands from the first optimizer node that an elementwise equation can follow; some may be scalars.

        chosen: operands whose specs a node decides.
        """
        if not _is_elementwise(factors):
            return []
        for k in chosen:
            node = self._choice(eqn.invars[k]).node
            if node in self._optimizer_nodes and shape_of(eqn.invars[k]) == shape_of(eqn.outvars[0]):
                return [j for j in chosen if self._choice(eqn.invars[j]).node == node]
        return []

    def _seconds(self, eqn: JaxprEqn, strategies: StrategySet) -> NDArray[np.float64]:
        if not self._hidden.issuperset(eqn.outvars):
            return strategies.seconds
        return strategies.compute_s + self._hidden_price * strategies.communication_s

    # ---- strategies that are given ----------------------------------------------------------------------------------

    def _only_strategy(self, eqn: JaxprEqn, kind: StrategyKey, *, is_given: bool) -> Record:
        given: dict[int, tuple[Spec, ...]] = {}
        if is_given:
            known = {k: self._choice(atom).specs for k, atom in enumerate(eqn.invars) if not is_literal(atom)}
            given = {k: self._cache.same(specs[:1]) for k, specs in known.items()}
        return Record(None, self._following_strategies(eqn, kind, given, 1))

    def _follow_node(self, occurrence: Occurrence, kind: StrategyKey, lead: Sequence[int]) -> Record:
        eqn = occurrence.eqn
        choices = {k: self._choice(eqn.invars[k]) for k in lead}
        node = choices[lead[0]].node
        assert node is not None, eqn

        given = {k: choice.specs for k, choice in choices.items()}
        strategies = self._following_strategies(eqn, kind, given, len(self._costs.nodes[node]))
        self._costs.nodes[node] += occurrence.times * self._seconds(eqn, strategies)
        return Record(node, strategies)

    def _following_strategies(
        self, eqn: JaxprEqn, kind: StrategyKey, given: Mapping[int, tuple[Spec, ...]], n_strategies: int
    ) -> StrategySet:
        """Strategy s reads operand k in the spec `given[k][s]`."""
        allow_partial = self._not_partial.isdisjoint(eqn.outvars)
        priced_strategies = self._prices.of(eqn.outvars)
        return priced_strategies.follow(eqn, kind, given, n_strategies, allow_partial=allow_partial)

    # ---- strategies to choose from ----------------------------------------------------------------------------------

    def _add_node(self, occurrence: Occurrence, kind: StrategyKey) -> Record:
        eqn = occurrence.eqn
        is_optimizer = occurrence.in_update and _is_elementwise(kind.factors)
        strategies = self._own_strategies(occurrence, kind)

        hint_s: NDArray[np.float64] | float = 0.0
        if is_constraint(eqn) and self._option.shardings != "ignore":
            allowed = self._allowed(eqn, strategies)
            if self._option.shardings == "pin":
                strategies = strategies.select(np.flatnonzero(allowed).tolist())
            else:
                hint_s = np.where(allowed, 0.0, _HINT_S)
        elif is_optimizer and self._option.sharded_update:
            # As many shards as possible.
            parts = set(self._constraints.most_split([spec for spec in strategies.results[0] if not spec.partial]))
            strategies = strategies.select([s for s, spec in enumerate(strategies.results[0]) if spec in parts])

        seconds = occurrence.times * self._seconds(eqn, strategies) + hint_s
        if is_gradient_marker(eqn):
            # A sum that a loop can make slice by slice is best: the others cost one more start.
            for v, specs in zip(eqn.invars, strategies.results, strict=True):
                if not is_literal(v) and v in self._stacked:
                    seconds = seconds + max(self._mesh.alpha) * np.array([bool(spec.dims[0]) for spec in specs])
        node = self._costs.add_node(seconds)
        if is_optimizer:
            self._optimizer_nodes.add(node)
        return Record(node, strategies)

    def _allowed(self, eqn: JaxprEqn, strategies: StrategySet) -> NDArray[np.bool_]:
        """For each strategy, whether the user's sharding allows it; all, if a hint is for another mesh."""
        try:
            constraint = constraint_of_equation(eqn, self._mesh.shape, self._option)
        except InfeasibleError:
            if self._option.shardings == "pin":
                raise
            return np.full(len(strategies.seconds), True)
        return np.array([constraint.allows(spec) for spec in strategies.results[0]])

    def _own_strategies(self, occurrence: Occurrence, kind: StrategyKey) -> StrategySet:
        eqn, factors = occurrence.eqn, kind.factors
        required = Required()
        if not is_constraint(eqn):
            reads_arrays = bool(self._chosen_operands(eqn))
            required = self._constraints.required(eqn, factors, occurrence.in_update, reads_arrays)

        scatter = not self._option.data_parallel or self._option.sharded_update
        pending = {} if _is_identity(eqn) else self._n_pending(eqn, factors)
        strategies = self._prices.of(eqn.outvars)
        return strategies.enumerate(eqn, kind, required.axes, pending, scatter=scatter, kept=required.kept)

    def _n_pending(self, eqn: JaxprEqn, factors: Factors) -> dict[int, int]:
        """For each mesh axis, the operands that may be partial sums and pass."""
        counts: dict[int, int] = {}
        for var in {eqn.invars[k] for k in factors.linear_operands if not is_literal(eqn.invars[k])}:
            for axis in {axis for spec in self._choice(var).specs for axis in spec.partial}:
                counts[axis] = counts.get(axis, 0) + 1
        return counts


# ---- traits of equations --------------------------------------------------------------------------------------------


def is_barrier(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "optimization_barrier"


def _is_identity(eqn: JaxprEqn) -> bool:
    """Whether an equation only gives its result another sharding."""
    return is_gradient_marker(eqn) or is_shared_copy(eqn)


def _makes_array(eqn: JaxprEqn) -> bool:
    return any(math.prod(shape_of(var)) > 1 for var in eqn.outvars)


def _has_own_strategies(eqn: JaxprEqn, factors: Factors) -> bool:
    return is_contraction(eqn) or is_kernel(eqn) or _widens(factors) or _is_identity(eqn) or is_constraint(eqn)


def _widens(factors: Factors) -> bool:
    """Whether results have splittable dimensions that no operand has."""
    read = {factor for dims in factors.operands for dim in dims for factor in dim}
    made = (factor for dims in factors.results for dim in dims for factor in dim)
    return any(f not in read and factors.sizes[f] > 1 and f not in factors.blocked for f in made)


def _is_elementwise(factors: Factors) -> bool:
    """The result has the dimensions of every operand that is not a scalar."""
    result = factors.results[0] if len(factors.results) == 1 else None
    return result is not None and all(not dims or dims == result for dims in factors.operands)
