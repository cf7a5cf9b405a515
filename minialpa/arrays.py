"""`RemoteArray`, an array whose data other processes hold; `own_copy`, a copy that the caller cannot change.

A `RemoteArray` knows its shape and dtype, which is enough to plan a call, and fetches its value when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

#: Attributes of jax's arrays that a remote array computes from its value in NumPy.
_COMPUTED_HERE = frozenset({
    *("T", "all", "any", "argmax", "argmin", "astype", "conj", "cumsum", "flatten", "imag", "max", "mean", "min"),
    *("prod", "ravel", "real", "reshape", "round", "squeeze", "std", "sum", "swapaxes", "take", "transpose", "var"),
})  # fmt: skip
#: On CPUs, jax uses a NumPy array without a copy if its address is a multiple of this.
_ALIGNMENT_BYTES = 64
#: Up to here, a second copy by jax is faster than the search for an aligned address.
_SMALL_BYTES = 1 << 16


def own_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy of the same class and dtype, in C order, which no other code can change.

    jax may read a NumPy array after the call that takes it has returned. On CPUs it may use the memory in place for as
    long as the jax array lives; `may_alias=False` prevents neither. jax uses this copy in place, unless it is small.
    """
    if array.nbytes <= _SMALL_BYTES:
        return array.copy()
    memory = np.empty(array.nbytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    copy: np.ndarray[Any, Any] = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy.view(type(array))


class RemoteArray(NDArrayOperatorsMixin):
    """An array whose data is elsewhere. NumPy functions, operators, `float`, `jnp.asarray` and methods fetch it.

    Functions of jax accept only jax's arrays: pass `jnp.asarray(x)`, or parallelize the function that calls them.

    Attributes:
        shape: shape of the whole array.
        dtype: dtype of the whole array.
        weak_type: whether jax promotes it to the dtypes of other operands, like Python numbers.
        in_host: whether it is in host memory (`pinned_host`).
        user_sharding: its sharding on a mesh of the user in this process; None without one.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    in_host: bool = False
    user_sharding: Any = None

    def _fetch(self) -> Any:
        """The value: a NumPy array, or a jax array of typed keys."""
        raise NotImplementedError

    def fetch_once(self) -> Any:
        """The value. Unlike `_fetch`, keeps no copy in this process."""
        return self._fetch()

    @classmethod
    def _fetch_all(cls, arrays: Sequence[Any]) -> None:
        for array in arrays:
            array._fetch()

    def _repr_html_(self) -> str:
        # For users: draws the array with all of minialpa.
        import minialpa

        return minialpa.visualize(self)._repr_html_()

    def block_until_ready(self) -> RemoteArray:
        """Wait until the value is computed. Raises the error that prevented its computation."""
        raise NotImplementedError

    def is_deleted(self) -> bool:
        """Whether the array was donated to a step."""
        raise NotImplementedError

    @property
    def stored_as(self) -> tuple[Any, ...]:
        """The arrays that hold the data: this array, or the arrays that it consists of."""
        return (self,)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return int(self.size * self.dtype.itemsize)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if jax.numpy.issubdtype(self.dtype, jax.dtypes.extended):
            return self._keys(dtype)
        return np.array(self._fetch(), dtype=dtype, copy=copy)

    def _keys(self, dtype: Any) -> Any:
        """NumPy has no arrays of typed keys, so `jax.device_get` returns keys, as for jax's arrays."""
        if dtype is not None:
            raise TypeError(f"Keys cannot be converted to {dtype}. `jax.random.key_data` gives the integers in them.")
        return self._fetch()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        given = [np.asarray(x) if isinstance(x, RemoteArray) else x for x in inputs]
        return getattr(ufunc, method)(*given, **kwargs)

    def __jax_array__(self) -> jax.Array:
        return jax.numpy.asarray(self._fetch())

    @property
    def at(self) -> Any:
        raise AttributeError(
            f"A `{type(self).__name__}` has no attribute `at`: its data is in other processes. `jax.device_get(x)` "
            "fetches it, and a parallelized function computes on it there."
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self._fetch()[index]

    def __iter__(self) -> Iterator[Any]:
        # Iteration by index would never end: arrays of jax clamp an index beyond the end.
        return iter(self._fetch())

    def __float__(self) -> float:
        return float(self._fetch())

    def __int__(self) -> int:
        return int(self._fetch())

    def __index__(self) -> int:
        return self._fetch().__index__()  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return bool(self._fetch())

    def __format__(self, spec: str) -> str:
        return format(self._fetch()[()], spec) if self.ndim == 0 else format(str(self), spec)

    def item(self, *index: int) -> Any:
        return self._fetch().item(*index)

    def tolist(self) -> Any:
        return self._fetch().tolist()

    def __reduce__(self) -> Any:
        """Pickles and copies are plain arrays."""
        is_keys = jax.numpy.issubdtype(self.dtype, jax.dtypes.extended)
        return (jax.numpy.asarray if is_keys else np.asarray, (self._fetch(),))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"


def _value_property(name: str) -> property:
    return property(lambda array: getattr(array._fetch(), name), doc=f"`{name}` of the value in NumPy.")


# Properties instead of `__getattr__`, because every call of a step looks up attributes that arrays lack.
for _name in _COMPUTED_HERE:
    setattr(RemoteArray, _name, _value_property(_name))


def prefetch(tree: Any) -> None:
    """Fetch the values of all remote arrays of a pytree together, so that later reads do not wait one by one.

    Raises WorkerError if a value was lost or donated.
    """
    by_class: dict[type[RemoteArray], list[RemoteArray]] = {}
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, RemoteArray):
            by_class.setdefault(type(leaf), []).append(leaf)
    for cls, arrays in by_class.items():
        cls._fetch_all(arrays)
