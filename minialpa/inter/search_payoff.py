"""Whether a search of stages pays; if not, a step in and its plan out.

A search takes seconds, and at best it saves all the time of a step. Over the N steps of a training run
(`AutoStageOption.planned_steps`, or by `planning_effort`), with step_s the step on one device by the cost model:

    search_s = SEARCH_S_PER_EQUATION n_equations
    step_s N > search_s                                           -> search_pays

A slightly longer step is first planned without a search. Devices that share the work perfectly are the lower bound, so
a plan near the bound is the answer:

    step_s N <= _LITTLE_LONGER search_s and
    (plan_s - step_s / n_devices) N <= search_s                   -> plan_if_not_searched

All seconds are counted, not measured, so plans do not depend on how busy the machine is.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from jax.extend.core import JaxprEqn

from minialpa.errors import InfeasibleError, TraceError
from minialpa.inter.build_plan import best_of, build_plan, place_stages, solve_meshes
from minialpa.inter.by_name import shardings_by_name
from minialpa.inter.context import PlanningContext
from minialpa.inter.one_stage import plan_on_best_submesh
from minialpa.inter.search.submeshes import Candidate, candidates
from minialpa.inter.search.user_stages import DecidedStage
from minialpa.intra.strategies.work import work_of
from minialpa.ir.equations import sub_jaxprs
from minialpa.options import (
    PLANNED_STEPS,
    AutoLayerOption,
    AutoShardingOption,
    AutoStageOption,
    LayerOption,
    UniformStageOption,
    remats,
)
from minialpa.plan import Plan, SearchNotMade
from minialpa.rules.known_rules import factors_of
from minialpa.support.sizes import bytes_text

#: Seconds of a search for each equation: about 0.01 in models of 200 to 1,600 equations, above 0.02 in one of 7,500.
SEARCH_S_PER_EQUATION = 0.02
#: Seconds of compilation that a pipeline adds, about, for each equation.
_COMPILE_S_PER_EQUATION = 0.01
#: Numbers of equal stages that are planned without a search, and most micro-batches for each stage.
_EQUAL_STAGES, _PER_STAGE = (2, 4, 8), 4
#: Steps longer by this factor are searched at once.
_LITTLE_LONGER = 10


def search_pays(context: PlanningContext, layers: LayerOption, auto: AutoStageOption) -> bool:
    """Whether a search may save more than it takes, or the user asks for decisions that only a search makes."""
    run_s = one_device_s(context) * _planned_steps(context, auto)
    return _needs_search(context, layers, auto) or run_s > _search_s(context)


def plan_if_not_searched(context: PlanningContext, auto: AutoStageOption) -> Plan | None:
    """The plan without a search; None if a search pays, if memory is short, or if the step has no layers."""
    layers = context.options.layers
    assert layers is not None
    if context.traced.n_groups == 0:
        return None

    step_s, search_s, n_steps = one_device_s(context), _search_s(context), _planned_steps(context, auto)
    if _needs_search(context, layers, auto) or step_s * n_steps > _LITTLE_LONGER * search_s:
        return None
    try:
        plan = plan_without_search(context, auto)
    except (InfeasibleError, TraceError):
        return None
    saved_s = plan.cost.total_s - step_s / context.cluster.n_devices
    pays = search_pays(context, layers, auto) and saved_s * n_steps > search_s
    return None if pays else plan


def without_search(context: PlanningContext, auto: AutoStageOption, best: Plan) -> Plan:
    """`best` with the reason for which its stages were not searched."""
    saved_s = max(0.0, best.cost.total_s - one_device_s(context) / context.cluster.n_devices)
    reason = SearchNotMade(search_s=_search_s(context), saved_s=saved_s, n_steps=_planned_steps(context, auto))
    return replace(best, search_not_made=reason)


def _needs_search(context: PlanningContext, layers: LayerOption, auto: AutoStageOption) -> bool:
    """Whether options exclude plans without a search."""
    asks_for_more = auto.cached_costs is not None or "none" not in [remat[0] for remat in remats(layers, 1)]
    return asks_for_more or not _candidates_of_all_devices(context, auto)


def _planned_steps(context: PlanningContext, auto: AutoStageOption) -> float:
    """Steps of the training run."""
    given = auto.planned_steps
    return PLANNED_STEPS[context.options.sharding.planning_effort] if given is None else given


def _search_s(context: PlanningContext) -> float:
    return SEARCH_S_PER_EQUATION * n_equations(context.traced.flat.eqns)


def one_device_s(context: PlanningContext) -> float:
    """Seconds of the step on the first device of the cluster, in unlimited memory."""
    mesh = context.cluster.logical_mesh((1, 1), (1,), context.cluster.device_of(0))
    return sum(sum(work_of(eqn, factors_of(eqn), mesh)) for eqn in context.traced.flat.eqns)


def n_equations(eqns: Sequence[JaxprEqn]) -> int:
    """Number of equations. Bodies count twice, because a search plans scans both whole and cut."""
    bodies = itertools.chain.from_iterable(map(sub_jaxprs, eqns))
    return len(eqns) + 2 * sum(n_equations(body.eqns) for body in bodies)


def plan_without_search(context: PlanningContext, auto: AutoStageOption) -> Plan:
    """The step in one stage on all devices, or on one device if that is as fast and devices may be idle.

    It costs at most as much as `ShardParallel` and the data parallel methods on all devices. Raises InfeasibleError if
    the fastest shardings on all devices do not fit.
    """
    fewest = context.asking_for_fewest()  # one micro-batch, if the number is open
    best = _plan_on_all_devices(fewest, auto)
    if context.options.use_all_devices:
        return best
    return best_of([lambda: best, partial(on_one_device, fewest, auto)])


def or_equal_stages(
    context: PlanningContext, auto: AutoStageOption, best: Plan, planned: Callable[[PlanningContext], Plan]
) -> Plan:
    """`best`, or a faster pipeline of 2, 4 or 8 equal stages (`UniformStageOption`).

    p stages take at least (n + p - 1) / n times the share of each device in the step, and have to repay their
    compilation. Few are faster than one stage, so they are planned only where the gain could repay a search.

    planned: the plan of the options of a context.
    """
    options, n_devices = context.options, context.cluster.n_devices
    is_open = options.layers in (AutoLayerOption(), AutoLayerOption(remat="auto"))
    if not is_open or auto != replace(AutoStageOption(), planned_steps=auto.planned_steps):
        return best

    share_s, search_s = one_device_s(context) / n_devices, _search_s(context)
    n_steps = _planned_steps(context, auto)
    compile_s = _COMPILE_S_PER_EQUATION * n_equations(context.traced.flat.eqns)
    numbers = options.micro_batch_choices(context.traced.batch_size)
    for p in _EQUAL_STAGES:
        n = max((number for number in numbers if number <= _PER_STAGE * p), default=numbers[0])
        gain_s = best.cost.total_s - share_s * (n + p - 1) / n
        if n_devices % p or gain_s * n_steps - compile_s <= search_s:
            continue
        below_s = best.cost.total_s - compile_s / n_steps
        with_stages = context.asking(
            n_micro_batches=n, layers=AutoLayerOption(layer_num=p), stages=UniformStageOption(p), use_all_devices=True
        )
        with contextlib.suppress(InfeasibleError, TraceError):
            found = planned(replace(with_stages, below_s=below_s))
            best = found if found.cost.total_s < below_s else best
    return best


def on_one_device(context: PlanningContext, auto: AutoStageOption) -> Plan:
    """One stage on a device of the first host."""
    cluster = context.cluster
    alone = replace(cluster, num_hosts=1, devices_per_host=1, host_devices=cluster.host_devices[:1])
    plan = plan_on_best_submesh(replace(context, cluster=alone), auto)
    return replace(plan, cluster=cluster)


def _plan_on_all_devices(context: PlanningContext, auto: AutoStageOption) -> Plan:
    """The fastest of `ShardParallel` and data parallel methods."""
    option = context.options.sharding
    stage = DecidedStage((), _candidates_of_all_devices(context, auto)[0], option, 0)
    placed = place_stages(context, context.whole, [stage])

    def attempt(sharding: AutoShardingOption, below_s: float) -> tuple[Plan, float]:
        """The plan, and a lower bound on the seconds of each plan."""
        named = replace(placed, stages=(replace(stage, option=sharding),))
        solved = solve_meshes(replace(context, below_s=below_s), named)
        free = solved[0].free
        if free is not None and not free.fits:
            raise InfeasibleError(
                f"The fastest shardings need {bytes_text(free.n_bytes)} per device, and the limit is "
                f"{bytes_text(free.limit_bytes)}, so rematerialisation may be faster."
            )
        return build_plan(context, named, solved), free.bound_s if free is not None else 0.0

    best, bound_s = attempt(option, math.inf)
    for sharding in itertools.islice(shardings_by_name(option, auto), 1, None):
        if best.cost.total_s <= bound_s:
            break
        with contextlib.suppress(InfeasibleError):
            best = min(best, attempt(sharding, best.cost.total_s)[0], key=lambda plan: plan.cost.total_s)
    return best


def _candidates_of_all_devices(context: PlanningContext, auto: AutoStageOption) -> list[Candidate]:
    """The submeshes of all devices; empty if devices differ, or if the space has no such submesh."""
    cluster = context.cluster
    if cluster.host_devices:
        return []
    return [
        candidate
        for candidate in candidates(cluster, auto, context.options.sharding)
        if candidate.n_devices == cluster.n_devices
    ]
