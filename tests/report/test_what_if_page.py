"""The page of a grid is one valid file with all cases; in a browser, its buttons choose a case."""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest

from minialpa.what_if import CaseOutcome, WhatIf, cases
from minialpa.what_if.planning import Request, plan_cases
from tests.report import test_browser
from tests.report.page_parts import Element, read_page

browser = test_browser.browser
opened = test_browser.opened


@functools.cache
def grid() -> WhatIf:
    """Two models on two clusters; a thousand bytes fit no model."""
    found: list[CaseOutcome] = []
    request = Request("ShardParallel", "fast", None, {"h100": 2.5, "cpu": 0.1})
    tasks = cases(["mlp", "gpt"], gpus=(1, 2, 4), clusters=("h100", "cpu"), memory=(4e9, 1e3))
    for _, task in itertools.groupby(tasks, key=lambda case: (case.model, case.cluster, case.gpus)):
        found += plan_cases(list(task), request)
    return WhatIf(tuple(found), "AutoParallel", "fast", 1.0)


@functools.cache
def small() -> WhatIf:
    """One case, without tokens and prices."""
    return WhatIf((dataclasses.replace(grid().outcomes[0], price=None),), "DataParallel", "balanced", 1.0)


GRIDS = {"grid": grid, "small": small}
every_grid = pytest.mark.parametrize("name", GRIDS)


@functools.cache
def text_of(name: str) -> str:
    return GRIDS[name]().to_html()


@functools.cache
def page_of(name: str) -> Element:
    return read_page(text_of(name))


# ---- one valid file --------------------------------------------------------------------------------------------------


@every_grid
def test_ids_are_unique_and_references_to_ids_have_targets(name: str) -> None:
    elements = page_of(name).all()
    ids = [one.attributes["id"] for one in elements if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    for one in elements:
        labels = (one.attributes.get("aria-labelledby") or "").split()
        link = one.attributes.get("href") or "data:"
        assert link.startswith("data:") or link[1:] in ids
        assert set(labels) <= set(ids)


@every_grid
def test_all_cases_are_rows_of_one_table(name: str) -> None:
    rows = page_of(name).rows("cases")
    outcomes = GRIDS[name]().outcomes
    assert [row[0] for row in rows] == [one.case.model for one in outcomes]
    assert ["Does not fit." in row[-1] for row in rows] == [not one.fits for one in outcomes]
    heads = page_of(name).by_id("cases").all("thead")[0].all("th")
    assert {len(row) for row in rows} == {len(heads)}


@every_grid
def test_every_case_is_in_one_grid_and_the_first_view_is_visible(name: str) -> None:
    keys = {
        one.attributes["data-key"] for one in page_of(name).by_id("cases").all("tr") if "data-key" in one.attributes
    }
    linked = [one.attributes["data-key"] for one in page_of(name).by_id("grid").all("a")]
    assert sorted(linked, key=str) == sorted(keys, key=str)
    for section in ("answers", "grid"):
        shown = [one for one in page_of(name).by_id(section).all("div") if "data-show" in one.attributes]
        assert sum("hidden" not in one.attributes for one in shown) == 1


def test_answers_are_the_best_cases() -> None:
    view = [one for one in grid().outcomes if one.case.model == "mlp" and one.fits]
    first, *_ = (one for one in page_of("grid").by_id("answers").all("div") if "hidden" not in one.attributes)
    cheapest, fastest, fewest = (item.all("a")[0].text for item in first.all("li"))

    def name(one: CaseOutcome) -> str:
        return f"{one.case.gpus} × {one.case.cluster}"

    assert cheapest == name(min(view, key=lambda one: one.cost or 0.0))
    assert fastest == name(min(view, key=lambda one: one.step_s or 0.0))
    assert fewest.startswith("1 ")


def test_a_case_that_does_not_fit_names_a_change_with_which_it_fits() -> None:
    reasons = [row[-1] for row in page_of("grid").rows("cases") if "Does not fit" in row[-1]]
    assert reasons and all(reason.endswith("Fits with 4 GB of memory.") for reason in reasons)


def test_the_file_for_spreadsheets_is_in_the_page() -> None:
    link = next(one for one in page_of("grid").all("a") if one.attributes.get("download") == "what-if.csv")
    kind, _, data = (link.attributes["href"] or "").partition(",")
    assert kind == "data:text/csv;base64"
    assert base64.b64decode(data).decode() == grid().to_csv()


def test_names_and_reasons_are_escaped() -> None:
    one = grid().outcomes[1]
    case = dataclasses.replace(one.case, model="<script>alert(1)</script>")
    text = WhatIf((dataclasses.replace(one, case=case, reason="<b>No</b>"),), "AutoParallel", "fast", 1.0).to_html()
    assert "<script>alert" not in text and "<b>No" not in text


def test_a_thousand_cases_stay_below_two_megabytes() -> None:
    one = next(one for one in grid().outcomes if one.case.model == "gpt" and one.fits)
    many = cases(
        ["gpt", "mlp"], gpus=(8, 16, 32, 64, 128, 256), clusters=("h100", "a100-80gb", "h200"), batches=(8, 16, 32),
        memory=(40e9, 80e9, 96e9), link_speeds=(0.5, 1.0, 2.0),
    )  # fmt: skip
    assert len(many) == 972
    text = WhatIf(tuple(dataclasses.replace(one, case=case) for case in many), "AutoParallel", "fast", 1.0).to_html()
    assert len(text.encode()) < 2e6


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "what-if.html"
    grid().save_html(path)
    return path


def test_a_page_of_one_case_shows_it_without_errors(browser: Any, tmp_path: Path) -> None:
    one = next(one for one in grid().outcomes if one.fits)
    WhatIf((one,), "AutoParallel", "fast", 1.0).save_html(tmp_path / "one.html")
    tab = browser.new_page()
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto((tmp_path / "one.html").as_uri())
    assert problems == [] and tab.locator("#one-name").inner_text().startswith(one.case.model)
    tab.close()


@test_browser.every_screen
def test_a_page_has_no_errors_and_fits_the_screen(browser: Any, report: Path, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab = context.new_page()
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(report.as_uri())
    assert problems == []
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    found = Axe().run(tab)
    assert found.violations_count == 0, found.generate_report()
    context.close()


def test_buttons_keys_and_links_choose_a_case(opened: Any) -> None:
    name, fit = opened.locator("#one-name"), opened.locator("#one-fit")
    opened.get_by_role("radio", name="gpt").check()
    opened.get_by_role("radio", name="cpu").check()
    opened.get_by_role("radio", name="1", exact=True).focus()
    opened.keyboard.press("ArrowRight")
    opened.keyboard.press("ArrowRight")
    assert name.inner_text() == "gpt on 4 × cpu:"

    opened.get_by_role("radio", name="1 kB").check()
    assert fit.inner_text().startswith("Does not fit.")
    assert opened.locator("#grid table:visible").inner_text().count("does not fit") == 12

    opened.get_by_role("radio", name="4 GB").check()
    opened.locator("#grid a:visible").first.click()
    assert name.inner_text() == "mlp on 1 × h100:"
    assert opened.get_by_role("radio", name="mlp").is_checked()
    assert opened.locator("#charts figure:visible").count() == 2
    address = opened.url
    opened.reload()
    assert opened.url == address and name.inner_text() == "mlp on 1 × h100:"


def test_a_page_without_scripts_shows_all_cases(browser: Any, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(report.as_uri())
    assert not tab.locator("#one").is_visible()
    assert all(row.is_visible() for row in tab.locator("#cases tbody tr").all())
    context.close()
