"""The fields of a plan: all decisions about one step, as values.

A plan holds no jaxpr. It numbers variables and equations in the order of tracing, which is the same for the same step
and shapes; `fingerprint` identifies the step.
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

#: The options of XLA that a plan may set. Plans come from files, and some options of XLA write files.
COMPILER_OPTIONS: Final = frozenset({"xla_gpu_enable_latency_hiding_scheduler"})
#: Marks a field that older files of the same version lack.
MAY_BE_MISSING: Final = {"may_be_missing": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSpec:
    """The meshes of one argument or result, and its sharding on each of them.

    Attributes:
        path: the user's name, such as `params['w']`.
        shape: of the whole array.
        dtype: its name.
        mesh_ids: numbers of the meshes that hold it; empty for an unused argument.
        partition_specs: its sharding on each of these meshes.
        rows: empty if each of these meshes holds the whole array. Otherwise each entry of `mesh_ids`, `partition_specs`
            and `rows` is for one block with the rows (start, stop) of dimension 0. A mesh may hold several blocks.
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
    """A `PlacementSpec` with specs instead of PartitionSpecs."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    mesh_ids: tuple[int, ...]
    specs: tuple[Spec, ...]
    rows: tuple[tuple[int, int], ...] = ()

    @property
    def is_key(self) -> bool:
        """Whether the dtype and shape are those of a raw random key."""
        return self.dtype == "uint32" and self.shape == (2,)

    def placement(self) -> PlacementSpec:
        return PlacementSpec(
            path=self.path,
            shape=self.shape,
            dtype=self.dtype,
            mesh_ids=self.mesh_ids,
            partition_specs=tuple(spec.partition_spec() for spec in self.specs),
            rows=self.rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """Equal collectives of a stage.

    Attributes:
        kind: all-reduce, all-gather, ...
        n_bytes: bytes of one of them, in the count of `cost.Collective`.
        axes: its axes of the stage's logical mesh.
        stage: number of the stage.
        times_per_step: number of runs in a step.
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
        layer: number of its layer; None outside of layers, as in the update.
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
        number: number of the chunk in the whole pipeline; of an update, the number of the stage.
        loop: the loop of the pass, or the loop before the update. Loops count from 1.
    """

    kind: Literal["forward", "backward", "update"]
    number: int
    loop: int = 1


@dataclass(frozen=True, slots=True)
class PlannedTransfer:
    """Arrays that a pass sends to another stage for each micro-batch, or an update to another update once per step.

    Attributes:
        source: the pass or update that sends.
        target: the first pass or update that reads the arrays.
        n_bytes: bytes of the whole arrays, for any sharding.
    """

    source: PassName
    target: PassName
    n_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPass:
    """Predicted seconds of one micro-batch in one chunk.

    Attributes:
        kind: forward or backward; `step` is both in one, in a plan with a single stage.
        chunk: number of the chunk in the whole pipeline.
        compute_s: seconds of computing.
        communication_s: seconds of collectives that devices wait for.
        loop: the loop of the pass. Loops count from 1.
        hidden_s: seconds of collectives that run beside compute.
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
        option: the user's options for its shardings.
        input_specs: specs of the inputs of the mesh, in order.
        equation_specs: specs of the equations of the mesh, in order.
        operators: its matrix products and convolutions.
        passes: the passes of one micro-batch, in order.
        update_s: seconds once per step, before the first loop and after the last.
        fixed_bytes: bytes per device for state, gradients and temporaries.
        kept_bytes: for each chunk, bytes per device that every micro-batch in flight keeps.
        peak_bytes: bytes per device at the fullest moment.
        optimal: whether the solver has proven that its shardings are the cheapest.
        between_s: seconds once per step after each loop except the last.
        gap: its shardings cost at most this part more than the cheapest.
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
    gap: float = field(default=0.0, metadata=MAY_BE_MISSING)

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
        """Bytes per device of one micro-batch in flight in all chunks."""
        return sum(self.kept_bytes)

    @property
    def forbidden(self) -> tuple[str, ...]:
        """Kinds of collectives that may not reshard."""
        return self.option.forbidden_collectives

    @property
    def mesh(self) -> LogicalMesh:
        """The logical mesh with the links that the choice of collectives depends on."""
        return LogicalMesh(self.logical_shape, self.alpha, self.beta)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """Predicted seconds of a step: total = compute + communication + bubble + update.

    Attributes:
        compute_s, communication_s: of the slowest stage in the loops.
        bubble_s: seconds that this stage waits for others.
        update_s: seconds of the work once per step.
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
    """Proof of a search: by the sums of pieces, every pipeline in its space takes at least `bound_s` seconds.

    The space is all cuts of the layers, submeshes, and choices of rematerialisation, with each of `n_micro_batches` and
    with the logical shapes that the search looked at.

    Attributes:
        bound_s: seconds of a step.
        n_micro_batches: the searched numbers of micro-batches.
        n_costs: number of solved costs of pieces; bounds were enough for all others.
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
    """The fields of a plan; `Plan` adds methods.

    Attributes:
        fingerprint: of the planned step.
        cluster: its devices and links.
        n_micro_batches: number of parts of the batch.
        schedule: name of the order of passes.
        layer_of_group: layer of each forward group, in order; empty without a pipeline.
        remat: for each layer, the values that its backward pass recomputes: `none`, all but matrix products (`dots`),
            or all (`full`).
        stages: from first to last.
        inputs: meshes and specs of the arguments.
        outputs: meshes and specs of the results.
        collectives: communication between devices of one mesh.
        transfers: communication between meshes.
        cost: predicted seconds and bytes.
        row_blocks: for each stack of layers in a scan that is cut between stages, the number of rows of each block.
        certificate: the proof of the search; None without a search.
        per_micro_batch: values that each micro-batch computes from its own examples in place of a total of the full
            batch: batch statistics, and calls of `per_micro_batch`.
        keeps_rows: whether later loops over the micro-batches read kept rows of earlier loops, or recompute them.
        casts_once: whether weights are cast to narrower types before the first loop, and stay in memory for the whole
            step, or in each pass.
        batch: names of the arguments that hold the examples; empty without examples, and in older files.
        compiler_options: names and values of options of XLA for all programs of the step.
        ragged_products: the step's ragged products, which are compiled as dense products over all groups.
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
        """The number of examples of a batch; None without a batch."""
        sizes = (v.shape[0] for v in self.inputs if v.shape and argument_name(v.path) in self.batch and not v.is_key)
        return next(sizes, None)

    @property
    def n_loops(self) -> int:
        """The number of loops over the micro-batches."""
        return 1 + max(len(stage.between_s) for stage in self.stages)

    @property
    def input_specs(self) -> tuple[PlacementSpec, ...]:
        """Placement of each argument leaf, in the order of `jax.tree.leaves`."""
        return tuple(value.placement() for value in self.inputs)

    @property
    def output_specs(self) -> tuple[PlacementSpec, ...]:
        """Placement of each result leaf."""
        return tuple(value.placement() for value in self.outputs)
