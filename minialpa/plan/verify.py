"""The verifier of plans, for the border between who makes a plan and who runs it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

from minialpa.errors import VerifyError
from minialpa.options import AutoShardingOption
from minialpa.plan.plan import PlacedValue, Plan, PlannedOperator, StagePlan
from minialpa.sharding import EquationSpecs, Spec


def verify_plan(plan: Plan) -> None:
    """Raise VerifyError, with the name of the field, unless

    - seconds, bytes, rates, links, sizes and numbers of things are finite and not negative;
    - there is a stage and a micro-batch, and a stage's alpha, beta and logical shape have one value for each mesh axis;
    - the logical shape of a stage has as many devices as its submesh, the submesh is part of a host or whole hosts,
      and stages have devices of the cluster, each its own;
    - with a pipeline, the stages have every layer once, and each layer has a `remat`; without, there is one stage;
    - specs use the axes of their mesh, each dimension of an array has one, and its parts are equal;
    - arguments and results have one spec for each of their meshes, and are no partial sums;
    - where they live in blocks, the rows of blocks are theirs and do not overlap, and stacks of layers are cut into
      blocks of one row at least, in a pipeline only;
    - collectives run on axes of a stage, and the peak bytes of the cost are those of the stages;
    - the fingerprint counts each primitive once.
    """
    _check_numbers(plan, "plan")
    _check_fingerprint(plan)
    _require(plan.n_micro_batches >= 1, "n_micro_batches", plan.n_micro_batches, "at least 1")
    _require(len(plan.stages) >= 1, "stages", plan.stages, "at least one stage")
    for k, stage in enumerate(plan.stages):
        _check_devices(plan, stage, f"stages[{k}]")
    _check_overlap(plan)
    _check_layers(plan)
    for k, stage in enumerate(plan.stages):
        _check_stage_specs(stage, f"stages[{k}]")
        for i, op in enumerate(stage.operators):
            _check_operator(op, stage, len(plan.remat) or 1, f"stages[{k}].operators[{i}]")
    for name, values in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        for i, value in enumerate(values):
            _check_placed(value, plan.stages, f"{name}[{i}]")
    _check_collectives(plan)
    _check_passes(plan)
    peaks = tuple(stage.peak_bytes for stage in plan.stages)
    _require(plan.cost.peak_bytes == peaks, "cost.peak_bytes", plan.cost.peak_bytes, f"those of the stages, {peaks}")


def _require(holds: bool, where: str, found: Any, expected: str) -> None:
    if not holds:
        text = str(found)
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise VerifyError(f"Not a plan that can run: `plan.{where}` is {shown}; expected {expected}. Plan again.")


def _check_numbers(value: Any, where: str) -> None:
    """Every number but those of options, which are the user's."""
    if isinstance(value, int | float):
        holds = not isinstance(value, float) or math.isfinite(value)
        _require(holds and value >= 0, where.removeprefix("plan."), value, "finite and not negative")
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            _check_numbers(item, f"{where}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, AutoShardingOption | Spec | EquationSpecs):
        for f in dataclasses.fields(value):
            _check_numbers(getattr(value, f.name), f"{where}.{f.name}")


def _check_fingerprint(plan: Plan) -> None:
    names = [name for name, _ in plan.fingerprint.primitives]
    _require(names == sorted(set(names)), "fingerprint.primitives", names, "each name once, in order")
    n = plan.fingerprint.n_prefixes
    prefixes = plan.fingerprint.prefixes
    _require(len(prefixes) == n, "fingerprint.prefixes", prefixes, f"{n} for {plan.fingerprint.n_equations} equations")


def _check_devices(plan: Plan, stage: StagePlan, where: str) -> None:
    shape = stage.logical_shape
    _require(len(shape) in (1, 2) and min(shape) >= 1, f"{where}.logical_shape", shape, "1 or 2 positive lengths")
    for name, values in (("alpha", stage.alpha), ("beta", stage.beta)):
        _require(len(values) == len(shape), f"{where}.{name}", values, f"one value for each axis of {shape}")
    hosts, per_host = stage.submesh
    cluster = plan.cluster
    is_whole = hosts == 1 or per_host == cluster.devices_per_host
    fits = 1 <= hosts <= cluster.num_hosts and 1 <= per_host <= cluster.devices_per_host and is_whole
    _require(
        fits, f"{where}.submesh", stage.submesh,
        f"part of a host or whole hosts of {cluster.num_hosts} x {cluster.devices_per_host} devices",
    )  # fmt: skip
    n = stage.n_devices
    _require(math.prod(shape) == n, f"{where}.logical_shape", shape, f"the {n} devices of the submesh")
    last = cluster.n_devices - n
    _require(stage.first_device <= last, f"{where}.first_device", stage.first_device, f"at most {last}")
    axis = stage.option.force_batch_dim_to_mesh_dim
    _require(
        axis is None or 0 <= axis < len(shape),
        f"{where}.option.force_batch_dim_to_mesh_dim",
        axis,
        f"an axis of {shape}",
    )


def _check_overlap(plan: Plan) -> None:
    in_order = sorted(range(len(plan.stages)), key=lambda k: plan.stages[k].first_device)
    for a, b in itertools.pairwise(in_order):
        end, start = plan.stages[a].first_device + plan.stages[a].n_devices, plan.stages[b].first_device
        _require(end <= start, f"stages[{b}].first_device", start, f"{end} or more, behind those of stage {a}")


def _check_layers(plan: Plan) -> None:
    n_layers = max(plan.layer_of_group, default=-1) + 1
    _require(len(plan.remat) == n_layers, "remat", plan.remat, f"one entry for each of {n_layers} layers")
    if not plan.layer_of_group:
        _require(len(plan.stages) == 1, "layer_of_group", (), "the layer of each group, in a plan with several stages")
    positive = all(sizes and min(sizes) >= 1 for sizes in plan.row_blocks)
    _require(positive, "row_blocks", plan.row_blocks, "blocks of at least one row")
    needed = bool(plan.layer_of_group) or not plan.row_blocks
    _require(needed, "row_blocks", plan.row_blocks, "none, in a plan without a pipeline")
    layers = [layer for stage in plan.stages for layer in stage.layers]
    listed = [list(stage.layers) for stage in plan.stages]
    _require(sorted(layers) == list(range(n_layers)), "stages[*].layers", listed, f"each of {n_layers} layers once")


def _check_spec(spec: Spec, stage: StagePlan, where: str) -> None:
    for axis in (*spec.axes, *spec.partial):
        _require(axis < len(stage.logical_shape), where, spec, f"axes of a mesh of shape {stage.logical_shape}")


def _check_shaped(spec: Spec, shape: tuple[int, ...], stage: StagePlan, where: str) -> None:
    _check_spec(spec, stage, where)
    _require(len(spec.dims) == len(shape), where, spec, f"{len(shape)} dimensions, for an array of shape {shape}")
    fits = spec.fits(shape, stage.logical_shape)
    _require(fits, where, spec, f"equal parts of shape {shape} on a mesh of shape {stage.logical_shape}")


def _check_stage_specs(stage: StagePlan, where: str) -> None:
    for i, spec in enumerate(stage.input_specs):
        _check_spec(spec, stage, f"{where}.input_specs[{i}]")
    for i, spec in _specs_of_equations(stage.equation_specs):
        _check_spec(spec, stage, f"{where}.equation_specs[{i}]")


def _specs_of_equations(equations: Iterable[EquationSpecs]) -> Iterable[tuple[int, Spec]]:
    """Each spec, with the number of its equation; that of the loop for those of its body."""
    for i, chosen in enumerate(equations):
        for spec in (*chosen.operands, *chosen.made, *chosen.results):
            yield i, spec
        for _, spec in _specs_of_equations(chosen.body):
            yield i, spec


def _check_operator(op: PlannedOperator, stage: StagePlan, n_layers: int, where: str) -> None:
    _require(op.layer is None or op.layer < n_layers, f"{where}.layer", op.layer, f"below {n_layers}")
    _check_shaped(op.result, op.shape, stage, f"{where}.result")
    for i, spec in enumerate(op.operands):
        _check_spec(spec, stage, f"{where}.operands[{i}]")


def _check_placed(value: PlacedValue, stages: tuple[StagePlan, ...], where: str) -> None:
    meshes, specs = value.mesh_ids, value.specs
    rows = value.rows or ((0, 0),) * len(meshes)
    _require(len(rows) == len(meshes), f"{where}.rows", rows, f"rows for each mesh of {meshes}, or none")
    places = set(zip(meshes, rows, strict=True))
    _require(len(places) == len(meshes), f"{where}.mesh_ids", meshes, "each mesh once, or once for each block of rows")
    for a, b in value.rows:
        inside = bool(value.shape) and 0 <= a < b <= value.shape[0]
        _require(inside, f"{where}.rows", value.rows, f"rows of an array of shape {value.shape}")
    ends = sorted(set(value.rows))
    apart = all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    _require(apart, f"{where}.rows", value.rows, "blocks that do not overlap")
    _require(all(m < len(stages) for m in meshes), f"{where}.mesh_ids", meshes, f"below {len(stages)}")
    _require(len(specs) == len(meshes), f"{where}.specs", list(map(str, specs)), f"one for each mesh of {meshes}")
    for i, (mesh, spec) in enumerate(zip(meshes, specs, strict=True)):
        _require(not spec.partial, f"{where}.specs[{i}]", spec, "no partial sum")
        shape = (value.rows[i][1] - value.rows[i][0], *value.shape[1:]) if value.rows else value.shape
        _check_shaped(spec, shape, stages[mesh], f"{where}.specs[{i}]")


def _check_collectives(plan: Plan) -> None:
    for i, c in enumerate(plan.collectives):
        where = f"collectives[{i}]"
        _require(c.stage < len(plan.stages), f"{where}.stage", c.stage, f"below {len(plan.stages)}")
        shape = plan.stages[c.stage].logical_shape
        holds = len(set(c.axes)) == len(c.axes) > 0 and all(axis < len(shape) for axis in c.axes)
        _require(holds, f"{where}.axes", c.axes, f"axes of a mesh of shape {shape}, each once")
        _require(c.times_per_step >= 1, f"{where}.times_per_step", c.times_per_step, "at least 1")


def _check_passes(plan: Plan) -> None:
    """Passes and what chunks keep; transfers between passes, or between updates."""
    runs = [max(1, len([i for i in stage.layers if i - 1 not in stage.layers])) for stage in plan.stages]
    for k, stage in enumerate(plan.stages):
        where = f"stages[{k}]"
        _require(len(stage.kept_bytes) == runs[k], f"{where}.kept_bytes", stage.kept_bytes, f"one for {runs[k]} chunks")
        for i, one in enumerate(stage.passes):
            _require(one.chunk < sum(runs), f"{where}.passes[{i}].chunk", one.chunk, f"below {sum(runs)}")
    for i, transfer in enumerate(plan.transfers):
        for name, end in (("source", transfer.source), ("target", transfer.target)):
            limit = len(plan.stages) if end.kind == "update" else sum(runs)
            _require(end.number < limit, f"transfers[{i}].{name}", end, f"a number below {limit}")
