"""Plans that everybody knows, as options: what a user may ask for by name, the planner has to find by itself.

In: the options of a stage and its logical mesh. Out: the same options, each with one such plan asked for.

    ZeRO-3       examples split over all devices; parameters and optimizer state split, too
    ZeRO-2       the same with whole parameters
    2-D          examples split over one axis of the mesh, layers over the other; with and without whole parameters
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from minialpa.cluster import LogicalMesh
from minialpa.options import AutoShardingOption


def standard_plans(option: AutoShardingOption, mesh: LogicalMesh) -> Iterator[AutoShardingOption]:
    """`option` with one plan after the other; nothing if it asks for some such plan itself."""
    splits = tuple(splits_of_examples(option, mesh))
    if not splits:
        return
    yield replace(option, force_zero_stage_3=True)
    if option.allow_replicated_parameters:
        yield replace(option, force_data_parallel=True, prefer_reduce_scatter=True)
    for split in splits:
        sharded = replace(split, prefer_reduce_scatter=True)
        yield replace(sharded, allow_replicated_parameters=False)
        if option.allow_replicated_parameters:
            yield sharded


def splits_of_examples(option: AutoShardingOption, mesh: LogicalMesh) -> Iterator[AutoShardingOption]:
    """`option` with the examples split over one mesh axis after the other; nothing if it says how they are split."""
    if not option.enable_auto_sharding or option.data_parallel or option.force_batch_dim_to_mesh_dim is not None:
        return
    for axis, n_devices in enumerate(mesh.shape):
        if n_devices > 1:
            yield replace(option, force_batch_dim_to_mesh_dim=axis)
