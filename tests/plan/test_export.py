"""Placements of a plan in plain `jax.jit`: as pytrees, and as source to paste."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import minialpa
from minialpa import AutoShardingOption, ClusterSpec, ShardingError, ShardParallel, Zero3Parallel
from minialpa.methods import Method
from minialpa.plan import Plan
from minialpa.testing import assert_allclose
from tests.plans import make_args, pipeline_plan, train_step

SPLIT = {"params['w']": PartitionSpec("x", "y"), "batch['x']": PartitionSpec(("x", "y"))}
TWO_AXES = ShardParallel(logical_shape=(2, 4), auto_sharding_option=AutoShardingOption(fixed_specs=SPLIT))

pytestmark = pytest.mark.usefixtures("fresh_session")


def run_source(plan: Plan, mesh: int = 0) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(plan.to_python(mesh), "exported", "exec"), names)
    return names


def plain_step(params: Any, batch: Any) -> Any:
    """`train_step` of a user without minialpa."""

    def loss(p: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(batch["x"] @ p["w"]) @ p["v"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.parametrize(("method", "n_devices"), [(Zero3Parallel(), 4), (TWO_AXES, 8)])
def test_pasted_source_runs_in_plain_jit(method: Method, n_devices: int) -> None:
    cluster = ClusterSpec.preset("a100-40gb", devices_per_host=n_devices)
    args = make_args()
    plan = minialpa.plan(train_step, args, cluster=cluster, method=method)
    names = run_source(plan)
    # The example of the source's own docstring.
    example = [line.strip() for line in names["__doc__"].splitlines() if line.startswith("    ")]
    assert len(example) == 3
    scope = {**names, "step": plain_step, "params": args[0], "batch": args[1]}
    exec("\n".join(example), scope)
    out = scope["step"](*args)
    assert_allclose(out, plain_step(*args), rtol=1e-4, atol=1e-5)
    leaves = dict(zip([v.path for v in plan.outputs], jax.tree.leaves(out), strict=True))
    assert names["mesh"].devices.size == n_devices
    for path, spec in names["out_specs"].items():
        assert leaves[path].sharding.is_equivalent_to(NamedSharding(names["mesh"], spec), leaves[path].ndim)
    assert names["in_specs"]["params['w']"] != PartitionSpec()


def test_pytrees_of_specs_are_what_jit_takes() -> None:
    parallel = minialpa.parallelize(train_step, method=Zero3Parallel())
    args = make_args()
    in_specs, out_specs = parallel.export_specs(*args)
    assert jax.tree.structure(in_specs) == jax.tree.structure(args)
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    shardings = [jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs) for specs in (in_specs, out_specs)]
    step = jax.jit(plain_step, in_shardings=shardings[0], out_shardings=shardings[1])
    assert_allclose(step(*args), parallel(*args), rtol=1e-4, atol=1e-5)


def test_of_a_pipeline_each_mesh_has_its_own_specs() -> None:
    plan = pipeline_plan()
    assert list(plan.export_specs(0).inputs) == ["params['w']", "batch['x']"]
    assert list(plan.export_specs(1).outputs) == ["result[0]['v']", "result[1]"]
    source = plan.to_python(1)
    assert "Mesh 1 of 2 (layer 1): only its own arguments and results are listed." in source
    assert "accumulates gradients over 4 micro-batches, which is not exported" in source
    assert "jax.devices()[4:8]" in source
    names = run_source(plan, 1)
    with pytest.raises(KeyError, match="params"):
        names["shardings"](names["in_specs"], "params", make_args()[0])
    method = minialpa.plan_to_method(pipeline_plan(num_hosts=1, devices_per_host=8))
    in_specs, _ = minialpa.parallelize(train_step, method=method).export_specs(*make_args(), mesh=1)
    assert in_specs[0]["w"] is None and isinstance(in_specs[0]["v"], PartitionSpec)
    with pytest.raises(ShardingError, match="has the meshes 0 to 1, one for each stage; got `mesh=2`"):
        plan.export_specs(2)


def test_unused_arguments_and_arguments_without_names() -> None:
    def step(*args: Any) -> Any:
        return args[0] + 1.0

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = minialpa.plan(step, (x, {"unused": x}), cluster=ClusterSpec.preset("cpu", devices_per_host=4))
    assert plan.export_specs().inputs["args[1]['unused']"] == PartitionSpec()
    assert 'shardings(in_specs, "args[1]", args[1])' in plan.to_python()
