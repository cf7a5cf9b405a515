"""What-if: a grid of cases becomes plans in worker processes; a case without a plan has a reason."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import minialpa
from minialpa.errors import MinialpaError
from minialpa.what_if import cases, factors, memory_sizes, numbers, planning, prices, what_if
from minialpa.what_if.outcomes import reason_of
from minialpa.what_if.planning import plan_cases
from minialpa.what_if.steps import load


def request(method: str = "ShardParallel", **prices: float) -> planning.Request:
    return planning.Request(method, "fast", None, prices)


# ---- the grid --------------------------------------------------------------------------------------------------------


def test_lists_of_the_command_line() -> None:
    assert numbers("8,16, 96") == (8, 16, 96)
    assert numbers("8..64") == (8, 16, 32, 64) == numbers("8..100")
    assert numbers("1..4,3,4") == (1, 2, 4, 3)
    assert memory_sizes("40GB, 80") == (40e9, 80e9) and memory_sizes("1.5GiB") == (1.5 * 2**30,)
    assert factors("0.5,1,2") == (0.5, 1.0, 2.0)
    assert prices("2.5", ["h100", "cpu"]) == {"h100": 2.5, "cpu": 2.5}
    assert prices("cpu=1,h100=2.5", ["h100", "cpu"]) == {"h100": 2.5, "cpu": 1.0}


@pytest.mark.parametrize("text", ["", "8,", "x", "0", "-8", "8..", "64..8", "8...64", "1.5"])
def test_a_wrong_list_of_numbers_names_the_right_form(text: str) -> None:
    with pytest.raises(MinialpaError, match=r"Write `8,16,64`, or `8\.\.64`"):
        numbers(text)


@pytest.mark.parametrize(
    "call",
    [
        lambda: memory_sizes("40TBs"),
        lambda: memory_sizes("0"),
        lambda: memory_sizes("1.2.3GB"),
        lambda: factors("1,x"),
        lambda: factors("inf"),
        lambda: factors("nan"),
        lambda: prices("1,2", ["h100"]),
        lambda: prices("h200=1", ["h100"]),
        lambda: prices("h100=x", ["h100"]),
    ],
)
def test_other_wrong_lists_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(MinialpaError):
        call()


def test_the_grid_has_all_combinations() -> None:
    grid = cases(["mlp", "gpt"], gpus=(4, 16), clusters=("h100", "cpu"), batches=(8, None), memory=(1e9, None))
    assert len(grid) == len(set(grid)) == 2 * 2 * 2 * 2 * 2
    assert {(case.hosts, case.devices) for case in grid} == {(1, 4), (2, 8)}
    assert {case.memory_bytes for case in grid if case.cluster == "cpu"} == {1e9, 4e9}
    assert {case.batch for case in grid} == {8, minialpa.models.build("mlp").batch_size}


def test_a_case_is_a_cluster_with_other_memory_and_links() -> None:
    (case,) = cases(["mlp"], gpus=(16,), memory=(40e9,), link_speeds=(2.0,))
    preset, spec = minialpa.ClusterSpec.preset("h100", num_hosts=2), case.spec()
    assert (spec.num_hosts, spec.devices_per_host, spec.device.memory_bytes) == (2, 8, 40e9)
    assert spec.intra_host.transfer_s(1e9) - spec.intra_host.alpha_s == pytest.approx(
        0.5e9 * preset.intra_host.beta_s_per_byte
    )
    assert spec.inter_host.beta_s_per_byte == pytest.approx(preset.inter_host.beta_s_per_byte / 2)


def test_values_that_no_cluster_or_model_has_are_refused() -> None:
    with pytest.raises(MinialpaError, match="12 GPUs are no whole number of hosts with 8 GPUs"):
        cases(["mlp"], gpus=(12,))
    with pytest.raises(MinialpaError, match=r"Do you mean `gpt-1\.3b`"):
        cases(["gpt-1.3"])
    with pytest.raises(MinialpaError, match="no cluster preset `h300`"):
        cases(["mlp"], clusters=("h300",))  # type: ignore[arg-type]
    with pytest.raises(MinialpaError, match="`mlp` has no sequences"):
        cases(["gpt", "mlp"], sequences=(8, 16))
    with pytest.raises(MinialpaError, match="must be positive"):
        cases(["mlp"], link_speeds=(0.0,))
    with pytest.raises(MinialpaError, match="no method `Magic`"):
        planning.run(cases(["mlp"]), method="Magic")


def test_batch_and_sequence_are_shapes_of_the_step() -> None:
    _, (_, examples) = load("gpt", 4, 12)
    assert examples["tokens"].shape == (4, 12)
    _, (_, images) = load("vit-h14", None, None)
    assert images["image"].shape == (4096, 224, 224, 3)


# ---- outcomes --------------------------------------------------------------------------------------------------------


def test_an_outcome_has_the_numbers_of_the_plan() -> None:
    (case,) = cases(["gpt"], gpus=(4,), batches=(8,))
    (one,) = plan_cases([case], request(h100=3.0))
    step, args = load("gpt", 8, None)
    plan = minialpa.plan(step, args, cluster=case.spec(), method=minialpa.ShardParallel(), planning_effort="fast")

    assert one.fits and one.verdict == "fits" and one.step_s == plan.cost.total_s
    assert one.peak_bytes == max(plan.cost.peak_bytes)
    assert one.tokens == pytest.approx(8 * 16 / plan.cost.total_s)
    assert sum(one.parts.values()) == pytest.approx(1.0)
    # 4 GPUs at 3 dollars per hour, for a million tokens
    assert one.cost == pytest.approx(4 * 3.0 * (1e6 / one.tokens) / 3600)
    assert one.mesh == "x".join(map(str, plan.stages[0].logical_shape)) and one.micro_batches == plan.n_micro_batches


def test_a_plan_for_more_memory_counts_for_less_memory() -> None:
    first, second, third = plan_cases(cases(["mlp"], memory=(80e9, 40e9, 4e3)), request())
    assert first.step_s == second.step_s and second.used == pytest.approx(2 * (first.used or 0))
    assert third.verdict == "does not fit" and third.binds == "memory" and third.step_s is None
    assert third.reason == "The arguments of the step need at least 6.85 kB per device, and the devices have 4 kB."


def test_a_case_that_does_not_fit_does_not_fit_in_less_memory() -> None:
    larger, smaller = plan_cases(cases(["mlp"], memory=(8e3, 7.5e3)), request())
    assert "needs 15.4 kB per device, 7.43 kB above the limit of 8 kB" in larger.reason and "\n" not in larger.reason
    assert smaller.reason == f"As with 8 kB: {larger.reason}"


def test_memory_binds_if_a_device_is_full() -> None:
    (free,) = plan_cases(cases(["mlp"], gpus=(1,)), request())
    assert free.peak_bytes is not None and free.binds in free.parts
    full, same = plan_cases(cases(["mlp"], gpus=(1,), memory=(80e9, free.peak_bytes / 0.97)), request())
    assert (full.binds, same.binds) == (free.binds, "memory")


def test_a_step_that_cannot_be_planned_is_an_outcome_with_the_reason() -> None:
    (one,) = plan_cases(cases(["mlp"], batches=(3,)), request("DataParallel"))
    assert not one.fits and "3" in one.reason
    wrong = [dataclasses.replace(case, sequence=8) for case in cases(["mlp"])]
    (other,) = plan_cases(wrong, request())
    assert (other.verdict, other.binds) == ("fails", "") and other.reason.startswith("TypeError: ")


def test_clusters_share_a_trace() -> None:
    planning.traced_step.cache_clear()
    for case in cases(["mlp"], gpus=(1, 2), clusters=("h100", "cpu")):
        plan_cases([case], request())
    assert planning.traced_step.cache_info().misses == 1


def test_a_reason_is_one_sentence() -> None:
    assert (
        reason_of(MinialpaError("It needs 1.5 GB per device. Use `more`.\nThe rest")) == "It needs 1.5 GB per device."
    )
    assert reason_of(MinialpaError("It is too large. It needs 2 GB. Use more.")) == "It is too large. It needs 2 GB."
    assert reason_of(KeyError("x")) == "KeyError: 'x'"
    assert len(reason_of(ValueError("x" * 999))) == 220


# ---- processes -------------------------------------------------------------------------------------------------------


def test_processes_plan_the_grid_in_order_and_keep_the_plans(tmp_path: Path) -> None:
    axes: dict[str, Any] = {"gpus": (1, 2), "clusters": ("cpu",), "memory": (1e3, None)}
    grid = cases(["mlp"], **axes)
    found = what_if(["mlp"], **axes, processes=2, plan_cache=tmp_path, prices={"cpu": 1.0})
    assert [one.case for one in found.outcomes] == list(grid)
    assert [one.fits for one in found.outcomes] == [False, True] * 2
    assert len(list(tmp_path.glob("*.json"))) == 2

    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["verdict"] for row in rows] == ["does not fit", "fits"] * 2
    assert float(rows[1]["step_s"]) == found.outcomes[1].step_s and rows[0]["step_s"] == ""
    assert json.loads(found.to_json())["cases"][3]["gpus"] == 2
    assert len(found.text().splitlines()) == 5


_LONG = """
import sys
if __name__ == "__main__":
    from minialpa.what_if import cases, run
    grid = cases(["mlp"], gpus=(1, 2, 4, 8), batches=tuple(range(2, 400, 2)))
    run(grid, processes=2, plan_cache=sys.argv[1])
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_an_interrupt(tmp_path: Path, sent: signal.Signals) -> None:
    """Neither a Ctrl-C that only this process gets, nor its sudden death."""
    script, plans = tmp_path / "long.py", tmp_path / "plans"
    script.write_text(_LONG)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(plans)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _wait(lambda: parent.poll() is not None or any(plans.glob("*.json")))
        assert parent.poll() is None, parent.communicate()[1]
        children = _children(parent.pid)
        assert len(children) >= 2

        parent.send_signal(sent)
        _, errors = parent.communicate(timeout=120)
        assert ("KeyboardInterrupt" in errors) == (sent == signal.SIGINT)
        assert "Process" not in errors, "no traceback of a child"
        _wait(lambda: not any(map(_is_alive, children)))
    finally:
        if parent.poll() is None:
            parent.kill()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def _wait(is_done: Callable[[], bool], most_s: float = 120.0) -> None:
    end_s = time.monotonic() + most_s
    while not is_done():
        assert time.monotonic() < end_s, "it takes too long"
        time.sleep(0.05)


# ---- models of users -------------------------------------------------------------------------------------------------

_MODEL = """
import jax, jax.numpy as jnp, minialpa

def make(batch_size=4, seq_len=8):
    def step(params, batch):
        loss, grads = minialpa.value_and_grad(lambda p, x: jnp.mean((x @ p) ** 2))(params, batch)
        return params - 0.1 * grads, loss
    return step, jnp.ones((seq_len, 3)), jnp.ones((batch_size, seq_len))

def short(batch_size=4):
    return make(batch_size)
"""


def test_a_function_of_the_user_gets_batch_and_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_model.py").write_text(_MODEL)
    monkeypatch.chdir(tmp_path)
    _, (params, batch) = load("users_model.py:make", 6, 10)
    assert (params.shape, batch.shape) == ((10, 3), (6, 10))
    (one,) = plan_cases(cases(["users_model.py:make"], batches=(6,), sequences=(10,)), request())
    assert one.fits and one.examples is not None
    with pytest.raises(MinialpaError, match="no parameter `seq_len`"):
        cases(["users_model.py:short"], sequences=(10,))
