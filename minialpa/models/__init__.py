"""Models for tests, benchmarks and the command line: a name and sizes go in, a `ModelCase` comes out. See README.md."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from minialpa.errors import TraceError
from minialpa.models.base import GradFn, Model, ModelCase, ModelState, make_case
from minialpa.models.feedforward import Mlp, ResNet, TwoTower, UNet
from minialpa.models.sizes import SIZES, Size
from minialpa.models.transformer import T5, Bert, Gpt, Llama, Moe, Vit

__all__ = ["MODELS", "SIZES", "GradFn", "ModelCase", "ModelState", "Size", "build"]

_KINDS: dict[str, type[Model]] = {
    "bert": Bert,
    "gpt": Gpt,
    "llama": Llama,
    "mlp": Mlp,
    "moe": Moe,
    "resnet": ResNet,
    "t5": T5,
    "two_tower": TwoTower,
    "unet": UNet,
    "vit": Vit,
}
MODELS: dict[str, Callable[..., ModelCase]] = {name: partial(make_case, name, kind) for name, kind in _KINDS.items()}


def build(name: str, **sizes: Any) -> ModelCase:
    """The model `name`, a key of `MODELS` or `SIZES`. `sizes` are fields of its class, `boundary` or `n_boundaries`.

    `build("gpt", hidden=64)` is a small GPT; `build("gpt-1.3b")` has a published size. Raises TraceError for unknown
    names.
    """
    if name in MODELS:
        return MODELS[name](**sizes)
    if name in SIZES:
        size = SIZES[name]
        return MODELS[size.model](**{**size.arguments, **sizes})
    near = difflib.get_close_matches(name.lower(), [*MODELS, *SIZES], n=1, cutoff=0.7)
    meant = f" Do you mean `{near[0]}`?" if near else ""
    raise TraceError(
        f"There is no model `{name}`.{meant} Pass one of {', '.join(MODELS)}, or one of the {len(SIZES)} sizes in "
        "`minialpa.models.SIZES`, such as `gpt-1.3b`."
    )
