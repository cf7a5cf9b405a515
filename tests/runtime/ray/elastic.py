"""Training that goes on with fewer hosts and with more, beside the serial run of the same steps."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import minialpa
from minialpa import PipeshardParallel, UniformStageOption
from minialpa.testing import assert_allclose
from tests.runtime.ray.faults import AT_ONCE, FOREVER, make_batch, make_params, train_step


class Elastic:
    """A pipeline of two stages, each on half of the hosts of the session. The state is kept in NumPy arrays."""

    def __init__(self) -> None:
        self.state: Any = make_params()
        self.n_steps = 0
        self._serial = jax.jit(train_step(jax.value_and_grad))
        method = PipeshardParallel(
            num_micro_batches=2, layer_option="manual", stage_option=UniformStageOption(num_stages=2)
        )
        self._step = minialpa.parallelize(train_step(minialpa.value_and_grad), method=method)

    def advance(self) -> None:
        """A step that agrees with the serial run."""
        batch = make_batch(self.n_steps)
        actual = self._step(self.state, batch, AT_ONCE)
        expected = jax.tree.map(np.asarray, self._serial(self.state, batch, AT_ONCE))
        assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
        self.state, _ = expected
        self.n_steps += 1

    def endless_step(self) -> Any:
        """A weight after a step whose second stage never ends."""
        spins = AT_ONCE.copy()
        spins[1] = FOREVER
        params, _ = self._step(self.state, make_batch(self.n_steps), spins)
        return params["first"]
