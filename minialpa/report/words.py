"""Specs and numbers in words: `rows over 4, columns over 2` for an operator, `split over 8` for an array."""

from __future__ import annotations

import math
from collections.abc import Sequence

from minialpa.plan.record import PlacedValue, PlannedOperator
from minialpa.sharding import Spec

#: The words of this module, in the order in which a reader meets them.
LEGEND = {
    "examples over n": "each of n devices computes its part of the examples",
    "batch over n": "each of n devices computes a part of independent products, such as heads",
    "rows over n": "each of n devices has a part of the rows (of an operator: of the first operand and the result)",
    "columns over n": "each of n devices has a part of the columns (of an operator: of the weight and the result)",
    "sums over n": "each of n devices computes a part of every sum, and a collective adds the parts",
    "in full": "each device of the stage computes the whole operator, or holds the whole array",
    "hidden": "compute runs at the same time, so that devices do not wait",
}


def operator_words(op: PlannedOperator) -> str:
    """`examples over 4, columns over 2`."""
    return ", ".join(f"{word} over {n}" for word, n in op.split) or "in full"


def hidden_words(part: float) -> str:
    """`hidden`, `20 % hidden` or `waiting`, for the part beside compute."""
    return "hidden" if part > 0.95 else "waiting" if part < 0.05 else f"{percent_text(part)} hidden"


def operator_name(primitive: str) -> str:
    """`matmul` for `dot_general`."""
    names = {"dot_general": "matmul", "conv_general_dilated": "convolution"}
    return names.get(primitive, primitive.removeprefix("minialpa_").replace("_", " "))


def place_words(module: str, part: str) -> str:
    """The module, or the pass of operations outside of modules."""
    return module or ("the update" if part in ("other", "update") else f"the {part} pass")


def array_words(spec: Spec, shape: tuple[int, ...]) -> str:
    """shape: of the mesh."""
    parts = []
    for dim, axes in enumerate(spec.dims):
        n = math.prod(shape[axis] for axis in axes)
        if n > 1:
            parts.append(f"{_dim_word(dim, len(spec.dims))} over {n}")
    return ", ".join(parts) or "in full"


def _dim_word(dim: int, ndim: int) -> str:
    if ndim == 1:
        return "split"
    return ("rows", "columns")[dim] if ndim == 2 else f"dimension {dim}"


def placement_words(value: PlacedValue, shapes: Sequence[tuple[int, ...]]) -> str:
    """shapes: of all meshes."""
    words = {array_words(spec, shapes[mesh]) for mesh, spec in zip(value.mesh_ids, value.specs, strict=True)}
    memory = "" if value.memory_kind == "device" else " in host memory"
    return (" or ".join(sorted(words)) or "not used") + memory


def number_text(value: float) -> str:
    """`549,000`: three digits, with separators."""
    if value >= 1000:
        digits = max(0, len(str(int(value))) - 3)
        return f"{round(value, -digits):,.0f}"
    return f"{value:.3g}"


def percent_text(part: float) -> str:
    """`0.04 %`, `3.2 %`, `45 %`."""
    percent = 100 * part
    if 99.5 <= percent < 99.95:
        return f"{percent:.1f} %"
    return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.1f} %" if percent >= 0.095 else f"{percent:.2g} %"
