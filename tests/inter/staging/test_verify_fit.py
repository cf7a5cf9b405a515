"""The verifier of a plan against its step: one plan for each claim that does not hold, and the error."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest

import minialpa
from minialpa import Plan, VerifyError
from minialpa.inter.lower.emit import emit_program
from minialpa.intra.strategies.loops import scan_body
from minialpa.testing import assert_allclose
from tests.plan.mutations import Subject, at, put, subject

#: An equation of the first stage, by the name of its primitive, and one in its first loop.
FIRST, LOOP = ("stages", 0, "equation_specs"), ("stages", 0, "equation_specs", "scan", 3)


def resolved(on: Subject, place: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """A place in JSON data; names of primitives after `equation_specs` become numbers of equations."""
    out: list[str | int] = ["plan"]
    eqns: Any = on.problems[int(place[1])].eqns if place[0] == "stages" else ()
    for key in place:
        if "equation_specs" in out and isinstance(key, str):
            number = next(i for i, eqn in enumerate(eqns) if eqn.primitive.name == key)
            body = scan_body(eqns[number])
            eqns, key = body.flat.eqns if body else (), number
        out.append(key)
    return tuple(out)


def refusal(name: str, edits: dict[tuple[str | int, ...], Any]) -> str:
    on, data = subject(name), copy.deepcopy(subject(name).data)
    for place, value in edits.items():
        found = resolved(on, place)
        put(data, found, value(at(data, found)) if callable(value) else value)
    plan = Plan.from_json(json.dumps(data))
    with pytest.raises(VerifyError) as caught:
        emit_program(on.traced, plan)
    return str(caught.value)


CASES: dict[str, tuple[str, dict[tuple[str | int, ...], Any], str]] = {
    # decisions
    "examples that do not divide": (
        "grid",
        {("n_micro_batches",): 3},
        "`plan.n_micro_batches` is 3; expected a divisor of the 16 examples",
    ),
    "unknown schedule": ("1f1b", {("schedule",): "2f2b"}, "`plan.schedule` is 2f2b; expected one of `1f1b`, "),
    "schedule without gradients": (
        "1f1b",
        {("schedule",): "inference"},
        "`plan.schedule` is inference; expected a schedule with backward passes",
    ),
    "layers of another model": (
        "1f1b",
        {("layer_of_group",): lambda groups: groups[:-1]},
        "`plan.layer_of_group` is a list of",
    ),
    "other passes": (
        "1f1b",
        {("stages", 0, "passes"): lambda passes: passes[:1]},
        r"`plan.stages[0].passes` is [('forward', 0, 1)]; expected the kinds, chunks and loops [('forward', 0, 1), (",
    ),
    # specs
    "a sum that is given": (
        "line",
        {("stages", 0, "input_specs", 0): "R+P0"},
        "`plan.stages[0].input_specs[0]` is R+P0; expected no partial sum: inputs of a stage are complete",
    ),
    "a result that is claimed to be a sum": (
        "line",
        {(*FIRST, "tanh", 1, 0): "R,R+P0", (*FIRST, "tanh", 0, 0): "R,R"},
        "[1][0]` is R,R+P0; expected R,R by the rule of `tanh`",
    ),
    "a product that is whole": (
        "line",
        {(*FIRST, "dot_general", 0): ["R,S0", "S0,R"], (*FIRST, "dot_general", 1, 0): "R,R"},
        "[1][0]` is R,R; expected R,R+P0 by the rule of `dot_general`, next to [R,S0] [S0,R] -> [R,R]",
    ),
    "a sum that is returned": (
        "line",
        {FIRST: lambda equations: [*equations[:-1], [*equations[-1][:2], ["+P0"], []]]},
        "[2][0]` is +P0; expected no partial sum: result 0 of `add` is compared, read elsewhere or",
    ),
    "another array behind a barrier": (
        "interleaved",
        {(*FIRST, "optimization_barrier", 1, 0): lambda spec: "R,R" if spec != "R,R" else "S0,R"},
        ", the spec in which the barrier gets the array",
    ),
    "a loop of what is none": (
        "line",
        {(*FIRST, "tanh", 3): [[["R"], ["R"], ["R"], []]]},
        "[3]` is a list of 1; expected an empty list, as `tanh` is no loop",
    ),
    "uneven parts": (
        "scan",
        {(*FIRST, "scan", 0, 3): "S0,R,R"},
        "[0][3]` is S0,R,R; expected equal parts of shape (3, 8, 8) on a mesh of shape (2, 4)",
    ),
    "a carry that changes": (
        "scan",
        {(*FIRST, "scan", 1, 0): "R,R", (*FIRST, "scan", 2, 0): "R,R", (*FIRST, "scan", 0, 1): "S0,R"},
        "in which the loop carries the value",
    ),
    # locations of arguments and results
    "another spec of an argument": (
        "line",
        {("inputs", 1, "specs", 0): lambda spec: "R,R" if spec != "R,R" else "S0,R"},
        "`plan.inputs[1].specs[0]` is ",
    ),
    "a result elsewhere": ("1f1b", {("outputs", 0, "mesh_ids", 0): lambda mesh: 1 - mesh}, "outputs[0].mesh_ids` is "),
    "other rows of a result": (
        "blocks",
        {("outputs", 2, "rows"): [[2, 4], [0, 2]]},
        "`plan.outputs[2].rows` is ((2, 4), (0, 2)); expected ((0, 2), (2, 4))",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_that_does_not_fit_its_step_is_refused_by_the_name_of_the_field(name: str) -> None:
    on, edits, message = CASES[name]
    assert message in refusal(on, edits)


def test_what_options_forbid_is_named() -> None:
    option = {("stages", 0, "option", name): False for name in ("allow_all_gather", "allow_all_to_all")}
    text = refusal("zero3", option)
    assert "which the options of the stage forbid" in text and "`all-gather` or `all-to-all`" in text


def test_plans_that_are_not_loaded_are_checked_too() -> None:
    on = subject("line")
    cost = dataclasses.replace(on.plan.cost, total_s=float("nan"))
    with pytest.raises(VerifyError, match=r"`plan\.cost\.total_s` is nan"):
        minialpa.parallelize(on.step, method=dataclasses.replace(on.plan, cost=cost))(*on.args())


def test_more_devices_than_there_are_are_refused_before_anything_is_built() -> None:
    on, data = subject("line"), copy.deepcopy(subject("line").data)
    data["plan"]["cluster"]["devices_per_host"] = 16
    data["plan"]["stages"][0]["first_device"] = 8
    with pytest.raises(
        minialpa.ShardingError, match=r"needs 16 devices \(`plan.stages\[0\]` has the last .* there are 8\."
    ):
        minialpa.parallelize(on.step, method=Plan.from_json(json.dumps(data)))(*on.args())


def test_arguments_may_be_called_otherwise() -> None:
    on = subject("line")
    renamed = minialpa.parallelize(lambda held, examples: on.step(held, examples), method=on.plan)
    assert_allclose(renamed(*on.args()), on.expected)
