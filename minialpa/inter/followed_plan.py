"""Plans that follow another plan: a function that reads a training state is planned where the step keeps the state.

leaves      of the function -> their meshes, rows and specs in the step: by path and type, or from the arrays of a call
layers      each equation runs on the mesh of its parameters, or else of its operands
shardings   are solved with these specs fixed
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import Var

from minialpa.errors import ShardingError
from minialpa.inter.build_plan import plan_stages
from minialpa.inter.context import PlanningContext
from minialpa.inter.layers.layered_step import CutStep, LayeredStep, layered_step
from minialpa.inter.layers.stacks import find_stacks
from minialpa.inter.layers.unstack import with_row_blocks
from minialpa.inter.search.user_stages import DecidedStage, as_planned
from minialpa.inter.staging.placement import with_first_readers
from minialpa.ir.equations import dtype_name, operand_vars, shape_of
from minialpa.options import AutoShardingOption, Remat
from minialpa.plan import PlacedValue, Plan, StagePlan
from minialpa.sharding import Spec
from minialpa.support.private_jax import warn
from minialpa.tracing.trace import LeafPart, TracedStep

#: Unique names of leaves and of blocks of their rows. Paths are not unique.
_Names = Mapping[LeafPart, str]


@dataclass(frozen=True, slots=True)
class _Homes:
    """Where the step keeps the leaves of the function.

    Attributes:
        of_leaf: number of an argument leaf on the meshes of the step -> its place.
    """

    of_leaf: Mapping[int, PlacedValue]

    def of_part(self, part: LeafPart) -> dict[int, Spec]:
        """Mesh -> spec of a leaf or block, for each mesh that holds it."""
        value = self.of_leaf.get(part.leaf)
        if value is None:
            return {}
        rows = value.rows or (None,) * len(value.mesh_ids)
        held = zip(value.mesh_ids, value.specs, rows, strict=True)
        return {mesh: spec for mesh, spec, block in held if block == part.rows}

    def blocks_of(self, leaf: int) -> tuple[tuple[int, int], ...]:
        """The rows of each block of a leaf; empty if it is not cut."""
        value = self.of_leaf.get(leaf)
        return tuple(sorted(set(value.rows))) if value is not None else ()


def plan_following(
    context: PlanningContext,
    source: Plan,
    placements: Mapping[int, PlacedValue] | None = None,
    relax: Callable[[AutoShardingOption], AutoShardingOption] | None = None,
) -> Plan:
    """A plan on the meshes of `source`, in which each leaf that both functions read is where `source` has it.

    placements: number of an argument leaf -> place of its array. None matches leaves by path and type.
    relax: changes the options of `source` for the shardings; None keeps them.
    Raises ShardingError if no leaf matches, or if the function cannot read a leaf in the blocks of `source`.
    """
    context = dataclasses.replace(context, shortens=False)  # the plan names leaves of the whole step
    homes = _find_homes(context.traced, source) if placements is None else _Homes(placements)
    cut = _cut_into_blocks(context.whole, homes)
    parts = [cut.step.argument(i) for i in range(len(cut.step.flat.invars))]
    names = {part: _leaf_name(context.traced.in_paths[part.leaf], part.rows) for part in parts}

    # Options name leaves by their paths, and blocks of one leaf may have different specs.
    named = dataclasses.replace(cut.step, in_paths=tuple(names[part] for part in parts))
    followed = dataclasses.replace(cut, step=named)
    # A step without operations, such as one that returns its arguments, has no layers for stages.
    stage_plans = source.stages if source.layer_of_group and context.traced.n_groups else source.stages[:1]
    if len(stage_plans) > 1:
        deciding = [number for number in homes.of_leaf if _decides_stage(context.traced, number)]
        deciders = _Homes({number: homes.of_leaf[number] for number in deciding})
        followed = dataclasses.replace(followed, of_group=_stage_of_groups(named, parts, deciders))
        no_remat: list[Remat] = ["none" for _ in stage_plans]
        layered = layered_step(followed, tuple(no_remat))
    else:
        layered = dataclasses.replace(context.whole, plain=named)

    stages = list(_stages_with_fixed_specs(context, stage_plans, homes, names, relax))
    plan = plan_stages(context, layered, stages)
    paths = context.traced.in_paths
    inputs = tuple(dataclasses.replace(value, path=path) for value, path in zip(plan.inputs, paths, strict=True))
    return dataclasses.replace(plan, inputs=inputs)


# ---- leaves ----------------------------------------------------------------------------------------------------------


def _find_homes(traced: TracedStep, source: Plan) -> _Homes:
    """The leaves of the function that are leaves of the step of `source`.

    Two leaves match if their types are equal and the step's path ends with the function's: `params['w']` matches
    `state.params['w']`. If no path matches, the name of the argument is dropped: `p['w']` matches, too.
    """
    endings: dict[tuple[str, ...], list[PlacedValue]] = defaultdict(list)
    for value in source.inputs:
        keys = _keys(value.path)
        for i in range(len(keys)):
            endings[keys[i:]].append(value)

    of_leaf: dict[int, PlacedValue] = {}
    ambiguous: list[str] = []
    leaves = zip(traced.flat.invars, traced.in_paths, traced.batch_dims, strict=True)
    for number, (var, path, batch_dim) in enumerate(leaves):
        keys = _keys(path)
        matches = _same_leaves(endings, keys, var) or _same_leaves(endings, keys[1:], var, len(keys))
        if batch_dim is not None or not matches:
            continue
        of_leaf[number] = matches[0]
        others = [one for one in matches if dataclasses.replace(one, path=matches[0].path) != matches[0]]
        if others:  # in different places
            del of_leaf[number]
            ambiguous.append(f"`{path}` may be `{matches[0].path}` or `{others[0].path}`")

    if ambiguous:
        message = (
            f"`FollowParallel` matches arguments of the two functions by name, shape and dtype, but {ambiguous[0]}, "
            "and `src_func` keeps the two in different places. Give the argument the name of the right one."
        )
        if not of_leaf:
            raise ShardingError(message)
        warn(f"{message} Until then, calls may move it to other devices.")
    elif not of_leaf:
        raise ShardingError(
            "`FollowParallel` matches arguments of the two functions by name, shape and dtype, but no argument "
            f"matches. `src_func` has {_listed_paths(value.path for value in source.inputs)}, and this function has "
            f"{_listed_paths(traced.in_paths)}. Give an argument the name that the state has in `src_func`."
        )
    return _Homes(of_leaf)


def _same_leaves(
    endings: Mapping[tuple[str, ...], list[PlacedValue]], keys: tuple[str, ...], var: Var, n_keys: int | None = None
) -> list[PlacedValue]:
    """The leaves of the type of `var` whose paths end with `keys`, preferably paths of `n_keys` keys."""
    same = [one for one in endings.get(keys, ()) if one.shape == shape_of(var) and one.dtype == dtype_name(var)]
    return [one for one in same if len(_keys(one.path)) == (n_keys or len(keys))] or same


def _keys(path: str) -> tuple[str, ...]:
    """The keys of a path: `state.params['w']` has `state`, `params` and `w`."""
    return tuple(key.strip(".[]'") for key in re.findall(r"\['.*?'\]|\[[^\]]*\]|\.?[^.\[]+", path))


def _listed_paths(paths: Iterator[str] | Sequence[str]) -> str:
    listed = [f"`{path}`" for path in paths]
    return ", ".join(listed[:4]) + (", ..." if listed[4:] else "")


def _leaf_name(path: str, rows: tuple[int, int] | None) -> str:
    return path if rows is None else f"{path}[{rows[0]}:{rows[1]}]"


# ---- stages ----------------------------------------------------------------------------------------------------------


def _cut_into_blocks(whole: LayeredStep, homes: _Homes) -> CutStep:
    """The function with its scans over layers cut into the step's blocks."""
    traced = whole.plain
    stacks = find_stacks(traced)
    blocks: list[tuple[tuple[int, int], ...]] = [((0, length),) for length in stacks.lengths]
    for leaf, var in enumerate(traced.flat.invars):
        if var in stacks.stack_of and homes.blocks_of(leaf):
            blocks[stacks.stack_of[var]] = homes.blocks_of(leaf)

    _check_blocks(traced, {var: blocks[stack] for var, stack in stacks.stack_of.items()}, homes)
    if all(len(of_stack) == 1 for of_stack in blocks):
        return CutStep(whole=whole, step=traced, of_group=())

    row_blocks = tuple(tuple(stop - start for start, stop in of_stack) for of_stack in blocks)
    cut = with_row_blocks(traced, row_blocks)
    return CutStep(whole=whole, step=cut.step, of_group=(), row_blocks=row_blocks, groups=cut.groups)


def _check_blocks(traced: TracedStep, blocks_of: Mapping[Var, tuple[tuple[int, int], ...]], homes: _Homes) -> None:
    """Raise ShardingError unless the function reads leaves in the step's blocks.

    blocks_of: the blocks of each stacked variable of the function.
    """
    read = {var for eqn in traced.flat.eqns for var in operand_vars(eqn)}
    for leaf, var in enumerate(traced.flat.invars):
        is_cut = blocks_of.get(var) == homes.blocks_of(leaf)
        if var in read and homes.blocks_of(leaf) and not is_cut:
            raise ShardingError(
                f"`src_func` scans over the layers of `{traced.in_paths[leaf]}` and keeps layers "
                f"{', '.join(f'{start} to {stop - 1}' for start, stop in homes.blocks_of(leaf))} on different stages, "
                "but this function does not scan over it in this way. Use the same `jax.lax.scan` in both functions, "
                "or another method than `FollowParallel`."
            )


def _decides_stage(traced: TracedStep, leaf: int) -> bool:
    """Whether equations run on the mesh of a leaf.

    Examples and integers move to their readers, such as a token from the last stage that the first stage reads next.
    """
    is_integer = dtype_name(traced.flat.invars[leaf]).startswith(("int", "uint"))
    return traced.batch_dims[leaf] is None and not is_integer


def _stage_of_groups(step: TracedStep, parts: Sequence[LeafPart], homes: _Homes) -> tuple[int, ...]:
    """The stage of the leaves of each forward group, but not before the stage of its operands."""
    # Values that no leaf decides, such as targets made of the batch, are computed at their first reader.
    stages = with_first_readers(step.flat.eqns, _stages_by_leaves(step, parts, homes))
    of_group = [0] * step.n_groups
    for origin, stage in zip(reversed(step.origins), reversed(stages), strict=True):
        if origin.group is not None and origin.direction == "forward":
            of_group[origin.group] = stage
    return tuple(of_group)


def _stages_by_leaves(step: TracedStep, parts: Sequence[LeafPart], homes: _Homes) -> list[int | None]:
    """The stage of each equation that depends on leaves; None for others."""
    home_of = {var: sorted(homes.of_part(part)) for var, part in zip(step.flat.invars, parts, strict=True)}
    stage_of: dict[Var, int] = {}
    stages: list[int | None] = []
    for eqn in step.flat.eqns:
        operands = operand_vars(eqn)
        stage = max((stage_of[v] for v in operands if v in stage_of), default=-1)
        for v in operands:
            # Of several copies, the first that does not delay the equation.
            held = home_of.get(v) or [stage]
            stage = max(stage, next((mesh for mesh in held if mesh >= stage), held[-1]))
        stages.append(stage if stage >= 0 else None)
        if stage >= 0:
            stage_of.update(dict.fromkeys(eqn.outvars, stage))
    return stages


def _stages_with_fixed_specs(
    context: PlanningContext,
    stage_plans: Sequence[StagePlan],
    homes: _Homes,
    names: _Names,
    relax: Callable[[AutoShardingOption], AutoShardingOption] | None,
) -> Iterator[DecidedStage]:
    for mesh, stage in enumerate(stage_plans):
        option = stage.option if relax is None else relax(stage.option)
        fixed = tuple(
            (name, homes.of_part(part)[mesh].partition_spec(option.names_on(stage.logical_shape)))
            for part, name in names.items()
            if mesh in homes.of_part(part)
        )
        decided = as_planned(stage, context.cluster, (mesh,) if len(stage_plans) > 1 else ())
        yield dataclasses.replace(decided, option=dataclasses.replace(option, fixed_specs=fixed))
