"""Training steps of the grammar, each of a class that a loop over micro-batches can get wrong without a word.

The losses need a total over the batch that depends on the model, and the schemes take a gradient at values that another
gradient changed. The model has one layer on each side of a boundary.
"""

from __future__ import annotations

import dataclasses

from tests.equivalence.layers import Layer
from tests.equivalence.losses import Loss, Term
from tests.equivalence.model import Model
from tests.equivalence.steps import Training

_LOSSES = (
    "mean", "sum", "masked mean", "mean of the positive", "over a detached total", "over a total", "logsumexp",
    "balance", "nanmean", "softmax weights", "detached weights", "advantage", "mean squared", "mean times mean", "var",
    "log of the mean", "root of the mean", "max", "softplus of deviations", "median", "contrastive",
    "entropy of the mean", "by the mean", "correlation", "an absent class",
)  # fmt: skip
_SCHEMES = (
    "clipped", "penalty on input gradients", "sharpness aware", "extragradient", "two updates", "alternating",
    "curvature", "penalty on gradients", "weighted by losses", "evaluated after",
)  # fmt: skip


def _training(reduction: str = "mean", scheme: str = "plain") -> Training:
    model = Model("vector", (Layer("dense"), Layer("dense")), boundary=1)
    return Training(model, Loss((Term("squared", reduction),)), scheme, batch_size=16)


STEPS: dict[str, Training] = {
    **{name: _training(name) for name in _LOSSES},
    **{name: _training(scheme=name) for name in _SCHEMES},
    "masked mean, computed again": dataclasses.replace(
        _training("masked mean"), model=dataclasses.replace(_training().model, checkpoint=True)
    ),
}
