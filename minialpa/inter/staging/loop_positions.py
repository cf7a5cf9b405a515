"""Where the equations of a loop over micro-batches run: a position in the order of one micro-batch for each.

Positions 0..S-1 are the forward passes of the S chunks, S..2S-1 their backward passes in reverse, so position p is
chunk p or 2S-1-p. A chunk is a run of layers that a stage executes at once; most stages have one chunk.

1. A cheap equation that depends on no example floats: each task that reads it has a copy     -> _floating_equations
2. A tagged equation goes to the position of its layer, or after it where its operands do     -> _position_by_operands
3. A backward equation without a tag goes to the first backward pass whose chunk holds its residuals
                                                                                              -> _residual_position
4. An equation whose operands have no position goes to its first reader                       -> _fill_by_readers
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.split_step import SplitStep
from minialpa.inter.staging.split_values import combined_values, step_results
from minialpa.ir.equations import operand_vars
from minialpa.ir.op import Op
from minialpa.rules.heavy import is_heavy


@dataclass(frozen=True, slots=True)
class ChunkedStep:
    """A split step and the pipeline that runs it.

    Attributes:
        split: the step.
        labels: for each traced equation, the position of its layer; None for one that autodiff left untagged.
        mesh_of_chunk: the mesh of each chunk; one chunk without a pipeline.
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

    def is_backward(self, op: Op) -> bool:
        return op.origin.direction == "backward"


@dataclass(frozen=True, slots=True)
class LoopPlacement:
    """Where the equations of one loop run.

    Attributes:
        eqns: the equations at each position, in the order of the split step, with copies of floating ones.
        position_of: the position at which each variable of the loop is made, except those of floating equations.
        floating: variables of the equations that every reader has a copy of.
    """

    eqns: Mapping[int, Sequence[JaxprEqn]]
    position_of: Mapping[Var, int]
    floating: frozenset[Var]


def place_loops(step: ChunkedStep) -> dict[int, LoopPlacement]:
    """The placement of each loop, by its segment."""
    seen = _Seen()
    return {segment: _place_loop(step, segment, seen) for segment in range(1, 2 * step.split.n_loops + 1, 2)}


@dataclass(slots=True)
class _Seen:
    """What is known when an equation is placed; updated equation by equation.

    Attributes:
        position_of: position at which a variable of this loop is made.
        earlier: the same for variables of earlier loops.
        forward_readers: chunks whose forward passes read a variable, in this loop or an earlier one.
    """

    position_of: dict[Var, int] = field(default_factory=dict)
    earlier: dict[Var, int] = field(default_factory=dict)
    forward_readers: dict[Var, set[int]] = field(default_factory=lambda: defaultdict(set))


def _place_loop(step: ChunkedStep, segment: int, seen: _Seen) -> LoopPlacement:
    ops = step.split.in_segment(segment)
    floating = _floating_equations(step.split, segment)
    fixed = [op for op in ops if not op.eqn.outvars or op.eqn.outvars[0] not in floating]
    seen.earlier.update(seen.position_of)
    seen.position_of = {}

    placed = [_place_by_operands(step, op, seen) for op in fixed]
    positions = _fill_by_readers([op.eqn for op in fixed], placed)
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

    What is read outside the loop does not float, since one task has to own it.
    """
    owned = {value for value, _ in combined_values(split)} | set(step_results(split))
    owned.update(v for op in split.ops if op.segment != segment for v in operand_vars(op.eqn))
    dependent = _examples(split)

    floating: dict[Var, JaxprEqn] = {}
    for op in split.in_segment(segment):
        eqn = op.eqn
        stays = _is_expensive(eqn) or not dependent.isdisjoint(operand_vars(eqn)) or not owned.isdisjoint(eqn.outvars)
        if stays:
            dependent.update(eqn.outvars)
        else:
            floating.update((v, eqn) for v in eqn.outvars)
    return floating


def _is_expensive(eqn: JaxprEqn) -> bool:
    """Whether an equation must not run twice, for its cost or its effects."""
    return is_heavy(eqn) or bool(eqn.effects)


def _examples(split: SplitStep) -> set[Var]:
    """The variables through which a loop reads the batch."""
    if split.n_micro_batches > 1:
        return {micro for _, micro in split.micro_inputs}
    traced = split.traced
    return {v for v, dim in zip(traced.flat.invars, traced.batch_dims, strict=True) if dim is not None}


def _place_by_operands(step: ChunkedStep, op: Op, seen: _Seen) -> int | None:
    """The position by `_position_by_operands`, which is noted in `seen`."""
    position = _position_by_operands(step, op, seen)
    if position is None:
        return None

    if position < step.n_chunks:
        for v in operand_vars(op.eqn):
            seen.forward_readers[v].add(position)
    seen.position_of.update((v, position) for v in op.eqn.outvars)
    return position


def _position_by_operands(step: ChunkedStep, op: Op, seen: _Seen) -> int | None:
    """The first position, from that of its layer on, where the operands are at hand; None if neither has a position."""
    operands_at = [seen.position_of[v] for v in operand_vars(op.eqn) if v in seen.position_of]
    label = step.label_of(op)
    if label is None and step.is_backward(op):
        label = _residual_position(step, op.eqn, max([step.n_chunks, *operands_at]), seen)
    return max(operands_at if label is None else [label, *operands_at], default=None)


def _residual_position(step: ChunkedStep, eqn: JaxprEqn, at_least: int, seen: _Seen) -> int:
    """First backward position, from `at_least` on, whose chunk holds what the forward pass left for `eqn`."""
    position = at_least
    for v in operand_vars(eqn):
        chunks = set(seen.forward_readers.get(v, ()))
        made_at = seen.position_of.get(v, seen.earlier.get(v, step.n_chunks))
        if made_at < step.n_chunks:
            chunks.add(made_at)

        candidates = [p for p in map(step.backward_position, chunks) if p >= at_least]
        position = max(position, min(candidates, default=position))
    return position


def _fill_by_readers(eqns: Sequence[JaxprEqn], positions: Sequence[int | None]) -> list[int]:
    """`positions`, with that of its first reader for each equation that has none; 0 if nothing reads it."""
    filled: list[int] = []
    first_reader: dict[Var, int] = {}
    # Backwards, since the readers of an equation may have to be placed by their own readers first.
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
    """`eqns` and the floating equations that they depend on, sorted by `order`: the number of each equation."""
    needed: dict[JaxprEqn, None] = {}  # in an order that repeats
    unvisited = [v for eqn in eqns for v in operand_vars(eqn)]
    while unvisited:
        eqn = floating.get(unvisited.pop())
        if eqn is not None and eqn not in needed:
            needed[eqn] = None
            unvisited.extend(operand_vars(eqn))
    return sorted([*needed, *eqns], key=lambda eqn: order[eqn])
