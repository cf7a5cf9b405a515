"""Decoders in the dimensions of published runs: GPT, MPT and Llama, one `lax.scan` over equal blocks, AdamW.

As in the recorded trainers, parameters are bfloat16, and the optimizer has a float32 copy and moments. Accumulators of
gradients are float32, products bfloat16 or float8, and softmaxes float32. Letters: b examples, s positions, h features,
v words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import minialpa
from minialpa.models.base import cross_entropies
from minialpa.models.layers import attend, rotate

Family = Literal["gpt", "llama"]
#: Values that the backward pass of a block recomputes: no value; all except the attention and every second product, as
#: in torchtitan's selective checkpointing of operators; or all.
Recomputation = Literal["none", "every second product", "full"]
Shapes = dict[str, Any]
#: A mesh axis, several, or none.
Axes = str | tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Experts in place of the feed-forward layer of each block, without a limit of tokens.

    Each expert gets the same number of rows. The rows are dealt out in turn, which moves and computes as much as
    routing does.

    Attributes:
        n: number of experts.
        per_token: experts of a token.
        inner: features inside an expert.
        mesh: devices along the axes "examples" and "operators" of a stage.
        over: the axes that split experts.
        once_per_host: whether a token goes to each host once, whose devices pass it on, in place of once per expert.
    """

    n: int
    per_token: int
    inner: int
    mesh: tuple[int, int] = (1, 1)
    over: tuple[str, ...] = ()
    once_per_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The dimensions of a model.

    Attributes:
        family: "gpt": LayerNorm, learned positions, GELU, tied head; "llama": RMSNorm, rotary positions, SwiGLU.
        n_layers: number of blocks.
        hidden: features of a position.
        n_heads: query heads of a block.
        n_kv_heads: key and value heads, a divisor of `n_heads`.
        ffn: features inside a feed-forward layer.
        vocab: number of words.
        seq: positions of an example.
        recomputes: values that the backward pass of a block recomputes.
        recomputes_unread: whether the backward pass also recomputes a value that it does not read, the last product of
            a block. Megatron repeats all of a block; jax leaves this product out.
        writes_scores: whether attention writes its scores to memory, operator by operator.
        has_dropout: whether scores and the values added to residuals have dropout.
        in_float8: whether the products of blocks are of float8.
        tensor_parallel: (groups of devices that split the examples, devices that split the operators of a block), for
            split heads and split features inside feed-forward layers. None if each device computes whole operators.
        context: devices that split the positions of an example (context parallelism), beside those groups.
        sequence_parallel: whether these devices also split the positions between operators.
        shards_weights: whether groups share weights, which each gathers for each use (ZeRO-3).
        head: features of a head; None for `hidden / n_heads`.
        experts: experts of each block.
    """

    family: Family
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    ffn: int
    vocab: int
    seq: int
    recomputes: Recomputation = "none"
    recomputes_unread: bool = False
    writes_scores: bool = False
    has_dropout: bool = False
    in_float8: bool = False
    tensor_parallel: tuple[int, int] | None = None
    context: int = 1
    sequence_parallel: bool = True
    shards_weights: bool = False
    head: int | None = None
    experts: Experts | None = None

    @property
    def inner(self) -> int:
        """Features of the queries of all heads."""
        return self.n_heads * self.head if self.head else self.hidden

    @property
    def axes(self) -> dict[str, int]:
        """The devices of a stage along each axis."""
        groups, operators = self.tensor_parallel or (1, 1)
        further = {"context": self.context, "operators": operators}
        return {"examples": groups} | {axis: n for axis, n in further.items() if n > 1}

    @property
    def n_weights(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(_parameters(self)))

    def flops(self, n_examples: int) -> float:
        """Operations of the products of forward and backward passes, without recomputation.

        All scores of attention count, as in most published numbers.
        """
        per_block = sum(shape[-2] * shape[-1] for shape in _block_shapes(self).values() if len(shape) == 2)
        if self.experts is not None:
            per_block += 3 * self.experts.per_token * self.hidden * self.experts.inner
        attention = 2 * self.seq * self.inner
        per_position = self.n_layers * (per_block + attention) + self.vocab * self.hidden
        return 6.0 * n_examples * self.seq * per_position

    def weight_partitions(self, operators: str | None, groups: Axes) -> dict[str, PartitionSpec]:
        """Partitions of weights, by path.

        In a tensor-parallel group, each device has its columns of the weights that make heads and inner features, and
        its rows of the weights that read them. `groups` split the other dimension.
        """
        layout = _layout(self, operators, groups)
        blocks = _block_shapes(self).keys() & layout.keys()
        stacked = {f"['blocks']['{name}']": PartitionSpec(None, *layout[name]) for name in sorted(blocks)}
        return stacked | {f"['{name}']": layout[name] for name in sorted(layout.keys() - blocks)}

    def arguments(self, n_examples: int) -> tuple[Any, Any]:
        """Shapes of the state and of a batch, for `train_step`."""
        params = _parameters(self)
        state = params, jax.eval_shape(_optimizer_state, params)
        words = jax.ShapeDtypeStruct((n_examples, self.seq), jnp.int32)
        return state, {"tokens": words, "labels": words}

    def train_step(self, state: Any, batch: Any) -> tuple[Any, jax.Array]:
        """(parameters, (float32 parameters, moments)), batch -> new state, loss."""
        params, (masters, moments) = state
        # optax mixes integers and floats.
        with jax.numpy_dtype_promotion("standard"):
            loss, gradients = minialpa.value_and_grad(functools.partial(_loss, self))(params, batch)
            updates, moments = _OPTIMIZER.update(_cast(jnp.float32, gradients), moments, masters)
            masters = optax.apply_updates(masters, updates)
            return (_cast(jnp.bfloat16, masters), (masters, moments)), loss


_OPTIMIZER = optax.adamw(1e-4)


def _optimizer_state(params: Any) -> Any:
    masters = _cast(jnp.float32, params)
    return masters, _OPTIMIZER.init(masters)


def _parameters(of: Decoder) -> Shapes:
    """Shapes of the parameters; blocks are stacked."""
    outside: dict[str, tuple[int, ...]] = {"words": (of.vocab, of.hidden), "norm": (of.hidden,)}
    if of.family == "gpt":
        outside["positions"] = (of.seq, of.hidden)
    else:
        outside["head"] = (of.hidden, of.vocab)
    blocks = {name: _array((of.n_layers, *shape)) for name, shape in _block_shapes(of).items()}
    return {"blocks": blocks, **{name: _array(shape) for name, shape in outside.items()}}


def _array(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _cast(dtype: Any, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def _block_shapes(of: Decoder) -> dict[str, tuple[int, ...]]:
    h, inner = of.hidden, of.inner // of.n_heads * of.n_kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "norm_1": (h,), "query": (h, of.inner), "key": (h, inner), "value": (h, inner), "out": (of.inner, h),
        "norm_2": (h,), "up": (h, of.ffn), "down": (of.ffn, h),
    }  # fmt: skip
    if of.experts is not None:
        n, f = of.experts.n, of.experts.inner
        return shapes | {"router": (h, n), "up": (n, h, f), "gate": (n, h, f), "down": (n, f, h)}
    return shapes if of.family == "gpt" else shapes | {"gate": (h, of.ffn)}


def _loss(of: Decoder, params: Any, batch: Any) -> jax.Array:
    words = _shared(of, "words", params["words"])
    x = words[batch["tokens"]]
    if of.family == "gpt":
        x = x + params["positions"][None]

    block: Callable[[jax.Array, Any], jax.Array] = functools.partial(_block, of)
    if of.recomputes != "none":
        # Iterations of a loop are separate, so XLA cannot merge recomputed equations with the forward pass.
        kept = jax.checkpoint_policies.save_only_these_names(*(_KEPT if of.recomputes != "full" else ()))
        again = functools.partial(_wanted_block, of) if of.recomputes_unread else block
        block = jax.checkpoint(again, prevent_cse=False, policy=kept)
    x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, params["blocks"])

    x = _norm(of, x, params["norm"])
    head = words.T if of.family == "gpt" else _shared(of, "head", params["head"])
    return jnp.mean(cross_entropies(jnp.dot(x, head), batch["labels"]))


#: The kept values of a block that recomputes every second product, in their order, and the kept attention.
_KEPT = ("query", "value", "attended", "up")


@jax.custom_vjp
def _wanted(x: jax.Array) -> jax.Array:
    """`x`, as a value that the backward pass reads, so that it must recompute `x`."""
    return x


_wanted.defvjp(lambda x: (x, x), lambda x, x_bar: (x_bar + 0 * x,))


def _wanted_block(of: Decoder, x: jax.Array, weights: Any) -> jax.Array:
    return _wanted(_block(of, x, weights))


def _block(of: Decoder, x: jax.Array, weights: Any) -> jax.Array:
    """x + attention(norm(x)), then x + feed_forward(norm(x)). [b s h] -> [b s h]."""
    dot = _float8_dot if of.in_float8 else jnp.dot
    weights = {name: _shared(of, name, weight) for name, weight in weights.items()}

    def products(y: jax.Array, *names: str) -> list[jax.Array]:
        # The gathered values are not kept: the backward pass gathers a second time.
        all_of = jax.checkpoint(lambda y, own: [dot(_gathered(of, y), w) for w in own], prevent_cse=False)
        found: list[jax.Array] = all_of(y, [weights[name] for name in names])
        return list(map(checkpoint_name, found, names))

    b, s, _ = x.shape
    inner = products(_norm(of, x, weights["norm_1"]), "query", "key", "value")
    numbers = (of.n_heads, of.n_kv_heads, of.n_kv_heads)
    query, key, value = (_split(of, y.reshape(b, s, n, -1)) for y, n in zip(inner, numbers, strict=True))
    if of.family == "llama":
        query, key = rotate(query, 500_000.0), rotate(key, 500_000.0)
    attended = _attend_in_memory(of, query, key, value) if of.writes_scores else attend(query, key, value, causal=True)
    attended = checkpoint_name(attended.reshape(b, s, of.inner), "attended")
    x = _between(of, x + _dropped(of, _between(of, dot(attended, weights["out"]))))

    if of.experts is not None:
        return _between(of, x + _between(of, _experts(of, of.experts, _norm(of, x, weights["norm_2"]), weights)))
    names = ("up",) if of.family == "gpt" else ("up", "gate")
    wide = _activated(*(_split(of, y) for y in products(_norm(of, x, weights["norm_2"]), *names)))
    return _between(of, x + _dropped(of, _between(of, dot(wide, weights["down"]))))


def _attend_in_memory(of: Decoder, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """`attend` with a causal mask, in bfloat16, as separate kernels.

    Each step writes about the bytes that kernels of trainers before fused attention read and write: one kernel for
    scale, mask and softmax, and one for dropout.
    """
    scores = _product_of_heads(of, "bqhd,bkhd->bhqk", query, key)
    scores = scores + jnp.triu(jnp.full(scores.shape[2:], -1e4, scores.dtype), 1)[None, None]
    largest = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    weights = jnp.exp(scores - largest)
    weights = weights / jnp.sum(weights, -1, keepdims=True)
    return _product_of_heads(of, "bhqk,bkhd->bqhd", _dropped(of, weights), value)


def _product_of_heads(of: Decoder, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The product; at the rate of float32, without tensor cores, if a head's features are not a multiple of 16 bytes.

    NVIDIA's guide to matrix multiplication states that kernels for tensor cores need such multiples or are slow without
    them. Of two runs on Jean Zay that differed only in their heads, the one with 108 features per head took 40 s more
    than the one with 144 (hidden 13,824, 02-26): its products came to 10 Tflop/s, where float32 has 19.5.
    """
    if of.hidden // of.n_heads % 8 == 0:
        return jnp.einsum(subscripts, a, b)
    wide = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(subscripts, *wide, precision=jax.lax.Precision.HIGHEST).astype(a.dtype)


def _dropped(of: Decoder, x: jax.Array) -> jax.Array:
    """`x` with dropout, if the trainer has it.

    A comparison of `x` with its own values replaces the comparison with random numbers, which take no memory.
    """
    if not of.has_dropout:
        return x
    return jnp.where(x >= -1e4, x * jnp.asarray(1 / 0.9, x.dtype), jnp.zeros_like(x))


@jax.checkpoint
def _activated(wide: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    return jax.nn.gelu(wide) if gate is None else jax.nn.silu(gate) * wide


@functools.partial(jax.checkpoint, static_argnums=0)
def _norm(of: Decoder, x: jax.Array, scale: jax.Array) -> jax.Array:
    """A norm in float32. The backward pass recomputes it from `x`, as norm kernels do."""
    wide = x.astype(jnp.float32)
    if of.family == "gpt":
        wide = wide - jnp.mean(wide, -1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale.astype(x.dtype)[None, None]


def _experts(of: Decoder, experts: Experts, x: jax.Array, weights: Any) -> jax.Array:
    """[b s h] -> [b s h]. Rows of an expert are [b t c h]: c of each part t of the positions."""
    b, s, h = x.shape
    n, k = experts.n, experts.per_token
    parts = 1 if of.tensor_parallel is None else of.tensor_parallel[1]
    logits = jnp.dot(x, weights["router"]).astype(jnp.float32)
    gates = jax.lax.top_k(jax.nn.softmax(logits), k)[0].astype(x.dtype)

    product = _float8_product_of_experts if of.in_float8 else _product_of_experts
    if experts.once_per_host:
        return _experts_by_host(experts, x, gates, weights, product)
    rows = jnp.broadcast_to(x[:, :, None], (b, s, k, h)).reshape(b, parts, n, s * k // (n * parts), h)
    rows = _dealt(of, experts, _dealt(of, experts, rows, inside=False), inside=True)
    wide = _activated(product(rows, weights["up"]), product(rows, weights["gate"]))
    out = _dealt(of, experts, _dealt(of, experts, product(wide, weights["down"]), inside=True), inside=False)
    return jnp.einsum("bskh,bsk->bsh", out.reshape(b, s, k, h), gates)


def _experts_by_host(experts: Experts, x: jax.Array, gates: jax.Array, weights: Any, product: Any) -> jax.Array:
    """[b s h] -> [b s h]. Examples are b = g p q for hosts p and devices q, experts of a token k = p (k / p)."""
    (hosts, devices), (b, s, h), (n, k) = experts.mesh, x.shape, (experts.n, experts.per_token)
    mesh = AbstractMesh(experts.mesh, ("examples", "operators"))

    def moved(y: jax.Array, *partitions: PartitionSpec) -> jax.Array:
        for partition in partitions:
            y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, partition))
        return y

    at_tokens = PartitionSpec(None, "examples", "operators")
    at_hosts = PartitionSpec(None, None, "operators", "examples")
    at_experts = PartitionSpec(None, None, None, ("examples", "operators"))
    split = (b // (hosts * devices), hosts, devices)
    tokens = jnp.broadcast_to(x.reshape(*split, 1, s, h), (*split, hosts, s, h))
    tokens = moved(tokens, at_tokens, at_hosts)
    rows = jnp.broadcast_to(tokens[:, :, :, :, None], (*split, hosts, k // hosts, s, h))
    rows = moved(rows.reshape(*split, n, s * k // n, h), at_hosts, at_experts).reshape(b, 1, n, s * k // n, h)
    wide = _activated(product(rows, weights["up"]), product(rows, weights["gate"]))
    out = product(wide, weights["down"]).reshape(*split, n, s * k // n, h)
    out = moved(out, at_experts, at_hosts).reshape(*split, hosts, k // hosts, s, h)
    gates = jnp.moveaxis(gates.reshape(*split, s, hosts, k // hosts), 3, 5)
    of_hosts = jnp.sum(moved(out, at_hosts) * moved(gates, at_tokens, at_hosts)[..., None], axis=4)
    return jnp.sum(moved(of_hosts, at_hosts, at_tokens), axis=3).reshape(b, s, h)


def _dealt(of: Decoder, experts: Experts, rows: jax.Array, *, inside: bool) -> jax.Array:
    """[b t n c h] where tokens are, or inside the experts. The moves between the two are all-to-alls."""
    if math.prod(experts.mesh) == 1:
        return rows
    if inside:
        examples = tuple(axis for axis in ("examples", "operators") if axis not in experts.over)
        partition = PartitionSpec(examples or None, None, experts.over)
    elif of.tensor_parallel is None:
        partition = PartitionSpec(("examples", "operators"))
    else:
        partition = PartitionSpec("examples", "operators")
    mesh = AbstractMesh(experts.mesh, ("examples", "operators"))
    dealt: jax.Array = jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, partition))
    return dealt


def _product_of_experts(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("btnch,nhf->btncf", rows, weight)


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def _layout(of: Decoder, operators: str | None, groups: Axes) -> dict[str, PartitionSpec]:
    """Partitions of weights, without the dimension of layers; see `Decoder.weight_partitions`."""
    columns, rows = PartitionSpec(groups, operators), PartitionSpec(operators, groups)
    layout = {name: columns for name in ("query", "key", "value", "up")} | {"out": rows, "down": rows, "words": rows}
    if of.experts is not None:
        names = {"examples": "x", "operators": "y"}
        over = PartitionSpec(tuple(names[axis] for axis in of.experts.over) or None)
        attention = ("query", "key", "value", "out", "words") if operators else ()
        layout = {name: layout[name] for name in attention} | dict.fromkeys(("up", "gate", "down"), over)
        return layout | ({"head": columns} if operators else {})
    return layout | ({"gate": columns, "head": columns} if of.family == "llama" else {})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _shared(of: Decoder, name: str, weight: jax.Array) -> jax.Array:
    """A weight that each group shards if groups share weights. A micro-batch also leaves a sharded gradient."""
    return weight


def _shared_backward(of: Decoder, name: str, _: None, weight_bar: jax.Array) -> tuple[jax.Array]:
    layout = _layout(of, "operators", ("examples", "context")) if of.shards_weights else {}
    return (_constrained(of, weight_bar, layout[name]) if name in layout else weight_bar,)


_shared.defvjp(lambda of, name, weight: (weight, None), _shared_backward)


def _split(of: Decoder, x: jax.Array) -> jax.Array:
    """[b s inner ...], with the inner dimension split between the devices of a tensor-parallel group."""
    return _constrained(of, x, PartitionSpec("examples", "context", "operators"))


def _between(of: Decoder, x: jax.Array) -> jax.Array:
    """[b s h] between the operators of a block: whole on each device of the group, or split along positions."""
    if of.sequence_parallel and of.context == 1:
        return x
    positions = ("context", "operators") if of.sequence_parallel else "context"
    return _constrained(of, x, PartitionSpec("examples", positions))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(of: Decoder, x: jax.Array) -> jax.Array:
    """[b s h] with its positions on each device of a tensor-parallel group. The sharding of its gradient is free."""
    return _constrained(of, x, PartitionSpec("examples", "context"))


_gathered.defvjp(lambda of, x: (_gathered(of, x), None), lambda of, _, x_bar: (x_bar,))


def _constrained(of: Decoder, x: jax.Array, partition: PartitionSpec) -> jax.Array:
    if of.tensor_parallel is None:
        return x
    axes = of.axes
    dims = [((dim,) if isinstance(dim, str) else dim) or () for dim in partition]
    present = (tuple(axis for axis in dim if axis in axes) or None for dim in dims)
    sharding = NamedSharding(AbstractMesh(tuple(axes.values()), tuple(axes)), PartitionSpec(*present))
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, sharding)
    return constrained


# ---- float8 ----------------------------------------------------------------------------------------------------------


def _product(a: jax.Array, b: jax.Array, dims: Any) -> jax.Array:
    return jax.lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=jnp.bfloat16)


@jax.custom_vjp
def _float8_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [b s i] weight [i o], both rounded to float8; gradients, too."""
    return _forward(x, weight)[0]


def _forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    x, weight = x.astype(jnp.float8_e4m3fn), weight.astype(jnp.float8_e4m3fn)
    return _product(x, weight, ((2,), (0,))), (x, weight)


def _backward(kept: Any, out_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    # One type for all: jax has no product of two different ones.
    out_bar = out_bar.astype(jnp.float8_e4m3fn)
    return _product(out_bar, weight, ((2,), (1,))), _product(x, out_bar, ((0, 1), (0, 1)))


_float8_dot.defvjp(_forward, _backward)


def _batched_product(a: jax.Array, b: jax.Array, subscripts: str) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.bfloat16)


@jax.custom_vjp
def _float8_product_of_experts(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return _forward_of_experts(rows, weight)[0]


def _forward_of_experts(rows: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    rows, weight = rows.astype(jnp.float8_e4m3fn), weight.astype(jnp.float8_e4m3fn)
    return _batched_product(rows, weight, "btnch,nhf->btncf"), (rows, weight)


def _backward_of_experts(kept: Any, out_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, weight = kept
    out_bar = out_bar.astype(jnp.float8_e4m3fn)
    return (
        _batched_product(out_bar, weight, "btncf,nhf->btnch"),
        _batched_product(rows, out_bar, "btnch,btncf->nhf"),
    )


_float8_product_of_experts.defvjp(_forward_of_experts, _backward_of_experts)
