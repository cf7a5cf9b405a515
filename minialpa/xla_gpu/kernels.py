"""An instruction of a compiled program in, the seconds of its kernel out.

XLA writes estimates into a program: of products from tables that were measured on H100s, of other kernels from a model
of operations and bytes. Some cannot be right:

    products on GPUs without tables   8 to 16 times too long: the model has no tensor cores
    products missing in the tables    up to 40 times too long: lengths that are no power of two, sums in parts
    sums along outer dimensions       up to 27 times the time of their bytes
    softmaxes in Triton               almost 0
    scatters in place                 the time of the whole array, of which they read and write some elements
    convolutions of cuDNN             no estimate

These have the seconds of the planner's formula for products, or of moving their bytes.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass

from minialpa.cluster import DeviceSpec
from minialpa.hlo.analysis import flops_of
from minialpa.hlo.text import Computation, Instruction, Module, array_dims, array_sizes

_COSTS = re.compile(r'"reification_cost":(\[[^\]]*\])')
#: Names of estimates: from tables, and by XLA's roofline model.
_TABLE, _MODEL = "sol", ""
#: Above this multiple of the formula, the table lacks the product. Otherwise both agree within a factor of two
#: (`python -m benchmarks.gpu_products`).
_MOST_OF_PRODUCT = 3.0
#: Longest time of a kernel without products over the time of its bytes: loads use a quarter of each memory sector.
_MOST_OF_BYTES = 4.0
#: Rates of products by dtype; float32 in jax's default precision.
_RATES = {"bf16": "bfloat16", "f16": "float16", "f32": "tensorfloat32", "f64": "float64"} | {
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Product:
    """Of a kernel, convolutions included. rate: names the device's rate."""

    flops: float
    rate: str


@dataclass(frozen=True, eq=False)
class Kernels:
    """Without a device, XLA's estimates count."""

    module: Module
    device: DeviceSpec | None

    def seconds(self, instruction: Instruction, around: Computation) -> float:
        """0 if the instruction is no kernel."""
        estimates, device = _estimates_s(instruction), self.device
        estimate_s = estimates.get(_TABLE, estimates.get(_MODEL, 0.0))
        if device is None or not (estimates or "__cudnn$conv" in instruction.attributes):
            return estimate_s

        n_bytes = self._bytes(instruction, around)
        product = self.product(instruction, around)
        if product is None:
            moving_s = n_bytes / device.memory_bandwidth
            is_triton = '"kind":"__triton"' in instruction.attributes
            has_estimate = not is_triton and self._update_bytes(instruction) is None
            return min(estimate_s, _MOST_OF_BYTES * moving_s) if has_estimate else moving_s

        formula_s = device.product_s(product.flops, n_bytes, product.rate) + device.launch_s
        if not 0 < estimates.get(_TABLE, 0.0) <= _MOST_OF_PRODUCT * formula_s:
            return formula_s
        # The table has almost 0 for tiny products. Its times are of single products: under a power limit, many in a row
        # take longer.
        return max(estimate_s / (1.0 if device.kernels is None else device.kernels.sustained), device.launch_s)

    def product(self, instruction: Instruction, around: Computation) -> Product | None:
        """In the instruction, or the computation that it calls."""
        shapes = self._shapes(around.name)
        if flops := flops_of(instruction, shapes):
            dtype = shapes[instruction.operands[0]].partition("[")[0]
            return Product(flops, _RATES.get(dtype, "float32"))
        inside = [
            product
            for name in instruction.called("calls")
            if (called := self.module.computations.get(name)) is not None
            for one in called.instructions
            if (product := self.product(one, called)) is not None
        ]
        return Product(sum(one.flops for one in inside), inside[0].rate) if inside else None

    def _bytes(self, instruction: Instruction, around: Computation) -> float:
        """An upper bound, since a kernel may read slices."""
        shapes = self._shapes(around.name)
        texts = [instruction.shape, *(shapes[name] for name in instruction.operands if name in shapes)]
        update_bytes = self._update_bytes(instruction)
        if update_bytes is not None:
            # In place, so the array is an operand and the result.
            texts = [text for text in texts[1:] if array_dims(text) != array_dims(instruction.shape)]
        return (update_bytes or 0.0) + sum(n_bytes for text in texts for _, n_bytes in array_sizes(text))

    def _update_bytes(self, instruction: Instruction) -> float | None:
        """Of the elements that a scatter changes in an array of the shape of its result; None of other kernels."""
        for name in instruction.called("calls"):
            inside = self.module.computations.get(name)
            for one in inside.instructions if inside is not None else ():
                if one.opcode == "scatter" and array_dims(one.shape) == array_dims(instruction.shape):
                    return float(sum(n for _, n in array_sizes(self._shapes(name)[one.operands[2]])))
        return None

    @functools.cache  # noqa: B019 - lives as long as the reading of one program
    def _shapes(self, computation: str) -> dict[str, str]:
        return {one.name: one.shape for one in self.module.computations[computation].instructions}


def _estimates_s(instruction: Instruction) -> dict[str, float]:
    found = _COSTS.search(instruction.attributes)
    costs = json.loads(found[1]) if found else []
    return {cost["name"]: float(cost["exec_time_us"]) * 1e-6 for cost in costs}
