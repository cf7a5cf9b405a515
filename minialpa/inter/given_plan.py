"""Plans with the stages that a method gives, equal ones or listed by hand: only shardings and remat are open."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from minialpa.cluster import LogicalMesh
from minialpa.errors import ShardingError
from minialpa.inter.best import best_of
from minialpa.inter.build_plan import plan_stages
from minialpa.inter.context import PlanningContext
from minialpa.inter.layers.cut_scans import cut_scans, whole_scans
from minialpa.inter.layers.layered_step import CutStep, LayeredStep, layered_step
from minialpa.inter.refine import or_longer_scans
from minialpa.inter.search.user_stages import DecidedStage, given_stages
from minialpa.options import AutoLayerOption, FixedLayerOption, LayerOption, Remat, remats
from minialpa.plan import Plan


def plan_on_given_stages(context: PlanningContext, whole: LayeredStep, layers: LayerOption) -> Plan:
    """The best plan with the stages of the options, over what they leave open of rematerialisation."""
    cut = _cut_step(context, whole, layers)
    stages = given_stages(context.cluster, context.options, cut.n_layers)
    _check_stages_on(context.logical_mesh, stages)

    def attempt(remat: tuple[Remat, ...]) -> Plan:
        return plan_stages(context, layered_step(cut, remat), stages)

    best = best_of(partial(attempt, remat) for remat in remats(layers, cut.n_layers))
    if context.logical_mesh is None and layers == AutoLayerOption():
        return or_longer_scans(context, best, cut)
    return best


def _cut_step(context: PlanningContext, whole: LayeredStep, layers: LayerOption) -> CutStep:
    """The step with its scans over layers cut; with whole scans where it has none to cut, or is one stage anyway.

    The layers of a plan are those of its cut scans, also in one stage.
    """
    cut = cut_scans(whole, layers)
    if cut is None:
        return whole_scans(whole, layers)
    one_stage = len(given_stages(context.cluster, context.options, cut.n_layers)) == 1
    return whole_scans(whole, layers) if one_stage and not isinstance(layers, FixedLayerOption) else cut


def _check_stages_on(logical_mesh: LogicalMesh | None, stages: Sequence[DecidedStage]) -> None:
    """Raise ShardingError where a LogicalMesh is to hold stages that each have a part of its devices."""
    if logical_mesh is not None and any(s.candidate.n_devices != logical_mesh.n_devices for s in stages):
        raise ShardingError(
            f"`devices` is a LogicalMesh of {logical_mesh.shape}, one view of all of its devices, and there are "
            f"{len(stages)} stages on parts of them. Give a ClusterSpec or a list of devices."
        )
