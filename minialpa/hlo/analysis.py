"""The collectives of a compiled program: HLO text in; kind, bytes, device groups and count of each out; their price.

    seconds = sum over collectives of times * price on the mesh
    times   = product of the trip counts of the loops around it

A loop whose trip count is not known counts as one trip; every branch of a conditional counts, once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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

HloKind = CollectiveKind | Literal["collective-permute"]
_KINDS: dict[str, HloKind] = {
    **{kind: kind for kind in get_args(CollectiveKind)},
    "collective-permute": "collective-permute",
}
_CALLS = ("to_apply", "calls", "branch_computations", "true_computation", "false_computation", "called_computations")
_MOVES = ("bitcast", "copy", "reshape", "transpose")


@dataclass(frozen=True, slots=True)
class HloCollective:
    """One collective of a program.

    n_bytes: as in `cost.Collective`; for a collective-permute, the buffer that each device sends. times: how often the
    program runs it. groups: devices that exchange data; for a collective-permute, the (source, target) pairs.
    n_elements: of the largest array that it moves; 1 for one of scalars only.
    """

    kind: HloKind
    n_bytes: float
    groups: Groups
    times: int
    n_elements: int


def collectives(text: str, *, scatter: bool = False) -> tuple[HloCollective, ...]:
    """The collectives of the program that XLA printed as `text`. Asynchronous ones count where they start.

    scatter: count an all-reduce of which every device only reads its own slice as the reduce-scatter that it is on
    accelerators; XLA's CPU compiler does not join the two.
    """
    module = parse_module(text)
    found: list[HloCollective] = []
    for name, times in _times(module).items():
        computation = module.computations[name]
        for instruction in computation.instructions:
            if (kind := _KINDS.get(instruction.opcode.removesuffix("-start"))) is not None:
                one = _collective(instruction, kind, times, module.n_devices)
                found.extend(_scattered(one, instruction, computation, module) if scatter else (one,))
    return tuple(found)


def bytes_by_kind(found: Iterable[HloCollective]) -> dict[HloKind, float]:
    """Bytes of all collectives of each kind, each as often as it runs."""
    total: defaultdict[HloKind, float] = defaultdict(float)
    for one in found:
        total[one.kind] += one.times * one.n_bytes
    return dict(total)


def mesh_axes(groups: Groups, mesh_shape: Sequence[int]) -> tuple[int, ...] | None:
    """The fewest axes of a row-major mesh that these groups run over, () for groups of one; None if there are none."""
    wanted = {frozenset(group) for group in groups}
    for n in range(len(mesh_shape) + 1):
        for axes in itertools.combinations(range(len(mesh_shape)), n):
            if wanted == _axis_groups(axes, mesh_shape):
                return axes
    return None


def _axis_groups(axes: tuple[int, ...], mesh_shape: Sequence[int]) -> set[frozenset[int]]:
    groups: dict[tuple[int, ...], set[int]] = {}
    for device, place in enumerate(itertools.product(*map(range, mesh_shape))):
        groups.setdefault(tuple(c for axis, c in enumerate(place) if axis not in axes), set()).add(device)
    return {frozenset(group) for group in groups.values()}


def seconds(found: Iterable[HloCollective], mesh: LogicalMesh) -> float:
    """Seconds of all collectives on `mesh`, whose device numbers are row-major. A mesh too small raises."""
    found = tuple(found)
    last = max((device for one in found for group in one.groups for device in group), default=0)
    if last >= mesh.n_devices:
        raise ShardingError(
            f"The program exchanges data with device {last} and the mesh {mesh.shape} has {mesh.n_devices} devices. "
            "Give the mesh that the program was compiled for."
        )
    return sum(one.times * _one_s(one, mesh) for one in found)


def _one_s(one: HloCollective, mesh: LogicalMesh) -> float:
    """The slowest group's time.

    A group that is a sub-grid (n_0 x n_1 devices of the mesh, so also any set of whole axes) has the mesh's price for
    a mesh of that shape. Any other group is a ring over the slowest link that it crosses, and so is every pair of a
    collective-permute, which sends its whole buffer over that link: alpha + beta * n_bytes.
    """
    if one.kind == "collective-permute":
        pairs = [_crossed(group, mesh) for group in one.groups if len(set(group)) > 1]
        return max((max(mesh.alpha[a] + mesh.beta[a] * one.n_bytes for a in axes) for axes in pairs), default=0.0)
    times = []
    for group in one.groups:
        grid = _sub_grid(group, mesh)
        axes = tuple(range(len(grid.shape)))
        times.append(Collective(one.kind, one.n_bytes, axes).seconds(grid))
    return max(times, default=0.0)


def _places(group: Sequence[int], mesh: LogicalMesh) -> list[tuple[int, ...]]:
    places = list(itertools.product(*map(range, mesh.shape)))
    return [places[device] for device in group]


def _crossed(group: Sequence[int], mesh: LogicalMesh) -> list[int]:
    """Axes along which devices of the group differ."""
    return [axis for axis, column in enumerate(zip(*_places(group, mesh), strict=True)) if len(set(column)) > 1]


def _sub_grid(group: Sequence[int], mesh: LogicalMesh) -> LogicalMesh:
    """The group as a mesh of its own: a grid with the links of `mesh`, or a ring with the slowest one it crosses."""
    places = _places(group, mesh)
    columns = [sorted(set(column)) for column in zip(*places, strict=True)]
    if set(places) == set(itertools.product(*columns)):
        return dataclasses.replace(mesh, shape=tuple(map(len, columns)))
    axes = _crossed(group, mesh)
    alpha, beta = max(mesh.alpha[a] for a in axes), max(mesh.beta[a] for a in axes)
    return LogicalMesh((len(group),), (alpha,), (beta,))


def flops(text: str) -> float:
    """Floating point operations of each device in the matrix products and convolutions of the program `text`.

    2 * elements of the result * terms of each sum. A term is an element of the contracted dimensions of a product, or
    of the kernel of a convolution for one output feature.
    """
    module = parse_module(text)
    total = 0.0
    for name, times in _times(module).items():
        shapes = {i.name: i.shape for i in module.computations[name].instructions}
        for instruction in module.computations[name].instructions:
            if instruction.opcode in ("dot", "convolution"):
                result = math.prod(array_dims(instruction.shape))
                total += 2 * times * result * _n_terms(instruction, shapes)
    return total


def _n_terms(instruction: Instruction, shapes: dict[str, str]) -> float:
    left, right = (array_dims(shapes[operand]) for operand in instruction.operands)
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        return math.prod(left[int(d)] for d in contracted[1].split(",") if d) if contracted else 1
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    assert labels is not None, instruction
    return math.prod(right) / right[labels[1].index("o")]


# ---- how often a computation runs ------------------------------------------------------------------------------------


def _times(module: Module) -> dict[str, int]:
    """How often each computation that runs does so."""
    times: Counter[str] = Counter()

    def visit(name: str, n: int) -> None:
        times[name] += n
        for instruction in module.computations[name].instructions:
            for callee, trips in _callees(instruction, module):
                visit(callee, n * trips)

    visit(module.entry, 1)
    return dict(times)


def _callees(instruction: Instruction, module: Module) -> Iterator[tuple[str, int]]:
    if instruction.opcode == "while":
        trips = _trip_count(instruction, module)
        for name in instruction.called("body", "condition"):
            yield name, trips
    # The computation of an asynchronous call is named again where it ends.
    elif instruction.opcode not in ("async-update", "async-done"):
        for name in instruction.called(*_CALLS):
            if name in module.computations:
                yield name, 1


def _trip_count(loop: Instruction, module: Module) -> int:
    """What XLA found out, or the bound of a condition `i < n`, where i starts at 0 and grows by 1; else 1."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    (condition,) = loop.called("condition")
    reached, pending = set[str](), [condition]
    while pending:
        name = pending.pop()
        reached.add(name)
        called = (c for i in module.computations[name].instructions for c, _ in _callees(i, module))
        pending.extend(c for c in called if c not in reached)
    inside = [i for name in reached for i in module.computations[name].instructions]
    bounds = [int(i.operands[0]) for i in inside if i.opcode == "constant" and re.fullmatch(r"\d+", i.operands[0])]
    compares = [direction[1] for i in inside if (direction := re.search(r"direction=(\w\w)", i.attributes))]
    if len(bounds) == 1 and compares in (["LT"], ["GT"], ["LE"], ["GE"]):
        return bounds[0] + (compares[0] in ("LE", "GE"))
    return 1


# ---- one collective --------------------------------------------------------------------------------------------------


def _collective(instruction: Instruction, kind: HloKind, times: int, n_devices: int) -> HloCollective:
    groups = parse_groups(instruction.attributes, n_devices)
    shape = instruction.shape
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        shape = split_tuple(shape)[1]  # (operands, results, contexts...)
    sizes = list(array_sizes(shape))
    # Of a reduce-scatter the text shows the shards.
    factor = len(groups[0]) if kind == "reduce-scatter" else 1
    n_bytes = factor * sum(n_bytes for _, n_bytes in sizes)
    return HloCollective(kind, n_bytes, groups, times, factor * max((n for n, _ in sizes), default=0))


def _scattered(
    one: HloCollective, instruction: Instruction, computation: Computation, module: Module
) -> Iterator[HloCollective]:
    """An all-reduce as what its parts are: a reduce-scatter where each device reads a slice only, else an all-reduce.

    The slices have to be as small as the group is large; which device reads which one is not looked at.
    """
    if one.kind != "all-reduce" or (size := len(one.groups[0])) == 1:
        yield one
        return
    name = instruction.name
    if instruction.opcode.endswith("-start"):
        name = next(i.name for i in computation.instructions if i.operands == (name,))
    parts: dict[HloKind, list[tuple[int, float]]] = {"all-reduce": [], "reduce-scatter": []}
    for k, (n, n_bytes) in enumerate(array_sizes(instruction.shape)):
        is_tuple = instruction.shape.startswith("(")
        names = [name]
        if is_tuple:
            users = [i for i in computation.instructions if name in i.operands]
            names = [i.name for i in users if i.opcode == "get-tuple-element" and f" index={k}" in f" {i.attributes},"]
        sliced = bool(names) and all(_only_sliced(part, n // size, computation, module) for part in names)
        parts["reduce-scatter" if sliced else "all-reduce"].append((n, n_bytes))
    for kind, sizes in parts.items():
        if sizes:
            yield dataclasses.replace(one, kind=kind, n_bytes=sum(b for _, b in sizes), n_elements=max(sizes)[0])


def _only_sliced(name: str, n_elements: int, computation: Computation, module: Module) -> bool:
    """Whether `name` is read, and only by dynamic slices of `n_elements`, in fusions too."""
    users = [i for i in computation.instructions if name in i.operands]
    return bool(users) and all(_slices(user, name, n_elements, computation, module) for user in users)


def _slices(user: Instruction, name: str, n_elements: int, computation: Computation, module: Module) -> bool:
    if user.opcode == "dynamic-slice":
        return user.operands[0] == name and next(array_sizes(user.shape))[0] == n_elements
    if user.opcode in _MOVES:
        return _only_sliced(user.name, n_elements, computation, module)
    if user.opcode not in ("fusion", "call"):
        return False
    inner = module.computations[user.called("calls", "to_apply")[0]]
    numbers = [str(k) for k, operand in enumerate(user.operands) if operand == name]
    parameters = [i.name for i in inner.instructions if i.opcode == "parameter" and i.operands[0] in numbers]
    return all(_only_sliced(parameter, n_elements, inner, module) for parameter in parameters)
