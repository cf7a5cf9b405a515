"""Whether it is worth searching the stages of a step, and the plan of a step for which it is not.

A search takes seconds, and at best it saves all the time of a step. If that is less than the search takes, over
`AutoStageOption.planned_steps` steps, nothing is searched:

    step_s * planned_steps <= SEARCH_S_PER_EQUATION * n_equations        -> is_worth_searching

where step_s is what the step takes on one device by the cost model. Nothing here reads a clock, so that a busy machine
plans as a quiet one does.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial

from jax.extend.core import JaxprEqn

from minialpa.cluster import ClusterSpec
from minialpa.inter.best import best_of
from minialpa.inter.build_plan import plan_stages
from minialpa.inter.context import PlanningContext
from minialpa.inter.layers.layered_step import LayeredStep
from minialpa.inter.one_stage import plan_on_best_submesh
from minialpa.inter.search.stage_solve import StageSolver
from minialpa.inter.search.submeshes import Candidate, candidates
from minialpa.inter.search.user_stages import DecidedStage
from minialpa.intra.strategies.strategies import work_s
from minialpa.options import AutoStageOption, LayerOption, remats
from minialpa.plan import Plan
from minialpa.rules.known_rules import factors_of
from minialpa.tracing.jaxprs import sub_jaxprs

#: Seconds that a search takes for each equation of a step, about, as measured on models of 200 to 1,600 equations.
SEARCH_S_PER_EQUATION = 0.01


def is_worth_searching(context: PlanningContext, layers: LayerOption, auto: AutoStageOption) -> bool:
    """Whether a search may save more than it takes, or the user has asked for what only a search gives."""
    asks_for_more = auto.cached_costs is not None or "none" not in [remat[0] for remat in remats(layers, 1)]
    if asks_for_more or not _whole_clusters(context, auto):
        return True
    eqns = context.traced.flat.eqns
    return one_device_s(context) * auto.planned_steps > SEARCH_S_PER_EQUATION * n_equations(eqns)


def one_device_s(context: PlanningContext) -> float:
    """Seconds of the step on the first device of the cluster, however much memory that takes."""
    mesh = context.cluster.logical_mesh((1, 1), (1,), context.cluster.device_of(0))
    return sum(work_s(eqn, factors_of(eqn), mesh) for eqn in context.traced.flat.eqns)


def n_equations(eqns: Sequence[JaxprEqn]) -> int:
    """The number of equations; those of bodies count twice, as scans are searched whole, and cut between layers."""
    bodies = itertools.chain.from_iterable(map(sub_jaxprs, eqns))
    return len(eqns) + 2 * sum(n_equations(body.eqns) for body in bodies)


def plan_without_search(context: PlanningContext, whole: LayeredStep, auto: AutoStageOption) -> Plan:
    """The step in one stage on all devices, or on one device where that is as fast and devices may be idle.

    Raises InfeasibleError where it fits on neither.
    """
    options = context.options
    asked = context.asking(n_micro_batches=1 if options.choose_micro_batches else options.n_micro_batches)
    attempts = [partial(_on_all_devices, asked, whole, _whole_clusters(context, auto)[0])]
    if not options.use_all_devices:
        attempts.append(partial(on_one_device, asked, whole, auto))
    return best_of(attempts)


def on_one_device(context: PlanningContext, whole: LayeredStep, auto: AutoStageOption) -> Plan:
    """The plan on the first device of the cluster."""
    cluster = context.cluster
    alone = dataclasses.replace(cluster, num_hosts=1, devices_per_host=1, host_devices=cluster.host_devices[:1])
    plan = plan_on_best_submesh(dataclasses.replace(context, cluster=alone), whole, auto)
    return dataclasses.replace(plan, cluster=cluster)


def _on_all_devices(context: PlanningContext, whole: LayeredStep, candidate: Candidate) -> Plan:
    stage = DecidedStage((), candidate, context.options.sharding, 0)
    return plan_stages(context, whole, [stage], StageSolver(context.compiler))


def _whole_clusters(context: PlanningContext, auto: AutoStageOption) -> list[Candidate]:
    """The submeshes that are all devices; none where devices differ, or where the space has no such submesh."""
    cluster: ClusterSpec = context.cluster
    if cluster.host_devices:
        return []
    return [candidate for candidate in candidates(cluster, auto) if candidate.n_devices == cluster.n_devices]
