"""Calibration: the devices of this process go in, and a cluster whose rates and links are measured comes out.

`measure` runs products, kernels that only move bytes, and sums on all devices at once; `fit` finds the constants of
`ClusterSpec` that explain their seconds. Imports: `cluster`, `errors` and `session`.
"""

from __future__ import annotations

from minialpa.calibration.calibrate import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
