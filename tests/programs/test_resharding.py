"""Reshardings: what the verifier refuses, and the bytes on each link."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from minialpa.errors import VerifyError
from minialpa.programs.resharding import Box, Move, Resharding, bytes_per_link, verify_resharding

WHOLE: Box = ((0, 6),)
LEFT: Box = ((0, 3),)
RIGHT: Box = ((3, 6),)


def resharding(*moves: Move) -> Resharding:
    """A vector from devices 0 and 1, which have a half each, whole to devices 2 and 3, 4 and 5: hosts of two."""
    landing = tuple((device, WHOLE) for device in (2, 3, 4, 5))
    return Resharding(
        shape=(6,),
        item_bytes=4,
        source_boxes=((0, LEFT), (1, RIGHT)),
        landing_boxes=landing,
        landing=P(),
        moves=moves,
    )


#: Host 1 gets both halves and relays the left one.
GOOD = (
    Move(LEFT, 0, (2, 3)),
    Move(RIGHT, 1, (2, 3)),
    Move(RIGHT, 1, (4, 5)),
    Move(LEFT, 2, (4, 5), relayed=True),
)


def refuse(value: Resharding, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify_resharding(value, 2)


def changed(i: int, **change: Any) -> Resharding:
    """The good one with move `i` changed."""
    return resharding(*GOOD[:i], dataclasses.replace(GOOD[i], **change), *GOOD[i + 1 :])


def test_a_good_resharding_is_accepted() -> None:
    verify_resharding(resharding(*GOOD), 2)
    assert bytes_per_link(resharding(*GOOD), 2) == {(0, 1): 24, (0, 2): 12, (1, 2): 12}
    assert bytes_per_link(resharding(*GOOD), 8) == {(0, 0): 48}


@pytest.mark.parametrize("box", [((0, 7),), ((3, 3),), ((-1, 3),), ()], ids=str)
def test_a_move_of_no_part_of_the_array_is_refused(box: Box) -> None:
    refuse(changed(0, box=box), "Move 0 takes .*, which is no part of an array of shape \\(6,\\)")


@pytest.mark.parametrize("targets", [(), (2, 2), (3, 4), (0, 1), (2, 7)], ids=str)
def test_targets_that_are_not_devices_of_one_target_host_are_refused(targets: tuple[int, ...]) -> None:
    refuse(changed(0, targets=targets), "not different devices of one target host")


@pytest.mark.parametrize("source", [1, 2, 7])
def test_a_sender_that_does_not_hold_the_part_is_refused(source: int) -> None:
    refuse(changed(0, source=source), f"from device {source}, which does not hold it")


@pytest.mark.parametrize("source", [0, 4, 7])
def test_a_relay_that_did_not_get_the_part_is_refused(source: int) -> None:
    refuse(changed(3, source=source), f"from device {source}, which does not hold it")


def test_relaying_before_the_part_is_there_is_refused() -> None:
    refuse(resharding(GOOD[3], *GOOD[:3]), "which does not hold it")


def test_a_host_that_gets_more_after_it_began_to_relay_is_refused() -> None:
    """Each of two hosts gets a half and relays it: both would wait to have all."""
    crossed = (Move(LEFT, 0, (2, 3)), Move(RIGHT, 1, (4, 5)), Move(LEFT, 2, (4, 5), True), Move(RIGHT, 4, (2, 3), True))
    refuse(resharding(*crossed), "Move 3 goes to host 1, which relays already")


def test_elements_that_cross_twice_are_refused() -> None:
    apart = [Move(LEFT, 0, (device,)) for device in (2, 3)]
    refuse(resharding(*apart, *GOOD[1:]), "cross to host 1 twice")
    refuse(resharding(Move(((0, 2),), 0, (2, 3)), Move(((1, 3),), 0, (2, 3)), GOOD[1]), "cross to host 1 twice")


def test_a_part_outside_of_the_shard_is_refused() -> None:
    cut = dataclasses.replace(resharding(*GOOD[:2]), landing_boxes=((2, LEFT), (3, RIGHT)))
    refuse(cut, "Device 2 gets .*, which is outside of its shard")


@pytest.mark.parametrize("missing", range(3))
def test_a_shard_that_is_not_filled_is_refused(missing: int) -> None:
    kept = [move for i, move in enumerate(GOOD[:3]) if i != missing]
    refuse(resharding(*kept), "does not get all of its shard")
