"""Training steps of the grammar, each of a class in which a loop over micro-batches can be wrong without an error.

The losses need a sum over the batch that depends on the model, and the schemes take a gradient at values that another
gradient changed. The model has one layer on each side of a boundary.
"""

from __future__ import annotations

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


def _training(*reductions: str, scheme: str = "plain", checkpoint: bool = False) -> Training:
    model = Model("vector", (Layer("dense"), Layer("dense")), boundary=1, checkpoint=checkpoint)
    terms = tuple(Term("squared", reduction) for reduction in reductions)
    return Training(model, Loss(terms), scheme, batch_size=16)


_OTHERS: dict[str, Training] = {
    **{name: _training("mean", scheme=name) for name in _SCHEMES},
    "masked mean, computed again": _training("masked mean", checkpoint=True),
}
STEPS: dict[str, Training] = {name: _training(name) for name in _LOSSES} | _OTHERS
#: The same, with losses that are sums of three.
JOINED: dict[str, Training] = {
    " and ".join(names): _training(*names) for names in (_LOSSES[i : i + 3] for i in range(0, len(_LOSSES), 3))
} | _OTHERS
