"""minialpa: automatic intra- and inter-operator parallelism for JAX training steps."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from minialpa.public import *  # noqa: F403
    from minialpa.public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """Load all public names when one is asked for. Workers use none, and start in two thirds of the time."""
        if not name.startswith("_") or name == "__all__":
            public = importlib.import_module("minialpa.public")
            globals().update({known: getattr(public, known) for known in public.__all__}, __all__=public.__all__)
            if name in globals():  # also a module of the package, once something has loaded it
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
