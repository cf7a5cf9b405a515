"""Plans whose stages are searched: layers, submeshes, micro-batches and rematerialisation are chosen together.

The search adds up costs of pieces (`search/joint_search.py`). This module solves the stages that it finds as wholes,
and the search learns their costs, until it promises no better pipeline.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

from minialpa.errors import InfeasibleError, TraceError
from minialpa.inter.build_plan import StageTooLargeError, best_of, plan_stages, preference
from minialpa.inter.context import PlanningContext
from minialpa.inter.layers.layered_step import CutStep, layered_step
from minialpa.inter.one_stage import plan_on_best_submesh
from minialpa.inter.refine import or_interleaved, or_longer_scans
from minialpa.inter.search.joint_search import FoundPipeline, StageSearch
from minialpa.inter.search.stage_bounds import StageBounds
from minialpa.inter.search.stage_cost import load_costs, save_costs
from minialpa.inter.search.sublayer_solver import SublayerSearch
from minialpa.inter.search.submeshes import Space, candidates
from minialpa.inter.search.user_stages import DecidedStage
from minialpa.inter.search_payoff import on_one_device
from minialpa.options import AutoShardingOption, AutoStageOption, LayerOption, remats
from minialpa.plan import Certificate, Plan

#: Plans that are made before a search ends although the sums of pieces promise better ones.
_MAX_PLANS = 8
#: Rounds of a search, including rounds in which stages do not fit.
_MAX_ROUNDS = 30
#: In steps with at most so many equations, every pipeline that promises to be faster becomes a plan. In larger steps, a
#: promise has to be better by the excess of the first plan over its promise.
_FEW_EQUATIONS = 10_000
#: Steps with at most so many equations are planned for one device, too.
_VERY_FEW_EQUATIONS = 4000


def plan_on_searched_stages(context: PlanningContext, layers: LayerOption, auto: AutoStageOption) -> Plan:
    """The best plan of a joint search, with scans over layers whole and, if that may help, with stages in them."""
    cut = context.cut_scans(layers) if context.cluster.n_devices > 1 else None

    def attempt(scans_are_cut: bool) -> Plan:
        step = cut if cut is not None and scans_are_cut else context.whole_scans(layers)
        found = _search(context, step, layers, auto)
        return or_longer_scans(context, found, step)

    # A step whose layers are all in scans may have too few operations outside them for layers, or batches.
    attempts = [partial(attempt, scans_are_cut) for scans_are_cut in ((False, True) if cut else (False,))]
    return best_of(attempts, (InfeasibleError, TraceError))


def _search(context: PlanningContext, cut: CutStep, layers: LayerOption, auto: AutoStageOption) -> Plan:
    """The best plan of a joint search over one layering of the step."""
    options = context.options
    space = Space(
        micro_batches=options.micro_batch_choices(cut.step.batch_size),
        remats=tuple(remat[0] for remat in remats(layers, 1)),
        candidates=tuple(candidates(context.cluster, auto)),
        schedule=options.schedule,
        use_all_devices=options.use_all_devices,
        tolerance=auto.tolerance,
    )
    known = load_costs(auto.cached_costs)
    sublayers = SublayerSearch(
        traced=cut.step,
        layer_of_group=cut.of_group,
        cluster=context.cluster,
        compiler=context.solver.compiler,
        space=space,
        option=options.sharding,
        strategy_cache=context.solver.strategy_cache,
    )
    bounds = StageBounds(sublayers, known)
    search = StageSearch(bounds, context.report)
    solved = _solve_what_is_found(context, cut, search)
    save_costs(auto.cached_costs, known)
    if not solved.plans:
        assert solved.failure is not None
        raise _explained(context, solved.failure, auto)

    best, found = min(solved.plans, key=lambda pair: preference(pair[0]))
    alike = [partial(_planned, context, cut, other) for other in search.alike(found)]
    best = best_of([lambda: best, *alike])
    bound_s = min(solved.certificate.bound_s, best.cost.total_s)

    # The search does not know interleaved stages, nor the overheads of small steps on several devices.
    if options.choose_schedule:
        best = or_interleaved(context, best, cut)
    if len(cut.step.flat.eqns) <= _VERY_FEW_EQUATIONS and not options.use_all_devices:
        on_several = best
        best = best_of([lambda: on_several, partial(on_one_device, context.asking_for_fewest(), auto)])
    return dataclasses.replace(best, certificate=dataclasses.replace(solved.certificate, bound_s=bound_s))


@dataclass(frozen=True, slots=True)
class _Solved:
    """The plans of a search with their pipelines, bounds on all other pipelines, and why a pipeline did not fit, if one
    did not.
    """

    plans: tuple[tuple[Plan, FoundPipeline], ...]
    certificate: Certificate
    failure: InfeasibleError | None


def _solve_what_is_found(context: PlanningContext, cut: CutStep, search: StageSearch) -> _Solved:
    """Solve the stages of the best pipeline, tell the search their costs, and repeat while it promises more."""
    plans: list[tuple[Plan, FoundPipeline]] = []
    failure: InfeasibleError | None = None
    certificate: Certificate | None = None
    excess = 1.0  # of the cost of whole stages over the sums of their pieces

    for _ in range(_MAX_ROUNDS):
        try:
            found = search.best()
        except InfeasibleError as error:
            failure = failure or error
            break

        # No other pipeline is expected to beat the best plan.
        certificate = search.certificate
        best_s = min((plan.cost.total_s for plan, _ in plans), default=math.inf)
        if best_s <= excess * found.seconds or len(plans) == _MAX_PLANS:
            break
        # Its true cost does not change the choice.
        if any((other.stages, other.n_micro_batches) == (found.stages, found.n_micro_batches) for _, other in plans):
            break

        try:
            plan = _planned(context, cut, found)
        except StageTooLargeError as error:
            search.exclude(found, error.stage, error.n_live)
            failure = error
            continue

        search.learn(found, [(s.compute_s + s.communication_s, s.update_s) for s in plan.stages])
        if not plans and len(cut.step.flat.eqns) > _FEW_EQUATIONS:
            excess = max(1.0, plan.cost.total_s / found.seconds)
        plans.append((plan, found))
    return _Solved(tuple(plans), certificate or search.certificate, failure)


def _planned(context: PlanningContext, cut: CutStep, found: FoundPipeline) -> Plan:
    """The plan of a found pipeline. Raises StageTooLargeError if a stage does not fit after all."""
    remat = tuple(stage.remat for stage in found.stages for _ in stage.layers)
    option = context.options.sharding
    layered = layered_step(cut, remat)
    stages = [DecidedStage(s.layers, s.candidate, option, s.choice.first_device) for s in found.stages]
    if len(stages) == 1 and not set(remat) - {"none"}:  # no use for layers
        layered, stages = cut.whole, [dataclasses.replace(stages[0], layers=())]
    return plan_stages(context.asking(n_micro_batches=found.n_micro_batches), layered, stages)


def _explained(context: PlanningContext, failure: InfeasibleError, auto: AutoStageOption) -> InfeasibleError:
    """Why a search found no plan: if options may be the reason, the error of the whole step on all devices."""
    options = context.options

    # Options that may forbid shardings: without any, there is too little memory.
    kept = set(options.sharding.set_names) - {"memory_limit_bytes", "planning_effort", "solver_time_limit_s"}
    if auto.sharding(AutoShardingOption()) != AutoShardingOption():
        kept = kept - {"force_batch_dim_to_mesh_dim"} | {"submesh_logical_shape_space"}
    if not isinstance(auto.submesh_physical_shape_space, str):
        kept = kept | {"submesh_physical_shape_space"}
    if not kept or isinstance(failure, StageTooLargeError):
        return failure

    try:
        plan_on_best_submesh(context.asking_for_fewest(), auto)
    except InfeasibleError as error:
        listed = ", ".join(f"`{name}`" for name in sorted(kept))
        return InfeasibleError(f"No pipeline keeps to {listed}, and neither does the step in one stage. {error}")
    return failure
