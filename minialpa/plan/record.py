"""The fields of a plan: everything that was decided about one step, as values.

A plan holds no jaxpr. Its variables and equations are numbered in the order in which tracing the same step for the same
shapes yields them; `fingerprint` tells whether a step is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from jax.sharding import PartitionSpec

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.cost import CollectiveKind
from minialpa.options import AutoShardingOption, Remat
from minialpa.sharding import EquationSpecs, Spec
from minialpa.tracing.arguments import argument_name
from minialpa.tracing.fingerprint import Fingerprint
from minialpa.tracing.ragged_products import RaggedProduct

#: The options of XLA that a plan may set. Plans come from files, and some of XLA's options write files.
COMPILER_OPTIONS: Final = frozenset({"xla_gpu_enable_latency_hiding_scheduler"})
#: Marks a field that files of the same version may lack, because plans had no such field when they were written.
MAY_BE_MISSING: Final = {"may_be_missing": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSpec:
    """The meshes that hold one argument or result, and its sharding on each of them.

    Attributes:
        path: the name that users know it by, such as `params['w']`.
        shape: of the whole array.
        dtype: its name.
        mesh_ids: numbers of the meshes that hold it; empty if nothing reads it.
        partition_specs: its sharding on each of these meshes.
        rows: empty if each of these meshes holds the whole array. Else the array is kept in blocks of rows: each entry
            of `mesh_ids`, `partition_specs` and `rows` is for one block, with its rows (start, stop) of dimension 0. A
            mesh may hold several blocks.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    mesh_ids: tuple[int, ...]
    partition_specs: tuple[PartitionSpec, ...]
    rows: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        blocks = [f" rows {a}:{b}" for a, b in self.rows] or [""] * len(self.mesh_ids)
        places = zip(self.mesh_ids, blocks, self.partition_specs, strict=True)
        where = ", ".join(f"mesh {m}{block}: {spec}" for m, block, spec in places)
        return f"{self.path} {self.dtype}{list(self.shape)}: {where or 'not used'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedValue:
    """A `PlacementSpec` as a plan keeps it, with specs instead of PartitionSpecs.

    Attributes:
        path: as in `PlacementSpec`.
        shape: of the whole array.
        dtype: its name.
        mesh_ids: numbers of the meshes that hold it, once for each block of rows.
        specs: its sharding on each of these meshes.
        rows: the rows (start, stop) of each block; empty if each mesh holds the whole array.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    mesh_ids: tuple[int, ...]
    specs: tuple[Spec, ...]
    rows: tuple[tuple[int, int], ...] = ()

    @property
    def is_key(self) -> bool:
        """Whether this may be a random key of the old style."""
        return self.dtype == "uint32" and self.shape == (2,)

    def placement(self) -> PlacementSpec:
        specs = tuple(spec.partition_spec() for spec in self.specs)
        return PlacementSpec(
            path=self.path,
            shape=self.shape,
            dtype=self.dtype,
            mesh_ids=self.mesh_ids,
            partition_specs=specs,
            rows=self.rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """Equal collectives of a stage.

    Attributes:
        kind: all-reduce, all-gather, ...
        n_bytes: bytes of one of them, as `cost.Collective` counts them.
        axes: axes of the stage's logical mesh that it runs over.
        stage: number of the stage.
        times_per_step: how often a step runs it.
    """

    kind: CollectiveKind
    n_bytes: float
    axes: tuple[int, ...]
    stage: int
    times_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOperator:
    """A matrix product or convolution and its shardings.

    Attributes:
        name: of the primitive.
        part: forward, backward or other, which is the update.
        layer: number of its layer; None if it belongs to none, as in the update.
        shape: of its result.
        result: sharding of its result.
        operands: shardings of its operands.
    """

    name: str
    part: Literal["forward", "backward", "other"]
    layer: int | None
    shape: tuple[int, ...]
    result: Spec
    operands: tuple[Spec, ...]


class PassName(NamedTuple):
    """Names a pass, or the update of a stage.

    Attributes:
        kind: what it is.
        number: number of the chunk, counted over the whole pipeline; of an update, the number of the stage.
        loop: the loop that the pass is in, or that the update follows. The loops of a step are counted from 1.
    """

    kind: Literal["forward", "backward", "update"]
    number: int
    loop: int = 1


@dataclass(frozen=True, slots=True)
class PlannedTransfer:
    """What a pass sends to another stage for each micro-batch, or an update sends to another update once per step.

    Attributes:
        source: the pass or update that sends.
        target: the first pass or update there that reads what was sent.
        n_bytes: bytes of the whole arrays, however they are sharded.
    """

    source: PassName
    target: PassName
    n_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPass:
    """Predicted seconds of one micro-batch in one chunk.

    Attributes:
        kind: forward or backward; `step` is both in one, in a plan with a single stage.
        chunk: number of the chunk, counted over the whole pipeline.
        compute_s: seconds of computing.
        communication_s: seconds of collectives that devices wait for.
        loop: the loop that the pass is in. The loops of a step are counted from 1.
        hidden_s: seconds of collectives beside which devices compute.
    """

    kind: Literal["forward", "backward", "step"]
    chunk: int
    compute_s: float
    communication_s: float
    loop: int = 1
    hidden_s: float = field(default=0.0, metadata=MAY_BE_MISSING)

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage. Its chunks are the runs of neighbouring `layers`.

    Attributes:
        layers: numbers of its layers; empty without a pipeline.
        submesh: (hosts, devices per host).
        first_device: number of its first device in the cluster.
        logical_shape: lengths of the axes of its logical mesh.
        alpha: seconds of latency of the links along each axis.
        beta: seconds per byte of the links along each axis.
        combined: kinds of collectives that sum and start together where they can.
        option: the options that its shardings comply with.
        input_specs: specs of the inputs of the mesh, in order.
        equation_specs: specs of the equations of the mesh, in order.
        operators: its matrix products and convolutions.
        passes: what one micro-batch runs, in order.
        update_s: seconds once per step, before the first loop and behind the last.
        fixed_bytes: bytes per device for state, gradients and temporaries.
        kept_bytes: for each chunk, bytes per device that every micro-batch in flight keeps.
        peak_bytes: bytes per device at the fullest moment.
        optimal: whether the solver has proven its shardings to be the cheapest.
        between_s: seconds once per step behind each loop but the last.
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
    between_s: tuple[float, ...] = ()
    combined: tuple[CollectiveKind, ...] = ()

    @property
    def n_devices(self) -> int:
        return self.submesh[0] * self.submesh[1]

    @property
    def compute_s(self) -> float:
        """Seconds of one micro-batch in all passes, without communication."""
        return sum(one.compute_s for one in self.passes)

    @property
    def communication_s(self) -> float:
        return sum(one.communication_s for one in self.passes)

    @property
    def in_flight_bytes(self) -> float:
        """Bytes per device of one micro-batch that is in flight in all chunks."""
        return sum(self.kept_bytes)

    @property
    def forbidden(self) -> tuple[str, ...]:
        """Kinds of collectives that may not reshard anything."""
        return self.option.forbidden_collectives

    @property
    def mesh(self) -> LogicalMesh:
        """The logical mesh with its links, as far as the choice of collectives depends on it."""
        return LogicalMesh(self.logical_shape, self.alpha, self.beta)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """Predicted seconds of a step, and where they go.

    Attributes:
        total_s: seconds of a step.
        compute_s: seconds that the slowest stage computes in the loops.
        communication_s: seconds that this stage spends on collectives in the loops.
        bubble_s: seconds that this stage waits for others.
        update_s: seconds of what runs once per step.
        peak_bytes: bytes per device of each stage at its fullest moment.
    """

    total_s: float
    compute_s: float
    communication_s: float
    bubble_s: float
    update_s: float
    peak_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a search has shown: by the sums of pieces, no pipeline in its space takes less than `bound_s` seconds.

    The space is all cuts of the layers, submeshes with their logical shapes, and choices of rematerialisation, with
    each of `n_micro_batches`.

    Attributes:
        bound_s: seconds of a step.
        n_micro_batches: the numbers of micro-batches that were searched.
        n_costs: how many costs of pieces were solved; bounds were enough for all others.
    """

    bound_s: float
    n_micro_batches: tuple[int, ...]
    n_costs: int


class ExportedSpecs(NamedTuple):
    """PartitionSpecs by path of arguments and results on one mesh, over the axes "x" and "y" of its logical shape."""

    inputs: dict[str, PartitionSpec]
    outputs: dict[str, PartitionSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """The fields of a plan. `Plan` adds methods to it, which call functions that take the fields.

    Attributes:
        fingerprint: of the step that the plan was made for.
        cluster: devices and links that the plan was made for.
        n_micro_batches: parts that the batch is cut into.
        schedule: name of the order of passes.
        layer_of_group: layer of each group of forward equations, in order; empty without a pipeline.
        remat: for each layer, what its backward pass computes again: nothing (`none`), all but matrix products
            (`dots`), or everything (`full`).
        stages: from first to last.
        inputs: where the arguments are, and their specs.
        outputs: where the results are left, and their specs.
        collectives: communication between devices of one mesh.
        transfers: communication between meshes.
        cost: predicted seconds and bytes.
        row_blocks: for each stack of layers that a scan applies, the rows of each block that it is cut into, so that
            stages can end inside; empty if no scan is cut.
        certificate: what a search has shown; None if nothing was searched.
        per_micro_batch: what each micro-batch computes from its own examples where the full batch has a total: batch
            statistics, and what the model asks for.
        keeps_rows: whether later loops over the micro-batches read what earlier ones have computed of each example,
            which is kept for all micro-batches; otherwise they compute it again.
        casts_once: whether weights are cast to the narrower types that passes read them in before the first loop, and
            not in each pass; the results stay in memory for the whole step.
        batch: names of the arguments that hold the examples; empty if there are none, and in files that were written
            before plans had this field.
        compiler_options: options of XLA, by name, that all programs of the step are compiled with, so that they do
            what the plan counts on.
        ragged_products: those of the step, which are compiled as dense products over all groups.
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
    per_micro_batch: tuple[str, ...] = ()
    keeps_rows: bool = False
    casts_once: bool = field(default=False, metadata=MAY_BE_MISSING)
    batch: tuple[str, ...] = field(default=(), metadata=MAY_BE_MISSING)
    compiler_options: tuple[tuple[str, bool], ...] = field(default=(), metadata=MAY_BE_MISSING)
    ragged_products: tuple[RaggedProduct, ...] = field(default=(), metadata=MAY_BE_MISSING)

    @property
    def n_examples(self) -> int | None:
        """The number of examples of a batch; None if the plan knows of no batch."""
        sizes = (v.shape[0] for v in self.inputs if v.shape and argument_name(v.path) in self.batch and not v.is_key)
        return next(sizes, None)

    @property
    def n_loops(self) -> int:
        """How often a step goes through its micro-batches."""
        return 1 + max(len(stage.between_s) for stage in self.stages)

    @property
    def input_specs(self) -> tuple[PlacementSpec, ...]:
        """Placement of each argument leaf, in the order of `jax.tree.leaves`."""
        return tuple(value.placement() for value in self.inputs)

    @property
    def output_specs(self) -> tuple[PlacementSpec, ...]:
        """Placement of each result leaf."""
        return tuple(value.placement() for value in self.outputs)
