"""The divisors of a number, which may be as large as a batch."""

from __future__ import annotations

import math


def divisors(n: int) -> tuple[int, ...]:
    """All divisors of `n`, the smallest first. Takes sqrt(n) divisions: each divisor below the root has one above."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*low, *(n // d for d in low)}))
