"""Every model of the corpus traces, calls its boundary hook, has the loss of its examples, and a published size."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa.errors import TraceError
from minialpa.models import MODELS, SIZES, ModelCase, build
from minialpa.models.base import Boundaries
from minialpa.models.layers import top2_gating

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_bfloat16": ("gpt", {"dtype": jnp.bfloat16}),
    "llama_scan_dropout": ("llama", {"scan_layers": True, "remat_blocks": True, "dropout": 0.5}),
} | {name: (name, {}) for name in MODELS}


@functools.cache
def _started(name: str, seed: int, **sizes: Any) -> tuple[ModelCase, Any]:
    """A model and its first state, made once for all tests that only read them."""
    case = build(name, batch_size=4, **sizes)
    return case, jax.jit(case.init)(jax.random.key(seed))


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_step_traces_keeps_the_types_of_its_state_and_calls_the_hook(variant: str, key: jax.Array) -> None:
    name, arguments = VARIANTS[variant]
    calls: list[None] = []
    n_boundaries = 0 if "scan_layers" in arguments else 1
    case = build(name, batch_size=4, n_boundaries=n_boundaries, boundary=lambda: calls.append(None), **arguments)
    state = jax.eval_shape(case.init, key)
    assert not calls, "initialisation has no boundaries"

    batch = _abstract(case.make_batch(0, 4))
    after, metrics = jax.eval_shape(case.train_step(jax.value_and_grad), state, batch)
    assert _abstract(after) == _abstract(state)
    assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32
    assert len(calls) == n_boundaries


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
    first, second, other = (case.make_batch(s, 8) for s in (seed, seed, seed + 1))
    assert jax.tree.all(jax.tree.map(np.array_equal, first, second))
    assert not jax.tree.all(jax.tree.map(np.array_equal, first, other))
    assert {leaf.shape[0] for leaf in first.values()} == {8}


def _forward(case: ModelCase) -> Any:
    """The step without gradients to compile: the update gets the parameters in their place."""

    def without_gradients(loss_fn: Any, *, has_aux: bool) -> Any:
        assert has_aux
        return lambda params: (loss_fn(params), params)

    return jax.jit(case.train_step(without_gradients))


def _loss_of(case: ModelCase) -> Any:
    step = _forward(case)
    return lambda state, batch: step(state, batch)[1]["loss"]


@pytest.mark.parametrize("name", ["moe", "two_tower"])
def test_loss_is_the_mean_of_the_losses_of_single_examples(name: str, seed: int) -> None:
    case, state = _started(name, seed, n_layers=1)
    loss, batch = _loss_of(case), case.make_batch(seed, 3)
    singles = [loss(state, jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch)) for i in range(3)]
    assert np.all(np.isfinite(singles)) and len(set(map(float, singles))) == 3
    np.testing.assert_allclose(loss(state, batch), np.mean(singles), rtol=1e-5)


def test_bert_loss_ignores_positions_with_mask_zero(seed: int) -> None:
    case, state = _started("bert", seed, n_layers=1)
    loss, batch = _loss_of(case), case.make_batch(seed, 4)
    changed = {**batch, "labels": np.where(batch["mask"] == 0, (batch["labels"] + 1) % 64, batch["labels"])}
    assert loss(state, batch) == loss(state, changed)


@pytest.mark.parametrize("name", ["gpt", "llama", "t5"])
def test_decoders_do_not_see_the_future(name: str, seed: int) -> None:
    case, state = _started(name, seed, n_layers=1)
    batch = case.make_batch(seed, 2)

    @jax.jit
    def first_logits(batch: Any) -> jax.Array:
        inputs = [batch[leaf] for leaf in ("source", "tokens") if leaf in batch]
        return state.apply_fn({"params": state.params}, *inputs)[:, :-1]

    changed = {**batch, "tokens": np.concatenate([batch["tokens"][:, :-1], batch["tokens"][:, -1:] ^ 1], axis=1)}
    np.testing.assert_allclose(first_logits(batch), first_logits(changed), atol=1e-6)


def test_llama_with_a_loss_in_chunks_has_the_loss_of_llama(seed: int) -> None:
    chunked, state = _started("llama", seed, loss_chunks=4, n_layers=1)
    whole, _ = _started("llama", seed, n_layers=1)
    batch = whole.make_batch(seed, 4)
    np.testing.assert_allclose(_loss_of(chunked)(state, batch), _loss_of(whole)(state, batch), rtol=1e-6)


@pytest.mark.parametrize("n_slots", [3, 8])
def test_top2_gating_gives_each_slot_to_one_token_and_each_token_at_most_two(n_slots: int, seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal((20, 8, 4), np.float32)
    combine = np.asarray(top2_gating(jnp.asarray(logits), n_slots).combine)
    assert ((combine > 0).sum(axis=1) <= 1).all(), "a slot holds one token"
    assert ((combine > 0).sum(axis=(2, 3)) <= 2).all(), "a token has two experts"
    assert (combine.sum(axis=(2, 3)) <= 1 + 1e-6).all(), "gates of a token sum to at most 1"
    if n_slots == 8:
        np.testing.assert_allclose(combine.sum(axis=(2, 3)), 1, rtol=1e-5)


def test_resnet_moves_its_running_statistics_and_counts_correct_predictions(seed: int) -> None:
    case, state = _started("resnet", seed)
    after, metrics = _forward(case)(state, case.make_batch(seed, 4))
    assert not jax.tree.all(jax.tree.map(np.array_equal, state.batch_stats, after.batch_stats))
    assert metrics["correct"].dtype == jnp.int32
    assert 0 <= int(metrics["correct"]) <= 4


def test_dropout_draws_new_masks_in_each_step(seed: int) -> None:
    case, state = _started("llama", seed, dropout=0.5, scan_layers=True)
    loss, batch = _loss_of(case), case.make_batch(seed, 4)
    assert loss(state, batch) == loss(state, batch)
    assert loss(state, batch) != loss(state.replace(step=state.step + 1), batch)


def test_unknown_names_and_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TraceError, match=r"no model `gtp`.*bert, gpt.*gpt-1\.3b"):
        build("gtp")
    with pytest.raises(TraceError, match=r"no optimizer `lion`.*adafactor, adam"):
        build("mlp", optimizer="lion")
    with pytest.raises(TypeError, match="ffn"):
        build("gpt", ffn=1)
    with pytest.raises(TraceError, match=r"`loss_chunks=3` does not divide `seq_len=16`\. Pass a divisor"):
        build("llama", loss_chunks=3)
    with pytest.raises(TraceError, match="layers in a scan are one block"):
        build("llama", scan_layers=True, boundary=lambda: None)
    with pytest.raises(TraceError, match="2 boundaries do not fit between 2 blocks"):
        build("gpt", n_layers=2, boundary=lambda: None, n_boundaries=2)


# ---- published sizes ------------------------------------------------------------------------------------------------


def n_parameters(name: str, key: jax.Array, **arguments: Any) -> int:
    params = jax.eval_shape(build(name, **arguments).init, key).params
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


#: The smallest size of each model.
SHORT = {
    min((size.n_parameters, name) for name, size in SIZES.items() if size.model == model)[1]
    for model in {size.model for size in SIZES.values()}
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in sorted(SIZES)]
)
def test_published_size_has_its_published_parameter_count(name: str, key: jax.Array) -> None:
    """Each further pair of layers adds the same number: MoE has experts in every second layer."""
    n_layers = SIZES[name].arguments.get("n_layers", 0)
    if n_layers <= 4:
        n = n_parameters(name, key)
    else:
        two, four = (n_parameters(name, key, n_layers=n, batch_size=8) for n in (2, 4))
        n = two + (n_layers - 2) // 2 * (four - two)
    np.testing.assert_allclose(n, SIZES[name].n_parameters, rtol=0.07)
