"""Shardings that an expert writes by hand with `jax.jit`: a model in, the known recipes that apply to it out.

    dp       examples split, parameters whole
    fsdp     examples split; parameters and optimizer state split on their largest dimension that divides
    tp       Megatron (arXiv:1909.08053): first kernel of a pair split by columns, second by rows, heads and vocabulary
             split, examples whole
    tp+sp    the same with the residual stream split along the sequence (arXiv:2205.05198)
    2d, 2d+sp   dp over the outer axis of the mesh and tp or tp+sp over the inner one
    ep       dp with the experts of MoE layers split over the same devices (GShard, arXiv:2006.16668)

XLA's partitioner does the rest. Optimizer state has the sharding of its parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import compiled_figures
from benchmarks.corpus import Case, arguments
from minialpa import LogicalMesh, hlo
from minialpa.hlo import HloCollective

#: Split dimension of parameters under tensor parallelism, counted from the last, by the end of their path.
_FEED_FORWARD = ((r"up/(kernel|bias)$", -1), (r"down/kernel$", -2))
_FUSED = ((r"qkv/kernel$", -1), (r"out/kernel$", -2))
_BY_HEADS = ((r"attention/(query|key|value)/kernel$", -2), (r"attention/out/kernel$", -3))  # [m h d] and [h d m]
_VOCABULARY = ((r"tokens/embedding$", -2), (r"(^|/)head/(kernel|bias)$", -1), (r"head_bias$", -1))
_SPLIT: dict[str, tuple[tuple[str, int], ...]] = {
    "bert": (*_BY_HEADS, *_FEED_FORWARD, *_VOCABULARY),
    "gpt": (*_FUSED, *_FEED_FORWARD, *_VOCABULARY),
    "llama": ((r"(query|key|value|gate)/kernel$", -1), (r"out/kernel$", -2), *_FEED_FORWARD, *_VOCABULARY),
    "mlp": ((r"Dense_\d*[02468]/(kernel|bias)$", -1), (r"Dense_\d*[13579]/kernel$", -2)),
    "moe": (*_FUSED, *_FEED_FORWARD, (r"experts_\d+/up$", -1), (r"experts_\d+/down$", -2), *_VOCABULARY),
    "vit": (*_BY_HEADS, *_FEED_FORWARD, *_VOCABULARY),
}
_EXPERTS = r"experts_\d+/(up|down)$"
_ROW_PARALLEL = ("out", "down")
_NORMS = (nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A mesh of `data` x `model` devices: examples are split over the first axis, layers over the second one.

    fsdp: parameters are also split over the first axis.
    sequence: the residual stream is split over the second axis.
    experts: experts are split over the first axis.
    """

    name: str
    data: int
    model: int
    fsdp: bool = False
    sequence: bool = False
    experts: bool = False

    def mesh(self) -> Mesh:
        grid = np.array(jax.devices()[: self.data * self.model]).reshape(self.data, self.model)
        return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@dataclass(frozen=True, slots=True)
class Measured:
    """A compiled step: its collectives; of each device bytes (arguments, results, temporaries) and flops."""

    name: str
    collectives: tuple[HloCollective, ...]
    memory_bytes: int
    flops: float

    def communication_s(self, mesh: LogicalMesh) -> float:
        return hlo.seconds(self.collectives, mesh)


def recipes_for(case: Case, n_devices: int) -> Iterator[Recipe]:
    """The recipes that apply: heads and examples divide evenly, and the model has the parts that the recipe splits."""
    batch_size = case.build().batch_size

    def splits(model: int) -> bool:
        return case.model in _SPLIT and case.size("n_heads", model) % model == 0

    if batch_size % n_devices == 0:
        yield Recipe("dp", n_devices, 1)
        yield Recipe("fsdp", n_devices, 1, fsdp=True)
        if case.model == "moe" and case.size("n_experts", 8) % n_devices == 0:
            yield Recipe("ep", n_devices, 1, experts=True)
    has_sequence = case.model in _SPLIT and case.model != "mlp"
    if splits(n_devices):
        yield Recipe("tp", 1, n_devices)
        if has_sequence:
            yield Recipe("tp+sp", 1, n_devices, sequence=True)
    for data in (d for d in range(2, n_devices) if n_devices % d == 0 and batch_size % d == 0):
        model = n_devices // data
        if splits(model):
            yield Recipe(f"2d {data}x{model}", data, model)
            if has_sequence:
                yield Recipe(f"2d+sp {data}x{model}", data, model, sequence=True)


def measure(case: Case, recipe: Recipe) -> Measured:
    """The compiled step of a recipe."""
    compiled = compile_step(case, recipe)
    text = compiled.as_text()
    return Measured(
        recipe.name, compiled_figures.collectives(text), memory_bytes(compiled), compiled_figures.flops(text)
    )


def compile_step(case: Case, recipe: Recipe) -> Any:
    """The training step with the recipe's shardings, compiled by `jax.jit`. It donates its state."""
    built, mesh = case.build(), recipe.mesh()
    state, batch = arguments(built)
    examples = NamedSharding(mesh, P("data"))
    layout = state_layout(case, recipe, state, mesh)
    step = built.train_step(jax.value_and_grad)

    def pinned(state: Any, batch: Any) -> Any:
        with ExitStack() as stack:
            if recipe.model > 1:
                stack.enter_context(nn.intercept_methods(partial(_pin_layers, case, recipe, mesh)))
            if recipe.experts:
                stack.enter_context(nn.intercept_methods(partial(_pin_experts, mesh)))
            return step(state, batch)

    results = (layout, NamedSharding(mesh, P()))
    jitted = jax.jit(pinned, in_shardings=(layout, examples), out_shardings=results, donate_argnums=0)
    return jitted.lower(state, batch).compile()


def memory_bytes(compiled: Any) -> int:
    """Bytes per device: arguments, results and temporaries, less the donated memory that results reuse."""
    stats = compiled.memory_analysis()
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return int(total - stats.alias_size_in_bytes)


# ---- shardings of parameters -----------------------------------------------------------------------------------------


def _path(keys: Any) -> str:
    """`params/block_0/out/kernel` for the keys of a leaf, of any kind of container."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys)


def state_layout(case: Case, recipe: Recipe, state: Any, mesh: Mesh) -> Any:
    """A sharding for each leaf of the state: a parameter's, if path ending and shape are equal to the parameter's."""
    parameters = {
        _path(keys): (leaf.shape, parameter_spec(case, recipe, _path(keys), leaf.shape))
        for keys, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    }

    def lie(keys: Any, leaf: Any) -> NamedSharding:
        names = _path(keys).split("/")
        for i in range(len(names)):
            shape, spec = parameters.get("/".join(names[i:]), (None, P()))
            if shape == leaf.shape:
                return NamedSharding(mesh, spec)
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(lie, state)


def parameter_spec(case: Case, recipe: Recipe, path: str, shape: tuple[int, ...]) -> P:
    """The recipe's spec of the parameter at `path`, such as `block_0/feed_forward/up/kernel`."""
    axes: list[str | None] = [None] * len(shape)
    dim = _tensor_dim(case, recipe.model, path) if recipe.model > 1 else None
    if dim is not None and shape[dim] % recipe.model == 0:
        axes[dim] = "model"
    if recipe.experts and re.search(_EXPERTS, path):
        axes[0] = "data"
    if recipe.fsdp:
        free = [d for d, axis in enumerate(axes) if axis is None and shape[d] % recipe.data == 0 and shape[d] > 1]
        if free:
            axes[max(free, key=lambda d: shape[d])] = "data"
    return P(*axes)


def _tensor_dim(case: Case, n_devices: int, path: str) -> int | None:
    """The dimension that tensor parallelism splits. Keys and values stay whole if their heads do not divide."""
    if re.search(r"(key|value)/kernel$", path) and case.size("n_kv_heads", n_devices) % n_devices:
        return None
    return next((dim for pattern, dim in _SPLIT[case.model] if re.search(pattern, path)), None)


# ---- shardings of activations ----------------------------------------------------------------------------------------


def _pin_layers(
    case: Case, recipe: Recipe, mesh: Mesh, call: Callable[..., Any], args: Any, kwargs: Any, context: Any
) -> Any:
    """Pin the results of layers: features or heads split after a column-parallel one, [b s m] or [b s h d].

    The results of row-parallel layers, norms and blocks are the residual stream: whole, or split along s.
    """
    out = call(*args, **kwargs)
    module = context.module
    if context.method_name != "__call__" or not isinstance(out, jax.Array) or out.ndim < 3:
        return out
    if module.name in _ROW_PARALLEL or isinstance(module, _NORMS) or type(module).__name__.endswith("Block"):
        sequence = "model" if recipe.sequence and out.shape[1] % recipe.model == 0 else None
        return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P("data", sequence)))
    kernel = "/".join((*module.path, "kernel"))
    if _tensor_dim(case, recipe.model, kernel) is not None and out.shape[2] % recipe.model == 0:
        return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P("data", None, "model")))
    return out


def _pin_experts(mesh: Mesh, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Pin values [e g c ...] to devices by experts, and by groups before and after the expert layer.

    The two pins at either end make an all-to-all. Only the einsums of the layer make such values, so they are wrapped.
    """
    if type(context.module).__name__ != "Experts":
        return call(*args, **kwargs)
    einsum, by_expert, by_group = jnp.einsum, NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))
    pin = jax.lax.with_sharding_constraint

    def pinned(formula: str, *operands: jax.Array) -> Any:
        if formula.endswith("->gsm"):
            combine, y = operands
            return einsum(formula, combine, pin(pin(y, by_expert), by_group))
        out = einsum(formula, *operands)
        return pin(pin(out, by_group) if formula.startswith("gsec") else out, by_expert)

    with mock.patch.object(jnp, "einsum", pinned):
        return call(*args, **kwargs)
