"""The built site: its links and anchors, the Markdown twins, and the code as a reader copies it from there.

``HELIX_TEST_SITE`` names a site that is built already. Otherwise the tests build one, with the extra docs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import chromium
from tests.cells import for_each
from tests.docs.projects import Project
from tests.docs.test_examples import ROOT
from tests.docs.test_types import is_installed, require_strict_types

_FENCE: Final = re.compile(r"^ *```([a-z]+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_FILE_NAME: Final = re.compile(r"# [\w/]+\.py\n")
_SHOWN_AS: Final = {"cron": "text"}  # Pygments does not know it
_LOADING: Final = {"script": "src", "img": "src", "iframe": "src", "source": "src"}
_LOADING_LINKS: Final = {"stylesheet", "icon", "preload", "modulepreload"}
_CLASSES_OF_CALLS: Final = [
    name
    for name in re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    # What the store has of its handles' calls is for the handles. The stores in memory have the same calls.
    if name.rpartition(".")[2].startswith(
        ("Session", "Turn", "Step", "Database", "Lock", "Stream", "Graph", "Snap")
    )
]
_PAGES: Final = sorted((ROOT / "docs").glob("*.md"))


class Page(HTMLParser):
    """A page of the site: the ids of its elements, where it links to, what it loads, and its code."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.code: list[tuple[str, str]] = []
        self._language = ""
        self._is_code = False
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in _LOADING and _LOADING[tag] in given:
            self.loaded.append(given[_LOADING[tag]])
        if tag == "link" and _LOADING_LINKS & set(given.get("rel", "").split()):
            self.loaded.append(given["href"])
        if languages := re.findall(r"\blanguage-([a-z]+)", given.get("class", "")):
            (self._language,) = languages
        if tag == "code" and self._language:
            self.code.append((self._language, ""))
            self._is_code = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "code" and self._is_code:
            self._language, self._is_code = "", False

    def handle_data(self, data: str) -> None:
        if self._is_code:
            language, text = self.code[-1]
            self.code[-1] = (language, text + data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if built := os.environ.get("HELIX_TEST_SITE"):
        return Path(built)
    if find_spec("mkdocs") is None:
        pytest.skip("the site is not built: set HELIX_TEST_SITE, or install the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


def _folder_of(page: Path, site: Path) -> Path:
    return site if page.stem == "index" else site / page.stem


def test_a_link_of_the_site_leads_to_a_file_and_an_anchor(site: Path) -> None:
    pages = {file: Page(file) for file in site.rglob("*.html")}
    broken = [
        f"{file.relative_to(site)}: {link}"
        for file, page in pages.items()
        if file.name != "404.html"  # its links begin with the address of the site
        for link in [*page.links, *page.loaded]
        if not _is_found(link, file, pages)
    ]
    assert len(pages) > len(_PAGES)
    assert broken == []


def _is_found(link: str, file: Path, pages: dict[Path, Page]) -> bool:
    url = urlsplit(link)
    if url.scheme:
        return True
    path = unquote(url.path)
    target = (file.parent / path).resolve() if path else file
    target = target / "index.html" if target.is_dir() else target
    return target.is_file() and (not url.fragment or unquote(url.fragment) in pages[target].ids)


def test_a_page_loads_nothing_from_another_host(site: Path) -> None:
    loaded = {url for file in site.rglob("*.html") for url in Page(file).loaded}
    assert loaded
    assert [url for url in loaded if re.match(r"(?:\w+:)?//", url)] == []


def test_every_page_has_a_markdown_twin_that_llms_txt_lists(site: Path) -> None:
    listed = re.findall(r"^- \[.+?\]\(\w+://[^/]+/(.*?)\)", (site / "llms.txt").read_text(), re.MULTILINE)
    twins = [_folder_of(page, site) / "index.md" for page in _PAGES]
    assert sorted(site / path for path in listed) == sorted(twins)
    titles = [page.read_text().splitlines()[0] for page in _PAGES]
    assert [twin.read_text().splitlines()[0] for twin in twins] == titles
    whole = (site / "llms-full.txt").read_text().splitlines()
    assert [title for title in titles if title not in whole] == []


def test_llms_txt_has_the_sections_of_the_navigation_and_says_what_a_page_is_about(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    sections = dict(re.findall(r"^## (.+)\n\n((?:- .+\n)+)", text, re.MULTILINE))
    assert list(sections) == ["Overview", "Start", "How-to", "Reference", "Explanation"]
    assert "/quickstart/" in sections["Start"]
    assert "/effects/" in sections["How-to"]
    assert "/schema/" in sections["Reference"]
    assert "/fencing/" in sections["Explanation"]
    for section in ("Start", "How-to", "Explanation"):
        lines = sections[section].splitlines()
        assert [line for line in lines if not re.fullmatch(r"- \[.+?\]\(\S+\): .{10,}", line)] == []


def test_the_code_of_the_site_and_of_the_twins_is_that_of_the_pages(site: Path) -> None:
    differing = []
    for page in _PAGES:
        expected = list(_blocks(page.read_text()))
        folder = _folder_of(page, site)
        shown = [(language, text.rstrip("\n")) for language, text in Page(folder / "index.html").code]
        twin = list(_blocks((folder / "index.md").read_text()))
        # The pages of the API are generated.
        if (shown, twin) != (expected, expected) and not page.stem.startswith("api"):
            differing.append(page.name)
    assert differing == []


def test_the_code_of_the_site_passes_strict_type_checks(site: Path, tmp_path: Path) -> None:
    """As a reader copies it from there. ``test_types`` checks the blocks that are files."""
    files = []
    for page in _PAGES:
        shown = Page(_folder_of(page, site) / "index.html").code
        code = [text for language, text in shown if language == "python" and not _FILE_NAME.match(text)]
        if code and is_installed(page.stem) and not page.stem.startswith("api"):
            files.append(tmp_path / f"page_{page.stem.replace('-', '_')}.py")
            files[-1].write_text("\n".join(code))
    assert len(files) > 40
    require_strict_types(*files)


@for_each("name", _CLASSES_OF_CALLS, ids=str)
def test_the_page_of_the_api_has_the_signature_of_every_call(name: str, site: Path) -> None:
    shown = Page(site / "api" / "index.html").ids
    room, _, label = name.rpartition(".")
    found = getattr(import_module(room), label)
    calls = {each for each in dir(found) if not each.startswith("_") and callable(getattr(found, each))}
    twins = {call for call in calls if call[0] == "a" and call[1:] in calls}
    assert [call for call in sorted(calls - twins - {"new_session"}) if f"{name}.{call}" not in shown] == []


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    for language, code in _FENCE.findall(text):
        yield _SHOWN_AS.get(language, language), textwrap.dedent(code).rstrip("\n")


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The address of a server of the site."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=site)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("width", [1400, 390])
def test_every_diagram_is_drawn_in_both_schemes_and_fits(width: int, address: str) -> None:
    pages = [page.stem for page in _PAGES if "```mermaid" in page.read_text()]
    assert len(pages) > 7
    with chromium() as browser:
        browser.resize(width, 844)
        for page in pages:
            browser.open(f"{address}/{page}/")
            browser.run(_TELL_WHEN_THE_SCHEME_IS_SET)
            browser.until("#set", equals="set")
            for scheme, drawn in (("slate", "dark"), ("default", "light")):
                browser.run(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
                browser.run(_TELL_WHAT_IS_DRAWN)
                browser.until("#drawn", equals=drawn)
                assert browser.content_width() <= width
            sources = browser.run("return document.querySelectorAll('pre.language-mermaid').length")
            assert browser.run("return document.querySelectorAll('.diagram > svg').length") == sources
            assert browser.complaints() == []


_TELL_WHEN_THE_SCHEME_IS_SET: Final = """
    const shown = document.body.appendChild(document.createElement('i'));
    shown.id = 'set';
    const timer = setInterval(() => {
        // Material shows the button once it has set the scheme that the browser prefers.
        if (!document.querySelector('[data-md-component=palette] label:not([hidden])')) return;
        shown.textContent = 'set';
        clearInterval(timer);
    }, 10);
"""

_TELL_WHAT_IS_DRAWN: Final = """
    const shown = document.getElementById('drawn') ?? document.body.appendChild(document.createElement('i'));
    shown.id = 'drawn';
    const tell = () => { shown.textContent = document.body.dataset.diagrams ?? ''; };
    new MutationObserver(tell).observe(document.body, { attributeFilter: ['data-diagrams'] });
    tell();
"""


@pytest.mark.parametrize(("page", "commands"), [("quickstart", 11), ("tutorial", 28)])
def test_a_page_can_be_followed_as_the_site_shows_it(
    page: str, commands: int, site: Path, tmp_path: Path
) -> None:
    code = Page(site / page / "index.html").code
    with Project(tmp_path) as project:
        assert project.follow("".join(f"```{language}\n{text}```\n" for language, text in code)) == commands
