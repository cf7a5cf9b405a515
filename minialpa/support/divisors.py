"""`divisors(12)` is (1, 2, 3, 4, 6, 12)."""

from __future__ import annotations

import math


def divisors(n: int) -> tuple[int, ...]:
    """In order, by sqrt(n) divisions."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*low, *(n // d for d in low)}))
