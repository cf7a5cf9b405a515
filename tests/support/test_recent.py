"""What was used last is kept, up to a bound; what is gone is made again, the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minialpa.support.recent import Recent


@given(st.lists(st.integers(0, 9)), st.integers(0, 30))
def test_no_more_is_kept_than_there_is_room_for_but_the_last(keys: list[int], most: int) -> None:
    recent: Recent[list[int]] = Recent(most, lambda value: value[0])
    for n, key in enumerate(keys):
        assert recent.once(key, lambda key=key: [key])[0] == key
        kept = set(reversed(keys[: n + 1]))
        assert recent.n_bytes <= max(most, key) and len(recent) <= len(kept)


def test_what_was_used_last_stays() -> None:
    made: list[str] = []
    recent: Recent[str] = Recent(2, len)

    def get(key: str) -> None:
        recent.once(key, lambda: made.append(key) or key)

    for key in "abacab":
        get(key)
    assert made == ["a", "b", "c", "b"]


def test_a_value_that_grows_in_use_counts_as_what_it_has_become() -> None:
    recent: Recent[list[int]] = Recent(3, len)
    grown = recent.once("grows", list)
    grown += [1, 2, 3, 4]
    recent.once("other", lambda: [1])
    assert len(recent) == 1 and recent.n_bytes == 1
