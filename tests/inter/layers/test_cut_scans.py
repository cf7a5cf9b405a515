"""Scans that are cut between layers, and joined again by chunks, keep a layer for every group."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from minialpa.inter.layers.cut_scans import cut_scans, with_longer_scans
from minialpa.inter.layers.layered_step import LayeredStep
from minialpa.options import AutoLayerOption
from minialpa.testing import assert_allclose
from minialpa.tracing.evaluation import eval_flat
from tests.inter.layers.test_unstack import MODELS, Model


def _joins_again(model: Model) -> None:
    step, args = model.traced()
    cut = cut_scans(LayeredStep(step=step, fingerprint=step.fingerprint), AutoLayerOption(2, remat="auto"))
    if cut is None:
        return
    for chunks in ((0, 1), (0, 0)):
        longer = with_longer_scans(cut, chunks)
        assert longer.n_layers == 1 + max(chunks)
        if len(set(chunks)) == 1:  # the arguments and results are those of the step
            assert_allclose(eval_flat(longer.step.flat, args), eval_flat(step.flat, args), rtol=1e-5, atol=1e-5)


def test_a_constant_that_each_row_had_a_copy_of_has_a_layer() -> None:
    _joins_again(
        Model(
            length=4, reverse=False, again=False, aux="mixed", keys=True, index=False, scaled=True, shared=True,
            second="residual", optimizer="mixing", tagged=False,
        )
    )  # fmt: skip


@pytest.mark.slow  # the other test is the short relative
@settings(max_examples=10)
@given(MODELS)
def test_rows_of_a_chunk_join_again(model: Model) -> None:
    _joins_again(model)
