"""A plan in, VerifyError out unless its fields fit together. `inter.staging.verify_fit` compares a plan with a step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import jax.numpy as jnp
from jax.dtypes import float0

from minialpa.errors import VerifyError
from minialpa.options import AutoShardingOption
from minialpa.plan.record import COMPILER_OPTIONS, PlacedValue, PlannedOperator, PlanRecord, StagePlan
from minialpa.sharding import EquationSpecs, Spec
from minialpa.tracing.arguments import argument_name

#: Larger than all real counts, seconds, bytes and rates.
_MOST_INTEGER, _MOST_FLOAT = 2**62, 1e30
_MOST_DEVICES = 10**6


def verify_plan(plan: PlanRecord) -> None:
    """Raise VerifyError, with the name of the field, unless

    - numbers, except in user options, are within [0, `_MOST_INTEGER`] or [0, `_MOST_FLOAT`];
    - there are a stage and a micro-batch, and no more micro-batches than rows in the longest argument;
    - alpha, beta and logical shape have one value for each mesh axis;
    - a stage's submesh is part of a host or whole hosts, has the devices of its logical shape, and shares no device;
    - each layer of a pipeline is in one stage and has a `remat`, and each stage has layers, ascending; without layers
      there is one stage;
    - specs use axes of their mesh with several devices, ascending, and cut dimensions into equal parts;
    - arguments and results have one spec for each of their meshes, and are no partial sums;
    - their blocks are disjoint rows, and stacks of layers have blocks of at least one row, in a pipeline only;
    - `batch` names inputs, one of them an array;
    - compiler options are in `COMPILER_OPTIONS`;
    - collectives run on axes of a stage, and the cost has the peak bytes of the stages;
    - passes and transfers name chunks, stages and loops that exist;
    - the fingerprint lists each primitive once.
    """
    # First, because numbers bound the loops of the other checks.
    _check_numbers(plan, "plan")
    _check_fingerprint(plan)
    require(plan.n_micro_batches >= 1, "n_micro_batches", plan.n_micro_batches, "at least 1")
    most = max((value.shape[0] for value in plan.inputs if value.shape), default=1)
    expected = f"at most {most}, the length of the longest argument"
    require(plan.n_micro_batches <= max(1, most), "n_micro_batches", plan.n_micro_batches, expected)
    require(len(plan.stages) >= 1, "stages", plan.stages, "at least one stage")
    cluster = plan.cluster
    for name, n in (("num_hosts", cluster.num_hosts), ("devices_per_host", cluster.devices_per_host)):
        require(cluster.n_devices <= _MOST_DEVICES, f"cluster.{name}", n, f"at most {_MOST_DEVICES} devices in all")

    # Next, because other fields refer to devices and layers.
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
    _check_batch(plan)
    _check_compiler_options(plan)
    _check_collectives(plan)
    _check_passes(plan)
    peaks = tuple(stage.peak_bytes for stage in plan.stages)
    expected = f"the peak bytes of the stages, {peaks}"
    require(plan.cost.peak_bytes == peaks, "cost.peak_bytes", plan.cost.peak_bytes, expected)


def require(holds: bool, where: str, found: Any, expected: str) -> None:
    """where: the field, whose value is `found`."""
    if not holds:
        text = str(found)
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise VerifyError(
            f"The plan cannot run, as `plan.{where}` is {shown}; expected {expected}. Make a new plan of the step."
        )


def _check_numbers(value: Any, where: str) -> None:
    """Sums and products of checked numbers are finite."""
    if isinstance(value, int | float):
        most = _MOST_FLOAT if isinstance(value, float) else _MOST_INTEGER
        require(0 <= value <= most, where.removeprefix("plan."), value, f"finite and not negative, at most {most:g}")
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            _check_numbers(item, f"{where}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, AutoShardingOption | Spec | EquationSpecs):
        for f in dataclasses.fields(value):
            _check_numbers(getattr(value, f.name), f"{where}.{f.name}")


def _check_fingerprint(plan: PlanRecord) -> None:
    names = [name for name, _ in plan.fingerprint.primitives]
    require(names == sorted(set(names)), "fingerprint.primitives", names, "each name once, in order")
    n = plan.fingerprint.n_prefixes
    prefixes = plan.fingerprint.prefixes
    require(len(prefixes) == n, "fingerprint.prefixes", prefixes, f"{n} for {plan.fingerprint.n_equations} equations")


def _check_devices(plan: PlanRecord, stage: StagePlan, where: str) -> None:
    shape = stage.logical_shape
    require(len(shape) in (1, 2, 3) and min(shape) >= 1, f"{where}.logical_shape", shape, "1 to 3 positive lengths")
    for name, values in (("alpha", stage.alpha), ("beta", stage.beta), ("spread", stage.spread or stage.beta)):
        require(len(values) == len(shape), f"{where}.{name}", values, f"one value for each axis of {shape}")

    hosts, per_host = stage.submesh
    cluster = plan.cluster
    is_whole = hosts == 1 or per_host == cluster.devices_per_host
    fits = 1 <= hosts <= cluster.num_hosts and 1 <= per_host <= cluster.devices_per_host and is_whole
    require(
        fits, f"{where}.submesh", stage.submesh,
        f"part of a host or whole hosts of {cluster.num_hosts} x {cluster.devices_per_host} devices",
    )  # fmt: skip
    n_devices = stage.n_devices
    require(math.prod(shape) == n_devices, f"{where}.logical_shape", shape, f"the {n_devices} devices of the submesh")
    last = cluster.n_devices - n_devices
    require(stage.first_device <= last, f"{where}.first_device", stage.first_device, f"at most {last}")

    axis = stage.option.force_batch_dim_to_mesh_dim
    require(
        axis is None or 0 <= axis < len(shape),
        f"{where}.option.force_batch_dim_to_mesh_dim",
        axis,
        f"an axis of {shape}",
    )


def _check_compiler_options(plan: PlanRecord) -> None:
    expected = f"one of {', '.join(sorted(COMPILER_OPTIONS))}"
    for name, _ in plan.compiler_options:
        require(name in COMPILER_OPTIONS, "compiler_options", name, expected)


def _check_batch(plan: PlanRecord) -> None:
    known = {argument_name(value.path) for value in plan.inputs}
    require(known.issuperset(plan.batch), "batch", plan.batch, "names of arguments, as in `inputs`")
    require(not plan.batch or plan.n_examples is not None, "batch", plan.batch, "an argument that has an array")


def _check_overlap(plan: PlanRecord) -> None:
    in_order = sorted(range(len(plan.stages)), key=lambda k: plan.stages[k].first_device)
    for a, b in itertools.pairwise(in_order):
        end, start = plan.stages[a].first_device + plan.stages[a].n_devices, plan.stages[b].first_device
        require(end <= start, f"stages[{b}].first_device", start, f"{end} or more, after the devices of stage {a}")


def _check_layers(plan: PlanRecord) -> None:
    # A function that follows a pipeline may read early stages only.
    n_layers, n_used = len(plan.remat), max(plan.layer_of_group, default=-1) + 1
    is_enough = n_layers >= n_used if n_used else n_layers == 0
    require(is_enough, "remat", plan.remat, f"one entry for each of {n_used} layers")
    if not plan.layer_of_group:
        require(len(plan.stages) == 1, "layer_of_group", (), "the layer of each group, in a plan with several stages")

    # Only a pipeline cuts scans into blocks of rows.
    positive = all(sizes and min(sizes) >= 1 for sizes in plan.row_blocks)
    require(positive, "row_blocks", plan.row_blocks, "blocks of at least one row")
    needed = bool(plan.layer_of_group) or not plan.row_blocks
    require(needed, "row_blocks", plan.row_blocks, "none, in a plan without a pipeline")

    layers = [layer for stage in plan.stages for layer in stage.layers]
    listed = [list(stage.layers) for stage in plan.stages]
    require(sorted(layers) == list(range(n_layers)), "stages[*].layers", listed, f"each of {n_layers} layers once")
    for k, stage in enumerate(plan.stages):
        require(list(stage.layers) == sorted(stage.layers), f"stages[{k}].layers", stage.layers, "ascending layers")
        require(bool(stage.layers) or n_layers == 0, f"stages[{k}].layers", stage.layers, "a layer at least")


def _check_spec(spec: Spec, stage: StagePlan, where: str) -> None:
    shape = stage.logical_shape
    for axis in (*spec.axes, *spec.partial):
        is_live = axis < len(shape) and shape[axis] > 1
        require(is_live, where, spec, f"axes of a mesh of shape {shape} that have several devices")
    for axes in (*spec.dims, spec.partial):
        require(list(axes) == sorted(axes), where, spec, "the axes of a dimension in ascending order")


def _check_shaped(spec: Spec, shape: tuple[int, ...], stage: StagePlan, where: str) -> None:
    _check_spec(spec, stage, where)
    require(len(spec.dims) == len(shape), where, spec, f"{len(shape)} dimensions, for an array of shape {shape}")
    fits = spec.fits(shape, stage.logical_shape)
    require(fits, where, spec, f"equal parts of shape {shape} on a mesh of shape {stage.logical_shape}")


def _check_stage_specs(stage: StagePlan, where: str) -> None:
    for i, spec in enumerate(stage.input_specs):
        _check_spec(spec, stage, f"{where}.input_specs[{i}]")
    for i, spec in _specs_of_equations(stage.equation_specs):
        _check_spec(spec, stage, f"{where}.equation_specs[{i}]")


def _specs_of_equations(equations: Iterable[EquationSpecs]) -> Iterable[tuple[int, Spec]]:
    """(number of the equation, spec); a spec in the body of a loop has the number of the loop."""
    for i, chosen in enumerate(equations):
        for spec in (*chosen.operands, *chosen.made, *chosen.results):
            yield i, spec
        for _, spec in _specs_of_equations(chosen.body):
            yield i, spec


def _check_operator(op: PlannedOperator, stage: StagePlan, n_layers: int, where: str) -> None:
    require(op.layer is None or op.layer < n_layers, f"{where}.layer", op.layer, f"below {n_layers}")
    _check_shaped(op.result, op.shape, stage, f"{where}.result")
    for i, spec in enumerate(op.operands):
        _check_spec(spec, stage, f"{where}.operands[{i}]")


def _is_dtype(name: str) -> bool:
    with suppress(TypeError):
        return bool(jnp.dtype(name).name == name)
    return name == str(float0)


def _check_placed(value: PlacedValue, stages: tuple[StagePlan, ...], where: str) -> None:
    meshes, specs = value.mesh_ids, value.specs
    require(value.dtype.startswith("key<") or _is_dtype(value.dtype), f"{where}.dtype", value.dtype, "a dtype of jax")
    rows = value.rows or ((0, 0),) * len(meshes)  # (0, 0) stands for all rows
    require(len(rows) == len(meshes), f"{where}.rows", rows, f"rows for each mesh of {meshes}, or none")
    places = set(zip(meshes, rows, strict=True))
    require(len(places) == len(meshes), f"{where}.mesh_ids", meshes, "each mesh once, or once for each block of rows")

    for start, stop in value.rows:
        inside = bool(value.shape) and 0 <= start < stop <= value.shape[0]
        require(inside, f"{where}.rows", value.rows, f"rows of an array of shape {value.shape}")
    blocks = sorted(set(value.rows))
    apart = all(one[1] <= following[0] for one, following in itertools.pairwise(blocks))
    require(apart, f"{where}.rows", value.rows, "blocks that do not overlap")

    require(all(m < len(stages) for m in meshes), f"{where}.mesh_ids", meshes, f"below {len(stages)}")
    require(len(specs) == len(meshes), f"{where}.specs", list(map(str, specs)), f"one for each mesh of {meshes}")
    for i, (mesh, spec) in enumerate(zip(meshes, specs, strict=True)):
        require(not spec.partial, f"{where}.specs[{i}]", spec, "no partial sum")
        shape = (value.rows[i][1] - value.rows[i][0], *value.shape[1:]) if value.rows else value.shape
        _check_shaped(spec, shape, stages[mesh], f"{where}.specs[{i}]")


def _check_collectives(plan: PlanRecord) -> None:
    for i, c in enumerate(plan.collectives):
        where = f"collectives[{i}]"
        require(c.stage < len(plan.stages), f"{where}.stage", c.stage, f"below {len(plan.stages)}")
        shape = plan.stages[c.stage].logical_shape
        holds = len(set(c.axes)) == len(c.axes) > 0 and all(axis < len(shape) for axis in c.axes)
        require(holds, f"{where}.axes", c.axes, f"axes of a mesh of shape {shape}, each once")
        require(c.times_per_step >= 1, f"{where}.times_per_step", c.times_per_step, "at least 1")


def _check_passes(plan: PlanRecord) -> None:
    runs = [max(1, len(set(stage.layers) - {layer + 1 for layer in stage.layers})) for stage in plan.stages]
    for k, stage in enumerate(plan.stages):
        where = f"stages[{k}]"
        between = f"{plan.n_loops - 1} numbers, as for the other stages"
        require(len(stage.between_s) == plan.n_loops - 1, f"{where}.between_s", stage.between_s, between)
        are_known = len(stage.kept_bytes) in (runs[k], 3 * runs[k])
        require(are_known, f"{where}.kept_bytes", stage.kept_bytes, f"one or three for {runs[k]} chunks")
        for i, one in enumerate(stage.passes):
            require(one.chunk < sum(runs), f"{where}.passes[{i}].chunk", one.chunk, f"below {sum(runs)}")
            _check_loop(plan, one.loop, f"{where}.passes[{i}].loop")

    for i, transfer in enumerate(plan.transfers):
        for name, end in (("source", transfer.source), ("target", transfer.target)):
            limit = len(plan.stages) if end.kind == "update" else sum(runs)
            require(end.number < limit, f"transfers[{i}].{name}", end, f"a number below {limit}")
            _check_loop(plan, end.loop, f"transfers[{i}].{name}")


def _check_loop(plan: PlanRecord, loop: int, where: str) -> None:
    require(1 <= loop <= plan.n_loops, where, loop, f"one of the loops 1 to {plan.n_loops}")
