"""Plans: everything that was decided about one step, as a value that prints, saves and loads.

A plan holds no jaxpr. Its variables and equations are numbered in the order in which tracing the same step for the same
shapes yields them; `fingerprint` tells whether a step is the same.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.errors import VerifyError
from minialpa.options import Remat
from minialpa.sharding import EquationSpecs, Spec

VERSION = 3


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """Where one argument or result lives: shape, dtype, meshes, and its sharding on each of them."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    mesh_ids: tuple[int, ...]
    partition_specs: tuple[PartitionSpec, ...]

    def __str__(self) -> str:
        where = ", ".join(f"mesh {m}: {spec}" for m, spec in zip(self.mesh_ids, self.partition_specs, strict=True))
        return f"{self.path} {self.dtype}{list(self.shape)}: {where or 'not used'}"


@dataclass(frozen=True, slots=True)
class PlacedValue:
    """A `PlacementSpec` in the form that a plan keeps: specs instead of PartitionSpecs."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    mesh_ids: tuple[int, ...]
    specs: tuple[Spec, ...]

    def placement(self) -> PlacementSpec:
        specs = tuple(spec.partition_spec() for spec in self.specs)
        return PlacementSpec(self.path, self.shape, self.dtype, self.mesh_ids, specs)


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One kind of collective of a stage: the bytes of each (see `cost.Collective`), and how often a step runs it."""

    kind: str
    n_bytes: float
    axes: tuple[int, ...]
    stage: int
    times_per_step: int


@dataclass(frozen=True, slots=True)
class PlannedOperator:
    """A matrix product or convolution and its shardings. `part`: forward, backward or other (the update)."""

    name: str
    part: str
    layer: int | None
    shape: tuple[int, ...]
    result: Spec
    operands: tuple[Spec, ...]


class PassName(NamedTuple):
    """A pass by the number of its chunk, counted over the pipeline; or the update of a stage."""

    kind: Literal["forward", "backward", "update"]
    number: int


@dataclass(frozen=True, slots=True)
class PlannedTransfer:
    """What a pass sends to another stage for each micro-batch, or updates send each other once; bytes of whole arrays.

    target: the first pass there that reads it.
    """

    source: PassName
    target: PassName
    n_bytes: float


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """Seconds of one micro-batch in one chunk; `step` is forward and backward in one, for a single stage."""

    kind: Literal["forward", "backward", "step"]
    chunk: int
    compute_s: float
    communication_s: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One pipeline stage. Its chunks are the runs of neighbouring `layers`.

    first_device: number of its first device in the cluster. alpha, beta: links of the axes of the logical shape;
    forbidden: kinds of collectives that may not reshard anything.
    input_specs, equation_specs: specs of the inputs, and of the equations, of the mesh in order.
    passes: in the order of one micro-batch. update_s: seconds once per step.
    fixed_bytes: bytes per device for state, gradients and temporaries; kept_bytes: for each chunk, what every
    micro-batch in flight keeps.
    """

    layers: tuple[int, ...]
    submesh: tuple[int, int]
    first_device: int
    logical_shape: tuple[int, ...]
    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    forbidden: tuple[str, ...]
    input_specs: tuple[Spec, ...]
    equation_specs: tuple[EquationSpecs, ...]
    operators: tuple[PlannedOperator, ...]
    passes: tuple[PlannedPass, ...]
    update_s: float
    fixed_bytes: float
    kept_bytes: tuple[float, ...]
    peak_bytes: float
    optimal: bool

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
    def mesh(self) -> LogicalMesh:
        """The logical mesh with its links, as far as the choice of collectives depends on it."""
        return LogicalMesh(self.logical_shape, self.alpha, self.beta)


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Predicted seconds of a step, and where they go; bytes per device of each stage at its peak."""

    total_s: float
    compute_s: float
    communication_s: float
    bubble_s: float
    update_s: float
    peak_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole plan of one step on one cluster. Equal inputs give equal plans and equal JSON.

    layer_of_group: layer of each forward equation group, in order; empty without a pipeline.
    remat: for each layer what its backward pass finds kept: `none` is computed again, all but `dots`, or `full`.
    """

    fingerprint: str
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

    @property
    def input_specs(self) -> tuple[PlacementSpec, ...]:
        """Placement of each argument leaf, in the order of `jax.tree.leaves`."""
        return tuple(value.placement() for value in self.inputs)

    @property
    def output_specs(self) -> tuple[PlacementSpec, ...]:
        """Placement of each result leaf."""
        return tuple(value.placement() for value in self.outputs)

    def summary(self) -> str:
        """The plan as a text of a few lines for each stage."""
        lines = [
            f"Plan for {self.cluster.num_hosts} x {self.cluster.devices_per_host} {self.cluster.device.name} devices: "
            f"{len(self.stages)} stage{'s' * (len(self.stages) > 1)}, {self.n_micro_batches} micro-batches"
            + (f", schedule {self.schedule}" if len(self.stages) > 1 else "")
            + (f", rematerialisation {'/'.join(sorted(set(self.remat)))}" if set(self.remat) - {"none"} else ""),
            f"Predicted {seconds_text(self.cost.total_s)} per step: compute {seconds_text(self.cost.compute_s)}, "
            f"communication {seconds_text(self.cost.communication_s)}, bubble {seconds_text(self.cost.bubble_s)}, "
            f"update {seconds_text(self.cost.update_s)}",
        ]
        for k, stage in enumerate(self.stages):
            lines.append(
                f"Stage {k}: layers {_range(stage.layers)}, submesh {stage.submesh[0]}x{stage.submesh[1]} (device "
                f"{stage.first_device} on), logical shape {stage.logical_shape}, {seconds_text(stage.compute_s)} "
                f"compute + {seconds_text(stage.communication_s)} communication per micro-batch, "
                f"{bytes_text(stage.peak_bytes)} per device"
            )
            forward = tuple(op for op in stage.operators if op.part == "forward")
            lines.extend(f"  {line}" for line in _operator_lines(forward))
            for c in (c for c in self.collectives if c.stage == k):
                lines.append(f"  {c.kind} over axes {c.axes}: {bytes_text(c.n_bytes)}, {c.times_per_step} per step")
        return "\n".join(lines)

    def explain(self, what: str) -> str:
        """Placement of the arguments and results whose path contains `what`, and the operators of that name."""
        lines = [str(v) for v in (*self.input_specs, *self.output_specs) if what in v.path]
        for k, stage in enumerate(self.stages):
            lines.extend(f"stage {k}: {line}" for line in _operator_lines(stage.operators) if what in line)
        return "\n".join(lines) or f"Nothing in the plan is called `{what}`."

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, "plan": _encode(self)}, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote. Raises VerifyError if the text is not one, or of another version."""
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise VerifyError(f"The plan has version {data['version']}; this minialpa reads version {VERSION}.")
            return _decode_plan(data["plan"])
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise VerifyError(f"Not a plan ({error!r}). Write one with `Plan.save`.") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan that `save` wrote. Raises VerifyError like `from_json`."""
        return Plan.from_json(Path(path).read_text(errors="replace"))


def _operator_lines(operators: tuple[PlannedOperator, ...]) -> list[str]:
    """Operators of each layer; runs of equal lines are counted."""
    counts: dict[str, int] = {}
    for op in operators:
        layer = "update" if op.layer is None else f"layer {op.layer} {op.part}"
        text = f"{layer}: {op.name} {list(op.shape)} {op.result} = " + " x ".join(map(str, op.operands))
        counts[text] = counts.get(text, 0) + 1
    return [text if n == 1 else f"{text}  ({n} times)" for text, n in counts.items()]


def seconds_text(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def bytes_text(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError(value)


def _range(layers: tuple[int, ...]) -> str:
    """Layers as text, such as `0-3`, or `0-1, 4-5` where the numbers jump."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)) or "all"


def _encode(value: Any) -> Any:
    if isinstance(value, Spec):
        return str(value)
    if isinstance(value, EquationSpecs):
        return [_encode(value.operands), _encode(value.made), _encode(value.results), _encode(value.body)]
    if dataclasses.is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    return value


def _spec(text: str) -> Spec:
    spec = Spec.parse(text)
    if str(spec) != text:
        raise ValueError(f"`{text}` is not a sharding spec")
    return spec


def _specs(texts: list[str]) -> tuple[Spec, ...]:
    return tuple(map(_spec, texts))


def _decode_value(data: dict[str, Any]) -> PlacedValue:
    specs, shape, meshes = _specs(data["specs"]), tuple(data["shape"]), tuple(data["mesh_ids"])
    return PlacedValue(data["path"], shape, data["dtype"], meshes, specs)


def _decode_operator(data: dict[str, Any]) -> PlannedOperator:
    result, operands = _spec(data["result"]), _specs(data["operands"])
    return PlannedOperator(data["name"], data["part"], data["layer"], tuple(data["shape"]), result, operands)


def _decode_equation(data: list[Any]) -> EquationSpecs:
    operands, made, results, body = data
    return EquationSpecs(_specs(operands), _specs(made), _specs(results), tuple(map(_decode_equation, body)))


def _decode_transfer(data: dict[str, Any]) -> PlannedTransfer:
    return PlannedTransfer(PassName(*data["source"]), PassName(*data["target"]), data["n_bytes"])


def _decode_stage(data: dict[str, Any]) -> StagePlan:
    fields = dict(data)
    for name in ("layers", "logical_shape", "alpha", "beta", "forbidden", "kept_bytes"):
        fields[name] = tuple(data[name])
    fields["submesh"] = (data["submesh"][0], data["submesh"][1])
    fields["input_specs"] = _specs(data["input_specs"])
    fields["equation_specs"] = tuple(map(_decode_equation, data["equation_specs"]))
    fields["passes"] = tuple(PlannedPass(**one) for one in data["passes"])
    fields["operators"] = tuple(_decode_operator(op) for op in data["operators"])
    return StagePlan(**fields)


def _decode_plan(data: dict[str, Any]) -> Plan:
    collectives = tuple(PlannedCollective(**{**c, "axes": tuple(c["axes"])}) for c in data["collectives"])
    return Plan(
        data["fingerprint"],
        ClusterSpec.from_dict(data["cluster"]),
        data["n_micro_batches"],
        data["schedule"],
        tuple(data["layer_of_group"]),
        tuple(data["remat"]),
        tuple(_decode_stage(stage) for stage in data["stages"]),
        tuple(_decode_value(v) for v in data["inputs"]),
        tuple(_decode_value(v) for v in data["outputs"]),
        collectives,
        tuple(_decode_transfer(t) for t in data["transfers"]),
        PlanCost(**{**data["cost"], "peak_bytes": tuple(data["cost"]["peak_bytes"])}),
    )
