"""The site has all pages, its links lead somewhere, and so do the links of the same Markdown on GitHub."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

import minialpa
from minialpa.cli.commands import _parser
from tests.report import test_browser
from tests.skips import skip

browser = test_browser.browser
ROOT = Path(__file__).parents[1]
#: As in docs/site.py.
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "tests/*.md", "minialpa/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
#: Rules of axe that Material for MkDocs breaks: the search has no name, menus share names, and tables scroll.
MATERIAL = {"aria-dialog-name", "landmark-unique", "scrollable-region-focusable"}
#: Elements that show whether two renderers read the same structure.
COUNTED = ("h1", "h2", "h3", "h4", "li", "pre", "table", "td", "img")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def html_of(name: str) -> str:
    """The page of a Markdown file on the site."""
    return "index.html" if name == "README.md" else re.sub(r"(?:README|index)\.md$|\.md$", _end, name)


def _end(match: re.Match[str]) -> str:
    return "index.html" if match[0] != ".md" else ".html"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        skip("needs mkdocs: python -m pip install -e '.[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    return out


class Reader(HTMLParser):
    """ids, links, and the number of elements of the text of a page, all of a site or of its content."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.counts: Counter[str] = Counter()
        self._is_content = "<article" not in text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._is_content |= tag == "article"
        self.ids |= {found["id"] or ""} if "id" in found else set()
        self.links += [found[name] or "" for name in ("href", "src") if name in found]
        self.counts[tag] += self._is_content and tag in COUNTED

    def handle_endtag(self, tag: str) -> None:
        self._is_content &= tag != "article"


@functools.cache
def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


@functools.cache
def as_on_github(path: Path) -> Reader:
    """A Markdown file by CommonMark with tables, with GitHub's anchors of headings."""
    from markdown_it import MarkdownIt

    reader = Reader(MarkdownIt("commonmark").enable("table").render(path.read_text(encoding="utf-8")))
    used: Counter[str] = Counter()
    text = re.sub(r"^(`{3,}).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        reader.ids.add(f"{slug}-{used[slug]}" if used[slug] else slug)
        used[slug] += 1
    return reader


def broken(path: Path, reader: Reader, ids: Any) -> list[str]:
    """The local links of a page that lead nowhere. ids: of the page at a path."""
    found = []
    for link in reader.links:
        url, anchor = urldefrag(unquote(link))
        if re.match(r"(?:https?:|mailto:|data:|javascript:)", link):
            continue
        target = (path.parent / url).resolve() if url else path
        if not target.exists() or (anchor and target.suffix == path.suffix and anchor not in ids(target)):
            found.append(f"{path.name}: {link}")
    return found


# ---- Markdown, without mkdocs ----------------------------------------------------------------------------------------


def test_links_and_anchors_resolve_on_github() -> None:
    links = [link for path in PAGES for link in broken(path, as_on_github(path), lambda to: as_on_github(to).ids)]
    assert links == []


def blocks(language: str) -> Iterator[tuple[str, str]]:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for block in re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            yield name_of(path), block


def test_blocks_of_bash_are_correct_and_their_commands_of_minialpa_exist() -> None:
    parser, n_commands = _parser(), 0
    for name, block in blocks("bash"):
        checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert checked.returncode == 0, (name, checked.stderr)
        commands = re.findall(r"^(?:.*&& *)?minialpa (.*?)(?:\||$)", block.replace("\\\n", " "), re.MULTILINE)
        for command in commands:
            with contextlib.redirect_stderr(None):
                try:
                    _, unknown = parser.parse_known_args(shlex.split(command, comments=True))
                except SystemExit:
                    raise AssertionError(f"{name}: minialpa {command}") from None
            assert not unknown, (name, command)
            n_commands += 1
    assert n_commands > 10


def test_blocks_of_yaml_are_correct() -> None:
    yaml = pytest.importorskip("yaml")
    found = [yaml.safe_load(block) for _, block in blocks("yaml")]
    assert found and all(isinstance(one, dict) for one in found)


# ---- the site --------------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation(site: Path) -> None:
    pages = {(site / html_of(name_of(path))).resolve() for path in PAGES}
    assert [page for page in pages if not page.is_file()] == []
    text = (site / "index.html").read_text(encoding="utf-8")
    navigation = Reader(text[text.index("<nav") : text.index("<article")])
    reached = {(site / urldefrag(link)[0]).resolve() for link in navigation.links} | {(site / "index.html").resolve()}
    assert pages - reached == set()


def test_links_and_anchors_resolve_on_the_site(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert [link for page in pages for link in broken(page, read(page), lambda to: read(to).ids)] == []


def test_the_site_and_github_read_the_same_structure(site: Path) -> None:
    """Python-Markdown and CommonMark differ, for instance, in lists without a blank line before them."""
    for path in PAGES:
        if path.name != "api.md":
            assert read(site / html_of(name_of(path))).counts == as_on_github(path).counts, path


def test_the_reference_has_every_public_name(site: Path) -> None:
    missing = {f"minialpa.{name}" for name in minialpa.__all__} - read(site / "docs" / "api.html").ids
    assert missing == {"minialpa.__version__"}


def test_the_site_fetches_nothing(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//', text), page
        assert not re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(?:https?:)?//', text), page


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Print no line for each request."""

    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_pages_have_no_errors_and_fit_the_screen(browser: Any, address: str, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab = context.new_page()
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda request: request.url.startswith(address) or problems.append(request.url))
    for name in ("index.html", "docs/tuning.html", "docs/api.html"):
        tab.goto(address + name)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, name
        found = [one for one in Axe().run(tab).response["violations"] if one["id"] not in MATERIAL]
        assert found == []
    assert problems == []
    context.close()
