"""Public functions: a step for one device goes in, a parallelized function or a plan comes out.

The planner and the runtime take longer to import than all other modules, so the first call that needs one imports it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minialpa.api.jitted import REFUSED
from minialpa.api.parallelized import ParallelizedFunc
from minialpa.api.plan_folder import PlanCache
from minialpa.api.ragged import OnRagged
from minialpa.api.step_planner import OnStale, StepPlanner
from minialpa.calls import Argnames, Argnums
from minialpa.cluster import ClusterSpec
from minialpa.errors import MinialpaError, ShardingError, TraceError, meant
from minialpa.methods import AutoParallel, FollowingMethod, Method, check_method, plan_to_method
from minialpa.options import PlanningEffort, Shardings
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
    in_shardings: Any = "auto",
    out_shardings: Any = "auto",
    plan_cache: PlanCache = "auto",
    planning_effort: PlanningEffort | None = None,
    shardings: Shardings | None = None,
    keep_unused: bool = False,
    inline: Any = False,
    **of_jit: Any,
) -> Any:
    """Return a function that runs a step, written for one device, on all devices. Also a decorator.

        @minialpa.parallelize
        def step(state, batch):
            loss, grads = minialpa.value_and_grad(loss_fn)(state.params, batch)
            return state.apply_gradients(grads=grads), loss

    The first call with new shapes plans and compiles the step; later calls run the program. See `ParallelizedFunc`.

    Args:
        fun: the step. None returns a decorator. A function under `jax.jit`, `nnx.jit` or `eqx.filter_jit` brings its
            options; options given here win, and without `donate_argnums` there, "auto" counts.
        method: a parallel method, a saved `Plan`, or a method that follows another function (`CreateStateParallel`,
            `FollowParallel`). With None the planner chooses everything (`AutoParallel`).
        static_argnums: numbers of the arguments that are Python values. "auto": all except pytrees of arrays and
            numbers.
        donate_argnums: numbers of the arguments whose memory the results may take over. "auto": training states that
            the step replaces.
        static_argnames, donate_argnames: the same by name. Names without numbers replace "auto".
        in_shardings, out_shardings: NamedShardings, PartitionSpecs and None in a pytree prefix of arguments or results,
            as in `jax.jit`. The plan has them, or an error names the leaf. With None the planner chooses.
        batch_argnums: numbers of the arguments whose leaves hold examples along dimension 0, which micro-batches split.
            "auto": the second argument of `step(state, batch)`; in other signatures, arguments whose leading dimension
            passes through the step like examples (`inter/microbatch/find_batch.py`). A call raises TraceError with the
            candidates if they are ambiguous and the method splits examples.
        on_stale: for a saved `Plan` of another step or other shapes. "refuse" raises VerifyError with the difference.
            "replan" warns, keeps stages, micro-batches, schedule and rematerialisation, and solves new shardings.
        on_ragged: for a batch that `num_micro_batches` does not divide, such as the last batch of an epoch. "fewer"
            takes the next smaller number that divides it, and warns once for each size. "error" raises TraceError with
            the numbers that divide it.
        plan_cache: a folder of plans, for later runs with equal step, shapes, cluster, options, rules and versions.
            "auto" keeps plans of large steps in the user's cache folder, up to 256 MiB. With None, every run plans.
        planning_effort: "fast", "balanced" or "proof" (see `AutoShardingOption`). None for the effort of the method.
        shardings: "hint", "pin" or "ignore", the force of the user's shardings (see `AutoShardingOption`). None for the
            choice of the method.
        keep_unused, inline: options of `jax.jit` without effect.

    Raises ShardingError for a wrong option, and TraceError if `fun` is not a function.
    """
    for name in of_jit:
        if name not in REFUSED:
            near = meant(name, inspect.signature(parallelize).parameters)
            raise TypeError(f"parallelize() got an unexpected keyword argument {name!r}.{near}")
        raise ShardingError(f"`{name}` is an option of `jax.jit`, not of `parallelize`. {REFUSED[name]}")
    make = functools.partial(
        ParallelizedFunc,
        method=AutoParallel() if method is None else method,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        batch_argnums=batch_argnums,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        on_stale=on_stale,
        on_ragged=on_ragged,
        plan_cache=plan_cache,
        planning_effort=planning_effort,
        shardings=shardings,
    )
    return make if fun is None else make(fun)


def _method_for_cluster(method: Method | None, cluster: ClusterSpec) -> Method:
    """The method with `cluster` as its devices. Raises ShardingError if either is not one, or for a saved plan."""
    if not isinstance(cluster, ClusterSpec):
        name = cluster if isinstance(cluster, str) else "a100-80gb"
        raise ShardingError(
            f'Pass a ClusterSpec as `cluster`, such as `ClusterSpec.preset("{name}")`; got {cluster!r}.'
        )
    chosen = AutoParallel() if method is None else method
    check_method(chosen)
    if isinstance(chosen, Plan):
        raise ShardingError(
            "`method` is a saved plan, which has its own cluster. Leave out `cluster` and use `minialpa.replan` to "
            "plan with its decisions, or pass a method such as `AutoParallel()`."
        )
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
    shardings: Shardings | None = None,
) -> Plan:
    """Plan `fun(*args)` for `cluster`. Needs no device.

    Args:
        fun: the step, for one device.
        args: a tuple of all arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        cluster: such as `ClusterSpec.preset("a100-80gb")`. It takes the place of the method's `devices`.
        method: a parallel method; None for `AutoParallel`.
        batch_argnums, planning_effort, shardings: as in `parallelize`.

    Raises InfeasibleError if no plan fits, and ShardingError for a wrong cluster or method.
    """
    step = ParallelizedFunc(
        fun,
        _method_for_cluster(method, cluster),
        batch_argnums=batch_argnums,
        planning_effort=planning_effort,
        shardings=shardings,
    )
    return step.plan(*_checked_arguments(args))


@api_boundary
def explain(
    fun: Callable[..., Any],
    args: Sequence[Any],
    what: str,
    *,
    cluster: ClusterSpec,
    method: Method | None = None,
    batch_argnums: Argnums = "auto",
    planning_effort: PlanningEffort | None = None,
) -> str:
    """`ParallelizedFunc.explain` for the plan that `minialpa.plan` returns for the same arguments. Needs no device."""
    step = ParallelizedFunc(
        fun, _method_for_cluster(method, cluster), batch_argnums=batch_argnums, planning_effort=planning_effort
    )
    return step.explain(what, *_checked_arguments(args))


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
    """Compare a plan of `fun(*args)` with the program that XLA compiles for GPUs: memory, communication and seconds.

    Needs the extra `gpu-compile`, but no GPU.

    Args:
        target: the GPU, by a name in `xla_gpu/targets.py` or a JSON file. None for the device of the plan's cluster.
        cache: a folder that keeps compiled programs for the next check.

    Other arguments are as in `minialpa.plan`. Raises VerifyError if the plan was made for another step, and
    GpuCompileError if XLA refuses a program.
    """
    return ParallelizedFunc(fun, plan, batch_argnums=batch_argnums).check(
        *_checked_arguments(args), target=target, cache=cache
    )


@api_boundary
def phases(
    plan: Plan, fun: Callable[..., Any], args: Sequence[Any], *, batch_argnums: Argnums = "auto"
) -> dict[str, str]:
    """The step as text after each phase of planning, by the name of the phase, with the decisions of `plan`.

    Arguments are as in `minialpa.plan`. Raises VerifyError if the plan was made for another step. See
    docs/a-step-in-phases.md.
    """
    return ParallelizedFunc(fun, plan, batch_argnums=batch_argnums).phases(*_checked_arguments(args))


@api_boundary
def replan(
    plan: Plan,
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    batch_argnums: Argnums = "auto",
    planning_effort: PlanningEffort | None = None,
) -> Plan:
    """A plan for `fun(*args)` with the decisions of `plan` and new shardings. Arguments are as in `minialpa.plan`.

    It keeps stages, submeshes, logical shapes, micro-batches, schedule and rematerialisation. Raises VerifyError if the
    model has other layers.
    """
    step = ParallelizedFunc(fun, plan_to_method(plan), batch_argnums=batch_argnums, planning_effort=planning_effort)
    return step.plan(*_checked_arguments(args))


@dataclass(frozen=True, slots=True)
class DPResult:
    """The stages of a plan, in Alpa's terms. It unpacks like Alpa's tuple, whose first entry is a profile file, here
    None.

    The fields are as in `ManualStageOption`.
    """

    forward_stage_layer_ids: tuple[tuple[int, ...], ...]
    submesh_physical_shapes: tuple[tuple[int, int], ...]
    submesh_logical_shapes: tuple[tuple[int, ...], ...]
    submesh_autosharding_option_dicts: tuple[dict[str, Any], ...]

    def __iter__(self) -> Iterator[Any]:
        no_profile_file = None
        return iter((no_profile_file, *(getattr(self, field.name) for field in dataclasses.fields(self))))


@api_boundary
def get_last_dp_result() -> DPResult:
    """The stages of the latest plan in this process. Raises MinialpaError before the first plan."""
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


def _checked_arguments(args: Any) -> Sequence[Any]:
    if not isinstance(args, tuple | list):
        raise TraceError(
            "Pass all arguments of the step as one tuple `args`, such as `(state, batch)` or `(x,)`; got a "
            f"{type(args).__name__}."
        )
    return args
