"""What a rule is: it takes an equation and the forms of its operands, and returns the form of its only result.

The rules are in `layouts` and `equations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jax.extend.core import JaxprEqn

from minialpa.ir.equations import Atom
from minialpa.recognition.indices import Indices
from minialpa.recognition.terms import Form


class Known(Protocol):
    """What a rule may ask for."""

    @property
    def indices(self) -> Indices:
        """The names of indices."""

    def __getitem__(self, atom: Atom) -> Form:
        """The form of an operand."""

    def factor(self, atom: Atom) -> Form:
        """The form of an operand of a product of matrices, which is a leaf even if it is such a product itself."""


#: The form of the only result of an equation. Raises NoFormula if it has none.
Rule = Callable[[Known, JaxprEqn], Form]
