"""Rules as text: their meaning for shapes, and the reasons of refusals."""

from __future__ import annotations

from typing import Any

import pytest

from minialpa.errors import ShardingError
from minialpa.rules.notation import parse_rule


def _sizes(text: str, operands: Any, results: Any, **options: Any) -> dict[str, tuple[int, bool]]:
    """For each factor its length, and whether it may be split."""
    named = parse_rule(text, **options).named_factors(tuple(operands), tuple(results), "my kernel")
    blocked = named.blocked()
    return {name: (size, name not in blocked) for name, size in named.sizes.items()}


def test_factors_are_split_if_all_results_have_them() -> None:
    found = _sizes("b q h d, b k h d -> b q h d, b h q", [(4, 6, 2, 8), (4, 5, 2, 8)], [(4, 6, 2, 8), (4, 2, 6)])
    assert found == {"b": (4, True), "q": (6, True), "h": (2, True), "d": (8, False), "k": (5, False)}


def test_reductions_and_replication_are_said() -> None:
    shapes: Any = ([(4, 6), (6, 8)], [(4, 8)])
    assert _sizes("i k, k j -> i j", *shapes)["k"] == (6, False)
    assert _sizes("i k, k j -> i j", *shapes, reductions="k")["k"] == (6, True)
    assert _sizes("i k, k j -> i j", *shapes, reductions={"k": "max"}, need_replication="i j") == {
        "i": (4, False),
        "k": (6, True),
        "j": (8, False),
    }


def test_ellipsis_is_any_number_of_leading_dimensions() -> None:
    for leading in ((), (3,), (3, 2)):
        found = _sizes("... n, n -> ... n", [(*leading, 4), (4,)], [(*leading, 4)])
        assert list(found.values()) == [*((size, True) for size in leading), (4, True)]
    found = _sizes("... n, ...1 m -> ... m", [(2, 3, 4), (5, 6)], [(2, 3, 6)])
    assert [split for _, split in found.values()] == [True, True, False, False, True]


def test_compound_factors_follow_from_other_dimensions_or_are_given() -> None:
    found = _sizes("b (k g) d, b k d -> b (k g) d", [(2, 8, 4), (2, 2, 4)], [(2, 8, 4)])
    assert found["g"] == (4, True)
    named = parse_rule("(h d) -> h d", factor_sizes={}).named_factors(((8,),), ((2, 4),), "my kernel")
    assert named.sizes == {"h": 2, "d": 4}
    assert _sizes("b (h d) -> b (h d)", [(2, 8)], [(2, 8)], factor_sizes={"d": 4})["h"] == (2, True)


def test_a_dimension_of_length_one_is_read_by_all_shards() -> None:
    named = parse_rule("b h t, b h t -> b h t").named_factors(((4, 2, 6), (1, 2, 6)), ((4, 2, 6),), "my kernel")
    assert named.operands[1] == ((), ("h",), ("t",))
    assert not named.blocked()
    # A result of length 1 is not a shard.
    named = parse_rule("b t -> b t").named_factors(((4, 6),), ((1, 6),), "my kernel")
    assert named.blocked() == {"b"}


def test_what_only_results_have_is_not_split() -> None:
    assert _sizes("a -> a b", [(4,)], [(4, 6)])["b"] == (6, False)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("b i", {}, "Write a sharding rule as `operands -> results`"),
        (3, {}, "got 3"),
        ("b ((h d)) -> b", {}, r"The part `b \(\(h d\)\)` of the sharding rule"),
        ("b (h d -> b", {}, r"The part `b \(h d` .* cannot be read"),
        ("b () -> b", {}, "cannot be read"),
        ("b ... -> b", {}, "cannot be read"),
        ("b b -> b", {}, "Operand 0 .* has the name `b` twice"),
        ("b -> b b", {}, "Result 0 .* has the name `b` twice"),
        ("b -> b", {"reductions": ["c"]}, "`reductions` has the name `c`.*Use one of `b`"),
        ("b -> b", {"need_replication": ["c"]}, "`need_replication` has the name `c`"),
        ("b -> b", {"factor_sizes": {"c": 2}}, "`factor_sizes` has the name `c`"),
        ("b -> b", {"factor_sizes": {"b": 2}}, "Remove `b` from `factor_sizes`"),
        ("(h d) -> (h d)", {"factor_sizes": {"h": 2}}, "Remove `h` from `factor_sizes`"),
        ("(h d) -> (h d)", {"factor_sizes": {"d": 0}}, "the length 0"),
        ("b k -> b", {"reductions": {"k": "mean"}}, "has 'mean' for `k`. Choose one of sum"),
        ("b k -> b", {"reductions": "k", "need_replication": "k"}, "is in `reductions` and in"),
    ],
)
def test_malformed_rules_are_refused(text: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        parse_rule(text, **options)


@pytest.mark.parametrize(
    ("text", "operands", "results", "message"),
    [
        ("b i -> b", [(2, 3), (4,)], [(2,)], "has 1 operands, but the call has 2"),
        ("b i -> b", [(2, 3)], [(2,), (3,)], "has 1 results, but the call has 2"),
        ("b i -> b", [(2, 3, 4)], [(2,)], "has 2 dimensions for operand 0"),
        ("... b i -> b", [(2,)], [(2,)], "has 2 dimensions for operand 0"),
        ("b i -> i b", [(2, 3)], [(2, 3)], r"dimension 0 of result 0 has the length 2 instead of 3 \(i\)"),
        ("... b, ... b -> ... b", [(2, 3), (2, 2, 3)], [(2, 3)], "1 dimensions in one array and for 2 in operand 1"),
        ("b (h d) -> b", [(2, 6)], [(2,)], "does not determine the length of `d`"),
        ("b (k g), k -> b", [(2, 6), (4,)], [(2,)], "does not determine the length of `g`"),
    ],
)
def test_what_does_not_fit_a_call_is_refused(text: str, operands: Any, results: Any, message: str) -> None:
    with pytest.raises(ShardingError, match=f"my kernel.*{message}"):
        parse_rule(text).named_factors(tuple(operands), tuple(results), "my kernel")
