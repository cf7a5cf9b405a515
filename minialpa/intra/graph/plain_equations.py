"""Whether an equation decides on its own strategy or follows its operands; the costs of its node either way.

An equation whose operands all come from one node *follows* it: the equation has the strategies of that node, and its
cost is added to the node's. In the update, elementwise equations follow the first optimizer value that they read, so
each parameter has a handful of nodes. All other equations get a node of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.intra.graph.constraints import constraint_of_equation
from minialpa.intra.graph.cost_table import CostTable
from minialpa.intra.graph.decisions import Choice, Record
from minialpa.intra.graph.equation_traits import has_own_strategies, is_elementwise, is_identity, makes_array
from minialpa.intra.graph.folding import Varied
from minialpa.intra.graph.mesh_prices import MeshPrices
from minialpa.intra.graph.option_constraints import OptionConstraints, Required
from minialpa.intra.graph.variable_facts import VariableFacts
from minialpa.intra.strategies.strategies import StrategySet
from minialpa.intra.strategies.strategy_cache import EquationKind, StrategyCache
from minialpa.ir.equations import Atom, is_constraint, is_gradient_marker, is_literal, operand_vars, shape_of
from minialpa.options import AutoShardingOption
from minialpa.rules.factors import Factors
from minialpa.sharding import Spec


class Occurrence(NamedTuple):
    """An equation, and what its costs stand for.

    Attributes:
        eqn: the equation.
        times: how often per step it runs, those that are sharded like it included.
        in_update: whether it belongs to the update.
        varied: operands for which the equations that are sharded like it read different variables.
    """

    eqn: JaxprEqn
    times: int
    in_update: bool
    varied: Varied


class PlainEquations:
    """Adds the nodes of equations to `costs`, by the `choices` of their operands."""

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
    ) -> None:
        """`stacked`: what loops stack. They can sum a gradient row by row, unless its sum splits the rows."""
        self._stacked = stacked
        self._mesh, self._option = mesh, option
        self._costs, self._choices, self._not_partial = costs, choices, not_partial
        self._constraints, self._facts, self._cache, self._prices = constraints, facts, cache, prices
        self._optimizer_nodes: set[int] = set()
        self._sums: set[Var] = set()  # reductions that follow their operand, and what follows them

    def record(self, occurrence: Occurrence) -> Record:
        """The strategies of an equation, whose costs are added to its own node or to the one that it follows."""
        eqn, varied = occurrence.eqn, occurrence.varied
        kind = self._cache.kind_of(eqn)
        chosen = self._chosen_operands(eqn)
        if not self._option.enable_auto_sharding or (not chosen and not makes_array(eqn)):
            return self._only_strategy(eqn, kind, is_given=not chosen)

        if self._reads_one_node(occurrence, chosen) and not has_own_strategies(eqn, kind.factors):
            is_sum = self._is_sum(eqn, kind.factors)
            # Edges price a sum once for each reader, unless it has a node that can finish it once for all of them.
            if not is_sum or not any(map(self._facts.is_shared, eqn.outvars)):
                self._sums.update(eqn.outvars if is_sum else ())
                return self._follow(occurrence, kind, chosen)

        if occurrence.in_update:
            lead = self._optimizer_operands(eqn, kind.factors, [k for k in chosen if k not in varied])
            if lead:
                return self._follow(occurrence, kind, lead)
        return self._decide(occurrence, kind)

    def note_alike(self, eqn: JaxprEqn, leader: JaxprEqn) -> None:
        """Let the results of `eqn`, which is sharded like `leader`, count as sums where those of `leader` do."""
        results = zip(eqn.outvars, leader.outvars, strict=True)
        self._sums.update(var for var, of_leader in results if of_leader in self._sums)

    # ---- what an equation reads -----------------------------------------------------------------------------------

    def _choice(self, atom: Atom) -> Choice:
        """The choice of an operand that is not a literal."""
        assert isinstance(atom, Var), atom
        return self._choices[atom]

    def _chosen_operands(self, eqn: JaxprEqn) -> list[int]:
        """Operands of which a node decides the spec."""
        choices = self._choices
        return [k for k, atom in enumerate(eqn.invars) if not is_literal(atom) and choices[atom].node is not None]

    def _reads_one_node(self, occurrence: Occurrence, chosen: Sequence[int]) -> bool:
        """Whether the operands `chosen` come from one node, in all equations that are sharded alike."""
        eqn, varied = occurrence.eqn, occurrence.varied
        sources = {None if k in varied else self._choice(eqn.invars[k]).node for k in chosen}
        return len(sources) == 1 and None not in sources

    def _is_sum(self, eqn: JaxprEqn, factors: Factors) -> bool:
        """Whether an equation sums over a dimension, or reads a sum that follows its operand."""
        return "sum" in factors.reductions.values() or any(var in self._sums for var in operand_vars(eqn))

    def _optimizer_operands(self, eqn: JaxprEqn, factors: Factors, chosen: Sequence[int]) -> list[int]:
        """Operands from the first optimizer node that an elementwise equation can follow; empty if there is none."""
        if not is_elementwise(factors):
            return []
        for k in chosen:
            node = self._choice(eqn.invars[k]).node
            if node in self._optimizer_nodes and shape_of(eqn.invars[k]) == shape_of(eqn.outvars[0]):
                return [j for j in chosen if self._choice(eqn.invars[j]).node == node]
        return []

    # ---- strategies that are given ----------------------------------------------------------------------------------

    def _only_strategy(self, eqn: JaxprEqn, kind: EquationKind, *, is_given: bool) -> Record:
        """An equation that has one strategy: that of its operands if `is_given`, else without any split."""
        given: dict[int, tuple[Spec, ...]] = {}
        if is_given:
            known = {k: self._choice(atom).specs for k, atom in enumerate(eqn.invars) if not is_literal(atom)}
            given = {k: self._cache.same(specs[:1]) for k, specs in known.items()}
        return Record(None, self._followed(eqn, kind, given, 1))

    def _follow(self, occurrence: Occurrence, kind: EquationKind, lead: Sequence[int]) -> Record:
        """Give an equation the strategies of the node that makes its operands `lead`."""
        eqn = occurrence.eqn
        choices = {k: self._choice(eqn.invars[k]) for k in lead}
        node = choices[lead[0]].node
        assert node is not None, eqn

        given = {k: choice.specs for k, choice in choices.items()}
        strategies = self._followed(eqn, kind, given, len(self._costs.nodes[node]))
        self._costs.add_to_node(node, occurrence.times * strategies.seconds)
        return Record(node, strategies)

    def _followed(
        self, eqn: JaxprEqn, kind: EquationKind, given: Mapping[int, tuple[Spec, ...]], n_strategies: int
    ) -> StrategySet:
        """`n_strategies` strategies, number s of which takes each operand in `given` in its spec number s."""
        allow_partial = self._not_partial.isdisjoint(eqn.outvars)
        return self._prices.of(eqn.outvars).follow(eqn, kind, given, n_strategies, allow_partial=allow_partial)

    # ---- strategies to choose from ----------------------------------------------------------------------------------

    def _decide(self, occurrence: Occurrence, kind: EquationKind) -> Record:
        """Give an equation a node of its own."""
        eqn = occurrence.eqn
        is_optimizer = occurrence.in_update and is_elementwise(kind.factors)
        strategies = self._own_strategies(occurrence, kind)

        if is_constraint(eqn) and self._option.keep_constraints:
            constraint = constraint_of_equation(eqn, self._mesh.shape, self._option)
            strategies = strategies.select(
                [s for s, spec in enumerate(strategies.results[0]) if constraint.allows(spec)]
            )
        elif is_optimizer and self._option.sharded_update:
            # Gradients among them: an optimizer works on as many parts as there are devices.
            parts = set(self._constraints.most_split([spec for spec in strategies.results[0] if not spec.partial]))
            strategies = strategies.select([s for s, spec in enumerate(strategies.results[0]) if spec in parts])

        seconds = occurrence.times * strategies.seconds
        if is_gradient_marker(eqn):
            # Of equal sums the one is taken that a loop can make row by row: the others cost a start more.
            for v, specs in zip(eqn.invars, strategies.results, strict=True):
                if not is_literal(v) and v in self._stacked:
                    seconds = seconds + max(self._mesh.alpha) * np.array([bool(spec.dims[0]) for spec in specs])
        node = self._costs.add_node(seconds)
        if is_optimizer:
            self._optimizer_nodes.add(node)
        return Record(node, strategies)

    def _own_strategies(self, occurrence: Occurrence, kind: EquationKind) -> StrategySet:
        """All strategies of an equation that the options allow."""
        eqn, factors = occurrence.eqn, kind.factors
        required = Required()
        if not is_constraint(eqn):
            reads_arrays = bool(self._chosen_operands(eqn))
            required = self._constraints.required(eqn, factors, occurrence.in_update, reads_arrays)

        scatter = not self._option.data_parallel or self._option.sharded_update
        pending = {} if is_identity(eqn) else self._n_pending(eqn, factors)
        strategies = self._prices.of(eqn.outvars)
        return strategies.enumerate(eqn, kind, required.axes, pending, scatter=scatter, kept=required.kept)

    def _n_pending(self, eqn: JaxprEqn, factors: Factors) -> dict[int, int]:
        """For each mesh axis, how many operands may come as partial sums that can pass."""
        counts: dict[int, int] = {}
        for var in {eqn.invars[k] for k in factors.linear_operands if not is_literal(eqn.invars[k])}:
            for axis in {axis for spec in self._choice(var).specs for axis in spec.partial}:
                counts[axis] = counts.get(axis, 0) + 1
        return counts
