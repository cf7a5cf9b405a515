"""A planned step goes in; its executable on the session's devices, or its comparison with XLA for GPUs, comes out.

Functions import runtime and compilers themselves, since planning needs no device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from minialpa.api.users_mesh import shardings_of_results, warn_of_moves
from minialpa.calls import Call
from minialpa.errors import ShardingError, TraceError
from minialpa.inter.lower.mesh_programs import input_types, split_by_mesh
from minialpa.methods import Target
from minialpa.plan import Plan
from minialpa.plan.check import PlanCheck
from minialpa.programs.program import Program
from minialpa.session import Session
from minialpa.support.collection import collection_paused
from minialpa.support.private_jax import NO_MESH, under_mesh
from minialpa.support.progress import phase
from minialpa.tracing.trace import TracedStep

if TYPE_CHECKING:
    from minialpa.runtime.executable import Executable
    from minialpa.runtime.runner import Runner


def compile_step(call: Call, traced: TracedStep, plan: Plan, target: Target, session: Session) -> Executable:
    """Compile a plan. Raises ShardingError if there are too few devices."""
    from minialpa.inter.lower.emit import emit_program
    from minialpa.runtime.executable import Executable

    _check_devices(plan, target, session)
    with phase("emitting instructions"), collection_paused():
        program = emit_program(traced, plan)
    runner = _make_runner(program, traced, target, session)
    shardings = shardings_of_results(call, traced)
    if session.runtime is None:
        warn_of_moves(plan, shardings)
    return Executable(
        plan,
        program,
        runner,
        call.tree[0],
        traced.out_tree,
        refs=traced.refs,
        result_shardings=shardings,
        planning_texts=functools.partial(_planning_texts, traced, plan),
    )


def compile_creation(
    call: Call, traced: TracedStep, train_step: Executable, target: Target, session: Session
) -> Executable:
    """Compile the program that creates the state of a compiled training step."""
    from minialpa.inter.lower.state_program import state_program
    from minialpa.runtime.executable import Executable

    if traced.refs:
        raise TraceError(
            "The function that creates the state reads a Ref. Pass `ref[...]`, and write the new value after the call."
        )
    # A leaf may be on several meshes: the step's program decides which mesh reads it.
    plan = train_step.get_parallel_plan()
    with phase("creating the state"):
        with collection_paused():
            created = state_program(traced, train_step.program, [stage.mesh for stage in plan.stages])
        runner = _make_runner(created.program, traced, target, session)
    placements = [[value.placement() for value in values] for values in (created.inputs, created.outputs)]
    return Executable(
        plan,
        created.program,
        runner,
        call.tree[0],
        traced.out_tree,
        placements=(placements[0], placements[1]),
        planning_texts=functools.partial(_creation_texts, traced, train_step.planning_texts),
    )


def _planning_texts(traced: TracedStep, plan: Plan) -> dict[str, str]:
    from minialpa.inter.phases import jaxpr_file, planning_files

    with collection_paused(), under_mesh(NO_MESH):
        return jaxpr_file(traced) | planning_files(traced, plan)


def _creation_texts(traced: TracedStep, of_step: Callable[[], Mapping[str, str]]) -> dict[str, str]:
    """The jaxpr of the creation, and the files of the training step, which decides where the state lies."""
    from minialpa.inter.phases import jaxpr_file

    with collection_paused():
        return jaxpr_file(traced) | {f"training_step/{name}": text for name, text in of_step().items()}


def function_name(fun: Any) -> str:
    """The name of a user's function, also under `functools.partial`; of a callable object, the name of its class."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    # Attributes of other objects may raise.
    is_plain = isinstance(fun, FunctionType | MethodType | BuiltinFunctionType | type)
    return str(fun.__name__ if is_plain else type(fun).__name__)


def check_plan(traced: TracedStep, plan: Plan, target: str | None, cache: str | Path | None) -> PlanCheck:
    from minialpa.inter.lower.emit import emit_program
    from minialpa.xla_gpu.check import check_programs
    from minialpa.xla_gpu.targets import target_of

    gpu = target_of(plan.cluster.device.name if target is None else target)
    with phase("checking the plan"):
        with collection_paused():
            program = emit_program(traced, plan)
            types = input_types(program, traced)
            programs = split_by_mesh(program, types, cluster=plan.cluster, platform="cuda")
        return check_programs(programs, plan, gpu, cache=None if cache is None else Path(cache))


def _check_devices(plan: Plan, target: Target, session: Session) -> None:
    n_devices = len(target.devices or session.devices) if session.runtime is None else session.cluster.n_devices
    ends = [stage.first_device + stage.n_devices for stage in plan.stages]
    needed = max(ends)
    if needed > n_devices:
        raise ShardingError(
            f"The plan needs {needed} devices (`plan.stages[{ends.index(needed)}]` has the last of them), and there "
            f"are {n_devices}. Plan for {n_devices} devices, or call `minialpa.init` where there are more; on CPU, "
            f"start Python with XLA_FLAGS=--xla_force_host_platform_device_count={needed}."
        )


def _make_runner(program: Program, traced: TracedStep, target: Target, session: Session) -> Runner:
    """The program on the devices of the method, or else of the session."""
    devices = target.devices or session.devices
    if session.runtime is None:
        from minialpa.runtime.local import LocalExecutable

        return LocalExecutable(program, devices)
    if target.devices:
        raise ShardingError(
            "`devices` lists devices of this process, and the session runs on a Ray cluster. Leave `devices` out, or "
            "give a ClusterSpec or a LogicalMesh."
        )
    from minialpa.runtime.cluster.cluster_executable import ClusterExecutable

    return ClusterExecutable(session.runtime, program, input_types(program, traced))
