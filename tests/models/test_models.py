"""Every model of the corpus trains, traces without values, and calls its boundary hook."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import hypothesis.strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa.errors import TraceError
from minialpa.models import MODELS, ModelCase, build
from minialpa.models.base import Boundaries
from minialpa.models.experts import top2_gating

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_untied": ("gpt", {"tie_head": False}),
    "gpt_bfloat16": ("gpt", {"dtype": jnp.bfloat16}),
    "llama_scan": ("llama", {"scan_layers": True}),
    "llama_scan_dropout": ("llama", {"scan_layers": True, "remat_blocks": True, "dropout": 0.5}),
    "llama_loss_chunks": ("llama", {"loss_chunks": 4}),
    "moe_dropout": ("moe", {"dropout": 0.1, "optimizer": "adafactor"}),
    "resnet_bottleneck": ("resnet", {"kind": "bottleneck", "imagenet_stem": True}),
} | {name: (name, {}) for name in MODELS}


def _case(variant: str) -> ModelCase:
    name, arguments = VARIANTS[variant]
    return build(name, batch_size=4, **arguments)


@functools.cache
def _started(variant: str, seed: int) -> tuple[ModelCase, Any]:
    """A model and its first state, made once for all tests that only read them."""
    case = _case(variant)
    return case, jax.jit(case.init)(jax.random.key(seed))


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree)


# Other tests train the other models as on one device.
@pytest.mark.parametrize("name", ["llama", "moe", pytest.param("t5", marks=pytest.mark.slow), "vit"])
def test_three_serial_steps_change_a_finite_loss(name: str, seed: int) -> None:
    case, state = _started(name, seed)
    step = jax.jit(case.train_step(jax.value_and_grad))
    batch = case.make_batch(seed, case.batch_size)
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.all(np.isfinite(losses)), losses
    assert len(set(losses)) == 3, losses
    assert metrics["loss"].dtype == jnp.float32
    assert int(state.step) == 3


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_init_and_step_trace_without_values(variant: str, key: jax.Array, seed: int) -> None:
    case = _case(variant)
    state = jax.eval_shape(case.init, key)
    batch = _abstract(case.make_batch(seed, case.batch_size))
    after, metrics = jax.eval_shape(case.train_step(jax.value_and_grad), state, batch)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )
    assert metrics["loss"].shape == ()


@pytest.mark.parametrize("name", ["llama", "moe", "resnet", "t5", "two_tower", "unet", "vit"])
def test_boundary_hook_runs_once_for_each_boundary(name: str, key: jax.Array, seed: int) -> None:
    calls: list[None] = []
    deeper = {"n_layers": 3} if name in {"llama", "moe", "vit"} else {}
    case = build(name, batch_size=2, boundary=lambda: calls.append(None), n_boundaries=2, **deeper)
    state = jax.eval_shape(case.init, key)
    assert not calls, "initialisation has no boundaries"
    jax.eval_shape(case.train_step(jax.value_and_grad), state, _abstract(case.make_batch(seed, 2)))
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("count", "n_blocks", "cuts"), [(0, 4, []), (1, 4, [1]), (3, 4, [0, 1, 2]), (1, 5, [1]), (2, 9, [2, 5])]
)
def test_boundaries_cut_the_blocks_into_even_runs(count: int, n_blocks: int, cuts: list[int]) -> None:
    seen: list[int] = []
    for block in range(n_blocks):
        Boundaries(lambda block=block: seen.append(block), count, n_blocks).after(block)
    assert seen == cuts


@pytest.mark.parametrize("name", sorted(MODELS))
def test_equal_seeds_give_equal_batches(name: str, seed: int) -> None:
    case = build(name)
    first, again, other = (case.make_batch(s, 8) for s in (seed, seed, seed + 1))
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
    assert not jax.tree.all(jax.tree.map(np.array_equal, first, other))
    assert {leaf.shape[0] for leaf in first.values()} == {8}


def _loss_of(case: ModelCase) -> Any:
    """(state, batch) -> loss, with no gradients to compile."""

    def without_gradients(loss_fn: Any, *, has_aux: bool) -> Any:
        assert has_aux
        return lambda params: (loss_fn(params), params)

    step = case.train_step(without_gradients)
    return jax.jit(lambda state, batch: step(state, batch)[1]["loss"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("t5", "unet") else ())
        for name in sorted(set(MODELS) - {"bert", "gpt", "resnet"})
    ],
)
def test_loss_is_the_mean_of_the_losses_of_single_examples(name: str, seed: int) -> None:
    case, state = _started(name, seed)
    loss, batch = _loss_of(case), case.make_batch(seed, 3)
    rows = [loss(state, jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch)) for i in range(3)]
    np.testing.assert_allclose(loss(state, batch), np.mean(rows), rtol=1e-5)


def test_bert_loss_ignores_positions_with_mask_zero(seed: int) -> None:
    case, state = _started("bert", seed)
    loss, batch = _loss_of(case), case.make_batch(seed, 4)
    changed = {**batch, "labels": np.where(batch["mask"] == 0, (batch["labels"] + 1) % 64, batch["labels"])}
    assert loss(state, batch) == loss(state, changed)


@pytest.mark.parametrize("name", ["gpt", "llama", "moe", "t5"])
def test_decoders_do_not_see_the_future(name: str, seed: int) -> None:
    case, state = _started(name, seed)
    batch = case.make_batch(seed, 2)

    def first_logits(batch: Any) -> jax.Array:
        inputs = [batch[leaf] for leaf in ("source", "tokens") if leaf in batch]
        return jax.tree.leaves(state.apply_fn({"params": state.params}, *inputs))[0][:, :-1]

    changed = {**batch, "tokens": np.concatenate([batch["tokens"][:, :-1], batch["tokens"][:, -1:] ^ 1], axis=1)}
    np.testing.assert_allclose(first_logits(batch), first_logits(changed), atol=1e-6)


@pytest.mark.slow  # tests/inter/layers/test_unstack.py has its short relative
def test_scanned_llama_equals_unrolled_llama(seed: int) -> None:
    (scanned, stacked), (unrolled, state) = _started("llama_scan", seed), _started("llama", seed)
    batch = scanned.make_batch(seed, 2)
    blocks = {f"block_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], stacked.params["blocks"]) for i in range(2)}
    params = {**{name: leaf for name, leaf in stacked.params.items() if name != "blocks"}, **blocks}
    state = state.replace(params=params)
    np.testing.assert_allclose(_loss_of(scanned)(stacked, batch), _loss_of(unrolled)(state, batch), rtol=1e-5)


@pytest.mark.slow  # llama in chunks is traced and refused in short tests
def test_llama_with_a_loss_in_chunks_trains_like_llama(seed: int) -> None:
    (chunked, state), (whole, same) = _started("llama_loss_chunks", seed), _started("llama", seed)
    jax.tree.map(np.testing.assert_array_equal, state.params, same.params)
    batch = whole.make_batch(seed, 4)
    after, metrics = jax.jit(chunked.train_step(jax.value_and_grad))(state, batch)
    expected, expected_metrics = jax.jit(whole.train_step(jax.value_and_grad))(same, batch)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), after.params, expected.params)


def test_chunks_that_do_not_divide_the_positions_are_refused() -> None:
    with pytest.raises(TraceError, match="`loss_chunks=3` does not divide the 16 positions"):
        build("llama", loss_chunks=3)


@hypothesis.given(hypothesis.strategies.integers(0, 2**31), hypothesis.strategies.integers(1, 8))
@hypothesis.settings(max_examples=20)
def test_top2_gating_gives_each_slot_to_one_token_and_each_token_at_most_two(draw: int, n_slots: int) -> None:
    logits = np.random.default_rng(draw).standard_normal((2, 8, 4), np.float32)
    combine = np.asarray(top2_gating(jnp.asarray(logits), n_slots).combine)
    assert combine.shape == (2, 8, 4, n_slots)
    assert ((combine > 0).sum(axis=1) <= 1).all(), "a slot holds one token"
    assert ((combine > 0).sum(axis=(2, 3)) <= 2).all(), "a token has two experts"
    assert (combine.sum(axis=(2, 3)) <= 1 + 1e-6).all(), "gates of a token sum to at most 1"
    if n_slots == 8:
        np.testing.assert_allclose(combine.sum(axis=(2, 3)), 1, rtol=1e-5)


def test_resnet_moves_its_running_statistics_and_counts_correct_predictions(seed: int) -> None:
    case, state = _started("resnet", seed)
    batch = case.make_batch(seed, 4)
    after, metrics = jax.jit(case.train_step(jax.value_and_grad))(state, batch)
    assert not jax.tree.all(jax.tree.map(np.array_equal, state.batch_stats, after.batch_stats))
    assert metrics["correct"].dtype == jnp.int32
    assert 0 <= int(metrics["correct"]) <= 4


@pytest.mark.parametrize(
    "sizes",
    [pytest.param({}, marks=pytest.mark.slow, id="loop"), pytest.param({"scan_layers": True}, id="scan")],
)
def test_dropout_draws_new_masks_in_each_step(sizes: dict[str, Any], key: jax.Array, seed: int) -> None:
    case = build("llama", dropout=0.5, learning_rate=0.0, **sizes)
    step = jax.jit(case.train_step(jax.value_and_grad))
    state, batch = jax.jit(case.init)(key), case.make_batch(seed, 4)
    later, first = step(state, batch)
    assert first["loss"] == step(state, batch)[1]["loss"]
    assert first["loss"] != step(later, batch)[1]["loss"]


def test_an_unknown_model_optimizer_or_argument_is_refused() -> None:
    with pytest.raises(TraceError, match=r"no model `gtp`.*bert, gpt.*gpt-1\.3b"):
        build("gtp")
    with pytest.raises(TraceError, match=r"no optimizer `lion`.*adafactor, adam"):
        build("mlp", optimizer="lion")
    for name, argument in (("gpt", "ffn"), ("mlp", "dropout"), ("vit", "seq_len"), ("t5", "boundaries")):
        with pytest.raises(TypeError, match=argument):
            build(name, **{argument: 1})


def test_boundaries_inside_a_scan_are_refused() -> None:
    with pytest.raises(TraceError, match="Layers in a scan are one block"):
        build("llama", scan_layers=True, boundary=lambda: None)


def test_more_boundaries_than_gaps_are_refused() -> None:
    with pytest.raises(TraceError, match="2 boundaries do not fit between 2 blocks"):
        build("gpt", n_layers=2, boundary=lambda: None, n_boundaries=2)
