"""Plans as JSON: a written plan is read back, any other text is refused with the name of the field."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from minialpa import AutoShardingOption, Plan, ShardParallel, VerifyError
from minialpa.plan.codec import MOST_CHARACTERS
from tests.plan.mutations import Place, at, places, put
from tests.plans import pipeline_plan, shard_plan


@functools.cache
def good() -> Plan:
    return pipeline_plan()


def data_of(plan: Plan) -> Any:
    return json.loads(plan.to_json())


def assert_same_or_refused(text: str) -> None:
    """A text is refused, or reading and writing it gives the same text."""
    try:
        plan = Plan.from_json(text)
    except VerifyError as error:
        assert "plan" in str(error)
        return
    assert json.loads(plan.to_json()) == json.loads(text)
    assert Plan.from_json(plan.to_json()) == plan


OTHER_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 12), st.sampled_from([10**30, -1]), st.floats(), st.text(max_size=4),
    st.sampled_from(["R", "S0", "S1,R", "S01", "R,R+P0", "S0,S0", "none", "gpipe", "x", "?"]),
    st.just([]), st.just({}), st.just([[]]), st.just([1, 2]), st.just({"x": 1}),
)  # fmt: skip


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60)
def test_a_changed_value_is_read_as_it_is_or_refused(draw: st.DataObject) -> None:
    data = data_of(good())
    place, old = draw.draw(st.sampled_from(list(places(data))))
    near = [old + by for by in (-1, 1, 0.5, 1e9)] if isinstance(old, int | float) else []
    assert_same_or_refused(json.dumps(put(data, place, draw.draw(OTHER_VALUES | st.sampled_from([None, *near])))))


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60)
def test_a_plan_without_one_of_its_fields_or_items_is_refused_or_read_as_it_is(draw: st.DataObject) -> None:
    data = data_of(good())
    place = draw.draw(st.sampled_from([p for p, _ in places(data) if p]))
    inner = at(data, place[:-1])
    del inner[place[-1]]
    if isinstance(inner, dict):
        with pytest.raises(VerifyError, match=str(place[-1])):
            Plan.from_json(json.dumps(data))
    else:
        assert_same_or_refused(json.dumps(data))


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=50)
def test_a_truncated_plan_is_refused(draw: st.DataObject) -> None:
    text = good().to_json()
    with pytest.raises(VerifyError, match="Not a plan"):
        Plan.from_json(text[: draw.draw(st.integers(0, len(text) - 1))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "Not a plan") for text in ("", "garbage", "[]", "{}")),
        pytest.param("[" * 100_000, "Not a plan", id="too deep"),
        ('{"version":12}', "expected `plan` and `version`"),
        ('{"version":12,"plan":[1]}', r"`plan` is \[1\]; expected the fields of a Plan"),
        ('{"version":12,"plan":{}}', "`plan.fingerprint` is missing"),
        ('{"version":true,"plan":{}}', "has version True, but this minialpa reads version 12"),
        ('{"version":2,"plan":{}}', "has version 2, but this minialpa reads version 12. Make a new plan"),
        ('{"version":12,"version":7,"plan":{}}', "Not a plan: a JSON object has the field `version` twice"),
        # With an id of its own: pytest would send the text from process to process, in the name of the test.
        pytest.param(
            " " * (MOST_CHARACTERS + 1), f"the file has more than {MOST_CHARACTERS:,} characters", id="too long"
        ),
    ],
)
def test_text_that_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            ("stages", 0, "input_specs", 0),
            "X9",
            r"`plan.stages\[0\].input_specs\[0\]` is 'X9'; expected a sharding spec",
        ),
        (("stages", 1, "submesh"), [1], r"`plan.stages\[1\].submesh` is \[1\]; expected a list of 2"),
        (("stages", 1, "submesh", 1), 4.0, r"`plan.stages\[1\].submesh\[1\]` is 4.0; expected an integer"),
        (("stages", 0, "surprise"), 1, r"`plan.stages\[0\]` has the unknown field `surprise`"),
        (("stages", 0, "optimal"), 1, r"`plan.stages\[0\].optimal` is 1; expected true or false"),
        (("stages", 0, "equation_specs", 0), [], r"equation_specs\[0\]` is \[\]; expected a list of operands, made"),
        (("remat", 0), "some", r"`plan.remat\[0\]` is 'some'; expected one of `none`, `dots`, `full`"),
        (("stages", 0, "option", "force_batch_dim_to_mesh_dim"), True, "is True; expected one of `0`, `1`"),
        (("cost", "total_s"), float("nan"), "`plan.cost.total_s` is nan; expected a number"),
        (
            ("cluster", "device", "memory_bytes"),
            -1,
            "`plan.cluster.device` is wrong. `memory_bytes` must be a number > 0; got -1",
        ),
        (("schedule",), ["x" * 10**6] * 10, r"`plan.schedule` is \['xxx.*\.\.\.; expected a text"),
        (
            ("schedule",),
            functools.reduce(lambda inner, _: [inner], range(500), []),
            r"is \[\[\[\[\.\.\.\]\]\]\]; expected",
        ),
        (
            ("stages", 0, "equation_specs", 0),
            functools.reduce(lambda inner, _: [[], [], [], [inner]], range(100), [[], [], [], []]),
            r"equation_specs\[0\](\[3\]\[0\]){32}\[3\]` is .*; expected at most 32 loops inside each other",
        ),
    ],
)
def test_the_field_that_is_wrong_is_named(place: Place, value: Any, message: str) -> None:
    data = put(data_of(good()), ("plan", *place), value)
    with pytest.raises(VerifyError, match=message):
        Plan.from_json(json.dumps(data))


def test_options_of_the_shardings_are_kept() -> None:
    fixed = {"params['w']": P(None, "x"), "params['v']": P(("x",)), "batch*": P(P.UNCONSTRAINED)}
    option = AutoShardingOption(fixed_specs=fixed, memory_limit_bytes=10**9, allow_all_to_all=False)
    plan = shard_plan(ShardParallel(auto_sharding_option=option))
    assert plan.stages[0].option == option and plan.stages[0].forbidden == ("all-to-all",)
    assert Plan.from_json(plan.to_json()) == plan and Plan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_files_without_end_and_of_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match="Not a plan: the file has more than"):
        Plan.load("/dev/zero")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00plan")
    with pytest.raises(VerifyError, match="Not a plan"):
        Plan.load(tmp_path / "binary")
