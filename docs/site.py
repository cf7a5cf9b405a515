"""A hook of mkdocs: pages are the Markdown files of the repository, at their paths, so that links work in both places.

A link to a Python file leads to a page with its text, and a link to a folder to its README.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "docs/**/*.svg",
    "docs/**/*.png",
    "docs/*.css",
    "benchmarks/*.md",
    "tests/*.md",
    "minialpa/**/*.md",
)
_LINK = re.compile(r"\]\(([\w./-]+)(?=[#)])")
_SOURCE = "---\nsearch: {{exclude: true}}\n---\n# {name}\n\n`````python\n{text}`````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the theme, and ours in place of the files of `docs_dir`."""
    found = {file.src_uri: file for file in files if file.src_dir != config.docs_dir}
    for path in (path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))):
        name = path.relative_to(ROOT).as_posix()
        found[name] = File.generated(config, name, abs_src_path=str(path))
        for link in _LINK.findall(path.read_text(encoding="utf-8")) if path.suffix == ".md" else ():
            source = (path.parent / link).resolve()
            if source.suffix == ".py" and source.is_file():
                name = source.relative_to(ROOT).as_posix()
                text = _SOURCE.format(name=name, text=source.read_text(encoding="utf-8"))
                kept = InclusionLevel.NOT_IN_NAV
                found[f"{name}.md"] = File.generated(config, f"{name}.md", content=text, inclusion=kept)
    return Files(list(found.values()))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    def target(link: re.Match[str]) -> str:
        path = (ROOT / page.file.src_uri).parent / link[1]
        return f"{link[0]}/README.md" if path.is_dir() else f"{link[0]}.md" if path.suffix == ".py" else link[0]

    return markdown if page.file.src_uri.endswith(".py.md") else _LINK.sub(target, markdown)
