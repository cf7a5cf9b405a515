"""The functions in front: `parallelize`, and `plan`, `explain` and `replan`, which plan and need no device.

Importing the planner or the runtime takes longer than all the rest, so that the first call that needs one imports it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minialpa.api.parallelized import ParallelizedFunc
from minialpa.api.plan_folder import PlanCache
from minialpa.api.ragged import OnRagged
from minialpa.api.step_planner import OnStale, StepPlanner
from minialpa.calls import Argnames, Argnums
from minialpa.cluster import ClusterSpec
from minialpa.errors import MinialpaError, ShardingError, TraceError
from minialpa.methods import AutoParallel, FollowingMethod, Method, check_method, plan_to_method
from minialpa.options import PlanningEffort
from minialpa.plan import Plan
from minialpa.support.private_jax import api_boundary

if TYPE_CHECKING:
    from minialpa.plan.check import PlanCheck


@api_boundary
def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    method: Method | FollowingMethod | Plan | None = None,
    static_argnums: Argnums = "auto",
    static_argnames: Argnames = (),
    donate_argnums: Argnums = "auto",
    donate_argnames: Argnames = (),
    batch_argnums: Argnums = "auto",
    on_stale: OnStale = "refuse",
    on_ragged: OnRagged = "fewer",
    plan_cache: PlanCache = "auto",
    planning_effort: PlanningEffort | None = None,
    **of_jit: Any,
) -> Any:
    """Run a step, written for one device, on all devices. Call it, or use it as a decorator with or without arguments.

    method: the parallel method, a saved `Plan`, or a method that follows the plan of another function, such as
        `CreateStateParallel` and `FollowParallel`. With None the planner chooses everything (`AutoParallel`).
    static_argnums: arguments that are Python values; "auto": all but pytrees of arrays and numbers.
    donate_argnums: arguments whose memory the results may take over; "auto": training states that the step replaces.
    static_argnames, donate_argnames: the same by name; names without numbers replace "auto".
    batch_argnums: arguments whose leaves hold examples along dimension 0, which micro-batches split. "auto" finds them
        (`inter/microbatch/find_batch.py`): the second argument of `step(state, batch)`; in other signatures, arguments
        whose leading dimension passes through the step like examples. Raises TraceError with the candidates if they are
        ambiguous and the method splits examples.
    on_stale: the treatment of a saved `Plan` for other shapes or another step. "refuse" raises a VerifyError with the
        difference; "replan" keeps the stages, micro-batches, schedule and rematerialisation of the plan, solves new
        shardings, and warns.
    on_ragged: the treatment of a batch whose examples `num_micro_batches` does not divide, such as the last one of an
        epoch. "fewer" runs it in the next smaller number of micro-batches that divides it, and warns once for each
        size; "error" raises a TraceError with the numbers that divide it.
    plan_cache: a folder for plans. The next run of a script reads them instead of planning, if step, shapes, cluster,
        options, rules and versions are the same. "auto" keeps plans of large steps in the cache folder of the user, up
        to 256 MiB; with None, every run plans.
    planning_effort: the time that planning may take: "fast", "balanced" or "proof", see `AutoShardingOption`. None for
        the effort of the method.
    """
    for name in of_jit:
        if name not in _OF_JIT:
            raise TypeError(f"parallelize() got an unexpected keyword argument {name!r}")
        raise ShardingError(f"`{name}` is an option of `jax.jit`, not of `parallelize`. {_OF_JIT[name]}")
    make = functools.partial(
        ParallelizedFunc,
        method=AutoParallel() if method is None else method,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        batch_argnums=batch_argnums,
        on_stale=on_stale,
        on_ragged=on_ragged,
        plan_cache=plan_cache,
        planning_effort=planning_effort,
    )
    return make if fun is None else make(fun)


_LEFT_OUT = "Leave it out; it changes no result."
_PLANNED = "The planner decides: leave it out, or fix shardings with `AutoShardingOption(fixed_specs=...)`."
_DEVICES = "The `devices` of a method choose devices."
#: What takes the place of options of `jax.jit`.
_OF_JIT = {
    "abstracted_axes": "Each set of shapes is planned by itself.",
    "backend": _DEVICES,
    "compiler_options": "Plans hold the options that their programs are compiled with.",
    "device": _DEVICES,
    "in_shardings": _PLANNED,
    "inline": _LEFT_OUT,
    "keep_unused": _LEFT_OUT,
    "out_shardings": _PLANNED,
}


def _planning(method: Method | None, cluster: ClusterSpec) -> Method:
    """The method, with `cluster` as its devices."""
    if not isinstance(cluster, ClusterSpec):
        name = cluster if isinstance(cluster, str) else "a100-80gb"
        raise ShardingError(f'`cluster` is a ClusterSpec, such as `ClusterSpec.preset("{name}")`; got {cluster!r}.')
    chosen = AutoParallel() if method is None else method
    check_method(chosen)
    if isinstance(chosen, Plan):
        raise ShardingError("`method` is a saved plan, which has its own cluster. Use `replan` to plan as it did.")
    planning: Method = dataclasses.replace(chosen, devices=cluster)
    return planning


@api_boundary
def plan(
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    cluster: ClusterSpec,
    method: Method | None = None,
    batch_argnums: Argnums = "auto",
    planning_effort: PlanningEffort | None = None,
) -> Plan:
    """Plan `fun(*args)` for `cluster`, with no device. `args` may hold `jax.ShapeDtypeStruct`s in place of arrays.

    planning_effort: as in `parallelize`.
    """
    step = ParallelizedFunc(
        fun, _planning(method, cluster), batch_argnums=batch_argnums, planning_effort=planning_effort
    )
    return step.plan(*_arguments(args))


@api_boundary
def explain(
    fun: Callable[..., Any],
    args: Sequence[Any],
    what: str,
    *,
    cluster: ClusterSpec,
    method: Method | None = None,
    batch_argnums: Argnums = "auto",
) -> str:
    """`ParallelizedFunc.explain` for the plan that `plan` returns for the same arguments."""
    return ParallelizedFunc(fun, _planning(method, cluster), batch_argnums=batch_argnums).explain(
        what, *_arguments(args)
    )


@api_boundary
def check(
    plan: Plan,
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    target: str | None = None,
    cache: str | Path | None = None,
    batch_argnums: Argnums = "auto",
) -> PlanCheck:
    """Compare a plan of `fun(*args)` with the program that XLA compiles for GPUs. Needs no GPU.

    Args:
        plan: the plan. Raises VerifyError if it was made for another step.
        fun: the step, for one device.
        args: its arguments, or `jax.ShapeDtypeStruct`s.
        target: the GPU, as `xla_gpu/targets.py` names it, or a JSON file; by default the device of the plan's cluster.
        cache: a folder that keeps compiled programs for the next check.
        batch_argnums: as in `parallelize`.

    Needs the extra `gpu-compile`. Raises GpuCompileError if XLA refuses a program.
    """
    return ParallelizedFunc(fun, plan, batch_argnums=batch_argnums).check(*_arguments(args), target=target, cache=cache)


@api_boundary
def phases(
    plan: Plan, fun: Callable[..., Any], args: Sequence[Any], *, batch_argnums: Argnums = "auto"
) -> dict[str, str]:
    """The step as text after each phase of planning, by the name of the phase, with the decisions of `plan`.

    Raises VerifyError if the plan was made for another step. See docs/a-step-in-phases.md.
    """
    return ParallelizedFunc(fun, plan, batch_argnums=batch_argnums).phases(*_arguments(args))


@api_boundary
def replan(plan: Plan, fun: Callable[..., Any], args: Sequence[Any], *, batch_argnums: Argnums = "auto") -> Plan:
    """A plan for `fun(*args)` with the decisions of `plan` and new shardings.

    It keeps stages, submeshes, logical shapes, micro-batches, schedule and rematerialisation. Raises VerifyError if the
    model has other layers.
    """
    return ParallelizedFunc(fun, plan_to_method(plan), batch_argnums=batch_argnums).plan(*_arguments(args))


@dataclass(frozen=True, slots=True)
class DPResult:
    """The stages of a plan in Alpa's terms. It unpacks like Alpa's tuple, which begins with a profile file.

    Attributes:
        forward_stage_layer_ids: the layers of each stage.
        submesh_physical_shapes: (hosts, devices per host) of each stage.
        submesh_logical_shapes: the mesh shape of each stage.
        submesh_autosharding_option_dicts: the fields of the sharding option of each stage.
    """

    forward_stage_layer_ids: tuple[tuple[int, ...], ...]
    submesh_physical_shapes: tuple[tuple[int, int], ...]
    submesh_logical_shapes: tuple[tuple[int, ...], ...]
    submesh_autosharding_option_dicts: tuple[dict[str, Any], ...]

    def __iter__(self) -> Iterator[Any]:
        no_profile_file = None
        return iter((no_profile_file, *(getattr(self, field.name) for field in dataclasses.fields(self))))


def get_last_dp_result() -> DPResult:
    """The stages of the latest plan. Raises MinialpaError if there is none."""
    plan = StepPlanner.last_plan
    if plan is None:
        raise MinialpaError("No plan was made yet. Call a parallelized function, its `plan`, or `minialpa.plan` first.")
    stages = plan.stages
    return DPResult(
        forward_stage_layer_ids=StepPlanner.last_layers(),
        submesh_physical_shapes=tuple(stage.submesh for stage in stages),
        submesh_logical_shapes=tuple(stage.logical_shape for stage in stages),
        submesh_autosharding_option_dicts=tuple(dataclasses.asdict(stage.option) for stage in stages),
    )


def _arguments(args: Any) -> Sequence[Any]:
    """The arguments of a step. Raises TraceError for what is no sequence of them."""
    if not isinstance(args, tuple | list):
        raise TraceError(f"`args` is a tuple of all arguments of the step; got a {type(args).__name__}. Pass `(x,)`.")
    return args
