"""The models that minialpa and `jax.jit` train: the type of a row of the table, and the methods.

A model is a function that returns a `Training`. It imports its packages itself, so that a listing of the rows needs no
packages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minialpa import (
    AutoLayerOption,
    DataParallel,
    PipeshardParallel,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
)
from minialpa.methods import Method

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training of a row.

    Attributes:
        step: returns the new state, and the loss or other results.
        state: a pytree of arrays: parameters, optimizer state, random keys.
        batches: one for each step, of examples along dimension 0.
        batch_argnums: the argument of `parallelize`.
        eps: the relative rounding of the computation, if it has fewer bits than the state.
    """

    step: Step
    state: Any
    batches: Sequence[Any]
    batch_argnums: Any = "auto"
    eps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Some rows of the table: one model under several methods.

    Attributes:
        name: name of the function, and of the model on the command line.
        packages: the packages whose versions the table shows, the most interesting first.
        model: the description in the table.
        optimizer: the optimizer, of optax unless the text names another package.
        methods: keys of `METHODS`.
        x64: whether jax computes in 64 bits.
        build: makes the same training each time.
    """

    name: str
    packages: tuple[str, ...]
    model: str
    optimizer: str
    methods: tuple[str, ...]
    x64: bool
    build: Callable[[], Training]


#: The methods of the table, for `N_DEVICES` devices. Layers of about equal work become stages.
N_DEVICES = 4
METHODS: dict[str, Callable[[], Method | None]] = {
    "no method": lambda: None,
    "ShardParallel": ShardParallel,
    "ShardParallel, 2 micro-batches": lambda: ShardParallel(num_micro_batches=2),
    "DataParallel": DataParallel,
    "DataParallel, 2 micro-batches": lambda: DataParallel(num_micro_batches=2),
    "Zero2Parallel, 2 micro-batches": lambda: Zero2Parallel(num_micro_batches=2),
    "Zero3Parallel": Zero3Parallel,
    "PipeshardParallel, 2 stages, 1 micro-batch": lambda: _pipeline(2, 1),
    "PipeshardParallel, 2 stages, 2 micro-batches": lambda: _pipeline(2, 2),
    "PipeshardParallel, 4 stages, 4 micro-batches": lambda: _pipeline(4, 4),
    "PipeshardParallel, searched stages, 2 micro-batches": lambda: PipeshardParallel(
        num_micro_batches=2, layer_option=AutoLayerOption(), stage_option="auto"
    ),
}
NONE, SHARD, SHARD_2, DATA, DATA_2, ZERO_2, ZERO_3, PIPE_1, PIPE_2, PIPE_4, SEARCHED = METHODS
#: The methods of most rows.
USUAL = (SHARD, PIPE_2)


def _pipeline(n_stages: int, n_micro_batches: int) -> PipeshardParallel:
    layers = AutoLayerOption(layer_num=n_stages)
    return PipeshardParallel(num_micro_batches=n_micro_batches, layer_option=layers, stage_option="uniform")


MODELS: dict[str, Model] = {}


def model(
    packages: str, title: str, optimizer: str, methods: tuple[str, ...] = USUAL, *, x64: bool = False
) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    """Register a model. packages: separated by spaces."""

    def register(build: Callable[[], Training]) -> Callable[[], Training]:
        name = build.__name__
        if name in MODELS:
            raise ValueError(f"There are two models `{name}`.")
        MODELS[name] = Model(
            name=name,
            packages=tuple(packages.split()),
            model=title,
            optimizer=optimizer,
            methods=methods,
            x64=x64,
            build=build,
        )
        return build

    return register
