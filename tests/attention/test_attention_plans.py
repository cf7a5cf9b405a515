"""Plans of steps with attention as one operation."""

from __future__ import annotations

import jax.numpy as jnp

import minialpa
from benchmarks.corpus import arguments as shapes_of
from benchmarks.planning import traced_step
from minialpa import LogicalMesh, ShardParallel, hlo
from minialpa.recognition.step import recognise
from minialpa.rules.expensive import is_contraction
from tests.attention_calls import two_layers, two_layers_arguments
from tests.compiled_text import planned_bytes


def test_attention_of_a_bfloat16_model_is_computed_in_bfloat16() -> None:
    """Rotary embeddings are float32, and their results are rounded before the product."""
    case = minialpa.models.build("llama", n_layers=1, n_heads=8, n_kv_heads=2, dtype=jnp.bfloat16, hidden=32)
    step = recognise(traced_step(case.train_step(minialpa.value_and_grad), *shapes_of(case)), everywhere=True)
    found = [eqn for eqn in step.flat.eqns if is_contraction(eqn) and "attention" in eqn.primitive.name]
    assert len(found) == 2
    for eqn in found:
        query, key, value = (v.aval for v in eqn.invars[:3])
        assert query.shape[2:4] == (2, 4)
        assert {x.dtype.name for x in (query, key, value)} == {"bfloat16"}


def test_collectives_are_counted_beside_the_loops_of_attention() -> None:
    """Attention on several blocks of keys compiles to loops, and its gathers are outside of the loops, as planned."""
    arguments = two_layers_arguments(b=1, s=2048)
    step = minialpa.parallelize(two_layers(minialpa.value_and_grad), method=ShardParallel(LogicalMesh((8,))))
    executable = step.get_executable(*arguments)
    (text,) = executable.get_hlo_text()
    assert " while(" in text

    planned = planned_bytes(executable.get_parallel_plan())
    assert {"all-gather", "reduce-scatter"} <= set(planned)
    assert planned == hlo.bytes_by_kind(hlo.collectives(text))
