"""A step and its layers: a traced step and a `LayerOption` in, a step with layers, cut scans and rematerialisation out.

`stacks.py` finds scans over layers, `cut_scans` decides their blocks, `unstack.py` rewrites the step.
Neighbouring rows of the same layers become one scan, unless layers may recompute values, which needs single rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minialpa.inter.layers.forward import assign_layers
from minialpa.inter.layers.offload import with_choices
from minialpa.inter.layers.row_blocks import GroupKey, RowBlocks
from minialpa.inter.layers.stacks import Stacks, find_stacks
from minialpa.inter.layers.unstack import unstack, with_row_blocks
from minialpa.options import AutoLayerOption, FixedLayerOption, LayerOption, Remat, remats
from minialpa.tracing.fingerprint import Fingerprint
from minialpa.tracing.trace import TracedStep

#: Rows of the longest scan that is cut into single rows for rematerialisation. Programs grow with the rows; by choice.
_MOST_SINGLE_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class LayeredStep:
    """A step with the layer of each forward group.

    Attributes:
        plain: the step before rematerialisation.
        fingerprint: of the traced step, before scans are cut.
        of_group: the layer of each forward group; empty before layers are assigned.
        row_blocks: for each stack, the rows of each block; empty if no scan is cut.
    """

    plain: TracedStep
    fingerprint: Fingerprint
    of_group: tuple[int, ...] = ()
    remat: tuple[Remat, ...] = ()
    row_blocks: RowBlocks = ()

    def step(self, programs: Sequence[Sequence[int]]) -> TracedStep:
        """programs: layers that run in one program."""
        if not self.of_group:
            return self.plain
        return with_choices(self.plain, self.of_group, self.remat, programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStep:
    """A step after its scans are cut.

    Attributes:
        whole: the traced step.
        of_group, row_blocks: as in `LayeredStep`, for `step`.
        groups: if scans are cut, for each forward group of `step`, its group and first row in `whole`.
    """

    whole: LayeredStep
    step: TracedStep
    of_group: tuple[int, ...]
    row_blocks: RowBlocks = ()
    groups: tuple[GroupKey, ...] = ()

    @property
    def n_layers(self) -> int:
        return max(self.of_group, default=-1) + 1


def layered_step(cut: CutStep, remat: tuple[Remat, ...]) -> LayeredStep:
    return LayeredStep(
        plain=cut.step,
        fingerprint=cut.whole.fingerprint,
        of_group=cut.of_group,
        remat=remat,
        row_blocks=cut.row_blocks,
    )


# ---- scans over layers -----------------------------------------------------------------------------------------------


def whole_scans(whole: LayeredStep, option: LayerOption) -> CutStep:
    """Raises the errors of `assign_layers`."""
    return CutStep(whole=whole, step=whole.plain, of_group=assign_layers(whole.plain, option))


def cut_scans(whole: LayeredStep, option: LayerOption) -> CutStep | None:
    """The step with its scans over layers cut between layers; None if the step or `option` leaves all scans whole."""
    match option:
        case FixedLayerOption():
            return _cut_as_planned(whole, option) if option.row_blocks else None
        case AutoLayerOption():
            return _cut_between_layers(whole, option)
        case _:
            return None


def with_longer_scans(cut: CutStep, chunk_of_layer: Sequence[int]) -> CutStep:
    """One layer for each chunk, and neighbouring rows of a chunk in one block."""
    stacks = find_stacks(cut.whole.plain)
    chunk_of = {key: chunk_of_layer[layer] for key, layer in zip(cut.groups, cut.of_group, strict=True)}
    blocks = tuple(_joined_sizes(stacks, stack, sizes, chunk_of) for stack, sizes in enumerate(cut.row_blocks))
    return _cut_into_blocks(cut.whole, stacks, blocks, chunk_of)


def _cut_as_planned(whole: LayeredStep, option: FixedLayerOption) -> CutStep:
    cut = with_row_blocks(whole.plain, option.row_blocks)
    return CutStep(
        whole=whole,
        step=cut.step,
        of_group=assign_layers(cut.step, option),
        row_blocks=option.row_blocks,
        groups=cut.groups,
    )


def _cut_between_layers(whole: LayeredStep, option: AutoLayerOption) -> CutStep | None:
    stacks = find_stacks(whole.plain)
    if not stacks.lengths:
        return None

    single = tuple((1,) * n_rows for n_rows in stacks.lengths)
    by_rows = unstack(whole.plain, stacks, single, inline=False)
    layer_of = dict(zip(by_rows.groups, assign_layers(by_rows.step, option), strict=True))

    may_recompute = any(choice != ("none",) for choice in remats(option, 1))
    blocks = tuple(
        rows if may_recompute and len(rows) <= _MOST_SINGLE_ROWS else _joined_sizes(stacks, stack, rows, layer_of)
        for stack, rows in enumerate(single)
    )
    return None if all(len(sizes) == 1 for sizes in blocks) else _cut_into_blocks(whole, stacks, blocks, layer_of)


def _cut_into_blocks(
    whole: LayeredStep, stacks: Stacks, blocks: RowBlocks, layer_of: Mapping[GroupKey, int]
) -> CutStep:
    cut = unstack(whole.plain, stacks, blocks)
    # Equations that prepare the weights of a whole stack go to its layer, constants to the layer of the next group.
    layers: list[int] = []
    following = max(layer_of.values())
    for group, first_row in reversed(cut.groups):
        if (group, first_row) in layer_of:
            following = layer_of[group, first_row]
        elif group in stacks.weight_groups:
            following = layer_of[stacks.first_groups[stacks.weight_groups[group]], 0]
        layers.append(following)
    of_group = tuple(reversed(layers))
    return CutStep(whole=whole, step=cut.step, of_group=of_group, row_blocks=blocks, groups=cut.groups)


def _joined_sizes(
    stacks: Stacks, stack: int, sizes: Sequence[int], layer_of: Mapping[GroupKey, int]
) -> tuple[int, ...]:
    groups = [group for group, its_stack in stacks.scan_groups.items() if its_stack == stack]
    starts = itertools.accumulate(sizes, initial=0)
    layers = [tuple(layer_of.get((group, start)) for group in groups) for start, _ in zip(starts, sizes, strict=False)]

    runs = itertools.groupby(zip(layers, sizes, strict=True), key=lambda block: block[0])
    return tuple(sum(n_rows for _, n_rows in run) for _, run in runs)
