"""The record: a file of published runs in, `Run`s out, each with its model, its degrees and its measurements."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published_runs.decoder import Decoder, Experts, Recomputation
from benchmarks.published_runs.errors import NotBuiltError
from benchmarks.published_runs.gpus import chip_of, device_of
from benchmarks.published_runs.trainers import Trainer, trainer_of

Row = dict[str, Any]
#: (query heads, key and value heads, features inside a feed-forward layer, words) of published models.
_LLAMAS = {
    "llama3-8b": (32, 8, 14336, 128256),
    "llama3-70b": (64, 8, 28672, 128256),
    "llama3.1-405b": (128, 8, 53248, 128256),
}
#: (query heads, key and value heads, features of a head, words, experts, experts of a token, features inside an expert)
#: of published models: config.json of Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B-A22B and openai/gpt-oss-120b on Hugging Face.
#: Every second layer of gpt-oss-120b has a window of 128 positions, which is not built.
_MIXTURES = {
    "qwen3-30b-a3b": (32, 4, 128, 151936, 128, 8, 768),
    "qwen3-235b-a22b": (64, 4, 128, 151936, 128, 8, 1536),
    "gpt-oss-120b": (64, 8, 64, 201088, 128, 4, 2880),
}
#: Mixtures whose recipes for H100s send tokens with HybridEP, once to each host (Megatron-Bridge,
#: scripts/performance/configs/qwen). Others use `alltoall`.
_ONCE_PER_HOST = ("qwen3-30b-a3b",)

#: Chunks of a stage if a record does not give them: the bubbles are short, and more chunks would send more.
_MOST_CHUNKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run.

    Attributes:
        number: number of its row in the file, from 0.
        system: the trainer.
        model: the decoder.
        name: the file's name of the model.
        gpu: the file's name of the GPU.
        n_hosts, per_host: hosts, and GPUs of each.
        dp, fsdp, tp, pp, cp: degrees; `fsdp` devices share the parameters.
        n_chunks: chunks (runs of layers) in a stage.
        shards_parameters: whether `fsdp` shards parameters (ZeRO-3), and not only the update (ZeRO-2).
        batch: examples of a step.
        n_micro_batches: parts of the batch.
        trainer: properties of the system that the record does not have.
        notes: notes of the record.
        step_s: measured seconds of a step; None if it ran out of memory.
        peak_bytes: measured memory of a device, if published.
        recomputation_is_open: whether the source leaves open which values are recomputed.
        group: equal for the rows of one comparison: system, dimensions of the model, GPUs, batch and date.
    """

    number: int
    system: str
    model: Decoder
    name: str
    gpu: str
    n_hosts: int
    per_host: int
    dp: int
    fsdp: int
    tp: int
    pp: int
    cp: int
    n_chunks: int
    shards_parameters: bool
    batch: int
    n_micro_batches: int
    trainer: Trainer
    notes: str
    step_s: float | None
    peak_bytes: float | None
    group: tuple[Any, ...]
    recomputation_is_open: bool = False

    @property
    def n_gpus(self) -> int:
        return self.n_hosts * self.per_host

    @property
    def degrees(self) -> tuple[int, ...]:
        """The choices of a design, for one model on one cluster."""
        return (self.dp, self.fsdp, self.tp, self.pp, self.cp, self.n_chunks, self.n_micro_batches)

    @property
    def out_of_memory(self) -> bool:
        return self.step_s is None


def read(path: Path) -> list[Run | tuple[int, str]]:
    """The runs of a file; for a row that is not built, its number and the reason."""
    found: list[Run | tuple[int, str]] = []
    for number, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        try:
            found.append(run_of(number, row))
        except NotBuiltError as error:
            found.append((number, str(error)))
    return found


def run_of(number: int, row: Row) -> Run:
    if (row["ep"] or 1) > 1 and row["model"] not in _MIXTURES:
        raise NotBuiltError(f"{row['model']}: a mixture of experts")
    dp, fsdp, tp, pp, cp = (row[name] or 1 for name in ("dp", "fsdp", "tp", "pp", "cp"))
    chip_of(row["gpu_kind"])
    trainer = trainer_of(row["system"], row["notes"])
    model = _model(row, trainer)
    per_host = min(row["gpus_per_node"], row["gpus"])
    n_micro_batches = _n_micro_batches(row, trainer, dp * fsdp, pp)
    dimensions = (row["model"], model.n_layers, model.hidden, model.n_heads, model.seq)

    return Run(
        number=number,
        system=row["system"],
        model=model,
        name=row["model"],
        gpu=row["gpu_kind"],
        n_hosts=row["gpus"] // per_host,
        per_host=per_host,
        dp=dp,
        fsdp=fsdp,
        tp=tp,
        pp=pp,
        cp=cp,
        n_chunks=_n_chunks(row, trainer, model.n_layers, pp, n_micro_batches),
        shards_parameters=_shards_parameters(row),
        batch=row["global_batch"],
        n_micro_batches=n_micro_batches,
        trainer=trainer,
        notes=row["notes"],
        step_s=_measured_s(row, model),
        peak_bytes=_measured_bytes(row),
        group=(row["system"], dimensions, row["gpus"], row["global_batch"], _date(row)),
        recomputation_is_open=row["remat"] is None,
    )


def _model(row: Row, trainer: Trainer) -> Decoder:
    name, hidden = row["model"], row["hidden"]
    if hidden is None:
        raise NotBuiltError(f"{name}: no dimensions")
    n_groups = (row["dp"] or 1) * (row["fsdp"] or 1)
    common = {
        "hidden": hidden,
        "seq": row["seq"],
        "recomputes": _recomputation(row, trainer),
        "recomputes_unread": trainer.recomputes_unread and row["remat"] == "full",
        "writes_scores": trainer.attention == "written",
        "has_dropout": trainer.has_dropout,
        # Products with a scale for each row took as long as bfloat16 products when they were published.
        "in_float8": "fp8" in row["dtype"] and "rowwise" not in row["dtype"],
        "tensor_parallel": (n_groups, row["tp"]) if row["tp"] * row["cp"] > 1 or _shards_parameters(row) else None,
        "context": row["cp"],
        "shards_weights": _shards_parameters(row),
        "sequence_parallel": trainer.splits_positions,
    }
    if name in _LLAMAS:
        heads, kv_heads, ffn, vocab = _LLAMAS[name]
        return Decoder(
            family="llama", n_layers=row["layers"], n_heads=heads, n_kv_heads=kv_heads, ffn=ffn, vocab=vocab, **common
        )

    if name in _MIXTURES:
        heads, kv_heads, head, vocab, *_ = _MIXTURES[name]
        return Decoder(
            family="llama", n_layers=row["layers"], n_heads=heads, n_kv_heads=kv_heads, ffn=0, vocab=vocab, head=head,
            experts=_experts_of(row), **common
        )  # fmt: skip

    heads = _noted(row, "heads") or hidden // (64 if hidden < 1500 else 128)
    vocab = _noted(row, "vocab") or 50368
    vocab = 250880 if vocab == 250 else vocab  # "~250k"
    if name.startswith("llama-like"):
        ffn = _noted(row, "mlp") or 4 * hidden
        return Decoder(
            family="llama", n_layers=row["layers"], n_heads=heads, n_kv_heads=heads, ffn=ffn, vocab=vocab, **common
        )
    if not name.startswith(("gpt-", "mpt-")) or name.startswith("gpt-oss"):
        raise NotBuiltError(f"{name}: its blocks")
    n_layers = row["layers"] or _n_layers(row, vocab)
    return Decoder(
        family="gpt", n_layers=n_layers, n_heads=heads, n_kv_heads=heads, ffn=4 * hidden, vocab=vocab, **common
    )


def _experts_of(row: Row) -> Experts:
    """The experts of a row, split over the devices of a stage, or over the devices of each of its hosts."""
    n_experts, per_token, inner = _MIXTURES[row["model"]][4:]
    per_stage, tp, ep = row["gpus"] // (row["pp"] or 1), row["tp"] or 1, row["ep"]
    in_host = min(row["gpus_per_node"], per_stage)
    mesh = (per_stage // tp, tp) if tp > 1 else (per_stage // in_host, in_host)
    axes = [axis for axis, length in zip(("examples", "operators"), mesh, strict=True) if length > 1]
    if ep not in (per_stage, in_host):
        raise NotBuiltError(f"{row['model']}: ep {ep} of {per_stage} devices")
    over = tuple(axes) if ep == per_stage else ("operators",)
    once = row["model"] in _ONCE_PER_HOST and mesh[0] > 1 and tp == 1 and ep == per_stage
    return Experts(n=n_experts, per_token=per_token, inner=inner, mesh=mesh, over=over, once_per_host=once)


def _n_layers(row: Row, vocab: int) -> int:
    """The number of layers by the number of parameters: the nearest number that the stages of a pipeline divide."""
    hidden, pp = int(row["hidden"]), int(row["pp"] or 1)
    n_layers = (float(row["params_b"]) * 1e9 - vocab * hidden) / (12 * hidden**2)
    return max(1, round(n_layers / pp)) * pp


def _shards_parameters(row: Row) -> bool:
    """torchtitan also shards them over the devices that split positions (its mesh `dp_shard_cp`)."""
    is_split = (row["fsdp"] or 1) > 1 or (row["cp"] > 1 and "torchtitan" in row["system"])
    return is_split and "sharding SHARD_GRAD_OP" not in row["notes"]


def _n_micro_batches(row: Row, trainer: Trainer, n_groups: int, pp: int) -> int:
    """The row's number; without one, 1 if there is no pipeline, where more micro-batches have no use."""
    per_group = max(1, int(row["global_batch"]) // n_groups)
    if row["micro_batch"]:
        return max(1, per_group // int(row["micro_batch"]))
    return 1 if pp == 1 else min(pp, per_group) if trainer.fills_pipeline else per_group


def _n_chunks(row: Row, trainer: Trainer, n_layers: int, pp: int, n_micro_batches: int) -> int:
    """Chunks of a stage: the notes' number; else at most `_MOST_CHUNKS` of equally many layers, or a layer each."""
    noted = re.search(r"\bVP (\w+)", row["notes"])
    if noted:
        return int(noted[1]) if noted[1].isdigit() else 1
    says_so = re.search(r"(?<!not )\binterleaved\b", row["notes"], re.IGNORECASE)
    if pp == 1 or n_micro_batches % pp or not (trainer.interleaves or says_so):
        return 1
    per_stage, rest = divmod(n_layers, pp)
    equal = max(n for n in range(1, _MOST_CHUNKS + 1) if per_stage % n == 0)
    return 2 if rest else equal if equal > 1 else per_stage


def _recomputation(row: Row, trainer: Trainer) -> Recomputation:
    """Megatron's selective recomputation concerns scores, which fused attention recomputes in any case."""
    if row["remat"] == "selective" and trainer.keeps_every_second:
        return "every second product"
    return "full" if row["remat"] == "full" else "none"


def _noted(row: Row, name: str) -> int | None:
    found = re.search(rf"\b{name} ~?(\d+)", row["notes"])
    return int(found[1]) if found else None


def _date(row: Row) -> str | None:
    found = re.search(r"date (\S+?)[ ;]", row["notes"])
    return found[1] if found else None


def _measured_s(row: Row, model: Decoder) -> float | None:
    """Seconds per step, from any published number."""
    if "OUT OF MEMORY" in row["notes"]:
        return None
    if row["step_s"]:
        return float(row["step_s"])
    if row["tokens_per_s_per_gpu"]:
        return float(row["global_batch"] * row["seq"] / (row["tokens_per_s_per_gpu"] * row["gpus"]))

    flops = model.flops(row["global_batch"])
    if row["tflops_per_gpu"]:
        if "HARDWARE flops" in row["notes"]:
            h, s, n = model.hidden, model.seq, model.n_layers
            flops = 96 * row["global_batch"] * s * n * h**2 * (1 + s / (6 * h) + model.vocab / (16 * n * h))
        return float(flops / (row["tflops_per_gpu"] * 1e12 * row["gpus"]))
    return float(flops / (row["mfu"] * device_of(row["gpu_kind"]).flops_per_s("bfloat16") * row["gpus"]))


def _measured_bytes(row: Row) -> float | None:
    """Peak memory, if the notes have it. A "GB" of these trainers is 2^30 bytes."""
    found = re.search(r"\bmem(?:ory)? ([\d.]+) ?Gi?B", row["notes"])
    return float(found[1]) * 2**30 if found else None
