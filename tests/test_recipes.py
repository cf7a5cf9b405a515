"""Recipes communicate what the textbooks say, and plans are compared with them and with their programs rightly."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.corpus import Case, arguments
from benchmarks.plan_fidelity import compiled_bytes, difference, fidelity
from benchmarks.plan_quality import links_of
from benchmarks.recipes import Recipe, compile_step, measure, parameter_spec, recipes_for, state_layout
from benchmarks.stderr import captured_stderr
from minialpa import LogicalMesh, hlo
from minialpa.testing import assert_allclose

MLP = Case("mlp", "mlp", (("batch_size", 16), ("hidden", 64), ("n_layers", 4), ("use_bias", False)))
GPT = Case("gpt", "gpt", (("batch_size", 8), ("hidden", 128), ("n_heads", 8), ("n_layers", 1), ("vocab_size", 256)))
MOE = Case("moe", "moe", (("batch_size", 8), ("hidden", 64), ("n_heads", 8), ("n_layers", 1), ("seq_len", 32)))
DP, TP = Recipe("dp", 8, 1), Recipe("tp", 1, 8)


def bytes_of(case: Case, recipe: Recipe) -> dict[str, float]:
    """Bytes of each kind, without what only moves scalars or sums norms and biases (less than 2 kB each)."""
    found = measure(case, recipe).collectives
    return dict(hlo.bytes_by_kind(one for one in found if one.n_bytes > 2000))


def parameter_bytes(case: Case) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments(case.build())[0].params))


def test_data_parallel_recipe_sums_the_gradients() -> None:
    assert bytes_of(MLP, DP)["all-reduce"] == pytest.approx(parameter_bytes(MLP), rel=1e-3)


def test_fsdp_recipe_gathers_parameters_and_scatters_gradients() -> None:
    found = bytes_of(MLP, Recipe("fsdp", 8, 1, fsdp=True))
    assert found["reduce-scatter"] == parameter_bytes(MLP)
    assert measure(MLP, Recipe("fsdp", 8, 1, fsdp=True)).memory_bytes < measure(MLP, DP).memory_bytes


def test_megatron_recipe_reduces_activations_once_for_each_pair() -> None:
    """Forward for both pairs, backward for the second: the first one reads data."""
    assert bytes_of(MLP, TP) == {"all-reduce": pytest.approx(3 * 16 * 64 * 4, rel=1e-3)}


@pytest.mark.slow  # the other recipes are the short relative
def test_sequence_recipe_gathers_and_scatters_where_megatron_reduces() -> None:
    """Embedding, attention and feed-forward forward; the latter two and the tied head backward."""
    activation = 8 * 16 * 128 * 4
    assert bytes_of(GPT, TP) == {"all-reduce": pytest.approx(6 * activation, rel=0.02)}
    assert bytes_of(GPT, Recipe("tp+sp", 1, 8, sequence=True))["reduce-scatter"] == pytest.approx(6 * activation)


def test_expert_recipe_exchanges_tokens() -> None:
    """Two exchanges forward, two backward, of [e g c m] with c = 2 * 32 * 2 / 8 slots; each device holds one group."""
    found = bytes_of(MOE, Recipe("ep", 8, 1, experts=True))
    assert found["all-to-all"] == 4 * (8 * 1 * 16 * 64 * 4)
    assert "all-gather" not in found


def test_recipes_compute_what_one_device_does(key: jax.Array) -> None:
    built = MOE.build()
    state, batch = jax.jit(built.init)(key), built.make_batch(0, 8)
    expected = jax.jit(built.train_step(jax.value_and_grad))(state, batch)[1]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((state, batch))]  # nothing that a step could donate
    for recipe in (Recipe("ep", 8, 1, experts=True), Recipe("2d+sp", 2, 4, sequence=True)):
        compiled = compile_step(MOE, recipe)
        args, _ = jax.tree.unflatten(compiled.in_tree, leaves)
        args = jax.device_put(args, compiled.input_shardings[0])
        assert_allclose(compiled(*args)[1], expected, rtol=1e-4, atol=1e-6)


def test_recipes_apply_where_examples_and_heads_divide() -> None:
    assert [r.name for r in recipes_for(Case("resnet", "resnet", ()), 4)] == ["dp", "fsdp"]
    names = [r.name for r in recipes_for(Case("gpt", "gpt", (("n_heads", 2), ("batch_size", 4))), 4)]
    assert names == ["dp", "fsdp", "2d 2x2", "2d+sp 2x2"]
    assert "ep" in [r.name for r in recipes_for(MOE, 8)]


def test_parameters_are_split_by_path_and_size() -> None:
    llama = Case("llama", "llama", (("n_kv_heads", 2), ("n_heads", 8)))
    expected = {"query": P(None, "model"), "key": P(None, None), "out": P("model", None), "norm": P(None)}
    for name, spec in expected.items():
        assert parameter_spec(llama, TP, f"block_0/{name}/kernel", (32, 32)[: len(spec)]) == spec
    assert parameter_spec(GPT, TP, "tokens/embedding", (60, 128)) == P(None, None)  # 60 rows do not divide
    both = Recipe("", 2, 4, fsdp=True)
    assert parameter_spec(GPT, both, "block_0/feed_forward/up/kernel", (128, 512)) == P("data", "model")


def test_optimizer_state_lies_as_its_parameters() -> None:
    state = arguments(GPT.build())[0]
    layout = state_layout(GPT, TP, state, TP.mesh())
    specs = {jax.tree_util.keystr(keys): s.spec for keys, s in jax.tree_util.tree_leaves_with_path(layout)}
    split = "['block_0']['feed_forward']['up']['kernel']"
    assert [specs[f"{where}{split}"] for where in (".params", ".opt_state[0].mu", ".opt_state[0].nu")] == [
        P(None, "model")
    ] * 3
    assert specs[".step"] == P()


def test_one_axis_over_two_levels_has_the_slow_link() -> None:
    uniform, two = links_of(8)
    assert uniform.plan[0].beta == uniform.price.beta == uniform.plan[1].beta[:1] == uniform.plan[1].beta[1:]
    assert two.plan[0].beta[0] == two.price.beta[0] == pytest.approx(10 * two.price.beta[1])


def test_difference_counts_what_is_missing_moved_and_resized() -> None:
    one = {("all-reduce", (0,)): 100.0}
    assert difference(one, one) == 0
    assert difference(one, {("all-reduce", (0,)): 80.0}) == pytest.approx(0.2)
    assert difference(one, {("all-gather", (0,)): 100.0}) == 2
    assert difference(one, {}) == 1
    assert difference({}, {}) == 0


def test_compiled_bytes_are_filed_by_kind_and_axes() -> None:
    rows, ones = ((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))
    found = [
        hlo.HloCollective(kind="all-reduce", n_bytes=8.0, groups=rows, times=3, n_elements=2),
        hlo.HloCollective(kind="all-reduce", n_bytes=8.0, groups=ones, times=1, n_elements=2),
        hlo.HloCollective(kind="collective-permute", n_bytes=4.0, groups=((0, 1),), times=1, n_elements=1),
    ]
    assert compiled_bytes(found, LogicalMesh((2, 2))) == {("all-reduce", (1,)): 24, ("collective-permute", None): 4}


def test_data_parallel_plans_come_true() -> None:
    one = fidelity(MLP, LogicalMesh((4,)), "data")
    assert one.same_kinds
    assert one.bytes_error < 0.01
    assert min(one.memory_bytes) > parameter_bytes(MLP)


def test_what_xla_could_not_partition_well_is_counted() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    before, after = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "y"))
    turn = jax.jit(lambda x: x, in_shardings=before, out_shardings=after).lower(np.ones((16, 64), np.float32))
    with captured_stderr() as printed:
        turn.compile()
    assert printed.rematerialised == 1


def test_standard_error_comes_back_and_failures_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    with captured_stderr() as printed:
        os.write(2, b"hidden")
    assert printed.text == "hidden"
    with pytest.raises(ValueError, match="fails"), captured_stderr():
        os.write(2, b"told")
        raise ValueError("fails")
    os.write(2, b", after")
    assert capfd.readouterr().err == "told, after"
