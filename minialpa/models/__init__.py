"""The models that tests, benchmarks and the command line train, tiny by default. They need the `models` extra.

`build("gpt", hidden=64)` is a small GPT. `build("gpt-1.3b")` has a published size, see `minialpa.models.sizes`; further
keyword arguments override parts of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minialpa.errors import TraceError
from minialpa.models.base import GradFn, ModelCase, ModelState
from minialpa.models.bert import bert_case
from minialpa.models.gpt import gpt_case
from minialpa.models.llama import llama_case
from minialpa.models.mlp import mlp_case
from minialpa.models.moe import moe_case
from minialpa.models.resnet import resnet_case
from minialpa.models.sizes import SIZES, Size
from minialpa.models.t5 import t5_case
from minialpa.models.two_tower import two_tower_case
from minialpa.models.unet import unet_case
from minialpa.models.vit import vit_case

__all__ = ["MODELS", "SIZES", "GradFn", "ModelCase", "ModelState", "Size", "build"]

MODELS: dict[str, Callable[..., ModelCase]] = {
    "bert": bert_case,
    "gpt": gpt_case,
    "llama": llama_case,
    "mlp": mlp_case,
    "moe": moe_case,
    "resnet": resnet_case,
    "t5": t5_case,
    "two_tower": two_tower_case,
    "unet": unet_case,
    "vit": vit_case,
}


def build(name: str, **sizes: Any) -> ModelCase:
    """The model called `name`, a key of `MODELS` or of `SIZES`. Its builder gets `sizes` as keyword arguments."""
    if name in MODELS:
        return MODELS[name](**sizes)
    if name in SIZES:
        size = SIZES[name]
        return MODELS[size.model](**{**size.arguments, **sizes})
    raise TraceError(f"There is no model `{name}`. Known models: {', '.join(MODELS)}; known sizes: {', '.join(SIZES)}.")
