"""What is said about a step and its options before any planning: warnings, and refusals with what to change."""

from __future__ import annotations

import warnings

from minialpa.errors import ShardingError
from minialpa.inter.context import PlanningContext
from minialpa.intra.graph.constraints import matches
from minialpa.options import AutoStageOption
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


def check_fixed_paths(context: PlanningContext) -> None:
    """Raise ShardingError for a key of `fixed_specs` that no argument and no result matches."""
    paths = (*context.traced.in_paths, *context.traced.out_paths)
    for pattern in context.options.fixed_paths:
        if not any(matches(pattern, path) for path in paths):
            listed = ", ".join(f"`{path}`" for path in paths[:_MOST_PATHS]) + (", ..." if paths[_MOST_PATHS:] else "")
            raise ShardingError(
                f"`fixed_specs` has the key `{pattern}`, which no argument and no result matches. There are {listed}; "
                "`*` stands for any text."
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
