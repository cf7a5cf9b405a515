"""What XLA for GPUs does with kernels and operations that are written by hand: order, joins and layouts."""

from __future__ import annotations

import tracemalloc

import pytest

from minialpa.intra.memory.compiler import Kernel
from minialpa.intra.memory.xla.epilogues import with_epilogues
from minialpa.intra.memory.xla.gathers import ColumnGather, of_transposed
from minialpa.intra.memory.xla.gpu_fusion import fused
from minialpa.intra.memory.xla.gpu_overlap import overlapped
from minialpa.intra.memory.xla.graph import Graph
from minialpa.intra.memory.xla.operations import Operation
from minialpa.intra.memory.xla.siblings import joined


def _kernel(reads: tuple[int, ...], *writes: int, shares: tuple[int, ...] = ()) -> Kernel:
    return Kernel(reads=reads, writes=writes, shares=shares)


def _written(kernels: list[Kernel]) -> list[tuple[int, ...]]:
    return [kernel.writes for kernel in kernels]


SIZES = [1e6] * 20


# ---- work beside collectives ------------------------------------------------------------


def test_a_product_that_nobody_waits_for_runs_beside_the_collective_behind_it() -> None:
    """0 -> gradient 1 of a weight, and activations 2 -> collective 3 -> product 4. An end has no results."""
    kernels = [_kernel((0,), 1), _kernel((0,), 2), _kernel((2,), 3), _kernel((3,), 4)]
    found = overlapped(kernels, [0, 1, 2, 3], SIZES, {3}, {1, 2, 4})
    assert _written(found) == [(2,), (3,), (1,), (), (4,)]
    assert found[3].reads == (2, 3)


def test_what_a_collective_needs_does_not_run_beside_it() -> None:
    kernels = [_kernel((0,), 1), _kernel((1,), 2), _kernel((2,), 3)]
    assert overlapped(kernels, [0, 1, 2], SIZES, {2}, {1, 3}) == kernels


def test_one_collective_runs_at_a_time() -> None:
    """The gradients 1 and 2 wait for one of the collectives 4 and 6 each."""
    kernels = [_kernel((0,), v) for v in (1, 2, 3)]
    kernels += [_kernel((3,), 4), _kernel((4,), 5), _kernel((5,), 6), _kernel((6,), 7)]
    found = overlapped(kernels, range(7), SIZES, {4, 6}, {1, 2, 3, 5, 7})
    assert _written(found) == [(3,), (4,), (1,), (), (5,), (6,), (2,), (), (7,)]


def test_scalars_do_not_wait() -> None:
    kernels = [_kernel((0,), 1), _kernel((0,), 2), _kernel((2,), 3), _kernel((3,), 4)]
    sizes = [4.0 if v == 1 else 1e6 for v in range(5)]
    assert overlapped(kernels, [0, 1, 2, 3], sizes, {3}, {2, 4}) == kernels


def test_a_program_without_collectives_keeps_its_order() -> None:
    kernels = [_kernel((0,), 1), _kernel((1,), 2)]
    assert overlapped(kernels, [0, 1], SIZES, set(), {1, 2}) == kernels


def test_what_changes_a_buffer_stays_behind_its_readers() -> None:
    """1 is read for 2, and then becomes 3 in place."""
    change = Kernel(reads=(1,), writes=(3,), alias=1, in_place=True)
    kernels = [_kernel((0,), 1), _kernel((1,), 2), change, _kernel((3,), 4), _kernel((4,), 5)]
    found = overlapped(kernels, range(5), SIZES, {4}, {2, 5})
    assert _written(found).index((2,)) < _written(found).index((3,))


def test_what_waits_for_collectives_comes_last_and_small_work_hides_none() -> None:
    """2 is gathered from 1 for product 3. Product 4 waits for nothing; 5 is work of a few bytes."""
    kernels = [_kernel((1,), 2), _kernel((2,), 3), _kernel((0,), 4), _kernel((0,), 5)]
    sizes = [0.0, 1e6, 1e6, 1e6, 2e6, 100.0]
    found = overlapped(kernels, [2, 3, 0, 1], sizes, {2}, {3, 4, 5})
    assert _written(found) == [(2,), (4,), (5,), (), (3,)]
    found = overlapped(kernels, [3, 0, 1, 2], sizes, {2}, {3, 4, 5})
    assert _written(found) == [(2,), (5,), (), (4,), (3,)]


# ---- kernels of an optimiser ------------------------------------------------------------


def test_moments_and_the_weight_that_is_made_of_them_are_one_kernel() -> None:
    gradient, first, second, weight = 1, 2, 3, 4
    kernels = [
        _kernel((0,), gradient),
        _kernel((gradient, 10), first, shares=(gradient,)),
        _kernel((gradient, 11), second, shares=(gradient,)),
        _kernel((first, second, 12), weight, shares=(first, second)),
    ]
    found = joined(kernels, [first, second, weight])
    assert _written(found) == [(gradient,), (first, second, weight)]
    assert found[1].reads == (gradient, 10, 11, 12) and not found[1].shares


@pytest.mark.parametrize("results", [[4], [2, 4, 5]])
def test_what_is_no_result_or_has_other_readers_stays_apart(results: list[int]) -> None:
    kernels = [
        _kernel((1,), 2, shares=(1,)),
        _kernel((2,), 4, shares=(2,)),
        _kernel((2,), 5),
    ]
    assert joined(kernels, results) == kernels


def test_kernels_that_wait_for_each_other_otherwise_stay_apart() -> None:
    """4 is made of 2, and of the sum 3 of something that is made of 2 as well."""
    kernels = [
        _kernel((1,), 2, shares=(1,)),
        _kernel((1,), 6, shares=(1,)),
        _kernel((6,), 3),
        _kernel((2, 6, 3), 4, shares=(2, 6)),
    ]
    assert _written(joined(kernels, [2, 6, 4])) == [(6,), (3,), (2, 4)]


# ---- products and gathers ------------------------------------------------------------


def _product_and(**facts: object) -> list[Operation]:
    return [
        Operation("own", (0,), (1,), is_product=True),
        Operation("loop", (1, 2), (3,), elementwise=True, **facts),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("before", [[], [Operation("view", (4,), (2,))], [Operation("loop", (4,), (2,), repeats=True)]])
def test_products_take_in_what_reads_arguments_views_of_them_and_repeated_ones(before: list[Operation]) -> None:
    *_, one = with_epilogues([*before, *_product_and()], [0, 4 if before else 2], [3], SIZES)
    assert one.reads == (0, 4 if before else 2) and one.writes == (3,)


@pytest.mark.parametrize("before", [Operation("own", (4,), (2,)), Operation("loop", (4,), (2,), converts=True)])
def test_what_reads_the_array_of_another_kernel_is_a_kernel_of_its_own(before: Operation) -> None:
    operations = [before, *_product_and()]
    assert with_epilogues(operations, [0, 4], [3], SIZES) == tuple(operations)


def test_a_matrix_for_products_is_gathered_in_the_other_order() -> None:
    operations = [
        Operation("own", (0,), (1,)),
        Operation("loop", (1,), (2,)),
        Operation("own", (2, 5), (6,), is_product=True),
    ]
    gathers = {2: ColumnGather(shard=0, exchanged=9, gathered=1)}
    found, renamed = of_transposed(operations, [6], gathers)
    assert [(op.reads, op.writes) for op in found] == [((0,), (9,)), ((9,), (2,)), ((2, 5), (6,))]
    assert renamed == {1: 2}
    assert of_transposed(operations, [2, 6], gathers) == (tuple(operations), {})


# ---- long chains ------------------------------------------------------------------------


def test_memory_grows_with_the_length_of_a_chain_and_not_with_its_square() -> None:
    """A chain of n operations, each of which reads an argument of its own, is one kernel that reads all of them."""

    def peak_bytes(n: int) -> int:
        chain = [Operation("loop", (n + i, i), (n + i + 1,), elementwise=True) for i in range(n)]
        sizes = [4.0] * (2 * n + 1)
        tracemalloc.start()
        (kernel,) = fused(Graph(chain, [2 * n], sizes))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(kernel.reads) == n + 1
        return peak

    assert peak_bytes(4000) < 3 * peak_bytes(2000)  # 4 times for the square
