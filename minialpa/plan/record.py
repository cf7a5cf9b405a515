"""The fields of a plan: values without jaxprs or devices.

A plan numbers variables and equations in the order of tracing, which is the same for the same step and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from jax.sharding import PartitionSpec

from minialpa.cluster import ClusterSpec, DeviceSpec, LogicalMesh
from minialpa.cost import CollectiveKind
from minialpa.options import AutoShardingOption, Remat
from minialpa.sharding import EquationSpecs, Spec
from minialpa.tracing.arguments import argument_name
from minialpa.tracing.fingerprint import Fingerprint

#: XLA options that a plan may set. Plans come from files, and other options could make XLA write files.
COMPILER_OPTIONS: Final = frozenset({"xla_gpu_enable_latency_hiding_scheduler"})


MemoryKind = Literal["device", "pinned_host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSpec:
    """The meshes of one argument or result, and its sharding on each of them.

    Attributes:
        path: the user's name, such as `params['w']`.
        shape: of the whole array.
        mesh_ids: meshes that hold the array; empty for an unused argument.
        partition_specs: the sharding on each of these meshes.
        rows: rows (start, stop) of dimension 0 in each block: entry i of `mesh_ids`, `partition_specs` and `rows`
            describes one block, and a mesh may hold several. Empty if each mesh holds the whole array.
        memory_kind: "device" or "pinned_host".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    mesh_ids: tuple[int, ...]
    partition_specs: tuple[PartitionSpec, ...]
    rows: tuple[tuple[int, int], ...] = ()
    memory_kind: MemoryKind = "device"

    def __str__(self) -> str:
        blocks = [f" rows {a}:{b}" for a, b in self.rows] or [""] * len(self.mesh_ids)
        places = zip(self.mesh_ids, blocks, self.partition_specs, strict=True)
        where = ", ".join(f"mesh {m}{block}: {spec}" for m, block, spec in places)
        memory = "" if self.memory_kind == "device" else f" in {self.memory_kind}"
        return f"{self.path} {self.dtype}{list(self.shape)}{memory}: {where or 'not used'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedValue:
    """A `PlacementSpec` with specs instead of PartitionSpecs."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    mesh_ids: tuple[int, ...]
    specs: tuple[Spec, ...]
    rows: tuple[tuple[int, int], ...] = ()
    memory_kind: MemoryKind = "device"

    @property
    def is_key(self) -> bool:
        """Whether this looks like a raw key."""
        return self.dtype == "uint32" and self.shape == (2,)

    def placement(self) -> PlacementSpec:
        return PlacementSpec(
            path=self.path,
            shape=self.shape,
            dtype=self.dtype,
            mesh_ids=self.mesh_ids,
            partition_specs=tuple(spec.partition_spec() for spec in self.specs),
            rows=self.rows,
            memory_kind=self.memory_kind,
        )


#: The pass of an operation; `other` is the update.
Part = Literal["forward", "backward", "other"]
#: Weights, which the forward pass reads; other state, which the step replaces; examples; other values.
ArgumentRole = Literal["weights", "optimizer", "batch", "other"]
#: The part of an operator that devices divide: the examples; independent products, such as heads (`batch`); dimensions
#: of the first operand (`rows`) or of another operand (`columns`) that the result has; or the terms of each sum.
SplitOver = Literal["examples", "batch", "rows", "columns", "sums"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """Equal collectives of a stage.

    Attributes:
        n_bytes: of one run, as in `cost.Collective`.
        part: pass of the operation that makes or, for arguments, first reads the array.
        array: the name of an argument, such as `state.params['w']`, or the operation that makes the array.
        module: path of the operation in the user's modules, such as `GPT/blocks_3/attn`.
        line: `file:line` of the operation in the user's code.
        can_hide: whether compute can run beside it.
    """

    kind: CollectiveKind
    n_bytes: float
    axes: tuple[int, ...]
    stage: int
    times_per_step: int
    part: Part = "other"
    array: str = ""
    module: str = ""
    line: str = field(default="", compare=False)
    can_hide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOperator:
    """A matrix product, convolution or kernel, and its shardings.

    Attributes:
        name: of the primitive.
        layer: number of its layer; `None` outside of layers, as in the update.
        shape, result, dtype: shape, sharding and dtype of its result.
        module, line: as in `PlannedCollective`.
        split: what devices divide, and among how many.
        times: runs per pass, or per update; the iterations of a scan.
        flops: of one run, before it is split over devices.
        n_bytes: read and written by one run on each device.
        seconds: of one run on each device.
    """

    name: str
    part: Part
    layer: int | None
    shape: tuple[int, ...]
    result: Spec
    operands: tuple[Spec, ...]
    dtype: str = "float32"
    module: str = ""
    line: str = field(default="", compare=False)
    split: tuple[tuple[SplitOver, int], ...] = ()
    times: int = 1
    flops: float = 0.0
    n_bytes: float = 0.0
    seconds: float = 0.0


class PassName(NamedTuple):
    """Names a pass, or the update of a stage.

    Attributes:
        number: of the chunk in the pipeline; of an update, the stage.
        loop: the loop of the pass, or before the update, from 1.
    """

    kind: Literal["forward", "backward", "weights", "update"]
    number: int
    loop: int = 1


@dataclass(frozen=True, slots=True)
class PlannedTransfer:
    """Arrays that a pass sends to another stage for each micro-batch, or an update to another update once per step.

    Attributes:
        target: the first pass or update that reads the arrays.
        n_bytes: of the whole arrays, for any sharding.
    """

    source: PassName
    target: PassName
    n_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPass:
    """Predicted seconds of one micro-batch in one chunk.

    Attributes:
        kind: `step` is forward and backward in one pass, with one stage. With a `weights` pass, `backward` makes only
            gradients that the earlier chunk reads.
        chunk: number in the pipeline.
        communication_s: collectives, and copies to and from host memory, that devices wait for.
        loop: counts from 1.
        hidden_s: collectives that run beside compute.
    """

    kind: Literal["forward", "backward", "weights", "step"]
    chunk: int
    compute_s: float
    communication_s: float
    loop: int = 1
    hidden_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage. Each run of neighbouring `layers` is a chunk: layers (0, 1, 4, 5) are two chunks.

    Attributes:
        layers: empty without a pipeline.
        submesh: (hosts, devices per host).
        first_device: number of its first device.
        logical_shape, alpha, beta, spread: see `LogicalMesh`.
        option: the user's sharding options.
        input_specs, equation_specs: of the inputs and equations of the mesh, in order.
        passes: for one micro-batch, in order.
        update_s: seconds per step before the first loop and after the last.
        fixed_bytes: bytes per device of state, gradients and temporaries.
        kept_bytes: bytes per device of each micro-batch in flight, for each chunk. With `weights` passes, three numbers
            per chunk: for all chunks the bytes until the backward pass, then until the weights pass, then between these
            two.
        peak_bytes: per device.
        temp_bytes: temporaries of the largest task, a part of `fixed_bytes`.
        optimal: whether the solver has proven that the shardings are the cheapest.
        between_s: for each loop except the last, seconds per step after the loop.
        combined: kinds of collectives that sum and start together where possible.
        gap: upper bound on (cost of the shardings) / (least cost) - 1.
        host_bytes: peak of arrays in host memory, per device; not in `peak_bytes`.
    """

    layers: tuple[int, ...]
    submesh: tuple[int, int]
    first_device: int
    logical_shape: tuple[int, ...]
    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    option: AutoShardingOption
    input_specs: tuple[Spec, ...]
    equation_specs: tuple[EquationSpecs, ...]
    operators: tuple[PlannedOperator, ...]
    passes: tuple[PlannedPass, ...]
    update_s: float
    fixed_bytes: float
    kept_bytes: tuple[float, ...]
    peak_bytes: float
    optimal: bool
    temp_bytes: float = 0.0
    between_s: tuple[float, ...] = ()
    combined: tuple[CollectiveKind, ...] = ()
    gap: float = 0.0
    host_bytes: float = 0.0
    spread: tuple[float, ...] = ()

    @property
    def n_devices(self) -> int:
        return self.submesh[0] * self.submesh[1]

    @property
    def compute_s(self) -> float:
        return sum(one.compute_s for one in self.passes)

    @property
    def communication_s(self) -> float:
        return sum(one.communication_s for one in self.passes)

    @property
    def in_flight_bytes(self) -> float:
        """Bytes per device of one micro-batch that is live in all chunks."""
        return sum(self.kept_bytes)

    @property
    def forbidden(self) -> tuple[str, ...]:
        return self.option.forbidden_collectives

    @property
    def mesh(self) -> LogicalMesh:
        """Without its device: the choice of collectives depends on the links alone."""
        return LogicalMesh(self.logical_shape, self.alpha, self.beta, spread=self.spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """Predicted seconds of a step: total = compute + communication + bubble + update.

    Attributes:
        compute_s, communication_s: of the slowest stage in the loops.
        bubble_s: waits of the slowest stage for others.
        update_s: work once per step.
        peak_bytes: per device of each stage.
    """

    total_s: float
    compute_s: float
    communication_s: float
    bubble_s: float
    update_s: float
    peak_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Certificate:
    """Proof of a search: by the sums of costs of sublayers, each pipeline in its space takes `bound_s` seconds per step
    or more. The space is all cuts of the layers, submeshes and choices of rematerialisation, with each of
    `n_micro_batches` and the logical shapes that the search opened.

    n_costs: number of solved costs of sublayers; bounds were enough for the other costs.
    """

    bound_s: float
    n_micro_batches: tuple[int, ...]
    n_costs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSharding:
    """A line of the step with shardings (`AutoShardingOption.shardings`).

    wanted: the PartitionSpec, or the first of several.
    n, n_kept: operations of the line, and how many the plan shards so.
    is_pinned: whether the plan had to.
    added_s: upper bound on the seconds per step that these shardings would add; None for shardings on another mesh.
    """

    line: str
    wanted: str
    n: int
    n_kept: int
    is_pinned: bool
    added_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchNotMade:
    """Why the planner searched no stages: the training run could save little, compared with the search.

    search_s: seconds that the search would take.
    saved_s: seconds per step that perfect sharing of the work would save; no pipeline saves more.
    n_steps: steps of the training run.
    """

    search_s: float
    saved_s: float
    n_steps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAlternative:
    """The fastest plan of another kind that the planner considered.

    Attributes:
        name: its stages, micro-batches and rematerialisation.
        total_s: predicted seconds per step.
        peak_bytes: per device, of its fullest stage.
        is_sketch: whether seconds and bytes are sums over parts, before the whole step was planned.
    """

    name: str
    total_s: float
    peak_bytes: float
    is_sketch: bool


class ExportedSpecs(NamedTuple):
    """PartitionSpecs on one mesh, by path, over the axes "x" and "y" of its logical shape."""

    inputs: dict[str, PartitionSpec]
    outputs: dict[str, PartitionSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """The fields of a plan; `Plan` adds methods.

    Attributes:
        fingerprint: identifies the planned step.
        schedule: name of the order of passes, such as `1f1b`.
        orders: the passes of each stage, such as `f0 f1 b0 w0`, for schedule `zb`; else empty.
        layer_of_group: layer of each forward group, in order; empty without a pipeline.
        remat: the forward values that the backward pass of each layer recomputes: `none`, `dots` for all except matrix
            products, `full` for all.
        inputs, outputs: leaves, in the order of `jax.tree.leaves`.
        collectives: communication between devices of one mesh.
        transfers: communication between meshes.
        row_blocks: for each stack of a cut scan over layers, the number of rows of each block.
        certificate: the proof of the search; `None` without a search.
        user_shardings: shardings in the step itself.
        search_not_made: why there was no search of stages; else `None`.
        per_micro_batch: values that each micro-batch computes from its examples alone, such as batch statistics, as
            text.
        keeps_activations: whether later loops read kept values (True) or recompute them.
        casts_once: whether weights are cast to narrower dtypes once per step (True) or per pass.
        stack_matrices: equal updates run on stacks of a multiple of this number of matrices; 0: one by one.
        batch: names of the arguments that hold the examples; empty without examples.
        compiler_options: (name, value) of XLA options for all programs.
        roles: of each input.
        model_flops: floating point operations of the products of a step, without recomputation by the plan.
        alternatives: other plans, the fastest first.
    """

    fingerprint: Fingerprint
    cluster: ClusterSpec
    n_micro_batches: int
    schedule: str
    layer_of_group: tuple[int, ...]
    remat: tuple[Remat, ...]
    stages: tuple[StagePlan, ...]
    inputs: tuple[PlacedValue, ...]
    outputs: tuple[PlacedValue, ...]
    collectives: tuple[PlannedCollective, ...]
    transfers: tuple[PlannedTransfer, ...]
    cost: PlanCost
    row_blocks: tuple[tuple[int, ...], ...] = ()
    certificate: Certificate | None = None
    search_not_made: SearchNotMade | None = field(default=None, compare=False)
    user_shardings: tuple[UserSharding, ...] = ()
    per_micro_batch: tuple[str, ...] = ()
    keeps_activations: bool = False
    casts_once: bool = False
    stack_matrices: int = 0
    batch: tuple[str, ...] = ()
    compiler_options: tuple[tuple[str, bool], ...] = ()
    roles: tuple[ArgumentRole, ...] = ()
    model_flops: float = 0.0
    orders: tuple[str, ...] = ()
    alternatives: tuple[PlannedAlternative, ...] = field(default=(), compare=False)

    @property
    def n_examples(self) -> int | None:
        """`None` without a batch."""
        sizes = (v.shape[0] for v in self.inputs if v.shape and argument_name(v.path) in self.batch and not v.is_key)
        return next(sizes, None)

    @property
    def n_loops(self) -> int:
        return 1 + max(len(stage.between_s) for stage in self.stages)

    @property
    def input_specs(self) -> tuple[PlacementSpec, ...]:
        return tuple(value.placement() for value in self.inputs)

    @property
    def output_specs(self) -> tuple[PlacementSpec, ...]:
        return tuple(value.placement() for value in self.outputs)


def device_of(plan: PlanRecord, k: int) -> DeviceSpec:
    """Each device of stage k."""
    return plan.cluster.device_of(plan.stages[k].first_device // plan.cluster.devices_per_host)


def limit_bytes(plan: PlanRecord, k: int) -> float:
    """Of each device of stage k."""
    return plan.stages[k].option.memory_limit_bytes or device_of(plan, k).memory_bytes
