"""The modules of a plan as a tree: operators and arrays in, their floating point operations, bytes and seconds out.

Modules that differ in numbers alone and have equal contents are one node: `block_0-23`, 24 times.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from minialpa.plan import Plan
from minialpa.plan.record import PlannedOperator
from minialpa.report.figures import bytes_of_value, bytes_on_mesh, op_seconds, other_seconds
from minialpa.report.groups import common_root, equal_layers, without_root
from minialpa.report.rows import PARTS, operator_flops, operator_kind
from minialpa.report.words import operator_name, operator_words

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOperator:
    """An operator of a module. seconds: per step, on one device, of all equal modules."""

    name: str
    part: str
    split: str
    line: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode:
    """A module, or equal ones, with all that is inside. Numbers are of all of them together.

    n_bytes: whole weights and optimizer state.
    device_bytes: the same on each device of the stage that holds most.
    flops, share: of a step, of its compute.
    """

    name: str
    n: int
    n_bytes: float
    device_bytes: float
    flops: float
    share: float
    operators: tuple[TreeOperator, ...]
    children: tuple[ModuleNode, ...]


@dataclass(slots=True)
class _Branch:
    """A module while the tree grows. held: bytes on each device, by stage."""

    name: str
    n_bytes: float = 0.0
    held: Counter[int] = field(default_factory=Counter)
    operators: list[PlannedOperator] = field(default_factory=list)
    inside: dict[str, _Branch] = field(default_factory=dict)

    def at(self, path: Sequence[str]) -> _Branch:
        branch = self
        for name in path:
            branch = branch.inside.setdefault(name, _Branch(name))
        return branch

    def all(self) -> Iterator[_Branch]:
        yield self
        for one in self.inside.values():
            yield from one.all()

    def kind(self) -> tuple[object, ...]:
        """Equal for modules with equal contents."""
        inside = tuple((re.sub(r"\d+", "*", name), one.kind()) for name, one in self.inside.items())
        return inside, tuple(map(operator_kind, self.operators)), self.n_bytes


def module_tree(plan: Plan) -> ModuleNode:
    """The root has the name of the outermost module, if there is one."""
    ops = [op for stage in plan.stages for op in stage.operators]
    names = [op.module for op in ops]
    root = _Branch(common_root(names))
    for op, name in zip(ops, without_root(names), strict=True):
        root.at(_module_path(name)).operators.append(op)

    modules = {_words(path): path for path in {_module_path(name) for name in without_root(names)} if path}
    places = dict(_places(plan, _with_parents(modules)))
    for value in plan.inputs:
        place = places.get(value.path)
        if place is not None:
            branch = root.at(place)
            branch.n_bytes += bytes_of_value(value)
            for k in dict.fromkeys(value.mesh_ids):
                branch.held[k] += int(bytes_on_mesh(value, k, plan.stages[k].logical_shape))

    compute_s = other_seconds(plan) + sum(op_seconds(plan, op) for op in ops)
    return _node(plan, root.name, [root], compute_s or 1.0)


def _node(plan: Plan, name: str, equal: Sequence[_Branch], compute_s: float) -> ModuleNode:
    everything = [branch for one in equal for branch in one.all()]
    held: Counter[int] = Counter()
    for branch in everything:
        held.update(branch.held)
    ops = [op for branch in everything for op in branch.operators]
    inside = equal_layers(
        [child for one in equal for child in one.inside.values()], lambda one: one.name, lambda one: one.kind()
    )
    return ModuleNode(
        name=name,
        n=len(equal),
        n_bytes=sum(branch.n_bytes for branch in everything),
        device_bytes=max(held.values(), default=0.0),
        flops=sum(operator_flops(plan, op) for op in ops),
        share=sum(op_seconds(plan, op) for op in ops) / compute_s,
        operators=tuple(_tree_operators(plan, equal)),
        children=tuple(_node(plan, group.name, group.members, compute_s) for group in inside),
    )


def _tree_operators(plan: Plan, equal: Sequence[_Branch]) -> Iterator[TreeOperator]:
    for same in zip(*(one.operators for one in equal), strict=True):
        op = same[0]
        yield TreeOperator(
            name=operator_name(op.name),
            part=PARTS[op.part],
            split=operator_words(op),
            line=op.line,
            seconds=sum(op_seconds(plan, one) for one in same),
        )


# ---- arrays in modules -----------------------------------------------------------------------------------------------


def _module_path(name: str) -> _Path:
    """Without methods: `tokens.attend` is in `tokens`."""
    return tuple(part.partition(".")[0] for part in name.split("/") if part)


def _segments(path: str) -> _Path:
    """The names in the path of an argument: `state.params['a'][0]` has `state`, `params`, `a` and `0`."""
    return tuple(re.findall(r"[^\[\]'\".]+", path))


def _words(names: Sequence[str]) -> _Path:
    """`blocks_0` is equal to `blocks`, `0`."""
    return tuple(word for name in names for word in re.findall(r"[A-Za-z]+|\d+", name))


def _with_parents(modules: dict[_Path, _Path]) -> dict[_Path, _Path]:
    paths = {path[:i] for path in modules.values() for i in range(1, len(path) + 1)}
    return {_words(path): path for path in sorted(paths)}


def _places(plan: Plan, modules: dict[_Path, _Path]) -> Iterator[tuple[str, _Path]]:
    """Of each weight, and of optimizer state with the same last names as a weight."""
    roles = plan.roles or ("other",) * len(plan.inputs)
    weights = [_segments(value.path) for value, role in zip(plan.inputs, roles, strict=True) if role == "weights"]
    found = {path: _longest_module(path, modules) for path in weights}
    n_common = next((i for i, names in enumerate(zip(*weights, strict=False)) if len(set(names)) > 1), 0)
    prefixes = {path[: run[0]] for path, run in found.items() if run is not None}

    # Weights beside weights with a module are in modules without operators.
    place_of: dict[_Path, _Path] = {}
    for path, run in found.items():
        start = max((len(prefix) for prefix in prefixes if path[: len(prefix)] == prefix), default=n_common)
        inside = path[start:-1] if run is None else (*modules[_words(path[run[0] : run[1]])], *path[run[1] : -1])
        place_of.setdefault(path[start:], inside)

    for value, role in zip(plan.inputs, roles, strict=True):
        path = _segments(value.path)
        suffixes = (path[i:] for i in range(len(path)))
        place = next((place_of[suffix] for suffix in suffixes if suffix in place_of), None)
        if role in ("weights", "optimizer") and place is not None:
            yield value.path, place


def _longest_module(path: _Path, modules: dict[_Path, _Path]) -> tuple[int, int] | None:
    """Start and end of the longest run of names that is a module."""
    runs = [(i, j) for i in range(len(path)) for j in range(i + 1, len(path)) if _words(path[i:j]) in modules]
    return max(runs, key=lambda run: (run[1] - run[0], -run[0]), default=None)
