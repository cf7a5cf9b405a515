"""Alpa's `ManualShardingOption`: PartitionSpecs over named axes go in, minialpa's options come out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from minialpa import ManualStageOption, UniformStageOption
from minialpa.errors import ShardingError

#: The planner chooses the shardings.
_UNSPECIFIED = PartitionSpec.UNCONSTRAINED


@dataclass
class ManualShardingOption:
    """Shardings by hand, as in `pjit`. The planner chooses all others.

    Attributes:
        mesh_axis_names: names of the axes of every stage's logical mesh.
        submesh_axis_names: instead, the names for each stage. A stage ignores axes that it lacks.
        in_axis_resources: a pytree prefix of the tuple of arguments, without static ones, of PartitionSpecs; None
            replicates. By default the planner chooses.
        out_axis_resources: the same for the results.
        pipeline_intermediate_axes: (axis, dimension) pairs. On meshes with the axis, it splits this dimension of all
            received values.
    """

    mesh_axis_names: Sequence[str] | None = None
    submesh_axis_names: Sequence[Sequence[str]] | None = None
    in_axis_resources: Any = _UNSPECIFIED
    out_axis_resources: Any = _UNSPECIFIED
    pipeline_intermediate_axes: Sequence[tuple[str, int]] | None = None

    @property
    def names(self) -> list[tuple[str, ...]]:
        """One entry if all stages have equal names."""
        given = self.submesh_axis_names or (self.mesh_axis_names and [self.mesh_axis_names])
        if not given:
            raise ShardingError(
                "`ManualShardingOption` needs names for the axes of its meshes. Give `mesh_axis_names`, or "
                "`submesh_axis_names` for each stage."
            )
        names = list(map(tuple, given))
        return names if len(set(names)) > 1 else names[:1]


def with_axes(options: Any, manual: ManualShardingOption) -> Any:
    """With names of axes. Raises ShardingError if stages with different names are not manual."""
    names, stages = manual.names, options.stages
    n_stages = len(stages.forward_stage_layer_ids) if isinstance(stages, ManualStageOption) else None
    if len(names) not in (1, n_stages):
        raise ShardingError(
            f"`submesh_axis_names` has different names for {len(names)} stages. Give these stages by "
            "`ManualStageOption`, or the same names to all stages."
        )

    # With Alpa's `enable_auto_sharding=False`, shardings without a PartitionSpec follow from the others.
    common = {"enable_auto_sharding": True, "received_axes": tuple(manual.pipeline_intermediate_axes or ())}
    options = options.relaxed(lambda option: replace(option, axis_names=names[0], **common))
    match stages:
        case ManualStageOption():
            given = stages.submesh_autosharding_option_dicts or [{}] * (n_stages or 0)
            if any(fields.get("fixed_specs") for fields in given):
                raise ShardingError("Leave out `fixed_specs` of a stage: `ManualShardingOption` takes their place.")
            dicts = [
                {**fields, **common, "axis_names": axis_name}
                for fields, axis_name in zip(given, itertools.cycle(names), strict=False)
            ]
            return replace(options, stages=replace(stages, submesh_autosharding_option_dicts=dicts))
        case UniformStageOption(submesh_physical_shape=(_, _) as shape, submesh_logical_shape=None):
            return replace(options, stages=replace(options.stages, submesh_logical_shape=shape))
    return options


def with_specs(options: Any, manual: ManualShardingOption, step: Any) -> Any:
    pairs = tuple(_pairs(manual, step))
    return options.relaxed(lambda option: replace(option, fixed_specs=(*pairs, *option.fixed_pairs)))


def _pairs(manual: ManualShardingOption, step: Any) -> Iterator[tuple[str, PartitionSpec]]:
    # Paths of captured Refs come last.
    if manual.in_axis_resources is not _UNSPECIFIED:
        yield from zip(step.in_paths, _broadcast("in", manual.in_axis_resources, step.in_tree), strict=False)
    if manual.out_axis_resources is not _UNSPECIFIED:
        yield from zip(step.out_paths, _broadcast("out", manual.out_axis_resources, step.out_tree), strict=False)


def _broadcast(side: str, prefix: Any, tree: PyTreeDef) -> list[PartitionSpec]:
    """The PartitionSpec of each leaf. Raises ShardingError if `prefix` is no prefix of `tree`."""

    def as_spec(entry: Any) -> PartitionSpec:
        if not isinstance(entry, PartitionSpec | None):
            raise ShardingError(f"Pass PartitionSpecs and None as leaves of `{side}_axis_resources`; got {entry!r}.")
        return PartitionSpec() if entry is None else entry

    # As in `pjit`, a list may stand for the tuple of arguments.
    given = tuple(prefix) if isinstance(prefix, list) and side == "in" else prefix
    specs = jax.tree.map(as_spec, given, is_leaf=lambda entry: entry is None)
    try:
        full = jax.tree.broadcast(specs, jax.tree.unflatten(tree, range(tree.num_leaves)))
    except ValueError as error:
        whole = "arguments" if side == "in" else "results"
        raise ShardingError(
            f"`{side}_axis_resources` is no pytree prefix of the step's {whole}. Give it their structure, or one "
            f"PartitionSpec for all of them. {error}"
        ) from None
    return jax.tree.leaves(full)
