"""Plans without a pipeline: the whole step as one stage, on the submesh that the user wants or on the best one."""

from __future__ import annotations

from functools import partial

from minialpa.errors import InfeasibleError
from minialpa.inter.best import best_of
from minialpa.inter.build_plan import plan_stages
from minialpa.inter.context import PlanningContext
from minialpa.inter.layers.layered_step import LayeredStep
from minialpa.inter.one_stage_remat import plan_in_one_stage
from minialpa.inter.search.submeshes import Candidate, candidates
from minialpa.inter.search.user_stages import DecidedStage, placed_stages
from minialpa.intra.graph.constraints import shape_of_constraints
from minialpa.options import AutoStageOption
from minialpa.plan import Plan


def plan_on_submesh(context: PlanningContext, whole: LayeredStep) -> Plan:
    """The step in one stage, on the submesh and logical shape of the options; else on all devices."""
    cluster, options, view = context.cluster, context.options, context.logical_mesh
    submesh = options.submesh or (cluster.num_hosts, cluster.devices_per_host)
    shape = options.logical_shape or (view.shape if view else _default_shape(context, submesh[0] * submesh[1]))
    candidate = Candidate(submesh, shape)
    placed_stages([((), candidate, options.sharding)], cluster)  # raises for a submesh that the cluster does not have
    stage = DecidedStage(layers=(), candidate=candidate, option=options.sharding, first_device=0)
    return plan_in_one_stage(context, whole, stage)


def _default_shape(context: PlanningContext, n_devices: int) -> tuple[int, ...]:
    """That of the mesh that the sharding constraints of the step are for, if the options leave it open; else a row."""
    option = context.options.sharding
    is_open = not option.data_parallel and option.force_batch_dim_to_mesh_dim is None
    asked = shape_of_constraints(context.traced.flat.eqns, n_devices) if option.keep_constraints and is_open else None
    return asked or (n_devices,)


def plan_on_best_submesh(context: PlanningContext, whole: LayeredStep, auto: AutoStageOption) -> Plan:
    """The step in one stage, on the submesh and logical shape where it is fastest.

    Raises InfeasibleError where it fits on none.
    """
    cluster = context.cluster

    def attempt(candidate: Candidate) -> Plan:
        host = next(h for h in range(cluster.num_hosts) if candidate.device in (None, cluster.device_of(h)))
        first_device = host * cluster.devices_per_host
        stage = DecidedStage((), candidate, context.options.sharding, first_device)
        return plan_stages(context, whole, [stage])

    n_least = cluster.n_devices if context.options.use_all_devices else 1
    found = [candidate for candidate in candidates(cluster, auto) if candidate.n_devices >= n_least]
    if not found:
        raise InfeasibleError(f"No submesh has all {cluster.n_devices} devices.")
    return best_of(partial(attempt, candidate) for candidate in found)
