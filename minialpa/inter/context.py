"""The input of planning as one value, the compiler of a cluster, and checks before any search."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.cost import is_gpu
from minialpa.errors import ShardingError
from minialpa.inter.layers.layered_step import CutStep, LayeredStep, cut_scans, whole_scans
from minialpa.inter.search.stage_cost import EQUATION_BYTES
from minialpa.inter.search.stage_solve import StageSolver
from minialpa.inter.short_plan import SublayeredWhole
from minialpa.inter.staging.tasks import StagedStep
from minialpa.intra.graph.constraints import matches
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.memory.xla.model import XLA_CPU, XLA_CPU_WITH_BARRIERS, XLA_GPU
from minialpa.options import AutoStageOption, LayerOption, ManualLayerOption, PlanOptions
from minialpa.plan import Plan
from minialpa.routing.rows import Proofs, RowSharing, has_grouped_products, with_rows_in_slots
from minialpa.rules.known_rules import primitives_without_rule
from minialpa.support.private_jax import warn
from minialpa.support.progress import Report
from minialpa.support.recent import Recent
from minialpa.tracing.trace import TracedStep

JaxVersion = tuple[int, ...]

#: The first jax whose XLA for CPUs respects optimization barriers. Before, rematerialisation saves no memory inside one
#: program.
_JAX_WITH_BARRIERS: JaxVersion = (0, 11)
#: XLA for GPUs runs collectives beside kernels only with this scheduler.
_HIDING = (("xla_gpu_enable_latency_hiding_scheduler", True),)
#: Most bytes of each cache.
_MOST_STAGED_BYTES = 2**29
#: Most paths in a message.
_MOST_PATHS = 8


def _cache(n_equations: Callable[[Any], int]) -> Callable[[], Recent[Any]]:
    """Makes a cache. n_equations: of a value."""
    return lambda: Recent(_MOST_STAGED_BYTES, lambda value: EQUATION_BYTES * n_equations(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext:
    """One step to plan, the cluster, and the user's options.

    Attributes:
        solver: solves each distinct stage once, for all attempts at a plan.
        logical_mesh: the user's view of all devices; None if the planner chooses.
        below_s: seconds per step of a known plan. The planner may give up attempts that cannot be faster.
        shortens: whether attempts plan short steps, see `short_plan`.
        made: the plans and sketches of all attempts so far.
        cuts: cache of steps with their layers.
        sublayered: cache of steps with their sublayers.
        staged: cache of steps with their tasks, see `place_stages`.
        in_slots, proofs: cache of steps with rows of experts in slots, and of proofs about their indices.
    """

    traced: TracedStep
    cluster: ClusterSpec
    solver: StageSolver
    options: PlanOptions
    logical_mesh: LogicalMesh | None
    report: Report
    below_s: float = math.inf
    shortens: bool = True
    made: list[Plan] = field(default_factory=list)
    cuts: Recent[CutStep | None] = field(default_factory=_cache(lambda cut: len(cut.step.flat.ops) if cut else 0))
    sublayered: Recent[SublayeredWhole] = field(default_factory=_cache(lambda whole: len(whole.where.sublayers)))
    staged: Recent[StagedStep] = field(default_factory=_cache(lambda staged: len(staged.split.ops)))
    in_slots: Recent[TracedStep] = field(default_factory=_cache(lambda step: len(step.flat.ops)))
    proofs: Proofs = field(default_factory=dict)

    @property
    def whole(self) -> LayeredStep:
        """The step without layers."""
        return LayeredStep(plain=self.traced, fingerprint=self.traced.fingerprint)

    def cut_scans(self, layers: LayerOption) -> CutStep | None:
        """`layered_step.cut_scans`. Attempts share the result, and so its sublayers."""
        return self._cut(("cut", layers), lambda: cut_scans(self.whole, layers))

    def whole_scans(self, layers: LayerOption) -> CutStep:
        """`layered_step.whole_scans`, shared as well."""
        cut = self._cut(("whole", layers), lambda: whole_scans(self.whole, layers))
        assert cut is not None
        return cut

    def _cut(self, key: Hashable, make: Callable[[], CutStep | None]) -> CutStep | None:
        def make_reported() -> CutStep | None:
            self.report("finding layers", 0, 0)
            return make()

        return self.cuts.get_or_make(key, make_reported)

    def with_rows_in_slots(self, layered: LayeredStep, sharing: RowSharing) -> LayeredStep:
        """Attempts with equal numbers of devices and micro-batches share the step."""
        if not has_grouped_products(layered.plain):
            return layered
        plain = self.in_slots.get_or_make(
            (layered.plain.flat, sharing), lambda: with_rows_in_slots(layered.plain, sharing, self.proofs)
        )
        return dataclasses.replace(layered, plain=plain)

    def asking(self, **options: Any) -> PlanningContext:
        """The same context with some options replaced."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **options))

    def reporting(self, part: str) -> PlanningContext:
        """The same context, with `part` in its reports."""
        report = self.report
        return dataclasses.replace(self, report=lambda what, done, total: report(f"{what} of {part}", done, total))

    def asking_for_fewest(self) -> PlanningContext:
        """The same context with one micro-batch, if the options leave the number open."""
        return self.asking(n_micro_batches=1) if self.options.choose_micro_batches else self


def compiler_of(cluster: ClusterSpec, jax_version: JaxVersion | None = None) -> Compiler:
    """The compiler for the devices of `cluster`.

    jax_version: of the jax that runs these devices; None for a described cluster, whose CPUs count as jax 0.10.
    """
    if is_gpu(cluster.device):
        return XLA_GPU
    has_barriers = jax_version is not None and jax_version >= _JAX_WITH_BARRIERS
    return XLA_CPU_WITH_BARRIERS if has_barriers else XLA_CPU


def compiler_options_of(cluster: ClusterSpec) -> tuple[tuple[str, bool], ...]:
    """The options of XLA that plans for `cluster` count on. On GPUs, they hide collectives."""
    return _HIDING if is_gpu(cluster.device) else ()


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_request(context: PlanningContext) -> None:
    """Raise ShardingError for options that the step or the cluster cannot have. Warn of missing rules or boundaries."""
    _warn_of_missing_rules(context)
    _warn_of_missing_boundaries(context)
    _check_fixed_specs(context)
    _check_submeshes(context)
    _check_logical_mesh(context)


def _warn_of_missing_rules(context: PlanningContext) -> None:
    names = primitives_without_rule(context.traced.flat.eqns)
    if names:
        listed = ", ".join(f"`{name}`" for name in names)
        warn(
            f"No sharding rule for {listed}: every device computes all of {'it' if len(names) == 1 else 'them'}. The "
            "results are right but take more time and memory. Add a rule with `minialpa.register_sharding_rule`.",
        )


def _warn_of_missing_boundaries(context: PlanningContext) -> None:
    if isinstance(context.options.layers, ManualLayerOption) and context.traced.n_boundaries == 0:
        warn(
            "The layers of this pipeline end at `mark_pipeline_boundary()`, but the step has no such call, so it is "
            "one stage. Call `mark_pipeline_boundary()` in the model, or set `layer_option=AutoLayerOption()`.",
        )


def _check_fixed_specs(context: PlanningContext) -> None:
    options, names = context.options.sharding_options, context.options.axis_names
    unknown = {name for option in options for name in option.named_axes} - {*names}
    if unknown and names:
        raise ShardingError(
            f"`fixed_specs` or `received_axes` has the mesh axes {', '.join(sorted(unknown))}, but `axis_names` lists "
            f"{', '.join(names)}. Use these names, or add the others to `AutoShardingOption(axis_names=...)`."
        )

    paths = (*context.traced.in_paths, *context.traced.out_paths)
    known = set(paths)
    for pattern in dict.fromkeys(pattern for option in options for pattern, _ in option.fixed_pairs):
        if pattern not in known and not any(matches(pattern, path) for path in paths):
            near = difflib.get_close_matches(pattern, paths, _MOST_PATHS, cutoff=0.0)
            listed = ", ".join(f"`{path}`" for path in near) + (", ..." if paths[_MOST_PATHS:] else "")
            raise ShardingError(
                f"`fixed_specs` has the key `{pattern}`, which matches no argument or result. Choose from {listed}, "
                "with `*` for any text."
            )


def _check_submeshes(context: PlanningContext) -> None:
    stages, cluster = context.options.stages, context.cluster
    space = stages.submesh_physical_shape_space if isinstance(stages, AutoStageOption) else ()
    for h, n in () if isinstance(space, str) else space:
        per_host = cluster.devices_per_host
        if not 1 <= h <= cluster.num_hosts or not (1 <= n <= per_host if h == 1 else n == per_host):
            raise ShardingError(
                f"`submesh_physical_shape_space` has ({h}, {n}), but the cluster has {cluster.num_hosts} hosts of "
                f"{per_host} devices. Give (1, n) with n up to {per_host} for a part of a host, or (h, {per_host}) "
                f"with h up to {cluster.num_hosts} for whole hosts."
            )


def _check_logical_mesh(context: PlanningContext) -> None:
    """Raise ShardingError if options ask for another view of the devices than the user's LogicalMesh.

    Stages are checked when they are placed.
    """
    mesh, options = context.logical_mesh, context.options
    if mesh is None:
        return

    if options.layers is not None:
        if isinstance(options.stages, AutoStageOption):
            raise ShardingError(
                "The search for stages compares mesh shapes, but `devices` is a LogicalMesh of one shape, "
                f"{mesh.shape}. Pass a ClusterSpec or a list of devices as `devices`, or use `ShardParallel`."
            )
        return

    shape, submesh = options.logical_shape, options.submesh
    if shape is not None and tuple(shape) != tuple(mesh.shape):
        raise ShardingError(
            f"`logical_shape` is {tuple(shape)}, but `devices` is a LogicalMesh of {mesh.shape}. Remove "
            "`logical_shape`."
        )
    if submesh is not None and submesh[0] * submesh[1] != mesh.n_devices:
        raise ShardingError(
            f"`submesh` is {submesh}, but `devices` is a LogicalMesh of {mesh.shape}. Remove `submesh`, or pass a "
            "ClusterSpec as `devices`."
        )
