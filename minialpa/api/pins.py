"""`in_shardings` and `out_shardings` of a step go in; `Pins`, PartitionSpecs by path of argument or result, come out.

The planner takes them as `AutoShardingOption.fixed_specs`, over the axes of the user's mesh.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from minialpa.calls import Call
from minialpa.errors import ShardingError
from minialpa.intra.graph.constraints import constraint_of_path
from minialpa.ir.equations import shape_of
from minialpa.options import AutoShardingOption, PlanOptions
from minialpa.plan import PlacedValue, Plan, StagePlan
from minialpa.sharding import AXIS_NAMES, axes_in
from minialpa.support.private_jax import mesh_of_context
from minialpa.tracing.host_memory import memory_kind_of
from minialpa.tracing.trace import TracedStep

_SIDES = ("in_shardings", "out_shardings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Fixed shardings of leaves.

    Attributes:
        specs: option, path and spec of each pinned leaf.
        axes: name and length of each axis of the user's mesh; empty if the specs are over the axes of the plan.
    """

    specs: tuple[tuple[str, str, PartitionSpec], ...] = ()
    axes: tuple[tuple[str, int], ...] = ()

    def pinned(self, options: PlanOptions) -> PlanOptions:
        """The options with these shardings. Raises ShardingError if they name other axes."""
        return options.relaxed(self._fixed) if self.specs else options

    def _fixed(self, option: AutoShardingOption) -> AutoShardingOption:
        pairs = tuple((path, spec) for _, path, spec in self.specs)
        option = replace(option, fixed_specs=(*pairs, *option.fixed_pairs))
        if not self.axes:
            self._check_names(option.axis_names or AXIS_NAMES)
            return option
        sizes = dict(self.axes)
        names = option.axis_names or tuple(sizes)
        if not sizes.keys() >= set(names):
            raise ShardingError(
                f"`axis_names` is {names}, but the meshes of `in_shardings` and `out_shardings` have the axes "
                f"{', '.join(sizes)}. Use these names, or leave `axis_names` out."
            )
        return replace(option, axis_names=names, axis_lengths=tuple(sizes[name] for name in names))

    def _check_names(self, known: tuple[str, ...]) -> None:
        for side, path, spec in self.specs:
            for name in axes_in(spec):
                if name not in known:
                    raise ShardingError(
                        f"`{side}` pins `{path}` to {spec}, but no mesh is set, and the plan has the axes "
                        f"{', '.join(known)}. Pass a NamedSharding, or set a mesh with `jax.set_mesh`."
                    )

    def check(self, plan: Plan) -> None:
        """Raise ShardingError if `plan`, which may be made elsewhere, has another sharding for a leaf."""
        if not self.specs:
            return
        sides = dict(zip(_SIDES, ({v.path: v for v in plan.inputs}, {v.path: v for v in plan.outputs}), strict=True))
        for side, path, spec in self.specs:
            value = sides[side].get(path)
            if value is not None:
                self._check_value(side, value, spec, plan.stages)

    def _check_value(self, side: str, value: PlacedValue, spec: PartitionSpec, stages: Sequence[StagePlan]) -> None:
        for mesh, planned in zip(value.mesh_ids, value.specs, strict=True):
            shape, names = stages[mesh].logical_shape, stages[mesh].option.axis_names
            is_named = not self.axes or dict(self.axes).keys() >= set(names)
            alone = Pins(specs=((side, value.path, spec),), axes=self.axes)
            option = alone._fixed(AutoShardingOption(axis_names=names if is_named else ()))
            constraint = constraint_of_path(value.path, value.shape, option, shape)
            if constraint is None or not constraint.allows(planned) or not option.has_axes(shape):
                raise ShardingError(
                    f"`{side}` pins `{value.path}` to {spec}, but mesh {mesh} of the plan, of shape {shape}, has "
                    f"{planned.partition_spec(option.names_on(shape))}. Use None for this leaf, or a method that plans "
                    "shardings. A random key is never split, and an array that is returned twice has one sharding."
                )


NO_PINS = Pins()


def find_pins(call: Call, traced: TracedStep, in_shardings: Any, out_shardings: Any, *, finds_static: bool) -> Pins:
    """in_shardings, out_shardings: as `jax.jit` takes them, or "auto" without pins.
    finds_static: whether static arguments are found, so that `in_shardings` may have entries for them.

    Raises ShardingError for other values, and for shardings that do not fit their arrays.
    """
    found = [*_of_arguments(call, traced, in_shardings, finds_static), *_of_results(call, traced, out_shardings)]
    leaves = [_Pin(side, path, entry, shape) for side, path, entry, shape in found if entry is not None]
    mesh = mesh_of_context(call.mesh)
    axes: dict[str, int] = {}
    specs = []
    for leaf in leaves:
        spec, sizes = leaf.spec(mesh)
        if sizes and axes_in(spec):
            if axes and axes != sizes:
                raise ShardingError(
                    f"`in_shardings` and `out_shardings` are on several meshes: {axes}, and for `{leaf.path}` {sizes}. "
                    "Use one mesh."
                )
            axes = sizes
        specs.append((leaf.side, leaf.path, spec))
    _check_paths(specs)
    return Pins(specs=tuple(specs), axes=tuple(axes.items()))


@dataclass(frozen=True, slots=True)
class _Pin:
    side: str
    path: str
    entry: NamedSharding | PartitionSpec
    shape: tuple[int, ...]

    def spec(self, mesh: Any) -> tuple[PartitionSpec, dict[str, int]]:
        """The PartitionSpec, and the axes of its mesh. mesh: for bare specs."""
        entry = self.entry
        spec = entry.spec if isinstance(entry, NamedSharding) else entry
        found = entry.mesh if isinstance(entry, NamedSharding) else mesh
        sizes = {} if found is None else dict(found.shape)
        self._check(spec, sizes)
        return PartitionSpec(*spec), sizes

    def _check(self, spec: PartitionSpec, sizes: Mapping[str, int]) -> None:
        what = f"`{self.side}` pins `{self.path}`, an array of shape {self.shape}, to {spec}"
        kind = memory_kind_of(self.entry)
        if kind is not None:
            raise ShardingError(f"{what} in `{kind}`, but pins are for device memory. Remove the memory kind.")
        if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
            raise ShardingError(f"{what} with unreduced axes, which a whole array does not have. Remove them.")
        if len(spec) > len(self.shape):
            raise ShardingError(f"{what}, which has {len(spec)} entries. Give at most {len(self.shape)}.")
        if sizes and not sizes.keys() >= set(axes_in(spec)):
            raise ShardingError(f"{what}, but the mesh has the axes {', '.join(sizes)}. Use these.")
        for length, entry in zip(self.shape, spec, strict=False):
            n = math.prod(sizes.get(name, 1) for name in axes_in((entry,)))
            if length % n:
                raise ShardingError(
                    f"{what}, and splits a dimension over {n} devices, which do not divide {length}. Split another "
                    "dimension, or pad the array."
                )


def _of_arguments(
    call: Call, traced: TracedStep, shardings: Any, finds_static: bool
) -> Iterator[tuple[str, str, Any, tuple[int, ...]]]:
    """Option, path, entry and shape of each argument leaf, and each leaf of an updated module."""
    if isinstance(shardings, str) and shardings == "auto":
        return
    tree, names = call.tree
    children = [child for name, child in zip(names, tree.children(), strict=True) if isinstance(name, int)]
    prefix = tuple(shardings) if isinstance(shardings, list) else shardings  # as in jax
    numbers = [name for name in names if isinstance(name, int)]
    if finds_static and isinstance(prefix, tuple) and len(prefix) == call.n_args > len(numbers):
        prefix = tuple(prefix[number] for number in numbers)

    if isinstance(prefix, tuple) and len(prefix) == len(children):
        prefix = tuple(map(_by_filters, prefix, children))
    positional = jax.tree_util.treedef_tuple(children)
    entries = _broadcast("in_shardings", prefix, positional)
    shapes = [shape_of(var) for var in traced.flat.invars]
    # Arguments with keywords come after positional ones.
    yield from zip([_SIDES[0]] * len(entries), traced.in_paths, entries, shapes, strict=False)
    updated = _of_modules(call, numbers, children, entries)
    yield from zip([_SIDES[1]] * len(updated), traced.out_paths, updated, _result_shapes(traced), strict=False)


def _of_modules(call: Call, numbers: Sequence[int], trees: Sequence[PyTreeDef], entries: Sequence[Any]) -> list[Any]:
    """The entries of the modules among the arguments, whose new values come first in the results."""
    if call.graph is None:
        return []
    starts = [0, *itertools.accumulate(tree.num_leaves for tree in trees)]
    in_graph = [i for i, name in enumerate(numbers) if name in call.graph.names]
    return [entry for i in in_graph for entry in entries[starts[i] : starts[i + 1]]]


def _by_filters(entry: Any, tree: PyTreeDef) -> Any:
    """The shardings of a module's variables, if `entry` is a `StateSharding` of flax.nnx."""
    if type(entry).__name__ != "StateSharding":
        return entry
    nnx = sys.modules["flax.nnx"]
    values = nnx.to_flat_state(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return nnx.from_flat_state([(path, entry.map_prefix(path, variable)) for path, variable in values])


def _of_results(call: Call, traced: TracedStep, shardings: Any) -> Iterator[tuple[str, str, Any, tuple[int, ...]]]:
    if isinstance(shardings, str) and shardings == "auto":
        return
    tree = traced.out_tree if call.graph is None else traced.out_tree.children()[1]
    entries = _broadcast("out_shardings", shardings, tree)
    first = 0 if call.graph is None else traced.out_tree.children()[0].num_leaves
    shapes = _result_shapes(traced)[first:]
    # New values of Refs come last.
    yield from zip([_SIDES[1]] * len(entries), traced.out_paths[first:], entries, shapes, strict=False)


def _result_shapes(traced: TracedStep) -> list[tuple[int, ...]]:
    return [shape_of(atom) for atom in traced.flat.outvars]


def _check_paths(specs: Sequence[tuple[str, str, PartitionSpec]]) -> None:
    """Raise ShardingError if an argument and a result with one path have different specs."""
    known: dict[str, PartitionSpec] = {}
    for side, path, spec in specs:
        if "*" in path:
            raise ShardingError(f"`{side}` pins `{path}`, but `*` stands for any text in paths. Rename the key.")
        if known.setdefault(path, spec) != spec:
            name = path.partition("[")[0].partition(".")[0]
            raise ShardingError(
                f"`{path}` is an argument and a result, with different shardings. Rename the argument `{name}`."
            )


def _as_entry(side: str, entry: Any) -> Any:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return None
    if not isinstance(entry, NamedSharding | PartitionSpec):
        raise ShardingError(f"Pass NamedShardings, PartitionSpecs and None as leaves of `{side}`; got {entry!r}.")
    return entry


def _broadcast(side: str, prefix: Any, tree: PyTreeDef) -> list[Any]:
    """The entry of each leaf. Raises ShardingError if `prefix` is no prefix of `tree`."""
    entries: list[Any] = []

    def number_of(entry: Any) -> int:
        entries.append(_as_entry(side, entry))
        return len(entries) - 1

    numbers = jax.tree.map(number_of, prefix, is_leaf=lambda entry: entry is None)
    try:
        full = jax.tree.broadcast(numbers, jax.tree.unflatten(tree, range(tree.num_leaves)))
    except ValueError as error:
        whole = "arguments" if side == "in_shardings" else "results"
        raise ShardingError(
            f"`{side}` is no pytree prefix of the step's {whole}. Give it their structure, or one entry for all of "
            f"them. {error}"
        ) from None
    return [entries[number] for number in jax.tree.leaves(full)]
