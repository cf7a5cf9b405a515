"""jax functions whose equations, with gradients, cover every rule of the table for the laws of rule_laws.py.

`PROGRAMS` maps a name to a function and its arguments; `cases(names)` runs some of them equation by equation. Sizes
are even where they may be split, and differ within a program, so that swapped dimensions are detected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from minialpa import register_sharding_rule
from minialpa.attention.operation import AttentionKind, attention_gradient_p, attention_p
from minialpa.grouped import grouped_product_p, grouped_sum_p
from minialpa.routed import routed_product_p, routed_sum_p
from minialpa.tracing.gradients import gradient_p, per_micro_batch_p
from minialpa.tracing.rotation import rotate
from tests.attention_calls import causal, fused
from tests.lapack_call import lu_by_lapack
from tests.pallas_kernels import flash_attention, row_norm
from tests.rules.rule_laws import Case, cases_of_all, equations_of, vjp


@dataclass(frozen=True)
class Program:
    """A function and its arguments: a shape for floats in (0.1, 0.9), a value, or a function that makes one."""

    fun: Callable[..., Any]
    arguments: tuple[Any, ...]


PROGRAMS: dict[str, Program] = {}


def _program(name: str, fun: Callable[..., Any], *arguments: Any) -> None:
    assert name not in PROGRAMS, name
    PROGRAMS[name] = Program(fun, arguments)


def floats(shape: Sequence[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 0.9, tuple(shape)).astype(np.float32)


def integers(shape: Sequence[int], high: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, tuple(shape)).astype(np.int32)


def cases(names: Sequence[str]) -> tuple[Case, ...]:
    """The cases of some programs."""
    return cases_of_all([(PROGRAMS[name].fun, _arguments(name)) for name in names])


def equations(name: str) -> list[JaxprEqn]:
    """The equations of a program."""
    return list(equations_of(jax.make_jaxpr(PROGRAMS[name].fun)(*_arguments(name)).jaxpr))


def _arguments(name: str) -> list[Any]:
    return [_argument(x, seed=i) for i, x in enumerate(PROGRAMS[name].arguments)]


def _argument(argument: Any, seed: int) -> Any:
    if callable(argument):
        return argument()
    return floats(argument, seed) if isinstance(argument, tuple) else argument


def _available(*names: str) -> list[Callable[..., Any]]:
    return [getattr(lax, name) for name in names if hasattr(lax, name)]


# Elementwise. The first names of a group are new in jax 0.11 or 0.12.
_UNARY = _available(
    *("log2", "one_minus_square"),
    *("abs", "acos", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "cos", "cosh"),
    *("digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "is_finite", "lgamma", "log", "log1p"),
    *("logistic", "neg", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "tan", "tanh"),
)
_BINARY = _available(
    *("add", "atan2", "div", "eq", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "le", "lt", "max", "min", "mul"),
    *("ne", "nextafter", "polygamma", "pow", "rem", "sub", "zeta"),
)
_BINARY += [lax.eq_to_p.bind, lax.le_to_p.bind, lax.lt_to_p.bind]
_BITS = _available("bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right_arithmetic")
_BITS += _available("shift_right_logical", "mulhi", "div", "rem", "add", "max")

_program("unary", lambda x: [f(x) for f in _UNARY] + [lax.acosh(x + 1), lax.integer_pow(x, 3)], (4,))
_program("unary of a matrix", lambda x: [lax.reduce_precision(x, 5, 10), jnp.copy(x)], (4, 6))
_program("binary", lambda x, y: [f(x, y) for f in _BINARY], (4,), (4,))
_program("binary of matrices", lambda x, y: [lax.mul(x, y), x / y, lax.betainc(x, y, x)], (4, 6), (4, 6))
_program("broadcast", lambda x, y, z: [x * 2.0, lax.mul(x, y), lax.add(z, x), lax.max(y, z)], (4, 6), (1, 6), (4, 1))
_program(
    "bits", lambda x, y: [f(x, y) for f in _BITS] + [~x, lax.clz(x), lax.population_count(x)], *[integers((4,), 9)] * 2
)
_program("clamp", lambda x, y: [lax.clamp(0.2, x, 0.5), lax.clamp(y, x, y + 0.1)], (4, 6), (4, 6))
_program("select", lambda x, y: [jnp.where(x > y, x, y), lax.select_n(x[0, 0] > y[0, 0], x, y)], (4, 6), (4, 6))
_program("select among three", lambda i, x: lax.select_n(i, x, x + 1, x * 2), integers((4,), 3), (4,))
_program("complex", lambda x, y: [f(lax.complex(x, y)) for f in (lax.real, lax.imag, lax.conj, lax.abs)], (4,), (4,))
_program(
    "conversions",
    lambda x, i: (
        [x.astype(d) for d in (jnp.bfloat16, jnp.int32, jnp.complex64, jnp.bool_)]
        + [i.astype(d) for d in (jnp.float32, jnp.int8, jnp.bool_)]
        + [(x > 0.5).astype(jnp.float32), lax.complex(x, x).astype(jnp.complex64)]
    ),
    (4, 6),
    integers((4,), 5),
)
_program(
    "bitcast",
    lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint8), jnp.float32).view(jnp.int32),
    (4, 6),
)
_program(
    "many to many",
    lambda x, y: (lax.optimization_barrier((x, y)), jax.device_put(x), gradient_p.bind(x, y, call=0)),
    (4,),
    (4, 6),
)
_program(
    "constraint",
    lambda x: lax.with_sharding_constraint(
        x, NamedSharding(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec())
    ),
    (4, 6),
)
_program("names", lambda x: checkpoint_name(x, "residual"), (4, 6))
_program("minialpa_per_micro_batch", lambda x: per_micro_batch_p.bind(x, number=0, cotangent_of=False), (4, 6))
if hasattr(lax, "polynomial"):
    _program("polynomial", lambda x: lax.polynomial(x, [1.0, 2.0, 3.0]), (4,))

# Contractions.
_program("matmul", lambda x, y: x @ y, (4, 6), (6, 8))
_program(
    "batched matmul and gradients", vjp(lambda x, y: jnp.einsum("bqhd,bkhd->bhqk", x, y)), (2, 4, 6, 8), (2, 8, 6, 8)
)
_program("inner and outer product", lambda x, y: (jnp.vdot(x, y), jnp.outer(x, y)), (4,), (4,))


def _conv(**options: Any) -> Callable[..., Any]:
    layout = ("NHWC", "HWIO", "NHWC")
    strides, padding = options.pop("strides", (1, 1)), options.pop("padding", "SAME")
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=layout, **options)


def _conv_program(name: str, x: tuple[int, ...], w: tuple[int, ...], **options: Any) -> None:
    """A convolution with its two gradients."""
    _program(name, vjp(_conv(**options)), x, w)


_conv_program("conv", (2, 6, 6, 4), (3, 3, 4, 8))
_conv_program("conv, dilated window", (2, 8, 6, 4), (3, 2, 4, 6), rhs_dilation=(2, 1), padding="VALID")
_conv_program("conv, pointwise", (2, 4, 6, 8), (1, 1, 8, 2))
_conv_program("conv, window as long as the input", (2, 4, 6, 4), (4, 6, 4, 8), padding="VALID")
_conv_program("conv, grouped", (2, 4, 4, 8), (3, 3, 4, 12), feature_group_count=2)
_conv_program("conv, batch groups", (4, 4, 4, 6), (3, 3, 6, 8), batch_group_count=2)
_program(
    "conv in one dimension, NCW",
    lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NCW", "OIW", "NCW")),
    (2, 4, 6),
    (8, 4, 3),
)

# Layout.
_program(
    "new dimensions",
    lambda x, y: [lax.broadcast_in_dim(x, (4, 6, 2), (0, 2)), jnp.broadcast_to(y, (4, 6)), lax.full((2, 4), 3.0)],
    (4, 2),
    (1, 6),
)
_program(
    "reshapes",
    lambda x: [
        x.reshape(s) for s in [(8, 6), (2, 24), (2, 4, 3, 2), (2, 1, 4, 6), (48,), (4, 12), (3, 16), (2, 3, 8), (6, 8)]
    ],
    (2, 4, 6),
)
_program(
    "reshape in another order",
    lambda x: [lax.reshape(x, (6, 8), (2, 0, 1)), lax.reshape(x, (8, 6), (1, 0, 2))],
    (2, 4, 6),
)
_program("squeeze and expand", lambda x: [x.squeeze((0, 2)), x[..., 0, :], jnp.expand_dims(x, 1)], (1, 4, 1, 6))
_program("rotate", lambda x: [rotate(x, 1, 1), rotate(x, -2, 0)], (4, 6, 2))
_program("reverse", lambda x: lax.rev(x, (1,)), (4, 6, 2))
_program("tile", lambda x: [jnp.tile(x, (1, 3)), jnp.tile(x, (2, 2)), jnp.tile(x, (2, 1))], (4, 6))
_program("concatenate", lambda x, y: lax.concatenate([x, y, x], 1), (4, 6, 2), (4, 2, 2))
_program("split", lambda x: [lax.split(x, (2, 4), 1), jnp.split(x, 2, axis=2)], (4, 6, 2))
_program(
    "stack and unstack",
    lambda x, y: [jnp.stack([x, y, x], axis=1), jnp.unstack(x), jnp.unstack(x, axis=1)],
    (4, 6),
    (4, 6),
)
_program(
    "arrays from nothing",
    lambda: [lax.iota(jnp.int32, 4), lax.broadcasted_iota(jnp.int32, (4, 6), 1), lax.empty((4, 6), jnp.float32)],
)
_program(
    "pad",
    lambda x: [lax.pad(x, 2.0, c) for c in [((0, 0, 0), (1, 2, 0)), ((0, 0, 1), (0, 0, 0)), ((0, 0, 0), (-1, 1, 0))]],
    (4, 6),
)
_program("slice", lambda x: [x[:, 1:5], x[::2], x[1:3, ::3], lax.slice(x, (0, 0), (4, 6))], (4, 6))
_program(
    "dynamic slice",
    lambda x, i: [lax.dynamic_slice(x, (0, i), (4, 2)), lax.dynamic_index_in_dim(x, i, 0)],
    (4, 6),
    np.int32(2),
)
_program(
    "dynamic update slice", vjp(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, np.int32(2), 1)), (4, 6), (4, 2)
)

# Reductions and whole axes.
_program("reduce", lambda x: [f(x, axis=(0, 2)) for f in (jnp.sum, jnp.max, jnp.min, jnp.prod)], (4, 6, 2))
_program(
    "reduce bits",
    lambda x: (
        [jnp.all(x > 3, axis=0), jnp.any(x > 3, axis=1)]
        + [
            lax.reduce(x, np.int32(i), f, (1,))
            for f, i in ((lax.bitwise_xor, 0), (lax.bitwise_and, -1), (lax.bitwise_or, 0))
        ]
    ),
    integers((4, 6), 9),
)
_program("reduce with a function", lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b + a + b, (1,)), (4, 6))
_program(
    "reduce two arrays",
    lambda x: lax.reduce((x, x), (np.float32(0),) * 2, lambda a, b: (a[0] + b[0], lax.max(a[1], b[1])), (1,)),
    (4, 6),
)
_program("argmax", lambda x: [lax.argmax(x, 1, jnp.int32), lax.argmin(x, 0, jnp.int32)], (4, 6))
_CUMULATIVE = [lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp]
_program("cumulative", lambda x: [f(x, axis=1) for f in _CUMULATIVE] + [lax.cumsum(x, axis=0, reverse=True)], (4, 6))
_program("sort", lambda x, y: [lax.sort(x), lax.sort((x, y), dimension=0, num_keys=1)], (4, 6), (4, 6))
_program(
    "top k", lambda x: [lax.top_k(x, 2), lax.approx_max_k(x, 2), lax.approx_min_k(x, 2, reduction_dimension=0)], (4, 6)
)
_program("fft", lambda x: [jnp.fft.fft(x), jnp.fft.rfft2(x), jnp.fft.irfft(jnp.fft.rfft(x))], (4, 2, 6))


def _positive(x: Any) -> Any:
    return jnp.einsum("bij,bkj->bik", x, x) + jnp.eye(4)[None]


_program(
    "decompositions",
    lambda x: [
        f(_positive(x)) for f in (lax.linalg.cholesky, lax.linalg.qr, lax.linalg.svd, lax.linalg.eigh, lax.linalg.lu)
    ],
    (2, 4, 4),
)
_program(
    "factors of one side",
    lambda x, t: [
        lax.linalg.eig(x), lax.linalg.hessenberg(x), lax.linalg.schur(x), lax.linalg.tridiagonal(_positive(x)),
        jax.vmap(jax.scipy.linalg.qr_multiply)(x, x), lax.linalg.ormqr(x, t, x[:, :, :2]),
    ],
    (2, 4, 4),
    (2, 4),
)  # fmt: skip
_program(
    "householder and pivots",
    lambda x, t, p: (lax.linalg.householder_product(x, t), lax.linalg.lu_pivots_to_permutation(p, 6)),
    (2, 4, 4),
    (2, 4),
    integers((2, 4), 6),
)
_program(
    "triangular solve",
    lambda a, b: [
        lax.linalg.triangular_solve(_positive(a), b, left_side=True),
        lax.linalg.triangular_solve(_positive(a), b.mT),
    ],
    (2, 4, 4),
    (2, 4, 6),
)

# Windows.
_POOL = ((1, 2, 2, 1), (1, 2, 2, 1))


def _pool(x: Any, start: float, combine: Callable[..., Any], padding: str = "VALID") -> Any:
    return lax.reduce_window(x, np.float32(start), combine, *_POOL, padding)


_program("max pooling", vjp(lambda x: _pool(x, -np.inf, lax.max)), (2, 4, 6, 4))
_program(
    "max pooling, tangents",
    lambda x, t: jax.jvp(lambda x: _pool(x, -np.inf, lax.max), (x,), (t,)),
    (2, 4, 6, 4),
    (2, 4, 6, 4),
)
_program("average pooling", vjp(lambda x: _pool(x, 0, lax.add, "SAME")), (2, 3, 6, 4))
_program("other pooling", lambda x: [_pool(x, np.inf, lax.min), _pool(x, 1, lax.mul)], (2, 4, 6, 4))

# Gather and scatter.
_IDS = integers((2, 6), 10)
_program("embedding", vjp(lambda t: t[_IDS]), (10, 4))
_program("take along last axis", vjp(lambda x: jnp.take_along_axis(x, integers((4, 6, 1), 8), axis=-1)), (4, 6, 8))
_program("advanced indices apart", vjp(lambda x: x[integers((4,), 6), :, integers((4,), 2)]), (6, 8, 2))
_program("one index", vjp(lambda x: [x[2], x[:, -1]]), (4, 6))
_program(
    "updates of batches",
    jax.vmap(lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 0)),
    (4, 8, 6),
    (4, 2, 6),
    integers((4,), 6),
)
_program(
    "scatters",
    lambda x, u: [getattr(x.at[integers((4,), 6)], f)(u) for f in ("add", "subtract", "max", "min", "multiply", "set")],
    (6, 2),
    (4, 2),
)


# Random numbers.
def _keys(impl: str = "threefry2x32") -> Any:
    return jax.random.split(jax.random.key(0, impl=impl), 4)


def _draw_all(key: Any) -> list[Any]:
    return [jax.random.bits(key, (4, 6)), jax.random.split(key, 2), jax.random.gamma(key, jnp.ones((4,)) * 2)]


_program("draw", lambda k: _draw_all(k[0]), _keys)
_program("draw by keys", jax.vmap(_draw_all), _keys)
_program("draw by rbg keys", jax.vmap(jax.random.bits), lambda: _keys("rbg"))
_program(
    "fold in",
    lambda k, i: [jax.vmap(jax.random.fold_in)(k, i), jax.vmap(lambda i: jax.random.fold_in(k[0], i))(i)],
    _keys,
    np.arange(4),
)
_program("keys", lambda k: [jax.random.clone(k), jax.random.wrap_key_data(jax.random.key_data(k))], _keys)
_program("seeds", lambda i: jax.vmap(jax.random.key)(i), integers((4,), 9))
_program("threefry", lambda x: threefry2x32_p.bind(x, x, x, x + 1), np.arange(4, dtype=np.uint32))
_program(
    "hardware generator",
    lambda k: [lax.rng_bit_generator(k, (4, 6)), lax.rng_uniform(0.0, 1.0, (4, 6))],
    np.arange(4, dtype=np.uint32),
)

# Attention: query [b t g r d], key [b s g d], value [b s g e], with b = 2, t = 4, g = 2, r = 6, s = 8, d = 3, e = 5.
_QUERY, _KEY, _VALUE = (2, 4, 2, 6, 3), (2, 8, 2, 3), (2, 8, 2, 5)
_program("windows of attention", vjp(lambda q, k, v: fused(causal(3, left=2, right=1), q, k, v)), _QUERY, _KEY, _VALUE)


def _biased(query: Any, key: Any, value: Any, out_bar: Any, *biases: Any) -> list[Any]:
    """Attention with biases and masks of all shapes, and its gradients. Position 0 is seen by all."""
    t, s = query.shape[1], key.shape[1]
    seen = integers((2, 1, 1, 1, s), 2) > 0
    masks = [seen | (np.arange(s) == 0), np.ones((1, 2, 6, t, s), bool)]
    kind = AttentionKind(scale=0.5, n_biases=len(biases), n_masks=len(masks))
    out, logsumexp = attention_p.bind(query, key, value, *biases, *masks, kind=kind)
    gradients = attention_gradient_p.bind(
        query,
        key,
        value,
        out,
        logsumexp,
        out_bar,
        *biases,
        *masks,
        kind=kind,
        dtypes=("float32",) * (3 + len(biases)),
        with_bias_gradient=(True,) * len(biases),
    )
    return [out, logsumexp, *gradients]


_program(
    "attention with biases",
    _biased,
    _QUERY,
    _KEY,
    _VALUE,
    (2, 4, 2, 6, 5),
    (1, 2, 6, 4, 8),
    (2, 1, 6, 1, 8),
    (1, 2, 1, 4, 1),
)

# Grouped products: rows [b x m k], matrices [b g k n]; b = x = g = 2, m = n = 6, k = 4. The last row has no group.
_BOUNDS = [np.broadcast_to(np.array(bounds, np.int32), (2, 2, 2)) for bounds in ([0, 3], [3, 5])]
_WHOLE = {"n_rows": 6, "n_groups": 2, "precision": None, "dtype": "float32"}
_program(
    "grouped products",
    lambda rows, matrices, others: [
        grouped_product_p.bind(rows, matrices, *_BOUNDS, np.arange(6, dtype=np.int32), summed=2, **_WHOLE),
        grouped_product_p.bind(others, matrices, *_BOUNDS, np.arange(6, dtype=np.int32), summed=3, **_WHOLE),
        grouped_sum_p.bind(rows, others, *_BOUNDS, np.arange(6, dtype=np.int32), **_WHOLE),
    ],
    (2, 2, 6, 4),
    (2, 2, 4, 6),
    (2, 2, 6, 6),
)

# In slots, without foreign rows.
_FOREIGN = np.zeros((2, 2, 4), np.int32)
_SLOTS = (*_BOUNDS, np.arange(6, dtype=np.int32), _FOREIGN, _FOREIGN)
_program(
    "grouped products in slots",
    lambda rows, matrices, others: [
        routed_product_p.bind(rows, matrices, *_SLOTS, summed=2, **_WHOLE),
        routed_product_p.bind(others, matrices, *_SLOTS, summed=3, **_WHOLE),
        routed_sum_p.bind(rows, others, *_SLOTS, **_WHOLE),
    ],
    (2, 2, 6, 4),
    (2, 2, 4, 6),
    (2, 2, 6, 6),
)

# Control flow; its own tests are in test_rules_control.py.
_program("scan", vjp(lambda w, x: lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0]), (2, 6, 6), (4, 6))
_program("while", lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x)), (4, 6))
_program("cond", lambda i, x: lax.cond(i > 2, jnp.sin, jnp.cos, x), np.int32(3), (4, 6))

# Kernels. Separate tests have the kernels that need a certain device, such as the attention of cuDNN.


def _partitioned(x: Any, y: Any) -> Any:
    call = custom_partitioning(lambda x, y: x @ y)
    call.def_partition(
        lambda mesh, args, result: (mesh, lambda x, y: x @ y, result.sharding, tuple(arg.sharding for arg in args)),
        sharding_rule="i k, k j -> i j",
        reduction_factors=("k",),
    )
    return call(x, y)


_program("pallas_call", row_norm, (4, 6))
_program("pallas attention", flash_attention, (2, 8, 4, 2), (2, 8, 4, 2), (2, 8, 4, 2))
_program("custom_partitioning", _partitioned, (4, 6), (6, 8))
_program("function", register_sharding_rule(lambda x, y: x @ y, "i k, k j -> i j", reductions="k"), (4, 6), (6, 8))
_program("ffi_call", lu_by_lapack, (4, 2, 2))
