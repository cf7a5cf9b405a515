"""The grammar of training steps: gradients and their points, updates of the parameters, and other carried state.

A step takes `(state, batch)`, `(state, batch, key)` or, with a second batch, `(state, batch, other, key)`, and returns
`(new_state, results)`. `SCHEMES` are the ways from a loss to an update; schemes in `SEVERAL` take a gradient at
values that another one changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import minialpa
from tests.equivalence.exact import Counted, counted_batch, counted_results, counted_state
from tests.equivalence.layers import WIDTH
from tests.equivalence.losses import PER_EXAMPLE, RESULTS, Batch, Loss, loss_value
from tests.equivalence.model import Model, init_model, make_batch, model_scores


@dataclass(frozen=True, slots=True)
class Training:
    """A training step of a model.

    gradient: the function that takes the gradients. key: the source of random keys: an `argument`, or the `state`,
    which keeps a new key; typed: whether these are typed keys. carries: other values of the state, see `CARRIED`.
    counted: reductions of other arrays of the batch.
    """

    model: Model
    loss: Loss
    scheme: str = "plain"
    optimizer: str = "sgd"
    gradient: str = "minialpa.value_and_grad"
    key: str = "argument"
    results: tuple[str, ...] = ()
    carries: tuple[str, ...] = ()
    shows_gradients: bool = False
    batch_size: int = 8
    seed: int = 0
    typed: bool = False
    counted: tuple[Counted, ...] = ()


#: moving average of the parameters; loss scale with skipped steps; integers; a constant; the batch as a result.
CARRIED = ("average", "scale", "integers", "constant", "batch")
GRADIENTS = ("minialpa.value_and_grad", "minialpa.grad", "jax.value_and_grad", "jax.grad", "jax.vjp")

# ---- optimizers -----------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.03),
    "adamw": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.03, 5, 20), weight_decay=0.1),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.03)),
    "adafactor": lambda: optax.adafactor(0.03, min_dim_size_to_factor=4),
    "lion": lambda: optax.lion(0.01),
    "rmsprop": lambda: optax.rmsprop(0.03),
    "lamb": lambda: optax.lamb(0.03),
    "every second": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "adaptive clipping": lambda: optax.chain(optax.adaptive_grad_clip(2.0), optax.sgd(0.1)),
}


@functools.cache
def _compiled(optimizer: str) -> tuple[Any, Any]:
    """Compiled functions: the first state of an optimizer, and its update."""
    made = OPTIMIZERS[optimizer]()
    return jax.jit(made.init), jax.jit(made.update)


def _warm_state(optimizer: str, params: Any, rng: np.random.Generator) -> Any:
    """The state after three updates, in which no second moment is zero: an update follows the gradient smoothly."""
    init, update = _compiled(optimizer)
    state = init(params)
    for _ in range(3):
        grads = jax.tree.map(lambda p: (0.3 * rng.standard_normal(p.shape)).astype(np.float32), params)
        with jax.numpy_dtype_promotion("standard"):
            state = update(grads, state, params)[1]
    return jax.tree.map(np.asarray, state)


# ---- arguments ------------------------------------------------------------------------------------------------------


def make_args(training: Training) -> tuple[Any, ...]:
    """The arguments of the step, in NumPy: equal for equal descriptions."""
    rng = np.random.default_rng(training.seed)
    params, stats = init_model(training.model, rng)
    state = {
        "params": params,
        "stats": stats,
        "opt": _warm_state(training.optimizer, params, rng),
        "count": np.int32(3),
    }
    if training.key == "state":
        state["key"] = _key(training, training.seed)
    if "average" in training.carries or training.scheme == "teacher":
        state["average"] = jax.tree.map(lambda p: (0.5 * p).astype(np.float32), params)
    if "scale" in training.carries:
        state |= {"scale": np.float32(8), "good_steps": np.int32(1)}
    if "integers" in training.carries:
        state |= {"seen": np.int32(40), "labels": np.zeros(WIDTH, np.int32)}
    if "constant" in training.carries:
        state["constant"] = rng.standard_normal(3).astype(np.float32)
    batches = [
        make_batch(training.model, training.batch_size, rng) for _ in range(1 + (training.scheme in SECOND_BATCH))
    ]
    keys = [] if training.key == "state" else [_key(training, training.seed + 1)]
    batches[0] |= counted_batch(training.counted, training.batch_size)
    return ({**state, **counted_state(training.counted)}, *batches, *keys)


def _key(training: Training, seed: int) -> Any:
    return jax.random.key(seed) if training.typed else np.asarray(jax.random.PRNGKey(seed))


def batch_argnums(training: Training) -> tuple[int, ...]:
    return (1, 2) if training.scheme in SECOND_BATCH else (1,)


# ---- gradients ------------------------------------------------------------------------------------------------------

#: params -> (value, (value, other results)). Its gradient: params -> ((value, others), gradients).
Objective = Callable[[Any], tuple[jax.Array, Any]]


def _gradient_of(style: str, fun: Objective, params: Any) -> tuple[Any, Any]:
    """The other results of `fun`, including the value, and the gradients."""
    match style:
        case "minialpa.value_and_grad":
            (_, aux), grads = minialpa.value_and_grad(fun, has_aux=True)(params)
        case "jax.value_and_grad":
            (_, aux), grads = jax.value_and_grad(fun, has_aux=True)(params)
        case "minialpa.grad":
            grads, aux = minialpa.grad(fun, has_aux=True)(params)
        case "jax.grad":
            grads, aux = jax.grad(fun, has_aux=True)(params)
        case _:
            value, pull, aux = jax.vjp(fun, params, has_aux=True)
            (grads,) = pull(jnp.ones_like(value))
    return aux, grads


@dataclass(frozen=True)
class Setting:
    """The inputs of a scheme. `gradient(fun, params)` is (aux, gradients), where aux = (value, stats, scores).

    objective: of (params, batch); `update(state, gradients)`: a state with new parameters and optimizer state.
    """

    objective: Callable[[Any, Batch], tuple[jax.Array, Any]]
    each: Callable[[Any, Batch], jax.Array]
    gradient: Callable[[Objective, Any], tuple[Any, Any]]
    update: Callable[[Any, Any], Any]
    key: jax.Array


#: (setting, state, batches) -> (new state, aux, gradients)
Scheme = Callable[[Setting, Any, tuple[Batch, ...]], tuple[Any, Any, Any]]
SCHEMES: dict[str, Scheme] = {}
#: Schemes that take a gradient, or a loss, at values that another gradient changed.
SEVERAL: list[str] = []
#: Schemes with a second batch, without statistics over a batch, or with inputs of floats.
SECOND_BATCH, NO_BATCH_NORM, FLOAT_INPUT, MIXING = (list[str]() for _ in range(4))


def _scheme(*groups: list[str]) -> Callable[[Scheme], Scheme]:
    def register(fun: Scheme) -> Scheme:
        name = fun.__name__.strip("_").replace("_", " ")
        SCHEMES[name] = fun
        for group in groups:
            group.append(name)
        return fun

    return register


def _plus(params: Any, grads: Any, factor: Any) -> Any:
    return jax.tree.map(lambda p, g: p + factor * g, params, grads)


def _dot(a: Any, b: Any) -> jax.Array:
    return sum(jnp.sum(x * y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@_scheme()
def plain(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    aux, grads = s.gradient(lambda p: s.objective(p, batches[0]), state["params"])
    return s.update(state, grads), aux, grads


@_scheme()
def clipped(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    aux, grads = s.gradient(lambda p: s.objective(p, batches[0]), state["params"])
    norm = jnp.sqrt(_dot(grads, grads))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1, 0.3 / norm), grads)
    return s.update(state, grads), aux, grads


@_scheme()
def only_the_head(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    name = "head" if "head" in state["params"] else "in"
    loss = lambda head: s.objective({**state["params"], name: head}, batches[0])  # noqa: E731
    aux, head = s.gradient(loss, state["params"][name])
    grads = {**jax.tree.map(jnp.zeros_like, state["params"]), name: head}
    return s.update(state, grads), aux, grads


@_scheme()
def two_losses(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    """Two gradients at the same values; the second loses its component against the first."""
    aux, first = s.gradient(lambda p: s.objective(p, batches[0]), state["params"])
    _, second = s.gradient(lambda p: (jnp.mean(s.each(p, batches[0])), None), state["params"])
    shared = _dot(first, second) / (_dot(second, second) + 1e-3)
    grads = _plus(first, second, -0.5 * shared)
    return s.update(state, grads), aux, grads


@_scheme()
def teacher(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    def loss(p: Any) -> Any:
        value, aux = s.objective(p, batches[0])
        taught = jax.lax.stop_gradient(s.objective(state["average"], batches[0])[1][2])
        return value + jnp.mean((aux[2] - taught) ** 2), aux

    aux, grads = s.gradient(loss, state["params"])
    return s.update(state, grads), aux, grads


@_scheme(SECOND_BATCH)
def second_batch(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    def loss(p: Any) -> Any:
        value, aux = s.objective(p, batches[0])
        return value + 0.5 * jnp.mean(s.objective(p, batches[1])[1][2] ** 2), aux

    aux, grads = s.gradient(loss, state["params"])
    return s.update(state, grads), aux, grads


@_scheme(FLOAT_INPUT, NO_BATCH_NORM)
def penalty_on_input_gradients(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    def loss(p: Any) -> Any:
        value, aux = s.objective(p, batches[0])
        slopes = jax.grad(lambda x: jnp.sum(s.objective(p, {**batches[0], "x": x})[1][2][:, 0]))(batches[0]["x"])
        norms = jnp.sqrt(jnp.sum(slopes**2, tuple(range(1, slopes.ndim))) + 1e-3)
        return value + 0.1 * jnp.mean((norms - 1) ** 2), aux

    aux, grads = s.gradient(loss, state["params"])
    return s.update(state, grads), aux, grads


@_scheme(NO_BATCH_NORM)
def clipped_by_example(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    def of_one(row: Batch) -> Any:
        one = jax.tree.map(lambda x: x[None], row)
        grads = jax.grad(lambda p: jnp.sum(s.each(p, one)))(state["params"])
        norm = jnp.sqrt(_dot(grads, grads))
        return jax.tree.map(lambda g: g * jnp.minimum(1, 1 / norm), grads)

    grads = jax.tree.map(lambda g: jnp.mean(g, 0), jax.vmap(of_one)(batches[0]))
    aux = s.objective(state["params"], batches[0])[1]
    return s.update(state, grads), aux, grads


@_scheme(FLOAT_INPUT, NO_BATCH_NORM)
def adversarial_examples(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    x = batches[0]["x"]
    slopes = jax.grad(lambda x: jnp.sum(s.each(state["params"], {**batches[0], "x": x})))(x)
    x = x + 0.1 * slopes / (1 + jnp.abs(slopes))
    aux, grads = s.gradient(lambda p: s.objective(p, {**batches[0], "x": x}), state["params"])
    return s.update(state, grads), aux, grads


@_scheme()
def evaluation(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    return state, s.objective(state["params"], batches[0])[1], None


@_scheme(SEVERAL)
def sharpness_aware(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    loss = lambda p: s.objective(p, batches[0])  # noqa: E731
    _, grads = s.gradient(loss, state["params"])
    there = _plus(state["params"], grads, 0.2 / jnp.sqrt(_dot(grads, grads) + 1e-4))
    aux, grads = s.gradient(loss, there)
    return s.update(state, grads), aux, grads


@_scheme(SEVERAL)
def extragradient(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    loss = lambda p: s.objective(p, batches[0])  # noqa: E731
    _, grads = s.gradient(loss, state["params"])
    aux, grads = s.gradient(loss, _plus(state["params"], grads, -0.2))
    return s.update(state, grads), aux, grads


@_scheme(SEVERAL)
def two_updates(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    _, grads = s.gradient(lambda p: s.objective(p, batches[0]), state["params"])
    state = s.update(state, grads)
    aux, grads = s.gradient(lambda p: s.objective(p, batches[0]), state["params"])
    return s.update(state, grads), aux, grads


@_scheme(SEVERAL)
def three_gradients(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    params = state["params"]
    for _ in range(2):
        _, grads = s.gradient(lambda p: (jnp.mean(s.each(p, batches[0])), None), params)
        params = _plus(params, grads, -0.1)
    aux, grads = s.gradient(lambda p: s.objective(p, batches[0]), params)
    return s.update(state, grads), aux, grads


@_scheme(SEVERAL, SECOND_BATCH)
def alternating(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    """First the input projection on one batch, then the rest on the other, as a GAN does."""
    first = lambda w: (-jnp.mean(s.each({**state["params"], "in": w}, batches[0])), None)  # noqa: E731
    _, grad = s.gradient(first, state["params"]["in"])
    moved = {**state["params"], "in": state["params"]["in"] - 0.2 * grad}
    aux, grads = s.gradient(lambda p: s.objective(p, batches[1]), moved)
    grads = {**grads, "in": jnp.zeros_like(grads["in"])}
    return s.update({**state, "params": moved}, grads), aux, grads


@_scheme(SEVERAL)
def curvature(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    aux, grads = s.gradient(lambda p: s.objective(p, batches[0]), state["params"])
    gradient = jax.grad(lambda p: s.objective(p, batches[0])[0])
    along = jax.jvp(gradient, (state["params"],), (grads,))[1]
    grads = _plus(grads, along, -0.05)
    return s.update(state, grads), aux, grads


@_scheme()
def random_curvature(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    """Curvature along a random direction, which no gradient has changed."""
    params = state["params"]
    along = jax.tree.map(lambda p: jax.random.rademacher(s.key, p.shape, p.dtype), params)
    gradient = jax.grad(lambda p: s.objective(p, batches[0])[0])
    grads, curved = jax.jvp(gradient, (params,), (along,))
    grads = jax.tree.map(lambda g, c, z: g / (0.5 + jnp.abs(c * z)), grads, curved, along)
    return s.update(state, grads), s.objective(params, batches[0])[1], grads


@_scheme(SEVERAL)
def penalty_on_gradients(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    def loss(p: Any) -> Any:
        (value, aux), grads = jax.value_and_grad(lambda p: s.objective(p, batches[0]), has_aux=True)(p)
        return value + 0.05 * _dot(grads, grads), aux

    aux, grads = s.gradient(loss, state["params"])
    return s.update(state, grads), aux, grads


@_scheme(SEVERAL, SECOND_BATCH)
def meta(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    def loss(p: Any) -> Any:
        inner = jax.grad(lambda p: s.objective(p, batches[0])[0])(p)
        return s.objective(_plus(p, inner, -0.1), batches[1])

    aux, grads = s.gradient(loss, state["params"])
    return s.update(state, grads), aux, grads


@_scheme(SEVERAL)
def evaluated_after(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    _, grads = s.gradient(lambda p: s.objective(p, batches[0]), state["params"])
    state = s.update(state, grads)
    return state, s.objective(state["params"], batches[0])[1], grads


@_scheme(SEVERAL)
def kept_if_better(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    aux, grads = s.gradient(lambda p: s.objective(p, batches[0]), state["params"])
    moved = s.update(state, grads)
    better = s.objective(moved["params"], batches[0])[0] < aux[0]
    return jax.tree.map(lambda a, b: jnp.where(better, a, b), moved, state), aux, grads


@_scheme(SEVERAL)
def weighted_by_losses(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    weights = jax.nn.softmax(jax.lax.stop_gradient(s.each(state["params"], batches[0])))

    def loss(p: Any) -> Any:
        value, aux = s.objective(p, batches[0])
        return 0.1 * value + jnp.sum(weights * s.each(p, batches[0])), aux

    aux, grads = s.gradient(loss, state["params"])
    return s.update(state, grads), aux, grads


@_scheme(MIXING, NO_BATCH_NORM)
def accumulated_by_hand(s: Setting, state: Any, batches: tuple[Batch, ...]) -> Any:
    """Two halves of the batch under a scan."""
    halves = jax.tree.map(lambda x: x.reshape(2, x.shape[0] // 2, *x.shape[1:]), batches[0])

    def add(total: Any, half: Batch) -> Any:
        _, grads = s.gradient(lambda p: (jnp.mean(s.each(p, half)), None), state["params"])
        return _plus(total, grads, 0.5), None

    grads = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state["params"]), halves)[0]
    return s.update(state, grads), s.objective(state["params"], batches[0])[1], grads


# ---- the whole step -------------------------------------------------------------------------------------------------


def make_step(training: Training, ghosts: int = 1) -> Callable[..., Any]:
    """The step on arguments of `make_args`. ghosts: parts of the batch that BatchNorm normalises separately."""
    optimizer = OPTIMIZERS[training.optimizer]()
    model, loss = training.model, training.loss

    def update(state: Any, grads: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the number of steps
            updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}

    def step(state: Any, *rest: Any) -> Any:
        key = state["key"] if training.key == "state" else rest[-1]
        batches = rest if training.key == "state" else rest[:-1]
        scale = state["scale"] if "scale" in training.carries else 1.0

        def objective(params: Any, batch: Batch) -> Any:
            scores, stats = model_scores(model, params, state["stats"], batch["x"], key, ghosts)
            scores = scores[:, :WIDTH]
            value = loss_value(loss, scores, batch, params)
            return value * scale, (value, stats, scores)

        def each(params: Any, batch: Batch) -> jax.Array:
            scores, _ = model_scores(model, params, state["stats"], batch["x"], key, ghosts)
            return PER_EXAMPLE[loss.terms[0].per_example](scores[:, :WIDTH], batch)

        gradient = lambda fun, params: _gradient_of(training.gradient, fun, params)  # noqa: E731
        unscaled = lambda state, grads: update(state, jax.tree.map(lambda g: g / scale, grads))  # noqa: E731
        setting = Setting(objective, each, gradient, unscaled, key)
        new_state, (value, stats, scores), grads = SCHEMES[training.scheme](setting, state, batches)

        new_state = {**new_state, "stats": stats, "count": state["count"] + 1}
        new_state = _carried(training, state, new_state, batches[0])
        results = {"loss": value, **{name: RESULTS[name](value, scores, batches[0]) for name in training.results}}
        if training.shows_gradients and grads is not None:
            results["gradients"] = grads
        if "batch" in training.carries:
            results["batch"] = batches[0]
        kept, counts = counted_results(training.counted, state, batches[0])
        return {**new_state, **kept}, {**results, **counts}

    return step


def _carried(training: Training, state: Any, new_state: Any, batch: Batch) -> Any:
    """`new_state` with the carried values next to parameters and statistics."""
    new_state = dict(new_state)
    if "average" in new_state:
        mix = lambda a, p: 0.9 * a + 0.1 * p  # noqa: E731
        new_state["average"] = jax.tree.map(mix, state["average"], new_state["params"])
    if "key" in new_state:
        new_state["key"] = jax.random.fold_in(state["key"], 7)
    if "integers" in training.carries:
        new_state["seen"] = state["seen"] + batch["label"].shape[0]
        new_state["labels"] = state["labels"] + jnp.sum(jax.nn.one_hot(batch["label"], WIDTH, dtype=jnp.int32), 0)
    if "scale" in training.carries:
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(p)) for p in jax.tree.leaves(new_state["params"])]))
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        new_state["params"] = jax.tree.map(keep, new_state["params"], state["params"])
        new_state["scale"] = jnp.where(finite, state["scale"], state["scale"] / 2)
        new_state["good_steps"] = jnp.where(finite, state["good_steps"] + 1, 0)
    return new_state
