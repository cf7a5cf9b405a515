"""Cost graph of one mesh: its equations and inputs in, nodes and edges out, and specs read back from a solution.

Every input and most equations are nodes; their strategies are specs. An equation whose operands all come from one node
*follows* it: it has the same strategies, and its cost is added to the node's. In the update, elementwise equations
follow the first optimizer value that they meet, so each parameter has a handful of nodes. An edge holds the seconds of
resharding a value from what its node makes to what a reader wants. Whatever happens per micro-batch is weighted so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Var
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.intra.graph.constraints import constraint_of_equation
from minialpa.intra.graph.decisions import AnyRecord, Choice, LoopRecord, PassRecord, Record
from minialpa.intra.graph.folding import Varied
from minialpa.intra.graph.memory_constraints import Demand, MemoryLimit, Usage, check_least, terms_of
from minialpa.intra.graph.option_constraints import Required, Wishes, fold_problem, no_way
from minialpa.intra.graph.problem import MeshEquations, MeshSharding, Role
from minialpa.intra.solver.cost_graph import FORBIDDEN
from minialpa.intra.solver.solve import CostGraph, Edge, GraphSolution
from minialpa.intra.strategies.combining import n_together
from minialpa.intra.strategies.loops import ScanBody, examples_inside, scan_body
from minialpa.intra.strategies.reshard import partial_specs_of
from minialpa.intra.strategies.strategies import is_contraction, is_shared_copy
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

#: About what strategies, choices and records of one equation take, as measured.
_EQUATION_BYTES = 3000


class _Reader(NamedTuple):
    """Strategies of `node` want `var` in the specs `wanted`, `times` per step."""

    var: Var
    node: int | None
    wanted: tuple[Spec, ...]
    times: float
    synced: bool = False


class GraphBuilder:
    """Collects nodes and edges for `problem` on `mesh`; then `graph()`, and `read(solution)`."""

    def __init__(
        self,
        problem: MeshEquations,
        mesh: LogicalMesh,
        option: AutoShardingOption,
        *,
        folded: bool = False,
        menus: Menus | None = None,
        forbidden_s: float = math.inf,
    ) -> None:
        """`folded`: repeated layers are sharded alike. `menus`: what other problems have worked out already.

        forbidden_s: see `reshard_table`. Raises InfeasibleError where an option cannot be kept on `mesh`.
        """
        self.problem, self.mesh, self.option, self.forbidden_s = problem, mesh, option, forbidden_s
        self.nodes: list[NDArray[np.float64]] = []  # costs of the strategies of each
        self.edges: dict[tuple[int, int], NDArray[np.float64]] = {}
        self.choices: dict[Var, Choice] = {}
        self.clusters: set[int] = set()
        self.sums: set[Var] = set()  # reductions that follow their operand, and what follows them
        self.menus, self.menu_of = menus or Menus(), dict[int, Menu]()
        self.n_gradients = max(1, sum(map(is_gradient_marker, problem.eqns)))
        self.n_together = n_together(problem.eqns)
        self.n_readers = Counter(v for eqn in problem.eqns for v in operand_vars(eqn))
        self.wishes = Wishes(problem, mesh, option)
        self.folding = fold_problem(problem, self.wishes, self.n_together, self.menus) if folded else None
        self._add_inputs()
        self.records: list[AnyRecord] = []
        self.late: list[_Reader] = []
        for i in range(len(problem.eqns)):
            self.records.append(self._record(i))
        for reader in self.late:
            self._add_edge(reader)
        self.final: dict[Var, Choice] = {}
        self._settle_results()

    @property
    def n_bytes(self) -> float:
        """About what this holds: its arrays, and the objects of each equation."""
        return sum(a.nbytes for a in (*self.nodes, *self.edges.values())) + _EQUATION_BYTES * len(self.problem.eqns)

    def graph(self, limit: MemoryLimit | None = None, kept: Sequence[Usage] = (), byte_s: float = 0.0) -> CostGraph:
        """The graph, with a usage limit if there is one. Raises InfeasibleError where that is hopeless.

        Each byte per device of `kept` costs `byte_s` seconds.
        """
        nodes = list(self.nodes)
        for demand in self._demands(kept) if byte_s else ():
            if demand.node is not None:
                nodes[demand.node] = nodes[demand.node] + byte_s * demand.n_bytes
        costs = tuple(nodes)
        edges = tuple(Edge(a, b, cost) for (a, b), cost in self.edges.items())
        if limit is None:
            return CostGraph(node_costs=costs, edges=edges)
        n_times = limit.n_times
        stays = [Usage(v, 1, 0, n_times) for v, role in self.problem.inputs if role in ("parameter", "state")]
        demands = self._demands([*stays, *limit.usages])
        check_least(demands, limit, self._allowed)
        terms = terms_of(demands, limit.limit_bytes, n_times)
        return CostGraph(
            node_costs=costs,
            edges=edges,
            usages=(),
            intervals=(),
            usage_limit=limit.limit_bytes if terms else None,
            extra_usages=terms,
        )

    def _demands(self, usages: Sequence[Usage]) -> list[Demand]:
        counted: dict[int, NDArray[np.int64]] = {}  # shards by strategy, for the specs of a choice
        out = []
        for usage in usages:
            if usage.var in self.choices:
                choice, whole = self.choices[usage.var], usage.n_copies * bytes_of(usage.var)
                n_shards = counted.get(id(choice.specs))
                if n_shards is None:
                    n_shards = np.array([spec.n_shards(self.mesh.shape) for spec in choice.specs])
                    counted[id(choice.specs)] = n_shards
                out.append(Demand(usage.var, choice.node, whole / n_shards, usage.start, usage.end))
        return out

    def _allowed(self, demand: Demand) -> NDArray[np.bool_]:
        if demand.node is None:
            return np.ones(1, bool)
        return self.nodes[demand.node] < FORBIDDEN

    def _settle_results(self) -> None:
        """A result is left as its path says, or as the donated input that it replaces, or as it is made."""
        replaced = {target: source for source, target in self.problem.aliases}
        for var, path in self.problem.results:
            fixed = self.wishes.fixed(var, path)
            if fixed is not None:
                self.final[var] = Choice(None, (fixed.spec,))
            elif var in replaced:
                self.final[var] = self.choices[replaced[var]]
            else:
                continue
            self._add_edge(_Reader(var, self.final[var].node, self.final[var].specs, 1))

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def _choice(self, atom: Atom) -> Choice:
        """The choice of an operand that is not a literal."""
        assert isinstance(atom, Var), atom
        return self.choices[atom]

    def _new_node(self, costs: Sequence[float] | NDArray[np.float64]) -> int:
        self.nodes.append(np.array(costs, np.float64))
        return len(self.nodes) - 1

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
        specs = self.menus.same(self.wishes.input_specs(var, role))
        if len(specs) == 1 and role in ("batch", "received"):
            self.choices[var] = Choice(None, specs)
            return
        local = [bytes_of(var) / spec.n_shards(self.mesh.shape) for spec in specs]
        # Reading an input once costs its bytes; a kept input costs only room, so it just breaks ties.
        bandwidth = self.mesh.device.memory_bandwidth if self.mesh.device else 1e12
        weight = (1.0 if role in ("batch", "received") else 1e-3) / bandwidth
        self.choices[var] = Choice(self._new_node([count * weight * b for b in local]), specs)

    def _record(self, i: int) -> AnyRecord:
        """The record of equation `i`, which it shares with those that are alike."""
        eqn, folding = self.problem.eqns[i], self.folding
        times, in_update = self.problem.times[i], self.problem.in_update[i]
        if folding is None:
            return self._add_equation(eqn, times, in_update, {})
        leader = folding.leaders[i]
        if leader == i:
            return self._add_equation(eqn, times * folding.counts[i], in_update, folding.varied.get(i, {}))
        made = self.problem.eqns[leader].outvars
        self._set_results(eqn, [self.choices[v] for v in made])
        self.sums.update(v for v, w in zip(eqn.outvars, made, strict=True) if w in self.sums)
        return self.records[leader]

    def _add_equation(self, eqn: JaxprEqn, times: int, in_update: bool, varied: Varied) -> AnyRecord:
        scan = scan_body(eqn)
        if scan is not None and self.option.enable_auto_sharding and not self.option.data_parallel:
            loop = self._add_loop(eqn, scan, times, in_update, varied)
            self._set_results(eqn, loop.results)
            return loop
        if _is_barrier(eqn):
            passed = PassRecord(tuple(self._passed(eqn, k, times, varied) for k in range(len(eqn.invars))))
            self._set_results(eqn, passed.arrays)
            return passed
        record = self._add_plain(eqn, times, in_update, varied)
        self._set_results(eqn, [Choice(record.node, specs) for specs in record.strategies.results])
        for k, wanted in enumerate(record.strategies.operands):
            self._connect(eqn, k, record.node, wanted, times, varied)
        return record

    def _passed(self, eqn: JaxprEqn, k: int, times: int, varied: Varied) -> Choice:
        """Array `k` of a barrier as it comes; with a node of its own where it may not always come so."""
        v = eqn.invars[k]
        if is_literal(v):
            return Choice(None, (Spec.replicated(len(shape_of(v))),))
        came = self._choice(v)
        if k not in varied and eqn.outvars[k] not in self.problem.whole:
            return came
        choice = Choice(self._new_node([0.0] * len(came.specs)), came.specs)
        self._connect(eqn, k, choice.node, choice.specs, times, varied)
        return choice

    def _add_loop(self, eqn: JaxprEqn, scan: ScanBody, times: int, in_update: bool, varied: Varied) -> LoopRecord:
        """The body as equations that run in each iteration; a carry has one spec for all of them."""
        flat, inner_times = scan.flat, times * scan.length
        self.n_together.update(n_together(flat.eqns))
        self.n_readers.update(v for e in flat.eqns for v in operand_vars(e))
        self.choices.update((v, Choice(None, (Spec.replicated(len(shape_of(v))),))) for v in flat.constvars)
        self.wishes.dims.update(examples_inside(eqn, scan, self.wishes.dims))
        operands = []
        for k, inner in enumerate(flat.invars):
            carried = scan.n_consts <= k < scan.n_lead
            find = partial_specs_of if carried and is_inexact(inner) else specs_of
            specs = self.wishes.carry_specs(inner, find(shape_of(inner), self.mesh.shape))
            specs = self.menus.same(specs[:1] if is_extended(aval_of(inner).dtype) else specs)
            self.choices[inner] = Choice(self._new_node([0.0] * len(specs)), specs)
            operands.append(Choice(self.choices[inner].node, tuple(scan.outer_operand(k, s) for s in specs)))
            self._connect(eqn, k, operands[k].node, operands[k].specs, times, varied)
        body = tuple(self._add_equation(e, inner_times, in_update, {}) for e in flat.eqns)
        results = []
        for r, inner_out in enumerate(flat.outvars):
            carry = operands[scan.n_consts + r] if r < scan.n_carry else None
            if carry is not None:
                results.append(carry)
                if not is_literal(inner_out):
                    self._add_edge(_Reader(inner_out, carry.node, carry.specs, inner_times))
            elif is_literal(inner_out):
                results.append(Choice(None, (Spec.replicated(len(shape_of(eqn.outvars[r]))),)))
            else:
                left = self._choice(inner_out)
                results.append(Choice(left.node, tuple(scan.outer_result(r, s) for s in left.specs)))
        return LoopRecord(scan, tuple(operands), tuple(results), body)

    def _set_results(self, eqn: JaxprEqn, choices: Sequence[Choice]) -> None:
        for var, choice in zip(eqn.outvars, choices, strict=True):
            self.choices[var] = choice
            if var in self.problem.whole:
                self._forbid_partial(choice)
            total = self.problem.equal.get(var)
            if total is not None:
                self.choices[total] = choice

    def _add_plain(self, eqn: JaxprEqn, times: int, in_update: bool, varied: Varied) -> Record:
        kind = self.menus.kind_of(eqn)
        heavy = [k for k, v in enumerate(eqn.invars) if not is_literal(v) and self.choices[v].node is not None]
        nodes = {None if k in varied else self._choice(eqn.invars[k]).node for k in heavy}
        if not self.option.enable_auto_sharding or (not heavy and not _makes_array(eqn)):
            known = {k: self.choices[v].specs for k, v in enumerate(eqn.invars) if not is_literal(v)}
            fixed = {k: self.menus.same(specs[:1]) for k, specs in known.items()}
            given = {} if heavy else fixed
            return Record(None, self._menu(eqn.outvars).follow(eqn, kind, given, 1, whole=self._is_whole(eqn)))
        if len(nodes) == 1 and None not in nodes and not self._has_own_strategies(eqn, kind.factors):
            return self._follow(eqn, kind, heavy, times)
        heavy = [k for k in heavy if k not in varied]
        lead = self._cluster_operand(eqn, kind.factors, heavy) if in_update else None
        return self._own(eqn, kind, times, in_update) if lead is None else self._follow(eqn, kind, lead, times)

    def _is_whole(self, eqn: JaxprEqn) -> bool:
        return any(v in self.problem.whole for v in eqn.outvars)

    def _has_own_strategies(self, eqn: JaxprEqn, factors: Factors) -> bool:
        """Whether an equation does not just follow the one node that it reads from."""
        if is_contraction(eqn) or _widens(eqn, factors) or _is_identity(eqn) or is_constraint(eqn):
            return True
        # A sum that several readers want should not be priced once for each.
        sums = "sum" in factors.reductions.values() or any(v in self.sums for v in operand_vars(eqn))
        if sums and any(self.n_readers[v] > 1 for v in eqn.outvars):
            return True
        if sums:
            self.sums.update(eqn.outvars)
        return False

    def _forbid_partial(self, choice: Choice) -> None:
        if choice.node is not None:
            self.nodes[choice.node][[bool(spec.partial) for spec in choice.specs]] = np.inf

    def _cluster_operand(self, eqn: JaxprEqn, factors: Factors, heavy: Sequence[int]) -> list[int] | None:
        """Operands of the first optimizer cluster that an elementwise equation of the update can follow."""
        if not _is_elementwise(eqn, factors):
            return None
        for k in heavy:
            node = self._choice(eqn.invars[k]).node
            if node in self.clusters and shape_of(eqn.invars[k]) == shape_of(eqn.outvars[0]):
                return [j for j in heavy if self._choice(eqn.invars[j]).node == node]
        return None

    def _follow(self, eqn: JaxprEqn, kind: EquationKind, lead: Sequence[int], times: int) -> Record:
        choices = {k: self._choice(eqn.invars[k]) for k in lead}
        node = choices[lead[0]].node
        assert node is not None
        given = {k: choice.specs for k, choice in choices.items()}
        n = len(self.nodes[node])
        strategies = self._menu(eqn.outvars).follow(eqn, kind, given, n, whole=self._is_whole(eqn))
        self.nodes[node] += times * strategies.seconds
        return Record(node, strategies)

    def _own(self, eqn: JaxprEqn, kind: EquationKind, times: int, in_update: bool) -> Record:
        reads_arrays = any(not is_literal(v) and self.choices[v].node is not None for v in eqn.invars)
        required = (
            Required() if is_constraint(eqn) else self.wishes.required(eqn, kind.factors, in_update, reads_arrays)
        )
        scatter = not self.option.data_parallel or self.option.sharded_update
        pending = {} if _is_identity(eqn) else self._n_pending(eqn, kind.factors)
        strategies = self._menu(eqn.outvars).enumerate(
            eqn, kind, required.axes, pending, scatter=scatter, kept=required.kept
        )
        if is_constraint(eqn):
            constraint = constraint_of_equation(eqn, self.mesh.shape)
            strategies = strategies.select(
                [s for s, spec in enumerate(strategies.results[0]) if constraint.allows(spec)]
            )
        elif in_update and self.option.sharded_update and _is_elementwise(eqn, kind.factors):
            # Gradients among them: an optimizer works on as many parts as there are devices.
            parts = set(self.wishes.most_split([spec for spec in strategies.results[0] if not spec.partial]))
            strategies = strategies.select([s for s, spec in enumerate(strategies.results[0]) if spec in parts])
        node = self._new_node(times * strategies.seconds)
        if in_update and _is_elementwise(eqn, kind.factors):
            self.clusters.add(node)
        return Record(node, strategies)

    def _menu(self, made: Sequence[Var], at_least: int = 1) -> Menu:
        """Prices of collectives on the results of an equation, of which several share the time to start."""
        n = max([at_least, *(self.n_together.get(v, 1) for v in made)])
        if n not in self.menu_of:
            self.menu_of[n] = self.menus.of(self.mesh, self.option.forbidden_collectives, n, self.forbidden_s)
        return self.menu_of[n]

    def _n_pending(self, eqn: JaxprEqn, factors: Factors) -> dict[int, int]:
        """For each mesh axis how many operands may come as partial sums that can pass."""
        counts: dict[int, int] = {}
        for v in {eqn.invars[k] for k in factors.linear_operands if not is_literal(eqn.invars[k])}:
            for axis in {axis for spec in set(self._choice(v).specs) for axis in spec.partial}:
                counts[axis] = counts.get(axis, 0) + 1
        return counts

    # ---- edges ----------------------------------------------------------------------------------------------------

    def _connect(
        self, eqn: JaxprEqn, k: int, reader: int | None, wanted: tuple[Spec, ...], times: int, varied: Varied
    ) -> None:
        """An edge to operand `k` of an equation, or to all that stand in its place in equations like it."""
        v, is_marker = eqn.invars[k], is_gradient_marker(eqn)
        if k in varied:
            # Some of these are made by equations that follow.
            self.late += [_Reader(source, reader, wanted, times * part, is_marker) for source, part in varied[k]]
        elif not is_literal(v):
            self._add_edge(_Reader(v, reader, wanted, times, is_marker))

    def _add_edge(self, edge: _Reader) -> None:
        """Pay for resharding a variable from what its node makes to what is wanted, by strategy of the reader."""
        var, reader = edge.var, edge.node
        made = self.choices[var]
        menu = self._menu([var], self.n_gradients if edge.synced else 1)
        cost = edge.times * menu.reshard_s(shape_of(var), bytes_of(var), made.specs, edge.wanted)
        if not cost.any():
            return
        if made.node is None or reader is None:
            node = made.node if reader is None else reader
            if node is not None:
                self.nodes[node] += cost.reshape(-1)
            elif not np.isfinite(cost).all():
                raise InfeasibleError(no_way(self.option, var, made.specs[0], edge.wanted[0]))
            return
        if made.node == reader:
            self.nodes[reader] += np.diagonal(cost)
            return
        key, matrix = ((made.node, reader), cost) if made.node < reader else ((reader, made.node), cost.T)
        self.edges[key] = self.edges[key] + matrix if key in self.edges else matrix

    # ---- reading a solution ---------------------------------------------------------------------------------------

    def read(self, solution: GraphSolution) -> MeshSharding:
        picks = solution.choices
        specs = {v: choice.read(picks) for v, choice in self.choices.items()}
        results = {v: self.final[v].read(picks) if v in self.final else specs[v] for v, _ in self.problem.results}
        compute = tuple(record.compute_s(picks) for record in self.records)
        read = {id(record): record.read(picks) for record in {id(r): r for r in self.records}.values()}
        equations = tuple(read[id(record)] for record in self.records)
        return MeshSharding(specs, results, equations, compute, solution.optimal, solution.gap)


def _is_identity(eqn: JaxprEqn) -> bool:
    """Whether an equation is there for its result to be sharded in another way than its operand."""
    return is_gradient_marker(eqn) or is_shared_copy(eqn)


def _is_barrier(eqn: JaxprEqn) -> bool:
    """Whether an equation passes several arrays on and has no say in their shardings."""
    return eqn.primitive.name == "optimization_barrier"


def _makes_array(eqn: JaxprEqn) -> bool:
    return any(math.prod(shape_of(v)) > 1 for v in eqn.outvars)


def _widens(eqn: JaxprEqn, factors: Factors) -> bool:
    """Whether the results have dimensions that no operand has, as a broadcast; these may be split freely."""
    read = {f for dims in factors.operands for dim in dims for f in dim}
    return any(f not in read and factors.sizes[f] > 1 and f not in factors.blocked
               for dims in factors.results for dim in dims for f in dim)  # fmt: skip


def _is_elementwise(eqn: JaxprEqn, factors: Factors) -> bool:
    result = factors.results[0] if len(factors.results) == 1 else None
    return result is not None and all(not dims or dims == result for dims in factors.operands)
