"""Short steps: attempts at a plan leave out most repeated layers, and the chosen plan is expanded to the whole step.

Of 32 equal units of layers, a short step has units 0, 1, 2 and 31, and unit 2 counts 29 times (`ir/repeats.py`). In the
whole step, each equation that is left out takes the specs of its counterpart in unit 2.

    LayeredStep, stages    -> ShortStep                        short_step_of
    ShortStep, options     -> StagedStep with `Repeats`        staged_short_step
    its shardings          -> shardings of the whole step      Expansion
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.layers.forward import sublayers_of
from minialpa.inter.layers.layered_step import LayeredStep
from minialpa.inter.layers.offload import with_choices
from minialpa.inter.schedule.chunks import Chunks
from minialpa.inter.search.short_step import (
    NotShortened,
    Shortened,
    StagedSublayers,
    Where,
    kinds_of,
    whole_step,
    with_models,
)
from minialpa.inter.search.stage_cost import problem_key
from minialpa.inter.staging.mesh_problem import mesh_equations
from minialpa.inter.staging.staged_step import TaskOptions, stage_step
from minialpa.inter.staging.tasks import StagedStep
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.ir.equations import aval_of, is_literal, operand_vars
from minialpa.ir.repeats import Repeated, Repeats, UnitPass
from minialpa.tracing.trace import TracedStep


class NotExpandedError(Exception):
    """The whole step differs from the short step."""


class EquationPlace(NamedTuple):
    """An equation of a staged step: the `number`-th of one sublayer in one direction of one segment.

    sublayer: -1 for equations without a sublayer.
    """

    sublayer: int
    segment: int
    direction: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayeredWhole:
    """A step, cut into sublayers.

    Attributes:
        kinds: for each sublayer, a number; equal numbers mean equal equations.
    """

    sublayers: StagedSublayers
    where: Where
    kinds: tuple[int, ...]

    @property
    def sublayer_of_group(self) -> tuple[int, ...]:
        return self.sublayers.whole.sublayer_of_group


def sublayers_of_layers(step: TracedStep, layer_of_group: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sublayer of each forward group, and the layer of each sublayer. Without layers, the step is one layer."""
    return sublayers_of(step, tuple(layer_of_group) or (0,) * step.n_groups)


def sublayered_whole(step: TracedStep, sublayer_of_group: tuple[int, ...], n_micro_batches: int) -> SublayeredWhole:
    """The step in sublayers. Raises TraceError if it cannot be split into so many micro-batches."""
    whole = whole_step(step, sublayer_of_group)
    staged = stage_step(step, n_micro_batches, sublayer_of_group, range(whole.n_sublayers))
    problems = {sublayer: mesh_equations(staged, sublayer) for sublayer in range(whole.n_sublayers)}
    keys = [problem_key(problem) for problem in problems.values()]
    sublayers = StagedSublayers(
        whole=whole, staged=staged, problems=problems, kind=tuple(keys.index(key) for key in keys)
    )
    where = Where.of(sublayers)
    return SublayeredWhole(sublayers=sublayers, where=where, kinds=tuple(kinds_of(sublayers, where)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortStep:
    """A step without most of its repeated units, before rematerialisation. A unit is one or more sublayers.

    Attributes:
        short: six equal sublayers have `short.runs_as` = (0, 1, 2, 2, 2, 5): 2 stands for 3 and 4.
        layered: the whole step with its layers.
        layer_of_sublayer: the layer of each sublayer of the whole step.
    """

    whole: SublayeredWhole
    short: Shortened
    layered: LayeredStep
    layer_of_sublayer: tuple[int, ...]

    @property
    def layer_of_group(self) -> tuple[int, ...]:
        """The layer of each forward group of the whole step, whose numbers the short step keeps. Empty without layers.

        A group of a left-out sublayer has the layer of the sublayer that stands for it.
        """
        if not self.layered.of_group:
            return ()
        runs_as, layers = self.short.runs_as, self.layer_of_sublayer
        return tuple(layers[runs_as[sublayer]] for sublayer in self.whole.sublayer_of_group)

    def places(self, staged: StagedStep, *, is_short: bool) -> dict[JaxprEqn, EquationPlace]:
        """The place of each equation of the short or whole step, in sublayers of the whole step."""
        sublayers = _sublayers_of_equations(self, staged, is_short=is_short)
        counter = Counter[tuple[int, int, str]]()
        found: dict[JaxprEqn, EquationPlace] = {}
        for op, sublayer in zip(staged.split.ops, sublayers, strict=True):
            key = (sublayer, op.segment, op.origin.direction)
            found[op.eqn] = EquationPlace(*key, counter[key])
            counter[key] += 1
        return found


def short_step_of(
    whole: SublayeredWhole, layered: LayeredStep, layer_of_sublayer: tuple[int, ...], chunk_of_layer: Sequence[int]
) -> ShortStep | None:
    """The short step of an attempt; None if too little repeats.

    chunk_of_layer: the chunk of each layer; empty without a pipeline.
    """
    n_of_layer = Counter(layer_of_sublayer)
    seen = Counter[int]()
    settings: list[Hashable] = []  # sublayers repeat only with equal settings
    for layer in layer_of_sublayer:
        chunk = chunk_of_layer[layer] if chunk_of_layer else 0
        remat = layered.remat[layer] if layered.remat else "none"
        # A layer is rematerialised as a whole, so a unit has whole layers.
        place = (seen[layer], n_of_layer[layer]) if remat != "none" else 0
        seen[layer] += 1
        settings.append((chunk, remat, place))

    keys = list(zip(whole.kinds, settings, strict=True))
    short = with_models(whole.sublayers, whole.where, [keys.index(key) for key in keys])
    if isinstance(short, NotShortened):
        return None
    return ShortStep(whole=whole, short=short, layered=layered, layer_of_sublayer=layer_of_sublayer)


def staged_short_step(step: ShortStep, n_micro_batches: int, chunks: Chunks, options: TaskOptions) -> StagedStep:
    """The tasks of a short step, with `Repeats`. Raises TraceError if it cannot be split."""
    layers = step.layer_of_group
    traced = step.short.step
    if layers:
        traced = with_choices(traced, layers, step.layered.remat, chunks.layers)
    staged = stage_step(traced, n_micro_batches, chunks.of_group(layers), chunks.stage_of, options)
    return replace(staged, repeats=_repeats_of(step, staged))


def _sublayers_of_equations(step: ShortStep, staged: StagedStep, *, is_short: bool) -> list[int]:
    """The sublayer of each operation, numbered as in the whole step; -1 without a sublayer."""
    split, short = staged.split, step.short
    sources = split.traced.flat.eqns
    sublayer_of_group = step.whole.sublayer_of_group

    sublayers: list[int | None] = []
    for op in split.ops:
        made = sources[op.source].outvars if op.source >= 0 else []
        sublayer = short.sublayer_of.get(made[0]) if made else None
        if sublayer is None and op.origin.group is not None:
            sublayer = sublayer_of_group[op.origin.group]
            sublayer = short.runs_as[sublayer] if is_short else sublayer
        sublayers.append(sublayer)

    # Equations that splitting adds belong to the first sublayer of their readers.
    of_reader: dict[Var, int] = {}
    known: list[int] = []
    for op, sublayer in zip(reversed(split.ops), reversed(sublayers), strict=True):
        if sublayer is None:
            sublayer = min((of_reader[v] for v in op.eqn.outvars if v in of_reader), default=-1)
        for v in operand_vars(op.eqn) if sublayer >= 0 else ():
            of_reader[v] = min(sublayer, of_reader.get(v, sublayer))
        known.append(sublayer)
    return known[::-1]


def _repeats_of(step: ShortStep, staged: StagedStep) -> Repeats:
    """For each equation and variable, how many of the whole step it stands for."""
    short, places = step.short, step.places(staged, is_short=True)
    eqn_at = {place: eqn for eqn, place in places.items()}

    equations: dict[JaxprEqn, Repeated] = {}
    alike: dict[JaxprEqn, JaxprEqn] = {}
    for eqn, place in places.items():
        if place.sublayer not in short.models:
            continue
        model = short.models[place.sublayer]
        equations[eqn] = Repeated(model.n, UnitPass(model.run, place.segment, place.direction))
        other = eqn_at.get(place._replace(sublayer=model.before))
        if other is not None and _are_alike(eqn, other):
            alike[eqn] = other
    return Repeats(equations, _variable_counts(staged, equations), alike)


def _variable_counts(staged: StagedStep, equations: Mapping[JaxprEqn, Repeated]) -> dict[Var, int]:
    """`Repeats.variables`: how many variables each variable stands for.

    An argument that also other equations read is shared by all units and counts once.
    """
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


def _are_alike(eqn: JaxprEqn, other: JaxprEqn) -> bool:
    """Whether primitives and types are equal."""
    return eqn.primitive is other.primitive and all(
        aval_of(a) == aval_of(b)
        for a, b in itertools.zip_longest((*eqn.invars, *eqn.outvars), (*other.invars, *other.outvars))
    )


# ---- the whole step --------------------------------------------------------------------------------------------------


class Expansion:
    """For each equation of a whole staged step, its equation in the short step.

    Raises NotExpandedError if the two differ.
    """

    def __init__(self, step: ShortStep, short: StagedStep, whole: StagedStep) -> None:
        at = {place: eqn for eqn, place in step.places(short, is_short=True).items()}
        runs_as = (*step.short.runs_as, -1)
        self.of: dict[JaxprEqn, JaxprEqn] = {}
        for eqn, place in step.places(whole, is_short=False).items():
            found = at.get(place._replace(sublayer=runs_as[place.sublayer]))
            if found is None or not _are_alike(eqn, found):
                raise NotExpandedError(f"`{eqn.primitive.name}` at {place} has no counterpart in the short step.")
            self.of[eqn] = found

    def sharding(self, problem: MeshEquations, short: MeshEquations, found: MeshSharding) -> MeshSharding:
        """`found`, a solution of the mesh `short`, for the same mesh of the whole step."""
        number = {eqn: i for i, eqn in enumerate(short.eqns)}
        places = [number.get(self.of[eqn]) for eqn in problem.eqns]
        chosen = [i for i in places if i is not None]
        if len(chosen) < len(places):
            raise NotExpandedError("An equation runs on another mesh in the short step.")

        like = self._counterparts(problem, short)
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

    def _counterparts(self, problem: MeshEquations, short: MeshEquations) -> dict[Var, Var]:
        """Variables of the whole step -> of the short step."""
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
