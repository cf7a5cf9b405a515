"""The parameter of the primitives of attention; `operation` has the formulas that it names parts of."""

from __future__ import annotations

from dataclasses import dataclass


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
