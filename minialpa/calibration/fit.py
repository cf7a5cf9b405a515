"""The constants of a cluster that explain measurements best: measurements in, rates and links out.

    seconds of a product = launch_s + flops / peak + exposed_bytes bytes / bandwidth       -> KernelRates
    seconds of a kernel  = bytes / bandwidth, and what each takes
    seconds of a sum     = alpha + beta 2 (n - 1) / n bytes, over n devices                -> LinkSpec

All are sums of known numbers times constants that are not negative, so that least squares of relative errors have one
answer (Lawson and Hanson 1974, as scipy has it).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from minialpa.calibration.measure import ByteTime, ProductTime
from minialpa.cluster import KernelRates, LinkSpec


def fitted_bandwidth(kernels: Sequence[ByteTime]) -> float:
    """Bytes per second that kernels read and write."""
    _, byte_s = _least_squares([[1.0, one.n_bytes] for one in kernels], [one.seconds for one in kernels])
    return 1.0 / max(byte_s, 1e-15)


def fitted_rates(products: Sequence[ProductTime], bandwidth: float) -> tuple[dict[str, float], KernelRates]:
    """Operations per second by the name of the rate, and how products differ from them."""
    names = list(dict.fromkeys(one.rate for one in products))
    rows = [[*(one.flops * (one.rate == name) for name in names), one.n_bytes, 1.0] for one in products]
    *flop_s, byte_s, launch_s = _least_squares(rows, [one.seconds for one in products])

    # A rate that bytes explain better than operations is not below what was reached.
    reached = {name: max(one.flops / one.seconds for one in products if one.rate == name) for name in names}
    peaks = {name: 1.0 / s if s > 0 else reached[name] for name, s in zip(names, flop_s, strict=True)}
    rates = KernelRates(
        product_efficiency=1.0, exposed_bytes=byte_s * bandwidth, memory_efficiency=1.0, launch_s=launch_s
    )
    return peaks, rates


def fitted_link(sums: Sequence[ByteTime], n_devices: int) -> LinkSpec:
    """The link over which `n_devices` devices add arrays."""
    passed = 2 * (n_devices - 1) / n_devices
    alpha_s, beta = _least_squares([[1.0, passed * one.n_bytes] for one in sums], [one.seconds for one in sums])
    return LinkSpec(alpha_s, beta)


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The constants that are not negative and have the least squares of relative errors."""
    weighted: NDArray[np.float64] = np.array(rows) / np.array(seconds)[:, None]
    # Columns of one magnitude, as bytes and seconds differ by many.
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(weighted / scale, np.ones(len(seconds)))
    return [float(x) for x in found / scale]
