"""Tests of the documentation site: it builds without warnings, and pages are reachable and load no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Links(HTMLParser):
    """Links of a page. loaded: fetched to show it; shown: for readers; ids: targets within the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.shown: list[str] = []
        self.ids: set[str | None] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id"))
        if tag == "a":
            self.shown += [values["href"]] if values.get("href") else []
        elif tag == "link":
            self.loaded += [values["href"]] if values.get("href") and values.get("rel") != "canonical" else []
        elif values.get("src"):
            self.loaded.append(str(values["src"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    paths = [str(ROOT / "docs"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "docs" / "mkdocs.yml"), "-d", str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_reachable_and_every_link_has_a_target(site: Path) -> None:
    pages = {page.resolve(): Links(page.read_text()) for page in site.rglob("*.html") if page.name != "404.html"}
    reached, queue = set(), [(site / "index.html").resolve()]
    while queue:
        page = queue.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in pages[page].shown:
            if re.match(r"[a-z]+:", link):
                continue
            path, fragment = urldefrag(link)
            target = (page.parent / unquote(path)).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{page}: {link}"
            if target.suffix == ".html":
                assert not fragment or unquote(fragment) in pages[target].ids, f"{page}: {link} has no target"
                queue.append(target)
    assert reached == set(pages)


def test_a_page_needs_no_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        outside = [link for link in Links(page.read_text()).loaded if re.match(r"(?:[a-z]+:)?//", link)]
        assert not outside, f"{page}: {outside}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text()), sheet
