"""Rules of XLA on hand-written kernels and operations: work beside collectives, siblings, and epilogues."""

from __future__ import annotations

import tracemalloc

import pytest

from minialpa.intra.memory.compiler import Kernel
from minialpa.intra.memory.xla.fusion import Graph, fused
from minialpa.intra.memory.xla.gpu_overlap import overlapped
from minialpa.intra.memory.xla.operations import Operation
from minialpa.intra.memory.xla.rewrites import with_epilogues
from minialpa.intra.memory.xla.siblings import with_siblings


def _kernel(reads: tuple[int, ...], *writes: int, shares: tuple[int, ...] = ()) -> Kernel:
    return Kernel(reads=reads, writes=writes, shares=shares)


def _written(kernels: list[Kernel]) -> list[tuple[int, ...]]:
    return [kernel.writes for kernel in kernels]


SIZES = [1e6] * 20


# ---- work beside collectives ------------------------------------------------------------


def test_a_product_that_nobody_waits_for_runs_beside_the_collective_behind_it() -> None:
    """0 -> gradient 1 of a weight, and activations 2 -> collective 3 -> product 4. An end has no results."""
    kernels = [_kernel((0,), 1), _kernel((0,), 2), _kernel((2,), 3), _kernel((3,), 4)]
    found = overlapped(kernels, SIZES, {3}, {1, 2, 4})
    assert _written(found) == [(2,), (3,), (1,), (), (4,)]
    assert found[3].reads == (2, 3)


def test_what_a_collective_needs_does_not_run_beside_it() -> None:
    kernels = [_kernel((0,), 1), _kernel((1,), 2), _kernel((2,), 3)]
    assert overlapped(kernels, SIZES, {2}, {1, 3}) == kernels


def test_one_collective_runs_at_a_time() -> None:
    """The gradients 1 and 2 wait for one of the collectives 4 and 6 each."""
    kernels = [_kernel((0,), v) for v in (1, 2, 3)]
    kernels += [_kernel((3,), 4), _kernel((4,), 5), _kernel((5,), 6), _kernel((6,), 7)]
    found = overlapped(kernels, SIZES, {4, 6}, {1, 2, 3, 5, 7})
    assert _written(found) == [(3,), (4,), (1,), (), (5,), (6,), (2,), (), (7,)]


def test_scalars_do_not_wait() -> None:
    kernels = [_kernel((0,), 1), _kernel((0,), 2), _kernel((2,), 3), _kernel((3,), 4)]
    sizes = [4.0 if v == 1 else 1e6 for v in range(5)]
    assert overlapped(kernels, sizes, {3}, {2, 4}) == kernels


def test_what_changes_a_buffer_stays_behind_its_readers() -> None:
    """2 reads 1, and then 3 overwrites 1 in place."""
    change = Kernel(reads=(1,), writes=(3,), alias=1, in_place=True)
    kernels = [_kernel((0,), 1), _kernel((1,), 2), change, _kernel((3,), 4), _kernel((4,), 5)]
    found = overlapped(kernels, SIZES, {4}, {2, 5})
    assert _written(found).index((2,)) < _written(found).index((3,))


def test_what_waits_for_collectives_comes_last_and_small_work_hides_none() -> None:
    """2 is gathered from 1 for product 3. Product 4 has no operands to wait for; 5 is work of a few bytes."""
    gather, reader, product, small = _kernel((1,), 2), _kernel((2,), 3), _kernel((0,), 4), _kernel((0,), 5)
    sizes = [0.0, 1e6, 1e6, 1e6, 2e6, 100.0]
    found = overlapped([product, small, gather, reader], sizes, {2}, {3, 4, 5})
    assert _written(found) == [(2,), (4,), (5,), (), (3,)]
    found = overlapped([small, gather, reader, product], sizes, {2}, {3, 4, 5})
    assert _written(found) == [(2,), (5,), (), (4,), (3,)]


# ---- siblings -----------------------------------------------------------------------------------------------------


def test_loops_that_alone_read_a_stored_loop_are_one_kernel_in_its_place() -> None:
    """y = 0 -> tanh 1; gelu 2 and, with g = 3, gradient 4. The product 5 reads gelu."""
    tanh, gelu = _kernel((0,), 1, shares=(0,)), _kernel((0, 1), 2, shares=(0, 1))
    rest = [_kernel((2,), 5), _kernel((9,), 3), _kernel((0, 1, 3), 4, shares=(0, 1, 3)), _kernel((4,), 6)]
    found = with_siblings([tanh, gelu, *rest], {1, 2, 4}, {5, 6}, [(8,)] * 10)
    assert _written(found) == [(3,), (2, 4), (5,), (6,)]
    assert found[1].reads == (0, 3) and found[1].shares == (0, 3)


def test_loops_of_which_one_depends_on_the_other_stay_apart() -> None:
    kernels = [_kernel((0,), 1), _kernel((1,), 2), _kernel((2,), 3), _kernel((1, 3), 4)]
    assert with_siblings(kernels, {1, 2, 4}, {4}, [(8,)] * 5) == kernels


# ---- products ----------------------------------------------------------------------------


def _product_and(**facts: object) -> list[Operation]:
    return [
        Operation("own", (0,), (1,), is_product=True),
        Operation("loop", (1, 2), (3,), elementwise=True, **facts),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("before", [[], [Operation("view", (4,), (2,))], [Operation("loop", (4,), (2,), repeats=True)]])
def test_products_take_in_what_reads_arguments_views_of_them_and_repeated_ones(before: list[Operation]) -> None:
    *_, one = with_epilogues([*before, *_product_and()], [0, 4 if before else 2], [3], SIZES)
    assert one.reads == (0, 4 if before else 2) and one.writes == (3,)


@pytest.mark.parametrize("before", [Operation("own", (4,), (2,)), Operation("loop", (4,), (2,))])
def test_what_reads_the_array_of_another_kernel_is_a_kernel_of_its_own(before: Operation) -> None:
    operations = [before, *_product_and()]
    assert with_epilogues(operations, [0, 4], [3], SIZES) == tuple(operations)


# ---- long chains ------------------------------------------------------------------------


def test_memory_grows_with_the_length_of_a_chain_and_not_with_its_square() -> None:
    """A chain of n operations, each with a separate argument, is one kernel that reads all of them."""

    def peak_bytes(n: int) -> int:
        chain = [Operation("loop", (n + i, i), (n + i + 1,), elementwise=True) for i in range(n)]
        sizes = [4.0] * (2 * n + 1)
        tracemalloc.start()
        (kernel,) = fused(Graph(chain, [2 * n], sizes))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(kernel.reads) == n + 1
        return peak

    assert peak_bytes(1600) < 3 * peak_bytes(800)  # 4 times for the square
