"""What jax and Ray keep private is used in one module for each: a new version breaks these two, and no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "minialpa"
#: The modules that may use private names, each of one library.
DOORS = {"jax": "support/private_jax.py", "ray": "runtime/ray/private_ray.py"}
LIBRARIES = {"jax": ("jax", "jaxlib"), "ray": ("ray",)}
#: Names without an underscore that are in no reference: modules, and attributes of equations, primitives and arrays.
UNDOCUMENTED_MODULES = ("jax.interpreters",)
UNDOCUMENTED_ATTRIBUTES = {
    "abstract_eval", "ctx", "get_bind_params", "on_device_size_in_bytes", "source_info", "unsafe_buffer_pointer",
}  # fmt: skip


def _is_private(name: str) -> bool:
    """Whether a part of a dotted name is private. Names such as `__version__` are not."""
    hidden = any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
    return hidden or any(f"{name}.".startswith(f"{module}.") for module in UNDOCUMENTED_MODULES)


def _dotted(node: ast.AST) -> str:
    """`jax.lax.add` for such a chain of attributes, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := _dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """(name in the module, full dotted name) for each imported name."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        else:
            yield alias.asname or alias.name.partition(".")[0], alias.name


def private_names(source: str, libraries: tuple[str, ...]) -> list[str]:
    """Private names of the libraries that a module uses."""
    if "jax" not in libraries and not any(library in source for library in libraries):
        return []
    nodes = list(ast.walk(ast.parse(source)))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    of_library = [pair for node in imports for pair in _imported(node) if pair[1].partition(".")[0] in libraries]
    found = [name for _, name in of_library if _is_private(name)]

    aliases = {alias for alias, _ in of_library}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name = _dotted(node)
            is_hidden = name.partition(".")[0] in aliases and _is_private(name)
            if is_hidden or ("jax" in libraries and node.attr in UNDOCUMENTED_ATTRIBUTES):
                found.append(name or node.attr)
        elif isinstance(node, ast.Call) and _dotted(node.func).partition(".")[0] in aliases:
            found += [f"{_dotted(node.func)}({k.arg}=...)" for k in node.keywords if k.arg and k.arg.startswith("_")]
        elif isinstance(node, ast.keyword) and "jax" in libraries and node.arg in UNDOCUMENTED_ATTRIBUTES:
            found.append(f"{node.arg}=...")
    return found


@pytest.mark.parametrize("library", DOORS)
def test_one_module_uses_private_names(library: str) -> None:
    users = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found = private_names(path.read_text(encoding="utf-8"), LIBRARIES[library])
        if found:
            users[str(path.relative_to(PACKAGE))] = found
    assert set(users) == {DOORS[library]}, users


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax.experimental.x import _y",
        "from jax.interpreters import ad",
        "import jax as j\nj.interpreters.ad._f",
        "import jax\njax.jit(f, _options=1)",
        "def f(eqn):\n    return eqn.source_info",
        "def f(eqn):\n    return eqn.replace(ctx=None)",
        "from jaxlib import _jax",
    ],
)
def test_the_check_sees_private_names(source: str) -> None:
    assert private_names(source, LIBRARIES["jax"])


@pytest.mark.parametrize(
    "source",
    [
        "import jax\nprint(jax.__version__)",
        "from jax.extend import core as jex\njex.Var(1)",
        "class A:\n    def f(self):\n        return self._jax._src",
        "from minialpa.x import _y",
    ],
)
def test_the_check_sees_no_others(source: str) -> None:
    assert not private_names(source, LIBRARIES["jax"])
