"""Where the scans of a step are cut: a traced step and a layer option in, blocks of rows and the layer of each out.

Every row by itself is one group of the forward pass at first, and layers are assigned to these. Rows that share their
layers then stay one scan, unless layers compute something again: a layer that keeps the inputs of one row needs the
rows one by one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from minialpa.inter.forward import assign_layers
from minialpa.inter.stacks import Stacks, find_stacks
from minialpa.inter.unstack import RowBlocks, unstack, with_row_blocks
from minialpa.options import AutoLayerOption, FixedLayerOption, LayerOption, remats
from minialpa.trace import TracedStep

#: Scans of more rows are not taken apart into single ones.
_MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class CutStep:
    """A step as it was traced, and with its scans cut; the layer of each forward group of that; and the rows of each
    block of each stack, none where scans are whole."""

    traced: TracedStep
    step: TracedStep
    of_group: tuple[int, ...]
    row_blocks: RowBlocks = ()

    @property
    def n_layers(self) -> int:
        return max(self.of_group, default=-1) + 1


def whole_scans(traced: TracedStep, option: LayerOption) -> CutStep:
    """The step as it is. Raises TraceError and VerifyError like `assign_layers`."""
    return CutStep(traced, traced, assign_layers(traced, option))


def cut_scans(traced: TracedStep, option: LayerOption) -> CutStep | None:
    """The step with its scans over layers cut between layers; None where there is nothing to cut."""
    if isinstance(option, FixedLayerOption):
        if not option.row_blocks:
            return None
        step = with_row_blocks(traced, option.row_blocks)
        return CutStep(traced, step, assign_layers(step, option), option.row_blocks)
    if not isinstance(option, AutoLayerOption):
        return None
    stacks = find_stacks(traced)
    if not stacks.lengths:
        return None
    fine = unstack(traced, stacks, [(1,) * n for n in stacks.lengths], inline=False)
    of_group = assign_layers(fine.step, option)
    layer = dict(zip(fine.groups, of_group, strict=True))
    again = any(choice != ("none",) for choice in remats(option, 1))
    blocks = tuple(
        (1,) * n if again and n <= _MOST_ROWS else _blocks(stacks, layer, s) for s, n in enumerate(stacks.lengths)
    )
    if all(len(sizes) == 1 for sizes in blocks):
        return None
    cut = unstack(traced, stacks, blocks)
    # Groups of the coarse step begin with a row of the fine one; what is in one piece there is so here too.
    return CutStep(traced, cut.step, tuple(layer[key] for key in cut.groups), blocks)


def _blocks(stacks: Stacks, layer: dict[tuple[int, int], int], stack: int) -> tuple[int, ...]:
    """Neighbouring rows whose groups are all in the same layers, as blocks."""
    groups = [g for g, s in stacks.scanned.items() if s == stack]
    starts = sorted({row for g, row in layer if g in groups})
    of_row = [tuple(layer.get((g, row)) for g in groups) for row in starts]
    return tuple(len(list(rows)) for _, rows in itertools.groupby(of_row))
