"""The HTML report of a plan is one valid file, and its numbers are the numbers of the plan."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import jax
import pytest

import minialpa
from minialpa import ClusterSpec, Plan, ShardParallel
from minialpa.plan.text import ranges_text, seconds_text
from minialpa.report.drawings import pipeline_picture, shard_pictures, si_text
from minialpa.report.figures import collective_seconds, op_seconds, other_seconds, stage_memory, throughput, time_parts
from minialpa.report.findings import findings
from minialpa.report.page import card, page
from minialpa.report.rows import array_rows, collective_rows, operator_rows
from minialpa.report.tree import ModuleNode, module_tree
from minialpa.report.words import number_text, percent_text
from minialpa.sharding import Spec
from minialpa.support.sizes import bytes_text
from tests.plans import make_batch, make_params, pipeline_plan, shard_plan, train_step
from tests.report.page_parts import Element, gpt_plan, read_page
from tests.report.test_trace import check_of, function

PLANS = {
    "pipeline": lambda: gpt_plan(4),
    "one stage": lambda: gpt_plan(1),
    "two small stages": pipeline_plan,
    "no modules": shard_plan,
}


def micro(seconds: float) -> str:
    """The page has the sign of micro."""
    return re.sub(r" us\b", " µs", seconds_text(seconds))


@functools.cache
def text_of(name: str) -> str:
    return page(PLANS[name]())


@functools.cache
def page_of(name: str) -> Element:
    return read_page(text_of(name))


every_plan = pytest.mark.parametrize("name", PLANS)


# ---- one valid file --------------------------------------------------------------------------------------------------


@every_plan
def test_ids_are_unique_and_references_to_ids_have_targets(name: str) -> None:
    elements = page_of(name).all()
    ids = [one.attributes["id"] for one in elements if "id" in one.attributes]
    assert len(ids) == len(set(ids))

    for one in elements:
        for attribute in ("aria-labelledby", "for", "data-filter", "data-view"):
            assert set((one.attributes.get(attribute) or "").split()) <= set(ids)
        link = one.attributes.get("href") or ""
        assert not link.startswith("#") or link[1:] in ids


@every_plan
def test_headings_and_landmarks_have_an_order(name: str) -> None:
    levels = [int(one.tag[1]) for one in page_of(name).all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(level <= before + 1 for before, level in itertools.pairwise(levels))
    assert all(len(page_of(name).all(tag)) == 1 for tag in ("nav", "main", "footer"))


@every_plan
def test_tables_have_captions_and_scopes(name: str) -> None:
    for table in page_of(name).all("table"):
        assert table.all("caption")[0].text
        assert all(cell.attributes.get("scope") in ("col", "row") for cell in table.all("th"))
        widths = {len(row.all("th", "td")) for row in table.all("tr")}
        assert len(widths) == 1, table.attributes


@every_plan
def test_pictures_have_names(name: str) -> None:
    def check(element: Element, is_inside: bool) -> None:
        if element.tag == "svg" and not is_inside:
            assert element.attributes["role"] == "img"
            assert "aria-label" in element.attributes or element.all("title")
        for one in element.inside:
            if isinstance(one, Element):
                check(one, is_inside or element.tag == "svg")

    check(page_of(name), False)


@every_plan
def test_a_page_loads_no_other_file(name: str) -> None:
    for one in page_of(name).all():
        for attribute in ("href", "src", "srcset", "action", "xlink:href"):
            link = one.attributes.get(attribute) or "#"
            assert link.startswith(("#", "data:")), link
    assert not re.search(r"url\(|@import|fetch\(|https?://", text_of(name))


def test_names_of_arrays_are_escaped() -> None:
    plan = shard_plan()
    value = dataclasses.replace(plan.inputs[0], path="params['<script>alert(1)</script>']")
    text = page(dataclasses.replace(plan, inputs=(value, *plan.inputs[1:])), title="<b>title</b>")
    assert text.count("<script>") == 1 and "<b>title</b>" not in text
    assert "&lt;script&gt;" in text


def test_equal_plans_have_equal_pages() -> None:
    assert page(Plan.from_json(gpt_plan(4).to_json())) == text_of("pipeline")


@pytest.mark.parametrize(("n_stages", "n_micro_batches"), [(4, 128), (4, 1024)])
def test_a_page_with_thousands_of_passes_stays_below_two_megabytes(n_stages: int, n_micro_batches: int) -> None:
    text = page(dataclasses.replace(gpt_plan(n_stages), n_micro_batches=n_micro_batches))
    assert len(text.encode()) < 2e6
    tasks = [int(row[2]) for row in read_page(text).rows("lane-numbers")]
    assert tasks == [2 * n_micro_batches + 1] * n_stages, "the table counts passes that the picture joins"


# ---- numbers ---------------------------------------------------------------------------------------------------------


@every_plan
def test_the_header_has_the_figures_of_the_plan(name: str) -> None:
    plan = PLANS[name]()
    header = page_of(name).all("header")[0]
    values = [one.text for one in header.all("dd")]
    rates = throughput(plan)
    assert values[0].startswith(micro(plan.cost.total_s))
    expected = [number_text(n) for n in (rates.tokens, rates.examples) if n is not None]
    assert values[1 : 1 + len(expected)] == expected
    assert rates.utilisation is not None and values[-2].startswith(percent_text(rates.utilisation))
    fullest = max((stage_memory(plan, k) for k in range(len(plan.stages))), key=lambda one: one.used)
    assert bytes_text(fullest.limit_bytes) in values[-1] and percent_text(fullest.used) in values[-1]

    for part in time_parts(plan).values():
        assert not part or f"{micro(part * plan.cost.total_s)} ({percent_text(part)})" in header.text


@every_plan
def test_all_findings_are_on_the_page_in_their_order(name: str) -> None:
    text = page_of(name).by_id("findings").text
    places = [text.index(one.text.replace("`", "")) for one in findings(PLANS[name]())]
    assert places == sorted(places)


def test_a_plan_without_faults_has_a_sentence_instead_of_findings() -> None:
    one = ClusterSpec.preset("cpu", num_hosts=1, devices_per_host=1)
    args = (jax.ShapeDtypeStruct((16,), "float32"),)
    plan = minialpa.plan(lambda x: x + 1, args, cluster=one, method=ShardParallel())
    found = read_page(page(plan))
    assert not findings(plan) and "no known fault" in found.by_id("findings").text
    assert "exchange no data" in found.by_id("communication").text
    assert "no matrix product" in found.by_id("roofline").text


@every_plan
def test_tables_of_stages_and_memory_have_the_bytes_of_the_plan(name: str) -> None:
    plan = PLANS[name]()
    for k, (row, cells) in enumerate(
        zip(page_of(name).rows("stages"), page_of(name).rows("memory-kinds"), strict=True)
    ):
        stage, memory = plan.stages[k], stage_memory(plan, k)
        assert row[0] == cells[0] == str(k)
        assert row[2] == ranges_text(range(stage.first_device, stage.first_device + stage.n_devices))
        assert row[4:7] == [micro(s) for s in (stage.compute_s, stage.communication_s, stage.update_s)]
        end = [bytes_text(memory.peak_bytes), bytes_text(memory.limit_bytes), percent_text(memory.used)]
        assert cells[-3:] == end
        assert {bytes_text(size) for size in memory.parts.values()} <= set(cells)


@every_plan
def test_rows_add_up_to_the_step(name: str) -> None:
    plan = PLANS[name]()
    rows, ops = operator_rows(plan), [op for stage in plan.stages for op in stage.operators]
    assert sum(row.n for row in rows) == len(ops)
    assert sum(row.seconds for row in rows) == pytest.approx(sum(op_seconds(plan, op) for op in ops))
    other = other_seconds(plan) / (other_seconds(plan) + sum(op_seconds(plan, op) for op in ops))
    assert sum(row.share for row in rows) + other == pytest.approx(1)
    assert all(row.rate < row.roof for row in rows)

    collectives = collective_rows(plan)
    assert sum(row.seconds for row in collectives) == pytest.approx(
        sum(collective_seconds(plan, one) for one in plan.collectives)
    )
    waits = [row.waiting_s for row in collectives]
    assert waits == sorted(waits, reverse=True)

    shown = page_of(name).rows("operator-rows")
    assert [row[-2] for row in shown] == [micro(row.seconds) for row in rows]
    assert [row[4] for row in shown] == [row.line for row in rows]


def test_the_tree_has_each_module_once_with_all_its_bytes_and_work() -> None:
    plan = gpt_plan(4)
    tree = module_tree(plan)
    assert tree.name == "Gpt"
    blocks = next(child for child in tree.children if child.name == "block_0-3")
    assert blocks.n == 4 and {child.name for child in blocks.children} >= {"attention", "feed_forward"}

    shares = sum(row.share for row in operator_rows(plan))
    assert tree.share == pytest.approx(shares)
    assert tree.flops == pytest.approx(sum(row.flops for row in operator_rows(plan)))
    state = [row for row in array_rows(plan) if row.role in ("weights", "optimizer")]
    assert tree.n_bytes == pytest.approx(sum(row.n * row.n_bytes for row in state))

    def check(node: ModuleNode) -> None:
        assert node.n_bytes >= sum(child.n_bytes for child in node.children) - 1
        assert node.share >= sum(child.share for child in node.children) - 1e-9
        for child in node.children:
            check(child)

    check(tree)


def test_state_of_modules_without_operators_is_in_the_tree() -> None:
    """The statistics of a BatchNorm have the path of its weights in another container."""
    plan = shard_plan()
    paths = ["s.params['a']['kernel']", "s.params['norm']['scale']", "s.stats['norm']['mean']", "s.mu['norm']['scale']"]
    inputs = tuple(dataclasses.replace(plan.inputs[0], path=path) for path in paths)
    op = dataclasses.replace(plan.stages[0].operators[0], module="Net/a")
    stage = dataclasses.replace(plan.stages[0], operators=(op,))
    roles = ("weights", "weights", "weights", "optimizer")
    tree = module_tree(dataclasses.replace(plan, inputs=inputs, roles=roles, stages=(stage,)))
    one = tree.children[0].n_bytes
    assert {child.name: child.n_bytes / one for child in tree.children} == {"a": 1, "norm": 2, "stats": 1}


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_a_picture_of_shards_has_the_devices_of_each_shard() -> None:
    plan = pipeline_plan()
    value = dataclasses.replace(plan.inputs[0], shape=(8, 8), mesh_ids=(1,), specs=(Spec(((1,), (0,))),))
    stage = dataclasses.replace(plan.stages[1], logical_shape=(2, 2))
    (picture,) = shard_pictures(dataclasses.replace(plan, stages=(plan.stages[0], stage)), value)
    # Rows are split over axis 1 of the mesh, whose neighbours are devices 4 and 5; columns over axis 0.
    assert {(cell.row, cell.column): cell.text for cell in picture.cells} == {
        (0, 0): "4", (1, 0): "5", (0, 1): "6", (1, 1): "7",
    }  # fmt: skip


def test_lanes_of_compiled_and_measured_times_share_the_axis() -> None:
    plan = gpt_plan(4)
    functions = [[function(f"forward{k}", 8, 1e-2, 1e-2), function(f"backward{k}", 8, 2e-2, 2e-2)] for k in range(4)]
    check = check_of(plan, *functions)
    picture = pipeline_picture(plan, minialpa.simulate(plan), check, ())
    assert picture.total_s > 8 * 3e-2
    assert {lane.source for lane in picture.lanes} == {"predicted", "XLA:GPU"}
    assert [lane.stage for lane in picture.lanes] == sorted(lane.stage for lane in picture.lanes)
    assert all(one.start >= 0 and one.start + one.width < 100.01 for lane in picture.lanes for one in lane.intervals)


def test_an_executable_writes_a_report_with_measured_lanes(tmp_path: Path) -> None:
    step = minialpa.parallelize(train_step, method=ShardParallel(num_micro_batches=2))
    executable = step.get_executable(make_params(), make_batch())
    executable.to_html(tmp_path / "plan.html")
    executable.to_html(tmp_path / "measured.html", title="my step", measured=True)

    plain, found = (read_page((tmp_path / name).read_text("utf-8")) for name in ("plan.html", "measured.html"))
    assert {row[1] for row in plain.rows("lane-numbers")} == {"predicted"}
    assert {row[1] for row in found.rows("lane-numbers")} == {"predicted", "measured"}
    assert found.all("h1")[0].text == found.all("title")[0].text == "my step"


def test_notebooks_show_a_card_without_a_document() -> None:
    plan = gpt_plan(4)
    text = plan._repr_html_()
    assert text == card(plan)
    found = read_page(text)
    assert not found.all("html", "head", "body", "style", "script", "title")
    rows = [[cell.text for cell in row.all("th", "td")] for row in found.all("tbody")[0].all("tr")]
    assert [row[3] for row in rows] == [micro(stage.compute_s) for stage in plan.stages]
    assert micro(plan.cost.total_s) in found.text


def test_large_numbers_have_prefixes() -> None:
    assert [si_text(value, "flop/s") for value in (312e12, 1e15, 999.96e9, 25.0)] == [
        "312 Tflop/s", "1 Pflop/s", "1 Tflop/s", "25 flop/s",
    ]  # fmt: skip
