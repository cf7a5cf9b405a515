"""Calibration: the devices of this process in, a `ClusterSpec` with measured rates and links out.

See README.md. Imports: `cluster`, `errors` and `session`.
"""

from __future__ import annotations

from minialpa.calibration.calibrate import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
