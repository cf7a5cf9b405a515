"""Drawings of arrays show which devices hold which shards, on each mesh."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa.errors import ShardingError
from tests.plans import make_args, pipeline_plan, train_step
from tests.runtime.cluster.in_process_session import in_process_session


def cells(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("|")
    ]


def on_mesh(spec: P, shape: tuple[int, ...] = (8, 16)) -> Any:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    return jax.device_put(jnp.zeros(shape), NamedSharding(mesh, spec))


def test_an_array_of_jax_is_drawn_as_its_shards() -> None:
    assert cells(str(minialpa.visualize(on_mesh(P("a", "b"))))) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    drawing = minialpa.visualize(on_mesh(P(None, "b")))
    assert cells(str(drawing)) == [["0, 2, 4, 6", "1, 3, 5, 7"]]
    assert "float32[8, 16]" in str(drawing) and "columns over 2 on a mesh of 4 x 2" in repr(drawing)
    assert cells(str(minialpa.visualize(jnp.zeros(3)))) == [["0"]]


@given(st.sampled_from([P(), P("a"), P("b"), P("b", "a"), P(("a", "b")), P(None, ("b", "a"))]))
def test_the_drawing_agrees_with_the_shards_that_jax_reports(spec: P) -> None:
    array = on_mesh(spec)
    rows, columns = (len({str(s.index[d]) for s in array.addressable_shards}) for d in (0, 1))
    drawn = cells(str(minialpa.visualize(array)))
    if max(rows, columns) > 5:
        return  # parts are left out
    assert (len(drawn), len(drawn[0])) == (rows, columns)
    for shard in array.addressable_shards:
        row, column = (
            ((s.start or 0) * n) // size for s, n, size in zip(shard.index, (rows, columns), (8, 16), strict=True)
        )
        numbers = re.findall(r"(\d+)(?:-(\d+))?", drawn[row][column])
        assert any(int(a) <= shard.device.id <= int(b or a) for a, b in numbers)


def test_planned_arguments_are_drawn_on_their_stages() -> None:
    plan = pipeline_plan()
    spec = next(spec for spec in plan.input_specs if spec.path == "params['v']")
    text = str(minialpa.visualize(spec, plan=plan))
    assert text.startswith("params['v'] float32[8, 8]\nstage 1: ") and "4" in text
    with pytest.raises(ShardingError, match="needs the `plan`"):
        minialpa.visualize(spec)


def test_arrays_of_a_step_show_as_pictures_in_a_notebook() -> None:
    params, batch = make_args()
    state, _ = minialpa.parallelize(train_step, method=minialpa.ShardParallel())(params, batch)
    html = minialpa.visualize(state["w"])._repr_html_()
    assert html.count("<svg") == 1 and "on a mesh of 8" in html
    with pytest.raises(ShardingError, match="Pass one leaf of a pytree"):
        minialpa.visualize(state)


def test_an_array_on_several_meshes_of_a_cluster_is_drawn_on_each() -> None:
    params, batch = make_args()
    method = minialpa.PipeshardParallel(num_micro_batches=4, layer_option="manual", stage_option="uniform")
    with in_process_session(2, 2):
        state, loss = minialpa.parallelize(train_step, method=method)(params, batch)
        first, second = (minialpa.visualize(state[name]) for name in ("w", "v"))
        assert "mesh from device 0: " in str(first) and "mesh from device 2: " in str(second)
        assert "float32[8, 8]" in state["w"]._repr_html_() and str(minialpa.visualize(loss))
