"""A traced step and its plan in, the plan beside what XLA for GPUs makes of it out."""

from __future__ import annotations

from pathlib import Path

from minialpa.inter.lower.emit import emit_program
from minialpa.inter.lower.mesh_programs import input_types, split_by_mesh
from minialpa.plan import Plan
from minialpa.plan.check import PlanCheck
from minialpa.support.collection import collection_paused
from minialpa.tracing.trace import TracedStep
from minialpa.xla_gpu.check import check_programs
from minialpa.xla_gpu.targets import target_of


def check_plan(traced: TracedStep, plan: Plan, target: str | None, cache: str | Path | None) -> PlanCheck:
    """See `minialpa.check`."""
    gpu = target_of(plan.cluster.device.name if target is None else target)
    with collection_paused():
        program = emit_program(traced, plan)
        types = input_types(program, traced)
        programs = split_by_mesh(program, types, cluster=plan.cluster, platform="cuda")
    return check_programs(programs, plan, gpu, cache=None if cache is None else Path(cache))
