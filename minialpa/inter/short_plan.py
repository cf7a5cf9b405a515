"""Short steps of attempts at a plan, and shardings of the whole step from shardings of a short one.

Models repeat their layers. An attempt at a plan solves, times and measures a step with a few of them
(`search/short_step.py`), in which one unit stands for all units that are left out (`ir/repeats.py`). The chosen plan
is made for the whole step: an equation of a unit that is left out has the specs of the same equation of the unit that
stands for it, and the whole step is measured.

    LayeredStep, stages    -> ShortStep                        short_step_of
    ShortStep, options     -> StagedStep with `Repeats`        staged_short_step
    shardings of it        -> shardings of the whole step      Expansion
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.layers.forward import pieces_of
from minialpa.inter.layers.layered_step import LayeredStep
from minialpa.inter.layers.remat import rematerialise
from minialpa.inter.schedule.chunks import Chunks
from minialpa.inter.search.short_step import (
    NotShortened,
    Shortened,
    StagedPieces,
    Where,
    kinds_of,
    whole_step,
    with_models,
)
from minialpa.inter.search.stage_cost import problem_key
from minialpa.inter.staging.mesh_problem import mesh_equations
from minialpa.inter.staging.staged_step import stage_step
from minialpa.inter.staging.tasks import StagedStep
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.ir.equations import aval_of, is_literal, operand_vars
from minialpa.ir.repeats import Repeated, Repeats, UnitPass
from minialpa.tracing.trace import TracedStep


class NotExpandedError(Exception):
    """The whole step differs from the short one."""


class Place(NamedTuple):
    """An equation of a staged step: the `number`-th of one piece in one direction of one segment.

    piece: -1 for equations that belong to no piece.
    """

    piece: int
    segment: int
    direction: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecedWhole:
    """A step with the layers of its groups, as pieces.

    kinds: pieces of one kind are the same equations.
    """

    pieces: StagedPieces
    where: Where
    kinds: tuple[int, ...]

    @property
    def piece_of_group(self) -> tuple[int, ...]:
        """The piece of each forward group."""
        return self.pieces.whole.piece_of_group


def pieces_of_layers(step: TracedStep, layer_of_group: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The piece of each forward group, and the layer of each piece. Without layers, the step is one layer."""
    return pieces_of(step, tuple(layer_of_group) or (0,) * step.n_groups)


def pieced_whole(step: TracedStep, piece_of_group: tuple[int, ...], n_micro_batches: int) -> PiecedWhole:
    """Raises TraceError if the step cannot be split into so many micro-batches."""
    whole = whole_step(step, piece_of_group)
    staged = stage_step(step, n_micro_batches, piece_of_group, range(whole.n_pieces))
    problems = {piece: mesh_equations(staged, piece) for piece in range(whole.n_pieces)}
    keys = [problem_key(problem) for problem in problems.values()]
    pieces = StagedPieces(whole=whole, staged=staged, problems=problems, kind=tuple(keys.index(key) for key in keys))
    where = Where.of(pieces)
    return PiecedWhole(pieces=pieces, where=where, kinds=tuple(kinds_of(pieces, where)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortStep:
    """A step without most of its repeated units, before rematerialisation.

    layered: of the whole step. layer_of_piece: the layer of each piece.
    """

    whole: PiecedWhole
    short: Shortened
    layered: LayeredStep
    layer_of_piece: tuple[int, ...]

    @property
    def layer_of_group(self) -> tuple[int, ...]:
        """The layer of each group of the short step."""
        if not self.layered.of_group:
            return ()
        runs_as, layers = self.short.runs_as, self.layer_of_piece
        return tuple(layers[runs_as[piece]] for piece in self.whole.piece_of_group)

    def places(self, staged: StagedStep, *, is_short: bool) -> dict[JaxprEqn, Place]:
        """The places of the equations of the short step, or of the whole one, with the pieces of the whole one."""
        pieces = _pieces_of_equations(self, staged, is_short=is_short)
        counter = Counter[tuple[int, int, str]]()
        found: dict[JaxprEqn, Place] = {}
        for op, piece in zip(staged.split.ops, pieces, strict=True):
            key = (piece, op.segment, op.origin.direction)
            found[op.eqn] = Place(*key, counter[key])
            counter[key] += 1
        return found


def short_step_of(
    whole: PiecedWhole, layered: LayeredStep, layer_of_piece: tuple[int, ...], chunk_of_layer: Sequence[int]
) -> ShortStep | None:
    """The short step of an attempt; None if too little repeats.

    chunk_of_layer: the chunk of the pipeline of each layer; empty without a pipeline.
    """
    n_of_layer = Counter(layer_of_piece)
    seen = Counter[int]()
    apart: list[Hashable] = []
    for layer in layer_of_piece:
        chunk = chunk_of_layer[layer] if chunk_of_layer else 0
        remat = layered.remat[layer] if layered.remat else "none"
        # A layer is rematerialised as a whole, so a unit has whole layers.
        place = (seen[layer], n_of_layer[layer]) if remat != "none" else 0
        seen[layer] += 1
        apart.append((chunk, remat, place))

    keys = list(zip(whole.kinds, apart, strict=True))
    short = with_models(whole.pieces, whole.where, [keys.index(key) for key in keys])
    if isinstance(short, NotShortened):
        return None
    return ShortStep(whole=whole, short=short, layered=layered, layer_of_piece=layer_of_piece)


def staged_short_step(
    step: ShortStep, n_micro_batches: int, chunks: Chunks, *, keep_rows: bool, cast_once: bool
) -> StagedStep:
    """The tasks of a short step, with the counts of its equations. Raises TraceError if it cannot be split."""
    layers = step.layer_of_group
    traced = rematerialise(step.short.step, layers, step.layered.remat) if layers else step.short.step
    groups = chunks.of_group(layers)
    staged = stage_step(traced, n_micro_batches, groups, chunks.stage_of, keep_rows=keep_rows, cast_once=cast_once)
    return replace(staged, repeats=_repeats(step, staged))


def _pieces_of_equations(step: ShortStep, staged: StagedStep, *, is_short: bool) -> list[int]:
    """The piece of each operation of the whole or short step, numbered as in the whole step; -1 without one."""
    split, short = staged.split, step.short
    sources = split.traced.flat.eqns
    piece_of_group = step.whole.piece_of_group

    pieces: list[int | None] = []
    for op in split.ops:
        made = sources[op.source].outvars if op.source >= 0 else []
        piece = short.piece_of.get(made[0]) if made else None
        if piece is None and op.origin.group is not None:
            piece = piece_of_group[op.origin.group]
            piece = short.runs_as[piece] if is_short else piece
        pieces.append(piece)

    # Equations that splitting adds belong to the first piece of their readers.
    of_reader: dict[Var, int] = {}
    known: list[int] = []
    for op, piece in zip(reversed(split.ops), reversed(pieces), strict=True):
        if piece is None:
            piece = min((of_reader[v] for v in op.eqn.outvars if v in of_reader), default=-1)
        for v in operand_vars(op.eqn) if piece >= 0 else ():
            of_reader[v] = min(piece, of_reader.get(v, piece))
        known.append(piece)
    return known[::-1]


def _repeats(step: ShortStep, staged: StagedStep) -> Repeats:
    short, places = step.short, step.places(staged, is_short=True)
    eqn_at = {place: eqn for eqn, place in places.items()}

    equations: dict[JaxprEqn, Repeated] = {}
    alike: dict[JaxprEqn, JaxprEqn] = {}
    for eqn, place in places.items():
        if place.piece not in short.models:
            continue
        model = short.models[place.piece]
        equations[eqn] = Repeated(model.n, UnitPass(model.run, place.segment, place.direction))
        other = eqn_at.get(place._replace(piece=model.before))
        if other is not None and _is_alike(eqn, other):
            alike[eqn] = other
    return Repeats(equations, _counts(staged, equations), alike)


def _counts(staged: StagedStep, equations: Mapping[JaxprEqn, Repeated]) -> dict[Var, int]:
    """`Repeats.variables`."""
    counts = {v: one.n for eqn, one in equations.items() for v in eqn.outvars}
    shared: set[Var] = set()
    of_input: dict[Var, int] = {}
    inputs = {*staged.inputs, *(part for _, part in staged.split.micro_inputs)}
    for op in staged.split.ops:
        one = equations.get(op.eqn)
        for v in operand_vars(op.eqn):
            if v in inputs:
                if one is None:
                    shared.add(v)
                else:
                    of_input[v] = one.n
    counts.update((v, n) for v, n in of_input.items() if v not in shared)
    counts.update((total, counts[value]) for value, total in staged.split.combined if value in counts)
    return counts


def _is_alike(eqn: JaxprEqn, other: JaxprEqn) -> bool:
    return eqn.primitive is other.primitive and all(
        aval_of(a) == aval_of(b)
        for a, b in itertools.zip_longest((*eqn.invars, *eqn.outvars), (*other.invars, *other.outvars))
    )


# ---- the whole step --------------------------------------------------------------------------------------------------


class Expansion:
    """The equations of a whole staged step, each with its equation in the short one.

    Raises NotExpandedError if the two differ.
    """

    def __init__(self, step: ShortStep, short: StagedStep, whole: StagedStep) -> None:
        at = {place: eqn for eqn, place in step.places(short, is_short=True).items()}
        runs_as = (*step.short.runs_as, -1)
        self.of: dict[JaxprEqn, JaxprEqn] = {}
        for eqn, place in step.places(whole, is_short=False).items():
            found = at.get(place._replace(piece=runs_as[place.piece]))
            if found is None or not _is_alike(eqn, found):
                raise NotExpandedError(f"`{eqn.primitive.name}` at {place} has no counterpart in the short step.")
            self.of[eqn] = found

    def sharding(self, problem: MeshEquations, short: MeshEquations, found: MeshSharding) -> MeshSharding:
        """`found`, a solution of the mesh `short`, for the same mesh of the whole step."""
        number = {eqn: i for i, eqn in enumerate(short.eqns)}
        places = [number.get(self.of[eqn]) for eqn in problem.eqns]
        chosen = [i for i in places if i is not None]
        if len(chosen) < len(places):
            raise NotExpandedError("An equation runs on another mesh in the short step.")

        like = self._variables(problem, short)
        specs = {v: found.specs[other] for v, other in like.items() if other in found.specs}
        missing = [v for v, _ in problem.inputs if v not in specs]
        if missing:
            raise NotExpandedError(f"{len(missing)} inputs have no counterpart in the short step.")
        return replace(
            found,
            specs=specs,
            results={v: found.results.get(like[v], specs[v]) for v, _ in problem.results},
            equations=tuple(found.equations[i] for i in chosen),
            compute_s=tuple(found.compute_s[i] for i in chosen),
        )

    def _variables(self, problem: MeshEquations, short: MeshEquations) -> dict[Var, Var]:
        """For each variable of a mesh of the whole step, its variable in the short one."""
        like: dict[Var, Var] = {}
        for eqn in problem.eqns:
            other = self.of[eqn]
            for a, b in zip((*eqn.invars, *eqn.outvars), (*other.invars, *other.outvars), strict=True):
                if not is_literal(a) and not is_literal(b):
                    like.setdefault(a, b)

        # No equation reads these inputs.
        known = {v for v, _ in short.inputs}
        like.update((v, v) for v, _ in problem.inputs if v not in like and v in known)
        like.update((total, short.equal[like[v]]) for v, total in problem.equal.items())
        return like
