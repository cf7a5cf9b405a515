"""The grammar of layers of a drawn model.

A layer keeps the shape of its input, which is one of three kinds, with the examples first: `vector` (B, WIDTH),
`sequence` (B, TIME, WIDTH) and `image` (B, SIDE, SIDE, WIDTH). `RULES` lists the layers by name, with the shapes of
their parameters; a `Layer` is one of them, with a wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning

from minialpa import register_sharding_rule
from tests.pallas_kernels import flash_attention, row_norm

WIDTH, TIME, SIDE, EXPERTS = 8, 4, 4, 4
SQUARE = (WIDTH, WIDTH)
KINDS = ("vector", "sequence", "image")
SHAPES: dict[str, tuple[int, ...]] = {
    "vector": (WIDTH,),
    "sequence": (TIME, WIDTH),
    "image": (SIDE, SIDE, WIDTH),
}

Params = dict[str, Any]
detached = jax.lax.stop_gradient
#: (parameters, activations, key) -> activations
Apply = Callable[[Params, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class Rule:
    """mixes: whether the layer mixes examples, beyond statistics, so that micro-batches may be refused.

    without: wraps and schemes of training in which jax itself cannot use the layer.
    """

    apply: Apply
    shapes: dict[str, tuple[int, ...]]
    kinds: tuple[str, ...]
    mixes: bool
    without: tuple[str, ...] = ()


RULES: dict[str, Rule] = {}


def add_layer(
    name: str,
    apply: Apply,
    kinds: str = "vector sequence image",
    mixes: bool = False,
    without: tuple[str, ...] = (),
    **shapes: tuple[int, ...],
) -> None:
    RULES[name] = Rule(apply, shapes, tuple(kinds.split()), mixes, without)


def layer_rule(*args: Any, **options: Any) -> Callable[[Apply], Apply]:
    """Adds the decorated function, under its name, with options of `add_layer`."""

    def register(apply: Apply) -> Apply:
        add_layer(apply.__name__, apply, *args, **options)
        return apply

    return register


@dataclass(frozen=True, slots=True)
class Layer:
    name: str
    wrap: str = "plain"


# ---- parameters -----------------------------------------------------------------------------------------------------


def init_layer(layer: Layer, rng: np.random.Generator) -> Params:
    """Parameters of a layer, as NumPy arrays; in a stack, they have two rows."""
    rows = (2,) if "stack" in layer.wrap else ()
    return {name: init(name, rows, shape, rng) for name, shape in RULES[layer.name].shapes.items()}


def init(name: str, rows: tuple[int, ...], shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random values without symmetry and zeros: scales about one, biases near zero, matrices by fan-in."""
    values = rng.standard_normal((*rows, *shape))
    if name == "scale":
        values = 1 + 0.2 * values
    elif name == "bias":
        values = 0.2 * values
    else:
        values = values * 0.8 / np.sqrt(np.prod(shape[:-1]) or 1)
    return values.astype(np.float32)


# ---- wrapping -------------------------------------------------------------------------------------------------------


@jax.custom_jvp
def narrowed(x: jax.Array) -> jax.Array:
    """`x` rounded to a narrower type. Its derivative is 1, so gradients are not rounded."""
    return x.astype(jnp.bfloat16).astype(x.dtype)


narrowed.defjvps(lambda tangent, _, x: tangent)


def apply_layer(
    layer: Layer, p: Params, h: jax.Array, key: jax.Array, *, narrows: bool
) -> tuple[jax.Array, Params | None]:
    """The activations after a layer, and the parameters if its wrap returns them.

    narrows: whether it reads its parameters in a narrower type.
    """
    apply = RULES[layer.name].apply
    fun = (lambda p, h, key: apply(jax.tree.map(narrowed, p), h, key)) if narrows else apply
    if layer.wrap == RETURNS_WEIGHTS:
        return _stack_that_returns_weights(fun, p, h, key)
    return _WRAPPED[layer.wrap](fun, p, h, key), None


def _branch(fun: Apply, p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return jax.lax.cond(jax.random.bits(key, (), "uint8") < 200, fun, lambda p, h, key: 0.5 * h, p, h, key)


def _own_derivative(fun: Apply) -> Apply:
    """`fun` with a derivative written by hand, which passes on 1.5 times the cotangent of the activations."""

    @jax.custom_vjp
    def wrapped(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
        return fun(p, h, key)

    def forward(p: Params, h: jax.Array, key: jax.Array) -> Any:
        out, pull = jax.vjp(lambda p, h: fun(p, h, key), p, h)
        return out, (pull, key)

    def backward(saved: Any, out_bar: jax.Array) -> Any:
        pull, key = saved
        p_bar, h_bar = pull(out_bar)
        return p_bar, 1.5 * h_bar, np.zeros(jnp.shape(key), jax.dtypes.float0)

    wrapped.defvjp(forward, backward)
    return wrapped


# Two copies of a layer under a scan, of which the parameters have two rows.


def _stack(fun: Apply, p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, row: (fun(row, h, key), None), h, p, length=2)[0]


def _unrolled_stack(fun: Apply, p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    first, second = (jax.tree.map(lambda x: x[i], p) for i in range(2))  # noqa: B023
    return fun(second, fun(first, h, key), key)


def _stack_with_keys(fun: Apply, p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    rows = (p, jax.random.split(key, 2))
    return jax.lax.scan(lambda h, row: (fun(row[0], h, row[1]), None), h, rows, length=2)[0]


def _stack_that_carries_keys(fun: Apply, p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Each copy makes the next key from the last."""

    def body(carry: tuple[jax.Array, jax.Array], row: Params) -> Any:
        h, key = carry
        key, own = jax.random.split(key)
        return (fun(row, h, own), key), None

    return jax.lax.scan(body, (h, key), p, length=2)[0][0]


def _stack_by_example(fun: Apply, p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """The scan is under `vmap`, and each example has its own keys."""
    of_one = lambda p, example, key: fun(p, example[None], key)[0]  # noqa: E731
    stack = jax.vmap(lambda example, key: _stack_with_keys(of_one, p, example, key))
    return stack(h, jax.random.split(key, h.shape[0]))


def _stack_that_returns_weights(fun: Apply, p: Params, h: jax.Array, key: jax.Array) -> tuple[jax.Array, Params]:
    """The scan returns the parameters, which go to the state, as in modules of flax nnx."""
    again = jax.checkpoint(fun)
    body = jax.checkpoint(lambda h, row: (again(row[0], h, row[1]), row[0]))
    return jax.lax.scan(body, h, (p, jax.random.split(key, 2)), length=2)


RETURNS_WEIGHTS = "stack that returns weights"
_WRAPPED: dict[str, Callable[[Apply, Params, jax.Array, jax.Array], jax.Array]] = {
    "plain": lambda fun, p, h, key: fun(p, h, key),
    "residual": lambda fun, p, h, key: h + fun(p, h, key),
    "checkpoint": lambda fun, *args: jax.checkpoint(fun)(*args),
    "checkpoint dots": lambda fun, *args: jax.checkpoint(fun, policy=jax.checkpoint_policies.checkpoint_dots)(*args),
    "jit": lambda fun, *args: jax.jit(fun)(*args),
    "vmap": lambda fun, p, h, key: jax.vmap(lambda row: fun(p, row[None], key)[0])(h),
    "stack": _stack,
    "checkpointed stack": lambda fun, *args: _stack(jax.checkpoint(fun), *args),
    "unrolled stack": _unrolled_stack,
    "stack with keys": _stack_with_keys,
    "checkpointed stack with keys": lambda fun, *args: _stack_with_keys(jax.checkpoint(fun), *args),
    "stack that carries keys": _stack_that_carries_keys,
    "tied": lambda fun, p, h, key: fun(p, fun(p, h, key), key),
    "custom_vjp": lambda fun, *args: _own_derivative(fun)(*args),
    "cond": _branch,
    "fori": lambda fun, p, h, key: jax.lax.fori_loop(0, 2, lambda i, h: fun(p, h, key), h),
    "detached branch": lambda fun, p, h, key: fun(p, h, key) + detached(jnp.sin(h)),
    "stack by example": _stack_by_example,
    "checkpointed stack by example": lambda fun, *args: _stack_by_example(jax.checkpoint(fun), *args),
}
#: The wraps of a layer.
WRAPS = (*_WRAPPED, RETURNS_WEIGHTS)
#: Wraps that apply a layer under `vmap`.
_BY_EXAMPLE = ("vmap", "stack by example", "checkpointed stack by example")


# ---- layers of any kind ---------------------------------------------------------------------------------------------


def wide(vector: jax.Array, h: jax.Array) -> jax.Array:
    """A parameter of the last dimension, with the rank of `h`."""
    return vector.reshape((1,) * (h.ndim - 1) + vector.shape)


add_layer("dense", lambda p, h, key: jnp.tanh(h @ p["w"] + wide(p["bias"], h)), w=SQUARE, bias=(WIDTH,))


@layer_rule(w=(WIDTH, 2 * WIDTH), bias=(2 * WIDTH,), out=(2 * WIDTH, WIDTH))
def mlp(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return jax.nn.relu(h @ p["w"] + wide(p["bias"], h)) @ p["out"]


add_layer("gated", lambda p, h, key: jax.nn.silu(h @ p["gate"]) * (h @ p["w"]), gate=SQUARE, w=SQUARE)


@layer_rule(w=SQUARE, scale=(WIDTH,))
def weight_normalised(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    norm = jnp.sqrt(jnp.sum(p["w"] ** 2, 0, keepdims=True))
    return jax.nn.gelu(h @ (p["w"] / norm * p["scale"][None]))


@layer_rule(down=(WIDTH, 2), up=(2, WIDTH))
def low_rank(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return h + jnp.einsum("...d,dr,re->...e", h, p["down"], p["up"])


@layer_rule(scale=(WIDTH,), bias=(WIDTH,))
def layer_norm(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    mean = jnp.mean(h, -1, keepdims=True)
    var = jnp.var(h, -1, keepdims=True)
    return (h - mean) * jax.lax.rsqrt(var + 1e-2) * wide(p["scale"], h) + wide(p["bias"], h)


@layer_rule(scale=(WIDTH,))
def rms_norm(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-2) * wide(p["scale"], h)


@layer_rule(scale=(WIDTH,), bias=(WIDTH,))
def group_norm(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    groups = h.reshape(h.shape[0], -1, 2, WIDTH // 2)
    mean = jnp.mean(groups, (1, 3), keepdims=True)
    var = jnp.mean((groups - mean) ** 2, (1, 3), keepdims=True)
    normal = ((groups - mean) / jnp.sqrt(var + 1e-2)).reshape(h.shape)
    return normal * wide(p["scale"], h) + wide(p["bias"], h)


@layer_rule("sequence image", scale=(WIDTH,))
def instance_norm(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    axes = tuple(range(1, h.ndim - 1))
    normal = (h - jnp.mean(h, axes, keepdims=True)) / jnp.sqrt(jnp.var(h, axes, keepdims=True) + 1e-2)
    return normal * wide(p["scale"], h)


add_layer("unit_length", lambda p, h, key: 2 * h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 0.1))


def _dropped(key: jax.Array, h: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.75, h.shape), h / 0.75, 0)


def _keys(key: jax.Array, h: jax.Array) -> jax.Array:
    """A key for each example."""
    return jax.random.split(key, h.shape[0])


add_layer("dropout", lambda p, h, key: _dropped(key, h))


@layer_rule()
def dropout_of_features(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    keep = jax.random.bernoulli(key, 0.75, (h.shape[0],) + (1,) * (h.ndim - 2) + (WIDTH,))
    return h * keep.astype(h.dtype) / 0.75


add_layer("dropout_by_keys", lambda p, h, key: jax.vmap(_dropped)(_keys(key, h), h))


@layer_rule()
def dropout_by_number(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(h.shape[0]))
    noise = jax.vmap(lambda k: jax.random.uniform(k, h.shape[1:]))(keys)
    return h * (noise < 0.75).astype(h.dtype)


@layer_rule()
def dropout_by_position(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Scales each example by a function of its number."""
    number = jnp.arange(h.shape[0]).reshape((-1,) + (1,) * (h.ndim - 1))
    return h * (1 + 0.1 * jnp.sin(number.astype(h.dtype))) * jax.random.bernoulli(key, 0.75, h.shape).astype(h.dtype)


add_layer("noise", lambda p, h, key: h + 0.1 * jax.random.normal(key, h.shape) * wide(p["scale"], h), scale=(WIDTH,))


@layer_rule(router=(WIDTH, EXPERTS), w=(EXPERTS, WIDTH, WIDTH))
def soft_experts(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    gates = jax.nn.softmax(h @ p["router"])
    return jnp.einsum("...e,...d,edf->...f", gates, h, p["w"])


@layer_rule(router=(WIDTH, EXPERTS), w=(EXPERTS, WIDTH, WIDTH))
def top_one_expert(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    gates = jax.nn.softmax(h @ p["router"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS) * gates
    return jnp.einsum("...e,...ef->...f", chosen, jnp.einsum("...d,edf->...ef", h, p["w"]))


@layer_rule(router=(WIDTH, EXPERTS), w=(EXPERTS, WIDTH, WIDTH))
def top_two_experts(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    values, places = jax.lax.top_k(h @ p["router"], 2)
    weights = jnp.sum(jax.nn.softmax(values)[..., None] * jax.nn.one_hot(places, EXPERTS), -2)
    return jnp.tanh(jnp.einsum("...e,...d,edf->...f", weights, h, p["w"]))


@layer_rule(table=(EXPERTS, WIDTH))
def codebook(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """The nearest row of a table, with a straight-through gradient."""
    distance = jnp.sum((h[..., None, :] - p["table"].reshape((1,) * (h.ndim - 1) + (EXPERTS, WIDTH))) ** 2, -1)
    nearest = p["table"][jnp.argmin(distance, -1)]
    return h + detached(nearest - h) + 0.1 * nearest


add_layer("softmax_features", lambda p, h, key: WIDTH * jax.nn.softmax(h))
add_layer("sorted_features", lambda p, h, key: jnp.sort(h, -1))
add_layer("rolled_features", lambda p, h, key: jnp.roll(h, 1, -1) * 0.5 + jnp.flip(h, -1))


def _feature(h: jax.Array) -> jax.Array:
    """A feature index for each example, from its first value."""
    first = detached(h).reshape(h.shape[0], -1)[:, 0]
    return jnp.clip(4 + jnp.round(first), 0, WIDTH - 1).astype(np.int32)


@layer_rule(scale=(WIDTH,))
def picked_feature(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """One feature of each example, by its number."""
    picked = h[jnp.arange(h.shape[0]), ..., _feature(h)]
    return h * wide(p["scale"], h) + picked[..., None]


@layer_rule(scale=(WIDTH,))
def updated_feature(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    rows, feature = jnp.arange(h.shape[0]), _feature(h)
    h = h.at[rows, ..., feature].add(jnp.tanh(h[..., 0]))
    return h.at[rows, ..., (feature + 1) % WIDTH].multiply(0.5).at[rows, ..., 0].set(h[..., 1]) * wide(p["scale"], h)


@layer_rule()
def parted(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    left, right = jnp.split(h, 2, -1)
    return jnp.concatenate([right * jnp.tanh(left), left], -1)


@layer_rule()
def maxout(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    pairs = h.reshape(*h.shape[:-1], WIDTH // 2, 2)
    left, right = pairs[..., 0], pairs[..., 1]
    return jnp.concatenate([jnp.maximum(left, right), jnp.minimum(left, right)], -1)


#: All rows of all examples in one matrix.
add_layer("rows_as_matrix", lambda p, h, key: jax.nn.relu(h.reshape(-1, WIDTH) @ p["w"]).reshape(h.shape), w=SQUARE)


@layer_rule(w=SQUARE)
def iterated(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """A fixed number of steps towards a fixed point."""
    return jax.lax.fori_loop(0, 3, lambda i, z: jnp.tanh(0.5 * z @ p["w"] + h), jnp.zeros_like(h))


# ---- loops with an exit for each example ----------------------------------------------------------------------------


#: Schemes of training that differentiate a gradient backwards. jax does so through the root of a while loop, but not if
#: that is inside another loop, as in a stack.
_GRADIENTS_OF_GRADIENTS = ("penalty on input gradients", "penalty on gradients", "meta")


def _each(fun: Callable[..., jax.Array], h: jax.Array, *others: jax.Array) -> jax.Array:
    """A function of each example, and of its row of others, without derivative, which jax lacks for while loops."""
    return detached(jax.vmap(fun)(detached(h), *others))


def _loop(solve: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Adds a layer that adds the decorated function of each example, without derivative, to a dense layer."""
    add_layer(solve.__name__, lambda p, h, key: jnp.tanh(h @ p["w"]) + _each(solve, h), w=SQUARE)
    return solve


def _halved(row: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda r: jnp.sum(r**2) > 4, lambda r: 0.5 * r, row)


@_loop
def until_small(row: jax.Array) -> jax.Array:
    """Halves a row until it is short."""
    return _halved(row)


@layer_rule(w=SQUARE)
def counted(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Scales each example by the number of its halvings, five at most."""

    def steps(row: jax.Array) -> jax.Array:
        test = lambda c: (jnp.sum(c[1] ** 2) > 0.1) & (c[0] < 5)  # noqa: E731
        return jax.lax.while_loop(test, lambda c: (c[0] + 1, 0.5 * c[1]), (0, row))[0]

    count = _each(lambda row: 0.2 * steps(row).astype(h.dtype), h)
    return jnp.tanh(h @ p["w"]) * count.reshape(-1, *(1,) * (h.ndim - 1))


@_loop
def loop_in_loop(row: jax.Array) -> jax.Array:
    body = lambda c: (c[0] + 1, 0.7 * c[1] + 0.1 * _halved(3 * c[1]))  # noqa: E731
    return jax.lax.while_loop(lambda c: (jnp.max(c[1]) > 0.5) & (c[0] < 4), body, (0, row))[1]


@layer_rule(scale=(WIDTH,))
def drawn_until_accepted(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Draws noise for each example, with a new key each time, until its sum is small."""

    def draw(row: jax.Array, key: jax.Array) -> jax.Array:
        def again(c: Any) -> Any:
            next_key, mine = jax.random.split(c[0])
            return next_key, jax.random.normal(mine, row.shape)

        return jax.lax.while_loop(lambda c: jnp.abs(jnp.sum(c[1])) > 1, again, (key, jnp.ones_like(row)))[1]

    return h * wide(p["scale"], h) + 0.1 * _each(draw, h, _keys(key, h))


@_loop
def adaptive_steps(row: jax.Array) -> jax.Array:
    """A differential equation, in steps as long as the error allows."""

    def step(c: Any) -> Any:
        t, dt, y = c
        dt = jnp.minimum(dt, 1 - t)
        slope = lambda y: -y * (1 + y**2)  # noqa: E731
        euler, heun = y + dt * slope(y), y + 0.5 * dt * (slope(y) + slope(y + dt * slope(y)))
        error = jnp.max(jnp.abs(euler - heun))
        accept = error < 0.05
        factor = jnp.where(accept, 1.5, 0.5).astype(dt.dtype)
        return jnp.where(accept, t + dt, t), dt * factor, jnp.where(accept, heun, y)

    start = (jnp.zeros((), row.dtype), jnp.full((), 0.3, row.dtype), jnp.tanh(row))
    return jax.lax.while_loop(lambda c: c[0] < 0.999, step, start)[2]


@_loop
def as_often_as_it_says(row: jax.Array) -> jax.Array:
    """The number of iterations is the index of the largest feature."""
    n = jnp.argmax(row.reshape(-1, WIDTH)[0])
    return jax.lax.fori_loop(0, n, lambda i, r: jnp.sin(r) + 0.1 * i.astype(r.dtype), row)


@layer_rule(w=SQUARE)
def halved_by_hand(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """One loop over the batch, which keeps small values."""
    halve = lambda x: jnp.where(jnp.abs(x) > 1, 0.5 * x, x)  # noqa: E731
    small = jax.lax.while_loop(lambda x: jnp.any(jnp.abs(x) > 1), halve, detached(h))
    return jnp.tanh(h @ p["w"]) + detached(small)


@layer_rule(without=_GRADIENTS_OF_GRADIENTS, w=SQUARE)
def fixed_point(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """A root for each example, by Newton's method, with the derivative of the implicit function."""

    def root(row: jax.Array) -> jax.Array:
        fun = lambda y: y**3 + y - row  # noqa: E731
        is_far = lambda y: jnp.max(jnp.abs(fun(y))) > 1e-3  # noqa: E731
        newton = lambda _, start: jax.lax.while_loop(is_far, lambda y: y - fun(y) / (3 * y**2 + 1), start)  # noqa: E731
        return jax.lax.custom_root(fun, jnp.zeros_like(row), newton, lambda slope, y: y / slope(jnp.ones_like(y)))

    return jax.vmap(root)(h @ p["w"])


@layer_rule(w=SQUARE)
def solved(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """A linear system for each vector of features."""

    def solve(v: jax.Array) -> jax.Array:
        return jnp.linalg.solve(2 * jnp.eye(WIDTH) + jnp.outer(v, v) + p["w"] @ p["w"].T, v)

    return jax.vmap(solve)(h.reshape(-1, WIDTH)).reshape(h.shape)


#: A scan over the examples.
add_layer("mapped", lambda p, h, key: jax.lax.map(lambda row: jnp.tanh(row @ p["w"]), h), w=SQUARE)


@layer_rule(w=SQUARE)
def mapped_by_two(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: jax.nn.silu(row @ p["w"]), h, batch_size=min(2, h.shape[0]))


@layer_rule()
def ranked(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    order = jnp.argsort(h, -1)
    return jnp.take_along_axis(h, order[..., ::-1], -1) + 0.1 * jnp.cumsum(h, -1)


@layer_rule(scale=(WIDTH,))
def either(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """A branch for each example by itself."""
    pick = lambda r: jax.lax.cond(jnp.sum(r) > 0, jnp.sin, lambda r: 0.5 * r, r)  # noqa: E731
    return jax.vmap(pick)(h) * wide(p["scale"], h)


# ---- branches and loops of each example, with dropout, in scans with rematerialisation ------------------------------


@layer_rule(w=SQUARE)
def dropped_in_a_branch(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Some examples skip a layer with dropout (stochastic depth), each with a separate key."""

    def one(row: jax.Array, key: jax.Array) -> jax.Array:
        coin, mine = jax.random.split(key)
        work = lambda row: row + _dropped(mine, jnp.tanh(row @ p["w"]))  # noqa: E731
        return jax.lax.cond(jax.random.bernoulli(coin, 0.6), work, lambda row: row, row)

    return jax.vmap(one)(h, _keys(key, h))


@layer_rule(w=(3, WIDTH, WIDTH))
def routed_by_example(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """One of three branches for each example, by its largest feature, under dropout of the whole batch."""

    def one(row: jax.Array) -> jax.Array:
        branches = [
            lambda row: jnp.tanh(row @ p["w"][0]),
            lambda row: jax.nn.gelu(row @ p["w"][1]),
            lambda row: 0.5 * row @ p["w"][2],
        ]
        number = jnp.argmax(detached(row).reshape(-1, WIDTH)[0]) % 3
        return jax.lax.switch(number, branches, row)

    return h + _dropped(key, jax.vmap(one)(h))


@layer_rule(w=SQUARE, gate=SQUARE)
def halting(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Adaptive computation time: three steps under remat, in which an example that has halted does not change."""

    def step(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        h, left = carry
        new = _dropped(key, jnp.tanh(h @ p["w"]))
        gate = jax.nn.sigmoid(jnp.mean((h @ p["gate"]).reshape(h.shape[0], -1), 1))
        is_on = left.reshape(-1, *(1,) * (h.ndim - 1)) > 0
        return (jnp.where(is_on, h + new, h), left - gate), None

    start = (h, jnp.full((h.shape[0],), 0.8, h.dtype))
    return jax.lax.scan(jax.checkpoint(step), start, jax.random.split(key, 3))[0][0]


@layer_rule(w=SQUARE)
def loops_in_a_scan(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """In each of two steps under remat: a loop with an exit and a branch for each example, and dropout."""

    def one(row: jax.Array, key: jax.Array) -> jax.Array:
        small = detached(_halved(detached(row)))
        pick = lambda row: jax.lax.cond(jnp.sum(small) > 0, lambda r: jnp.tanh(r @ p["w"]), lambda r: 0.5 * r, row)  # noqa: E731
        return _dropped(key, pick(row)) + 0.1 * small

    def step(h: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        return jax.vmap(one)(h, _keys(key, h)), None

    return jax.lax.scan(jax.checkpoint(step), h, jax.random.split(key, 2))[0]


@layer_rule(w=SQUARE)
def redrawn(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Each example draws a mask of its features until the mask keeps at least five of them."""

    def draw(key: jax.Array) -> jax.Array:
        def again(c: Any) -> Any:
            next_key, mine = jax.random.split(c[0])
            return next_key, jax.random.bernoulli(mine, 0.5, (WIDTH,))

        return jax.lax.while_loop(lambda c: jnp.sum(c[1].astype(np.int32)) < 5, again, (key, jnp.zeros(WIDTH, bool)))[1]

    masks = jax.vmap(draw)(_keys(key, h)).astype(h.dtype)
    return jnp.tanh(h @ p["w"]) * masks.reshape(-1, *(1,) * (h.ndim - 2), WIDTH)


#: The layers of this part.
IN_BRANCHES = ("dropped_in_a_branch", "routed_by_example", "halting", "loops_in_a_scan", "redrawn")


# ---- kernels -------------------------------------------------------------------------------------------------------


#: jax has no tangents of functions with custom derivatives, no second derivative of a Pallas kernel, and neither
#: derivatives nor `vmap` of custom_partitioning.
_NO_TANGENTS = ("curvature", "random curvature")
_ONCE = (*_NO_TANGENTS, *_GRADIENTS_OF_GRADIENTS)
_NO_DERIVATIVES = (*_ONCE, "clipped by example", *_BY_EXAMPLE)


@layer_rule(without=_ONCE, scale=(WIDTH,))
def pallas_rows(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return row_norm(h.reshape(-1, WIDTH)).reshape(h.shape) * wide(p["scale"], h)


@layer_rule("sequence", without=_ONCE, qkv=(WIDTH, 3 * WIDTH))
def pallas_attention(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    parts = (h @ p["qkv"]).reshape(h.shape[0], TIME, 3, 2, WIDTH // 2)
    return flash_attention(*(parts[:, :, i] for i in range(3))).reshape(h.shape)


def _dense_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


_registered_rows = register_sharding_rule(_dense_rows, "b i, i j -> b j", need_replication="i")
_partitioned_product = custom_partitioning(lambda x, w: x @ w)
_partitioned_product.def_partition(
    lambda mesh, args, result: (mesh, lambda x, w: x @ w, result.sharding, tuple(arg.sharding for arg in args)),
    sharding_rule="b i, i j -> b j",
    reduction_factors=("i",),
)


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return _partitioned_product(x, w)


_product.defvjp(
    lambda x, w: (_partitioned_product(x, w), (x, w)),
    lambda saved, bar: (_partitioned_product(bar, saved[1].T), _partitioned_product(saved[0].T, bar)),
)


@layer_rule(without=_NO_TANGENTS, w=SQUARE)
def registered_function(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return _registered_rows(h.reshape(-1, WIDTH), p["w"]).reshape(h.shape)


@layer_rule(without=_NO_DERIVATIVES, w=SQUARE)
def partitioned(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.tanh(_product(h.reshape(-1, WIDTH), p["w"]).reshape(h.shape))


# ---- layers of sequences --------------------------------------------------------------------------------------------


@layer_rule("sequence", q=SQUARE, k=SQUARE, v=SQUARE)
def attention(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", h @ p["q"], h @ p["k"]) / np.sqrt(WIDTH).astype(np.float32))
    return jnp.einsum("bts,bsd->btd", weights, h @ p["v"])


@layer_rule("sequence", qkv=(WIDTH, 3 * WIDTH), out=SQUARE)
def causal_heads(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    parts = (h @ p["qkv"]).reshape(h.shape[0], TIME, 3, 2, WIDTH // 2)
    q, k, v = (parts[:, :, i] for i in range(3))
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    allowed = jnp.tril(jnp.ones((TIME, TIME), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e9))
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(h.shape) @ p["out"]


@layer_rule("sequence", w=SQUARE, u=SQUARE, gate=SQUARE)
def recurrent(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    def cell(c: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        z = jax.nn.sigmoid(x @ p["gate"])
        c = z * c + (1 - z) * jnp.tanh(x @ p["w"] + c @ p["u"])
        return c, c

    outs = jax.lax.scan(cell, jnp.zeros((h.shape[0], WIDTH)), jnp.swapaxes(h, 0, 1))[1]
    return jnp.swapaxes(outs, 0, 1)


@layer_rule("sequence", w=SQUARE, u=SQUARE)
def recurrent_by_example(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    def one(row: jax.Array) -> jax.Array:
        cell = lambda c, x: (jnp.tanh(x @ p["w"] + c @ p["u"]),) * 2  # noqa: E731
        return jax.lax.scan(cell, jnp.zeros(WIDTH), row, reverse=True)[1]

    return jax.vmap(one)(h)


@layer_rule("sequence", w=SQUARE)
def token_pooling(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """Three tokens of each example, chosen by its number."""
    rows = np.arange(h.shape[0])
    place = _feature(h) % TIME
    pair = h[rows[:, None], jnp.stack([place, (place + 1) % TIME], 1)]
    return jnp.tanh(h @ p["w"]) + (h[rows, place] + jnp.sum(pair, 1))[:, None]


@layer_rule("sequence", mixes=True, w=SQUARE)
def token_of_the_one_before(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.tanh(h @ p["w"]) + h[jnp.arange(h.shape[0]) - 1, _feature(h) % TIME][:, None]


@layer_rule("sequence", w=SQUARE)
def gated_in_time(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """In each step of time, a branch for each example by itself, and a loop in one of them."""

    def cell(c: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = jax.lax.cond(jnp.sum(x) > 0, lambda c: jnp.tanh(c @ p["w"] + x), lambda c: 0.5 * c, c)
        return c, c + detached(_halved(detached(4 * c)))

    return jax.vmap(lambda row: jax.lax.scan(cell, jnp.zeros(WIDTH), row)[1])(h)


@layer_rule("sequence", decay=(WIDTH,))
def linear_recurrence(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    decay = jnp.broadcast_to(jax.nn.sigmoid(wide(p["decay"], h)), h.shape)
    combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
    return jax.lax.associative_scan(combine, (decay, h), axis=1)[1]


@layer_rule("sequence")
def cumulative(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    count = jnp.arange(1, TIME + 1, dtype=h.dtype)[None, :, None]
    return jnp.cumsum(h, 1) / count


@layer_rule("sequence", table=(TIME, WIDTH))
def positions(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return h + p["table"][None] + jnp.sin(jax.lax.broadcasted_iota(h.dtype, h.shape, 1))


@layer_rule("sequence", w=(3, WIDTH, WIDTH))
def convolution_in_time(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return jax.nn.relu(jax.lax.conv_general_dilated(h, p["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")))


add_layer("mixed_in_time", lambda p, h, key: jnp.einsum("btd,ts->bsd", h, p["w"]), "sequence", w=(TIME, TIME))


# ---- layers of images -----------------------------------------------------------------------------------------------


@layer_rule("image", w=(3, 3, WIDTH, WIDTH), bias=(WIDTH,))
def convolution(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    out = jax.lax.conv_general_dilated(h, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(out + wide(p["bias"], h))


@layer_rule("image", w=(3, 3, 1, WIDTH))
def depthwise(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(h, p["w"], (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=WIDTH)


@layer_rule("image")
def max_pool(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")


@layer_rule("image")
def down_and_up(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    small = jax.lax.reduce_window(h, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    return jnp.repeat(jnp.repeat(small, 2, 1), 2, 2) + h


@layer_rule("image", down=(WIDTH, 2), up=(2, WIDTH))
def squeeze_and_excite(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    gate = jax.nn.sigmoid(jax.nn.relu(jnp.mean(h, (1, 2)) @ p["down"]) @ p["up"])
    return h * gate[:, None, None]


# ---- layers that mix examples ---------------------------------------------------------------------------------------


add_layer("mixed_with_reverse", lambda p, h, key: 0.7 * h + 0.3 * h[::-1], mixes=True)


@layer_rule("vector", mixes=True, w=SQUARE)
def attention_over_examples(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    return jax.nn.softmax(h @ p["w"] @ h.T) @ h


@layer_rule(mixes=True, w=SQUARE)
def halved_together(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """All examples are halved until the last one is small."""
    test = lambda x: jnp.any(jnp.abs(x) > 1)  # noqa: E731
    small = jax.lax.while_loop(test, lambda x: 0.5 * x, detached(h))
    return jnp.tanh(h @ p["w"]) + detached(small)


@layer_rule(mixes=True)
def faded_in_turn(p: Params, h: jax.Array, key: jax.Array) -> jax.Array:
    """A scan over the examples with a carry."""
    return jax.lax.scan(lambda c, row: (0.5 * c + row, row + 0.1 * c), jnp.zeros(h.shape[1:]), h)[1]


add_layer("less_the_mean", lambda p, h, key: jnp.tanh(h - 0.5 * detached(jnp.mean(h, 0, keepdims=True))), mixes=True)
add_layer("scaled_by_the_largest", lambda p, h, key: h / detached(jnp.max(jnp.abs(h))), mixes=True)


# ---- normalisations over the batch ----------------------------------------------------------------------------------


def init_batch_norm(rng: np.random.Generator) -> tuple[Params, Params]:
    """Parameters and running statistics."""
    p = {name: init(name, (), (WIDTH,), rng) for name in ("scale", "bias")}
    return p, {"mean": init("bias", (), (WIDTH,), rng), "var": np.abs(init("scale", (), (WIDTH,), rng))}


#: How the variance is computed.
VARIANCES: dict[str, Callable[[jax.Array, jax.Array, tuple[int, ...]], jax.Array]] = {
    "deviations": lambda x, mean, axes: jnp.mean((x - mean) ** 2, axes, keepdims=True),
    "squares": lambda x, mean, axes: jnp.maximum(jnp.mean(x**2, axes, keepdims=True) - mean**2, 0),
    "var": lambda x, mean, axes: jnp.var(x, axes, keepdims=True),
}

#: Updates of running statistics from the statistics of a batch. Only `OWN` allows statistics per micro-batch.
AVERAGES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "decay": lambda old, new: 0.9 * old + 0.1 * new,
    "step": lambda old, new: old + detached(0.2 * (new - old)),
    "branch": lambda old, new: jax.lax.cond(old[0] < 9, lambda: 0.5 * old + 0.5 * new, lambda: old),
    "none": lambda old, new: old,
    "last": lambda old, new: new,
}
OWN = ("decay", "step", "branch")


def batch_norm(
    variance: str, averages: tuple[str, str], p: Params, stats: Params, h: jax.Array, ghosts: int
) -> tuple[jax.Array, Params]:
    """Normalises within each of `ghosts` equal parts of the batch; running statistics are averaged over the parts.

    averages: updates of the running mean and the running variance.
    """
    parts = h if ghosts == 1 else h.reshape(ghosts, h.shape[0] // ghosts, *h.shape[1:])
    axes = tuple(range(0 if ghosts == 1 else 1, parts.ndim - 1))
    mean = jnp.mean(parts, axes, keepdims=True)
    var = VARIANCES[variance](parts, mean, axes)
    normal = ((parts - mean) * jax.lax.rsqrt(var + 1e-1)).reshape(h.shape)
    found = {"mean": jnp.mean(mean.reshape(-1, WIDTH), 0), "var": jnp.mean(var.reshape(-1, WIDTH), 0)}
    follow = dict(zip(("mean", "var"), averages, strict=True))
    new_stats = {name: AVERAGES[follow[name]](stats[name], found[name]) for name in found}
    return normal * wide(p["scale"], h) + wide(p["bias"], h), new_stats
