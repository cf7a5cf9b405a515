"""A step and its layers: which forward groups are which layer, and what each layer computes again."""

from __future__ import annotations

from dataclasses import dataclass

from minialpa.inter.layers.remat import rematerialise
from minialpa.inter.layers.row_blocks import GroupKey, RowBlocks
from minialpa.options import Remat
from minialpa.tracing.fingerprint import Fingerprint
from minialpa.tracing.trace import TracedStep


@dataclass(frozen=True, slots=True)
class LayeredStep:
    """A step as its layers compute it; the fingerprint of the step that was traced; the layer of each forward group,
    what each layer computes again, and the rows of each block of each scan over layers that is cut."""

    step: TracedStep
    fingerprint: Fingerprint
    of_group: tuple[int, ...] = ()
    remat: tuple[Remat, ...] = ()
    row_blocks: RowBlocks = ()


@dataclass(frozen=True, slots=True)
class CutStep:
    """A step with its scans cut, or whole, and the layer of each of its forward groups.

    whole: the step as it was traced, without layers. row_blocks: rows of each block of each stack, none where scans
    are whole; groups: then, what each forward group was, see `Unstacked`.
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
    """A step whose layers compute this again."""
    step = rematerialise(cut.step, cut.of_group, remat)
    return LayeredStep(step, cut.whole.fingerprint, cut.of_group, remat, cut.row_blocks)
