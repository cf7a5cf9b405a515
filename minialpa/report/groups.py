"""Equal layers once: the operators, collectives or arguments of a plan in, one group for all equal layers out.

block_0/attention/qkv, block_1/attention/qkv, ...   ->   block_0-23/attention/qkv, 24 times
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from minialpa.plan.text import ranges_text

T = TypeVar("T")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Group(Generic[T]):
    """Names differ in numbers alone; ranges replace these in `name`."""

    name: str
    members: tuple[T, ...]


def equal_layers(items: Iterable[T], name: Callable[[T], str], kind: Callable[[T], Hashable]) -> list[Group[T]]:
    """In the order of first members; a group has one kind."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault((_NUMBER.sub("*", name(item)), kind(item)), []).append(item)
    return [Group(_name_of([name(item) for item in members]), tuple(members)) for members in groups.values()]


def _name_of(names: Sequence[str]) -> str:
    columns = [ranges_text(map(int, column)) for column in zip(*map(_NUMBER.findall, names), strict=True)]
    found = iter(columns)
    return _NUMBER.sub(lambda _: next(found), names[0])


def common_root(names: Sequence[str]) -> str:
    """The first part of all paths; empty if they differ, or if no path has further parts."""
    roots = {name.partition("/")[0] for name in names if name}
    return roots.pop() if len(roots) == 1 and any("/" in name for name in names) else ""


def without_root(names: Sequence[str]) -> list[str]:
    root = common_root(names)
    return [name.removeprefix(f"{root}/") if root else name for name in names]
