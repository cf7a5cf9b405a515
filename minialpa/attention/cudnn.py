"""Attention on NVIDIA GPUs: by cuDNN where it computes the same, and block by block elsewhere.

The operands of `attention_p` and `attention_gradient_p` go in, and their results come out. cuDNN knows a causal mask
and a window that ends at the query, both counted from 0, and no finite `masked_score`. So it computes an attention

- without masks and biases, of 16 bits, with heads that fit into its kernels (`takes`);
- if there is a window: whose queries all see all keys, or whose queries and keys are at the same consecutive positions;
- in which `masked_score` has no weight next to what each query sees.

The first is known when a program is compiled. The others depend on numbers, and are asked as the program runs: devices
that hold parts of an attention learn their positions only then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minialpa.attention import blockwise
from minialpa.attention.kind import Attention, Float16Attention
from minialpa.support.private_jax import CudnnAttention, cudnn_attention, cudnn_attention_gradient, cudnn_version

Compute = Callable[[], list[jax.Array]]

#: The oldest version that is used; older ones have no window, or faults with it.
OLDEST = 90700
OLDEST_GPU = 8.0
#: Below this many positions a plain program is as fast.
FEWEST = 64
#: Largest head on GPUs before Hopper; a program may be compiled where no GPU is, so newer ones have no other limit.
LARGEST_HEAD = 128
#: exp(-x) is 0 in float32 for this x and more.
NOTHING = 104.0
#: Names, in compiled programs, what computes an attention that cuDNN has a kernel for. Where cuDNN is not installed,
#: that is the plain program, though the machines that run it may have cuDNN.
KERNEL_SCOPE = "attention_with_kernel"


@functools.partial(jax.jit, static_argnames="kind")
def attend(*operands: jax.Array, kind: Attention) -> list[jax.Array]:
    """The results of `attention_p`."""
    plain: Compute = functools.partial(blockwise.attend, *operands, kind=kind)
    query, key, value, *others = operands
    if not takes(query, key, value, kind):
        return plain()

    def run(known: CudnnAttention) -> list[jax.Array]:
        out, logsumexp = cudnn_attention(_heads(query), key, value, known)
        results = [out.reshape(query.shape), logsumexp.transpose(0, 2, 1).reshape(query.shape[:-1])]
        if not known.is_causal or kind.masked_score == -math.inf:
            return results
        return _either(_masked_weigh_nothing(results[1], kind, key), lambda: results, plain)

    return _with_kernel(run, plain, others, kind)


@functools.partial(jax.jit, static_argnames=("kind", "dtypes", "wants_bias"))
def differentiate(
    *operands: jax.Array, kind: Attention, dtypes: Sequence[str], wants_bias: Sequence[bool]
) -> list[jax.Array]:
    """The results of `attention_gradient_p`."""
    plain: Compute = functools.partial(
        blockwise.differentiate, *operands, kind=kind, dtypes=dtypes, wants_bias=wants_bias
    )
    query, key, value, out, logsumexp, out_bar, *others = operands
    if not takes(query, key, value, kind) or {x.dtype for x in (out, out_bar)} != {query.dtype}:
        return plain()

    def gradient(known: CudnnAttention) -> list[jax.Array]:
        query_bar, *bars = cudnn_attention_gradient(
            (_heads(query), key, value),
            _heads(out),
            logsumexp.reshape(*query.shape[:2], -1).transpose(0, 2, 1),
            _heads(out_bar),
            known,
        )
        return [x.astype(dtype) for x, dtype in zip((query_bar.reshape(query.shape), *bars), dtypes, strict=True)]

    def run(known: CudnnAttention) -> list[jax.Array]:
        compute = functools.partial(gradient, known)
        if not known.is_causal or kind.masked_score == -math.inf:
            return compute()
        return _either(_masked_weigh_nothing(logsumexp, kind, key), compute, plain)

    return _with_kernel(run, plain, others, kind)


def takes(query: Any, key: Any, value: Any, kind: Attention) -> bool:
    """Whether cuDNN has kernels for arrays of this kind, of which only shapes and dtypes count."""
    return _takes_arrays(query, key, value) and _takes_kind(kind)


def _with_kernel(
    run: Callable[[CudnnAttention], list[jax.Array]], plain: Compute, positions: Sequence[jax.Array], kind: Attention
) -> list[jax.Array]:
    """`_choose` where cuDNN is installed, else plain()."""
    with jax.named_scope(KERNEL_SCOPE):
        # Devices are asked last: a process that has no use for the answer need not start its backend.
        if (cudnn_version() or 0) < OLDEST or _has_old_gpu():
            return plain()
        return _choose(run, plain, positions, kind)


def _takes_arrays(query: Any, key: Any, value: Any) -> bool:
    """Whether there are kernels for arrays of these dtypes and lengths, and worth their while."""
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    head = query.shape[-1]
    has_kernel_head: bool = head == value.shape[-1] and head % 8 == 0 and 0 < head <= LARGEST_HEAD
    fewest: int = min(query.shape[1], key.shape[1])
    return has_kernel_head and fewest >= FEWEST and min(query.shape) > 0


def _takes_kind(kind: Attention) -> bool:
    """Whether cuDNN knows this attention: a positive scale, no biases, no mask but a window that ends at the query.

    It computes all that is between the products in float32.
    """
    if isinstance(kind, Float16Attention) or kind.n_biases or kind.n_masks or not kind.scale > 0:
        return False
    return not kind.has_window or (kind.right == 0 and (kind.left is None or kind.left >= 0))


def _has_old_gpu() -> bool:
    """Whether a GPU here is older than Ampere, for which there are no such kernels."""
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    return any(float(getattr(gpu, "compute_capability", OLDEST_GPU)) < OLDEST_GPU for gpu in gpus)


def _choose(
    run: Callable[[CudnnAttention], list[jax.Array]], plain: Compute, positions: Sequence[jax.Array], kind: Attention
) -> list[jax.Array]:
    """run(what cuDNN computes) where the positions allow it, else plain()."""
    everything = functools.partial(run, CudnnAttention(scale=kind.scale, is_causal=False, window=None))
    if not kind.has_window:
        return everything()

    # Parts of an attention may be such that no mask is left.
    queries, keys = positions
    sees_all = keys.max() <= queries.min()
    if kind.left is not None:
        sees_all &= keys.min() - queries.max() >= -kind.left
    if len(queries) != len(keys):
        return _either(sees_all, everything, plain)

    # cuDNN counts queries and keys from 0, so all that matters is that they are counted alike.
    steps = lax.iota(np.int32, len(queries))
    is_diagonal = ((queries == queries[0] + steps) & (keys == queries[0] + steps)).all()
    window = None if kind.left is None else kind.left + 1
    diagonal = functools.partial(run, CudnnAttention(scale=kind.scale, is_causal=True, window=window))
    return _either(is_diagonal, diagonal, lambda: _either(sees_all, everything, plain))


def _either(condition: jax.Array, then: Compute, otherwise: Compute) -> list[jax.Array]:
    results: list[jax.Array] = lax.cond(condition, then, otherwise)
    return results


def _masked_weigh_nothing(logsumexp: jax.Array, kind: Attention, key: jax.Array) -> jax.Array:
    """Whether masked scores would add nothing to any query's total; false for NaN."""
    # A query whose largest visible score is m has a logsumexp of at most m + log(n_keys).
    return (logsumexp > kind.masked_score + NOTHING + math.log(key.shape[1])).all()


def _heads(x: jax.Array) -> jax.Array:
    """[b t g r d] as [b t n d]: the queries of a key head are beside each other."""
    b, t, g, r, d = x.shape
    return x.reshape(b, t, g * r, d)
