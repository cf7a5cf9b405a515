"""Recipes communicate as in the textbooks."""

from __future__ import annotations

import jax
import pytest

from benchmarks.corpus import Case, arguments
from benchmarks.recipes import Recipe, measure
from minialpa import hlo

MLP = Case("mlp", "mlp", (("batch_size", 16), ("hidden", 64), ("n_layers", 4), ("use_bias", False)))
MOE = Case("moe", "moe", (("batch_size", 8), ("hidden", 64), ("n_heads", 8), ("n_layers", 1), ("seq_len", 32)))
DP, TP = Recipe("dp", 8, 1), Recipe("tp", 1, 8)


def bytes_of(case: Case, recipe: Recipe) -> dict[str, float]:
    """Bytes of each kind, without what only moves scalars or sums norms and biases (less than 2 kB each)."""
    found = measure(case, recipe).collectives
    return dict(hlo.bytes_by_kind(one for one in found if one.n_bytes > 2000))


def parameter_bytes(case: Case) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments(case.build())[0].params))


def test_data_parallel_recipe_sums_the_gradients_and_fsdp_scatters_them() -> None:
    assert bytes_of(MLP, DP)["all-reduce"] == pytest.approx(parameter_bytes(MLP), rel=1e-3)
    assert bytes_of(MLP, Recipe("fsdp", 8, 1, fsdp=True))["reduce-scatter"] == parameter_bytes(MLP)
    assert measure(MLP, Recipe("fsdp", 8, 1, fsdp=True)).memory_bytes < measure(MLP, DP).memory_bytes


def test_megatron_recipe_reduces_activations_once_for_each_pair() -> None:
    """Forward for both pairs, backward for the second: the first one reads data."""
    assert bytes_of(MLP, TP) == {"all-reduce": pytest.approx(3 * 16 * 64 * 4, rel=1e-3)}


def test_expert_recipe_exchanges_tokens() -> None:
    """Two exchanges forward, two backward, of [e g c m] with c = 2 * 32 * 2 / 8 slots; each device holds one group."""
    found = bytes_of(MOE, Recipe("ep", 8, 1, experts=True))
    assert found["all-to-all"] == 4 * (8 * 1 * 16 * 64 * 4)
    assert "all-gather" not in found
