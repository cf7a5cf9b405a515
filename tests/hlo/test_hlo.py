"""The collectives that are read from a compiled program equal the collectives in its source."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from minialpa import LogicalMesh
from minialpa.cost import Collective
from minialpa.errors import ShardingError, VerifyError
from minialpa.grouped import NEVER
from minialpa.hlo import HloCollective, bytes_by_kind, collectives, seconds
from minialpa.hlo.analysis import flops_of
from minialpa.hlo.text import array_sizes, parse_groups, parse_module

X = np.ones((16, 64), np.float32)  # [8, 16] and 512 bytes on each device of a (2, 4) mesh
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))
ALL = (tuple(range(8)),)


def compiled(f: Callable[..., Any], out: Any = None) -> str:
    """HLO of `f` on the shards of X, split over both axes; results keep their shardings."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    spec = P(*mesh.axis_names)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec if out is None else out, check_vma=False)
    return jax.jit(mapped).lower(X).compile().as_text()


def summary(text: str) -> list[tuple[str, float, Any, int]]:
    return [(one.kind, one.n_bytes, one.groups, one.times) for one in collectives(text)]


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: lax.psum(x, "y"), ("all-reduce", 512, ROWS, 1)),
        (lambda x: lax.psum(x, ("x", "y")), ("all-reduce", 512, ALL, 1)),
        (lambda x: lax.psum_scatter(x, "x", tiled=True), ("reduce-scatter", 512, COLUMNS, 1)),
        (lambda x: lax.all_gather(x, "y", tiled=True), ("all-gather", 2048, ROWS, 1)),
        (lambda x: lax.all_to_all(x, "x", 0, 1, tiled=True), ("all-to-all", 512, COLUMNS, 1)),
    ],
)
def test_a_collective_has_its_kind_bytes_and_groups(f: Any, expected: Any) -> None:
    assert summary(compiled(f)) == [expected]


def test_combined_all_reduces_sum_their_parts() -> None:
    text = compiled(lambda x: (lax.psum(x, "y"), lax.psum(jnp.sin(x[:4]), "y")), out=(P(), P()))
    assert bytes_by_kind(collectives(text)) == {"all-reduce": 512 + 256}


def test_loops_multiply_and_branches_count_once() -> None:
    def scan(x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (lax.psum(jnp.sin(c), "x"), None), x, None, length=12)[0]

    def nested(x: jax.Array) -> jax.Array:
        inner = lambda _, v: lax.psum(jnp.cos(v), "y")  # noqa: E731
        return lax.fori_loop(0, 5, lambda _, v: lax.fori_loop(0, 3, inner, v), x)

    def branch(x: jax.Array) -> jax.Array:
        return lax.cond(x[0, 0] > 0, lambda v: lax.psum(2 * v, ("x", "y")), lambda v: v, x)

    assert summary(compiled(scan)) == [("all-reduce", 512, COLUMNS, 12)]
    assert summary(compiled(nested)) == [("all-reduce", 512, ROWS, 15)]
    assert summary(compiled(branch)) == [("all-reduce", 512, ALL, 1)]

    until = compiled(lambda x: lax.while_loop(lambda v: v[0, 0] < 9, lambda v: lax.psum(v + 1, "y"), x))
    assert summary(until) == [("all-reduce", 512, ROWS, 1)]  # the number of iterations is unknown

    def never(x: jax.Array) -> jax.Array:
        with jax.named_scope(NEVER):
            return lax.while_loop(lambda v: v[0, 0] < 9, lambda v: lax.psum(v + 1, "y"), x)

    assert bytes_by_kind(collectives(compiled(never))) in ({}, {"all-reduce": 0})


ASYNC = """HloModule step, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  ROOT %rs = f32[2]{0} reduce-scatter(%p), replica_groups={}, dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %ar = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  %ard = f32[8]{0} all-reduce-done(%ar)
  %ag = (f32[8]{0}, f32[32]{0:T(256)}) all-gather-start(%ard), replica_groups=[1,4]<=[4], dimensions={0}
  %agd = f32[32]{0} all-gather-done(%ag)
  %cp = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %cpd = f32[8]{0} collective-permute-done(%cp)
  %rs = ((f32[8]{0}), f32[2]{0}) async-start(%x), calls=%wrapped
  %rsd = f32[2]{0} async-done(%rs), calls=%wrapped
  %rss = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%x), replica_groups={}, dimensions={0}, to_apply=%add
  ROOT %out = f32[8]{0} slice(%agd), slice={[0:8]}
}
"""


def test_asynchronous_forms_count_once() -> None:
    assert sorted(summary(ASYNC)) == [
        ("all-gather", 128, ((0, 1, 2, 3),), 1),
        ("all-reduce", 32, ((0, 1), (2, 3)), 1),
        ("collective-permute", 32, ((0, 1), (1, 0)), 1),
        ("reduce-scatter", 32, ((0, 1, 2, 3),), 1),
        ("reduce-scatter", 32, ((0, 1, 2, 3),), 1),
    ]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ALL),
        ("[2,4]<=[8]", ROWS),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("mesh['a'=2,'b'=4] {'a'}", COLUMNS),
        ("mesh['a'=2,'b'=4] {'b'}", ROWS),
        ("mesh['a'=2,'b'=4] {'a','b'}", ALL),
        ("mesh['a'=8,'b'=1] {'a'}", ALL),
        ("mesh['a'=8] {'a':(1)2}", COLUMNS),
        ("mesh['a'=8] {'a':(2)4}", ROWS),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ROWS),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
    ],
)
def test_every_form_of_groups_is_read(text: str, groups: Any) -> None:
    assert parse_groups(f", channel_id=1, replica_groups={text}, use_global_device_ids=true", 8) == groups


def test_flops_of_products_and_convolutions() -> None:
    """On (8, 16) shards: two products, and a 3x3 convolution of 2 to 5 channels."""

    def flops(fun: Any, out: Any = None) -> float:
        computations = parse_module(compiled(fun, out=out)).computations.values()
        shapes = {one.name: one.shape for each in computations for one in each.instructions}
        return sum(flops_of(one, shapes) for each in computations for one in each.instructions)

    def convolution(x: jax.Array) -> jax.Array:
        image, kernel = x.reshape(1, 8, 8, 2), jnp.ones((3, 3, 2, 5))
        return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert flops(lambda x: jnp.einsum("ij,kj->ik", x, x) @ x) == 2 * 8 * 8 * 16 + 2 * 8 * 8 * 16
    assert flops(convolution, out=P()) == 2 * (8 * 8 * 5) * (3 * 3 * 2)
    assert flops(jnp.sin) == 0


def test_what_cannot_be_read_is_said() -> None:
    with pytest.raises(VerifyError, match=r"device groups in an unknown form, `@groups.*bug in minialpa"):
        parse_groups(", replica_groups=@groups", 8)
    with pytest.raises(VerifyError, match="it has no `ENTRY`"):
        parse_module("module @jit_step {\n}\n")


def test_bytes_of_a_shape() -> None:
    sizes = dict(array_sizes("(f32[2,3]{1,0:T(8,128)}, bf16[5]{0}, pred[7], (c64[], s4[4]{0}), token[], f8e4m3fn[9])"))
    assert sizes == {6: 24, 5: 10, 7: 7, 1: 0, 4: 2, 9: 9}


@pytest.mark.parametrize("shape", [(2, 4), (8, 1)])
def test_whole_axes_have_the_price_of_the_mesh(shape: tuple[int, ...]) -> None:
    mesh = LogicalMesh(shape, (3.0, 2.0)[: len(shape)], (0.5, 0.25)[: len(shape)])
    grid = np.arange(8).reshape(shape)
    for n in range(1, len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), n):
            order = [a for a in range(len(shape)) if a not in axes] + list(axes)
            rows = grid.transpose(order).reshape(-1, int(np.prod([shape[a] for a in axes])))
            groups = tuple(map(tuple, rows.tolist()))
            for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
                one = HloCollective(kind=kind, n_bytes=96.0, groups=groups, times=2, n_elements=24)
                assert seconds([one], mesh) == pytest.approx(2 * Collective(kind, 96.0, axes).seconds(mesh))


def test_other_groups_are_grids_or_rings_over_the_slowest_link() -> None:
    mesh = LogicalMesh((2, 4), alpha=(1.0, 0.125), beta=(1.0, 0.25))
    cases = {
        ((0, 1), (2, 3), (4, 5), (6, 7)): 0.125 + 0.25 * 8 / 2,  # half of axis 1
        ((0, 2, 4, 6), (1, 3, 5, 7)): (1 + 1 / 2 * 8 / 2) + (0.125 + 0.25 * 8 / 2),  # a 2 x 2 grid
        ((0, 5), (1, 4), (2, 7), (3, 6)): 1 + 1 / 2 * 8,  # a diagonal
    }
    for groups, price in cases.items():
        one = HloCollective(kind="all-gather", n_bytes=8.0, groups=groups, times=1, n_elements=2)
        assert seconds([one], mesh) == pytest.approx(price)


def test_a_mesh_that_is_too_small_is_refused() -> None:
    one = HloCollective(kind="all-gather", n_bytes=8.0, groups=ROWS, times=1, n_elements=2)
    with pytest.raises(ShardingError, match=r"with device 7, but `mesh`, of shape \(2, 2\), has the devices 0 to 3"):
        seconds([one], LogicalMesh((2, 2)))


def test_a_permutation_costs_its_slowest_pair() -> None:
    (ring,) = collectives(compiled(lambda x: lax.ppermute(x, "y", [(i, (i + 1) % 4) for i in range(4)])))
    assert (ring.kind, ring.n_bytes) == ("collective-permute", 512)
    assert set(ring.groups) == {(4 * row + i, 4 * row + (i + 1) % 4) for row in (0, 1) for i in range(4)}

    mesh = LogicalMesh((2, 4), alpha=(1.0, 0.125), beta=(1.0, 0.25))
    for pairs, price in ((((0, 1), (1, 0)), 0.125 + 0.25 * 8), (((0, 1), (3, 4)), 1 + 8), (((2, 2),), 0.0)):
        one = HloCollective(kind="collective-permute", n_bytes=8.0, groups=pairs, times=1, n_elements=2)
        assert seconds([one], mesh) == pytest.approx(price)
