"""The verifier of plans: each of its claims, and its error if a claim does not hold."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from minialpa import Plan, VerifyError
from minialpa.options import AutoShardingOption
from minialpa.plan import PassName, PlannedCollective, PlannedTransfer, verify_plan
from minialpa.sharding import EquationSpecs, Spec
from tests.plans import pipeline_plan, shard_plan

replace = dataclasses.replace


@functools.cache
def good() -> Plan:
    return pipeline_plan()


def with_stage(k: int, **fields: Any) -> Plan:
    stages = list(good().stages)
    stages[k] = replace(stages[k], **fields)
    return replace(good(), stages=tuple(stages))


def with_operator(**fields: Any) -> Plan:
    return with_stage(0, operators=(replace(good().stages[0].operators[0], **fields),))


def with_input(**fields: Any) -> Plan:
    return replace(good(), inputs=(replace(good().inputs[0], **fields), *good().inputs[1:]))


def with_collective(axes: tuple[int, ...], stage: int, times_per_step: int) -> Plan:
    one = PlannedCollective(kind="all-gather", n_bytes=1.0, axes=axes, stage=stage, times_per_step=times_per_step)
    return replace(good(), collectives=(one,))


def test_plans_that_were_made_are_valid() -> None:
    verify_plan(good())
    verify_plan(shard_plan())


CASES: dict[str, tuple[Plan, str]] = {
    "infinite seconds": (with_stage(0, update_s=float("inf")), r"stages\[0\].update_s` is inf; expected finite"),
    "absurd bytes": (with_stage(0, fixed_bytes=1e31), r"fixed_bytes` is 1e\+31; expected finite .* at most 1e\+30"),
    "absurd times": (with_collective((0,), 0, 2**70), r"times_per_step` is .* at most 4.61"),
    "more micro-batches than examples": (
        replace(good(), n_micro_batches=10**7),
        r"n_micro_batches` is 10000000; expected at most 16, the length of the longest argument",
    ),
    "absurd cluster": (
        replace(good(), cluster=replace(good().cluster, num_hosts=10**15)),
        r"cluster.num_hosts` is 1000000000000000; expected at most 1000000 devices",
    ),
    "option of the compiler that writes files": (
        replace(good(), compiler_options=(("xla_dump_to", True),)),
        "compiler_options` is xla_dump_to; expected one of xla_gpu_enable_latency_hiding_scheduler",
    ),
    "no micro-batch": (replace(good(), n_micro_batches=0), "n_micro_batches` is 0; expected at least 1"),
    "no stage": (replace(good(), stages=()), r"stages` is \(\); expected at least one stage"),
    "links of other axes": (with_stage(0, beta=(0.1, 0.1)), r"stages\[0\].beta` is .*one value for each axis of \(4,"),
    "four axes": (with_stage(0, logical_shape=(2, 2, 1, 1)), r"logical_shape` is .*expected 1 to 3 positive lengths"),
    "other devices": (with_stage(0, logical_shape=(8,)), r"logical_shape` is \(8,\); expected the 4 devices"),
    "part of two hosts": (with_stage(0, submesh=(2, 2)), r"submesh` is \(2, 2\); expected part of a host or whole"),
    "outside the cluster": (with_stage(1, first_device=5), r"stages\[1\].first_device` is 5; expected at most 4"),
    "overlap": (
        with_stage(1, first_device=2),
        r"stages\[1\].first_device` is 2; expected 4 or more, after .* stage 0",
    ),
    "axis of an option": (
        with_stage(0, option=AutoShardingOption(force_batch_dim_to_mesh_dim=1)),
        "force_batch_dim_to_mesh_dim` is 1; expected an axis",
    ),
    "layer twice": (with_stage(1, layers=(0,)), r"stages\[\*\].layers` is \[\[0\], \[0\]\]; expected each of 2 layers"),
    "layers in another order": (
        replace(with_stage(0, layers=(1, 0), kept_bytes=(0.0, 0.0)), stages=(with_stage(0, layers=(1, 0)).stages[0],)),
        r"stages\[0\].layers` is \(1, 0\); expected ascending layers",
    ),
    "stage without a layer": (
        replace(good(), stages=(with_stage(0, layers=(0, 1)).stages[0], with_stage(1, layers=()).stages[1])),
        r"stages\[1\].layers` is \(\); expected a layer at least",
    ),
    "remat of one": (replace(good(), remat=("none",)), "remat` is .*one entry for each of 2 layers"),
    "stages without layers": (
        replace(good(), layer_of_group=(), remat=()),
        r"layer_of_group` is \(\); expected the layer of each group",
    ),
    "axis of a spec": (
        with_stage(0, input_specs=(Spec(((1,),)),)),
        r"stages\[0\].input_specs\[0\]` is S1; expected axes of a mesh of shape \(4,\)",
    ),
    "axis of one device": (
        with_stage(
            0, logical_shape=(4, 1), alpha=(0.0, 0.0), beta=(0.0, 0.0), spread=(1.0, 1.0), input_specs=(Spec(((1,),)),)
        ),
        r"stages\[0\].input_specs\[0\]` is S1; expected axes of a mesh of shape \(4, 1\) that have several devices",
    ),
    "axes in another order": (
        with_stage(
            0,
            logical_shape=(2, 2),
            alpha=(0.0, 0.0),
            beta=(0.0, 0.0),
            spread=(1.0, 1.0),
            input_specs=(Spec(((1, 0),)),),
        ),
        r"stages\[0\].input_specs\[0\]` is S10; expected the axes of a dimension in ascending order",
    ),
    "axis in a loop": (
        with_stage(0, equation_specs=(EquationSpecs((), (), (), (EquationSpecs((), (), (Spec((), (1,)),)),)),)),
        r"stages\[0\].equation_specs\[0\]` is \+P1; expected axes",
    ),
    "layer of an operator": (with_operator(layer=2), r"operators\[0\].layer` is 2; expected below 2"),
    "result of an operator": (with_operator(result=Spec(((0,),))), r"result` is S0; expected 2 dimensions"),
    "mesh twice": (with_input(mesh_ids=(1, 1)), r"inputs\[0\].mesh_ids` is \(1, 1\); expected each mesh once"),
    "unknown mesh": (with_input(mesh_ids=(2,)), r"inputs\[0\].mesh_ids` is \(2,\); expected below 2"),
    "rows of another array": (
        with_input(rows=((0, 1000),)),
        r"inputs\[0\].rows` is .*expected rows of an array of sha",
    ),
    "rows without a mesh": (with_input(rows=((0, 1), (1, 2))), r"inputs\[0\].rows` is .*expected rows for each mesh"),
    "rows twice": (
        with_input(mesh_ids=(0, 1), specs=good().inputs[0].specs * 2, rows=((0, 2), (1, 3))),
        r"inputs\[0\].rows` is .*expected blocks that do not overlap",
    ),
    "empty block": (replace(good(), row_blocks=((2, 0),)), r"row_blocks` is .*expected blocks of at least one row"),
    "blocks without a pipeline": (
        replace(shard_plan(), row_blocks=((1, 1),)),
        r"row_blocks` is .*expected none, in a plan without a pipeline",
    ),
    "no spec": (with_input(specs=()), r"inputs\[0\].specs` is \[\]; expected one for each mesh of \(1,\)"),
    "partial": (with_input(specs=(Spec(((), ()), (0,)),)), r"specs\[0\]` is R,R\+P0; expected no partial sum"),
    "uneven": (with_input(shape=(6, 8), specs=(Spec(((0,), ())),)), r"specs\[0\]` is S0,R; expected equal parts of"),
    "stage of a collective": (with_collective((0,), 2, 1), "stage` is 2; expected below 2"),
    "axis of a collective": (with_collective((1,), 0, 1), r"axes` is \(1,\); expected axes of a"),
    "never": (with_collective((0,), 0, 0), "times_per_step` is 0; expected at least 1"),
    "what other chunks keep": (
        with_stage(0, kept_bytes=(1.0, 1.0)),
        r"kept_bytes` is .*expected one or three for 1 chunks",
    ),
    "pass of no chunk": (
        with_stage(0, passes=(replace(good().stages[0].passes[0], chunk=2),)),
        r"stages\[0\].passes\[0\].chunk` is 2; expected below 2",
    ),
    "transfer to nowhere": (
        replace(good(), transfers=(PlannedTransfer(PassName("forward", 0), PassName("update", 2), 8.0),)),
        r"transfers\[0\].target` is .*expected a number below 2",
    ),
    "other peaks": (
        replace(good(), cost=replace(good().cost, peak_bytes=(1.0, 2.0))),
        r"cost.peak_bytes` is \(1.0, 2.0\); expected the peak bytes of the stages",
    ),
    "primitive twice": (
        replace(good(), fingerprint=replace(good().fingerprint, primitives=(("add", 1), ("add", 1)))),
        "fingerprint.primitives` is .*expected each name once",
    ),
    "no prefixes": (
        replace(good(), fingerprint=replace(good().fingerprint, prefixes=())),
        r"fingerprint.prefixes` is \(\); expected \d+ for \d+ equations",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_that_breaks_a_claim_is_refused(name: str) -> None:
    plan, message = CASES[name]
    with pytest.raises(VerifyError, match=message):
        verify_plan(plan)
    with pytest.raises(VerifyError, match=r"`plan\."):
        Plan.from_json(plan.to_json())
