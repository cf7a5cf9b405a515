"""Functions to compile for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from minialpa.inter.lower.exported_functions import export_function
from minialpa.programs.program import Function
from minialpa.xla_gpu.targets import TARGETS
from minialpa.xla_gpu.worker import CompileRequest


def request(
    fun: Callable[..., Any],
    arguments: Sequence[jax.ShapeDtypeStruct],
    *,
    n_devices: int = 1,
    donated: tuple[int, ...] = (),
) -> CompileRequest:
    """A function `f` for H100s. Several devices split the first dimension of all arguments and results."""

    def flat(*args: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(fun(*args)))

    results = jax.eval_shape(flat, *arguments)
    in_avals, out_avals = (tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in xs) for xs in (arguments, results))
    spec = PartitionSpec("x") if n_devices > 1 else PartitionSpec()
    function = Function(
        name="f",
        mesh=0,
        fun=flat,
        in_avals=in_avals,  # type: ignore[arg-type]
        in_specs=(spec,) * len(in_avals),
        out_avals=out_avals,  # type: ignore[arg-type]
        out_specs=(spec,) * len(out_avals),
        donated=donated,
    )
    return CompileRequest(export_function(function, (n_devices,), "cuda"), (n_devices,), 1, TARGETS["h100"])
