"""The grammar of attention: layers of sequences, and of images, that users and libraries write in many ways.

`FUSED` lists layers in the form of an attention; `WRITTEN` lists layers close to it, which recognition has to leave;
`MASKED` lists combinations of masks, softmaxes, guards and dtypes.
Importing this module adds them to `layers.RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import jax
import jax.numpy as jnp
import numpy as np

from tests.equivalence.layers import SIDE, TIME, WIDTH, Apply, Params, layer_rule

HEADS, DEPTH, MEMORY = 4, 4, 3
_ROOT = np.float32(np.sqrt(DEPTH))
#: Names of layers.
FUSED: list[str] = []
WRITTEN: list[str] = []

#: Shapes of the parameters of queries, keys, values and the output, for all heads and for two heads of keys.
_PROJECTIONS = {name: (WIDTH, HEADS * DEPTH) for name in ("q", "k", "v")} | {"out": (HEADS * DEPTH, WIDTH)}
_GROUPED = {**_PROJECTIONS, "k": (WIDTH, 2 * DEPTH), "v": (WIDTH, 2 * DEPTH)}
_ONE_HEAD = {**_PROJECTIONS, "k": (WIDTH, DEPTH), "v": (WIDTH, DEPTH)}


def _attention(names: list[str], kinds: str = "sequence", **shapes: tuple[int, ...]) -> Callable[[Apply], Apply]:
    def register(apply: Apply) -> Apply:
        names.append(apply.__name__.strip("_"))
        layer_rule(kinds, **shapes)(apply)
        return apply

    return register


def _heads(h: jax.Array, w: jax.Array) -> jax.Array:
    """Projections [b t h d]."""
    return (h @ w).reshape(*h.shape[:-1], -1, DEPTH)


def _qkv(p: Params, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _heads(h, p["q"]), _heads(h, p["k"]), _heads(h, p["v"])


def _merged(p: Params, heads: jax.Array) -> jax.Array:
    return heads.reshape(*heads.shape[:-2], -1) @ p["out"]


def _lengths(h: jax.Array, least: int) -> jax.Array:
    """How many positions of each example count, by the first of its values: `least` to TIME."""
    first = jnp.abs(jax.lax.stop_gradient(h).reshape(h.shape[0], -1)[:, 0])
    return jnp.clip(jnp.floor(3 * first).astype(np.int32), least, TIME)


def _is_padding(h: jax.Array, least: int) -> jax.Array:
    """[b s]"""
    return jnp.arange(TIME)[None] >= _lengths(h, least)[:, None]


def _causal(n_queries: int, n_keys: int) -> jax.Array:
    """[t s], where the last query sees all keys."""
    return jnp.arange(n_keys)[None] <= jnp.arange(n_queries)[:, None] + (n_keys - n_queries)


def _softmax_by_hand(scores: jax.Array) -> jax.Array:
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True)))
    return weights / jnp.sum(weights, -1, keepdims=True)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """[b h t s]"""
    return jnp.einsum("bthd,bshd->bhts", q, k) / _ROOT


def _mixed(p: Params, weights: jax.Array, v: jax.Array) -> jax.Array:
    return _merged(p, jnp.einsum("bhts,bshd->bthd", weights, v))


def _attend(p: Params, h: jax.Array, weights: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Attention with a function from scores to weights."""
    q, k, v = _qkv(p, h)
    return _mixed(p, weights(_scores(q, k)), v)


# ---- jax.nn.dot_product_attention -----------------------------------------------------------------------------------


@_attention(FUSED, **_PROJECTIONS)
def dot_product(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return _merged(p, jax.nn.dot_product_attention(*_qkv(p, h)))


@_attention(FUSED, **_PROJECTIONS)
def causal_dot_product(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return _merged(p, jax.nn.dot_product_attention(*_qkv(p, h), is_causal=True, scale=0.7))


@_attention(FUSED, **_GROUPED)
def grouped_causal_dot_product(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return _merged(p, jax.nn.dot_product_attention(*_qkv(p, h), is_causal=True))


@_attention(FUSED, **_ONE_HEAD)
def one_head_of_keys(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return h + _merged(p, jax.nn.dot_product_attention(*_qkv(p, h)))


@_attention(FUSED, **_PROJECTIONS)
def padded_dot_product(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    mask = ~_is_padding(h, 1)[:, None, None, :]
    return _merged(p, jax.nn.dot_product_attention(*_qkv(p, h), mask=mask, is_causal=True))


@_attention(FUSED, **_PROJECTIONS)
def dot_product_of_lengths(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    lengths = _lengths(h, 1)
    attended = jax.nn.dot_product_attention(
        *_qkv(p, h), query_seq_lengths=lengths, key_value_seq_lengths=lengths, is_causal=True
    )
    return _merged(p, attended)


@_attention(FUSED, **_GROUPED, bias=(1, HEADS, TIME, TIME))
def biased_dot_product(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return _merged(p, jax.nn.dot_product_attention(*_qkv(p, h), bias=p["bias"]))


@_attention(FUSED, **_PROJECTIONS, bias=(1, HEADS, TIME, TIME))
def biased_masked_dot_product(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    mask = ~_is_padding(h, 1)[:, None, None, :]
    return _merged(p, jax.nn.dot_product_attention(*_qkv(p, h), bias=p["bias"], mask=mask, is_causal=True))


@_attention(FUSED, **_PROJECTIONS)
def window_dot_product(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return _merged(p, jax.nn.dot_product_attention(*_qkv(p, h), local_window_size=(1, 1)))


@_attention(FUSED, **_GROUPED)
def causal_window_dot_product(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return _merged(p, jax.nn.dot_product_attention(*_qkv(p, h), is_causal=True, local_window_size=2))


@_attention(FUSED, **_PROJECTIONS)
def dot_product_by_example(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    one = lambda row: _merged(p, jax.nn.dot_product_attention(*_qkv(p, row), is_causal=True))  # noqa: E731
    return jax.vmap(one)(h)


# ---- as many queries as are wanted ----------------------------------------------------------------------------------


@_attention(FUSED, **_PROJECTIONS, table=(2, WIDTH))
def learned_queries(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Two learned queries for all examples, as in a perceiver."""
    table = jnp.broadcast_to(p["table"][None], (h.shape[0], *p["table"].shape))
    found = jax.nn.dot_product_attention(_heads(table, p["q"]), _heads(h, p["k"]), _heads(h, p["v"]))
    return h + jnp.repeat(_merged(p, found), TIME // 2, 1)


@_attention(FUSED, **_PROJECTIONS, table=(MEMORY, WIDTH))
def learned_keys(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """A learned memory before the positions: more keys than queries, and a causal mask that begins after it."""
    seen = jnp.concatenate([jnp.broadcast_to(p["table"][None], (h.shape[0], MEMORY, WIDTH)), h], 1)
    q, k, v = _heads(h, p["q"]), _heads(seen, p["k"]), _heads(seen, p["v"])
    scores = _scores(q, k)
    weights = jax.nn.softmax(jnp.where(_causal(TIME, MEMORY + TIME)[None, None], scores, -1e9))
    return _mixed(p, weights, v)


@_attention(FUSED, **_PROJECTIONS)
def last_queries(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Only the last two positions ask."""
    q, k, v = _heads(h[:, 2:], p["q"]), _heads(h, p["k"]), _heads(h, p["v"])
    scores = jnp.einsum("bthd,bshd->bhts", q / _ROOT, k)
    weights = jax.nn.softmax(jnp.where(_causal(2, TIME)[None, None], scores, jnp.finfo(scores.dtype).min))
    return jnp.concatenate([h[:, :2], _mixed(p, weights, v)], 1)


@_attention(FUSED, **_PROJECTIONS)
def queries_in_blocks(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """A scan over blocks of queries."""
    q, k, v = _qkv(p, h)
    blocks = jnp.moveaxis(q.reshape(h.shape[0], 2, TIME // 2, HEADS, DEPTH), 1, 0)
    found = jax.lax.map(lambda block: jax.nn.dot_product_attention(block, k, v), blocks)
    return _merged(p, jnp.moveaxis(found, 0, 1).reshape(h.shape[0], TIME, HEADS, DEPTH))


# ---- as libraries write it, and by hand -----------------------------------------------------------------------------


@_attention(FUSED, **_PROJECTIONS, bias=(1, HEADS, TIME, TIME))
def as_flax_writes_it(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    q, k, v = _qkv(p, h)
    scores = jnp.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(DEPTH).astype(q.dtype), k) + p["bias"]
    mask = jnp.logical_and(_causal(TIME, TIME)[None, None], ~_is_padding(h, 1)[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min)).astype(v.dtype)
    return _merged(p, jnp.einsum("...hqk,...khd->...qhd", weights, v))


@_attention(FUSED, **_PROJECTIONS)
def products_of_matrices(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in _qkv(p, h))
    weights = _softmax_by_hand(0.5 * (q @ jnp.swapaxes(k, 2, 3)))
    return _merged(p, jnp.swapaxes(weights @ v, 1, 2))


@_attention(FUSED, **_PROJECTIONS)
def divided_last(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """The division comes after the product with the values."""
    q, k, v = _qkv(p, h)
    scores = jnp.einsum("bthd,bshd->bhts", q, k / _ROOT)
    scores = jnp.where(_causal(TIME, TIME)[None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True)))
    total = jnp.sum(weights, -1)[..., None]
    return _merged(p, jnp.swapaxes(jnp.einsum("bhts,bshd->bhtd", weights, v) / total, 1, 2))


@_attention(FUSED, **_PROJECTIONS)
def by_log_of_the_sum(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return _attend(p, h, lambda scores: jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True)))


@_attention(FUSED, **_PROJECTIONS)
def additive_masks(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Large negative numbers on the scores, for later positions and, in each example, for padding."""
    q, k, v = _qkv(p, h)
    scores = _scores(q, k)
    scores = scores + jnp.where(_causal(TIME, TIME), 0.0, -1e4)[None, None]
    scores = scores + (-1e4 * _is_padding(h, 1).astype(h.dtype))[:, None, None, :]
    return _mixed(p, jax.nn.softmax(scores), v)


def _softmax_where(p: Params, h: jax.Array, seen: jax.Array, masked_score: float) -> jax.Array:
    """seen: [t s]"""
    return _attend(p, h, lambda scores: jax.nn.softmax(jnp.where(seen[None, None], scores, masked_score)))


def _ahead() -> jax.Array:
    """How far each key is ahead of each query, [t s]."""
    return jnp.arange(TIME)[None] - jnp.arange(TIME)[:, None]


@_attention(FUSED, **_PROJECTIONS)
def infinite_band(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """A query sees itself and the position before, so the first blocks of the last queries have no score."""
    return _softmax_where(p, h, ~(_ahead() > 0) & (_ahead() >= -1), -jnp.inf)


@_attention(FUSED, **_PROJECTIONS)
def far_ahead(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """The last two queries see no key, and average over all keys."""
    return _softmax_where(p, h, _ahead() >= 2, -1e9)


@_attention(FUSED, **_PROJECTIONS)
def prefix_or_causal(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return _softmax_where(p, h, (_ahead() <= 0) | (jnp.arange(TIME)[None] < 2), -1e9)


@_attention(FUSED, **_PROJECTIONS)
def some_see_nothing(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """An example of length zero averages over all keys, as the masked score is finite."""
    hidden = _is_padding(h, 0)[:, None, None, :]
    return _attend(p, h, lambda scores: jax.nn.softmax(jnp.where(hidden, -1e9, scores)))


@_attention(FUSED, **_PROJECTIONS)
def segments(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Several texts in one example: a position sees its own text, by numbers of each example."""
    number = jnp.cumsum((jax.lax.stop_gradient(h)[..., 0] > 0).astype(np.int32), 1)
    same = number[:, None, :, None] == number[:, None, None, :]
    mask = jnp.logical_and(same, _causal(TIME, TIME)[None, None])
    return _merged(p, jax.nn.dot_product_attention(*_qkv(p, h), mask=mask))


@_attention(FUSED, **_PROJECTIONS)
def slopes(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """A constant that grows with the distance, other for each head, off the scores."""
    distance = (jnp.arange(TIME)[:, None] - jnp.arange(TIME)[None]).astype(h.dtype)
    slope = (2.0 ** -jnp.arange(1, HEADS + 1, dtype=h.dtype))[:, None, None] * jnp.abs(distance)[None]
    return _attend(p, h, lambda scores: jax.nn.softmax(scores - slope[None]))


@_attention(FUSED, **_GROUPED)
def turned_heads(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Rotary positions, and heads of keys that are repeated."""
    angle = jnp.arange(TIME, dtype=h.dtype)[:, None] * jnp.array([1.0, 0.1], h.dtype)[None]
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]

    def turn(x: jax.Array) -> jax.Array:
        left, right = jnp.split(x, 2, -1)
        return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)

    q, k, v = _qkv(p, h)
    k, v = (jnp.repeat(x, HEADS // 2, 2) for x in (turn(k), v))
    scores = jnp.where(_causal(TIME, TIME)[None, None], jnp.einsum("bthd,bshd->bhts", turn(q), k), -1e9)
    return _mixed(p, jax.nn.softmax(scores), v)


@_attention(FUSED, **_PROJECTIONS, scale=(HEADS, 1))
def unit_queries_and_keys(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Queries and keys of length one, and a learned scale on the queries of each head."""
    q, k, v = _qkv(p, h)
    q, k = (x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-2) for x in (q, k))
    return _merged(p, jax.nn.dot_product_attention(q * (2 * p["scale"])[None, None], k, v, scale=1.0))


@_attention(FUSED, "image", **_PROJECTIONS)
def attention_over_pixels(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    pixels = h.reshape(h.shape[0], SIDE * SIDE, WIDTH)
    return _merged(p, jax.nn.dot_product_attention(*_qkv(p, pixels))).reshape(h.shape)


@_attention(FUSED, "image", **_PROJECTIONS)
def attention_along_rows(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Pixels of a row see each other: each row of each example by itself."""
    weights = jax.nn.softmax(jnp.einsum("bithd,bishd->bihts", _heads(h, p["q"]), _heads(h, p["k"])) / _ROOT)
    return _merged(p, jnp.einsum("bihts,bishd->bithd", weights, _heads(h, p["v"])))


# ---- close to an attention ------------------------------------------------------------------------------------------


@_attention(WRITTEN, **_PROJECTIONS)
def dropout_on_weights(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    q, k, v = _qkv(p, h)
    weights = jax.nn.softmax(_scores(q, k))
    keep = jax.random.bernoulli(key, 0.75, weights.shape)
    return _merged(p, jnp.einsum("bhts,bshd->bthd", jnp.where(keep, weights / 0.75, 0), v))


@_attention(WRITTEN, **_PROJECTIONS)
def soft_cap(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    q, k, v = _qkv(p, h)
    scores = 2 * jnp.tanh(jnp.einsum("bthd,bshd->bhts", q, k) / 2)
    weights = jax.nn.softmax(jnp.where(_causal(TIME, TIME)[None, None], scores, -1e9))
    return _mixed(p, weights, v)


@_attention(WRITTEN, **_PROJECTIONS, bias=(1, HEADS, 1, 1))
def sinks(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """One score more in the softmax, which has no value."""
    q, k, v = _qkv(p, h)
    scores = _scores(q, k)
    sink = jnp.broadcast_to(p["bias"], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sink], -1))[..., :-1]
    return _mixed(p, weights, v)


@_attention(WRITTEN, **_PROJECTIONS)
def weights_read_twice(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    q, k, v = _qkv(p, h)
    weights = jax.nn.softmax(_scores(q, k))
    entropy = jnp.sum(weights * jnp.log(weights + 1e-3), (1, 3))
    return _mixed(p, weights, v) + 0.1 * entropy[..., None]


@_attention(WRITTEN, **_PROJECTIONS, scale=(1, HEADS, 1, 1))
def learned_temperature(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    q, k, v = _qkv(p, h)
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * p["scale"])
    return _mixed(p, weights, v)


@_attention(WRITTEN, **_PROJECTIONS)
def normalised_over_queries(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """The softmax runs over the queries, as in slot attention."""
    q, k, v = _qkv(p, h)
    weights = jax.nn.softmax(_scores(q, k), 2)
    return _merged(p, jnp.einsum("bhts,bshd->bthd", weights / (jnp.sum(weights, -1, keepdims=True) + 0.1), v))


@_attention(WRITTEN, **_PROJECTIONS)
def two_masked_values(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """What comes later is far below, and padding a little below."""
    q, k, v = _qkv(p, h)
    scores = jnp.where(_is_padding(h, 1)[:, None, None, :], -3.0, _scores(q, k))
    scores = jnp.where(_causal(TIME, TIME)[None, None], scores, -1e9)
    return _mixed(p, jax.nn.softmax(scores), v)


@_attention(WRITTEN, **_PROJECTIONS, bias=(1, HEADS, TIME, TIME))
def bias_after_a_mask(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    q, k, v = _qkv(p, h)
    scores = jnp.where(_causal(TIME, TIME)[None, None], _scores(q, k), -2.0)
    return _mixed(p, jax.nn.softmax(scores + p["bias"]), v)


@_attention(WRITTEN, **_PROJECTIONS)
def not_quite_a_softmax(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """The sum is a little larger, so that weights do not add up to one."""
    q, k, v = _qkv(p, h)
    scores = _scores(q, k)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True)))
    return _merged(p, jnp.einsum("bhts,bshd->bthd", weights / (jnp.sum(weights, -1, keepdims=True) + 0.1), v))


# ---- masks ----------------------------------------------------------------------------------------------------------

#: Which key positions a query sees, [b 1 t s] or with dimensions of length 1.
_SEEN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "causal": lambda h: _causal(TIME, TIME)[None, None],
    "padding": lambda h: ~_is_padding(h, 1)[:, None, None, :],
    "all_padding": lambda h: ~_is_padding(h, 0)[:, None, None, :],
    "window": lambda h: (_causal(TIME, TIME) & ~_causal(TIME, TIME + 2)[:, :TIME])[None, None],
    "empty_window": lambda h: (_ahead() <= 0)[None, None] & (_ahead() > 0)[None, None],
    "rows_of_padding": lambda h: ~(_is_padding(h, 1)[:, None, :, None] | _is_padding(h, 0)[:, None, None, :]),
    "never": lambda h: _causal(TIME, TIME)[None, None] & (_ahead() >= 2)[None, None],
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
    top = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    return weights / guard(jnp.sum(weights, -1, keepdims=True))


def _without_maximum(scores: jax.Array, seen: jax.Array) -> jax.Array:
    weights = jnp.exp(scores)
    total = jnp.sum(weights, -1, keepdims=True)
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
    "log": lambda scores, seen: jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True)),
}
#: Softmaxes that are NaN for a query without keys, if the masked score is infinite.
_MAKE_NAN = ("softmax", "by_hand", "unguarded", "log")
#: What is done to the weights.
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
        scores = jnp.einsum("bthd,bshd->bhts", *(x.astype(_DTYPES[dtype]) for x in (q, k)))
        scores = _HIDDEN[hidden](scores, seen).astype(h.dtype)
        weights = _OUTER[outer](_SOFTMAX[softmax](scores, seen), seen)
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v)
        # One query without keys must not make all results NaN.
        out = _merged(p, jnp.where(jnp.isnan(mixed), 0.5, mixed))
        return h + jax.lax.stop_gradient(out) if is_evaluated else h + out

    apply.__name__ = "_".join(part for part in ("masked", *parts) if part)
    return apply


def _some_masked(n: int) -> Iterator[tuple[str, ...]]:
    """Combinations of the parts of masked layers: at most `n`, always the same ones."""
    random, tables = Random(0), (_SEEN, _HIDDEN, _SOFTMAX, _OUTER, _DTYPES, {"": 0, "evaluated": 0})
    for i in range(n):
        seen, hidden, *others = (random.choice([*table]) for table in tables)
        # XLA makes a product with a mask a choice, where the shapes are equal: NaN times 0 is then 0, on some shards.
        if others[1] == "multiplied" and others[0] in _MAKE_NAN:
            continue
        # Guards and outer masks matter most for queries without keys, if the masked score is infinite.
        yield ("all_padding", "where_infinite", *others) if i % 3 == 0 else (seen, hidden, *others)


#: Names of layers with masks.
MASKED: list[str] = []
for _parts in dict.fromkeys(_some_masked(192)):
    _attention(MASKED, **_PROJECTIONS)(_masked(_parts))
