"""Compiled functions on CPU devices: few calls are unfinished at a time, and no result is kept that is not needed."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from minialpa.runtime.steps.compiled import PacedCall


class Result:
    """An array that notes whether somebody waited for it, and may have been taken over by another call."""

    def __init__(self, taken: bool) -> None:
        self.taken, self.waited = taken, False

    def block_until_ready(self) -> None:
        self.waited = True
        if self.taken:
            raise RuntimeError("BlockHostUntilReady() called on deleted or donated buffer")


@pytest.mark.parametrize("taken", [False, True])
def test_a_call_waits_for_the_smallest_result_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    monkeypatch.setattr(PacedCall, "_unfinished", deque())
    calls: list[list[Result]] = []

    def compiled(*_: Any) -> list[Result]:
        calls.append([Result(taken), Result(taken), Result(taken)])
        return calls[-1]

    run = PacedCall(compiled, sizes=[6, 1, 4])
    for _ in range(40):
        assert run("x") is calls[-1]
    waited = [smallest.waited for _, smallest, _ in calls]
    assert waited == [True] * 24 + [False] * 16
    assert not any(large.waited or middle.waited for large, _, middle in calls)
