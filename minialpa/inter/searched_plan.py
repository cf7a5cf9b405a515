"""Plans of a joint search of layers, submeshes, micro-batches and rematerialisation: a step and options in, a plan out.

The search adds up costs of sublayers (`search/joint_search.py`). This module solves the stages that it finds as whole
problems, and the search learns their costs, until no other pipeline has a lower sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from minialpa.errors import InfeasibleError, TraceError
from minialpa.inter.build_plan import StageTooLargeError, best_of, plan_stages, preference
from minialpa.inter.context import PlanningContext
from minialpa.inter.layer_choices import or_mixed_choices
from minialpa.inter.layers.layered_step import CutStep, layered_step
from minialpa.inter.one_stage import default_shape, plan_on_best_submesh
from minialpa.inter.refine import or_longer_scans, or_shorter_bubble
from minialpa.inter.search.joint_search import FoundPipeline, StageSearch
from minialpa.inter.search.stage_bounds import StageBounds
from minialpa.inter.search.stage_cost import load_costs, save_costs
from minialpa.inter.search.stage_dp import PipelineTooLargeError
from minialpa.inter.search.sublayer_solver import SublayerSearch
from minialpa.inter.search.submeshes import Space, candidates
from minialpa.inter.search.user_stages import DecidedStage
from minialpa.inter.search_payoff import on_one_device
from minialpa.options import MOVING, AutoShardingOption, AutoStageOption, LayerOption, Remat, remats
from minialpa.plan import Certificate, Plan

#: Plans after which a search ends although a sum of sublayers is lower.
_MAX_PLANS = 8
#: Rounds of a search, including rounds in which stages do not fit.
_MAX_ROUNDS = 30
#: In larger steps, a sum has to be lower by the excess of the first plan over its sum.
_FEW_EQUATIONS = 10_000
#: Steps with at most so many equations are planned for one device, too.
_VERY_FEW_EQUATIONS = 4000
#: By falling memory: the choices of a search in which nothing fits that stays on the devices.
_MOVING_LAST: tuple[Remat, ...] = ("none", "dots", *MOVING)


def plan_on_searched_stages(context: PlanningContext, layers: LayerOption, auto: AutoStageOption) -> Plan:
    """The best plan of two searches: with scans over layers whole and, if that may help, cut by stages."""
    cut = context.cut_scans(layers) if context.cluster.n_devices > 1 else None

    def attempt(scans_are_cut: bool) -> Plan:
        step = cut if cut is not None and scans_are_cut else context.whole_scans(layers)
        found = _best_searched_plan(context, step, layers, auto)
        return or_longer_scans(context, found, step)

    # Outside of whole scans, there may be too few operations for layers, or for batches.
    attempts = [partial(attempt, scans_are_cut) for scans_are_cut in ((False, True) if cut else (False,))]
    return best_of(attempts, (InfeasibleError, TraceError))


def _best_searched_plan(context: PlanningContext, cut: CutStep, layers: LayerOption, auto: AutoStageOption) -> Plan:
    """Values move to the host if memory is short."""
    given = tuple(remat[0] for remat in remats(layers, 1))
    spaces = [given] if len(given) == 1 or context.cluster.device.host_bytes is None else [given, _MOVING_LAST]
    for choices in spaces:
        try:
            return _searched_plan(context, cut, auto, choices)
        except InfeasibleError as error:
            failure = error
        if not isinstance(failure, PipelineTooLargeError | StageTooLargeError):
            break
    raise _explained_error(context, failure, auto)


def _searched_plan(context: PlanningContext, cut: CutStep, auto: AutoStageOption, choices: tuple[Remat, ...]) -> Plan:
    options = context.options
    space = Space(
        micro_batches=options.micro_batch_choices(cut.step.batch_size),
        remats=choices,
        candidates=tuple(
            candidates(context.cluster, auto, options.sharding, default_shape(context, context.cluster.n_devices))
        ),
        schedule=options.schedule,
        use_all_devices=options.use_all_devices,
        tolerance=auto.tolerance,
    )
    costs = load_costs(auto.cached_costs)
    sublayers = SublayerSearch(
        traced=cut.step,
        layer_of_group=cut.of_group,
        cluster=context.cluster,
        compiler=context.solver.compiler,
        space=space,
        option=options.sharding,
        strategy_cache=context.solver.strategy_cache,
        proofs=context.proofs,
    )
    context.report("lower bounds of stage costs", 0, 0)
    bounds = StageBounds(sublayers, costs)  # adds its costs to `costs`
    search = StageSearch(bounds, context.report)
    solved = _plan_found_pipelines(context, cut, search)
    save_costs(auto.cached_costs, costs)
    if not solved.plans:
        assert solved.failure is not None
        raise solved.failure

    best, found = min(solved.plans, key=lambda pair: preference(pair[0]))
    alike = [partial(_plan_of, context, cut, other) for other in search.alike(found)]
    best = best_of([lambda: best, *alike])
    bound_s = min(solved.certificate.bound_s, best.cost.total_s)

    # The search does not know choices of single layers, other schedules, or overheads of small steps.
    plans = {id(plan): plan for plan in (best, or_mixed_choices(context, best, cut) if len(choices) > 1 else best)}
    if options.choose_schedule:
        plans = {k: or_shorter_bubble(context, plan, cut) for k, plan in plans.items()}
    best = min(plans.values(), key=preference)
    if len(cut.step.flat.eqns) <= _VERY_FEW_EQUATIONS and not options.use_all_devices:
        on_several = best
        best = best_of([lambda: on_several, partial(on_one_device, context.asking_for_fewest(), auto)])
    return dataclasses.replace(best, certificate=dataclasses.replace(solved.certificate, bound_s=bound_s))


@dataclass(frozen=True, slots=True)
class _SearchResult:
    """Plans with their pipelines, bounds on all other pipelines, and why a pipeline did not fit, if so."""

    plans: tuple[tuple[Plan, FoundPipeline], ...]
    certificate: Certificate
    failure: InfeasibleError | None


def _plan_found_pipelines(context: PlanningContext, cut: CutStep, search: StageSearch) -> _SearchResult:
    """Plan the best pipeline, report the costs of its stages to the search; repeat while another sum is lower."""
    plans: list[tuple[Plan, FoundPipeline]] = []
    failure: InfeasibleError | None = None
    certificate: Certificate | None = None
    excess = 1.0  # (seconds of the first plan) / (seconds by the sums of its sublayers)

    for _ in range(_MAX_ROUNDS):
        if plans and search.is_long:
            break
        try:
            found = search.best()
        except InfeasibleError as error:
            failure = failure or error
            break

        # By the sums, no other pipeline beats the best plan.
        certificate = search.certificate
        best_s = min((plan.cost.total_s for plan, _ in plans), default=math.inf)
        if best_s <= excess * found.seconds or len(plans) == _MAX_PLANS or _is_planned(found, plans):
            break

        try:
            plan = _plan_of(context, cut, found)
        except StageTooLargeError as error:
            search.exclude(found, error.stage, error.n_live)
            failure = error
            continue

        search.learn(found, [(s.compute_s + s.communication_s, s.update_s) for s in plan.stages])
        if not plans and len(cut.step.flat.eqns) > _FEW_EQUATIONS:
            excess = max(1.0, plan.cost.total_s / found.seconds)
        plans.append((plan, found))
    return _SearchResult(tuple(plans), certificate or search.certificate, failure)


def _is_planned(found: FoundPipeline, plans: Sequence[tuple[Plan, FoundPipeline]]) -> bool:
    """Whether the search finds a planned pipeline: the true cost of that plan does not change the choice."""
    return any((other.stages, other.n_micro_batches) == (found.stages, found.n_micro_batches) for _, other in plans)


def _plan_of(context: PlanningContext, cut: CutStep, found: FoundPipeline) -> Plan:
    """The plan of a found pipeline. Raises StageTooLargeError if a stage does not fit as a whole."""
    remat = tuple(stage.remat for stage in found.stages for _ in stage.layers)
    option = context.options.sharding
    layered = layered_step(cut, remat)
    stages = [DecidedStage(s.layers, s.candidate, option, s.choice.first_device) for s in found.stages]
    if len(stages) == 1 and not set(remat) - {"none"}:  # layers have no use
        layered, stages = cut.whole, [dataclasses.replace(stages[0], layers=())]
    return plan_stages(context.asking(n_micro_batches=found.n_micro_batches), layered, stages)


def _explained_error(context: PlanningContext, failure: InfeasibleError, auto: AutoStageOption) -> InfeasibleError:
    """The error without a plan: if options may be the reason, the error of the whole step on all devices."""
    options = context.options

    # Only options that may forbid shardings.
    kept = set(options.sharding.set_names) - {"memory_limit_bytes", "planning_effort", "solver_time_limit_s"}
    if auto.sharding(AutoShardingOption()) != AutoShardingOption():
        kept = kept - {"force_batch_dim_to_mesh_dim"} | {"submesh_logical_shape_space"}
    if not isinstance(auto.submesh_physical_shape_space, str):
        kept = kept | {"submesh_physical_shape_space"}
    if not kept or isinstance(failure, PipelineTooLargeError | StageTooLargeError):
        return failure

    try:
        plan_on_best_submesh(context.asking_for_fewest(), auto)
    except InfeasibleError as error:
        listed = ", ".join(f"`{name}`" for name in sorted(kept))
        return InfeasibleError(f"No pipeline and no single stage satisfies {listed}. {error}")
    return failure
