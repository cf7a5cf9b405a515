"""A step and its layers: which forward groups are which layer, and what each layer computes again."""

from __future__ import annotations

from dataclasses import dataclass

from minialpa.inter.layers.remat import rematerialise
from minialpa.inter.layers.row_blocks import GroupKey, RowBlocks
from minialpa.options import Remat
from minialpa.tracing.fingerprint import Fingerprint
from minialpa.tracing.trace import TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredStep:
    """A step as its layers compute it.

    Attributes:
        step: the step, after scans are cut and layers compute values again.
        fingerprint: of the step as it was traced.
        of_group: the layer of each forward group; empty before layers are assigned.
        remat: what each layer computes again.
        row_blocks: for each stack, the rows of each block; empty where no scan is cut.
    """

    step: TracedStep
    fingerprint: Fingerprint
    of_group: tuple[int, ...] = ()
    remat: tuple[Remat, ...] = ()
    row_blocks: RowBlocks = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStep:
    """A step whose scans may be cut, and the layer of each of its forward groups.

    Attributes:
        whole: the step as it was traced, without layers.
        step: the step after its scans are cut.
        of_group: the layer of each forward group of `step`.
        row_blocks: for each stack, the rows of each block; empty where no scan is cut.
        groups: if scans are cut, the group and the first row of `whole` that each forward group of `step` is.
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
    """The step in which each layer computes again what `remat` says of it."""
    return LayeredStep(
        step=rematerialise(cut.step, cut.of_group, remat),
        fingerprint=cut.whole.fingerprint,
        of_group=cut.of_group,
        remat=remat,
        row_blocks=cut.row_blocks,
    )
