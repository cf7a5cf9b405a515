"""`calibrate`: devices in, the cluster that they form out, with measured rates, and how well these explain them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from minialpa.calibration.fit import fitted_bandwidth, fitted_link, fitted_rates
from minialpa.calibration.measure import Measurements, measured
from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.errors import ShardingError
from minialpa.session import describe_devices


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured cluster.

    Attributes:
        cluster: one host with the devices that were measured; links between hosts are those of its preset.
        measurements: what it was fitted to.
        product_error: median error of the seconds of products under `cluster`, relative to those measured.
        sum_error: the same of sums over all devices; 0 for one device.
    """

    cluster: ClusterSpec
    measurements: Measurements
    product_error: float
    sum_error: float

    def summary(self) -> str:
        """Rates, links and errors, as text for a terminal."""
        device, link = self.cluster.device, self.cluster.intra_host
        rates = ", ".join(f"{rate / 1e12:.4g} Tflop/s {name}" for name, rate in device.peak_flops)
        return (
            f"{self.cluster.n_devices} x {device.name}\n"
            f"products: {rates}; {device.launch_s * 1e6:.3g} us each; median error {self.product_error:.1%}\n"
            f"memory: {device.memory_bandwidth / 1e9:.4g} GB/s, {device.memory_bytes / 1e9:.4g} GB\n"
            f"links: {link.alpha_s * 1e6:.3g} us to start, {1e-9 / max(link.beta_s_per_byte, 1e-18):.4g} GB/s; "
            f"median error {self.sum_error:.1%}"
        )


def calibrate(devices: Sequence[jax.Device] | None = None) -> Calibration:
    """Measure devices of this process and fit the constants of a cluster to them; takes some minutes.

    devices: by default all local devices. Raises ShardingError for devices of several kinds.
    """
    devices = list(devices if devices is not None else jax.local_devices())
    if len({device.device_kind for device in devices}) != 1:
        raise ShardingError("Calibrate devices of one kind at a time: `calibrate(devices)` takes those to measure.")
    return fitted(describe_devices(devices), measured(devices))


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
