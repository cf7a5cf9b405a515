"""What a user holds of a compiled step: its plan, its programs, its placements; and the means to run it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from minialpa.plan import Plan
from minialpa.program import Accumulate, Program, Run


class Runner(Protocol):
    """A program on devices. A call runs a step on argument leaves and returns result leaves, without waiting."""

    def __call__(self, leaves: Sequence[Any], /) -> list[Any]: ...

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Argument leaves laid out as the step wants them. What the step donates never shares memory with `leaves`."""

    def hlo_texts(self) -> list[str]:
        """Compiled HLO of each function of the program."""

    def allocation_sizes(self) -> list[int]:
        """Bytes per device of each function of the program: arguments, results and temporaries."""

    def descriptions(self) -> Mapping[str, str]:
        """What there is to know of each process that takes part, by a name for it."""

    def sync(self) -> None:
        """Wait until the devices of the executable have made every array that was asked of them before."""
        self.runner.sync()


def _zeros(shape: tuple[int, ...], dtype: str) -> Any:
    if dtype.startswith("key<"):
        keys = jax.random.split(jax.random.key(0, impl=_key_impl(dtype)), max(1, int(np.prod(shape))))
        return keys.reshape(shape)
    return np.zeros(shape, dtype)


def _key_impl(dtype: str) -> str:
    return {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}[dtype[4:-1]]
