"""Timelines of hand-written programs, against sums by hand."""

from __future__ import annotations

import dataclasses

import pytest

from minialpa.attention.cudnn import KERNEL_SCOPE
from minialpa.cluster import ClusterSpec
from minialpa.hlo import HloCollective
from minialpa.xla_gpu.timeline import timeline


def _kernel(name: str, operand: str, microseconds: float) -> str:
    cost = f'"reification_cost":[{{"exec_time_us":9.9,"name":""}},{{"exec_time_us":{microseconds},"name":"sol"}}]'
    return f"  %{name} = f32[8]{{0}} fusion(%{operand}), kind=kLoop, calls=%f, backend_config={{{cost}}}"


def _program(*lines: str, more: str = "") -> str:
    body = "\n".join(lines)
    return f"""HloModule m, is_scheduled=true, num_partitions=2

%f (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %n = f32[8]{{0}} negate(%p)
}}
{more}
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
{body}
}}
"""


_START = "  %s = (f32[8]{0}, f32[16]{0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}"
_DONE = "  %d = f32[16]{0} all-gather-done(%s)"


def _three_us(one: HloCollective) -> float:
    assert (one.kind, one.n_bytes) == ("all-gather", 64)
    return 3e-6


def test_kernels_run_one_after_the_other() -> None:
    found = timeline(_program(_kernel("a", "x", 1.0), _kernel("b", "a", 2.0)), _three_us)
    assert found.kernels_s == found.total_s == pytest.approx(3e-6)
    assert not found.exposed


@pytest.mark.parametrize(("beside_us", "exposed_us"), [(0.0, 3.0), (1.0, 2.0), (5.0, 0.0)])
def test_a_collective_is_exposed_for_what_no_kernel_hides(beside_us: float, exposed_us: float) -> None:
    beside = [_kernel("a", "x", beside_us)] if beside_us else []
    found = timeline(_program(_START, *beside, _DONE, _kernel("b", "d", 1.0)), _three_us)
    (one,) = found.exposed
    assert one.exposed_s == pytest.approx(exposed_us * 1e-6) and one.has_work == bool(beside_us)
    assert found.kernels_s == pytest.approx((beside_us + 1) * 1e-6)
    assert found.total_s == pytest.approx((beside_us + exposed_us + 1) * 1e-6)
    assert found.exposed_bytes == pytest.approx(64 * exposed_us / 3)
    assert found.hidden_bytes == pytest.approx(64 - found.exposed_bytes)


@pytest.mark.parametrize(("beside_us", "waits_us"), [(1.0, 2.0), (2.5, 0.75), (5.0, 0.75)])
def test_a_collective_takes_a_part_of_the_rate_of_the_kernels_beside_it(beside_us: float, waits_us: float) -> None:
    device = ClusterSpec.preset("h100").device
    assert device.kernels is not None
    rates = dataclasses.replace(device.kernels, contention=0.25)
    slowed = dataclasses.replace(device, kernels=rates, memory_bandwidth=1.0)  # keeps the estimates of kernels
    found = timeline(_program(_START, _kernel("a", "x", beside_us), _DONE), _three_us, slowed)
    assert found.total_s - found.kernels_s == pytest.approx(waits_us * 1e-6)


def test_collectives_wait_for_each_other() -> None:
    again = [line.replace("%s", "%s2").replace("%d", "%d2") for line in (_START, _DONE)]
    found = timeline(_program(_START, again[0], _kernel("a", "x", 4.0), _DONE, again[1]), _three_us)
    assert [one.exposed_s for one in found.exposed] == pytest.approx([0.0, 2e-6])
    assert found.total_s == pytest.approx(6e-6)


def test_a_collective_without_a_start_of_its_own_is_exposed() -> None:
    line = "  %g = f32[16]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}"
    found = timeline(_program(line, _kernel("a", "x", 1.0)), _three_us)
    assert found.total_s == pytest.approx(4e-6) and found.exposed_bytes == 64


_LOOP = """
%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %v = f32[8]{0} get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  CONDITIONAL
  ROOT %r = (s32[], f32[8]{0}) tuple(%next, %c)
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}
"""
_WHILE = (
    "  %zero = s32[] constant(0)",
    "  %start = (s32[], f32[8]{0}) tuple(%zero, %x)",
    "  %w = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body, "
    'backend_config={"known_trip_count":{"n":"4"}}',
)


def test_a_loop_counts_as_often_as_it_runs() -> None:
    inside = "\n".join((_START.replace("%x", "%v"), _DONE, _kernel("c", "v", 2.0)))
    found = timeline(_program(*_WHILE, more=_LOOP.replace("  CONDITIONAL", inside)), _three_us)
    assert found.kernels_s == pytest.approx(8e-6) and found.total_s == pytest.approx(20e-6)
    assert found.exposed_bytes == pytest.approx(4 * 64)


def _conditional(operand: str, name: str = "") -> str:
    return (
        f"%c = f32[8]{{0}} conditional(%p, %{operand}, %{operand}), branch_computations={{%first, %second}}, "
        f'metadata={{op_name="{name}"}}'
    )


def _branches(first: str, second: str) -> str:
    return "".join(
        f"%{name} (y: f32[8]) -> f32[8] {{\n  %y = f32[8]{{0}} parameter(0)\n{line}\n}}\n"
        for name, line in (("first", first), ("second", second))
    )


@pytest.mark.parametrize(("name", "microseconds"), [("step", 6.0), ("jit(differentiate)/cond", 2.0)])
def test_the_longest_branch_counts_and_of_a_fallback_the_shortest(name: str, microseconds: float) -> None:
    more = _branches(_kernel("a", "y", 2.0), _kernel("b", "y", 6.0))
    found = timeline(_program(f"  {_conditional('x', name)}", more=more), _three_us)
    assert found.kernels_s == pytest.approx(microseconds * 1e-6)


def test_in_a_loop_all_branches_count_alike() -> None:
    more = _branches(_kernel("a", "y", 2.0), _kernel("b", "y", 6.0)) + _LOOP.replace("CONDITIONAL", _conditional("v"))
    assert timeline(_program(*_WHILE, more=more), _three_us).kernels_s == pytest.approx(4 * 4e-6)


_DOT = "  %d = f32[64,64]{1,0} dot(%l, %l), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def test_an_attention_with_a_kernel_takes_as_long_as_the_kernel() -> None:
    """Half of the pairs of blocks are masked, and so is half of the work."""
    device = ClusterSpec.preset("h100").device
    product = "  %l = f32[64,64]{1,0} broadcast(%y), dimensions={}\n" + _DOT
    more = _branches(_kernel("a", "y", 500.0), product) + _LOOP.replace("CONDITIONAL", _conditional("v"))
    loop = f'{_WHILE[-1]}, metadata={{op_name="jit(step)/{KERNEL_SCOPE}/while"}}'
    found = timeline(_program(*_WHILE[:-1], loop, more=more), _three_us, device)
    flops = 4 * 2 * 64**3 / 2
    assert found.kernels_s == pytest.approx(device.attention_s(flops, 0, "bfloat16"))


def test_an_attention_that_may_call_its_kernel_takes_as_long_as_the_kernel() -> None:
    device = ClusterSpec.preset("h100").device
    call = '  %k = f32[8]{0} custom-call(%y), custom_call_target="__cudnn$fmhaSoftmax"'
    more = _branches(call, "  %l = f32[64,64]{1,0} broadcast(%y), dimensions={}\n" + _DOT)
    line = _conditional("x", f"jit(step)/{KERNEL_SCOPE}/cond")
    found = timeline(_program(f"  {line}", more=more), _three_us, device)
    assert found.kernels_s == pytest.approx(device.attention_s(2 * 64**3, 0, "bfloat16"))
