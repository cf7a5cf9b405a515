"""The parameter `kind` of the primitives of attention; `operation` has the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Steps that may be in float16: products of queries and keys; their scale; exp(score - max_s score); p_bar in the
#: gradient. The cotangents of a product or a scale in float16 are in float16, too.
Step = Literal["product", "scale", "softmax", "p_bar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """The optional operands of an attention, and the formula of its scores.

    Attributes:
        scale: factor of the products of queries and keys.
        left: number of positions back that a query sees; None for all.
        right: number of positions ahead that a query sees; None for all, 0 for a causal mask.
        masked_score: -inf, or a finite number: then a query without visible keys averages over all keys.
        n_segments: number of pairs of arrays, of queries and of keys; a score is masked where a pair differs.
        n_masks: number of boolean arrays; a score is masked where one is False.
        float16: the sorted steps in float16, where magnitudes beyond 65504 are infinite.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    masked_score: float = float("-inf")
    n_segments: int = 0
    n_biases: int = 0
    n_masks: int = 0
    float16: tuple[Step, ...] = ()

    @property
    def has_window(self) -> bool:
        """Whether positions are operands."""
        return self.left is not None or self.right is not None

    @property
    def n_positions(self) -> int:
        """Operands with positions: 2 or 0."""
        return 2 if self.has_window else 0
