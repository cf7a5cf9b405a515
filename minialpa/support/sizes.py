"""Bytes as text."""

from __future__ import annotations


def bytes_text(value: float) -> str:
    """Three digits and a unit: `1.25 GB`; a kB is 1000 bytes."""
    if value < 1000:
        return f"{value:.0f} B"  # an average may be less than a byte
    for unit in ("kB", "MB"):
        value /= 1000
        if value < 1000:
            return f"{value:.3g} {unit}"
    return f"{value / 1000:.3g} GB"
