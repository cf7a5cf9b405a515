"""A cache of the last used values, bounded in bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Values by key. The last used values stay: as many as `max_bytes` hold, and at least one."""

    def __init__(self, max_bytes: float, size: Callable[[T], float]) -> None:
        """size: bytes of a value, computed after each use, since values may grow."""
        self.max_bytes, self._size = max_bytes, size
        self._values: dict[Hashable, tuple[T, float]] = {}  # with their bytes, the last used value last
        self.n_bytes = 0.0

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        found = self._values.get(key)
        if found is not None and next(reversed(self._values)) == key:
            return found[0]
        self._weigh_last()
        self._drop_old()
        value = self._take(key) if found is not None else make()
        self._put(key, value)
        self._drop_old()
        return value

    def __len__(self) -> int:
        return len(self._values)

    def _put(self, key: Hashable, value: T) -> None:
        n_bytes = self._size(value)
        self._values[key] = value, n_bytes
        self.n_bytes += n_bytes

    def _take(self, key: Hashable) -> T:
        value, n_bytes = self._values.pop(key)
        self.n_bytes -= n_bytes
        return value

    def _weigh_last(self) -> None:
        if self._values:
            last = next(reversed(self._values))
            self._put(last, self._take(last))

    def _drop_old(self) -> None:
        while len(self._values) > 1 and self.n_bytes > self.max_bytes:
            self._take(next(iter(self._values)))
