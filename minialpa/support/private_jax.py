"""Everything of jax that minialpa uses and jax does not publish. All other modules use `jax` and `jax.extend` only.

All of it works with jax 0.10.2, the oldest version that minialpa takes. A test keeps these names out of other modules.

| private | minialpa needs it for | would be replaced by |
|---|---|---|
| `JaxprEqn.source_info`, `user_frames` | source lines and name scopes of equations | accessors in `jax.extend.core` |
| `JaxprEqn.ctx` | the settings that an equation was traced under | an accessor in `jax.extend.core` |
| `Primitive.get_bind_params`, `abstract_eval` | running an equation again; its result types | a function for both |
| `ShapedArray.update` | the aval of a part of an array | avals made by `jax.extend.core` |
| `ShapedArray.manual_axis_type` | the axes of a `shard_map` that a new primitive's results vary over | the same |
| `jax.interpreters` | the rules of primitives that mark a trace | the same rules in `jax.extend` |
| `unsafe_buffer_pointer`, `on_device_size_in_bytes` | NCCL on arrays; do arrays share memory | a cheap `__dlpack__` |
| `make_cpu_client`, `make_gloo_tcp_collectives` | the address that gloo binds | a setting of `jax.config` |
| `fused_attention_stablehlo`, `cuda_versions` | the gradient of cuDNN's attention, of kept results | it in `jax.nn` |

`jax.core.ShapedArray` and `jax.core.Tracer` have no private part in their names, and are used where they are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax._src.source_info_util import user_frames
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

Rule = Callable[..., Any]


# ---- source lines and name scopes of equations -----------------------------------------------------------------------


def name_stack(eqn: JaxprEqn) -> str:
    """The name scopes that the equation was traced in, outermost first, with the transformations between them."""
    return str(eqn.source_info.name_stack)


def frames_of(eqn: JaxprEqn) -> Iterator[Any]:
    """Frames outside of jax that made the equation, innermost first; each has file_name, start_line, function_name."""
    return user_frames(eqn.source_info.traceback)


def innermost_line(eqn: JaxprEqn) -> str:
    """`file:line` of the innermost frame outside of jax; a derivative has the line of what was differentiated."""
    return str(source_info_util.summarize(eqn.source_info))


def with_source_of(eqn: JaxprEqn, other: JaxprEqn) -> JaxprEqn:
    """The equation with the source line and the name scopes of another one."""
    new: JaxprEqn = eqn.replace(source_info=other.source_info)
    return new


def with_some_line(eqn: JaxprEqn, caller: JaxprEqn) -> JaxprEqn:
    """The equation, with the source line of `caller` if no line of the user's code made it.

    Functions that jax traces once and caches, such as those of `jax.numpy`, have no such line.
    """
    if _has_user_line(eqn.source_info.traceback):
        return eqn
    source = eqn.source_info.replace(traceback=caller.source_info.traceback)
    new: JaxprEqn = eqn.replace(source_info=source)
    return new


@functools.lru_cache(maxsize=4096)
def _has_user_line(traceback: Any) -> bool:
    return next(user_frames(traceback), None) is not None


# ---- equations that run again ----------------------------------------------------------------------------------------


def settings_of(eqn: JaxprEqn) -> Hashable:
    """The jax settings that the equation was traced under, such as `jax_threefry_partitionable`, to compare."""
    context: Hashable = eqn.ctx
    return context


def under_settings_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """A context in which jax has the settings that the equation was traced under."""
    manager: AbstractContextManager[Any] = eqn.ctx.manager
    return manager


def bind_again(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Apply the equation's primitive to other arguments; new equations keep the source line of the old one."""
    bind_params = eqn.primitive.get_bind_params(dict(params))
    with source_info_util.user_context(eqn.source_info.traceback), eqn.ctx.manager:
        return eqn.primitive.bind(*args, **bind_params)


def result_avals(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    """The avals that the equation's primitive makes of operands with these avals."""
    out: Any
    with eqn.ctx.manager:
        out, _ = eqn.primitive.abstract_eval(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def changed_aval(aval: Any, **changes: Any) -> Any:
    """An aval with another shape, dtype or weak_type, and the rest as it was."""
    return aval.update(**changes)


# ---- new primitives --------------------------------------------------------------------------------------------------


def define_jvp(primitive: Primitive, rule: Rule) -> None:
    """rule(primals, tangents, **params) -> (results, their tangents)."""
    ad.primitive_jvps[primitive] = rule


def define_linear(primitive: Primitive, transpose: Rule) -> None:
    """Define the derivatives of a linear primitive. transpose(cotangent, *operands, **params) -> cotangents."""
    ad.deflinear2(primitive, transpose)


def define_batching(primitive: Primitive, rule: Rule) -> None:
    """rule(operands, their batch dimensions, **params) -> (results, their batch dimensions)."""
    batching.primitive_batchers[primitive] = rule


def define_lowering(primitive: Primitive, rule: Rule) -> None:
    """rule(context, *operands, **params) -> results, all of them values of MLIR."""
    mlir.register_lowering(primitive, rule)


def define_function(primitive: Primitive, fun: Callable[..., Any], platform: str | None = None) -> None:
    """Lower a primitive with several results as jax lowers `fun(*operands, **params)`; on one platform, or on all."""
    lower = mlir.lower_fun(fun, multiple_results=True)

    def rule(context: Any, *operands: Any, **params: Any) -> Any:
        # Which mesh axes values vary over is checked before. The constants and loops of `fun` would not match here.
        avals = [[new_aval(x.shape, x.dtype) for x in some] for some in (context.avals_in, context.avals_out)]
        return lower(context.replace(avals_in=avals[0], avals_out=avals[1]), *operands, **params)

    mlir.register_lowering(primitive, rule, platform=platform)


def new_aval(shape: Sequence[int], dtype: Any, operands: Sequence[Any] = ()) -> Any:
    """The aval of an array, which in a `shard_map` varies over all mesh axes that one of the operands varies over."""
    varying = frozenset[str]().union(*(x.manual_axis_type.varying for x in operands))
    if not varying:
        return jax.core.ShapedArray(tuple(shape), dtype)
    like = next(x for x in operands if x.manual_axis_type.varying)
    manual = type(like.manual_axis_type)(varying=varying)
    sharding = like.sharding.update(spec=jax.P(*(None for _ in shape)))
    return jax.core.ShapedArray(tuple(shape), dtype, sharding=sharding, manual_axis_type=manual)


# ---- attention of cuDNN ----------------------------------------------------------------------------------------------


def cudnn_version() -> int | None:
    """The version of cuDNN that jax loaded, such as 90701 for 9.7.1; None without one, or if jax calls it otherwise."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn
        from jax._src.lib import cuda_versions

        is_known = all(hasattr(cudnn, f"_dot_product_attention_{name}_impl") for name in ("fwd", "bwd"))
        return None if cuda_versions is None or not is_known else int(cuda_versions.cudnn_get_version())
    except (ImportError, AttributeError, RuntimeError):
        return None


def cudnn_attention(
    query: Any, key: Any, value: Any, *, scale: float, is_causal: bool, window: int | None
) -> tuple[Any, Any]:
    """out [b t n d] and logsumexp [b n t] of query [b t n d] and key and value [b s m d], n a multiple of m.

    Query i sees keys j <= i if `is_causal`, and of these only j > i - window.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    compute: Any = cudnn._dot_product_attention_fwd_impl
    absent = [jax.numpy.zeros(0, query.dtype)] * 7
    params = _cudnn_params(scale, is_causal, window)
    out, logsumexp = compute(query, key, value, *absent, is_training=True, **params)
    return out, logsumexp


def cudnn_attention_gradient(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    out_bar: Any,
    *,
    scale: float,
    is_causal: bool,
    window: int | None,
) -> Sequence[Any]:
    """The cotangents of query, key and value."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    compute: Any = cudnn._dot_product_attention_bwd_impl
    absent = [jax.numpy.zeros(0, query.dtype)] * 7
    params = _cudnn_params(scale, is_causal, window)
    cotangents: Sequence[Any] = compute(query, key, value, *absent, logsumexp, out, out_bar, **params)
    return cotangents


def _cudnn_params(scale: float, is_causal: bool, window: int | None) -> dict[str, Any]:
    from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType

    return {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": MaskType.CAUSAL if is_causal else MaskType.NO_MASK,
        "layout": AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }


# ---- memory of arrays ------------------------------------------------------------------------------------------------


def memory_of(array: jax.Array) -> tuple[int, int]:
    """Address and bytes of an array on one device."""
    return array.unsafe_buffer_pointer(), array.on_device_size_in_bytes()


def addresses_of(array: jax.Array) -> set[int]:
    """Addresses of the shards of an array in this process."""
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


# ---- collectives of CPUs ---------------------------------------------------------------------------------------------


def bind_gloo(ip: str) -> None:
    """Make the CPU backend, which must not have started yet, use gloo on `ip`. After `jax.distributed.initialize`.

    Left alone, gloo binds the address that the name of this host stands for, which is the loopback on many machines,
    and that of another network on others.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax  # type: ignore[attr-defined]
        from jax.extend.backend import register_backend_factory

        collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, hostname=ip)
        make_client = functools.partial(xla_bridge.make_cpu_client, collectives=collectives)
        register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)
    except (ImportError, AttributeError, TypeError):  # in another version of jax, gloo binds the host's name
        return
