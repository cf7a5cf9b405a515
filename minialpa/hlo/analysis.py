"""The HLO text of a compiled program in; out, its collectives, and their seconds on a mesh.

A collective runs as often as the product of the trip counts of the loops around it. A loop counts as one trip if XLA
does not know its trip count. Every branch of a conditional counts once, except one that balanced experts do not take.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from minialpa.cluster import LogicalMesh
from minialpa.cost import Collective, CollectiveKind
from minialpa.errors import ShardingError
from minialpa.hlo.text import (
    Groups,
    Instruction,
    Module,
    array_dims,
    array_sizes,
    parse_groups,
    parse_module,
    split_tuple,
)

_KINDS: dict[str, CollectiveKind] = {kind: kind for kind in get_args(CollectiveKind)}
_CALLS = ("to_apply", "calls", "called_computations")
_CUDNN_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv(\w+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class HloCollective:
    """One collective of a program.

    n_bytes: as in `cost.Collective`; for a collective-permute, bytes that each device sends.
    groups: devices that exchange data with each other; for a collective-permute, (source, target) pairs.
    n_elements: of the largest array that it moves.
    """

    kind: CollectiveKind
    n_bytes: float
    groups: Groups
    times: int
    n_elements: int


def collectives(text: str) -> tuple[HloCollective, ...]:
    """Asynchronous ones count where they start."""
    module = parse_module(text)
    found = (
        collective_of(instruction, times, module.n_devices)
        for name, times in runs(module).items()
        for instruction in module.computations[name].instructions
    )
    return tuple(one for one in found if one is not None)


def bytes_by_kind(found: Iterable[HloCollective]) -> dict[CollectiveKind, float]:
    """In all runs."""
    total: defaultdict[CollectiveKind, float] = defaultdict(float)
    for one in found:
        total[one.kind] += one.times * one.n_bytes
    return dict(total)


def seconds(found: Iterable[HloCollective], mesh: LogicalMesh) -> float:
    """Of all collectives on `mesh`, whose devices are numbered in row-major order.

    Raises ShardingError if the mesh has fewer devices than the program.
    """
    found = tuple(found)
    last = max((device for one in found for group in one.groups for device in group), default=0)
    if last >= mesh.n_devices:
        raise ShardingError(
            f"The program exchanges data with device {last}, but `mesh`, of shape {mesh.shape}, has the devices 0 to "
            f"{mesh.n_devices - 1}. Pass the mesh for which the program was compiled."
        )
    return sum(one.times * _collective_s(one, mesh) for one in found)


def _collective_s(one: HloCollective, mesh: LogicalMesh) -> float:
    """Of the slowest group.

    A sub-grid (n_0 x n_1 devices of the mesh, hence any set of whole axes) has the price of a mesh of that shape, any
    other group of a ring over the slowest link that it crosses. Each pair of a collective-permute sends its whole
    buffer over the slowest link that it crosses: alpha + beta * n_bytes.
    """
    if one.kind == "collective-permute":
        pairs = [_crossed_axes(_mesh_positions(group, mesh)) for group in one.groups if len(set(group)) > 1]
        return max((mesh.permute_s(one.n_bytes, axes) for axes in pairs), default=0.0)

    times = []
    for group in one.groups:
        grid = _sub_grid(group, mesh)
        axes = tuple(range(len(grid.shape)))
        times.append(Collective(one.kind, one.n_bytes, axes).seconds(grid))
    return max(times, default=0.0)


def _mesh_positions(group: Sequence[int], mesh: LogicalMesh) -> list[tuple[int, ...]]:
    places = list(itertools.product(*map(range, mesh.shape)))
    return [places[device] for device in group]


def _crossed_axes(places: Sequence[Sequence[int]]) -> list[int]:
    return [axis for axis, column in enumerate(zip(*places, strict=True)) if len(set(column)) > 1]


def _sub_grid(group: Sequence[int], mesh: LogicalMesh) -> LogicalMesh:
    """A grid with the links of `mesh`, or a ring over the slowest link."""
    places = _mesh_positions(group, mesh)
    columns = [sorted(set(column)) for column in zip(*places, strict=True)]
    if set(places) == set(itertools.product(*columns)):
        return dataclasses.replace(mesh, shape=tuple(map(len, columns)))
    axes = _crossed_axes(places)
    alpha, beta = max(mesh.alpha[a] for a in axes), max(mesh.beta[a] for a in axes)
    return LogicalMesh((len(group),), (alpha,), (beta,))


def flops_of(instruction: Instruction, shapes: Mapping[str, str]) -> float:
    """2 * elements of the result * terms of each sum, for a matrix product or convolution; otherwise 0.

    shapes: of its operands, by name.
    """
    if instruction.opcode == "custom-call":
        return _flops_of_call(instruction, shapes)
    if instruction.opcode not in ("dot", "convolution"):
        return 0.0
    return 2.0 * math.prod(array_dims(instruction.shape)) * _n_terms(instruction, shapes)


def _flops_of_call(instruction: Instruction, shapes: Mapping[str, str]) -> float:
    """`flops_of` a cuDNN convolution. Gradients have the labels of the forward convolution, too."""
    found = _CUDNN_CONVOLUTION.search(instruction.attributes)
    if found is None:
        return 0.0
    result = array_dims(split_tuple(instruction.shape)[0])
    first, second = (array_dims(shapes[name]) for name in instruction.operands[:2])
    image, kernel = {"BackwardInput": (first, second), "BackwardFilter": (second, result)}.get(
        found[1], (result, second)
    )
    return 2.0 * math.prod(image) * _n_kernel_terms(instruction, kernel)


def _n_terms(instruction: Instruction, shapes: Mapping[str, str]) -> float:
    left, right = (array_dims(shapes[operand]) for operand in instruction.operands)
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        return math.prod(left[int(d)] for d in contracted[1].split(",") if d) if contracted else 1
    return _n_kernel_terms(instruction, right)


def _n_kernel_terms(instruction: Instruction, kernel: Sequence[int]) -> float:
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    assert labels is not None, instruction
    return math.prod(kernel) / kernel[labels[1].index("o")]


# ---- run counts ------------------------------------------------------------------------------------------------------


def runs(module: Module) -> dict[str, int]:
    """By computation."""
    times: Counter[str] = Counter()

    def visit(name: str, n_runs: int) -> None:
        times[name] += n_runs
        for instruction in module.computations[name].instructions:
            for callee, n_trips in _callees(instruction, module):
                visit(callee, n_runs * n_trips)

    visit(module.entry, 1)
    return dict(times)


def _callees(instruction: Instruction, module: Module) -> Iterator[tuple[str, int]]:
    """(computation, runs)."""
    if instruction.opcode == "while":
        for name in instruction.called("body", "condition"):
            yield name, instruction.n_trips
    elif instruction.opcode == "conditional":
        for name in instruction.called("branch_computations", "true_computation", "false_computation"):
            yield name, 1
    # The end of an asynchronous call names the computation of the start.
    elif instruction.opcode not in ("async-update", "async-done"):
        for name in instruction.called(*_CALLS):
            if name in module.computations:
                yield name, 1


# ---- one collective --------------------------------------------------------------------------------------------------


def collective_of(instruction: Instruction, times: int, n_devices: int) -> HloCollective | None:
    """None if the instruction starts no collective. n_devices: partitions times replicas."""
    kind = _KINDS.get(instruction.opcode.removesuffix("-start"))
    if kind is None:
        return None
    groups = parse_groups(instruction.attributes, n_devices)
    shape = instruction.shape
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        shape = split_tuple(shape)[1]  # (operands, results, contexts...)
    sizes = list(array_sizes(shape))

    # The result of a reduce-scatter is a shard of its operand.
    factor = len(groups[0]) if kind == "reduce-scatter" else 1
    return HloCollective(
        kind=kind,
        n_bytes=factor * sum(n_bytes for _, n_bytes in sizes),
        groups=groups,
        times=times,
        n_elements=factor * max((n for n, _ in sizes), default=0),
    )
