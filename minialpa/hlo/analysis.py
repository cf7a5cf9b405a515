"""The collectives of a compiled program, read from its HLO text, and what they cost on a mesh.

    seconds = sum over collectives of times * price on the mesh       -> seconds, _one_s
    times   = product of the trip counts of the loops around it       -> _times

A loop whose trip count XLA does not know counts as one trip; every branch of a conditional counts once.
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
    Computation,
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
_CALLS = ("to_apply", "calls", "branch_computations", "true_computation", "false_computation", "called_computations")
_MOVES = ("bitcast", "copy", "reshape", "transpose")
_CUDNN_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv(\w+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class HloCollective:
    """One collective of a program.

    Attributes:
        kind: name of the operation.
        n_bytes: as in `cost.Collective`; for a collective-permute, bytes of the buffer that each device sends.
        groups: devices that exchange data with each other; for a collective-permute, the (source, target) pairs.
        times: how often the program runs it.
        n_elements: elements of the largest array that it moves; 1 if it moves scalars only.
    """

    kind: CollectiveKind
    n_bytes: float
    groups: Groups
    times: int
    n_elements: int


def collectives(text: str, *, scatter: bool = False) -> tuple[HloCollective, ...]:
    """The collectives of the program that XLA printed as `text`. Asynchronous ones count where they start.

    scatter: count an all-reduce as a reduce-scatter if every device reads only a slice of the result. Accelerators
    run it as one, but XLA's CPU compiler does not fuse the all-reduce with the slices.
    """
    module = parse_module(text)
    found: list[HloCollective] = []
    for name, times in _times(module).items():
        computation = module.computations[name]
        for instruction in computation.instructions:
            one = collective_of(instruction, times, module.n_devices)
            if one is None:
                continue
            found.extend(_scattered(one, instruction, computation, module) if scatter else (one,))
    return tuple(found)


def bytes_by_kind(found: Iterable[HloCollective]) -> dict[CollectiveKind, float]:
    """Total bytes of the collectives of each kind, each counted as often as it runs."""
    total: defaultdict[CollectiveKind, float] = defaultdict(float)
    for one in found:
        total[one.kind] += one.times * one.n_bytes
    return dict(total)


def mesh_axes(groups: Groups, mesh_shape: Sequence[int]) -> tuple[int, ...] | None:
    """The axes of a row-major mesh that these groups run over, as few as possible: () for groups of one device.

    None if the groups are not those of any set of axes.
    """
    wanted = {frozenset(group) for group in groups}
    for n_axes in range(len(mesh_shape) + 1):
        for axes in itertools.combinations(range(len(mesh_shape)), n_axes):
            if wanted == _axis_groups(axes, mesh_shape):
                return axes
    return None


def _axis_groups(axes: tuple[int, ...], mesh_shape: Sequence[int]) -> set[frozenset[int]]:
    groups: dict[tuple[int, ...], set[int]] = {}
    for device, place in enumerate(itertools.product(*map(range, mesh_shape))):
        place_of_group = tuple(coordinate for axis, coordinate in enumerate(place) if axis not in axes)
        groups.setdefault(place_of_group, set()).add(device)
    return {frozenset(group) for group in groups.values()}


def seconds(found: Iterable[HloCollective], mesh: LogicalMesh) -> float:
    """Seconds of all collectives on `mesh`, whose devices are numbered in row-major order.

    Raises ShardingError if the mesh has fewer devices than the program.
    """
    found = tuple(found)
    last = max((device for one in found for group in one.groups for device in group), default=0)
    if last >= mesh.n_devices:
        raise ShardingError(
            f"The program exchanges data with device {last} and the mesh {mesh.shape} has {mesh.n_devices} devices. "
            "Give the mesh that the program was compiled for."
        )
    return sum(one.times * _one_s(one, mesh) for one in found)


def _one_s(one: HloCollective, mesh: LogicalMesh) -> float:
    """The time of the slowest group.

    A group that is a sub-grid (n_0 x n_1 devices of the mesh, hence also any set of whole axes) costs what a mesh of
    that shape costs. Any other group is priced as a ring over the slowest link that it crosses. Each pair of a
    collective-permute sends its whole buffer over the slowest link that it crosses: alpha + beta * n_bytes.
    """
    if one.kind == "collective-permute":
        pairs = [_crossed(group, mesh) for group in one.groups if len(set(group)) > 1]
        return max((mesh.permute_s(one.n_bytes, axes) for axes in pairs), default=0.0)

    times = []
    for group in one.groups:
        grid = _sub_grid(group, mesh)
        axes = tuple(range(len(grid.shape)))
        times.append(Collective(one.kind, one.n_bytes, axes).seconds(grid))
    return max(times, default=0.0)


def _places(group: Sequence[int], mesh: LogicalMesh) -> list[tuple[int, ...]]:
    """Mesh coordinates of each device of the group."""
    places = list(itertools.product(*map(range, mesh.shape)))
    return [places[device] for device in group]


def _crossed(group: Sequence[int], mesh: LogicalMesh) -> list[int]:
    """Axes along which devices of the group differ."""
    return [axis for axis, column in enumerate(zip(*_places(group, mesh), strict=True)) if len(set(column)) > 1]


def _sub_grid(group: Sequence[int], mesh: LogicalMesh) -> LogicalMesh:
    """The group as a mesh of its own: a grid with the links of `mesh`, or a ring over the slowest link it crosses."""
    places = _places(group, mesh)
    columns = [sorted(set(column)) for column in zip(*places, strict=True)]
    if set(places) == set(itertools.product(*columns)):
        return dataclasses.replace(mesh, shape=tuple(map(len, columns)))
    axes = _crossed(group, mesh)
    alpha, beta = max(mesh.alpha[a] for a in axes), max(mesh.beta[a] for a in axes)
    return LogicalMesh((len(group),), (alpha,), (beta,))


def flops(text: str) -> float:
    """Floating point operations of each device in the matrix products and convolutions of the program `text`.

    flops = 2 * times * elements of the result * terms of each sum
    """
    module = parse_module(text)
    total = 0.0
    for name, times in _times(module).items():
        shapes = {i.name: i.shape for i in module.computations[name].instructions}
        total += times * sum(flops_of(one, shapes) for one in module.computations[name].instructions)
    return total


def flops_of(instruction: Instruction, shapes: Mapping[str, str]) -> float:
    """Floating point operations of a matrix product or convolution; 0 of all else. shapes: of its operands, by name."""
    if instruction.opcode == "custom-call":
        return _flops_of_call(instruction, shapes)
    if instruction.opcode not in ("dot", "convolution"):
        return 0.0
    return 2.0 * math.prod(array_dims(instruction.shape)) * _n_terms(instruction, shapes)


def _flops_of_call(instruction: Instruction, shapes: Mapping[str, str]) -> float:
    """The same of a convolution of cuDNN, each of which has the labels of the forward one."""
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
    """Products that are summed for one element of the result.

    For a matrix product, elements of the contracted dimensions; for a convolution, elements of the kernel for one
    output feature.
    """
    left, right = (array_dims(shapes[operand]) for operand in instruction.operands)
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        return math.prod(left[int(d)] for d in contracted[1].split(",") if d) if contracted else 1
    return _n_kernel_terms(instruction, right)


def _n_kernel_terms(instruction: Instruction, kernel: Sequence[int]) -> float:
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    assert labels is not None, instruction
    return math.prod(kernel) / kernel[labels[1].index("o")]


# ---- how often a computation runs ------------------------------------------------------------------------------------


def _times(module: Module) -> dict[str, int]:
    """How often each computation runs; those that never run are left out."""
    times: Counter[str] = Counter()

    def visit(name: str, n_runs: int) -> None:
        times[name] += n_runs
        for instruction in module.computations[name].instructions:
            for callee, n_trips in _callees(instruction, module):
                visit(callee, n_runs * n_trips)

    visit(module.entry, 1)
    return dict(times)


def _callees(instruction: Instruction, module: Module) -> Iterator[tuple[str, int]]:
    """The computations that an instruction runs, and how often."""
    if instruction.opcode == "while":
        for name in instruction.called("body", "condition"):
            yield name, instruction.n_trips
    # The computation of an asynchronous call is named again where it ends.
    elif instruction.opcode not in ("async-update", "async-done"):
        for name in instruction.called(*_CALLS):
            if name in module.computations:
                yield name, 1


# ---- one collective --------------------------------------------------------------------------------------------------


def collective_of(instruction: Instruction, times: int, n_devices: int) -> HloCollective | None:
    """The collective that an instruction is, or starts; None if it does neither.

    Args:
        instruction: of a program for `n_devices` devices.
        times: how often the program runs it.
        n_devices: partitions times replicas.
    """
    kind = _KINDS.get(instruction.opcode.removesuffix("-start"))
    if kind is None:
        return None
    groups = parse_groups(instruction.attributes, n_devices)
    shape = instruction.shape
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        shape = split_tuple(shape)[1]  # (operands, results, contexts...)
    sizes = list(array_sizes(shape))

    # The result of a reduce-scatter is a shard of what it reduces.
    factor = len(groups[0]) if kind == "reduce-scatter" else 1
    return HloCollective(
        kind=kind,
        n_bytes=factor * sum(n_bytes for _, n_bytes in sizes),
        groups=groups,
        times=times,
        n_elements=factor * max((n for n, _ in sizes), default=0),
    )


def _scattered(
    one: HloCollective, instruction: Instruction, computation: Computation, module: Module
) -> Iterator[HloCollective]:
    """An all-reduce with the arrays of which each device reads only a slice taken out, as a reduce-scatter.

    A slice is an n-th of the array for groups of n devices; which device reads which slice is not checked.
    """
    if one.kind != "all-reduce" or (group_size := len(one.groups[0])) == 1:
        yield one
        return

    parts: dict[CollectiveKind, list[tuple[int, float]]] = {"all-reduce": [], "reduce-scatter": []}
    for names, (n, n_bytes) in zip(_results(instruction, computation), array_sizes(instruction.shape), strict=True):
        is_sliced = bool(names) and all(_is_only_sliced(name, n // group_size, computation, module) for name in names)
        parts["reduce-scatter" if is_sliced else "all-reduce"].append((n, n_bytes))

    for kind, sizes in parts.items():
        if sizes:
            n_bytes = sum(part_bytes for _, part_bytes in sizes)
            yield dataclasses.replace(one, kind=kind, n_bytes=n_bytes, n_elements=max(sizes)[0])


def _results(instruction: Instruction, computation: Computation) -> Iterator[list[str]]:
    """For each array of a collective's result, the names by which other instructions read it."""
    name = instruction.name
    if instruction.opcode.endswith("-start"):
        name = next(i.name for i in computation.instructions if i.operands == (name,))
    if not instruction.shape.startswith("("):
        yield [name]
        return

    users = [i for i in computation.instructions if name in i.operands]
    elements = [(i.name, f" {i.attributes},") for i in users if i.opcode == "get-tuple-element"]
    for k, _ in enumerate(array_sizes(instruction.shape)):
        yield [element for element, attributes in elements if f" index={k}" in attributes]


def _is_only_sliced(name: str, n_elements: int, computation: Computation, module: Module) -> bool:
    """Whether something reads `name`, and only by dynamic slices of `n_elements`, also inside fusions."""
    users = [i for i in computation.instructions if name in i.operands]
    return bool(users) and all(_takes_slice(user, name, n_elements, computation, module) for user in users)


def _takes_slice(user: Instruction, name: str, n_elements: int, computation: Computation, module: Module) -> bool:
    """Whether `user` reads only a slice of `name`, or passes it on to instructions that do."""
    if user.opcode == "dynamic-slice":
        return user.operands[0] == name and next(array_sizes(user.shape))[0] == n_elements
    if user.opcode in _MOVES:
        return _is_only_sliced(user.name, n_elements, computation, module)
    if user.opcode not in ("fusion", "call"):
        return False

    inner = module.computations[user.called("calls", "to_apply")[0]]
    numbers = [str(k) for k, operand in enumerate(user.operands) if operand == name]
    parameters = [i.name for i in inner.instructions if i.opcode == "parameter" and i.operands[0] in numbers]
    return all(_is_only_sliced(parameter, n_elements, inner, module) for parameter in parameters)
