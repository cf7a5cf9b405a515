"""Placement: a split step and the mesh of each chunk in, the position, or mesh and level, of each equation out.

With S chunks, position p of a loop is chunk p or, backward, 2S-1-p. A *home* of a variable is a mesh that makes it; of
an input of the step, a mesh whose loops read it. The README of the package lists the rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.split_step import SplitStep, is_loop
from minialpa.ir.equations import bytes_of, is_literal, operand_vars
from minialpa.ir.op import Op
from minialpa.rules.expensive import is_expensive

ByLevel = Mapping[tuple[int, int], Sequence[JaxprEqn]]
"""(level, mesh) -> the equations of that level on that mesh, in order."""

_Meshes = Mapping[Var, set[int]]


@dataclass(frozen=True, slots=True)
class ChunkedStep:
    """A split step and the mesh of each chunk of its pipeline; one chunk without a pipeline.

    labels: for each traced equation, the position of its layer; None for an equation that autodiff left untagged.
    """

    split: SplitStep
    labels: Sequence[int | None]
    mesh_of_chunk: tuple[int, ...]

    @property
    def n_chunks(self) -> int:
        return len(self.mesh_of_chunk)

    def backward_position(self, chunk: int) -> int:
        return 2 * self.n_chunks - 1 - chunk

    def chunk_at(self, position: int) -> int:
        return min(position, self.backward_position(position))

    def mesh_at(self, position: int) -> int:
        return self.mesh_of_chunk[self.chunk_at(position)]

    def label_of(self, op: Op) -> int | None:
        return self.labels[op.source] if op.source >= 0 else None


@dataclass(frozen=True, slots=True)
class LoopPlacement:
    """The equations of a loop by position, with copies of floating equations.

    position_of: the position that makes each variable, except `floating` variables, of which every reader has a copy.
    """

    eqns: Mapping[int, Sequence[JaxprEqn]]
    position_of: Mapping[Var, int]
    floating: frozenset[Var]


def place_loops(step: ChunkedStep) -> dict[int, LoopPlacement]:
    """By segment, which is 2 l - 1 for loop l."""
    seen = _KnownPositions()
    return {segment: _place_loop(step, segment, seen) for segment in range(1, 2 * step.split.n_loops + 1, 2)}


@dataclass(slots=True)
class _KnownPositions:
    """The positions that make variables of this loop and of earlier loops.

    forward_readers: chunks whose forward passes read a variable, in this loop or an earlier loop.
    """

    position_of: dict[Var, int] = field(default_factory=dict)
    earlier: dict[Var, int] = field(default_factory=dict)
    forward_readers: dict[Var, set[int]] = field(default_factory=lambda: defaultdict(set))


def _place_loop(step: ChunkedStep, segment: int, seen: _KnownPositions) -> LoopPlacement:
    """Place a loop, and record its positions in `seen`."""
    ops = step.split.in_segment(segment)
    floating = _floating_equations(step.split, segment)
    fixed = [op for op in ops if not op.eqn.outvars or op.eqn.outvars[0] not in floating]
    seen.earlier.update(seen.position_of)
    seen.position_of = {}

    placed = [_place_by_operands(step, op, seen) for op in fixed]
    positions = with_first_readers([op.eqn for op in fixed], placed)
    if step.n_chunks == 1:
        # Without a pipeline, one task runs both directions.
        positions = [0] * len(fixed)
    seen.position_of = {v: p for op, p in zip(fixed, positions, strict=True) for v in op.eqn.outvars}

    eqns: dict[int, list[JaxprEqn]] = defaultdict(list)
    for op, position in zip(fixed, positions, strict=True):
        eqns[position].append(op.eqn)
    order = {op.eqn: i for i, op in enumerate(ops)}
    copied = {position: _with_floating(mine, floating, order) for position, mine in eqns.items()}
    return LoopPlacement(copied, seen.position_of, frozenset(floating))


def _floating_equations(split: SplitStep, segment: int) -> dict[Var, JaxprEqn]:
    """The cheap equations of a loop that depend on no example, by their results.

    Values with readers outside the loop do not float, since exactly one task has to make them.
    """
    owned = {value for value, _ in split.combined} | set(split.results)
    owned.update(v for op in split.ops if op.segment != segment for v in operand_vars(op.eqn))
    dependent = _examples(split)

    floating: dict[Var, JaxprEqn] = {}
    for op in split.in_segment(segment):
        eqn = op.eqn
        runs_once = is_expensive(eqn) or bool(eqn.effects) or not owned.isdisjoint(eqn.outvars)
        if runs_once or not dependent.isdisjoint(operand_vars(eqn)):
            dependent.update(eqn.outvars)
        else:
            floating.update((v, eqn) for v in eqn.outvars)
    return floating


def _examples(split: SplitStep) -> set[Var]:
    if split.n_micro_batches > 1:
        return {micro for _, micro in split.micro_inputs}
    return set(split.traced.examples)


def _place_by_operands(step: ChunkedStep, op: Op, seen: _KnownPositions) -> int | None:
    """`_position_by_operands`, recorded in `seen`."""
    position = _position_by_operands(step, op, seen)
    if position is None:
        return None

    if position < step.n_chunks:
        for v in operand_vars(op.eqn):
            seen.forward_readers[v].add(position)
    seen.position_of.update((v, position) for v in op.eqn.outvars)
    return position


def _position_by_operands(step: ChunkedStep, op: Op, seen: _KnownPositions) -> int | None:
    """The first position, from its layer's on, that has the operands; None without a layer and placed operands."""
    operands_at = [seen.position_of[v] for v in operand_vars(op.eqn) if v in seen.position_of]
    label = step.label_of(op)
    if label is None and op.origin.direction == "backward":
        label = _residual_position(step, op.eqn, max([step.n_chunks, *operands_at]), seen)
    return max(operands_at if label is None else [label, *operands_at], default=None)


def _residual_position(step: ChunkedStep, eqn: JaxprEqn, at_least: int, seen: _KnownPositions) -> int:
    """First backward position, from `at_least` on, whose chunk holds the residuals of `eqn`."""
    position = at_least
    for v in operand_vars(eqn):
        chunks = set(seen.forward_readers.get(v, ()))
        made_at = seen.position_of.get(v, seen.earlier.get(v, step.n_chunks))
        if made_at < step.n_chunks:
            chunks.add(made_at)

        candidates = [p for p in map(step.backward_position, chunks) if p >= at_least]
        position = max(position, min(candidates, default=position))
    return position


def with_first_readers(eqns: Sequence[JaxprEqn], positions: Sequence[int | None]) -> list[int]:
    """`positions`, with the position of the first reader for None; 0 without a reader."""
    filled: list[int] = []
    first_reader: dict[Var, int] = {}
    for eqn, known in zip(reversed(eqns), reversed(positions), strict=True):
        read_at = [first_reader[v] for v in eqn.outvars if v in first_reader]
        position = min(read_at, default=0) if known is None else known
        filled.append(position)
        for v in operand_vars(eqn):
            first_reader[v] = min(position, first_reader.get(v, position))
    return filled[::-1]


def _with_floating(
    eqns: Sequence[JaxprEqn], floating: Mapping[Var, JaxprEqn], order: Mapping[JaxprEqn, int]
) -> list[JaxprEqn]:
    """`eqns` and the floating equations on which they depend. order: the place of each equation."""
    needed: dict[JaxprEqn, None] = {}  # in an order that repeats
    unvisited = [v for eqn in eqns for v in operand_vars(eqn)]
    while unvisited:
        eqn = floating.get(unvisited.pop())
        if eqn is not None and eqn not in needed:
            needed[eqn] = None
            unvisited.extend(operand_vars(eqn))
    return sorted([*needed, *eqns], key=lambda eqn: order[eqn])


# ---- between loops ---------------------------------------------------------------------------------------------------


def place_updates(step: ChunkedStep, loops: Mapping[int, LoopPlacement]) -> dict[int, ByLevel]:
    """The placement of each segment after a loop, by number. loops: the placement of the loops."""
    split, inputs = step.split, frozenset(step.split.inputs)
    homes: dict[Var, set[int]] = defaultdict(set)
    updates: dict[int, ByLevel] = {}

    for segment in range(1, 2 * split.n_loops + 1):
        if is_loop(segment):
            _add_homes(homes, step, loops[segment], inputs)
            continue

        # Readers decide where operands do not.
        eqns = [op.eqn for op in split.in_segment(segment)]
        meshes = _meshes_by_operands(eqns, homes, inputs)
        meshes = _meshes_by_readers(eqns, meshes, _later_readers(step, segment, homes))
        homes.update((v, set(where)) for eqn, where in zip(eqns, meshes, strict=True) for v in eqn.outvars)
        updates[segment] = _by_level(eqns, meshes)
    return updates


def _add_homes(homes: dict[Var, set[int]], step: ChunkedStep, loop: LoopPlacement, inputs: frozenset[Var]) -> None:
    """Add the homes that `loop` makes."""
    for position, eqns in loop.eqns.items():
        for eqn in eqns:
            for v in operand_vars(eqn):
                if v in inputs:
                    homes[v].add(step.mesh_at(position))

    for v, position in loop.position_of.items():
        homes[v].add(step.mesh_at(position))
    for value, accumulator in step.split.combined:
        if value in loop.position_of:
            homes[accumulator] = set(homes[value])


def _meshes_by_operands(eqns: Sequence[JaxprEqn], homes: _Meshes, inputs: frozenset[Var]) -> list[set[int]]:
    """For each equation, the first home of its largest operand; empty if operands have no home or are all inputs."""
    known = dict(homes)
    meshes: list[set[int]] = []
    for eqn in eqns:
        operands = operand_vars(eqn)
        ranked = [(-bytes_of(v), min(known[v])) for v in operands if known.get(v)]
        where = {min(ranked)[1]} if ranked and not inputs.issuperset(operands) else set[int]()
        meshes.append(where)
        known.update((v, where) for v in eqn.outvars)
    return meshes


def _later_readers(step: ChunkedStep, segment: int, homes: _Meshes) -> dict[Var, set[int]]:
    """Meshes that need a variable after `segment`: of the input that it replaces, and of its readers in loops."""
    split = step.split
    required: dict[Var, set[int]] = defaultdict(set)
    for atom, replaced in zip(split.outvars, split.traced.layouts, strict=True):
        if replaced is not None and not is_literal(atom):
            required[atom] |= homes.get(split.traced.flat.invars[replaced], set())

    for op in split.ops:
        label = step.label_of(op)
        if label is not None and op.segment > segment and is_loop(op.segment):
            for v in operand_vars(op.eqn):
                required[v].add(step.mesh_at(label))
    return required


def _meshes_by_readers(eqns: Sequence[JaxprEqn], meshes: Sequence[set[int]], later_readers: _Meshes) -> list[set[int]]:
    """`meshes`, with the meshes of all readers for an empty set; mesh 0 without a reader."""
    required = defaultdict(set, {v: set(readers) for v, readers in later_readers.items()})
    filled: list[set[int]] = []
    for eqn, known in zip(reversed(eqns), reversed(meshes), strict=True):
        where = known or set[int]().union(*(required[v] for v in eqn.outvars)) or {0}
        filled.append(where)
        for v in operand_vars(eqn):
            required[v] |= where
    return filled[::-1]


def _by_level(eqns: Sequence[JaxprEqn], meshes: Sequence[set[int]]) -> ByLevel:
    """A mesh reads a result of another mesh one level later."""
    levels: dict[Var, dict[int, int]] = defaultdict(dict)  # by the mesh that makes the variable
    placed: dict[tuple[int, int], list[JaxprEqn]] = defaultdict(list)
    for eqn, where in zip(eqns, meshes, strict=True):
        for mesh in sorted(where):
            level = max((_level_of_operand(levels.get(v, {}), mesh) for v in operand_vars(eqn)), default=0)
            for v in eqn.outvars:
                levels[v][mesh] = level
            placed[level, mesh].append(eqn)
    return placed


def _level_of_operand(levels: Mapping[int, int], mesh: int) -> int:
    """The first level at which `mesh` can read a variable. levels: by mesh that makes it."""
    if mesh in levels:
        return levels[mesh]
    return min(levels.values()) + 1 if levels else 0
