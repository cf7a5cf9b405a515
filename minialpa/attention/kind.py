"""The parameter of the primitives of attention; `operation` has the formulas that it names parts of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What an attention may compute in float16: products of queries and keys; their scale; exp(score - max_s score); and
#: p_bar in the gradient. The cotangents of a product or a scale in float16 are in float16, too.
Step = Literal["product", "scale", "softmax", "p_bar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What the operands of an attention are, and how scores are made of them.

    Attributes:
        scale: factor of the products of queries and keys.
        left: how many positions back a query sees; None for all.
        right: how many positions ahead a query sees; None for all, 0 for a causal mask.
        masked_score: the score of what is masked; -inf, or a finite number, at which a query that sees nothing averages
            over all keys.
        n_biases: number of arrays that are added to the scores.
        n_masks: number of boolean arrays; a score is masked where one of them is False.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    masked_score: float = float("-inf")
    n_biases: int = 0
    n_masks: int = 0

    @property
    def has_window(self) -> bool:
        """Whether positions decide on what is seen, so that they are operands."""
        return self.left is not None or self.right is not None

    @property
    def n_positions(self) -> int:
        """Number of operands that are positions: those of the queries and those of the keys, or none."""
        return 2 if self.has_window else 0

    def is_float16(self, step: Step) -> bool:
        """Whether a step is rounded to float16, where all that is beyond 65504 is infinite."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Float16Attention(Attention):
    """An attention with some steps in float16.

    Attributes:
        float16: these steps, sorted.
    """

    float16: tuple[Step, ...]

    def is_float16(self, step: Step) -> bool:
        return step in self.float16
