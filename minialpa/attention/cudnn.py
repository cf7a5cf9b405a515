"""Attention on NVIDIA GPUs: by cuDNN if its result is the same, else block by block.

The operands of `attention_p` and `attention_gradient_p` in, their results out. cuDNN has a causal mask and a window
that ends at the query, both counted from 0, and no finite `masked_score`. So it computes an attention

- without masks and biases, in 16 bits, with heads that fit into its kernels (`takes`);
- with a window only if all queries see all keys, or if queries and keys have the same consecutive positions;
- with a `masked_score` whose weight is 0 next to the visible scores of each query.

The program tests the last two at run time: devices with parts of an attention learn their positions there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minialpa.attention import blockwise
from minialpa.attention.kind import AttentionKind
from minialpa.support.private_jax import CudnnAttention, cudnn_attention, cudnn_attention_gradient, cudnn_version

Results = TypeVar("Results")

#: Older versions of cuDNN have no window, or faults with it.
OLDEST = 90700
OLDEST_GPU = 8.0
#: With fewer positions, a plain program is as fast.
FEWEST = 64
#: Largest head on GPUs before Hopper. It limits newer GPUs, too: the machine that compiles may not have the GPU.
LARGEST_HEAD = 128
#: exp(-x) is 0 in float32 for this x and more.
NOTHING = 104.0
#: The scope, in compiled programs, of an attention by cuDNN. Without cuDNN, the plain program has this scope.
KERNEL_SCOPE = "attention_with_kernel"


@functools.partial(jax.jit, static_argnames="kind")
def attend(*operands: jax.Array, kind: AttentionKind) -> list[jax.Array]:
    plain: Callable[[], list[jax.Array]] = functools.partial(blockwise.attend, *operands, kind=kind)
    query, key, value, *others = operands
    if not takes(query, key, value, kind):
        return plain()

    def run(known: CudnnAttention) -> list[jax.Array]:
        results = _results(query, key, value, known)
        return _unless_masked_weigh(known.is_causal, results[1], kind, key.shape[1], lambda: results, plain)

    return _with_kernel(run, plain, others, kind)


@functools.partial(jax.jit, static_argnames=("kind", "dtypes", "with_bias_gradient"))
def differentiate(
    *operands: jax.Array, kind: AttentionKind, dtypes: Sequence[str], with_bias_gradient: Sequence[bool]
) -> list[jax.Array]:
    plain: Callable[[], Results] = functools.partial(
        blockwise.differentiate, *operands, kind=kind, dtypes=dtypes, with_bias_gradient=with_bias_gradient
    )
    query, key, value, out, logsumexp, out_bar, *others = operands
    if not takes(query, key, value, kind) or {x.dtype for x in (out, out_bar)} != {query.dtype}:
        return plain()

    def run(known: CudnnAttention) -> list[jax.Array]:
        def compute() -> list[jax.Array]:
            bars = _cotangents(operands[:6], known)
            return [x.astype(dtype) for x, dtype in zip(bars, dtypes, strict=True)]

        return _unless_masked_weigh(known.is_causal, logsumexp, kind, key.shape[1], compute, plain)

    return _with_kernel(run, plain, others, kind)


def add_keys(
    queries: Sequence[jax.Array],
    keys: Sequence[jax.Array],
    sums: Any,
    *,
    kind: AttentionKind,
    n_keys: int,
    plain: Callable[..., Any],
) -> Any:
    """`sums` for the queries, and `()`; see `blockwise.add_keys`, which `plain` calls."""
    (query, *query_at), (key, value, *key_at) = queries, keys
    of_queries, _ = sums

    def run(known: CudnnAttention) -> Any:
        out, logsumexp = _results(query, key, value, known)
        found = blockwise.joined(of_queries, out, logsumexp, n_keys), ()
        return _unless_masked_weigh(known.is_causal, logsumexp, kind, n_keys, lambda: found, compute)

    def skip() -> Any:
        logsumexp = of_queries[0] + jnp.log(of_queries[1])
        return _unless_masked_weigh(True, logsumexp, kind, n_keys, lambda: sums, compute)

    compute = functools.partial(plain, queries, keys, sums)
    if not takes(query, key, value, kind):
        return compute()
    return _with_kernel(run, compute, [x[0] for x in (*query_at, *key_at)], kind, skip)


def add_gradients(
    queries: Sequence[jax.Array],
    keys: Sequence[jax.Array],
    sums: Any,
    *,
    kind: AttentionKind,
    n_keys: int,
    plain: Callable[..., Any],
) -> Any:
    """`sums` of cotangents, for the query and for key and value; see `blockwise.gradients_of_keys`."""
    (query, out, logsumexp, _, out_bar, *query_at), (key, value, *key_at) = queries, keys

    def run(known: CudnnAttention) -> Any:
        query_bar, *key_bars = _cotangents((query, key, value, out, logsumexp, out_bar), known)
        bars = (query_bar,), tuple(key_bars)
        found = jax.tree.map(lambda total, bar: total + bar.astype(total.dtype), sums, bars)
        return _unless_masked_weigh(known.is_causal, logsumexp, kind, n_keys, lambda: found, compute)

    def skip() -> Any:
        return _unless_masked_weigh(True, logsumexp, kind, n_keys, lambda: sums, compute)

    compute = functools.partial(plain, queries, keys, sums)
    if not takes(query, key, value, kind) or {x.dtype for x in (out, out_bar)} != {query.dtype}:
        return compute()
    return _with_kernel(run, compute, [x[0] for x in (*query_at, *key_at)], kind, skip)


def takes(query: Any, key: Any, value: Any, kind: AttentionKind) -> bool:
    """Whether cuDNN has kernels for arrays of these shapes and dtypes, and for this kind.

    Its kernels compute in float32 between the products.
    """
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    if not _has_formula(kind):
        return False
    head = query.shape[-1]
    has_kernel_head: bool = head == value.shape[-1] and head % 8 == 0 and 0 < head <= LARGEST_HEAD
    fewest: int = min(query.shape[1], key.shape[1])
    return has_kernel_head and fewest >= FEWEST and min(query.shape) > 0


def _has_formula(kind: AttentionKind) -> bool:
    """Whether the kernels have the masks and the scale of this kind."""
    if kind.float16 or kind.n_segments or kind.n_biases or kind.n_masks or not kind.scale > 0:
        return False
    return not kind.has_window or (kind.right == 0 and (kind.left is None or kind.left >= 0))


def _with_kernel(
    run: Callable[[CudnnAttention], Results],
    plain: Callable[[], Results],
    positions: Sequence[jax.Array],
    kind: AttentionKind,
    skip: Callable[[], Results] | None = None,
) -> Results:
    """`_choose`; without cuDNN, or on GPUs before Ampere, `plain()`."""
    with jax.named_scope(KERNEL_SCOPE):
        # Devices come last: without cuDNN, the process need not start its backend.
        if (cudnn_version() or 0) < OLDEST or _has_old_gpu():
            return plain()
        return _choose(run, plain, skip, positions, kind)


def _has_old_gpu() -> bool:
    """Before Ampere, without kernels of cuDNN."""
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    return any(float(getattr(gpu, "compute_capability", OLDEST_GPU)) < OLDEST_GPU for gpu in gpus)


def _choose(
    run: Callable[[CudnnAttention], Results],
    plain: Callable[[], Results],
    skip: Callable[[], Results] | None,
    positions: Sequence[jax.Array],
    kind: AttentionKind,
) -> Results:
    """`run` uses cuDNN, if the positions allow it. `skip()` if they hide all keys; None to compute these, too."""
    everything = functools.partial(run, CudnnAttention(scale=kind.scale, is_causal=False, window=None))
    if not kind.has_window:
        return everything()

    # A part of an attention may show all keys to all queries.
    queries, keys = positions
    sees_all, sees_none = keys.max() <= queries.min(), keys.min() > queries.max()
    if kind.left is not None:
        sees_all &= keys.min() - queries.max() >= -kind.left
        sees_none |= keys.max() - queries.min() < -kind.left

    choose = functools.partial(_run_either, sees_all, everything, plain)
    if skip is not None:
        choose = functools.partial(_run_either, sees_none, skip, choose)
    if len(queries) != len(keys):
        return choose()

    # cuDNN counts queries and keys from 0, so only their differences matter.
    steps = lax.iota(np.int32, len(queries))
    is_diagonal = ((queries == queries[0] + steps) & (keys == queries[0] + steps)).all()
    window = None if kind.left is None else kind.left + 1
    diagonal = functools.partial(run, CudnnAttention(scale=kind.scale, is_causal=True, window=window))
    return _run_either(is_diagonal, diagonal, choose)


def _unless_masked_weigh(
    has_masked: bool,
    logsumexp: jax.Array,
    kind: AttentionKind,
    n_keys: int,
    then: Callable[[], Results],
    otherwise: Callable[[], Results],
) -> Results:
    """`otherwise()` if a masked weight does not round to 0 in a query's sum, or is NaN."""
    if not has_masked or kind.masked_score == -math.inf:
        return then()
    # A query whose largest visible score is m has a logsumexp of at most m + log(n_keys).
    weigh_nothing = (logsumexp > kind.masked_score + NOTHING + math.log(n_keys)).all()
    return _run_either(weigh_nothing, then, otherwise)


def _run_either(condition: jax.Array, then: Callable[[], Results], otherwise: Callable[[], Results]) -> Results:
    results: Results = lax.cond(condition, then, otherwise)
    return results


def _results(query: jax.Array, key: jax.Array, value: jax.Array, known: CudnnAttention) -> list[jax.Array]:
    """By cuDNN: out [b t g r d] and logsumexp [b t g r]."""
    out, logsumexp = cudnn_attention(_joined_heads(query), key, value, known)
    return [out.reshape(query.shape), logsumexp.transpose(0, 2, 1).reshape(query.shape[:-1])]


def _cotangents(operands: Sequence[jax.Array], known: CudnnAttention) -> list[jax.Array]:
    """By cuDNN, of query, key and value. operands: of `attention_gradient_p`, without positions."""
    query, key, value, out, logsumexp, out_bar = operands
    logsumexp = logsumexp.reshape(*query.shape[:2], -1).transpose(0, 2, 1)
    query_bar, *bars = cudnn_attention_gradient(
        (_joined_heads(query), key, value), _joined_heads(out), logsumexp, _joined_heads(out_bar), known
    )
    return [query_bar.reshape(query.shape), *bars]


def _joined_heads(x: jax.Array) -> jax.Array:
    """[b t g r d] as [b t n d]; queries of a key head are side by side."""
    b, t, g, r, d = x.shape
    return x.reshape(b, t, g * r, d)
