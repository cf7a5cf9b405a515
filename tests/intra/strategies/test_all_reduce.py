"""All-reduces of every kind and dtype give, on every device, the reduction that one device computes of all parts."""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from minialpa.intra.strategies.all_reduce import all_reduce, is_gathered
from minialpa.rules.factors import Reduction, combine_along

N = 4
OF_BITS = ("and", "or", "xor")
INTEGERS = ("int2", "uint4", "int8", "uint16", "int32")
FLOATS = ("float8_e5m2", "float8_e4m3fn", "float16", "bfloat16", "float32")


def parts() -> dict[tuple[str, str], jax.Array]:
    """By reduction and dtype, an array [N, 16] with a row for each device: integers, and special floats."""
    rng = np.random.default_rng(0)
    found = {}
    for how in get_args(Reduction):
        for dtype in INTEGERS:
            bits = jnp.iinfo(dtype)
            if bits.bits < 8 and how in OF_BITS:
                continue  # jax has no such reductions
            drawn = rng.integers(int(bits.min), int(bits.max), (N, 16), endpoint=True)
            found[how, dtype] = jnp.asarray(drawn).astype(dtype)
        if how not in ("sum", "prod"):
            found[how, "bool"] = jnp.asarray(rng.random((N, 16)) < 0.7)
        if how in ("max", "min"):
            for dtype in FLOATS:
                largest = float(jnp.finfo(dtype).max)
                special = [0.0, -0.0, 1.5, -1.5, largest, -largest, np.nan, np.inf, -np.inf]
                found[how, dtype] = jnp.asarray(rng.choice(special, (N, 16)), jnp.float32).astype(dtype)
    return found


def bits_of(x: jax.Array) -> bytes:
    """The bytes of an array; all NaN are equal, and -0 differs from 0."""
    wide = np.asarray(x).astype(np.float32) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)
    return np.where(wide != wide, np.nan, wide).tobytes()


def test_every_device_has_the_reduction_of_all_parts() -> None:
    given = parts()

    def reduce_all(rows: Any) -> Any:
        return {key: all_reduce(row[0], ("x",), key[0])[None] for key, row in rows.items()}

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:N]), ("x",))
    mapped = jax.shard_map(reduce_all, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False)
    found = jax.jit(mapped)({key: np.asarray(x) for key, x in given.items()})
    expected = jax.jit(lambda xs: {key: combine_along(key[0], x) for key, x in xs.items()})(given)
    for key, wanted in expected.items():
        assert found[key].dtype == wanted.dtype
        assert {bits_of(row) for row in found[key]} == {bits_of(wanted)}, key


def test_only_what_no_collective_computes_is_gathered() -> None:
    assert not any(is_gathered(how, np.dtype("int8")) for how in ("sum", "max", "min"))
    assert all(is_gathered(how, np.dtype("int8")) for how in (*OF_BITS, "prod"))
    assert [how for how in OF_BITS if is_gathered(how, np.dtype("bool"))] == ["xor"]
    assert is_gathered("max", np.dtype("complex64"))
    assert not is_gathered("sum", np.dtype("complex64"))
