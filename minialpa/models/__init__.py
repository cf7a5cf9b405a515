"""Models for tests, benchmarks and the command line: a name and sizes go in, a `ModelCase` comes out. See README.md."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from minialpa.errors import TraceError, meant
from minialpa.models.sizes import SIZES, Size

if TYPE_CHECKING:
    from minialpa.models.base import GradFn, ModelCase, ModelState

__all__ = ["MODELS", "SIZES", "GradFn", "ModelCase", "ModelState", "Size", "build"]

#: The class of each model. The names are known without flax, which is a slow import.
_KINDS = {
    "bert": "transformer.Bert",
    "gpt": "transformer.Gpt",
    "llama": "transformer.Llama",
    "mlp": "feedforward.Mlp",
    "moe": "transformer.Moe",
    "resnet": "feedforward.ResNet",
    "t5": "transformer.T5",
    "two_tower": "feedforward.TwoTower",
    "unet": "feedforward.UNet",
    "vit": "transformer.Vit",
}


def _make(name: str, /, **sizes: Any) -> ModelCase:
    from minialpa.models.base import make_case

    module, _, kind = _KINDS[name].partition(".")
    return make_case(name, getattr(importlib.import_module(f"minialpa.models.{module}"), kind), **sizes)


MODELS: dict[str, Callable[..., ModelCase]] = {name: partial(_make, name) for name in _KINDS}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("minialpa.models.base"), name)
    raise AttributeError(f"module 'minialpa.models' has no attribute '{name}'", name=name)


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
    raise TraceError(
        f"There is no model `{name}`.{meant(name, [*MODELS, *SIZES])} Pass one of {', '.join(MODELS)}, or one of the "
        f"{len(SIZES)} sizes in `minialpa.models.SIZES`, such as `gpt-1.3b`."
    )
