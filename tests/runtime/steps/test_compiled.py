"""Compiled functions on CPU devices: few calls are unfinished at a time, and no result is kept that is not needed."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from minialpa.runtime.steps.compiled import PacedCall


class Result:
    """An array that notes whether somebody waited for it."""

    def __init__(self, deleted: bool) -> None:
        self.deleted, self.waited = deleted, False

    def is_deleted(self) -> bool:
        return self.deleted

    def block_until_ready(self) -> None:
        self.waited = True


@pytest.mark.parametrize("deleted", [False, True])
def test_a_call_waits_for_the_smallest_result_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch, deleted: bool) -> None:
    monkeypatch.setattr(PacedCall, "_unfinished", deque())
    calls: list[list[Result]] = []

    def compiled(*_: Any) -> list[Result]:
        calls.append([Result(deleted), Result(deleted), Result(deleted)])
        return calls[-1]

    run = PacedCall(compiled, sizes=[6, 1, 4])
    for _ in range(40):
        assert run("x") is calls[-1]
    waited = [smallest.waited for _, smallest, _ in calls]
    assert waited == [not deleted] * 24 + [False] * 16
    assert not any(large.waited or middle.waited for large, _, middle in calls)
