"""Stages in short memory are solved with ever less room until one solution fits, or at once where the room is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from minialpa import AutoShardingOption
from minialpa.errors import InfeasibleError
from minialpa.inter.search import stage_in_memory
from minialpa.intra.graph.memory_constraints import MemoryLimit, Usage

LIMIT = 1000.0
#: Something is counted; what it is does not matter here.
COUNTED = MemoryLimit(LIMIT, (Usage(None, 1, 0, 1),))  # type: ignore[arg-type]


def solve(patch: pytest.MonkeyPatch, needs: Callable[[float], float], guess: float) -> tuple[Any, list[float]]:
    """The bytes that the solution needs, and the rooms that were tried. needs: bytes that the solution for a room
    takes in the end; inf if there is none."""
    rooms: list[float] = []

    def solved(_: Any, room: MemoryLimit, __: float) -> Any:
        rooms.append(room.limit_bytes)
        n_bytes = needs(room.limit_bytes)
        if math.isinf(n_bytes):
            raise InfeasibleError("Nothing fits; see `memory_limit_bytes`.")
        memory = SimpleNamespace(needed=n_bytes, peak_bytes=lambda _: n_bytes, largest=())
        return SimpleNamespace(sharding=SimpleNamespace(counted_bytes=room.limit_bytes), memory=memory)

    patch.setattr(stage_in_memory, "_solved", solved)
    patch.setattr(stage_in_memory, "needed", lambda memory, _: memory.needed)
    stage: Any = SimpleNamespace(solver=None)
    found = stage_in_memory._within_limit(stage, AutoShardingOption(), ((1,),), COUNTED, guess)
    return found.memory.needed, rooms


def test_room_shrinks_by_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert solve(monkeypatch, lambda room: room + 50, 0.0) == (1000.0, [1000.0, 950.0])


def test_a_guess_that_fits_is_the_only_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert solve(monkeypatch, lambda room: room + 45, 50.0) == (995.0, [950.0])


@pytest.mark.parametrize("excess", [0.0, 60.0])
def test_a_guess_that_leaves_much_or_does_not_fit_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, excess: float
) -> None:
    needed, rooms = solve(monkeypatch, lambda room: room + excess, 50.0)
    without, usual_rooms = solve(monkeypatch, lambda room: room + excess, 0.0)
    assert (needed, rooms) == (without, [950.0, *usual_rooms])


def test_a_guess_with_too_little_room_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(room: float) -> float:
        return room if room > 960 else math.inf

    assert solve(monkeypatch, needs, 50.0) == (1000.0, [950.0, 1000.0])


def test_a_guess_is_taken_in_the_end_if_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(room: float) -> float:
        return 900.0 if room == 700.0 else 2000.0

    assert solve(monkeypatch, needs, 300.0)[0] == 900.0
    with pytest.raises(InfeasibleError, match="smallest plan found needs"):
        solve(monkeypatch, needs, 0.0)


def test_where_nothing_fits_the_error_is_the_same_with_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    for guess in (0.0, 300.0):
        with pytest.raises(InfeasibleError, match="memory_limit_bytes"):
            solve(monkeypatch, lambda room: math.inf, guess)
