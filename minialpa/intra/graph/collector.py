"""Collects the costs of one mesh: the nodes and edges that its equations and inputs make, and what the nodes decide.

Every input and most equations are nodes, whose strategies are specs; plain_equations.py says which equations follow
another node. An edge holds the seconds of resharding a value from the spec in which its node makes it to the spec in
which a reader wants it (resharding_edges.py). Each cost is multiplied by how often per step it is paid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.cost import is_gpu
from minialpa.intra.graph.cost_table import CostTable
from minialpa.intra.graph.decisions import AnyRecord, Choice, LoopRecord, PassRecord, Record
from minialpa.intra.graph.equation_traits import is_barrier
from minialpa.intra.graph.folding import Folding
from minialpa.intra.graph.mesh_prices import MeshPrices
from minialpa.intra.graph.option_constraints import OptionConstraints, fold_problem
from minialpa.intra.graph.plain_equations import Occurrence, PlainEquations
from minialpa.intra.graph.problem import MeshEquations, Role
from minialpa.intra.graph.resharding_edges import Reader, ReshardingEdges
from minialpa.intra.graph.variable_facts import facts_of, loop_scans
from minialpa.intra.strategies.combining import StartCounts
from minialpa.intra.strategies.loops import ScanBody, scan_body
from minialpa.intra.strategies.overlap import hidden_values
from minialpa.intra.strategies.reshard import partial_specs_of
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.ir.equations import (
    Atom,
    aval_of,
    bytes_of,
    is_extended,
    is_inexact,
    is_literal,
    shape_of,
)
from minialpa.options import AutoShardingOption
from minialpa.rules import table as _rules  # noqa: F401  (registers the rules)
from minialpa.sharding import Spec, specs_of

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
        inputs_s: seconds that inputs cost at most, to break ties: no device waits for them.
    """

    costs: CostTable
    choices: Mapping[Var, Choice]
    final: Mapping[Var, Choice]
    records: tuple[AnyRecord, ...]
    folding: Folding | None
    inputs_s: float


def collect_costs(
    problem: MeshEquations,
    mesh: LogicalMesh,
    option: AutoShardingOption,
    *,
    folded: bool,
    cache: StrategyCache,
    counted: StartCounts | None,
    forbidden_s: float,
    hides: bool = False,
) -> CollectedCosts:
    """The costs of `problem` on `mesh`; see `GraphBuilder` for the arguments.

    Raises InfeasibleError if an option cannot be kept on `mesh`.
    """
    collector = _Collector(
        problem, mesh, option, folded=folded, cache=cache, counted=counted, forbidden_s=forbidden_s, hides=hides
    )
    collector.add_inputs()
    collector.add_equations()
    collector.add_results()

    return CollectedCosts(
        costs=collector.costs,
        choices=collector.choices,
        final=collector.final,
        records=tuple(collector.records),
        folding=collector.folding,
        inputs_s=collector.inputs_s,
    )


class _Collector:
    """Adds inputs, then equations, then results of `problem`; each part reads the choices of those before it.

    Attributes:
        costs, choices, final, records, folding, inputs_s: see `CollectedCosts`.
    """

    def __init__(
        self,
        problem: MeshEquations,
        mesh: LogicalMesh,
        option: AutoShardingOption,
        *,
        folded: bool,
        cache: StrategyCache,
        counted: StartCounts | None,
        forbidden_s: float,
        hides: bool,
    ) -> None:
        self._problem, self._mesh, self._cache = problem, mesh, cache
        self._plans_loops = option.enable_auto_sharding  # otherwise all is replicated, inside loops, too

        # What holds whatever the costs are.
        facts = facts_of(problem.eqns, plans_loops=self._plans_loops)
        self._constraints = OptionConstraints(problem, mesh, option)
        self.folding = fold_problem(problem, self._constraints, facts.n_together, cache) if folded else None

        self.costs = CostTable()
        self.choices: dict[Var, Choice] = {}
        self.final: dict[Var, Choice] = {}
        self.records: list[AnyRecord] = []
        self.inputs_s = 0.0
        self._not_partial = set(problem.not_partial)

        # These add to the costs, and read the choices that are made here.
        prices = MeshPrices(mesh, option, cache=cache, facts=facts, counted=counted, forbidden_s=forbidden_s)
        hidden = _hidden(problem) if hides else frozenset[Var]()
        self._edges = ReshardingEdges(self.costs, self.choices, prices, option, hidden=hidden)
        self._plain = PlainEquations(
            mesh,
            option,
            costs=self.costs,
            choices=self.choices,
            not_partial=self._not_partial,
            constraints=self._constraints,
            facts=facts,
            cache=cache,
            prices=prices,
            stacked=_stacked(problem) if is_gpu(mesh.device) else frozenset(),
        )

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
        specs = self._cache.same(self._constraints.input_specs(var, role))
        is_passing = role in ("batch", "received")
        if len(specs) == 1 and is_passing:
            self.choices[var] = Choice(None, specs)
            return

        bandwidth = self._mesh.device.memory_bandwidth if self._mesh.device else _DEFAULT_BANDWIDTH
        weight = (1.0 if is_passing else _KEPT_INPUT_WEIGHT) / bandwidth
        shard_bytes = [bytes_of(var) / spec.n_shards(self._mesh.shape) for spec in specs]
        node = self.costs.add_node([count * weight * n_bytes for n_bytes in shard_bytes])
        self.inputs_s += count * weight * max(shard_bytes)
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
            self._edges.add(Reader(var, final.node, final.specs, times=1))

    # ---- equations ------------------------------------------------------------------------------------------------

    def add_equations(self) -> None:
        for i in range(len(self._problem.eqns)):
            self.records.append(self._record(i))
        self._edges.add_deferred()

    def _record(self, i: int) -> AnyRecord:
        """The record of equation `i`; all equations that are sharded alike share that of the first of them."""
        eqn, times, in_update = self._problem.eqns[i], self._problem.times[i], self._problem.in_update[i]
        folding = self.folding
        if folding is None:
            return self._add_equation(Occurrence(eqn, times, in_update, {}))

        leader = folding.leaders[i]
        if leader == i:
            return self._add_equation(Occurrence(eqn, times * folding.counts[i], in_update, folding.varied.get(i, {})))

        first = self._problem.eqns[leader]
        self._set_results(eqn, [self.choices[var] for var in first.outvars])
        self._plain.note_alike(eqn, first)
        return self.records[leader]

    def _add_equation(self, occurrence: Occurrence) -> AnyRecord:
        scan = scan_body(occurrence.eqn) if self._plans_loops else None
        if scan is not None:
            return self._add_loop(occurrence, scan)
        if is_barrier(occurrence.eqn):
            return self._add_barrier(occurrence)
        return self._add_plain(occurrence)

    def _add_plain(self, occurrence: Occurrence) -> Record:
        record = self._plain.record(occurrence)
        self._set_results(occurrence.eqn, [Choice(record.node, specs) for specs in record.strategies.results])
        for k, wanted in enumerate(record.strategies.operands):
            self._connect(occurrence, k, record.node, wanted)
        return record

    def _set_results(self, eqn: JaxprEqn, choices: Sequence[Choice]) -> None:
        for var, choice in zip(eqn.outvars, choices, strict=True):
            self.choices[var] = choice
            if var in self._not_partial and choice.node is not None:
                self.costs.forbid(choice.node, [bool(spec.partial) for spec in choice.specs])
            total = self._problem.equal.get(var)
            if total is not None:
                self.choices[total] = choice

    def _connect(self, occurrence: Occurrence, k: int, node: int | None, wanted: tuple[Spec, ...]) -> None:
        """Add an edge to operand `k`, or to all variables that equations sharded alike read in its place."""
        eqn, times, _, varied = occurrence
        operand = eqn.invars[k]
        if k in varied:
            # Later equations make some of these variables, so their edges wait until all nodes are there.
            for var, part in varied[k]:
                self._edges.defer(Reader(var, node, wanted, times * part))
        elif not is_literal(operand):
            assert isinstance(operand, Var), operand
            self._edges.add(Reader(operand, node, wanted, times))

    # ---- barriers -------------------------------------------------------------------------------------------------

    def _add_barrier(self, occurrence: Occurrence) -> PassRecord:
        record = PassRecord(tuple(self._passed(occurrence, k) for k in range(len(occurrence.eqn.invars))))
        self._set_results(occurrence.eqn, record.arrays)
        return record

    def _passed(self, occurrence: Occurrence, k: int) -> Choice:
        """Array `k` of a barrier, in the specs of its operand."""
        operand = occurrence.eqn.invars[k]
        if is_literal(operand):
            return _replicated(operand)
        came = self._choice(operand)
        is_complete = occurrence.eqn.outvars[k] in self._not_partial
        if k not in occurrence.varied and not is_complete:
            return came

        # The operand may have another spec than the result: with a node of its own, the result can be resharded.
        specs = came.specs
        if is_complete and all(spec.partial for spec in specs):
            specs = _replicated(operand).specs
        choice = Choice(self.costs.add_node([0.0] * len(specs)), specs)
        self._connect(occurrence, k, choice.node, choice.specs)
        return choice

    def _choice(self, atom: Atom) -> Choice:
        """The choice of an operand that is not a literal."""
        assert isinstance(atom, Var), atom
        return self.choices[atom]

    # ---- loops ----------------------------------------------------------------------------------------------------

    def _add_loop(self, occurrence: Occurrence, scan: ScanBody) -> LoopRecord:
        """Add the body as equations that run in each iteration, all of which are sharded alike."""
        self.choices.update((var, _replicated(var)) for var in scan.flat.constvars)
        self._constraints.enter_loop(occurrence.eqn, scan)

        # What an iteration leaves as partial sums would be so in the stacked result.
        stacked = zip(occurrence.eqn.outvars[scan.n_carry :], scan.flat.outvars[scan.n_carry :], strict=True)
        complete = {v for out, v in stacked if out in self._not_partial and not is_literal(v)} - self._not_partial
        self._not_partial |= complete

        operands = tuple(self._add_loop_operand(occurrence, scan, k) for k in range(len(scan.flat.invars)))
        inner_times = occurrence.times * scan.length
        body = tuple(
            self._add_equation(Occurrence(eqn, inner_times, occurrence.in_update, {})) for eqn in scan.flat.eqns
        )
        results = tuple(self._loop_result(scan, r, operands, inner_times) for r in range(len(scan.flat.outvars)))
        self._not_partial -= complete  # another loop with this body may leave partial sums

        record = LoopRecord(scan, operands, results, body)
        self._set_results(occurrence.eqn, results)
        return record

    def _add_loop_operand(self, occurrence: Occurrence, scan: ScanBody, k: int) -> Choice:
        """Operand `k` of a scan, whose node decides the spec that it has inside in every iteration."""
        inner = scan.flat.invars[k]
        is_carry = scan.n_consts <= k < scan.n_lead
        # A carry may add up over the iterations; left as partial sums, it is summed over devices once, after the loop.
        candidates = partial_specs_of if is_carry and is_inexact(inner) else specs_of
        specs = self._constraints.carry_specs(inner, candidates(shape_of(inner), self._mesh.shape))
        specs = self._cache.same(specs[:1] if is_extended(aval_of(inner).dtype) else specs)

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
                self._edges.add(Reader(inner, carry.node, carry.specs, times=inner_times))
            return carry

        left = _replicated(inner) if is_literal(inner) else self._choice(inner)
        return Choice(left.node, tuple(scan.outer_result(r, spec) for spec in left.specs))


def _hidden(problem: MeshEquations) -> frozenset[Var]:
    """Values whose collectives the work of a mesh can hide, those inside planned loops included."""
    weights = [var for var, role in problem.inputs if role in ("parameter", "state")]
    found = set(hidden_values(problem.eqns, [var for var, _ in problem.inputs], weights, ()))
    found.update(problem.equal.values())  # which the last pass sums beside its work
    for scan in loop_scans(problem.eqns):
        found |= hidden_values(scan.flat.eqns, scan.flat.invars, scan.early, scan.awaited, in_loop=True)
    return frozenset(found)


def _stacked(problem: MeshEquations) -> frozenset[Var]:
    """What planned loops stack, such as the gradients of layers in a scan, and totals of it over micro-batches."""
    scans = ((eqn, scan_body(eqn)) for eqn in problem.eqns)
    found = [v for eqn, scan in scans if scan is not None for v in eqn.outvars[scan.n_carry :]]
    return frozenset(found) | {problem.equal[v] for v in found if v in problem.equal}


def _replicated(atom: Atom) -> Choice:
    """The choice of what every device has in full."""
    return Choice(None, (Spec.replicated(len(shape_of(atom))),))
