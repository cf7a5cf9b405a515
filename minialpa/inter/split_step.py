"""What a step over micro-batches is: operations with their phases, and how values combine over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from jax.extend.core import JaxprEqn, Var

from minialpa.jaxprs import Atom
from minialpa.trace import TracedStep


class Phase(Enum):
    """When an operation runs: once before, once per micro-batch, or once after the micro-batches."""

    PROLOGUE = "prologue"
    LOOP = "loop"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Op:
    """One equation of a split step; `source` is the number of the traced equation that it comes from."""

    eqn: JaxprEqn
    phase: Phase
    source: int


@dataclass(frozen=True, slots=True)
class Accumulator:
    """`total` = combination over micro-batches of `loop` by `reduction`; it may be of a wider dtype than `loop`."""

    loop: Var
    total: Var
    reduction: str


@dataclass(frozen=True, slots=True)
class Stack:
    """`total` = concatenation over micro-batches of `loop` along dimension `dim`."""

    loop: Var
    total: Var
    dim: int


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A step as a loop over micro-batches, with what happens before and after it.

    micro_inputs: batch inputs and the variables that hold the rows of one micro-batch.
    micro_index: int32 scalar, the number of the micro-batch; None when nothing needs it.
    outvars: results of the step, over the variables of the update, inputs and literals.
    batch_dims: for variables of the loop, and inputs, the dimension that holds examples.
    """

    traced: TracedStep
    n_micro_batches: int
    ops: tuple[Op, ...]
    micro_inputs: tuple[tuple[Var, Var], ...]
    micro_index: Var | None
    accumulators: tuple[Accumulator, ...]
    stacks: tuple[Stack, ...]
    outvars: tuple[Atom, ...]
    batch_dims: dict[Var, int]
