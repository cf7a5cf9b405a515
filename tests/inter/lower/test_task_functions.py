"""Functions as bytes: equal stages have equal bytes, for any line of the source and any caller of the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import minialpa
from minialpa.inter.lower.exported_functions import export_function
from minialpa.programs.mesh_program import MeshFunction
from minialpa.support.private_jax import exported_text


def here(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def there(y: jax.Array, v: jax.Array) -> jax.Array:
    z = y @ v
    return jnp.tanh(z)


def train_step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        x = here(batch["x"], p["a"])
        minialpa.mark_pipeline_boundary()
        x = here(x, p["b"])
        minialpa.mark_pipeline_boundary()
        x = there(x, p["c"])
        minialpa.mark_pipeline_boundary()
        return jnp.mean((there(x, p["d"]) - batch["y"]) ** 2)

    value, grads = minialpa.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def named_step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        x = batch["x"]
        for name in "abcd":
            with jax.named_scope(f"layer_{name}"):
                x = here(x, p[name])
            if name != "d":
                minialpa.mark_pipeline_boundary()
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = minialpa.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def exported(*names: str, step: Any = train_step) -> dict[str, MeshFunction]:
    method = minialpa.PipeshardParallel(
        devices=jax.devices()[:4],
        num_micro_batches=2,
        layer_option="manual",
        stage_option=minialpa.UniformStageOption(num_stages=4),
    )
    params = {name: jnp.ones((8, 8)) for name in "abcd"}
    batch = {name: jnp.ones((4, 8)) for name in "xy"}
    program = minialpa.parallelize(step, method=method).get_executable(params, batch)._program
    shapes = [mesh.logical_shape for mesh in program.meshes]
    return {f.name: export_function(f, shapes[f.mesh], "cpu") for f in program.functions if f.name in names}


def test_functions_as_bytes_do_not_depend_on_lines() -> None:
    """Neither on the lines of equal stages, nor on the line that calls the step."""
    before = jax.config.jax_traceback_in_locations_limit
    first = exported("forward0", "forward1", "forward2", "forward3", "backward1", "backward2")
    second = exported("forward1", "backward2")
    assert jax.config.jax_traceback_in_locations_limit == before

    for name in ("forward", "backward"):
        assert first[f"{name}1"].code == first[f"{name}2"].code, name
    assert first["forward0"].code != first["forward3"].code
    assert all(f.code == first[name].code for name, f in second.items())
    assert not any(__file__.encode() in f.code or b".py" in f.code for f in first.values())


def test_equal_stages_differ_in_the_names_of_modules_alone() -> None:
    found = exported("forward1", "forward2", step=named_step)
    assert b"jvp(layer_b)/dot_general" in found["forward1"].code
    assert b"jvp(layer_c)/dot_general" in found["forward2"].code
    assert exported_text(found["forward1"].code) == exported_text(found["forward2"].code)
