"""Attention in plain jax, block by block (Rabe and Staats 2021; Dao et al. 2022), for machines without a kernel."""

from __future__ import annotations

from typing import Any


def attend(*operands: Any, kind: Any) -> list[Any]:
    raise NotImplementedError


def differentiate(*operands: Any, kind: Any, dtypes: Any, wants_bias: Any) -> list[Any]:
    raise NotImplementedError
