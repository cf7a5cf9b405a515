"""A report in a browser: no errors, no findings of axe, and controls that work by mouse and keyboard."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minialpa.report.page import page
from tests.report.page_parts import gpt_plan
from tests.skips import skip

#: Browsers that playwright can drive.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
every_screen = pytest.mark.parametrize(
    ("width", "scheme"), [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        skip("playwright is missing: `pip install playwright`")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        # A browser comes from the system, not from pip: CI may have none.
        pytest.skip(f"there is no browser ({', '.join(BROWSERS)})")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four stages with 32 micro-batches, whose tables are long enough for all controls."""
    path = tmp_path_factory.mktemp("report") / "plan.html"
    path.write_text(page(dataclasses.replace(gpt_plan(4), n_micro_batches=32)), "utf-8")
    return path


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    tab.goto(report.as_uri())
    yield tab
    context.close()


@every_screen
def test_a_page_has_no_errors_and_fits_the_screen(browser: Any, report: Path, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab = context.new_page()
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda request: problems.append(request.url) if request.url != report.as_uri() else None)
    tab.goto(report.as_uri())
    assert problems == []
    assert tab.evaluate("document.documentElement.scrollWidth") == width

    for one in tab.locator("details").all():
        one.evaluate("one => { one.open = true }")
    found = Axe().run(tab)
    assert found.violations_count == 0, found.generate_report()
    context.close()


def test_the_timeline_zooms_by_buttons_keys_and_wheel(opened: Any) -> None:
    picture, view = opened.locator("#lanes > svg"), opened.locator("#lanes")

    def width() -> float:
        return float(picture.bounding_box()["width"])

    whole = width()
    opened.get_by_role("button", name="Zoom in").click()
    assert width() == pytest.approx(1.5 * whole, rel=0.01)
    # The middle of the step stays in the middle.
    assert view.evaluate("one => one.scrollLeft") == pytest.approx(0.25 * whole, abs=2)
    opened.get_by_role("button", name="Whole step").press("Enter")
    assert width() == pytest.approx(whole, rel=0.01)

    view.focus()
    opened.keyboard.press("+")
    opened.keyboard.press("+")
    assert width() == pytest.approx(2.25 * whole, rel=0.01)
    before = view.evaluate("one => one.scrollLeft")
    opened.keyboard.press("ArrowRight")
    assert view.evaluate("one => one.scrollLeft") > before
    opened.keyboard.press("0")
    assert width() == pytest.approx(whole, rel=0.01)

    view.hover()
    opened.mouse.wheel(0, -100)
    assert width() == pytest.approx(whole, rel=0.01), "the wheel alone scrolls the page"
    view.hover()
    opened.keyboard.down("Control")
    opened.mouse.wheel(0, -100)
    opened.keyboard.up("Control")
    opened.wait_for_function(f"document.querySelector('#lanes > svg').getBoundingClientRect().width > {1.2 * whole}")


def test_filters_keep_rows_with_all_words(opened: Any) -> None:
    rows = opened.locator("#operator-rows tbody tr")
    n_rows = rows.count()
    box = opened.get_by_label("Show operators with")
    box.focus()
    opened.keyboard.type("qkv BACKWARD")
    visible = [row for row in rows.all() if row.is_visible()]
    assert 0 < len(visible) < n_rows
    assert all("qkv" in row.inner_text() and "backward" in row.inner_text() for row in visible)
    assert opened.locator("#operator-rows-filter-count").inner_text() == f"{len(visible)} of {n_rows}"
    box.fill("")
    assert opened.locator("#operator-rows-filter-count").inner_text() == ""
    box.fill("no such module")
    assert not any(row.is_visible() for row in rows.all())


def test_a_button_shows_the_rows_of_a_long_table(opened: Any) -> None:
    rows = opened.locator("#arrays tbody tr")
    n_rows = rows.count()
    assert sum(row.is_visible() for row in rows.all()) == 14 < n_rows
    opened.locator("#shardings button").press("Enter")
    assert all(row.is_visible() for row in rows.all())
    opened.locator("#shardings button").click()
    assert sum(row.is_visible() for row in rows.all()) == 14
    # A filter looks at all rows.
    opened.get_by_label("Show arrays with").fill("batch")
    assert any(row.is_visible() for row in rows.all())


def test_the_keyboard_reaches_every_control_with_a_visible_focus(opened: Any) -> None:
    wanted = opened.evaluate(
        "() => [...document.querySelectorAll('a, button, input, summary, [tabindex]')]"
        ".filter((one) => one.checkVisibility()).length"
    )
    reached = 0
    for _ in range(wanted):
        opened.keyboard.press("Tab")
        style = opened.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        reached += style != "none"
    assert reached == wanted
    assert opened.evaluate("() => document.activeElement !== document.body")


def test_a_module_opens_by_the_keyboard(opened: Any) -> None:
    inside = opened.locator("summary", has_text="feed_forward").first
    line = opened.locator("#model details:has(> summary:has-text('feed_forward')) .row", has_text="down").last
    assert not line.is_visible()
    inside.press("Enter")
    assert line.is_visible()


def test_a_page_without_scripts_and_a_printed_page_show_everything(browser: Any, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(report.as_uri())
    assert not tab.locator(".controls, .filter").first.is_visible()
    assert all(row.is_visible() for row in tab.locator("#arrays tbody tr").all())
    assert tab.locator("#lanes rect").first.is_visible()
    context.close()

    context = browser.new_context()
    tab = context.new_page()
    tab.goto(report.as_uri())
    tab.emulate_media(media="print")
    assert all(row.is_visible() for row in tab.locator("#arrays tbody tr").all())
    assert not any(tab.locator(name).first.is_visible() for name in ("nav", ".controls", ".filter"))
    context.close()
