"""Properties of trainers that a record does not have: kernels, and the work that overlaps with communication.

These are facts about generations of trainers, from their papers and sources, not figures fitted to single systems. A
trainer with an unknown name counts as one of 2024, with FlashAttention 2 and its own kernels for norms and activations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

#: Kernels of attention. "written": a product, a softmax, dropout and a product, each with its scores in memory.
Attention = Literal["written", "triton", "flash-2", "cudnn"]
#: Other kernels. "operators": each operator of a norm or a rotation by itself, as in PyTorch; "kernels": one
#: kernel for each norm, rotation and activation, by hand or by a compiler.
Elementwise = Literal["operators", "kernels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """How a trainer runs a step.

    Attributes:
        attention: its kernel of attention.
        elementwise: its kernels between products.
        has_dropout: whether it drops scores and residuals in training.
        splits_positions: whether tensor parallelism also splits positions between operators (sequence parallelism).
        hides_operators: whether products hide the collectives of tensor parallelism, chunk by chunk.
        interleaves: whether stages have several chunks (runs of layers) if rows do not give their number.
        overlap: the fraction of its work that runs while it sums gradients and gathers weights.
        gathers_ahead: whether the first passes of a step hide the gathers of the weights that the step before changed,
            and the last passes the sums of gradients.
        fills_pipeline: whether a pipeline has as many micro-batches as stages if rows do not give their number; else a
            micro-batch is one example for each device that splits them.
        recomputes_unread: whether full recomputation repeats all of a block, also values without a reader.
        keeps_every_second: whether "selective" recomputation keeps every second product; else it recomputes scores.
        total_bytes: bytes of a number in the accumulators of gradients; minialpa's have 4.
        cast_bytes: bytes that are read and written to cast a number from bfloat16 to float8, also in a transposed copy,
            because products of H100s read both operands along the sum.
        waits: how often a stage waits for arrays from or to one neighbour in a forward and a backward pass, without
            computing meanwhile; 0 if passes hide the sends.
        blocked_s: seconds of delay of a product and the kernels around it, because the host waits for each kernel
            before it starts the next one.
    """

    attention: Attention = "flash-2"
    elementwise: Elementwise = "kernels"
    has_dropout: bool = False
    splits_positions: bool = True
    hides_operators: bool = False
    interleaves: bool = False
    overlap: float = 1.0
    gathers_ahead: bool = False
    fills_pipeline: bool = False
    recomputes_unread: bool = True
    keeps_every_second: bool = False
    total_bytes: int = 4
    cast_bytes: float = 1.0
    waits: int = 0
    blocked_s: float = 0.0


#: Megatron before sequence parallelism and fused attention: Megatron-LM of SC21, and forks of it until 2022.
#: They summed gradients after the last backward pass. Between passes, a stage sends one array and receives another in
#: one exchange, and waits for it (`p2p_communication.py`).
_EARLY = Trainer(attention="written", has_dropout=True, splits_positions=False, overlap=0.0, waits=1)
#: Transformer Engine: attention of cuDNN, user buffers that overlap products and collectives.
#: One kernel reads a number, and writes it and its transpose.
_TRANSFORMER_ENGINE = Trainer(
    attention="cudnn", hides_operators=True, interleaves=True, gathers_ahead=True, cast_bytes=4
)

#: PyTorch's checkpoints without reentrant autograd stop at the last value that the backward pass reads
#: (`set_checkpoint_early_stop`); Megatron's own repeat all of a block. torchao's float8 finds the largest number
#: first (2 bytes), and writes a number (3) and its transpose (3) in separate kernels.
_PYTORCH = Trainer(recomputes_unread=False, cast_bytes=8)

#: (regular expression for the name of a system, trainer); the first one that is found counts.
_TRAINERS: tuple[tuple[str, Trainer], ...] = (
    (r"SC21", replace(_EARLY, interleaves=True)),
    # It accumulated gradients in float16 (bigscience, chronicles-prequel.md, "Rebalancing layers"). DeepSpeed's engine
    # sends and receives one after the other (`pipe/p2p.py`).
    (r"Megatron-DeepSpeed", replace(_EARLY, total_bytes=2, waits=2)),
    (r"GPT-NeoX|Megatron-LM.*20(19|20|21)", _EARLY),
    # Its recipes set `grad_reduce_in_fp32=False` (scripts/performance/configs).
    (r"Megatron-Bridge|NeMo", replace(_TRANSFORMER_ENGINE, total_bytes=2)),
    (r"Megatron-Core|Megatron-LM", _TRANSFORMER_ENGINE),
    (r"MaxText|JAX|Paxml|T5X|AXLearn", Trainer(attention="cudnn", recomputes_unread=False)),
    (r"torchtitan", replace(_PYTORCH, elementwise="operators", keeps_every_second=True, fills_pipeline=True)),
    # `attn_impl: triton`, FlashAttention 1 with the bias of ALiBi; float8 of Transformer Engine.
    (r"llm-foundry", replace(_PYTORCH, attention="triton", cast_bytes=_TRANSFORMER_ENGINE.cast_bytes)),
)

#: The fraction of the peak rate of bfloat16 that a kernel of attention reaches forward and backward, with the
#: operations of a causal mask and recomputed scores. FlashAttention 1 on A100: 25 to 40 % (Dao, 2023, section 1), and
#: much less in Triton on H100, for which it was not written. FlashAttention 2: up to 190 of 312 Tflop/s on A100, and
#: up to 335 of 989 on H100 (Dao, 2023, section 4). cuDNN 9: as FlashAttention 3 (Shah et al., 2024, figures 5 and 6).
_ATTENTION: dict[tuple[Attention, str], float] = {
    ("triton", "a100"): 0.32,
    ("triton", "h100"): 0.18,
    ("flash-2", "a100"): 0.55,
    ("flash-2", "h100"): 0.34,
    ("cudnn", "a100"): 0.55,
    ("cudnn", "h100"): 0.52,
}
#: Bytes per second of other kernels if each operator is a separate kernel, as a fraction of the rate if norms,
#: rotations and activations are one kernel each.
OPERATORS_PART = 0.4
#: For runs with CUDA_LAUNCH_BLOCKING=1, without which the runs on Jean Zay hung (chronicles-prequel.md, "dealing with
#: JZ hanging"): 80 GPUs with ten stages of eight blocks came to 91.0 Tflop/s with it and 97.2 without. The delay is
#: 14.5 s for 521 slots of the pipeline, 3.5 ms for each block, which has 32 products. 160 GPUs came to 90.3 with it and
#: without.
_BLOCKED_S = 1.1e-4
#: The exposed fraction of the seconds of tensor parallelism's collectives if products hide them chunk by chunk: the
#: first and the last chunk, and the slowdown of products by links and memory.
EXPOSED_PART = 0.3


def trainer_of(system: str, notes: str) -> Trainer:
    """The trainer of a row. Notes may name other kernels, or other hidden work."""
    trainer = next((one for pattern, one in _TRAINERS if re.search(pattern, system, re.IGNORECASE)), Trainer())
    if re.search(r"(?<!no )\b(torch\.)?compile\b", notes) or (
        trainer.keeps_every_second and not re.search(r"\bno compile\b", notes)
    ):
        trainer = replace(trainer, elementwise="kernels")
    if re.search(r"\b(async ?TP|TP comm\w* overlap)", notes, re.IGNORECASE):
        trainer = replace(trainer, hides_operators=True)
    if "Jean Zay" in notes:
        trainer = replace(trainer, blocked_s=_BLOCKED_S)
    if re.search(r"\b(FA3|FlashAttention-?3|cuDNN)", notes, re.IGNORECASE):
        trainer = replace(trainer, attention="cudnn")
    return trainer


def attention_efficiency(kernel: Attention, device: str) -> float:
    """The fraction of the peak rate that a kernel reaches on a device. Other devices take the most similar one's."""
    generation = "a100" if device.startswith(("a100", "v100")) else "h100"
    return _ATTENTION.get((kernel, generation), _ATTENTION["flash-2", generation])
