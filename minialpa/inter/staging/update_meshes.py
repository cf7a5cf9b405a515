"""Where the equations between loops run, updates above all: the meshes of each, and its level.

A *home* of a variable is a mesh that makes it, or, of an input of the step, a mesh whose loops read it.

1. An equation runs on a home of its largest operand: an update follows its gradient              -> _meshes_by_operands
2. What reads inputs of the step alone (step counters, learning rates) runs on every mesh that reads it
                                                                                                  -> _meshes_by_readers
3. Tasks of level l + 1 wait for results of level l from other meshes                             -> _by_level
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.split_step import is_loop
from minialpa.inter.staging.loop_positions import ChunkedStep, LoopPlacement
from minialpa.inter.staging.split_values import combined_values, step_inputs
from minialpa.ir.equations import bytes_of, is_literal, operand_vars

ByLevel = Mapping[tuple[int, int], Sequence[JaxprEqn]]
"""(level, mesh) -> the equations of that level on that mesh, in order."""

_Meshes = Mapping[Var, set[int]]


def place_updates(step: ChunkedStep, loops: Mapping[int, LoopPlacement]) -> dict[int, ByLevel]:
    """The placement of each segment behind a loop, by its number. `loops`: the same for the loops."""
    split, inputs = step.split, frozenset(step_inputs(step.split))
    homes: dict[Var, set[int]] = defaultdict(set)
    updates: dict[int, ByLevel] = {}

    for segment in range(1, 2 * split.n_loops + 1):
        if is_loop(segment):
            _note_homes(homes, step, loops[segment], inputs)
            continue

        # Readers decide where operands do not.
        eqns = [op.eqn for op in split.in_segment(segment)]
        meshes = _meshes_by_operands(eqns, homes, inputs)
        meshes = _meshes_by_readers(eqns, meshes, _later_readers(step, segment, homes))
        homes.update((v, set(where)) for eqn, where in zip(eqns, meshes, strict=True) for v in eqn.outvars)
        updates[segment] = _by_level(eqns, meshes)
    return updates


def _note_homes(homes: dict[Var, set[int]], step: ChunkedStep, loop: LoopPlacement, inputs: frozenset[Var]) -> None:
    """Add to `homes` those of the inputs that a loop reads, of its variables, and of the totals that it leaves."""
    for position, eqns in loop.eqns.items():
        for eqn in eqns:
            for v in operand_vars(eqn):
                if v in inputs:
                    homes[v].add(step.mesh_at(position))

    for v, position in loop.position_of.items():
        homes[v].add(step.mesh_at(position))
    for value, total in combined_values(step.split):
        if value in loop.position_of:
            homes[total] = set(homes[value])


def _meshes_by_operands(eqns: Sequence[JaxprEqn], homes: _Meshes, inputs: frozenset[Var]) -> list[set[int]]:
    """For each equation the first home of its largest operand; none if no operand has one, or all are inputs."""
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
    """Meshes that want a variable after `segment`: those of the input that it replaces, and of its readers in loops."""
    split = step.split
    wanted: dict[Var, set[int]] = defaultdict(set)
    for atom, replaced in zip(split.outvars, split.traced.layouts, strict=True):
        if replaced is not None and not is_literal(atom):
            wanted[atom] |= homes.get(split.traced.flat.invars[replaced], set())

    for op in split.ops:
        label = step.label_of(op)
        if label is not None and op.segment > segment and is_loop(op.segment):
            for v in operand_vars(op.eqn):
                wanted[v].add(step.mesh_at(label))
    return wanted


def _meshes_by_readers(eqns: Sequence[JaxprEqn], meshes: Sequence[set[int]], later_readers: _Meshes) -> list[set[int]]:
    """`meshes`, with those of all its readers for each equation that has none; mesh 0 if nothing reads it."""
    wanted = defaultdict(set, {v: set(readers) for v, readers in later_readers.items()})
    filled: list[set[int]] = []
    # Backwards, since the readers of an equation may have to be placed by their own readers first.
    for eqn, known in zip(reversed(eqns), reversed(meshes), strict=True):
        where = known or set[int]().union(*(wanted[v] for v in eqn.outvars)) or {0}
        filled.append(where)
        for v in operand_vars(eqn):
            wanted[v] |= where
    return filled[::-1]


def _by_level(eqns: Sequence[JaxprEqn], meshes: Sequence[set[int]]) -> ByLevel:
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
    """The first level at which `mesh` can read a variable that other meshes, or itself, make at `levels`."""
    if mesh in levels:
        return levels[mesh]
    return min(levels.values()) + 1 if levels else 0
