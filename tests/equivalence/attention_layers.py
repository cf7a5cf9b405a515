"""The grammar of attention: layers of sequences, and of images, that users and libraries write in many ways.

`FUSED` lists layers in the form of an attention; `WRITTEN` lists layers close to it, which recognition must not change;
`MASKED` lists combinations of masks, softmaxes, guards and dtypes.
Importing this module adds them to `layers.RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.equivalence.layers import SIDE, TIME, WIDTH, Apply, Params, add_layer, detached

HEADS, DEPTH, MEMORY = 4, 4, 3
_ROOT = np.float32(np.sqrt(DEPTH))
#: Names of layers.
FUSED: list[str] = []
WRITTEN: list[str] = []

Shapes = dict[str, tuple[int, ...]]
#: Shapes of the parameters of queries, keys, values and the output, for all heads and for two heads of keys.
_PROJECTIONS: Shapes = {name: (WIDTH, HEADS * DEPTH) for name in ("q", "k", "v")} | {"out": (HEADS * DEPTH, WIDTH)}
_GROUPED: Shapes = {**_PROJECTIONS, "k": (WIDTH, 2 * DEPTH), "v": (WIDTH, 2 * DEPTH)}
_BIAS: Shapes = {"bias": (1, HEADS, TIME, TIME)}

# ---- parts of an attention ------------------------------------------------------------------------------------------


def _heads(h: jax.Array, w: jax.Array) -> jax.Array:
    """Projections [b t h d]."""
    return (h @ w).reshape(*h.shape[:-1], -1, DEPTH)


def _qkv(p: Params, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _heads(h, p["q"]), _heads(h, p["k"]), _heads(h, p["v"])


def _merged(p: Params, heads: jax.Array) -> jax.Array:
    return heads.reshape(*heads.shape[:-2], -1) @ p["out"]


def _lengths(h: jax.Array, least: int) -> jax.Array:
    """The number of valid positions of each example, from its first value: `least` to TIME."""
    first = jnp.abs(detached(h).reshape(h.shape[0], -1)[:, 0])
    return jnp.clip(jnp.floor(3 * first).astype(np.int32), least, TIME)


def _is_padding(h: jax.Array, least: int) -> jax.Array:
    """[b s]"""
    return jnp.arange(TIME)[None] >= _lengths(h, least)[:, None]


def _padding(h: jax.Array, least: int) -> jax.Array:
    """Whether a key is padding, [b 1 1 s]."""
    return _is_padding(h, least)[:, None, None, :]


def _causal(n_queries: int = TIME, n_keys: int = TIME) -> jax.Array:
    """[t s], where the last query sees all keys."""
    return jnp.arange(n_keys)[None] <= jnp.arange(n_queries)[:, None] + (n_keys - n_queries)


def _ahead() -> jax.Array:
    """How far each key is ahead of each query, [t s]."""
    return jnp.arange(TIME)[None] - jnp.arange(TIME)[:, None]


def _exponentials(scores: jax.Array) -> jax.Array:
    return jnp.exp(scores - detached(jnp.max(scores, -1, keepdims=True)))


def _total(weights: jax.Array) -> jax.Array:
    return jnp.sum(weights, -1, keepdims=True)


def _softmax_by_hand(scores: jax.Array) -> jax.Array:
    weights = _exponentials(scores)
    return weights / _total(weights)


def _masked_scores(seen: jax.Array, scores: jax.Array, masked_score: float) -> jax.Array:
    """seen: [t s], or [b 1 t s]"""
    return jnp.where(seen if seen.ndim == 4 else seen[None, None], scores, masked_score)


def _softmax_where(seen: jax.Array, scores: jax.Array, masked_score: float) -> jax.Array:
    return jax.nn.softmax(_masked_scores(seen, scores, masked_score))


def _products(q: jax.Array, k: jax.Array) -> jax.Array:
    """[b h t s]"""
    return jnp.einsum("bthd,bshd->bhts", q, k)


def _mixed(p: Params, weights: jax.Array, v: jax.Array) -> jax.Array:
    return _merged(p, jnp.einsum("bhts,bshd->bthd", weights, v))


# ---- how layers are added -------------------------------------------------------------------------------------------


def _attention(
    names: list[str] = FUSED, shapes: Shapes = _PROJECTIONS, kinds: str = "sequence", **others: tuple[int, ...]
) -> Callable[[Apply], Apply]:
    """Adds the decorated function to the layers."""

    def register(apply: Apply) -> Apply:
        names.append(apply.__name__)
        add_layer(apply.__name__, apply, kinds, **shapes, **others)
        return apply

    return register


def _dot_product(
    name: str, options: Callable[[Params, jax.Array], dict[str, Any]], shapes: Shapes = _PROJECTIONS
) -> None:
    """Adds a `jax.nn.dot_product_attention`, with options of the parameters and activations."""

    def apply(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
        return _merged(p, jax.nn.dot_product_attention(*_qkv(p, h), **options(p, h)))

    FUSED.append(name)
    add_layer(name, apply, "sequence", **shapes)


def _weighted(
    name: str,
    weights: Callable[[Params, jax.Array, jax.Array], jax.Array],
    names: list[str] = FUSED,
    divisor: Any = _ROOT,
    **others: tuple[int, ...],
) -> None:
    """Adds an attention by its weights of the parameters, the activations and the scores [b h t s]."""

    def apply(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
        q, k, v = _qkv(p, h)
        products = _products(q, k)
        return _mixed(p, weights(p, h, products if divisor is None else products / divisor), v)

    names.append(name)
    add_layer(name, apply, "sequence", **_PROJECTIONS, **others)


# ---- jax.nn.dot_product_attention -----------------------------------------------------------------------------------

_dot_product("dot_product", lambda p, h: {})
_dot_product("causal_dot_product", lambda p, h: {"is_causal": True, "scale": 0.7})
_dot_product("grouped_causal_dot_product", lambda p, h: {"is_causal": True}, _GROUPED)


@_attention(shapes={**_PROJECTIONS, "k": (WIDTH, DEPTH), "v": (WIDTH, DEPTH)})
def one_head_of_keys(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return h + _merged(p, jax.nn.dot_product_attention(*_qkv(p, h)))


def _both_lengths(h: jax.Array) -> dict[str, jax.Array]:
    return dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), _lengths(h, 1))


_dot_product("padded_dot_product", lambda p, h: {"mask": ~_padding(h, 1), "is_causal": True})
_dot_product("dot_product_of_lengths", lambda p, h: {**_both_lengths(h), "is_causal": True})
_dot_product("biased_dot_product", lambda p, h: {"bias": p["bias"]}, _GROUPED | _BIAS)
_dot_product(
    "biased_masked_dot_product",
    lambda p, h: {"bias": p["bias"], "mask": ~_padding(h, 1), "is_causal": True},
    _PROJECTIONS | _BIAS,
)
_dot_product("window_dot_product", lambda p, h: {"local_window_size": (1, 1)})
_dot_product("causal_window_dot_product", lambda p, h: {"is_causal": True, "local_window_size": 2}, _GROUPED)


@_attention()
def dot_product_by_example(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    one = lambda row: _merged(p, jax.nn.dot_product_attention(*_qkv(p, row), is_causal=True))  # noqa: E731
    return jax.vmap(one)(h)


# ---- any number of queries ------------------------------------------------------------------------------------------


@_attention(table=(2, WIDTH))
def learned_queries(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Two learned queries for all examples, as in a perceiver."""
    table = jnp.broadcast_to(p["table"][None], (h.shape[0], *p["table"].shape))
    found = jax.nn.dot_product_attention(_heads(table, p["q"]), _heads(h, p["k"]), _heads(h, p["v"]))
    return h + jnp.repeat(_merged(p, found), TIME // 2, 1)


@_attention(table=(MEMORY, WIDTH))
def learned_keys(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """A learned memory before the positions: more keys than queries, and a causal mask that begins after it."""
    seen = jnp.concatenate([jnp.broadcast_to(p["table"][None], (h.shape[0], MEMORY, WIDTH)), h], 1)
    q, k, v = _heads(h, p["q"]), _heads(seen, p["k"]), _heads(seen, p["v"])
    scores = _products(q, k) / _ROOT
    return _mixed(p, _softmax_where(_causal(TIME, MEMORY + TIME), scores, -1e9), v)


@_attention()
def last_queries(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Only the last two positions are queries."""
    q, k, v = _heads(h[:, 2:], p["q"]), _heads(h, p["k"]), _heads(h, p["v"])
    scores = _products(q / _ROOT, k)
    weights = _softmax_where(_causal(2, TIME), scores, jnp.finfo(scores.dtype).min)
    return jnp.concatenate([h[:, :2], _mixed(p, weights, v)], 1)


@_attention()
def queries_in_blocks(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """A scan over blocks of queries."""
    q, k, v = _qkv(p, h)
    blocks = jnp.moveaxis(q.reshape(h.shape[0], 2, TIME // 2, HEADS, DEPTH), 1, 0)
    found = jax.lax.map(lambda block: jax.nn.dot_product_attention(block, k, v), blocks)
    return _merged(p, jnp.moveaxis(found, 0, 1).reshape(h.shape[0], TIME, HEADS, DEPTH))


# ---- as libraries write it, and by hand -----------------------------------------------------------------------------


@_attention(shapes=_PROJECTIONS | _BIAS)
def as_flax_writes_it(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    q, k, v = _qkv(p, h)
    scores = jnp.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(DEPTH).astype(q.dtype), k) + p["bias"]
    mask = jnp.logical_and(_causal()[None, None], ~_padding(h, 1))
    weights = _softmax_where(mask, scores, jnp.finfo(scores.dtype).min).astype(v.dtype)
    return _merged(p, jnp.einsum("...hqk,...khd->...qhd", weights, v))


@_attention()
def products_of_matrices(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in _qkv(p, h))
    weights = _softmax_by_hand(0.5 * (q @ jnp.swapaxes(k, 2, 3)))
    return _merged(p, jnp.swapaxes(weights @ v, 1, 2))


@_attention()
def divided_last(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """The division comes after the product with the values."""
    q, k, v = _qkv(p, h)
    weights = _exponentials(_masked_scores(_causal(), _products(q, k / _ROOT), -jnp.inf))
    total = jnp.sum(weights, -1)[..., None]
    return _merged(p, jnp.swapaxes(jnp.einsum("bhts,bshd->bhtd", weights, v) / total, 1, 2))


def _by_log_of_the_sum(scores: jax.Array) -> jax.Array:
    return jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True))


def _additive_masks(p: Params, h: jax.Array, scores: jax.Array) -> jax.Array:
    """Large negative numbers on the scores, for later positions and, in each example, for padding."""
    scores = scores + jnp.where(_causal(), 0.0, -1e4)[None, None]
    return jax.nn.softmax(scores + (-1e4 * _padding(h, 1).astype(h.dtype)))


_weighted("by_log_of_the_sum", lambda p, h, scores: _by_log_of_the_sum(scores))
_weighted("additive_masks", _additive_masks)
#: A query sees itself and the position before, so the first blocks of the last queries have no score.
_weighted("infinite_band", lambda p, h, s: _softmax_where(~(_ahead() > 0) & (_ahead() >= -1), s, -jnp.inf))
#: The last two queries see no key, and average over all keys.
_weighted("far_ahead", lambda p, h, s: _softmax_where(_ahead() >= 2, s, -1e9))
_weighted(
    "prefix_or_causal",
    lambda p, h, s: _softmax_where((_ahead() <= 0) | (jnp.arange(TIME)[None] < 2), s, -1e9),
)
#: An example of length zero averages over all keys, as the masked score is finite.
_weighted("some_see_nothing", lambda p, h, s: jax.nn.softmax(jnp.where(_padding(h, 0), -1e9, s)))


def _texts(h: jax.Array) -> jax.Array:
    """Whether a position sees another: both belong to one text, of several texts in one example."""
    number = jnp.cumsum((detached(h)[..., 0] > 0).astype(np.int32), 1)
    return jnp.logical_and(number[:, None, :, None] == number[:, None, None, :], _causal()[None, None])


def _slopes(p: Params, h: jax.Array, scores: jax.Array) -> jax.Array:
    """Subtracts a constant per head times the distance from the scores."""
    distance = (jnp.arange(TIME)[:, None] - jnp.arange(TIME)[None]).astype(h.dtype)
    slope = (2.0 ** -jnp.arange(1, HEADS + 1, dtype=h.dtype))[:, None, None] * jnp.abs(distance)[None]
    return jax.nn.softmax(scores - slope[None])


_dot_product("segments", lambda p, h: {"mask": _texts(h)})
_weighted("slopes", _slopes)


@_attention(shapes=_GROUPED)
def turned_heads(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Rotary positions, and repeated heads of keys."""
    angle = jnp.arange(TIME, dtype=h.dtype)[:, None] * jnp.array([1.0, 0.1], h.dtype)[None]
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]

    def turn(x: jax.Array) -> jax.Array:
        left, right = jnp.split(x, 2, -1)
        return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)

    q, k, v = _qkv(p, h)
    k, v = (jnp.repeat(x, HEADS // 2, 2) for x in (turn(k), v))
    return _mixed(p, _softmax_where(_causal(), _products(turn(q), k), -1e9), v)


@_attention(scale=(HEADS, 1))
def unit_queries_and_keys(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Queries and keys of length one, and a learned scale on the queries of each head."""
    q, k, v = _qkv(p, h)
    q, k = (x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-2) for x in (q, k))
    return _merged(p, jax.nn.dot_product_attention(q * (2 * p["scale"])[None, None], k, v, scale=1.0))


@_attention(kinds="image")
def attention_over_pixels(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    pixels = h.reshape(h.shape[0], SIDE * SIDE, WIDTH)
    return _merged(p, jax.nn.dot_product_attention(*_qkv(p, pixels))).reshape(h.shape)


@_attention(kinds="image")
def attention_along_rows(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Pixels of a row see each other: each row of each example by itself."""
    weights = jax.nn.softmax(jnp.einsum("bithd,bishd->bihts", _heads(h, p["q"]), _heads(h, p["k"])) / _ROOT)
    return _merged(p, jnp.einsum("bihts,bishd->bithd", weights, _heads(h, p["v"])))


# ---- close to an attention ------------------------------------------------------------------------------------------


@_attention(WRITTEN)
def dropout_on_weights(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    q, k, v = _qkv(p, h)
    weights = jax.nn.softmax(_products(q, k) / _ROOT)
    keep = jax.random.bernoulli(key, 0.75, weights.shape)
    return _mixed(p, jnp.where(keep, weights / 0.75, 0), v)


def _sinks(p: Params, h: jax.Array, scores: jax.Array) -> jax.Array:
    """A further score in the softmax, without a value."""
    sink = jnp.broadcast_to(p["bias"], (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, sink], -1))[..., :-1]


def _capped(p: Params, h: jax.Array, products: jax.Array) -> jax.Array:
    return _softmax_where(_causal(), 2 * jnp.tanh(products / 2), -1e9)


_weighted("soft_cap", _capped, WRITTEN, None)
_weighted("sinks", _sinks, WRITTEN, bias=(1, HEADS, 1, 1))


@_attention(WRITTEN)
def weights_read_twice(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    q, k, v = _qkv(p, h)
    weights = jax.nn.softmax(_products(q, k) / _ROOT)
    entropy = jnp.sum(weights * jnp.log(weights + 1e-3), (1, 3))
    return _mixed(p, weights, v) + 0.1 * entropy[..., None]


def _normalised_over_queries(p: Params, h: jax.Array, scores: jax.Array) -> jax.Array:
    """The softmax runs over the queries, as in slot attention."""
    weights = jax.nn.softmax(scores, 2)
    return weights / (_total(weights) + 0.1)


def _two_masked_values(p: Params, h: jax.Array, scores: jax.Array) -> jax.Array:
    """Two masked scores: far below for later positions, and a little below for padding."""
    scores = jnp.where(_padding(h, 1), -3.0, scores)
    return _softmax_where(_causal(), scores, -1e9)


def _not_quite_a_softmax(p: Params, h: jax.Array, scores: jax.Array) -> jax.Array:
    """The divisor is slightly too large, so that weights do not add up to one."""
    weights = _exponentials(scores)
    return weights / (_total(weights) + 0.1)


_weighted("learned_temperature", lambda p, h, s: jax.nn.softmax(s * p["scale"]), WRITTEN, None, scale=(1, HEADS, 1, 1))
_weighted("normalised_over_queries", _normalised_over_queries, WRITTEN)
_weighted("two_masked_values", _two_masked_values, WRITTEN)
_weighted(
    "bias_after_a_mask",
    lambda p, h, s: jax.nn.softmax(_masked_scores(_causal(), s, -2.0) + p["bias"]),
    WRITTEN,
    **_BIAS,
)
_weighted("not_quite_a_softmax", _not_quite_a_softmax, WRITTEN)


# ---- masks ----------------------------------------------------------------------------------------------------------

#: Which key positions a query sees, [t s], or [b 1 t s] where some dimensions may have length 1.
_SEEN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "causal": lambda h: _causal(),
    "padding": lambda h: ~_padding(h, 1),
    "all_padding": lambda h: ~_padding(h, 0),
    "window": lambda h: _causal() & ~_causal(TIME, TIME + 2)[:, :TIME],
    "empty_window": lambda h: (_ahead() <= 0)[None, None] & (_ahead() > 0)[None, None],
    "rows_of_padding": lambda h: ~(_is_padding(h, 1)[:, None, :, None] | _padding(h, 0)),
    "never": lambda h: _causal()[None, None] & (_ahead() >= 2)[None, None],
}


def _where(value: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda scores, seen: jnp.where(seen, scores, jnp.asarray(value, scores.dtype))


def _plus(value: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda scores, seen: scores + (1 - seen.astype(scores.dtype)) * jnp.asarray(value, scores.dtype)


#: How scores are masked.
_HIDDEN: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "where_infinite": _where(-np.inf),
    "where_far_below": _where(-1e9),
    "where_a_little_below": _where(-3.0),
    "where_lowest": lambda scores, seen: jnp.where(seen, scores, jnp.finfo(scores.dtype).min),
    "plus_a_few_thousand": _plus(-1e4),
    "plus_a_billion": _plus(-1e9),
    "plus_lowest": lambda scores, seen: scores + jnp.where(seen, 0, jnp.finfo(scores.dtype).min).astype(scores.dtype),
    "minus": lambda scores, seen: scores - jnp.asarray(1e9, scores.dtype) * (1 - seen.astype(scores.dtype)),
}


def _weights(scores: jax.Array, seen: jax.Array, guard: Callable[[jax.Array], jax.Array]) -> jax.Array:
    top = detached(jnp.max(scores, -1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    return weights / guard(_total(weights))


def _without_maximum(scores: jax.Array, seen: jax.Array) -> jax.Array:
    weights = jnp.exp(scores)
    total = _total(weights)
    return weights / jnp.where(total > 0, total, 1)


#: Softmaxes, with guards and without.
_SOFTMAX: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "softmax": lambda scores, seen: jax.nn.softmax(scores),
    "by_hand": lambda scores, seen: _softmax_by_hand(scores),
    "where_seen": lambda scores, seen: jax.nn.softmax(scores, where=jnp.broadcast_to(seen, scores.shape)),
    "guarded": lambda scores, seen: _weights(scores, seen, lambda total: jnp.where(total > 0, total, 1)),
    "unguarded": lambda scores, seen: _weights(scores, seen, lambda total: total),
    "plus_epsilon": lambda scores, seen: _weights(scores, seen, lambda total: total + 1e-6),
    "guarded_without_maximum": _without_maximum,
    "log": lambda scores, seen: _by_log_of_the_sum(scores),
}
#: Softmaxes that are NaN for a query without keys, if the masked score is infinite.
_MAKE_NAN = ("softmax", "by_hand", "unguarded", "log")
#: Operations on the weights.
_OUTER: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "": lambda weights, seen: weights,
    "hidden": lambda weights, seen: jnp.where(seen, weights, 0),
    "multiplied": lambda weights, seen: weights * seen.astype(weights.dtype),
    "without_nan": lambda weights, seen: jnp.nan_to_num(weights),
}
#: The dtype of scores.
_DTYPES = {"": np.float32, "short": jnp.bfloat16}


def _masked(parts: tuple[str, ...]) -> Apply:
    """The layer of these keys of the tables above, and whether it has a gradient."""
    seen_by, hidden, softmax, outer, dtype, is_evaluated = parts

    def apply(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
        q, k, v = _qkv(p, h)
        if dtype:  # products of whole numbers, which are exact
            q, k = (jnp.round(3 * x) for x in (q, k))
        seen = _SEEN[seen_by](h)
        seen = seen if seen.ndim == 4 else seen[None, None]
        scores = jnp.einsum("bthd,bshd->bhts", *(x.astype(_DTYPES[dtype]) for x in (q, k)))
        scores = _HIDDEN[hidden](scores, seen).astype(h.dtype)
        weights = _OUTER[outer](_SOFTMAX[softmax](scores, seen), seen)
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v)
        # One query without keys must not make all results NaN.
        out = _merged(p, jnp.where(jnp.isnan(mixed), 0.5, mixed))
        return h + detached(out) if is_evaluated else h + out

    apply.__name__ = "_".join(part for part in ("masked", *parts) if part)
    return apply


def _some_masked(n: int) -> Iterator[tuple[str, ...]]:
    """Combinations of the parts of masked layers: at most `n`, always the same ones."""
    random, tables = Random(0), (_SEEN, _HIDDEN, _SOFTMAX, _OUTER, _DTYPES, {"": 0, "evaluated": 0})
    for i in range(n):
        seen, hidden, *others = (random.choice([*table]) for table in tables)
        # XLA turns a product with a mask of equal shape into a select: NaN times 0 is then 0, on some shards.
        if others[1] == "multiplied" and others[0] in _MAKE_NAN:
            continue
        # Guards and outer masks matter most for queries without keys, if the masked score is infinite.
        yield ("all_padding", "where_infinite", *others) if i % 3 == 0 else (seen, hidden, *others)


#: Names of layers with masks.
MASKED: list[str] = []
for _parts in dict.fromkeys(_some_masked(192)):
    _attention(MASKED)(_masked(_parts))
