"""The rule table: every rule keeps the laws of rule_laws.py, and the common ones read as expected."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa.errors import VerifyError
from minialpa.rules import known_rules
from minialpa.rules.known_rules import factors_of, has_rule, known_primitives, replicated_factors, rule
from tests.rules.rule_laws import cases_of, check_all, check_halving, check_linearity, equations_of, notation, only, vjp
from tests.rules.rule_programs import PROGRAMS, cases, equations
from tests.rules.rules_doc import PATH, table
from tests.skips import skip

#: Primitives that the rule table knows and jax 0.10 does not have.
_NEW_PRIMITIVES = {"log2", "one_minus_square", "polynomial"}
#: Primitives that no CPU computes; separate tests check their factors.
_GPU_PRIMITIVES = {"dot_product_attention_bwd_wrapper", "dot_product_attention_fwd_wrapper"}
#: Programs that are compiled together, which takes less time than many small compilations.
GROUPS = [tuple(PROGRAMS)[i : i + 8] for i in range(0, len(PROGRAMS), 8)]


@pytest.mark.parametrize("programs", GROUPS, ids=lambda programs: f"{programs[0]} to {programs[-1]}")
def test_rules_keep_their_laws(programs: tuple[str, ...], seed: int) -> None:
    found = cases(programs)
    assert {case.eqn.primitive.name for case in found} <= set(known_primitives())
    check_all(found)
    check_linearity(found, np.random.default_rng(seed))


def test_every_rule_has_a_case() -> None:
    seen = {eqn.primitive.name for program in PROGRAMS for eqn in equations(program)}
    assert set(known_primitives()) - seen <= _NEW_PRIMITIVES | _GPU_PRIMITIVES


def _f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("fun", "arguments", "expected"),
    [
        (lambda x: x.reshape(4, 12), (_f32(8, 6),), "[(a b) c] -> [a (b c)]"),
        (lambda x: x.reshape(2, 9, 2), (_f32(2, 6, 3),), "[a (b C) D] -> [a (b E) F]"),
        (lambda x: lax.broadcast_in_dim(x, (4, 6, 2), (1, 2)), (_f32(1, 2),), "[1 a] -> [b c a]"),
        (lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1), (), " -> [a B']"),
        # Embedding lookup and its gradient.
        (
            lambda t, i: t.at[i].get(mode="clip"),
            (_f32(10, 4), np.zeros((2, 6), np.int32)),
            "[A' b], [c d 1] -> [c d b] sum(a)",
        ),
        (
            lambda t, i, u: t.at[i].add(u),
            (_f32(10, 4), np.zeros(6, np.int32), _f32(6, 4)),
            "[A' b], [c 1], [c b] -> [A' b] sum(c)",
        ),
        # In two groups: the outer factor of input and result channels.
        (
            lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=2),
            (_f32(2, 8, 6), _f32(6, 4, 3)),
            "[a (b c) D], [(b e) c F] -> [a (b e) G] sum(c)",
        ),
    ],
)
def test_factors_are_as_written(fun: Any, arguments: tuple[Any, ...], expected: str) -> None:
    assert notation(only(fun, *arguments)) == expected


@pytest.mark.parametrize(
    ("fun", "dtypes", "expected"),
    [
        (lax.add, "ff", ("joint", (0, 1))),
        (lax.mul, "ff", ("each", (0, 1))),
        (lax.div, "ff", ("each", (0,))),
        (lax.div, "ii", ("none", ())),
        (lax.dot, "ff", ("each", (0, 1))),
        (lambda p, x, y: lax.select_n(p, x, y), "bff", ("joint", (1, 2))),
        (lambda p, x, y: lax.select_n(p, x, y), "bbb", ("none", ())),
        (lambda x: lax.convert_element_type(x, jnp.bfloat16), "f", ("none", ())),
        (lambda x: lax.convert_element_type(x, jnp.complex64), "f", ("joint", (0,))),
        (lambda x: lax.convert_element_type(x, jnp.float32), "i", ("joint", (0,))),
        (lambda x: x.at[:2].get(mode="fill", fill_value=0), "f", ("joint", (0,))),
        (lambda x: x.at[np.array([1])].get(mode="fill", fill_value=5), "f", ("none", ())),
        (lambda x: jnp.sum(x), "f", ("joint", (0,))),
    ],
)
def test_linear_is_claimed_where_it_holds(fun: Any, dtypes: str, expected: tuple[str, tuple[int, ...]]) -> None:
    kinds = {"b": np.bool_, "f": np.float32, "i": np.int32}
    factors = factors_of(only(fun, *(np.ones(4, kinds[d]) for d in dtypes)))
    assert (factors.linear, factors.linear_operands) == expected


@pytest.mark.parametrize(
    ("fun", "shapes", "flops"),
    [
        (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), [(2, 4, 6), (2, 6, 8)], 2 * 2 * 4 * 6 * 8),
        (lax.add, [(4, 6), (4, 6)], 24),
        (jnp.sum, [(4, 6)], 24),
        (jnp.transpose, [(4, 6)], 0),
        (lambda x, w: lax.conv(x, w, (1,), "VALID"), [(2, 4, 6), (8, 4, 3)], 2 * (2 * 8 * 4) * 4 * 3),
        # Padding is not multiplied: of 6 x 3 pairs of positions, 2 meet it.
        (lambda x, w: lax.conv(x, w, (1,), "SAME"), [(2, 4, 6), (8, 4, 3)], 2 * (2 * 8 * 4) * (6 * 3 - 2)),
    ],
)
def test_flops_are_those_of_the_formula(fun: Any, shapes: list[tuple[int, ...]], flops: float) -> None:
    assert factors_of(only(fun, *(_f32(*shape) for shape in shapes))).flops == flops


def test_gradients_of_a_convolution_cost_what_it_costs() -> None:
    options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    x, w = _f32(2, 9, 9, 4), _f32(3, 3, 4, 8)
    fun = vjp(lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "SAME", **options))
    found = equations_of(jax.make_jaxpr(fun)(x, w).jaxpr)
    convolutions = [eqn for eqn in found if eqn.primitive.name == "conv_general_dilated"]
    assert len(convolutions) == 3
    assert len({factors_of(eqn).flops for eqn in convolutions}) == 1


def test_halving_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cases_of(lambda x: lax.cumsum(x, 0), np.arange(4, dtype=np.float32))
    monkeypatch.setitem(known_rules._RULES, "cumsum", known_rules._RULES["sin"])
    with pytest.raises(AssertionError, match="factor 0"):
        check_halving(found)


def test_a_second_rule_for_a_primitive_is_refused() -> None:
    with pytest.raises(VerifyError, match=r"The primitive `add` already has a rule.*bug in minialpa"):
        rule("add")(replicated_factors)


def test_a_primitive_without_a_rule_is_replicated() -> None:
    eqn = only(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), _f32(4, 6))
    assert not has_rule(eqn.primitive.name)
    factors = factors_of(eqn)
    assert factors == replicated_factors(eqn)
    assert factors.splittable == ()


def test_an_inner_factor_is_not_cut_into_blocks() -> None:
    factors = factors_of(only(lambda x: x.reshape(4, 2), _f32(8)))
    assert [factors.may_split(f, 2) for f in factors.splittable] == [True, False]
    assert factors.leading_factor(0, 0) == factors.results[0][0][0]


# ---- generated equations ---------------------------------------------------------------------------------------------


SIZES = st.sampled_from([1, 2, 4, 6])
FEW = settings(max_examples=10, deadline=None)


@FEW
@given(st.data())
def test_dot_general_halves(data: st.DataObject) -> None:
    roles = data.draw(st.lists(st.sampled_from(["batch", "contract", "lhs", "rhs"]), min_size=2, max_size=6))
    dims = {i: (role, data.draw(SIZES)) for i, role in enumerate(roles)}
    lhs = data.draw(st.permutations([i for i, (role, _) in dims.items() if role != "rhs"]))
    rhs = data.draw(st.permutations([i for i, (role, _) in dims.items() if role != "lhs"]))

    def where(role: str, side: Sequence[int]) -> tuple[int, ...]:
        return tuple(side.index(i) for i, (r, _) in dims.items() if r == role)

    numbers = tuple((where(role, lhs), where(role, rhs)) for role in ("contract", "batch"))
    x, y = (np.random.default_rng(0).random([dims[i][1] for i in side], np.float32) for side in (lhs, rhs))
    check_all(cases_of(lambda x, y: lax.dot_general(x, y, numbers), x, y))


@st.composite
def _grouped(draw: st.DrawFn, primes: Sequence[int]) -> tuple[int, ...]:
    """A shape whose dimensions are products of neighbours in `primes`, with ones in between."""
    cuts = draw(st.lists(st.integers(0, len(primes)), max_size=4).map(sorted))
    bounds = [0, *cuts, len(primes)]
    return tuple(int(np.prod(primes[a:b])) for a, b in itertools.pairwise(bounds))


@FEW
@given(st.data(), st.lists(st.sampled_from([2, 3]), min_size=1, max_size=6))
def test_reshape_halves_and_keeps_common_factors(data: st.DataObject, primes: list[int]) -> None:
    source, target = data.draw(_grouped(primes)), data.draw(_grouped(data.draw(st.permutations(primes))))
    x = np.arange(np.prod(source), dtype=np.float32).reshape(source)
    check_all(cases_of(lambda x: lax.reshape(x, target), x))


# ---- docs/rules.md lists every rule ----------------------------------------------------------------------------------


def test_every_rule_is_listed() -> None:
    assert set(re.findall(r"^\| `([^`]+)` \|", PATH.read_text(), re.MULTILINE)) == set(known_primitives())


def test_the_list_is_up_to_date() -> None:
    if f"jax {jax.__version__}." not in PATH.read_text():
        skip(
            f"docs/rules.md was made with another jax than {jax.__version__}, whose equations may look different: "
            "python -m tests.rules.rules_doc"
        )
    assert PATH.read_text() == table()
