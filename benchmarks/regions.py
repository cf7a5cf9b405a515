"""Steps with `shard_map`: the collectives of the plan beside the collectives of the author's own program.

Both programs are compiled for eight CPU devices. The cost model prices all their collectives on eight H100s, loops
counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from minialpa import ClusterSpec, ShardParallel
from minialpa.hlo.analysis import collectives, seconds

Case = tuple[Callable[..., Any], tuple[Any, ...]]

XY = ("x", "y")
RING = [(i, (i + 1) % 8) for i in range(8)]


def _line() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("s",), axis_types=(AxisType.Auto,))


def _grid() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), XY, axis_types=(AxisType.Auto,) * 2)


def _on(mesh: Any, fun: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
    return jax.shard_map(fun, mesh=mesh, in_specs=ins, out_specs=outs)


def _training(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, *batch: Any) -> Any:
        value, grads = minialpa.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


# ---- regions ---------------------------------------------------------------------------------------------------------


def _mean_square(y: Any, axes: Any) -> Any:
    return lax.pmean(jnp.mean(y**2), axes)


def _mlp(a: Any, b: Any, x: Any) -> Any:
    return jnp.tanh(x @ a) @ b


def _gathered(axis: str, w: Any) -> Any:
    return lax.all_gather(w, axis, tiled=True)


def _ring_attention(q: Any, k: Any, v: Any) -> Any:
    def visit(carry: Any, _: None) -> Any:
        k, v, total, weights = carry
        scores = jnp.exp(q @ k.T / 32)
        moved = lax.ppermute(k, "s", RING), lax.ppermute(v, "s", RING)
        return (*moved, total + scores @ v, weights + scores.sum(-1)), None

    zeros = [lax.pcast(jnp.zeros(shape), "s", to="varying") for shape in (q.shape, q.shape[:1])]
    (_, _, total, weights), _ = lax.scan(visit, (k, v, *zeros), None, length=8)
    return total / weights[:, None]


def _ulysses(q: Any, k: Any, v: Any) -> Any:
    heads = [lax.all_to_all(x.reshape(1, -1, 16, x.shape[-1] // 16), "s", 2, 1, tiled=True) for x in (q, k, v)]
    return lax.all_to_all(jax.nn.dot_product_attention(*heads), "s", 1, 2, tiled=True).reshape(q.shape)


def _experts(x: Any, a: Any, b: Any) -> Any:
    routed = lax.all_to_all(x.reshape(8, -1, x.shape[-1]), "s", 0, 0)
    return lax.all_to_all(jnp.tanh(routed @ a[0]) @ b[0], "s", 0, 0).reshape(x.shape)


def _contrastive(w: Any, x: Any) -> Any:
    scores = (x @ w) @ _gathered("s", x).T
    return lax.pmean(-jnp.mean(jax.nn.log_softmax(scores)[:, 0]), "s")


def _pairwise(w: Any, x: Any) -> Any:
    def visit(carry: Any, _: None) -> Any:
        total, y = carry
        return (total + jnp.mean(jax.nn.softplus(z @ y.T)), lax.ppermute(y, "s", RING)), None

    z = x @ w
    (total, _), _ = lax.scan(visit, (lax.pcast(jnp.zeros(()), "s", to="varying"), z), None, length=8)
    return lax.pmean(total, "s")


def _vocabulary(w: Any, x: Any) -> Any:
    logits = x @ w
    return jnp.mean(jnp.log(lax.psum(jnp.exp(logits).sum(-1), "s")) - lax.psum(logits[:, 0], "s"))


def _halo(w: Any, x: Any) -> Any:
    wide = jnp.concatenate([lax.ppermute(x[-2:], "s", RING), x])
    return sum(wide[k : k + x.shape[0]] * w[k] for k in range(3))


def _chain(w: Any, x: Any) -> Any:
    return lax.fori_loop(0, 8, lambda _, c: lax.ppermute(jnp.tanh(c @ w[0]), "s", RING[:7]), x)


def _batch_norm(w: Any, x: Any) -> Any:
    y = x @ w
    return (y - lax.pmean(y.mean(0), "s")) * lax.rsqrt(lax.pmean((y**2).mean(0), "s") + 1e-5)


def cases(d: int, t: int) -> dict[str, Case]:
    """d: features. t: tokens."""
    array = partial(lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32))
    x, w = array(t, d), array(d, d)
    ab = {"a": array(d, 4 * d), "b": array(4 * d, d)}
    qkv = dict.fromkeys("qkv", w)
    line, grid = partial(_on, _line()), partial(_on, _grid())

    def attention(attend: Callable[..., Any]) -> Case:
        region = line(attend, (P("s"),) * 3, P("s"))
        return _training(lambda p, x: jnp.mean(region(x @ p["q"], x @ p["k"], x @ p["v"]) ** 2)), (qkv, x)

    def of_mlp(region: Callable[..., Any]) -> Case:
        return _training(lambda p, x: jnp.mean(region(p["a"], p["b"], x) ** 2)), (ab, x)

    def of_weight(fun: Callable[..., Any], spec: Any = None, shape: tuple[int, ...] = (), split: bool = False) -> Case:
        outs = P("s") if split else P()
        region = line(fun, (P() if spec is None else spec, P("s")), outs)
        return _training(lambda p, x: jnp.mean(region(p, x) ** 2)), (array(*shape) if shape else w, x)

    def once(fun: Callable[..., Any], ins: Any, outs: Any, *arguments: Any) -> Case:
        return line(fun, ins, outs), arguments

    def sequence(a: Any, b: Any, x: Any) -> Any:
        return lax.psum_scatter(_mlp(a, b, _gathered("s", x)), "s", tiled=True)

    def sharded(axes: Any, axis: str, a: Any, b: Any, x: Any) -> Any:
        return _mean_square(_mlp(_gathered(axis, a), _gathered(axis, b), x), axes)

    rows, columns = P("s"), P(None, "s")
    vocabulary = line(_vocabulary, (columns, P()), P())
    return {
        "tensor parallel": of_mlp(grid(lambda *p: lax.psum(_mlp(*p), "y"), (P(None, "y"), P("y"), P("x")), P("x"))),
        "sequence parallel": of_mlp(line(sequence, (columns, rows, rows), rows)),
        "data parallel": of_mlp(line(lambda *p: _mean_square(_mlp(*p), "s"), (P(), P(), rows), P())),
        "sharded weights": of_mlp(line(partial(sharded, "s", "s"), (rows, rows, rows), P())),
        "sharded weights on a grid": of_mlp(grid(partial(sharded, XY, "y"), (P("y"), P("y"), P(XY)), P())),
        "ring attention": attention(_ring_attention),
        "exchanged heads": attention(_ulysses),
        "expert dispatch": (
            _training(lambda p, x: jnp.mean(line(_experts, (rows,) * 3, rows)(x, p["a"], p["b"]) ** 2)),
            ({"a": array(8, d, 2 * d), "b": array(8, 2 * d, d)}, x),
        ),
        "contrastive": of_weight(_contrastive),
        "pairs around a ring": of_weight(_pairwise),
        "split vocabulary": (_training(vocabulary), (array(d, 32 * d), x)),
        "halo": of_weight(_halo, shape=(3, d), split=True),
        "chain of stages": of_weight(_chain, rows, (8, d, d), split=True),
        "batch norm": of_weight(_batch_norm, split=True),
        "gather": once(
            lambda x, w: jnp.tanh(x @ lax.all_gather(w, "s", axis=1, tiled=True)), (rows, columns), rows, x, w
        ),
        "sum": once(lambda x, w: lax.psum(x @ w, "s"), (columns, rows), P(), x, w),
        "scatter": once(lambda x, w: lax.psum_scatter(x @ w, "s", tiled=True), (columns, rows), rows, x, w),
        "transpose": once(lambda x: jnp.tanh(lax.all_to_all(x, "s", 1, 0, tiled=True)).sum(0), rows, rows, x),
        "maximum": once(lambda x: lax.pmax(x.max(1), "s"), columns, P(), x),
        "rotation": once(lambda x: lax.ppermute(jnp.cumsum(x, 0), "s", RING), rows, rows, x),
    }


@benchmark("regions")
def regions(size: Size) -> Rows:
    """Collectives of steps with `shard_map`: of the plan, and of the author's own program."""
    cluster = ClusterSpec.preset("h100", num_hosts=1, devices_per_host=8)
    mesh = cluster.logical_mesh((1, 8), (8,))
    rows: Rows = []
    found = cases(1024, 8192) if size == "full" else {"sum": cases(64, 128)["sum"]}
    for name, (step, arguments) in found.items():
        plan = minialpa.plan(step, arguments, cluster=cluster, method=ShardParallel())
        executable = minialpa.parallelize(step, method=plan).get_executable(*arguments)
        by_plan = collectives("".join(executable.get_hlo_text()))
        by_author = collectives(jax.jit(step).lower(*arguments).compile().as_text() or "")
        plan_s, author_s = seconds(by_plan, mesh), seconds(by_author, mesh)
        rows.append(
            {
                "case": name,
                "author_collectives": len(by_author),
                "plan_collectives": len(by_plan),
                "author_us": 1e6 * author_s,
                "plan_us": 1e6 * plan_s,
                "ratio": plan_s / author_s if author_s else math.nan,
            }
        )
    return rows
