"""What is said about a step and its options before any planning: warnings, and refusals with what to change."""

from __future__ import annotations

import warnings

from minialpa.errors import ShardingError
from minialpa.inter.context import PlanningContext
from minialpa.intra.graph.constraints import matches
from minialpa.options import AutoStageOption, ManualLayerOption
from minialpa.rules.known_rules import primitives_without_rule

#: Paths of arguments and results that a message lists at most.
_MOST_PATHS = 8


def warn_of_missing_rules(context: PlanningContext) -> None:
    """Name the operations that no device can share with another one."""
    names = primitives_without_rule(context.traced.flat.eqns)
    if names:
        listed = ", ".join(f"`{name}`" for name in names)
        warnings.warn(
            f"No sharding rule for {listed}: every device computes all of {'it' if len(names) == 1 else 'them'}. The "
            "numbers are right; the time and the memory may be more than they need be.",
            UserWarning,
            stacklevel=2,
        )


def warn_of_missing_boundaries(context: PlanningContext) -> None:
    """Warn of a pipeline whose layers the user was to mark, and did not."""
    if isinstance(context.options.layers, ManualLayerOption) and context.traced.n_boundaries == 0:
        warnings.warn(
            "The layers of this pipeline end at `mark_pipeline_boundary()`, and the step has no such call: it is one "
            "stage. Mark boundaries in the model, or use `AutoLayerOption()`.",
            UserWarning,
            stacklevel=2,
        )


def check_fixed_specs(context: PlanningContext) -> None:
    """Raise ShardingError for a key of `fixed_specs` that no argument and no result matches, and for unknown axes."""
    options, names = context.options.sharding_options, context.options.axis_names
    unknown = {name for option in options for name in option.named_axes} - {*names}
    if unknown and names:
        raise ShardingError(
            f"`fixed_specs` and `received_axes` name the axes {sorted(unknown)}; the meshes have {', '.join(names)}."
        )

    paths = (*context.traced.in_paths, *context.traced.out_paths)
    for pattern in dict.fromkeys(pattern for option in options for pattern, _ in option.fixed_pairs):
        if not any(matches(pattern, path) for path in paths):
            listed = ", ".join(f"`{path}`" for path in paths[:_MOST_PATHS]) + (", ..." if paths[_MOST_PATHS:] else "")
            raise ShardingError(
                f"`fixed_specs` has the key `{pattern}`, which no argument and no result matches. There are {listed}; "
                "`*` stands for any text."
            )


def check_submeshes(context: PlanningContext) -> None:
    """Raise ShardingError for a submesh to search that is neither a part of a host nor whole hosts."""
    stages, cluster = context.options.stages, context.cluster
    space = stages.submesh_physical_shape_space if isinstance(stages, AutoStageOption) else ()
    for h, n in () if isinstance(space, str) else space:
        per_host = cluster.devices_per_host
        if not 1 <= h <= cluster.num_hosts or not (1 <= n <= per_host if h == 1 else n == per_host):
            raise ShardingError(
                f"`submesh_physical_shape_space` has ({h}, {n}), and the cluster has {cluster.num_hosts} hosts of "
                f"{per_host} devices. A submesh is a part of one host, (1, n), or whole hosts, (h, {per_host})."
            )


def check_logical_mesh(context: PlanningContext) -> None:
    """Raise ShardingError where the user gave a LogicalMesh and asks for another view of its devices.

    Stages that the user gives are checked when they are placed, see `user_stages`.
    """
    mesh, options = context.logical_mesh, context.options
    if mesh is None:
        return

    if options.layers is not None:
        if isinstance(options.stages, AutoStageOption):
            raise ShardingError(
                "A LogicalMesh is one view of its devices, and a search looks at all of them. Give a ClusterSpec or a "
                "list of devices, or use `ShardParallel`."
            )
        return

    shape, submesh = options.logical_shape, options.submesh
    if shape is not None and tuple(shape) != tuple(mesh.shape):
        raise ShardingError(
            f"`logical_shape` is {tuple(shape)} and `devices` is a LogicalMesh of {mesh.shape}. Leave one out."
        )
    if submesh is not None and submesh[0] * submesh[1] != mesh.n_devices:
        raise ShardingError(f"`submesh` is {submesh} and `devices` is a LogicalMesh of {mesh.shape}. Leave one out.")
