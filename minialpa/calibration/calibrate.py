"""Measured seconds in, a cluster with fitted rates and links out.

    seconds of a product = launch_s + flops / peak + exposed_bytes * bytes / bandwidth    -> KernelRates
    seconds of a kernel  = constant + bytes / bandwidth
    seconds of a sum     = alpha + beta * 2 (n - 1) / n * bytes, over n devices         -> LinkSpec

Each is linear in unknown constants >= 0, so least squares of relative errors have one solution (Lawson and Hanson,
1974, as in scipy).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from minialpa.calibration.measure import ByteTime, Measurements, ProductTime, measured
from minialpa.cluster import ClusterSpec, KernelRates, LinkSpec, LogicalMesh
from minialpa.errors import ShardingError
from minialpa.session import describe_devices
from minialpa.support.private_jax import api_boundary
from minialpa.support.progress import phase


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured cluster.

    cluster: one host with the measured devices. Links between hosts come from its preset.
    product_error: median relative error of the seconds of products under `cluster`.
    sum_error: the same for sums over all devices; 0 for one device.
    """

    cluster: ClusterSpec
    measurements: Measurements
    product_error: float
    sum_error: float

    def summary(self) -> str:
        device, link = self.cluster.device, self.cluster.intra_host
        rates = ", ".join(f"{rate / 1e12:.4g} Tflop/s {name}" for name, rate in device.peak_flops)
        return (
            f"{self.cluster.n_devices} x {device.name}\n"
            f"products: {rates}; {device.launch_s * 1e6:.3g} us each; median error {self.product_error:.1%}\n"
            f"memory: {device.memory_bandwidth / 1e9:.4g} GB/s, {device.memory_bytes / 1e9:.4g} GB\n"
            f"links: {link.alpha_s * 1e6:.3g} us to start, {1e-9 / max(link.beta_s_per_byte, 1e-18):.4g} GB/s; "
            f"median error {self.sum_error:.1%}"
        )


@api_boundary
def calibrate(devices: Sequence[jax.Device] | None = None) -> Calibration:
    """Measure devices of this process, which takes minutes, and fit the constants of a cluster to them.

    devices: None for all local devices. Raises ShardingError for devices of several kinds.
    """
    devices = list(devices if devices is not None else jax.local_devices())
    if len({device.device_kind for device in devices}) != 1:
        kinds = ", ".join(sorted({device.device_kind for device in devices})) or "no device"
        raise ShardingError(f"Call `calibrate(devices)` with devices of one kind; got {kinds}.")
    with phase("calibrating") as report:
        return fitted(describe_devices(devices), measured(devices, report))


def fitted(preset: ClusterSpec, found: Measurements) -> Calibration:
    """`preset` with constants that explain `found`."""
    bandwidth = fitted_bandwidth(found.kernels)
    peaks, kernels = fitted_rates(found.products, bandwidth)
    device = dataclasses.replace(
        preset.device, peak_flops=tuple(sorted(peaks.items())), memory_bandwidth=bandwidth, kernels=kernels
    )
    link = fitted_link(found.sums, found.n_devices) if found.sums else preset.intra_host
    cluster = dataclasses.replace(preset, device=device, intra_host=link)

    mesh = LogicalMesh((found.n_devices,), (link.alpha_s,), (link.beta_s_per_byte,))
    of_products = [
        abs((device.product_s(one.flops, one.n_bytes, one.rate) + device.launch_s) / one.seconds - 1)
        for one in found.products
    ]
    of_sums = [abs(mesh.all_reduce_s(one.n_bytes, (0,)) / one.seconds - 1) for one in found.sums]
    return Calibration(cluster, found, statistics.median(of_products), statistics.median(of_sums or [0.0]))


# ---- fit -------------------------------------------------------------------------------------------------------------


def fitted_bandwidth(kernels: Sequence[ByteTime]) -> float:
    """Bytes per second."""
    _, byte_s = _least_squares([[1.0, one.n_bytes] for one in kernels], [one.seconds for one in kernels])
    return 1.0 / max(byte_s, 1e-15)


def fitted_rates(products: Sequence[ProductTime], bandwidth: float) -> tuple[dict[str, float], KernelRates]:
    """Operations per second by rate, and the other constants of products."""
    names = list(dict.fromkeys(one.rate for one in products))
    rows = [[*(one.flops * (one.rate == name) for name in names), one.n_bytes, 1.0] for one in products]
    *flop_s, byte_s, launch_s = _least_squares(rows, [one.seconds for one in products])

    # If bytes alone explain the seconds, the rate is the largest measured one.
    reached = {name: max(one.flops / one.seconds for one in products if one.rate == name) for name in names}
    peaks = {name: 1.0 / s if s > 0 else reached[name] for name, s in zip(names, flop_s, strict=True)}
    rates = KernelRates(
        product_efficiency=1.0, exposed_bytes=byte_s * bandwidth, memory_efficiency=1.0, launch_s=launch_s
    )
    return peaks, rates


def fitted_link(sums: Sequence[ByteTime], n_devices: int) -> LinkSpec:
    passed = 2 * (n_devices - 1) / n_devices  # Each device sends this many times its own bytes.
    alpha_s, beta = _least_squares([[1.0, passed * one.n_bytes] for one in sums], [one.seconds for one in sums])
    return LinkSpec(alpha_s, beta)


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Constants c >= 0 that minimise the sum of (rows c / seconds - 1)^2."""
    weighted: NDArray[np.float64] = np.array(rows) / np.array(seconds)[:, None]
    # Bytes and seconds differ by many magnitudes: scale all columns to 1.
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(weighted / scale, np.ones(len(seconds)))
    return [float(x) for x in found / scale]
