"""Imports point one way: what plans never imports what runs. Neither planning nor `import minialpa` needs a device.

What jax and Ray keep private is used in one module for each: a new version breaks these two, and no other.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import pytest

import minialpa

PACKAGE = Path(__file__).parents[1] / "minialpa"
ARCHITECTURE = PACKAGE.parent / "ARCHITECTURE.md"

#: Packages whose sub-packages count by themselves. All others count as one.
NESTED = ("inter", "intra", "intra.memory", "runtime")
#: What a user starts, or sees in front of the machinery.
FRONT = {"__main__", "__init__", "cli", "compat", "data", "demo", "models", "testing", "training", "util", "what_if"}
#: Methods that call what stands above their class, for users.
SHORTHANDS = {
    ("arrays", "minialpa"),
    ("plan.plan", "minialpa"),
    ("plan.plan", "minialpa.report.explain"),
    ("plan.plan", "minialpa.report.page"),
    ("plan.plan", "minialpa.report.screen"),
    ("plan.plan", "minialpa.report.trace"),
}
PLANNING = {"cluster", "cost", "inter", "intra", "options", "plan", "programs", "rules", "sharding", "tracing"}
STDLIB = sys.stdlib_module_names


@dataclass(frozen=True)
class Import:
    """`module` (file, dotted below the package) imports `target` (dotted); lazy inside a function."""

    module: str
    target: str
    lazy: bool
    typing_only: bool

    @property
    def part(self) -> str:
        """First name of the importing module below the package."""
        return self.module.split(".")[0]

    @property
    def package(self) -> str:
        return _package_of(self.module)

    @property
    def inner(self) -> str | None:
        """First name of the target below the package, None for other packages; `__init__` for the package itself."""
        parts = self.target.split(".")
        return None if parts[0] != "minialpa" else parts[1] if len(parts) > 1 else "__init__"

    @property
    def inner_package(self) -> str | None:
        """The package of the target, None outside of minialpa."""
        return None if self.inner is None else _package_of(self.target.partition(".")[2] or "__init__")


def _package_of(module: str) -> str:
    """The package of a module, or of a name in one; both dotted, below minialpa."""
    package, *inside = module.split(".")
    while package in NESTED and inside and PACKAGE.joinpath(*package.split("."), inside[0]).is_dir():
        package = f"{package}.{inside.pop(0)}"
    return package


def _targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0 and node.module is not None, "imports are absolute"
    below = node.module.partition(".")[2].replace(".", "/")
    if node.module.partition(".")[0] == "minialpa" and (PACKAGE / below).is_dir():
        named = [PACKAGE / below / alias.name for alias in node.names]
        if all(path.is_dir() or path.with_suffix(".py").exists() for path in named):
            return [f"{node.module}.{alias.name}" for alias in node.names]
    return [node.module]


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports_of(path: Path) -> Iterator[Import]:
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)

    def visit(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        blocks = ("body", "orelse", "finalbody", "handlers", "cases")
        statements = [one for block in blocks for one in getattr(node, block, ())]
        for statement in statements:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                for target in _targets(statement):
                    yield Import(module, target, lazy, typing_only)
            inside = lazy or isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            guard = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)
            yield from visit(statement, inside, typing_only or guard)

    yield from visit(_tree(path), False, False)


@dataclass(frozen=True)
class Package:
    """A line of the table in ARCHITECTURE.md.

    Attributes:
        level: it may import packages of lower levels.
        imports: its direct imports, without imports that another one of them implies.
    """

    level: int
    imports: tuple[str, ...]


def _table() -> dict[str, Package]:
    """The packages by name, as ARCHITECTURE.md lists them. Without a number, a line has the level of the line above."""
    section = ARCHITECTURE.read_text(encoding="utf-8").partition("## Packages")[2]
    level, packages = -1, {}
    for line in section.split("```")[1].strip("\n").splitlines():
        number, name, imports = re.fullmatch(r"(..)  (\S+) {2,}(\S+(?: \S+)*) {2,}\S.*", line).groups()  # type: ignore[union-attr]
        level = int(number) if number.strip() else level
        packages[name] = Package(level, tuple(imports.split(", ")) if imports != "-" else ())
    return packages


@functools.cache
def _imports() -> list[Import]:
    """All imports of the package. Reading it takes a second."""
    return [i for path in sorted(PACKAGE.rglob("*.py")) for i in _imports_of(path)]


PACKAGES = _table()


def _lines(found: list[Import]) -> list[str]:
    return [f"{i.module} imports {i.target}" for i in found]


def test_every_package_is_in_the_table() -> None:
    packages = {
        _package_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts)) for path in PACKAGE.rglob("*.py")
    }
    assert packages - PACKAGES.keys() == FRONT
    assert not PACKAGES.keys() - packages
    levels = [package.level for package in PACKAGES.values()]
    assert levels == sorted(levels, reverse=True), "it is drawn from the top down"


def test_the_table_has_the_imports_of_the_code() -> None:
    downward = [i for i in _imports() if (i.module, i.target) not in SHORTHANDS]
    arrows = {(i.package, i.inner_package) for i in downward if i.package != i.inner_package}
    house = nx.DiGraph((a, b) for a, b in arrows if a in PACKAGES and b in PACKAGES)
    reduced = nx.transitive_reduction(house)
    assert {name: set(package.imports) for name, package in PACKAGES.items()} == {
        name: set(reduced[name]) for name in PACKAGES
    }


def test_architecture_names_files_that_exist() -> None:
    paths = [f"/{path.relative_to(PACKAGE.parent)}" for path in PACKAGE.parent.rglob("*.py")]
    named = set(re.findall(r"[\w/]+\.py", ARCHITECTURE.read_text(encoding="utf-8")))
    assert not {name for name in named if not any(path.endswith(f"/{name}") for path in paths)}


def test_imports_point_down() -> None:
    wrong = []
    for i in _imports():
        if i.package not in PACKAGES or i.inner_package in (None, i.package) or (i.module, i.target) in SHORTHANDS:
            continue
        if i.inner_package not in PACKAGES or PACKAGES[i.inner_package].level >= PACKAGES[i.package].level:
            wrong.append(i)
    assert not _lines(wrong)


def test_classes_have_different_names() -> None:
    """`compat.alpa` has the names of Alpa."""
    paths = [path for path in PACKAGE.rglob("*.py") if "compat" not in path.parts]
    classes = [node.name for path in paths for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef)]
    assert len(classes) == len(set(classes))


def test_every_package_has_a_readme() -> None:
    """One or two pages, for a reader who opens the package first."""
    packages = {path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE, PACKAGE / "compat" / "alpa"}
    lengths = {path: len((path / "README.md").read_text(encoding="utf-8").splitlines()) for path in sorted(packages)}
    assert not {path for path, n_lines in lengths.items() if not 10 <= n_lines <= 45}


def test_modules_of_one_package_do_not_import_each_other_in_a_circle() -> None:
    """Nor by imports inside of functions, which hide a circle and do not break it."""
    inner = [i for i in _imports() if i.inner is not None and (not i.lazy or i.package == i.inner_package)]
    modules = nx.DiGraph((f"minialpa.{i.module}", i.target) for i in inner)
    assert next(nx.simple_cycles(modules), None) is None


def test_planning_knows_nothing_of_clusters_that_run_and_reads_no_environment() -> None:
    planning = [i for i in _imports() if i.part in PLANNING]
    assert not _lines([i for i in planning if i.target.split(".")[0] in ("cupy", "flax", "optax", "os", "ray")])


def test_interfaces_of_other_systems_stand_on_modules_that_users_know() -> None:
    public = {"__init__", "arrays", "compat", "errors", "session", "testing", "util"}
    assert {i.inner for i in _imports() if i.part == "compat" and i.inner is not None} <= public


def test_other_packages_are_those_that_are_installed_with_it() -> None:
    allowed = {"highspy", "jax", "jinja2", "markupsafe", "minialpa", "numba", "numpy", "pulp", "rich", "scipy"}
    front = {"cli", "demo", "models"}  # flax and optax, of the `models` extra
    always = [i for i in _imports() if not i.lazy and not i.typing_only and i.part not in front]
    found = {(i.part, i.target.split(".")[0]) for i in always}
    assert not {(part, name) for part, name in found if name not in allowed and name not in STDLIB} - {
        ("checkpoints", "etils"),  # the paths of orbax
        ("checkpoints", "orbax"),
        ("runtime", "cupy"),
        ("runtime", "ray"),
    }


_PLANS = """
import sys
from minialpa.plan import Plan
import minialpa
heavy = {"numba", "pulp", "highspy", "rich", "ray", "flax", "optax", "orbax", "minialpa.inter.pipeline"}
assert not heavy & sys.modules.keys() and "minialpa.runtime.local" not in sys.modules
assert minialpa.plan is minialpa.api.functions.plan, "the package `plan` hides the function"

import jax, jax.numpy as jnp, numpy as np
from jax._src import xla_bridge

assert not xla_bridge.backends_are_initialized(), "import minialpa"
table = np.arange(8, dtype=np.float32)

def step(state, batch, key, mode="train"):
    def loss(p):
        x = jax.nn.gelu(batch["x"] @ p["w"])
        x = x * jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)
        minialpa.mark_pipeline_boundary()
        x = jax.checkpoint(lambda x: jax.nn.softmax(x @ p["v"] + table))(x)
        return jnp.mean((x - batch["y"]) ** 2), {"constant": 1.0, "first": x[0], "total": jnp.sum(x)}
    (value, aux), grads = minialpa.value_and_grad(loss, has_aux=True)(state["p"])
    p = jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], grads)
    return {"p": p, "step": state["step"] + 1}, value, aux["total"], jax.random.split(key)[0], 3.0

S = jax.ShapeDtypeStruct
weights = {name: S((8, 8), jnp.float32) for name in ("w", "v", "unused")}
batch = {name: S((32, 8), jnp.float32) for name in ("x", "y")}
cluster = minialpa.ClusterSpec.preset("a100-80gb", num_hosts=2, devices_per_host=4)
layers = minialpa.AutoLayerOption(layer_num=2)
key = S((2,), jnp.uint32)
args = ({"p": weights, "step": 0}, batch, key)
minialpa.parallelize(step, method=minialpa.ShardParallel(devices=minialpa.LogicalMesh((8,)))).plan(*args)
assert not heavy - {"rich", "minialpa.inter.pipeline"} & sys.modules.keys(), "a small step needs no solver"
for method in (None, minialpa.PipeshardParallel(num_micro_batches=4, layer_option=layers, stage_option="auto")):
    plan = minialpa.plan(step, args, cluster=cluster, method=method)
    minialpa.Plan.from_json(plan.to_json()).summary()
    assert not xla_bridge.backends_are_initialized(), method
assert minialpa.parallelize(step, method=minialpa.ShardParallel(devices=cluster)).plan(*args).stages
assert not xla_bridge.backends_are_initialized()
assert "minialpa.runtime.local" not in sys.modules
"""


def test_importing_is_light_and_planning_starts_no_backend() -> None:
    """Neither loads modules of other features, which take longer than all the rest. The platform does not exist."""
    done = subprocess.run(
        [sys.executable, "-c", _PLANS],
        env={**os.environ, "JAX_PLATFORMS": "a platform that does not exist"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_package_has_its_public_names_and_no_others() -> None:
    assert set(minialpa.__all__) <= set(dir(minialpa))
    assert all(hasattr(minialpa, name) for name in minialpa.__all__)
    with pytest.raises(AttributeError, match="module 'minialpa' has no attribute 'paralelize'"):
        minialpa.paralelize  # noqa: B018


# ---- private names ---------------------------------------------------------------------------------------------------

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


def private_names(tree: ast.Module, libraries: tuple[str, ...]) -> list[str]:
    """Private names of the libraries that a module uses."""
    nodes = list(ast.walk(tree))
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
        is_named = library == "jax" or re.search(rf"\b{library}\b", path.read_text(encoding="utf-8"))
        found = private_names(_tree(path), LIBRARIES[library]) if is_named else []
        if found:
            users[str(path.relative_to(PACKAGE))] = found
    assert set(users) == {DOORS[library]}, users


PRIVATE = (
    "import jax._src.core",
    "from jax.experimental.x import _y",
    "import jax as j\nj.interpreters.ad._f",
    "import jax\njax.jit(f, _options=1)",
    "def f(eqn):\n    return eqn.replace(ctx=None)",
    "from jaxlib import _jax",
)
PUBLIC = (
    "import jax\nprint(jax.__version__)",
    "from jax.extend import core as jex\njex.Var(1)",
    "class A:\n    def f(self):\n        return self._jax._src",
    "from minialpa.x import _y",
)


@pytest.mark.parametrize("source", PRIVATE + PUBLIC)
def test_the_check_sees_private_names_and_no_others(source: str) -> None:
    assert bool(private_names(ast.parse(source), LIBRARIES["jax"])) == (source in PRIVATE)
