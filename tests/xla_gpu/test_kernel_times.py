"""Prices of kernels: XLA's estimates where they can be right, and corrections elsewhere."""

from __future__ import annotations

import dataclasses

import pytest

from minialpa.cluster import ClusterSpec, DeviceSpec
from minialpa.hlo.text import parse_module
from minialpa.xla_gpu.kernels import Kernels

H100 = ClusterSpec.preset("h100").device
_N = 4096
_BYTES = 3 * 2 * _N * _N


def _costs(**estimates_us: float) -> str:
    costs = ",".join(f'{{"exec_time_us":{us},"name":"{name.strip("_")}"}}' for name, us in estimates_us.items())
    return f'"reification_cost":[{costs}]'


def _seconds(line: str, device: DeviceSpec | None = H100) -> float:
    text = f"""HloModule m, is_scheduled=true

%product (p: bf16[{_N},{_N}], q: bf16[{_N},{_N}]) -> bf16[{_N},{_N}] {{
  %p = bf16[{_N},{_N}]{{1,0}} parameter(0)
  %q = bf16[{_N},{_N}]{{1,0}} parameter(1)
  ROOT %d = bf16[{_N},{_N}]{{1,0}} dot(%p, %q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%sum (p: bf16[{_N},{_N}], q: bf16[{_N},{_N}]) -> bf16[{_N},{_N}] {{
  %p = bf16[{_N},{_N}]{{1,0}} parameter(0)
  %q = bf16[{_N},{_N}]{{1,0}} parameter(1)
  ROOT %d = bf16[{_N},{_N}]{{1,0}} add(%p, %q)
}}

%put (p: bf16[{_N},{_N}], q: bf16[{_N},{_N}]) -> bf16[{_N},{_N}] {{
  %p = bf16[{_N},{_N}]{{1,0}} parameter(0)
  %q = bf16[{_N},{_N}]{{1,0}} parameter(1)
  %i = s32[8,1]{{1,0}} constant({{...}})
  %u = bf16[8,1,{_N}]{{2,1,0}} slice(%q), slice={{[0:8], [0:{_N}]}}
  ROOT %d = bf16[{_N},{_N}]{{1,0}} scatter(%p, %i, %u), to_apply=%sum
}}

ENTRY %main (x: bf16[{_N},{_N}]) -> bf16[{_N},{_N}] {{
  %x = bf16[{_N},{_N}]{{1,0}} parameter(0)
  {line}
}}
"""
    module = parse_module(text)
    around = module.computations[module.entry]
    return Kernels(module, device).seconds(around.instructions[-1], around)


def _fusion(called: str, costs: str, kind: str = "") -> str:
    fusion = f'"fusion_backend_config":{{"kind":"{kind}"}},{costs}'
    return f"%k = bf16[{_N},{_N}]{{1,0}} fusion(%x, %x), kind=kCustom, calls=%{called}, backend_config={{{fusion}}}"


def _formula_s() -> float:
    return H100.product_s(2 * _N**3, _BYTES, "bfloat16") + H100.launch_s


def test_a_scatter_in_place_takes_the_time_of_its_updates() -> None:
    whole_us = 1e6 * 2 * 2 * _N**2 / H100.memory_bandwidth
    assert _seconds(_fusion("put", _costs(_=whole_us))) == pytest.approx(8 * _N * 2 / H100.memory_bandwidth)


def test_tables_count_where_they_agree_with_the_formula_and_the_power_limit_slows_them() -> None:
    assert H100.kernels is not None
    table_us = 1.5e6 * _formula_s()
    expected = table_us * 1e-6 / H100.kernels.sustained
    assert _seconds(_fusion("product", _costs(_=9.9e5, sol=table_us))) == pytest.approx(expected)


@pytest.mark.parametrize("estimates", [{"_": 5e4}, {"_": 5e4, "sol": 2e5}])
def test_a_product_that_no_table_has_takes_what_the_formula_says(estimates: dict[str, float]) -> None:
    assert _seconds(_fusion("product", _costs(**estimates))) == pytest.approx(_formula_s())


def test_a_tiny_product_takes_its_launch() -> None:
    assert _seconds(_fusion("product", _costs(sol=1e-3))) == H100.launch_s


@pytest.mark.parametrize(("estimate", "expected"), [(2.0, 2.0), (27.0, 4.0)])
def test_other_kernels_take_no_more_than_four_times_their_bytes(estimate: float, expected: float) -> None:
    bytes_s = _BYTES / H100.memory_bandwidth
    assert _seconds(_fusion("sum", _costs(sol=estimate * bytes_s * 1e6))) == pytest.approx(expected * bytes_s)


def test_softmaxes_in_triton_take_their_bytes() -> None:
    line = _fusion("sum", _costs(sol=0.01), kind="__triton")
    assert _seconds(line) == pytest.approx(_BYTES / H100.memory_bandwidth)


def test_without_a_device_estimates_count_as_they_are() -> None:
    assert _seconds(_fusion("product", _costs(_=7.0, sol=2e5)), None) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("kind", "result", "operands"),
    [
        ("Forward", "bf16[8,14,14,32]", ("bf16[8,16,16,64]", "bf16[3,3,64,32]")),
        ("BackwardInput", "bf16[8,16,16,64]", ("bf16[8,14,14,32]", "bf16[3,3,64,32]")),
        ("BackwardFilter", "bf16[3,3,64,32]", ("bf16[8,16,16,64]", "bf16[8,14,14,32]")),
    ],
)
def test_convolutions_of_cudnn_have_a_price(kind: str, result: str, operands: tuple[str, str]) -> None:
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (a: f32[1], b: f32[1]) -> f32[1] {{
  %a = {operands[0]}{{3,2,1,0}} parameter(0)
  %b = {operands[1]}{{3,2,1,0}} parameter(1)
  %c = ({result}{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), window={{size=3x3}}, dim_labels=b01f_01io->b01f, \
custom_call_target="__cudnn$conv{kind}", backend_config={{{_costs()}}}
}}
"""
    module = parse_module(text)
    around = module.computations[module.entry]
    device = dataclasses.replace(H100, kernels=None)
    flops = 2 * 8 * 14 * 14 * 32 * (3 * 3 * 64)
    n_bytes = 2 * (8 * 14 * 14 * 32 + 8 * 16 * 16 * 64 + 3 * 3 * 64 * 32)
    found = Kernels(module, device).seconds(around.instructions[-1], around)
    assert found == pytest.approx(device.product_s(flops, n_bytes, "bfloat16"))
