"""The README's first example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

README = Path(__file__).parents[1] / "README.md"


def test_first_example_trains() -> None:
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(example, str(README), "exec"), names)
    assert np.isfinite(float(names["loss"]))


def test_set_up_takes_two_commands() -> None:
    commands = re.findall(r"```bash\n(.*?)\n```", README.read_text(), re.DOTALL)
    assert commands == [
        'python -m pip install ".[models]" && minialpa demo',
        'python -m pip install -e ".[test]" && python -m pytest',
    ]
