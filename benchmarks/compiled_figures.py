"""Figures of compiled programs: HLO text in; collectives in the form that accelerators run, and operations, out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from minialpa.cost import CollectiveKind
from minialpa.hlo.analysis import HloCollective, collective_of, flops_of, runs
from minialpa.hlo.text import Computation, Groups, Instruction, Module, array_sizes, parse_module

_MOVES = ("bitcast", "copy", "reshape", "transpose")


def collectives(text: str) -> tuple[HloCollective, ...]:
    """The collectives of a program, in the form that accelerators run.

    An all-reduce counts as a reduce-scatter if every device reads only a slice of the result: XLA's CPU compiler does
    not fuse the all-reduce with the slices.
    """
    found: list[HloCollective] = []
    module = parse_module(text)
    for name, times in runs(module).items():
        computation = module.computations[name]
        for instruction in computation.instructions:
            one = collective_of(instruction, times, module.n_devices)
            if one is not None:
                found.extend(_scattered(one, instruction, computation, module))
    return tuple(found)


def mesh_axes(groups: Groups, mesh_shape: Sequence[int]) -> tuple[int, ...] | None:
    """The axes of a row-major mesh that these groups run over, as few as possible: () for groups of one device.

    None if no set of axes has these groups.
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


def flops(text: str) -> float:
    """Floating point operations of each device in the matrix products and convolutions of a program."""
    module = parse_module(text)
    total = 0.0
    for name, times in runs(module).items():
        shapes = {i.name: i.shape for i in module.computations[name].instructions}
        total += times * sum(flops_of(one, shapes) for one in module.computations[name].instructions)
    return total


def _scattered(
    one: HloCollective, instruction: Instruction, computation: Computation, module: Module
) -> Iterator[HloCollective]:
    """An all-reduce as two collectives: arrays of which each device reads only a slice become a reduce-scatter.

    A slice is 1/n of the array for groups of n devices. The match between devices and slices is not checked.
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
