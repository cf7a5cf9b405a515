"""Published model sizes: for each name, the builder of the model and the keyword arguments that give it this size.

GPT, MoE and Wide-ResNet are the benchmark suites of Alpa (OSDI'22), with its global batch sizes; Llama 3 is
arXiv:2407.21783, table 3, with 4M tokens in a batch; ViT arXiv:2010.11929, table 1; T5 arXiv:1910.10683, section 3.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Size:
    """`arguments` go to the builder `MODELS[model]`; `n_parameters` is the publication's rounded count."""

    model: str
    n_parameters: float
    arguments: dict[str, Any]


def _gpt(n_parameters: float, hidden: int, n_layers: int, n_heads: int) -> Size:
    shape = {"hidden": hidden, "n_layers": n_layers, "n_heads": n_heads}
    run = {"batch_size": 1024, "seq_len": 1024, "vocab_size": 51200, "dtype": "float16"}
    return Size("gpt", n_parameters, shape | run)


def _moe(n_parameters: float, hidden: int, n_layers: int, n_experts: int) -> Size:
    shape = {"hidden": hidden, "n_layers": n_layers, "n_heads": 16, "n_experts": n_experts, "factor": 8}
    run = {"batch_size": 1024, "seq_len": 1024, "vocab_size": 32000, "dtype": "float16"}
    run["optimizer"] = "adafactor"
    return Size("moe", n_parameters, shape | run)


def _resnet(n_parameters: float, depth: int, filters: int, width_factor: int) -> Size:
    stage_sizes = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}[depth]
    shape = {"stage_sizes": stage_sizes, "filters": filters, "width_factor": width_factor, "kind": "bottleneck"}
    run = {"batch_size": 1536, "image_size": 224, "n_classes": 1024, "imagenet_stem": True}
    return Size("resnet", n_parameters, shape | run)


def _llama(n_parameters: float, hidden: int, n_layers: int, n_heads: int, ffn: int) -> Size:
    shape = {"hidden": hidden, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": 8, "ffn": ffn}
    run = {"batch_size": 512, "seq_len": 8192, "vocab_size": 128256, "rope_base": 500000.0, "dtype": "bfloat16"}
    return Size("llama", n_parameters, shape | run)


def _vit(n_parameters: float, hidden: int, n_layers: int, n_heads: int, patch: int) -> Size:
    shape = {"hidden": hidden, "n_layers": n_layers, "n_heads": n_heads, "patch": patch}
    return Size("vit", n_parameters, shape | {"batch_size": 4096, "image_size": 224, "n_classes": 1000})


def _t5(n_parameters: float, hidden: int, n_layers: int, n_heads: int) -> Size:
    shape = {"hidden": hidden, "n_layers": n_layers, "n_heads": n_heads, "reach": 128}
    return Size("t5", n_parameters, shape | {"batch_size": 128, "source_len": 512, "seq_len": 512, "vocab_size": 32128})


SIZES: dict[str, Size] = {
    "gpt-125m": _gpt(125e6, 768, 12, 12),
    "gpt-350m": _gpt(350e6, 1024, 24, 16),
    "gpt-760m": _gpt(760e6, 1536, 24, 16),
    "gpt-1.3b": _gpt(1.3e9, 2048, 24, 32),
    "gpt-2.6b": _gpt(2.6e9, 2560, 32, 32),
    "gpt-6.7b": _gpt(6.7e9, 4096, 32, 32),
    "gpt-15b": _gpt(15e9, 5120, 48, 40),
    "gpt-39b": _gpt(39e9, 8192, 48, 64),
    "gpt-76b": _gpt(76e9, 10240, 60, 80),
    "llama-3-8b": _llama(8e9, 4096, 32, 32, 14336),
    "llama-3-70b": _llama(70e9, 8192, 80, 64, 28672),
    "t5-small": _t5(60e6, 512, 6, 8),
    "t5-base": _t5(220e6, 768, 12, 12),
    "t5-large": _t5(770e6, 1024, 24, 16),
    "vit-b16": _vit(86e6, 768, 12, 12, 16),
    "vit-l16": _vit(307e6, 1024, 24, 16, 16),
    "vit-h14": _vit(632e6, 1280, 32, 16, 14),
    "moe-380m": _moe(380e6, 768, 8, 8),
    "moe-690m": _moe(690e6, 768, 8, 16),
    "moe-1.3b": _moe(1.3e9, 768, 16, 16),
    "moe-2.4b": _moe(2.4e9, 1024, 16, 16),
    "moe-7.1b": _moe(7.1e9, 1280, 16, 32),
    "moe-10b": _moe(10e9, 1536, 16, 32),
    "moe-27b": _moe(27e9, 2048, 16, 48),
    "moe-70b": _moe(70e9, 2048, 32, 64),
    "moe-140b": _moe(140e9, 2048, 32, 128),
    "wresnet-250m": _resnet(250e6, 50, 160, 2),
    "wresnet-500m": _resnet(500e6, 50, 224, 2),
    "wresnet-1b": _resnet(1e9, 50, 320, 2),
    "wresnet-2b": _resnet(2e9, 50, 448, 2),
    "wresnet-4b": _resnet(4e9, 50, 640, 2),
    "wresnet-6.8b": _resnet(6.8e9, 50, 320, 16),
    "wresnet-13b": _resnet(13e9, 101, 320, 16),
}
