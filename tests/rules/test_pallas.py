"""The axes of a kernel's grid that may be cut keep the halving law, and the nearest others are not cut."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as tpu_attention

import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa.rules.known_rules import factors_of, primitives_without_rule
from minialpa.tracing.flattening import trace_flat
from tests.rules.rule_laws import Case, cases_of, check_all, notation, vjp
from tests.rules.rule_programs import floats

ROWS, COLUMNS = 8, 4
Ref = Any


def _double(x_ref: Ref, out_ref: Ref) -> None:
    out_ref[...] = 2 * x_ref[...]


def _spec(rows: int, columns: int, index_map: Callable[..., Any]) -> pl.BlockSpec:
    return pl.BlockSpec((rows, columns), index_map)


_ROW = _spec(2, COLUMNS, lambda i: (i, 0))


def _call(
    kernel: Callable[..., None], x: Any, *, grid: tuple[int, ...] = (4,), read: Any = _ROW, write: Any = _ROW,
    made: tuple[int, int] = (ROWS, COLUMNS), **options: Any,
) -> Any:  # fmt: skip
    """A kernel on an array of rows and columns, by default in blocks of two rows."""
    out = jax.ShapeDtypeStruct(made, np.float32)
    call = pl.pallas_call(kernel, out, grid=grid, in_specs=[read], out_specs=write, interpret=True, **options)
    return call(x)


def _text(fun: Callable[..., Any], *arrays: Any) -> str:
    """The factors of the kernel that a function runs, which keep the laws."""
    arrays = arrays or (floats((ROWS, COLUMNS), 0),)
    (kernel,) = (case for case in cases_of(fun, *arrays) if case.eqn.primitive.name == "pallas_call")
    check_all([kernel])
    return notation(kernel.eqn)


# ---- what may be cut -------------------------------------------------------------------------------------------------


def test_each_axis_of_the_grid_is_a_factor() -> None:
    spec = _spec(2, 1, lambda i, j: (i, j))
    assert _text(lambda x: _call(_double, x, grid=(4, 4), read=spec, write=spec)) == "[(a B) c] -> [(a D) c]"

    def kernel(x_ref: Ref, out_ref: Ref) -> None:
        out_ref[...] = x_ref[...].T

    # An axis may become another dimension.
    write = _spec(COLUMNS, 2, lambda i: (0, i))
    assert _text(lambda x: _call(kernel, x, write=write, made=(COLUMNS, ROWS))) == "[(a B) C] -> [D (a E)]"


def test_a_group_of_blocks_may_share_a_block() -> None:
    """As heads of queries share heads of keys: two blocks of rows of the result for each block of the operand."""
    read = _spec(4, COLUMNS, lambda i: (i // 2, 0))

    def kernel(x_ref: Ref, out_ref: Ref) -> None:
        out_ref[...] = x_ref[:2] + x_ref[2:]

    assert _text(lambda x: _call(kernel, x, read=read)) == "[(a B) C] -> [(a D) E]"
    eqn = cases_of(lambda x: _call(kernel, x, read=read), floats((ROWS, COLUMNS), 0))[-1].eqn
    assert factors_of(eqn).sizes[0] == 2


def test_one_axis_for_two_dimensions_is_cut_along_the_outer_one() -> None:
    spec = pl.BlockSpec((None, None, COLUMNS), lambda i: (i // 3, i % 3, 0))

    def fun(x: Any) -> Any:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(_double, out, grid=(12,), in_specs=[spec], out_specs=spec, interpret=True)(x)

    assert _text(fun, floats((4, 3, COLUMNS), 0)) == "[a B C] -> [a D E]"


def test_vmap_adds_a_factor() -> None:
    x = floats((4, ROWS, COLUMNS), 0)
    assert _text(jax.vmap(lambda x: _call(_double, x)), x) == "[a (b C) D] -> [a (b E) F]"
    assert _text(jax.vmap(lambda x: _call(_asks_for_row, x)), x) == "[a B C] -> [a D E]"


def _sums(starts: Callable[[Ref], Any] | None, rows: int = 2) -> Callable[..., None]:
    """A kernel whose scratch memory sums the blocks; where `starts` holds, the sum, or its first rows, restart."""

    def kernel(x_ref: Ref, out_ref: Ref, total_ref: Ref) -> None:
        if starts is not None:

            @pl.when(starts(x_ref))
            def _() -> None:
                total_ref[:rows] = jnp.zeros((rows, 1))

        total_ref[...] += x_ref[...]
        out_ref[...] = total_ref[...]

    return kernel


def _is_first(x_ref: Ref) -> Any:
    return pl.program_id(1) == 0


_SCRATCH = {"scratch_shapes": [pltpu.VMEM((2, 1), np.float32)]}
_INNER = {
    "grid": (4, COLUMNS),
    "read": _spec(2, 1, lambda i, j: (i, j)),
    "write": _spec(2, 1, lambda i, j: (i, 0)),
    "made": (ROWS, 1),
}


def test_scratch_that_starts_anew_is_not_carried() -> None:
    assert _text(lambda x: _call(_sums(_is_first), x, **_INNER, **_SCRATCH)) == "[(a B) C] -> [(a D) 1]"


def test_flash_attention_of_tpus_is_cut_by_examples_and_heads() -> None:
    """It cannot run here, so this looks at the factors only. Sums over blocks of keys are in scratch memory."""
    blocks = tpu_attention.BlockSizes(
        block_q=128, block_k_major=128, block_k=128, block_b=1, block_q_major_dkv=128, block_k_major_dkv=128,
        block_k_dkv=128, block_q_dkv=128, block_k_major_dq=128, block_k_dq=128, block_q_dq=128,
    )  # fmt: skip
    attention = functools.partial(tpu_attention.flash_attention, causal=True, block_sizes=blocks)
    q = jax.ShapeDtypeStruct((2, 4, 256, 128), np.float32)
    flat, _ = trace_flat(vjp(attention), q, q, q)
    kernels = [eqn for eqn in flat.eqns if eqn.primitive.name == "pallas_call"]
    assert len(kernels) == 3
    for eqn in kernels:
        factors = factors_of(eqn)
        assert [factors.sizes[f] for f in factors.splittable] == [2, 4]
        assert all([dim[0] for dim in dims[:2]] == [0, 1] for dims in (*factors.operands, *factors.results))
        assert factors.flops > 2 * 2 * 4 * 256 * 256 * 128


# ---- what may not ----------------------------------------------------------------------------------------------------


def _asks_for_row(x_ref: Ref, out_ref: Ref) -> None:
    out_ref[...] = x_ref[...] + pl.program_id(0).astype(np.float32)


def _asks_in_a_branch(x_ref: Ref, out_ref: Ref) -> None:
    out_ref[...] = x_ref[...]

    @pl.when(pl.program_id(0) == 1)
    def _() -> None:
        out_ref[...] = -x_ref[...]


def _writes_operand(x_ref: Ref, out_ref: Ref) -> None:
    def body(i: Any, carry: Any) -> Any:
        x_ref[i, :] = x_ref[i, :] * 2
        return carry

    jax.lax.fori_loop(0, 2, body, 0)
    out_ref[...] = x_ref[...]


def _prints(x_ref: Ref, out_ref: Ref) -> None:
    pl.debug_print("{}", x_ref[0, 0])
    out_ref[...] = x_ref[...]


def _adds(x_ref: Ref, out_ref: Ref) -> None:
    out_ref[...] += x_ref[...]


def _reads(index_map: Callable[[Any], Any], rows: int = 2) -> dict[str, Any]:
    return {"read": _spec(rows, COLUMNS, index_map)}


def _writes(index_map: Callable[[Any], Any], rows: int = 2) -> dict[str, Any]:
    return {"write": _spec(rows, COLUMNS, index_map)}


_SHORT = {"made": (2, COLUMNS)}


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        pytest.param(_asks_for_row, {}, id="asks for its position"),
        pytest.param(_asks_in_a_branch, {}, id="asks for its position in a branch"),
        pytest.param(_double, {**_reads(lambda i: (3 - i, 0))}, id="reversed"),
        pytest.param(_double, {**_reads(lambda i: (0, 0)), **_writes(lambda i: (i * i % 4, 0))}, id="squares"),
        pytest.param(_double, {"grid": (3,)}, id="not all blocks"),
        pytest.param(
            _double,
            {"grid": (3,), **_reads(lambda i: (i, 0), 3), **_writes(lambda i: (i, 0), 3)},
            id="blocks beyond the end",
        ),
        pytest.param(_writes_operand, {"input_output_aliases": {0: 0}}, id="writes into its operand"),
        pytest.param(_double, {**_reads(lambda i: (i * 1431655766 // 2**30 % 4, 0))}, id="overflow"),
        pytest.param(_prints, {}, id="prints"),
        pytest.param(_adds, {**_writes(lambda i: (0, 0)), **_SHORT}, id="a result that all write"),
        pytest.param(_sums(None), {**_INNER, **_SCRATCH}, id="scratch that never starts"),
        pytest.param(_sums(_is_first, rows=1), {**_INNER, **_SCRATCH}, id="scratch that starts in part"),
        pytest.param(_sums(lambda _: pl.program_id(1) == 1), {**_INNER, **_SCRATCH}, id="scratch that starts later"),
        pytest.param(_sums(lambda x_ref: x_ref[0, 0] > 0.3), {**_INNER, **_SCRATCH}, id="scratch that starts by data"),
        pytest.param(
            _double,
            {"input_output_aliases": {0: 0}, **_reads(lambda i: (3 - i, 0))},
            id="aliases that follow differently",
        ),
    ],
)
def test_kernels_that_see_the_whole_are_not_cut(kernel: Callable[..., None], options: dict[str, Any]) -> None:
    flat, _ = trace_flat(lambda x: _call(kernel, x, **options), floats((ROWS, COLUMNS), 0))
    assert factors_of(flat.eqns[-1]).splittable == ()
    (name,) = primitives_without_rule(flat.eqns)
    assert name.startswith("pallas_call (")


def _prefetch(index_map: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel with a table of scalars that its index maps read."""

    def kernel(table_ref: Ref, x_ref: Ref, out_ref: Ref) -> None:
        out_ref[...] = 2 * x_ref[...]

    def fun(table: Any, x: Any) -> Any:
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(2, 4),
            in_specs=[pl.BlockSpec((None, 2, COLUMNS), index_map)],
            out_specs=pl.BlockSpec((None, 2, COLUMNS), lambda b, i, table: (b, i, 0)),
        )
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out, grid_spec=grid, interpret=True)(table, x)

    return fun


def test_what_a_table_decides_is_not_cut() -> None:
    table, x = np.array([2, 0, 3, 1], np.int32), floats((2, ROWS, COLUMNS), 0)
    assert _text(_prefetch(lambda b, i, table: (b, table[i], 0)), table, x) == "[A], [b C D] -> [b E F]"
    assert _text(_prefetch(lambda b, i, table: (table[b] // 2, i, 0)), table, x) == "[A], [B (c D) E] -> [F (c G) H]"
    assert _text(_prefetch(lambda b, i, table: (b, i, 0)), table, x) == "[A], [b (c D) E] -> [b (c F) G]"


def test_a_grid_that_an_array_sizes_is_not_cut() -> None:
    def fun(n: Any, x: Any) -> Any:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(_double, out, grid=(n,), in_specs=[_ROW], out_specs=_ROW, interpret=False)(x)

    flat, _ = trace_flat(fun, np.int32(4), floats((ROWS, COLUMNS), 0))
    assert factors_of(flat.eqns[-1]).splittable == ()


def test_equal_kernels_have_equal_flops_and_estimates_count() -> None:
    def fun(x: Any, **options: Any) -> Case:
        return cases_of(lambda x: _call(_double, x, **options), x)[-1]

    x = floats((ROWS, COLUMNS), 0)
    assert factors_of(fun(x).eqn).flops == x.size
    cost = pl.CostEstimate(flops=1000, transcendentals=0, bytes_accessed=0)
    assert factors_of(fun(x, cost_estimate=cost).eqn).flops == 1000
