"""Published sizes: a name such as "gpt-1.3b" goes in; the model and its arguments come out.

GPT, MoE and Wide-ResNet are from Alpa's benchmark suites (OSDI'22), with global batch sizes; Llama 3 from
arXiv:2407.21783, table 3, with 4M tokens in a batch; ViT from arXiv:2010.11929, table 1; T5 from arXiv:1910.10683,
section 3.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Size:
    """Arguments of `MODELS[model]`, and the published, rounded number of parameters."""

    model: str
    n_parameters: float
    arguments: dict[str, Any]


def _suite(model: str, columns: str, rows: dict[str, tuple[Any, ...]], **common: Any) -> dict[str, Size]:
    """A row has the number of parameters, then the values of `columns`."""
    return {
        name: Size(model, n_parameters, dict(zip(columns.split(), values, strict=True)) | common)
        for name, (n_parameters, *values) in rows.items()
    }


_GPT = {
    "gpt-125m": (125e6, 768, 12, 12),
    "gpt-350m": (350e6, 1024, 24, 16),
    "gpt-760m": (760e6, 1536, 24, 16),
    "gpt-1.3b": (1.3e9, 2048, 24, 32),
    "gpt-2.6b": (2.6e9, 2560, 32, 32),
    "gpt-6.7b": (6.7e9, 4096, 32, 32),
    "gpt-15b": (15e9, 5120, 48, 40),
    "gpt-39b": (39e9, 8192, 48, 64),
    "gpt-76b": (76e9, 10240, 60, 80),
}
_LLAMA = {
    "llama-3-8b": (8e9, 4096, 32, 32, 14336),
    "llama-3-70b": (70e9, 8192, 80, 64, 28672),
    "llama-3-405b": (405e9, 16384, 126, 128, 53248),
}
_T5 = {"t5-small": (60e6, 512, 6, 8), "t5-base": (220e6, 768, 12, 12), "t5-large": (770e6, 1024, 24, 16)}
_VIT = {
    "vit-b16": (86e6, 768, 12, 12, 16),
    "vit-l16": (307e6, 1024, 24, 16, 16),
    "vit-h14": (632e6, 1280, 32, 16, 14),
}
_MOE = {
    "moe-380m": (380e6, 768, 8, 8),
    "moe-690m": (690e6, 768, 8, 16),
    "moe-1.3b": (1.3e9, 768, 16, 16),
    "moe-2.4b": (2.4e9, 1024, 16, 16),
    "moe-7.1b": (7.1e9, 1280, 16, 32),
    "moe-10b": (10e9, 1536, 16, 32),
    "moe-27b": (27e9, 2048, 16, 48),
    "moe-70b": (70e9, 2048, 32, 64),
    "moe-140b": (140e9, 2048, 32, 128),
}
_RESNET = {
    "wresnet-250m": (250e6, (3, 4, 6, 3), 160, 2),
    "wresnet-500m": (500e6, (3, 4, 6, 3), 224, 2),
    "wresnet-1b": (1e9, (3, 4, 6, 3), 320, 2),
    "wresnet-2b": (2e9, (3, 4, 6, 3), 448, 2),
    "wresnet-4b": (4e9, (3, 4, 6, 3), 640, 2),
    "wresnet-6.8b": (6.8e9, (3, 4, 6, 3), 320, 16),
    "wresnet-13b": (13e9, (3, 4, 23, 3), 320, 16),
}

_HEADS = "hidden n_layers n_heads"
_LONG = {"batch_size": 1024, "seq_len": 1024, "dtype": "float16"}
_ROTARY = {"n_kv_heads": 8, "rope_base": 500000.0, "dtype": "bfloat16"}
_IMAGENET = {"batch_size": 1536, "image_size": 224, "n_classes": 1024, "imagenet_stem": True, "kind": "bottleneck"}

SIZES: dict[str, Size] = {
    **_suite("gpt", _HEADS, _GPT, vocab_size=51200, **_LONG),
    **_suite("llama", f"{_HEADS} ffn", _LLAMA, batch_size=512, seq_len=8192, vocab_size=128256, **_ROTARY),
    **_suite("t5", _HEADS, _T5, batch_size=128, source_len=512, seq_len=512, vocab_size=32128, reach=128),
    **_suite("vit", f"{_HEADS} patch", _VIT, batch_size=4096, image_size=224, n_classes=1000),
    **_suite(
        "moe", "hidden n_layers n_experts", _MOE, n_heads=16, factor=8, vocab_size=32000, optimizer="adafactor", **_LONG
    ),
    **_suite("resnet", "stage_sizes filters width_factor", _RESNET, **_IMAGENET),
}
