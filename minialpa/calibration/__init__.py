"""Calibration: the devices of this process in, a cluster with measured rates and links out.

`measure` times products, kernels that only move bytes, and sums, on all devices at once. `calibrate` fits the constants
of `ClusterSpec` to their seconds. Imports: `cluster`, `errors` and `session`.
"""

from __future__ import annotations

from minialpa.calibration.calibrate import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
