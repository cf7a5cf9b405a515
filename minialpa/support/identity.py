"""Objects as keys of dicts and sets by identity, for those without a hash, such as arrays and literals of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class ById(Generic[T]):
    """A key that equals those of the same object alone. It keeps the object alive, so that no other one gets its id."""

    value: T

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
