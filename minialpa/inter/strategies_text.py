"""The strategies of each operation of a mesh as text: its equations and their specs in a plan go in, tables come out.

The seconds are of one run of an operation alone: collectives that start with others, or beside work, cost less in the
plan.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.inter.staging.staged_step import bind_specs
from minialpa.intra.graph.builder import GraphBuilder
from minialpa.intra.graph.decisions import AnyRecord, LoopRecord, Record
from minialpa.intra.graph.problem import MeshEquations
from minialpa.intra.solver.cost_graph import FORBIDDEN
from minialpa.intra.strategies.loops import body_specs
from minialpa.intra.strategies.reshard import ReshardTable, forbidden_for, reshard_table
from minialpa.ir.equations import Atom, bytes_of, is_literal, shape_of
from minialpa.ir.op import Op
from minialpa.ir.text import ProgramText, modules
from minialpa.plan import StagePlan
from minialpa.plan.text import seconds_text
from minialpa.sharding import EquationSpecs, Spec
from minialpa.support.private_jax import name_stack

#: Prints the line of an operation.
_Line = Callable[[JaxprEqn], str]


def specs_text(specs: EquationSpecs) -> str:
    """`S0,R <- S0,R R,R`: results, then operands; with the computed spec between, if a collective follows."""
    steps = (specs.results, specs.operands) if specs.made == specs.results else (
        specs.results, specs.made, specs.operands)  # fmt: skip
    return " <- ".join(" ".join(str(spec) or "scalar" for spec in one) for one in steps)


def strategy_lines(
    problem: MeshEquations, stage: StagePlan, cluster: ClusterSpec, line: Callable[[JaxprEqn], str]
) -> Iterator[str]:
    """Tables of all operations with several strategies; equal tables of repeated layers once.

    line: the text of an operation. Raises InfeasibleError if the options of the stage cannot be kept.
    """
    device = cluster.device_of(stage.first_device // cluster.devices_per_host)
    mesh = dataclasses.replace(stage.mesh, device=device)
    tables = _Tables(GraphBuilder(problem, mesh, stage.option), mesh, stage.forbidden)
    specs, chosen = bind_specs(problem, stage)
    yield from tables.lines(problem.eqns, tables.builder.records, chosen, specs, line)


class _Tables:
    def __init__(self, builder: GraphBuilder, mesh: LogicalMesh, forbidden: tuple[str, ...]) -> None:
        self.builder, self.mesh, self.forbidden = builder, mesh, forbidden
        #: The first operation of each node, which decides.
        self.leaders: dict[int, str] = {}

    def lines(
        self,
        eqns: Sequence[JaxprEqn],
        records: Sequence[AnyRecord],
        chosen: Sequence[EquationSpecs],
        specs: Mapping[Var, Spec],
        line: _Line,
    ) -> Iterator[str]:
        """specs: in which each variable is made."""
        # Operations of repeated layers have equal tables, and lines that differ in numbers alone.
        tables: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for eqn, record, one in zip(eqns, records, chosen, strict=True):
            heading, rows = line(eqn), tuple(self._rows(eqn, record, one, specs))
            if rows:
                heading += self._leader_text(record, heading.split(" ", 1)[0])
                tables.setdefault((re.sub(r"\d+", "#", heading), rows), []).append(heading)

        for (_, rows), (heading, *alike) in tables.items():
            others = ", ".join(other.split(" ", 1)[0] for other in alike)
            yield f"{heading}   also {others}" if others else heading
            yield from rows

    def _rows(
        self, eqn: JaxprEqn, record: AnyRecord, chosen: EquationSpecs, specs: Mapping[Var, Spec]
    ) -> Iterator[str]:
        """The table of an operation, or the tables of the body of a loop; empty without a choice."""
        if isinstance(record, LoopRecord):
            yield from (f"    {inner}" for inner in self._body_lines(record, chosen))
        elif isinstance(record, Record) and len(record.strategies.seconds) > 1:
            yield from self._table(eqn, record, chosen, specs)

    def _leader_text(self, record: AnyRecord, name: str) -> str:
        """The operation that an operation follows, if any."""
        if not isinstance(record, Record) or record.node is None:
            return ""
        leader = self.leaders.setdefault(record.node, name)
        return "" if leader == name else f"   follows {leader}"

    def _body_lines(self, record: LoopRecord, chosen: EquationSpecs) -> Iterator[str]:
        scan = record.scan
        specs, _ = body_specs(scan, chosen)
        ops = [Op(eqn, name_stack(eqn)) for eqn in scan.flat.eqns]
        text = ProgramText((*scan.flat.constvars, *scan.flat.invars), ops, {})
        number = {eqn: i for i, eqn in enumerate(scan.flat.eqns)}
        inside = _Tables(self.builder, self.mesh, self.forbidden)
        yield from inside.lines(
            scan.flat.eqns, record.body, chosen.body, specs, lambda eqn: text.lines((modules,), [number[eqn]])[0]
        )

    def _table(self, eqn: JaxprEqn, record: Record, chosen: EquationSpecs, specs: Mapping[Var, Spec]) -> Iterator[str]:
        """A line for each distinct strategy, by seconds, with a `*` for the chosen one."""
        assert record.node is not None
        seconds: dict[EquationSpecs, tuple[float, ...]] = {}
        for s, node_s in enumerate(self.builder.costs.nodes[record.node]):
            if node_s >= FORBIDDEN:
                continue
            strategy, found = record.strategies.read(s), record.strategies
            priced = (found.compute_s[s], found.communication_s[s], self._resharding_s(eqn, strategy, specs))
            seconds.setdefault(strategy, tuple(map(float, priced)))
        # The plan may come from a solve of another problem, such as a step with fewer layers.
        seconds.setdefault(chosen, (math.nan,) * 3)
        width = max(len(specs_text(strategy)) for strategy in seconds)
        for strategy, parts in sorted(seconds.items(), key=lambda item: (math.isnan(item[1][0]), sum(item[1]))):
            mark, cells = "*" if strategy == chosen else " ", map(_cell, (sum(parts), *parts))
            yield f"  {mark} {specs_text(strategy).ljust(width)}{''.join(cells)}".rstrip()

    def _resharding_s(self, eqn: JaxprEqn, strategy: EquationSpecs, specs: Mapping[Var, Spec]) -> float:
        """Seconds of resharding the operands from the specs in which the plan makes them."""
        return sum(
            self._reshard_table(atom).cost(specs[atom], required)
            for atom, required in zip(eqn.invars, strategy.operands, strict=True)
            if not is_literal(atom)
        )

    def _reshard_table(self, atom: Atom) -> ReshardTable:
        return reshard_table(shape_of(atom), bytes_of(atom), self.mesh, forbidden_for(atom, self.forbidden))


def _cell(seconds: float) -> str:
    text = "unknown" if math.isnan(seconds) else "forbidden" if math.isinf(seconds) else seconds_text(seconds)
    return text.rjust(11)
