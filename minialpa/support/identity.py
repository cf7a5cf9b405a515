"""`ById`: a dict key that compares objects by identity, since arrays and literals of a program have no hash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class ById(Generic[T]):
    """It keeps the object alive, so the id stays unique."""

    value: T

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
