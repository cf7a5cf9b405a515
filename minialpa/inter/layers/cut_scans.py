"""Where the scans of a step are cut: a traced step and a layer option in, blocks of rows and the layer of each out.

Every row by itself is one group of the forward pass at first, and layers are assigned to these. Rows that share their
layers then stay one scan, unless layers compute something again: a layer that keeps the inputs of one row needs the
rows one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from minialpa.inter.layers.forward import assign_layers
from minialpa.inter.layers.layered_step import CutStep, LayeredStep
from minialpa.inter.layers.row_blocks import GroupKey, RowBlocks
from minialpa.inter.layers.stacks import Stacks, find_stacks
from minialpa.inter.layers.unstack import unstack, with_row_blocks
from minialpa.options import AutoLayerOption, FixedLayerOption, LayerOption, remats

#: Scans of more rows are not taken apart into single ones.
_MOST_ROWS = 64


def whole_scans(whole: LayeredStep, option: LayerOption) -> CutStep:
    """The step as it is. Raises TraceError and VerifyError like `assign_layers`."""
    return CutStep(whole, whole.step, assign_layers(whole.step, option))


def cut_scans(whole: LayeredStep, option: LayerOption) -> CutStep | None:
    """The step with its scans over layers cut between layers; None where there is nothing to cut."""
    if isinstance(option, FixedLayerOption):
        if not option.row_blocks:
            return None
        cut = with_row_blocks(whole.step, option.row_blocks)
        return CutStep(whole, cut.step, assign_layers(cut.step, option), option.row_blocks, cut.groups)
    if not isinstance(option, AutoLayerOption):
        return None
    stacks = find_stacks(whole.step)
    if not stacks.lengths:
        return None
    single = tuple((1,) * n for n in stacks.lengths)
    fine = unstack(whole.step, stacks, single, inline=False)
    layer = dict(zip(fine.groups, assign_layers(fine.step, option), strict=True))
    again = any(choice != ("none",) for choice in remats(option, 1))
    blocks = tuple(
        rows if again and len(rows) <= _MOST_ROWS else _joined(stacks, s, rows, layer) for s, rows in enumerate(single)
    )
    return None if all(len(sizes) == 1 for sizes in blocks) else _cut(whole, stacks, blocks, layer)


def with_longer_scans(cut: CutStep, chunk_of_layer: Sequence[int]) -> CutStep:
    """The same with one layer for each chunk, and rows of a chunk in one block."""
    stacks = find_stacks(cut.whole.step)
    layer = {key: chunk_of_layer[i] for key, i in zip(cut.groups, cut.of_group, strict=True)}
    blocks = tuple(_joined(stacks, s, sizes, layer) for s, sizes in enumerate(cut.row_blocks))
    return _cut(cut.whole, stacks, blocks, layer)


def _cut(whole: LayeredStep, stacks: Stacks, blocks: RowBlocks, layer: Mapping[GroupKey, int]) -> CutStep:
    """`layer`: that of each group of a step in the same blocks or in parts of them, which begin where they do.

    In a stack that is cut, equations on its weights belong to its layers; in one that is not, they are a group of their
    own, without an entry in `layer`, and go to the layer of the stack.
    """
    cut = unstack(whole.step, stacks, blocks)

    def layer_of(key: GroupKey) -> int:
        return layer[key] if key in layer else layer[stacks.first_groups[stacks.weight_groups[key[0]]], 0]

    return CutStep(whole, cut.step, tuple(map(layer_of, cut.groups)), blocks, cut.groups)


def _joined(stacks: Stacks, stack: int, sizes: Sequence[int], layer: Mapping[GroupKey, int]) -> tuple[int, ...]:
    """Blocks of these sizes; neighbours whose groups are all in the same layers become one."""
    starts = itertools.accumulate(sizes, initial=0)
    groups = [g for g, s in stacks.scan_groups.items() if s == stack]
    layers = ((tuple(layer.get((g, start)) for g in groups), n) for start, n in zip(starts, sizes, strict=False))
    return tuple(sum(n for _, n in run) for _, run in itertools.groupby(layers, key=lambda pair: pair[0]))
