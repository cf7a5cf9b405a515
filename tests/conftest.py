"""Eight virtual CPU devices, strict JAX, repeatable hypothesis. Ray tests run where Ray is installed."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections import Counter
from collections.abc import Iterator

from tests.xla_flags import FLAGS

# jax reads this once, when it starts its backend, so it must precede all imports of jax.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", *FLAGS)
).strip()
# Ray's default for its own clusters. A process that joins one cluster with authentication needs it for all.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import jax
import pytest

from tests.skips import skip

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# A failing test shows every frame.
jax.config.update("jax_traceback_filtering", "off")

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def own_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds the plans of another test, or of the user."""
    from minialpa.api import plan_folder

    monkeypatch.setattr(plan_folder, "users_cache", lambda name: None)


@pytest.fixture(scope="module", autouse=True)
def own_training_steps() -> None:
    """No function of a file follows a training step of the files that its process ran before."""
    from minialpa import session

    if session._Current.session is not None:
        session._Current.session.training_steps.clear()


@pytest.fixture
def fresh_session() -> Iterator[None]:
    """A test begins and ends without a session."""
    import minialpa

    minialpa.shutdown()
    yield
    minialpa.shutdown()


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes the sharding rules that a test registers."""
    from minialpa.rules import known_rules, registered

    for module, name in ((known_rules, "_RULES"), (registered, "_PRIMITIVES"), (registered, "_TARGETS")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    yield
    known_rules.forget()


#: How many programs jax may have lowered since its caches were cleared.
MOST_LOWERED = 400


class _Lowered:
    """Clears the caches of jax between two tests when it has lowered many programs.

    jax keeps the MLIR of each program in a separate context of 1 MB. The more contexts exist, the longer it takes to
    make one: with 600 of them, a small program takes a quarter longer to compile.
    """

    def __init__(self) -> None:
        self.n = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, seconds: float, **_: object) -> None:
        self.n += event == "/jax/core/compile/jaxpr_to_mlir_module_duration"

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if self.n >= MOST_LOWERED:
            self.n = 0
            jax.clear_caches()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Lowered())


DRAWN_STEPS = "tests/equivalence/test_engine.py"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips the tests of Ray where Ray is not installed."""
    if item.get_closest_marker("ray") and importlib.util.find_spec("ray") is None:
        skip("needs Ray: python -m pip install -e '.[ray]'")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of one file into one process, which keeps their shared values, and all Ray tests into one process.

    Ray tests come first, because they take longest and the other processes work in the meantime. Then come the drawn
    steps, which would keep one process busy at the end. Then come files by their number of tests, the largest first.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))

    n_tests = Counter(_group(item) for item in items)

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        group = _group(item)
        return item.get_closest_marker("ray") is None, group != DRAWN_STEPS, -n_tests[group]

    items.sort(key=place)


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])


@pytest.fixture
def seed() -> int:
    """The seed of every random number in a test."""
    return 0


@pytest.fixture
def key(seed: int) -> jax.Array:
    """A jax key made from `seed`."""
    return jax.random.key(seed)
