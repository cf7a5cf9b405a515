"""Choices of single layers in decided stages: stages and the best plan of a search in, a plan at least as good out.

A search gives all layers of a stage one choice, and moves values to the host only if no other plan fits. Here, each
stage is solved with each choice in all its layers, in unlimited memory. Its layers then get the fastest choices within
the memory that their micro-batches in flight leave (`layers/choices.py`). The last layer moves no values, since it
needs them at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from minialpa.errors import InfeasibleError
from minialpa.inter.build_plan import (
    PlacedStages,
    SolvedMesh,
    StageTooLargeError,
    build_plan,
    place_stages,
    plan_stages,
    preference,
    solve_mesh,
)
from minialpa.inter.context import PlanningContext
from minialpa.inter.layers.choices import LayerCost, Mix, fastest_mix
from minialpa.inter.layers.layered_step import CutStep, LayeredStep, layered_step
from minialpa.inter.search.stage_in_memory import FreeSolution
from minialpa.inter.search.user_stages import DecidedStage, as_planned
from minialpa.options import MOVING, Remat
from minialpa.plan import Plan
from minialpa.plan.record import limit_bytes

#: Most mixes that are solved. By choice: memory is nearly a sum over layers.
_MOST_MIXES = 3
#: Plans that use less than this part of the memory have no need of other choices. By choice.
_MUCH = 0.7
#: In larger steps, solving all stages with each choice takes minutes and gigabytes.
_MOST_EQUATIONS = 30_000
_Solutions = list[tuple[Remat, FreeSolution]]
_WITHOUT_MOVES: Mapping[Remat, Remat] = {"offload": "dots", "offload_inputs": "full"}


def or_mixed_choices(context: PlanningContext, best: Plan, cut: CutStep) -> Plan:
    """`best`, or its stages with other choices, if memory is short and that is faster."""
    is_large = len(cut.step.flat.eqns) > _MOST_EQUATIONS
    if is_large or not best.layer_of_group or not _is_short_of_memory(best):
        return best
    asking = context.reporting("refinements").asking(n_micro_batches=best.n_micro_batches, schedule=best.schedule)
    stages = tuple(as_planned(stage, context.cluster, stage.layers) for stage in best.stages)
    attempts = _Attempts(asking, cut, stages)
    mixed = attempts.mix()
    others = [mixed] if mixed is not None else attempts.moving(best)
    found: Plan = min([best, *others], key=preference)
    return dataclasses.replace(found, certificate=best.certificate)


def _is_short_of_memory(plan: Plan) -> bool:
    if set(plan.remat) - {"none"}:
        return True
    return any(stage.peak_bytes > _MUCH * limit_bytes(plan, k) for k, stage in enumerate(plan.stages))


def plan_of_mix(context: PlanningContext, cut: CutStep, stages: Sequence[DecidedStage]) -> Plan | None:
    """The fastest choices of single layers; None if no fastest shardings of a stage fit, or if all values fit."""
    return _Attempts(context, cut, tuple(stages)).mix()


@dataclass(frozen=True, slots=True)
class _Attempts:
    context: PlanningContext
    cut: CutStep
    stages: tuple[DecidedStage, ...]

    def mix(self) -> Plan | None:
        """The fastest choices by sums over layers, corrected by the error of the last sum."""
        alone, errors = self._alone(), [0.0] * len(self.stages)
        for _ in range(_MOST_MIXES):
            mixes = [
                _fastest(solutions, len(stage.layers), error)
                for stage, solutions, error in zip(self.stages, alone, errors, strict=True)
            ]
            fitting = [mix for mix in mixes if mix is not None]
            if len(fitting) < len(mixes):
                return None
            found = self._solved(self._picked(alone, fitting))
            if found.meshes is not None:
                return build_plan(self.context, found.placed, found.meshes)
            errors = [
                math.inf if one is None else one.n_bytes - mix.n_bytes
                for one, mix in zip(found.free, fitting, strict=True)
            ]
        return None

    def _alone(self) -> list[_Solutions]:
        """For each stage, the solutions with one choice in all layers; none if all values fit."""
        alone: list[_Solutions] = [[] for _ in self.stages]
        choices: list[Remat] = ["none", "dots", "full", *(MOVING if self._may_move() else ())]
        for choice in choices:
            found = self._solved([choice] * self.cut.n_layers).free
            if choice == "none" and all(free is not None and free.fits for free in found):
                break
            for solutions, free in zip(alone, found, strict=True):
                if free is not None:
                    solutions.append((choice, free))
        return alone

    def _picked(self, alone: Sequence[_Solutions], mixes: Sequence[Mix]) -> list[Remat]:
        """The choice of each layer."""
        picked = {
            layer: solutions[pick][0]
            for stage, solutions, mix in zip(self.stages, alone, mixes, strict=True)
            for layer, pick in zip(stage.layers, mix.picks, strict=True)
        }
        return [picked[layer] for layer in sorted(picked)]

    def moving(self, best: Plan) -> Iterator[Plan]:
        """`best` with values in host memory in the stages that recompute, and with shardings that save memory."""
        may_move = self._may_move() and bool(set(best.remat) - {"none"})
        for choice in MOVING if may_move else ():
            remat = ["none" if one == "none" else choice for one in best.remat]
            with contextlib.suppress(InfeasibleError):
                yield plan_stages(self.context, self._layered(remat), self.stages)

    def _may_move(self) -> bool:
        return all((s.candidate.device or self.context.cluster.device).host_bytes is not None for s in self.stages)

    def _layered(self, remat: Sequence[Remat]) -> LayeredStep:
        return layered_step(self.cut, (*remat[:-1], _WITHOUT_MOVES.get(remat[-1], remat[-1])))

    def _solved(self, remat: Sequence[Remat]) -> _Solved:
        placed = place_stages(self.context, self._layered(remat), self.stages)
        free: list[FreeSolution | None] = []
        meshes: list[SolvedMesh] = []
        for mesh in range(len(self.stages)):
            try:
                meshes.append(solve_mesh(self.context, placed, mesh, saves_memory=False))
                free.append(meshes[-1].free)
            except StageTooLargeError as error:
                free.append(error.free)
        return _Solved(placed, free, meshes if len(meshes) == len(free) else None)


def _fastest(solutions: _Solutions, n_layers: int, error_bytes: float) -> Mix | None:
    """error_bytes: of the last sum."""
    if not solutions:
        return None
    costs = [LayerCost(free.n_bytes, free.seconds) for _, free in solutions]
    return fastest_mix(costs, n_layers, solutions[0][1].limit_bytes - error_bytes)


@dataclass(frozen=True, slots=True)
class _Solved:
    """meshes: None if a stage does not fit. free: of each stage, or None if options or host memory forbid shardings."""

    placed: PlacedStages
    free: list[FreeSolution | None]
    meshes: list[SolvedMesh] | None
