"""Seconds of matrix products: the planner's formula beside the tables that XLA ships, measured on H100s.

    python -m benchmarks.gpu_products [--fit] [--json FILE]

The products are the ones of transformers: tokens with weights, whole and split over 2 to 8 devices, their gradients,
logits, and attention heads. Each is compiled for an H100, on a machine without a GPU, and XLA writes the time from its
tables into the program. These times are for each product by itself, so `KernelRates.sustained` does not count. `--fit`
prints the efficiency and the exposed bytes with the least error.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks.registry import Rows, Size, benchmark
from benchmarks.run import table
from minialpa.cluster import ClusterSpec, DeviceSpec, KernelRates
from minialpa.inter.lower.exported_functions import export_function
from minialpa.programs.program import Function
from minialpa.support.files import write_text
from minialpa.xla_gpu.compile import compile_for_gpus
from minialpa.xla_gpu.targets import TARGETS
from minialpa.xla_gpu.timeline import timeline
from minialpa.xla_gpu.worker import CompileRequest


class Product(NamedTuple):
    """[b m k] times [b k n], or [m k] times [k n] if b is 1."""

    dtype: str
    b: int
    m: int
    k: int
    n: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        batch = (self.b,) if self.b > 1 else ()
        return (*batch, self.m, self.k), (*batch, self.k, self.n)

    @property
    def flops(self) -> float:
        return 2.0 * self.b * self.m * self.k * self.n

    @property
    def n_bytes(self) -> float:
        elements = self.b * (self.m * self.k + self.k * self.n + self.m * self.n)
        return float(elements * jnp.dtype(self.dtype).itemsize)


def products() -> list[Product]:
    """The products to compare, without duplicates."""
    found = []
    for dtype, tokens, hidden in itertools.product(
        ("bfloat16", "float32"), (2048, 8192, 32768), (1024, 2048, 4096, 8192)
    ):
        for parts in (1, 2, 4, 8):
            for width in (hidden, 3 * hidden, 4 * hidden):
                shard = width // parts
                found.append(Product(dtype, 1, tokens, hidden, shard))
                found.append(Product(dtype, 1, tokens, shard, hidden))
            found.append(Product(dtype, 1, hidden, tokens, 4 * hidden // parts))
        found.append(Product(dtype, 1, tokens, hidden, 32000))
    for dtype, heads, length, width in itertools.product(
        ("bfloat16", "float32"), (16, 64, 256), (512, 1024, 2048), (64, 128)
    ):
        found += [Product(dtype, heads, length, width, length), Product(dtype, heads, length, length, width)]
    return list(dict.fromkeys(one for one in found if one.n_bytes < 8e9))


def table_seconds(chosen: Sequence[Product]) -> NDArray[np.float64]:
    """Seconds by XLA's tables."""
    made = compile_for_gpus([_request(one) for one in chosen])
    return np.array([timeline(one.text, lambda _: 0.0).kernels_s for one in made])


def _request(product: Product) -> CompileRequest:
    def fun(x: jax.Array, y: jax.Array) -> tuple[jax.Array]:
        return (jnp.matmul(x, y),)

    avals = tuple(jax.core.ShapedArray(shape, jnp.dtype(product.dtype)) for shape in product.shapes)
    function = Function(
        name="product",
        mesh=0,
        fun=fun,
        in_avals=avals,  # type: ignore[arg-type]
        in_specs=(PartitionSpec(),) * 2,
        out_avals=tuple(jax.eval_shape(fun, *avals)),
        out_specs=(PartitionSpec(),),
        donated=(),
    )
    return CompileRequest(export_function(function, (1,), "cuda"), (1,), 1, TARGETS["h100"])


def predicted_seconds(chosen: Sequence[Product], device: DeviceSpec) -> NDArray[np.float64]:
    """Seconds by the planner's formula, for each product by itself."""
    rate = {"float32": "tensorfloat32"}
    if device.kernels is not None:
        device = dataclasses.replace(device, kernels=dataclasses.replace(device.kernels, sustained=1.0))
    return np.array(
        [device.product_s(one.flops, one.n_bytes, rate.get(one.dtype, one.dtype)) + device.launch_s for one in chosen]
    )


def fitted(chosen: Sequence[Product], seconds: NDArray[np.float64], device: DeviceSpec) -> KernelRates:
    """The constants with the least mean error, as logarithms of ratios."""
    assert device.kernels is not None
    start = device.kernels

    def rates(logs: NDArray[np.float64]) -> KernelRates:
        efficiency, exposed = np.exp(logs)
        return dataclasses.replace(start, product_efficiency=efficiency, exposed_bytes=exposed)

    def error(logs: NDArray[np.float64]) -> float:
        predicted = predicted_seconds(chosen, dataclasses.replace(device, kernels=rates(logs)))
        return float(np.mean(np.abs(np.log(predicted / seconds))))

    first = np.log([start.product_efficiency, start.exposed_bytes])
    found = minimize(error, first, method="Nelder-Mead", options={"maxiter": 400})
    return rates(found.x)


def summary(chosen: Sequence[Product], seconds: NDArray[np.float64], device: DeviceSpec) -> Rows:
    """Errors of the formula, for each dtype, of single products and of batches."""
    ratios = predicted_seconds(chosen, device) / seconds
    rows = []
    for dtype, is_batch in itertools.product(("bfloat16", "float32"), (False, True)):
        group = np.array([one.dtype == dtype and (one.b > 1) == is_batch for one in chosen])
        if group.any():
            rows.append(_row(f"{dtype}, {'batches' if is_batch else 'single'}", ratios[group], seconds[group]))
    return [*rows, _row("all", ratios, seconds)]


def _row(name: str, ratios: NDArray[np.float64], seconds: NDArray[np.float64]) -> dict[str, Any]:
    errors = np.abs(ratios - 1)
    return {
        "products": name,
        "n": len(ratios),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.percentile(errors, 90)),
        "predicted_to_table": float((ratios * seconds).sum() / seconds.sum()),
    }


@benchmark("gpu_products")
def gpu_products(size: Size) -> Rows:
    """Seconds of matrix products by the planner's formula, next to XLA's tables for H100s."""
    chosen = products() if size == "full" else products()[:2]
    return summary(chosen, table_seconds(chosen), ClusterSpec.preset("h100").device)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fit", action="store_true", help="print the constants that come closest")
    parser.add_argument(
        "--json", type=Path, default=None, metavar="FILE", help="write seconds of each product to this file"
    )
    options = parser.parse_args()

    chosen, device = products(), ClusterSpec.preset("h100").device
    seconds = table_seconds(chosen)
    print(table(summary(chosen, seconds, device)))
    if options.json is not None:
        rows = [one._asdict() | {"seconds": s} for one, s in zip(chosen, seconds.tolist(), strict=True)]
        write_text(options.json, json.dumps(rows, indent=1))
    if options.fit:
        rates = fitted(chosen, seconds, device)
        print(rates)
        print(table(summary(chosen, seconds, dataclasses.replace(device, kernels=rates))))


if __name__ == "__main__":
    main()
