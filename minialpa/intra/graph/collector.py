"""A `MeshEquations` in; nodes and edges with costs out, and the spec choices that the nodes decide.

Inputs and most equations are nodes; other equations follow a node (plain_equations.py). An edge has the seconds of
resharding a value from the spec of its maker to the spec of a reader. All costs are multiplied by the runs per step.

    x: input          node 0: R, S0
    h = x @ w         node 1, with its seconds; edge (0, 1): resharding of x
    y = tanh(h)       follows node 1: adds its seconds to the same node
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.cost import adding_s, is_gpu
from minialpa.errors import InfeasibleError
from minialpa.intra.graph.decisions import AnyRecord, Choice, CostTable, LoopRecord, PassRecord, Record
from minialpa.intra.graph.option_constraints import OptionConstraints, fold_problem, forbidden_message
from minialpa.intra.graph.plain_equations import Occurrence, PlainEquations, is_barrier
from minialpa.intra.graph.prices import MeshPrices, facts_of, loop_scans
from minialpa.intra.graph.problem import MeshEquations, Role
from minialpa.intra.solver.cost_graph import EdgeCosts
from minialpa.intra.strategies.combining import StartCounts
from minialpa.intra.strategies.compared import compared_values
from minialpa.intra.strategies.loops import ScanBody, scan_body
from minialpa.intra.strategies.overlap import hidden_values
from minialpa.intra.strategies.reshard import partial_specs_of
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.ir.equations import Atom, aval_of, bytes_of, is_extended, is_inexact, is_literal, shape_of
from minialpa.options import AutoShardingOption
from minialpa.rules import table as _rules  # noqa: F401  (registers the rules)
from minialpa.sharding import Spec, specs_of

#: Of a device without a description, in bytes per second.
_DEFAULT_BANDWIDTH = 1e12
#: Weight of the bytes of an input that stays on the mesh between steps: they only break ties.
_KEPT_INPUT_WEIGHT = 1e-3


class _ReaderNode(NamedTuple):
    """A node that reads `var`.

    required: the spec of `var` that each strategy of `node` requires.
    times: reshardings of `var` per step; a fraction of the runs if several variables are read in turn.
    """

    var: Var
    node: int | None
    required: tuple[Spec, ...]
    times: float


class CollectedCosts:
    """Nodes, edges and choices of `problem`; `__init__` collects inputs, then equations, then results.

    Attributes:
        choices: of each variable, also inside loops.
        final: of each result that is resharded at the end.
        records: of each equation; equations that are sharded alike share one.
        inputs_s: most seconds of the inputs, which only break ties: no device waits for them.
    """

    def __init__(
        self,
        problem: MeshEquations,
        mesh: LogicalMesh,
        option: AutoShardingOption,
        *,
        cache: StrategyCache | None = None,
        counted: StartCounts | None = None,
        forbidden_s: float = math.inf,
        hidden_price: float = 1.0,
    ) -> None:
        """Raises InfeasibleError if an option cannot be kept on `mesh`.

        counted: how many sums of gradients start together, in an earlier solution.
        forbidden_s: seconds of a forbidden collective; infinite rules it out.
        hidden_price: price of collectives that work can hide, as a part of their seconds.
        """
        self.problem, self.mesh, self._cache = problem, mesh, cache or StrategyCache()
        self._plans_loops = option.enable_auto_sharding  # otherwise all values are replicated

        facts = facts_of(problem.eqns, plans_loops=self._plans_loops)
        self._constraints = OptionConstraints(problem, mesh, option)
        self.folding = fold_problem(problem, self._constraints, facts.n_together, self._cache)

        self.costs = CostTable()
        self.choices: dict[Var, Choice] = {}
        self.final: dict[Var, Choice] = {}
        self.records: list[AnyRecord] = []
        self.inputs_s = 0.0
        self._not_partial = set(problem.not_partial)

        prices = MeshPrices(mesh, option, cache=self._cache, facts=facts, counted=counted, forbidden_s=forbidden_s)
        self._option, self._prices = option, prices
        self._adding_s = _adding_s(problem, mesh)
        self._deferred: list[_ReaderNode] = []  # of variables that later equations may make
        self._hidden_price = hidden_price
        self._hidden = _hidden_variables(problem) if hidden_price < 1 else frozenset[Var]()
        self._plain = PlainEquations(
            mesh,
            option,
            costs=self.costs,
            choices=self.choices,
            not_partial=self._not_partial,
            constraints=self._constraints,
            facts=facts,
            cache=self._cache,
            prices=prices,
            stacked=_stacked_results(problem) if is_gpu(mesh.device) else frozenset(),
            hidden=self._hidden,
            hidden_price=hidden_price,
        )

        self._add_inputs()
        self._add_equations()
        self._add_results()

    # ---- inputs and results ---------------------------------------------------------------------------------------

    def _add_inputs(self) -> None:
        alike = self.folding.inputs if self.folding else {}
        counts = Counter(alike.values())
        for var, role in self.problem.inputs:
            leader = alike.get(var, var)
            if leader is var:
                self._add_input(var, role, max(1, counts[var]))
            else:
                self.choices[var] = self.choices[leader]

    def _add_input(self, var: Var, role: Role, count: int) -> None:
        """A node for `count` inputs that are sharded alike."""
        specs = self._cache.same(self._constraints.input_specs(var, role))
        is_passing = role in ("batch", "received")
        if len(specs) == 1 and is_passing:
            self.choices[var] = Choice(None, specs)
            return

        bandwidth = self.mesh.device.memory_bandwidth if self.mesh.device else _DEFAULT_BANDWIDTH
        weight = (1.0 if is_passing else _KEPT_INPUT_WEIGHT) / bandwidth
        shard_bytes = [bytes_of(var) / spec.n_shards(self.mesh.shape) for spec in specs]
        node = self.costs.add_node([count * weight * n_bytes for n_bytes in shard_bytes])
        self.inputs_s += count * weight * max(shard_bytes)
        self.choices[var] = Choice(node, specs)

    def _add_results(self) -> None:
        """A result ends in the spec that the user fixes, in the spec of the donated input, or as made."""
        replaced = {target: source for source, target in self.problem.aliases}
        for var, path in self.problem.results:
            fixed = self._constraints.fixed(var, path)
            if fixed is not None:
                final = Choice(None, (fixed.spec,))
            elif var in replaced:
                final = self.choices[replaced[var]]
            else:
                continue
            self.final[var] = final
            self._add_edge(_ReaderNode(var, final.node, final.specs, times=1))

    # ---- equations ------------------------------------------------------------------------------------------------

    def _add_equations(self) -> None:
        for i in range(len(self.problem.eqns)):
            self.records.append(self._record(i))
        for reader in self._deferred:
            self._add_edge(reader)

    def _record(self, i: int) -> AnyRecord:
        """Equations that are sharded alike share one."""
        eqn, times, in_update = self.problem.eqns[i], self.problem.times[i], self.problem.in_update[i]
        folding = self.folding
        if folding is None:
            return self._add_equation(Occurrence(eqn, times, in_update, {}))

        leader = folding.leaders[i]
        if leader == i:
            return self._add_equation(Occurrence(eqn, folding.times[i], in_update, folding.varied.get(i, {})))

        first = self.problem.eqns[leader]
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
        for k, required in enumerate(record.strategies.operands):
            self._connect(occurrence, k, record.node, required)
        return record

    def _set_results(self, eqn: JaxprEqn, choices: Sequence[Choice]) -> None:
        for var, choice in zip(eqn.outvars, choices, strict=True):
            self.choices[var] = choice
            if var in self._not_partial and choice.node is not None:
                self.costs.forbid(choice.node, [bool(spec.partial) for spec in choice.specs])
            total = self.problem.equal.get(var)
            if total is not None:
                self.choices[total] = choice
            if var in self._adding_s and choice.node is not None:
                n_shards = np.array([spec.n_shards(self.mesh.shape) for spec in choice.specs])
                self.costs.nodes[choice.node] += self._adding_s[var] / n_shards

    def _connect(self, occurrence: Occurrence, k: int, node: int | None, required: tuple[Spec, ...]) -> None:
        """Also to all variables in the place of operand `k` in equations that are sharded alike."""
        eqn, times, _, varied = occurrence
        operand = eqn.invars[k]
        if k in varied:
            self._deferred += [_ReaderNode(var, node, required, times * part) for var, part in varied[k]]
        elif not is_literal(operand):
            assert isinstance(operand, Var), operand
            self._add_edge(_ReaderNode(operand, node, required, times))

    def _add_edge(self, reader: _ReaderNode) -> None:
        """Raises InfeasibleError if the options forbid the resharding between two single strategies."""
        var, node, required, times = reader
        made = self.choices[var]
        prices = self._prices.of((var,))
        made_specs, wanted = self._cache.distinct(made.specs), self._cache.distinct(required)
        seconds = prices.reshard_s(var, made_specs.specs, wanted.specs)
        if not seconds.any():
            return

        if made.node is None and node is None:
            if not np.isfinite(seconds).all():
                raise InfeasibleError(forbidden_message(self._option, var, made.specs[0], required[0]))
            return
        seconds = times * seconds * (self._hidden_price if var in self._hidden else 1.0)
        self.costs.add_edge(made.node, node, EdgeCosts(seconds, made_specs.numbers, wanted.numbers))

    # ---- barriers -------------------------------------------------------------------------------------------------

    def _add_barrier(self, occurrence: Occurrence) -> PassRecord:
        record = PassRecord(tuple(self._passed_choice(occurrence, k) for k in range(len(occurrence.eqn.invars))))
        self._set_results(occurrence.eqn, record.arrays)
        return record

    def _passed_choice(self, occurrence: Occurrence, k: int) -> Choice:
        operand = occurrence.eqn.invars[k]
        if is_literal(operand):
            return _replicated_choice(operand)
        came = self._choice(operand)
        is_complete = occurrence.eqn.outvars[k] in self._not_partial
        if k not in occurrence.varied and not is_complete:
            return came

        # A new node, for a result with another spec.
        specs = came.specs
        if is_complete and all(spec.partial for spec in specs):
            specs = _replicated_choice(operand).specs
        choice = Choice(self.costs.add_node([0.0] * len(specs)), specs)
        self._connect(occurrence, k, choice.node, choice.specs)
        return choice

    def _choice(self, atom: Atom) -> Choice:
        assert isinstance(atom, Var), atom
        return self.choices[atom]

    # ---- loops ----------------------------------------------------------------------------------------------------

    def _add_loop(self, occurrence: Occurrence, scan: ScanBody) -> LoopRecord:
        self.choices.update((var, _replicated_choice(var)) for var in scan.flat.constvars)
        self._constraints.enter_loop(occurrence.eqn, scan)

        # A partial sum of an iteration would stay a partial sum in the stacked result.
        stacked = zip(occurrence.eqn.outvars[scan.n_carry :], scan.flat.outvars[scan.n_carry :], strict=True)
        complete = {v for out, v in stacked if out in self._not_partial and not is_literal(v)}
        complete = (complete | compared_values(scan.flat.eqns)) - self._not_partial
        self._not_partial |= complete

        operands = tuple(self._add_loop_operand(occurrence, scan, k) for k in range(len(scan.flat.invars)))
        inner_times = occurrence.times * scan.length
        body = tuple(
            self._add_equation(Occurrence(eqn, inner_times, occurrence.in_update, {})) for eqn in scan.flat.eqns
        )
        results = tuple(self._loop_result(scan, r, operands, inner_times) for r in range(len(scan.flat.outvars)))
        self._not_partial -= complete  # another loop may share this body

        record = LoopRecord(scan, operands, results, body)
        self._set_results(occurrence.eqn, results)
        return record

    def _add_loop_operand(self, occurrence: Occurrence, scan: ScanBody, k: int) -> Choice:
        """A node for operand `k` in the body; returns the spec choice outside."""
        inner = scan.flat.invars[k]
        is_carry = scan.n_consts <= k < scan.n_lead
        # A partial sum in a carry is summed over devices once, after the loop.
        may_be_partial = is_carry and is_inexact(inner) and inner not in self._not_partial
        candidates = partial_specs_of if may_be_partial else specs_of
        specs = self._constraints.carry_specs(inner, candidates(shape_of(inner), self.mesh.shape))
        specs = self._cache.same(specs[:1] if is_extended(aval_of(inner).dtype) else specs)

        node = self.costs.add_node([0.0] * len(specs))
        self.choices[inner] = Choice(node, specs)
        operand = Choice(node, tuple(scan.outer_operand(k, spec) for spec in specs))
        self._connect(occurrence, k, operand.node, operand.specs)
        return operand

    def _loop_result(self, scan: ScanBody, r: int, operands: Sequence[Choice], inner_times: int) -> Choice:
        inner = scan.flat.outvars[r]
        if r < scan.n_carry:
            carry = operands[scan.n_consts + r]
            if not is_literal(inner):
                assert isinstance(inner, Var), inner
                self._add_edge(_ReaderNode(inner, carry.node, carry.specs, times=inner_times))
            return carry

        left = _replicated_choice(inner) if is_literal(inner) else self._choice(inner)
        return Choice(left.node, tuple(scan.outer_result(r, spec) for spec in left.specs))


def _adding_s(problem: MeshEquations, mesh: LogicalMesh) -> dict[Var, float]:
    """Seconds per step of adding each value, replicated, to its accumulator: programs for GPUs add in each pass."""
    if not is_gpu(mesh.device) or not problem.added:
        return {}
    times = {v: n for eqn, n in zip(problem.eqns, problem.times, strict=True) for v in eqn.outvars}
    return {v: times[v] * adding_s(bytes_of(problem.equal[v]), mesh) for v in problem.equal if v in problem.added}


def _hidden_variables(problem: MeshEquations) -> frozenset[Var]:
    weights = [var for var, role in problem.inputs if role in ("parameter", "state")]
    found = set(hidden_values(problem.eqns, [var for var, _ in problem.inputs], weights, ()))
    found.update(problem.equal.values())  # the last pass sums accumulators beside its work
    for scan in loop_scans(problem.eqns):
        found |= hidden_values(
            scan.flat.eqns, scan.flat.invars, scan.live_on_entry, scan.required_outputs, in_loop=True
        )
    return frozenset(found)


def _stacked_results(problem: MeshEquations) -> frozenset[Var]:
    """Results such as gradients of layers, and their accumulators."""
    scans = ((eqn, scan_body(eqn)) for eqn in problem.eqns)
    found = [v for eqn, scan in scans if scan is not None for v in eqn.outvars[scan.n_carry :]]
    return frozenset(found) | {problem.equal[v] for v in found if v in problem.equal}


def _replicated_choice(atom: Atom) -> Choice:
    return Choice(None, (Spec.replicated(len(shape_of(atom))),))
