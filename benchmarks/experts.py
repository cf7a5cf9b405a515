"""Mixtures of experts without a token limit: plans beside programs that XLA compiles for H100s, and hand recipes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from minialpa import AutoShardingOption, ClusterSpec, ShardParallel
from minialpa.cluster import LogicalMesh
from minialpa.cost import Collective, CollectiveKind
from minialpa.grouped import grouped_product_p
from minialpa.routing.slots import SlotShape, from_slots, slots_of, to_slots

#: (experts, experts of a token, width, width inside an expert, tokens, devices)
CASES = [
    (8, 2, 1024, 4096, 65536, 1),
    (8, 2, 1024, 4096, 65536, 8),
    (8, 2, 4096, 14336, 16384, 8),
    (8, 1, 2048, 8192, 32768, 4),
    (16, 4, 2048, 4096, 32768, 8),
    (32, 4, 2048, 1024, 65536, 8),
    (64, 8, 2048, 1024, 32768, 1),
    (64, 8, 2048, 1024, 32768, 8),
    (64, 6, 2048, 1408, 65536, 8),
    (128, 8, 2048, 768, 65536, 8),
    (128, 8, 4096, 1536, 32768, 8),
    (256, 8, 1024, 512, 65536, 8),
]


def experts_step(n_experts: int, top_k: int) -> Any:
    """A layer of experts with a gate, and its update."""

    def layer(p: Any, tokens: Any) -> Any:
        weights, chosen = jax.lax.top_k(jax.nn.softmax((tokens @ p["router"]).astype(jnp.float32)), top_k)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=n_experts)
        rows = tokens[order // top_k]
        hidden = jax.nn.silu(jax.lax.ragged_dot(rows, p["gate"], sizes)) * jax.lax.ragged_dot(rows, p["up"], sizes)
        out = jax.lax.ragged_dot(hidden, p["down"], sizes)[jnp.argsort(order)].reshape(-1, top_k, tokens.shape[-1])
        return jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)

    def loss(p: Any, tokens: Any) -> Any:
        return jnp.mean(jnp.square((tokens + layer(p, tokens)).astype(jnp.float32)))

    def step(p: Any, tokens: Any) -> Any:
        value, gradients = minialpa.value_and_grad(loss)(p, tokens)
        return jax.tree.map(lambda w, g: (w - 1e-3 * g).astype(w.dtype), p, gradients), value

    return step


def arguments(n_experts: int, width: int, inner: int, tokens: int) -> Any:
    shapes = {
        "router": (width, n_experts),
        "gate": (n_experts, width, inner),
        "up": (n_experts, width, inner),
        "down": (n_experts, inner, width),
    }
    return (
        {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()},
        jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16),
    )


@benchmark("experts")
def experts(size: Size) -> Rows:
    """Layers of experts: planned seconds and bytes over those of compiled programs, arithmetic over routed rows."""
    rows: Rows = []
    for n_experts, top_k, width, inner, tokens, devices in CASES if size == "full" else [(4, 2, 64, 128, 1024, 2)]:
        step, given = experts_step(n_experts, top_k), arguments(n_experts, width, inner, tokens)
        cluster = ClusterSpec.preset("h100", devices_per_host=devices)
        plan = minialpa.plan(step, given, cluster=cluster, method=ShardParallel(), batch_argnums=1)
        (stage,) = plan.check(step, given).stages
        # Three products forward, and four in the derivative: the tokens need no gradient.
        routed = 7 * 2.0 * tokens * top_k * width * inner
        rows.append(
            {
                "experts": n_experts,
                "top_k": top_k,
                "width": width,
                "inner": inner,
                "tokens": tokens,
                "devices": devices,
                "planned_ms": 1e3 * stage.planned_s,
                "compiled_ms": 1e3 * stage.compiled_s,
                "seconds_ratio": stage.planned_s / stage.compiled_s,
                "bytes_ratio": stage.planned_bytes / stage.compiled_bytes,
                "flops_over_routed": plan.model_flops / routed,
            }
        )
    return rows


# ---- recipes ---------------------------------------------------------------------------------------------------------

#: (experts, experts of a token, width, width inside an expert, tokens of a device)
CELLS = [(8, 2, 1024, 4096, 8192), (32, 4, 2048, 1024, 8192), (64, 6, 2048, 1408, 8192), (128, 8, 4096, 1536, 4096)]
SKEWS = (1.0, 1.25, 2.0)
#: Lengths of the axes: hosts, devices of a host.
MESHES = [(1, 8), (2, 8)]
#: Seconds per byte of all links, over the preset's.
LINKS = (1.0, 4.0)
#: All-gathered, all-reduced and all-to-all arrays, by primitive.
_KINDS: dict[str, CollectiveKind] = {
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "reduce_scatter": "reduce-scatter",
}


def routed_step(n_experts: int, top_k: int, layer: Callable[..., Any] | None = None) -> Any:
    """The layer between a product and a loss, so that its tokens have gradients."""

    def loss(p: Any, tokens: Any) -> Any:
        tokens = tokens @ p["in"]
        weights, chosen = jax.lax.top_k(jax.nn.softmax((tokens @ p["router"]).astype(jnp.float32)), top_k)
        out = (layer or _sorted_by_expert)(p, tokens, chosen, n_experts)
        out = jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)
        return jnp.sum(jnp.square((tokens + out).astype(jnp.float32)))

    def step(p: Any, tokens: Any) -> Any:
        value, gradients = minialpa.value_and_grad(loss)(p, tokens)
        return jax.tree.map(lambda w, g: (w - 1e-3 * g).astype(w.dtype), p, gradients), value

    return step if layer is None else loss


def _sorted_by_expert(p: Any, tokens: Any, chosen: Any, n_experts: int) -> Any:
    """[t k d]"""
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=n_experts)
    rows = tokens[order // chosen.shape[1]]
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, p["gate"], sizes)) * jax.lax.ragged_dot(rows, p["up"], sizes)
    out = jax.lax.ragged_dot(hidden, p["down"], sizes)
    return out[jnp.argsort(order)].reshape(*chosen.shape, tokens.shape[-1])


def _gathered(p: Any, tokens: Any, chosen: Any, n_experts: int, axes: tuple[str, ...], skew: float) -> Any:
    """Weights are gathered, rows stay."""
    del skew
    whole = {name: jax.lax.all_gather(p[name], axes, tiled=True) for name in ("gate", "up", "down")}
    return _sorted_by_expert(whole, tokens, chosen, n_experts)


def _features(p: Any, tokens: Any, chosen: Any, n_experts: int, axes: tuple[str, ...], skew: float) -> Any:
    """Devices share the inner width of each expert, and compute with all tokens."""
    del skew
    tokens, chosen = (jax.lax.all_gather(x, axes, tiled=True) for x in (tokens, chosen))
    return jax.lax.psum_scatter(_sorted_by_expert(p, tokens, chosen, n_experts), axes, tiled=True)


def _by_owner(p: Any, tokens: Any, chosen: Any, n_experts: int, axes: tuple[str, ...], skew: float) -> Any:
    """Rows go to the device of their expert, and back. Rows beyond the capacity are lost."""
    n, k = jax.lax.axis_size(axes), chosen.shape[1]
    n_rows = chosen.size
    shape = SlotShape(1, n_rows, n_experts, n, min(n_rows, math.ceil(skew * n_rows / n)))
    slots = slots_of(chosen.reshape(1, -1), shape)
    sent = to_slots(tokens[None], slots.row_of_slot // k)[:, 0]
    rows, starts, ends = (
        jax.lax.all_to_all(x, axes, 0, 0, tiled=True) for x in (sent, slots.starts[:, 0], slots.ends[:, 0])
    )

    def product(lhs: Any, rhs: Any) -> Any:
        params = {"n_rows": shape.capacity, "n_groups": len(rhs), "precision": None, "dtype": "bfloat16", "summed": 2}
        at = jnp.arange(shape.capacity, dtype=jnp.int32)
        return grouped_product_p.bind(lhs[None], rhs[None], starts[None], ends[None], at, **params)[0][0]

    out = product(jax.nn.silu(product(rows, p["gate"])) * product(rows, p["up"]), p["down"])
    back = jax.lax.all_to_all(out, axes, 0, 0, tiled=True)
    return from_slots(back[:, None], slots.slot_of_row)[0].reshape(*chosen.shape, -1)


def recipe_collectives(recipe: str, lengths: tuple[int, ...], cell: tuple[int, ...], skew: float) -> list[Collective]:
    """Of a device in one step; empty if the lengths do not divide.

    recipe: "axes: function", for the axes of which the function has the experts.
    """
    n_experts, top_k, width, inner, tokens = cell
    axes, function = recipe.split(": ")
    layer, names = {"gathered": _gathered, "features": _features, "experts": _by_owner}[function], tuple(axes)
    n = math.prod(lengths["hd".index(name)] for name in names)
    if n_experts % n:
        return []
    params, batch = arguments(n_experts, width, inner, tokens * math.prod(lengths))
    params |= {"in": jax.ShapeDtypeStruct((width, width), jnp.bfloat16)}
    features = {"gate": P(None, None, names), "up": P(None, None, names), "down": P(None, names)}
    experts = dict.fromkeys(("gate", "up", "down"), P(names))
    specs = {"router": P(), "in": P(), **(features if layer is _features else experts)}

    def loss(p: Any, x: Any) -> Any:
        def on_device(p: Any, x: Any) -> Any:
            own = functools.partial(layer, axes=names, skew=skew)
            return jax.lax.psum(routed_step(n_experts, top_k, own)(p, x), ("h", "d"))

        mesh = jax.sharding.AbstractMesh(lengths, ("h", "d"))
        return jax.shard_map(on_device, mesh=mesh, in_specs=(specs, P(("h", "d"))), out_specs=P(), check_vma=False)(
            p, x
        )

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params, batch).jaxpr
    return list(_collectives(jaxpr, dict(zip("hd", lengths, strict=True))))


def _collectives(jaxpr: Any, lengths: dict[str, int]) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        kind = _KINDS.get(eqn.primitive.name)
        names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if kind is not None and math.prod(lengths[name] for name in names) > 1:
            arrays = eqn.outvars if kind == "all-gather" else eqn.invars
            n_bytes = sum(float(x.aval.size * x.aval.dtype.itemsize) for x in arrays)
            yield Collective(kind, n_bytes, tuple(sorted("hd".index(name) for name in names)))
        for inner in jax.core.jaxprs_in_params(eqn.params):
            yield from _collectives(inner, lengths)


RECIPES = ("hd: experts", "d: experts", "hd: gathered", "d: gathered", "hd: features", "d: features")


@benchmark("experts_recipes")
def experts_recipes(size: Size) -> Rows:
    """Bytes of collectives of a plan, over the least of hand recipes; the same of collectives that cannot hide; bytes
    that leave a device, and seconds of collectives, hidden or not, over the least of recipes; planned seconds, over the
    same step without gathers; arithmetic over routed rows."""
    rows: Rows = []
    for cell, lengths, skew, slower in itertools.product(CELLS, MESHES, SKEWS, LINKS):
        if size != "full" and (cell, skew, lengths, slower) != (CELLS[1], SKEWS[1], MESHES[0], LINKS[0]):
            continue
        n_experts, top_k, width, inner, tokens = cell
        tokens *= math.prod(lengths)
        cluster = _with_slower_links(
            ClusterSpec.preset("h100", num_hosts=lengths[0], devices_per_host=lengths[1]), slower
        )
        plan = _fastest(cell, cluster, AutoShardingOption(expert_skew=skew))
        without_gathers = _fastest(cell, cluster, AutoShardingOption(expert_skew=skew, allow_all_gather=False))
        recipes = _recipes(lengths, cell, skew)
        known = {name: sum(one.n_bytes for one in of_recipe) for name, of_recipe in recipes.items()}
        best = min(known, key=known.__getitem__)
        planned, exposed = (
            sum(c.times_per_step * c.n_bytes for c in plan.collectives if all_of_them or not c.can_hide)
            for all_of_them in (True, False)
        )
        mesh = plan.stages[0].mesh
        of_plan = [(c.times_per_step, Collective(c.kind, c.n_bytes, c.axes)) for c in plan.collectives]
        meshes = [cluster.logical_mesh(lengths, shape) for shape in (lengths, (math.prod(lengths),))]
        of_recipes = [[(1, one) for one in of_recipe] for of_recipe in recipes.values()]
        routed = 2.0 * tokens * (9 * top_k * width * inner + 2 * width * width + 3 * width * n_experts)
        rows.append(
            {
                "experts": n_experts,
                "skew": skew,
                "mesh": "x".join(map(str, lengths)),
                "slower_links": slower,
                "planned_ms": 1e3 * plan.cost.total_s,
                "recipe": best,
                "recipe_mb": known[best] / 1e6,
                "bytes_over_recipe": planned / known[best],
                "exposed_over_recipe": exposed / known[best],
                "sent_over_recipe": _seconds(of_plan, [_counting(mesh)])
                / min(_seconds(one, [_counting(each) for each in meshes]) for one in of_recipes),
                "links_over_recipe": _seconds(of_plan, [mesh]) / min(_seconds(one, meshes) for one in of_recipes),
                "seconds_over_no_gathers": plan.cost.total_s / without_gathers.cost.total_s,
                "flops_over_routed": plan.model_flops / routed,
            }
        )
    return rows


def _with_slower_links(cluster: ClusterSpec, slower: float) -> ClusterSpec:
    links = (cluster.intra_host, cluster.inter_host)
    intra, inter = (dataclasses.replace(one, beta_s_per_byte=slower * one.beta_s_per_byte) for one in links)
    return dataclasses.replace(cluster, intra_host=intra, inter_host=inter)


def _fastest(cell: tuple[int, ...], cluster: ClusterSpec, option: AutoShardingOption) -> minialpa.Plan:
    """On one axis, or on hosts and devices of a host."""
    n_experts, top_k, width, inner, tokens = cell
    params, batch = arguments(n_experts, width, inner, tokens * cluster.n_devices)
    params |= {"in": jax.ShapeDtypeStruct((width, width), jnp.bfloat16)}
    shapes: list[tuple[int, ...]] = [(cluster.n_devices,)]
    shapes += [(cluster.num_hosts, cluster.devices_per_host)] if cluster.num_hosts > 1 else []
    plans = [
        minialpa.plan(
            routed_step(n_experts, top_k),
            (params, batch),
            cluster=cluster,
            method=ShardParallel(logical_shape=shape, auto_sharding_option=option),
            batch_argnums=1,
        )
        for shape in shapes
    ]
    return min(plans, key=lambda plan: plan.cost.total_s)


@functools.cache
def _recipes(lengths: tuple[int, ...], cell: tuple[int, ...], skew: float) -> dict[str, list[Collective]]:
    found = {recipe: recipe_collectives(recipe, lengths, cell, skew) for recipe in RECIPES}
    return {recipe: collectives for recipe, collectives in found.items() if collectives}


def _counting(mesh: LogicalMesh) -> LogicalMesh:
    """A mesh on which seconds of collectives are bytes that leave a device."""
    return LogicalMesh(mesh.shape, (0.0,) * len(mesh.shape), (1.0,) * len(mesh.shape))


def _seconds(found: list[tuple[int, Collective]], meshes: list[LogicalMesh]) -> float:
    """Collectives along all axes of the first mesh run on the last one, which may be of one axis."""
    first, last = meshes[0], meshes[-1]
    return sum(
        n
        * (
            dataclasses.replace(one, axes=(0,)).seconds(last)
            if one.axes == (0, 1) and last != first
            else one.seconds(first)
        )
        for n, one in found
    )
