"""Collects the costs of one mesh: the nodes and edges that its equations and inputs make, and what the nodes decide.

Every input and most equations are nodes, whose strategies are specs. An equation whose operands all come from one node
*follows* it: the equation has the strategies of that node, and its cost is added to the node's. In the update,
elementwise equations follow the first optimizer value that they read, so each parameter has a handful of nodes. An edge
holds the seconds of resharding a value from the spec in which its node makes it to the spec in which a reader wants it.
Each cost is multiplied by how often per step it is paid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.intra.graph.constraints import constraint_of_equation
from minialpa.intra.graph.cost_table import CostTable
from minialpa.intra.graph.decisions import AnyRecord, Choice, LoopRecord, PassRecord, Record
from minialpa.intra.graph.equation_traits import (
    has_own_strategies,
    is_barrier,
    is_elementwise,
    is_identity,
    makes_array,
)
from minialpa.intra.graph.folding import Folding, Varied
from minialpa.intra.graph.option_constraints import OptionConstraints, Required, fold_problem, forbidden_message
from minialpa.intra.graph.problem import MeshEquations, Role
from minialpa.intra.strategies.combining import n_together
from minialpa.intra.strategies.loops import ScanBody, examples_inside, scan_body
from minialpa.intra.strategies.reshard import partial_specs_of
from minialpa.intra.strategies.strategies import StrategySet
from minialpa.intra.strategies.strategy_cache import EquationKind, Menu, Menus
from minialpa.options import AutoShardingOption
from minialpa.rules import table as _rules  # noqa: F401  (registers the rules)
from minialpa.rules.factors import Factors
from minialpa.sharding import Spec, specs_of
from minialpa.tracing.jaxprs import (
    Atom,
    aval_of,
    bytes_of,
    is_constraint,
    is_extended,
    is_gradient_marker,
    is_inexact,
    is_literal,
    operand_vars,
    shape_of,
)

#: Bytes per second at which a device without a description reads its inputs.
_DEFAULT_BANDWIDTH = 1e12
#: Weight of the bytes of an input that stays on the mesh between steps: it takes room and no time, so its size only
#: breaks ties.
_KEPT_INPUT_WEIGHT = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedCosts:
    """The costs of a mesh, and what its nodes decide.

    Attributes:
        costs: costs of nodes and edges.
        choices: for each variable, those of loops included, the choice of its spec.
        final: the choice of the spec of each result that is not left as it is made.
        records: the record of each equation; equations that are sharded alike share it.
        folding: which equations and inputs are sharded alike; None if each is decided on its own.
    """

    costs: CostTable
    choices: Mapping[Var, Choice]
    final: Mapping[Var, Choice]
    records: tuple[AnyRecord, ...]
    folding: Folding | None


def collect_costs(
    problem: MeshEquations,
    mesh: LogicalMesh,
    option: AutoShardingOption,
    *,
    folded: bool,
    menus: Menus,
    forbidden_s: float,
) -> CollectedCosts:
    """The costs of `problem` on `mesh`; see `GraphBuilder` for the arguments.

    Raises InfeasibleError if an option cannot be kept on `mesh`.
    """
    collector = _Collector(problem, mesh, option, folded=folded, menus=menus, forbidden_s=forbidden_s)
    collector.add_inputs()
    collector.add_equations()
    collector.add_results()
    return CollectedCosts(
        costs=collector.costs,
        choices=collector.choices,
        final=collector.final,
        records=tuple(collector.records),
        folding=collector.folding,
    )


class _Occurrence(NamedTuple):
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


class _Reader(NamedTuple):
    """The strategies of a node that read a variable.

    Attributes:
        var: the variable.
        node: the node that reads it; None for a reader that has one strategy.
        wanted: the spec in which each strategy wants the variable.
        times: how often per step the variable is resharded; a fraction for one of several that are read in turn.
        synced: whether the sum of the variable starts together with those of all gradients.
    """

    var: Var
    node: int | None
    wanted: tuple[Spec, ...]
    times: float
    synced: bool = False


class _Collector:
    """Adds inputs, then equations, then results of `problem`; each part reads the choices of those before it.

    Attributes:
        costs, choices, final, records, folding: see `CollectedCosts`.
    """

    def __init__(
        self,
        problem: MeshEquations,
        mesh: LogicalMesh,
        option: AutoShardingOption,
        *,
        folded: bool,
        menus: Menus,
        forbidden_s: float,
    ) -> None:
        self._problem, self._mesh, self._option = problem, mesh, option
        self._menus, self._forbidden_s = menus, forbidden_s
        self._menu_of: dict[int, Menu] = {}  # by the number of sums that start together

        # Facts about variables. Those about the variables of a loop are added when the loop is.
        self._n_gradients = max(1, sum(map(is_gradient_marker, problem.eqns)))
        self._n_together = n_together(problem.eqns)
        self._n_readers = Counter(var for eqn in problem.eqns for var in operand_vars(eqn))
        self._constraints = OptionConstraints(problem, mesh, option)
        self.folding = fold_problem(problem, self._constraints, self._n_together, menus) if folded else None

        self.costs = CostTable()
        self.choices: dict[Var, Choice] = {}
        self.final: dict[Var, Choice] = {}
        self.records: list[AnyRecord] = []
        self._optimizer_nodes: set[int] = set()
        self._sums: set[Var] = set()  # reductions that follow their operand, and what follows them
        self._deferred: list[_Reader] = []

    # ---- inputs and results ---------------------------------------------------------------------------------------

    def add_inputs(self) -> None:
        alike = self.folding.inputs if self.folding else {}
        counts = Counter(alike.values())
        for var, role in self._problem.inputs:
            leader = alike.get(var, var)
            if leader is var:
                self._add_input(var, role, max(1, counts[var]))
            else:
                self.choices[var] = self.choices[leader]

    def _add_input(self, var: Var, role: Role, count: int) -> None:
        """Add the node of an input that stands for `count` inputs."""
        specs = self._menus.same(self._constraints.input_specs(var, role))
        is_passing = role in ("batch", "received")
        if len(specs) == 1 and is_passing:
            self.choices[var] = Choice(None, specs)
            return

        bandwidth = self._mesh.device.memory_bandwidth if self._mesh.device else _DEFAULT_BANDWIDTH
        weight = (1.0 if is_passing else _KEPT_INPUT_WEIGHT) / bandwidth
        shard_bytes = [bytes_of(var) / spec.n_shards(self._mesh.shape) for spec in specs]
        node = self.costs.add_node([count * weight * n_bytes for n_bytes in shard_bytes])
        self.choices[var] = Choice(node, specs)

    def add_results(self) -> None:
        """Results are left in a spec that the user fixes, in that of the donated input they replace, or as made."""
        replaced = {target: source for source, target in self._problem.aliases}
        for var, path in self._problem.results:
            fixed = self._constraints.fixed(var, path)
            if fixed is not None:
                final = Choice(None, (fixed.spec,))
            elif var in replaced:
                final = self.choices[replaced[var]]
            else:
                continue
            self.final[var] = final
            self._add_edge(_Reader(var=var, node=final.node, wanted=final.specs, times=1))

    # ---- equations ------------------------------------------------------------------------------------------------

    def add_equations(self) -> None:
        for i in range(len(self._problem.eqns)):
            self.records.append(self._record(i))
        for reader in self._deferred:
            self._add_edge(reader)

    def _record(self, i: int) -> AnyRecord:
        """The record of equation `i`; all equations that are sharded alike share that of the first of them."""
        eqn, times, in_update = self._problem.eqns[i], self._problem.times[i], self._problem.in_update[i]
        folding = self.folding
        if folding is None:
            return self._add_equation(_Occurrence(eqn=eqn, times=times, in_update=in_update, varied={}))

        leader = folding.leaders[i]
        if leader == i:
            times, varied = times * folding.counts[i], folding.varied.get(i, {})
            return self._add_equation(_Occurrence(eqn=eqn, times=times, in_update=in_update, varied=varied))

        made = self._problem.eqns[leader].outvars
        self._set_results(eqn, [self.choices[var] for var in made])
        self._sums.update(own for own, var in zip(eqn.outvars, made, strict=True) if var in self._sums)
        return self.records[leader]

    def _add_equation(self, occurrence: _Occurrence) -> AnyRecord:
        scan = scan_body(occurrence.eqn)
        if scan is not None and self._option.enable_auto_sharding and not self._option.data_parallel:
            return self._add_loop(occurrence, scan)
        if is_barrier(occurrence.eqn):
            return self._add_barrier(occurrence)
        return self._add_plain(occurrence)

    def _set_results(self, eqn: JaxprEqn, choices: Sequence[Choice]) -> None:
        for var, choice in zip(eqn.outvars, choices, strict=True):
            self.choices[var] = choice
            if var in self._problem.whole and choice.node is not None:
                self.costs.forbid(choice.node, [bool(spec.partial) for spec in choice.specs])
            total = self._problem.equal.get(var)
            if total is not None:
                self.choices[total] = choice

    def _choice(self, atom: Atom) -> Choice:
        """The choice of an operand that is not a literal."""
        assert isinstance(atom, Var), atom
        return self.choices[atom]

    # ---- barriers -------------------------------------------------------------------------------------------------

    def _add_barrier(self, occurrence: _Occurrence) -> PassRecord:
        record = PassRecord(tuple(self._passed(occurrence, k) for k in range(len(occurrence.eqn.invars))))
        self._set_results(occurrence.eqn, record.arrays)
        return record

    def _passed(self, occurrence: _Occurrence, k: int) -> Choice:
        """Array `k` of a barrier, in the specs of its operand."""
        operand = occurrence.eqn.invars[k]
        if is_literal(operand):
            return _replicated(operand)
        came = self._choice(operand)
        if k not in occurrence.varied and occurrence.eqn.outvars[k] not in self._problem.whole:
            return came

        # The operand may have another spec than the result: with a node of its own, the result can be resharded.
        choice = Choice(self.costs.add_node([0.0] * len(came.specs)), came.specs)
        self._connect(occurrence, k, choice.node, choice.specs)
        return choice

    # ---- loops ----------------------------------------------------------------------------------------------------

    def _add_loop(self, occurrence: _Occurrence, scan: ScanBody) -> LoopRecord:
        """Add the body as equations that run in each iteration, all of which are sharded alike."""
        self._add_facts_inside(occurrence.eqn, scan)

        operands = tuple(self._add_loop_operand(occurrence, scan, k) for k in range(len(scan.flat.invars)))
        inner_times = occurrence.times * scan.length
        body = tuple(
            self._add_equation(_Occurrence(eqn=eqn, times=inner_times, in_update=occurrence.in_update, varied={}))
            for eqn in scan.flat.eqns
        )
        results = tuple(self._loop_result(scan, r, operands, inner_times) for r in range(len(scan.flat.outvars)))

        record = LoopRecord(scan, operands, results, body)
        self._set_results(occurrence.eqn, results)
        return record

    def _add_facts_inside(self, eqn: JaxprEqn, scan: ScanBody) -> None:
        """Add the facts about the variables of a loop to those about the variables around it."""
        flat = scan.flat
        self._n_together.update(n_together(flat.eqns))
        self._n_readers.update(var for inner in flat.eqns for var in operand_vars(inner))
        self.choices.update((var, _replicated(var)) for var in flat.constvars)
        self._constraints.example_dims.update(examples_inside(eqn, scan, self._constraints.example_dims))

    def _add_loop_operand(self, occurrence: _Occurrence, scan: ScanBody, k: int) -> Choice:
        """Operand `k` of a scan, whose node decides the spec that it has inside in every iteration."""
        inner = scan.flat.invars[k]
        is_carry = scan.n_consts <= k < scan.n_lead
        # A carry may add up over the iterations; left as partial sums, it is summed over devices once, after the loop.
        candidates = partial_specs_of if is_carry and is_inexact(inner) else specs_of
        specs = self._constraints.carry_specs(inner, candidates(shape_of(inner), self._mesh.shape))
        specs = self._menus.same(specs[:1] if is_extended(aval_of(inner).dtype) else specs)

        node = self.costs.add_node([0.0] * len(specs))
        self.choices[inner] = Choice(node, specs)
        operand = Choice(node, tuple(scan.outer_operand(k, spec) for spec in specs))
        self._connect(occurrence, k, operand.node, operand.specs)
        return operand

    def _loop_result(self, scan: ScanBody, r: int, operands: Sequence[Choice], inner_times: int) -> Choice:
        """Result `r` of a scan; a carry is resharded at the end of each iteration to the spec in which it entered."""
        inner = scan.flat.outvars[r]
        if r < scan.n_carry:
            carry = operands[scan.n_consts + r]
            if not is_literal(inner):
                assert isinstance(inner, Var), inner
                self._add_edge(_Reader(var=inner, node=carry.node, wanted=carry.specs, times=inner_times))
            return carry

        left = _replicated(inner) if is_literal(inner) else self._choice(inner)
        return Choice(left.node, tuple(scan.outer_result(r, spec) for spec in left.specs))

    # ---- plain equations ------------------------------------------------------------------------------------------

    def _add_plain(self, occurrence: _Occurrence) -> Record:
        record = self._plain_record(occurrence)
        self._set_results(occurrence.eqn, [Choice(record.node, specs) for specs in record.strategies.results])
        for k, wanted in enumerate(record.strategies.operands):
            self._connect(occurrence, k, record.node, wanted)
        return record

    def _plain_record(self, occurrence: _Occurrence) -> Record:
        eqn, varied = occurrence.eqn, occurrence.varied
        kind = self._menus.kind_of(eqn)
        chosen = self._chosen_operands(eqn)
        if not self._option.enable_auto_sharding or (not chosen and not makes_array(eqn)):
            return self._only_strategy(eqn, kind, is_given=not chosen)

        if self._reads_one_node(occurrence, chosen) and not has_own_strategies(eqn, kind.factors):
            is_sum = self._is_sum(eqn, kind.factors)
            # Edges price a sum once for each reader, unless it has a node that can finish it once for all of them.
            if not is_sum or all(self._n_readers[var] <= 1 for var in eqn.outvars):
                self._sums.update(eqn.outvars if is_sum else ())
                return self._follow(occurrence, kind, chosen)

        if occurrence.in_update:
            lead = self._optimizer_operands(eqn, kind.factors, [k for k in chosen if k not in varied])
            if lead:
                return self._follow(occurrence, kind, lead)
        return self._decide(occurrence, kind)

    def _chosen_operands(self, eqn: JaxprEqn) -> list[int]:
        """Operands of which a node decides the spec."""
        return [k for k, atom in enumerate(eqn.invars) if not is_literal(atom) and self.choices[atom].node is not None]

    def _reads_one_node(self, occurrence: _Occurrence, chosen: Sequence[int]) -> bool:
        """Whether the operands `chosen` come from one node, in all equations that are sharded alike."""
        eqn, varied = occurrence.eqn, occurrence.varied
        sources = {None if k in varied else self._choice(eqn.invars[k]).node for k in chosen}
        return len(sources) == 1 and None not in sources

    def _only_strategy(self, eqn: JaxprEqn, kind: EquationKind, *, is_given: bool) -> Record:
        """An equation that has one strategy: that of its operands if `is_given`, else without any split."""
        given: dict[int, tuple[Spec, ...]] = {}
        if is_given:
            known = {k: self._choice(atom).specs for k, atom in enumerate(eqn.invars) if not is_literal(atom)}
            given = {k: self._menus.same(specs[:1]) for k, specs in known.items()}
        return Record(None, self._menu(eqn.outvars).follow(eqn, kind, given, 1, whole=self._is_whole(eqn)))

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

    def _follow(self, occurrence: _Occurrence, kind: EquationKind, lead: Sequence[int]) -> Record:
        """Give an equation the strategies of the node that makes its operands `lead`."""
        eqn = occurrence.eqn
        choices = {k: self._choice(eqn.invars[k]) for k in lead}
        node = choices[lead[0]].node
        assert node is not None, eqn

        given = {k: choice.specs for k, choice in choices.items()}
        n_strategies = len(self.costs.nodes[node])
        strategies = self._menu(eqn.outvars).follow(eqn, kind, given, n_strategies, whole=self._is_whole(eqn))
        self.costs.add_to_node(node, occurrence.times * strategies.seconds)
        return Record(node, strategies)

    def _decide(self, occurrence: _Occurrence, kind: EquationKind) -> Record:
        """Give an equation a node of its own."""
        eqn, factors = occurrence.eqn, kind.factors
        is_optimizer = occurrence.in_update and is_elementwise(factors)
        strategies = self._own_strategies(occurrence, kind)
        if is_constraint(eqn):
            constraint = constraint_of_equation(eqn, self._mesh.shape)
            strategies = strategies.select(
                [s for s, spec in enumerate(strategies.results[0]) if constraint.allows(spec)]
            )
        elif is_optimizer and self._option.sharded_update:
            # Gradients among them: an optimizer works on as many parts as there are devices.
            parts = set(self._constraints.most_split([spec for spec in strategies.results[0] if not spec.partial]))
            strategies = strategies.select([s for s, spec in enumerate(strategies.results[0]) if spec in parts])

        node = self.costs.add_node(occurrence.times * strategies.seconds)
        if is_optimizer:
            self._optimizer_nodes.add(node)
        return Record(node, strategies)

    def _own_strategies(self, occurrence: _Occurrence, kind: EquationKind) -> StrategySet:
        """All strategies of an equation that the options allow."""
        eqn, factors = occurrence.eqn, kind.factors
        required = Required()
        if not is_constraint(eqn):
            reads_arrays = bool(self._chosen_operands(eqn))
            required = self._constraints.required(eqn, factors, occurrence.in_update, reads_arrays)
        scatter = not self._option.data_parallel or self._option.sharded_update
        pending = {} if is_identity(eqn) else self._n_pending(eqn, factors)
        return self._menu(eqn.outvars).enumerate(eqn, kind, required.axes, pending, scatter=scatter, kept=required.kept)

    def _n_pending(self, eqn: JaxprEqn, factors: Factors) -> dict[int, int]:
        """For each mesh axis, how many operands may come as partial sums that can pass."""
        counts: dict[int, int] = {}
        for var in {eqn.invars[k] for k in factors.linear_operands if not is_literal(eqn.invars[k])}:
            for axis in {axis for spec in set(self._choice(var).specs) for axis in spec.partial}:
                counts[axis] = counts.get(axis, 0) + 1
        return counts

    def _is_whole(self, eqn: JaxprEqn) -> bool:
        """Whether no result may be left as partial sums."""
        return any(var in self._problem.whole for var in eqn.outvars)

    def _menu(self, made: Sequence[Var], at_least: int = 1) -> Menu:
        """Strategies and prices for an equation that makes `made`, whose sums share the time to start with others."""
        n_sums = max([at_least, *(self._n_together.get(var, 1) for var in made)])
        if n_sums not in self._menu_of:
            forbidden = self._option.forbidden_collectives
            self._menu_of[n_sums] = self._menus.of(self._mesh, forbidden, n_sums, self._forbidden_s)
        return self._menu_of[n_sums]

    # ---- edges ----------------------------------------------------------------------------------------------------

    def _connect(self, occurrence: _Occurrence, k: int, node: int | None, wanted: tuple[Spec, ...]) -> None:
        """Add an edge to operand `k`, or to all variables that equations sharded alike read in its place."""
        operand, times = occurrence.eqn.invars[k], occurrence.times
        synced = is_gradient_marker(occurrence.eqn)
        if k in occurrence.varied:
            # Later equations make some of these variables, so their edges wait until all nodes are there.
            self._deferred += [
                _Reader(var=var, node=node, wanted=wanted, times=times * part, synced=synced)
                for var, part in occurrence.varied[k]
            ]
        elif not is_literal(operand):
            assert isinstance(operand, Var), operand
            self._add_edge(_Reader(var=operand, node=node, wanted=wanted, times=times, synced=synced))

    def _add_edge(self, reader: _Reader) -> None:
        """Add what it costs to reshard a variable from the spec in which it is made to the one that is wanted."""
        var, made = reader.var, self.choices[reader.var]
        menu = self._menu([var], self._n_gradients if reader.synced else 1)
        cost = reader.times * menu.reshard_s(shape_of(var), bytes_of(var), made.specs, reader.wanted)
        if not cost.any():
            return

        if made.node is None and reader.node is None:
            if not np.isfinite(cost).all():
                raise InfeasibleError(forbidden_message(self._option, var, made.specs[0], reader.wanted[0]))
            return
        self.costs.add_edge(made.node, reader.node, cost)


def _replicated(atom: Atom) -> Choice:
    """The choice of what every device has in full."""
    return Choice(None, (Spec.replicated(len(shape_of(atom))),))
