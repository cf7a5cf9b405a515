"""Planning of published models, from Alpa's tables to Llama 3: plans, seconds of a step, and seconds of planning.

python -m benchmarks.plan_published gpt-1.3b llama-3-8b      some rows; `--flax` for the same GPT written with flax
python -m benchmarks.plan_published gpt-2.6b --by-name       and the best method by name beside each plan

Every row is planned in its own process on one core. No device is used.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import minialpa
from benchmarks.alpa_plans import STORED
from benchmarks.corpus import arguments
from benchmarks.planning import cluster_of, peak_rss_gb, planned, traced_step
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.run import table
from minialpa import AutoLayerOption, AutoParallel, MinialpaError, PipeshardParallel, models
from minialpa.methods import Method
from minialpa.tracing.trace import TracedStep


@dataclass(frozen=True, slots=True)
class Row:
    """A model (a name that `models.build` takes, with other sizes) on devices.

    n_micro_batches: None for `AutoParallel`, which chooses the number.
    """

    model: str
    preset: str
    n_devices: int
    n_micro_batches: int | None
    sizes: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        scan = ", scan" if dict(self.sizes).get("scan_layers") else ""
        return f"{self.model}{scan} on {self.n_devices}"


def _llama(model: str, n_devices: int, n_micro_batches: int, *, scan: bool) -> Row:
    sizes = (("batch_size", 256), ("scan_layers", scan))
    return Row(model, "h100", n_devices, n_micro_batches, sizes)


ROWS = (
    *(
        Row(plan.model, "v100-p3.16xlarge", plan.n_devices, plan.n_micro_batches, (("batch_size", plan.batch_size),))
        for plan in STORED
    ),
    *(_llama("llama-3-8b", n, 4, scan=scan) for n in (8, 64) for scan in (False, True)),
    *(_llama("llama-3-70b", 512, 4, scan=scan) for scan in (False, True)),
    *(_llama("llama-3-405b", 1024, 32, scan=scan) for scan in (False, True)),
    Row("t5-large", "a100-80gb", 8, None),
    Row("vit-h14", "a100-80gb", 8, None),
)
_TINY = Row("gpt", "a100-80gb", 2, 2)
_BY_NAME = ("ShardParallel", "DataParallel", "Zero2Parallel", "Zero3Parallel")


@benchmark("plan_published")
def plan_published(size: Size) -> Rows:
    """CPU seconds to plan published models as pipelines, and seconds of their steps."""
    return [measured(row) for row in (ROWS if size == "full" else (_TINY,))]


def measured(row: Row, *, flax: bool = False, by_name: bool = False) -> dict[str, Any]:
    """A row of the table, from a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_cells, (row, flax, by_name))


def _cells(row: Row, flax: bool, by_name: bool) -> dict[str, Any]:
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")
    cluster, start_s = cluster_of(row.preset, row.n_devices), time.process_time()
    traced = _flax_gpt(row) if flax else _own(row)
    trace_s = time.process_time() - start_s

    search: Method = AutoParallel()
    if row.n_micro_batches is not None:
        layers = AutoLayerOption("auto", remat="auto")
        search = PipeshardParallel(num_micro_batches=row.n_micro_batches, layer_option=layers, stage_option="auto")
    cells = {"row": row.name + (", flax" if flax else ""), "equations": len(traced.flat.eqns), "trace_s": trace_s}
    cells |= _planned_cells(traced, cluster, search)
    cells["peak_rss_gb"] = peak_rss_gb()
    if by_name:
        cells |= _best_by_name(traced, cluster, row.n_micro_batches)
    return cells


def _planned_cells(traced: TracedStep, cluster: minialpa.ClusterSpec, method: Method) -> dict[str, Any]:
    start_s = time.process_time()
    try:
        plan = planned(traced, cluster, method)
    except MinialpaError as error:
        return {"plan_s": time.process_time() - start_s, "failure": str(error).splitlines()[0][:120]}
    return {
        "plan_s": time.process_time() - start_s,
        "step_s": plan.cost.total_s,
        "peak_gb": max(plan.cost.peak_bytes) / 1e9,
        "stages": len(plan.stages),
        "micro_batches": plan.n_micro_batches,
        "remat": "/".join(sorted(set(plan.remat))),
    }


def _best_by_name(traced: TracedStep, cluster: minialpa.ClusterSpec, n: int | None) -> dict[str, Any]:
    """The fastest method by name, and its seconds."""
    found: list[tuple[float, str]] = []
    for name in _BY_NAME:
        for remat in ("none", "full"):
            cells = _planned_cells(traced, cluster, getattr(minialpa, name)(num_micro_batches=n or 1, remat=remat))
            if "step_s" in cells:
                found.append((cells["step_s"], f"{name} {remat}"))
    step_s, name = min(found, default=(float("inf"), "none"))
    return {"by_name_s": step_s, "by_name": name}


def _own(row: Row) -> TracedStep:
    case = models.build(row.model, **dict(row.sizes))
    return traced_step(case.train_step(minialpa.value_and_grad), *arguments(case))


def _flax_gpt(row: Row) -> TracedStep:
    """A GPT with the sizes of `row`, in the style of flax users: float32 weights, float16 compute, adamw."""
    import flax.linen as nn
    import optax
    from flax.training.train_state import TrainState

    case = models.build(row.model, **dict(row.sizes))
    sizes = models.SIZES[row.model].arguments
    hidden, n_layers, n_heads, vocab = (sizes[name] for name in ("hidden", "n_layers", "n_heads", "vocab_size"))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, mask: Any) -> Any:
            h = nn.LayerNorm(dtype=jnp.float16)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=n_heads, dtype=jnp.float16)(h, h, mask=mask)
            h = nn.gelu(nn.Dense(4 * hidden, dtype=jnp.float16)(nn.LayerNorm(dtype=jnp.float16)(x)))
            return x + nn.Dense(hidden, dtype=jnp.float16)(h)

    class Gpt(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            embed = nn.Embed(vocab, hidden, dtype=jnp.float16)
            position = nn.Embed(ids.shape[1], hidden, dtype=jnp.float16)
            x = embed(ids) + position(jnp.arange(ids.shape[1])[None])
            for _ in range(n_layers):
                x = Block()(x, nn.make_causal_mask(ids))
            return embed.attend(nn.LayerNorm(dtype=jnp.float16)(x))

    net = Gpt()
    ids = jax.ShapeDtypeStruct((case.batch_size, sizes["seq_len"]), jnp.int32)
    one = jax.ShapeDtypeStruct((1, sizes["seq_len"]), jnp.int32)
    params = jax.eval_shape(net.init, jax.ShapeDtypeStruct((), jax.random.key(0).dtype), one)
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=net.apply, params=p, tx=optax.adamw(1e-4)), params)

    def step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            logits = state.apply_fn(params, batch["ids"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, gradients = minialpa.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    return traced_step(step, state, {"ids": ids, "labels": ids})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.plan_published", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="the models, or rows; by default all")
    parser.add_argument("--flax", action="store_true", help="the GPT of flax in place of the project's own model")
    parser.add_argument("--by-name", action="store_true", help="also the best method by name")
    args = parser.parse_args(argv)
    for row in ROWS:
        if not args.models or {row.model, row.name} & set(args.models):
            print(table([measured(row, flax=args.flax, by_name=args.by_name)]), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
