"""The option for attentions as operations holds for every trace of a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from minialpa import AutoShardingOption, ManualStageOption, UniformStageOption
from minialpa.errors import ShardingError
from minialpa.methods import attention_of
from tests.recognition.compared import array


def step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        y = (x @ w)[:, :, None]
        return jnp.mean(jax.nn.dot_product_attention(y, y, y, is_causal=True) ** 2)

    return w - minialpa.grad(loss)(w)


def _traced(method: Any, length: int) -> Any:
    function = minialpa.parallelize(step, method=method, batch_argnums=(1,))
    args = (array(0, 4, 4), jax.ShapeDtypeStruct((2, length, 4), jnp.float32))
    return function._trace(function._parameters.bind(args, {}))


def _has_attention(traced: Any) -> bool:
    return any(eqn.primitive.name == "minialpa_attention" for eqn in traced.flat.eqns)


def _shard(attention: Any) -> Any:
    return minialpa.ShardParallel(auto_sharding_option=AutoShardingOption(attention=attention))


def test_the_option_says_which_attentions_become_operations() -> None:
    found = {
        (name, n): _has_attention(_traced(_shard(name), n)) for name in ("auto", "fused", "written") for n in (8, 256)
    }
    assert found == {
        ("auto", 8): False, ("auto", 256): True,
        ("fused", 8): True, ("fused", 256): True,
        ("written", 8): False, ("written", 256): False,
    }  # fmt: skip
    assert not _has_attention(_traced(minialpa.AutoParallel(), 128))
    assert _has_attention(_traced(minialpa.PipeshardParallel(), 129))


def test_origins_of_attentions() -> None:
    traced = _traced(_shard("fused"), 8)
    origins = {eqn.primitive.name: one for eqn, one in zip(traced.flat.eqns, traced.origins, strict=True)}
    forward, backward = origins["minialpa_attention"], origins["minialpa_attention_gradient"]
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert (forward.group, forward.call) == (backward.group, backward.call)
    assert {one.group for one in traced.origins if one.group is not None} == set(range(traced.n_groups))


def test_a_plan_is_for_the_step_of_its_method() -> None:
    args = (array(0, 4, 4), jax.ShapeDtypeStruct((2, 8, 4), jnp.float32))
    plan = minialpa.parallelize(step, method=_shard("written"), batch_argnums=(1,)).plan(*args)
    assert attention_of(plan) == "written"
    assert plan.fingerprint == _traced(plan, 8).fingerprint != _traced(_shard("fused"), 8).fingerprint


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ShardingError, match="`attention` must be 'auto', 'fused', or 'written'; got 'flash'"):
        AutoShardingOption(attention="flash")  # type: ignore[arg-type]

    fused = AutoShardingOption(attention="fused")
    written = AutoShardingOption(attention="written")
    uniform = UniformStageOption(2, submesh_autosharding_option=fused)
    with pytest.raises(ShardingError, match=r"all stages share one value. Set `default_auto_sharding_option"):
        minialpa.PipeshardParallel(stage_option=uniform, default_auto_sharding_option=written).options()
    for name, asked in (("attention", "fused"), ("expert_skew", 2.0)):
        manual = ManualStageOption([[0], [1]], [(1, 1)] * 2, [(1,)] * 2, [{name: asked}, {}])
        with pytest.raises(ShardingError, match=rf"`{name}={asked!r}`, .* all stages share one value. Set `default"):
            minialpa.PipeshardParallel(stage_option=manual).options()
