"""A language model on packed sequences, with dropout, a learning rate schedule and sums of metrics.

In the style of google/flax examples/lm1b/train.py.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import common_utils, train_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script


class TransformerLM(nn.Module):
    vocabulary: int = 32
    width: int = 16
    n_layers: int = 2
    dropout_rate: float = 0.1

    @nn.compact
    def __call__(self, tokens, positions, segments, train):
        shifted = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        starts = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1] == segments
        x = nn.Embed(self.vocabulary, self.width, name="embed")(shifted * starts)
        table = self.param("positions", nn.initializers.normal(0.1), (8, self.width))
        x = nn.Dropout(self.dropout_rate)(x + table[positions], deterministic=not train)

        mask = nn.combine_masks(
            nn.make_causal_mask(tokens), nn.make_attention_mask(segments, segments, jnp.equal), dtype=bool
        )
        for i in range(self.n_layers):
            y = nn.LayerNorm(name=f"norm_{i}")(x)
            x = x + nn.MultiHeadDotProductAttention(
                2, use_bias=False, dropout_rate=self.dropout_rate, deterministic=not train, name=f"attention_{i}"
            )(y, mask=mask)
            y = nn.Dense(32, name=f"up_{i}")(nn.LayerNorm(name=f"mlp_norm_{i}")(x))
            y = nn.Dropout(self.dropout_rate)(nn.relu(y), deterministic=not train)
            x = x + nn.Dense(self.width, name=f"down_{i}")(y)
        return nn.Dense(self.vocabulary, name="logits")(nn.LayerNorm(name="last")(x))


def weighted_cross_entropy(logits, targets, weights, label_smoothing=0.1):
    vocabulary = logits.shape[-1]
    low = label_smoothing / (vocabulary - 1)
    soft = common_utils.onehot(targets, vocabulary, on_value=1.0 - label_smoothing, off_value=low)
    losses = -jnp.sum(soft * nn.log_softmax(logits), axis=-1)
    return jnp.sum(losses * weights), jnp.sum(weights)


def compute_metrics(logits, targets, weights):
    loss, denominator = weighted_cross_entropy(logits, targets, weights, label_smoothing=0.0)
    correct = jnp.sum((jnp.argmax(logits, axis=-1) == targets) * weights)
    return {"loss": loss, "accuracy": correct, "denominator": denominator}


def train_step(state, batch, model, learning_rate, label_smoothing, dropout_rng):
    inputs, positions, segments = (batch[name] for name in ("inputs", "positions", "segments"))
    weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
        logits = model.apply({"params": params}, inputs, positions, segments, True, rngs={"dropout": dropout_rng})
        loss, n = weighted_cross_entropy(logits, inputs, weights, label_smoothing)
        return loss / n, logits

    (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    new_state = state.apply_gradients(grads=grads)
    metrics = compute_metrics(logits, inputs, weights)
    metrics["learning_rate"] = learning_rate(state.step)
    return new_state, metrics


def eval_step(state, batch, model, *_):
    inputs, positions, segments = (batch[name] for name in ("inputs", "positions", "segments"))
    weights = jnp.where(inputs > 0, 1.0, 0.0)
    logits = model.apply({"params": state.params}, inputs, positions, segments, False)
    return compute_metrics(logits, inputs, weights)


def packed_batches(n_steps=3, batch_size=16, length=8):
    rng = np.random.default_rng(0)
    for _ in range(n_steps):
        split = rng.integers(1, length, (batch_size, 1))
        place = np.arange(length)[None]
        tokens = rng.integers(1, 32, (batch_size, length)) * (place < rng.integers(split, length + 1))
        positions = np.where(place < split, place, place - split)
        yield {"inputs": tokens, "positions": positions, "segments": 1 + (place >= split)}


def make():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    model = TransformerLM()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=2, decay_steps=10)
    tx = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-4, weight_decay=0.1)

    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    ones = jnp.ones((1, 8), jnp.int32)
    params = jax.jit(model.init, static_argnums=4, out_shardings=whole)(jax.random.key(0), ones, ones, ones, False)
    state = train_state.TrainState.create(apply_fn=model.apply, params=params["params"], tx=tx)
    jit_train_step = jax.jit(
        train_step,
        in_shardings=(whole, rows, None, whole),
        out_shardings=(whole, None),
        static_argnums=(2, 3),
        donate_argnums=0,
    )
    jit_eval_step = jax.jit(
        eval_step, in_shardings=(whole, rows, None, whole), out_shardings=None, static_argnums=(2, 3)
    )
    rng = jax.device_put(jax.random.key(1), whole)
    batches = [(jax.device_put(batch, rows), model, schedule, 0.1, rng) for batch in packed_batches()]
    return Script(step=jit_train_step, state=(state,), batches=batches, evaluate=jit_eval_step)


CHANGES = {
    "    jit_eval_step = jax.jit(": (
        "    jit_train_step = minialpa.parallelize(jit_train_step, method=method)\n    jit_eval_step = jax.jit("
    ),
}
