"""What README and docs name exists: commands, options, extras, links, settings, checks, dotted names."""

from __future__ import annotations

import contextlib
import re
import sys
import tomllib
from collections import Counter
from dataclasses import fields
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest
from django.core.management import CommandParser, get_commands, load_command_class

import helix_store
from helix_store import checks, conf
from helix_store.core.streams import StreamOptions
from helix_store.doctor import RULES
from tests.cells import for_each
from tests.docs.projects import File, blocks_of
from tests.docs.test_examples import BLOCK, PAGES, ROOT, default_database
from tests.processes import WorkerProcess
from tests.test_layout import ALL_NAMES, NOT_IN_DEV

__all__ = ["default_database"]

PAGES_AND_GUIDE: Final = [*PAGES, ROOT / "CONTRIBUTING.md"]
EVERY_PAGE: Final = for_each("page", PAGES_AND_GUIDE, ids=lambda page: page.name)
COMMANDS_OF_PAGES: Final = {
    Path(block.path).stem
    for page in PAGES
    for block in blocks_of(page.read_text())
    if isinstance(block, File) and "management/commands" in block.path
}
COMMANDS_OF_PACKAGES: Final = {"db_worker"}
"""Of packages that a page says to install; ``test_projects`` runs them."""

CODE: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
IMPORT: Final = re.compile(r"^ *from (helix_store[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
PUBLIC_PATHS: Final = {(path, name) for (path, _), names in ALL_NAMES.items() for name in names.split()} | {
    ("helix_store", name) for name in helix_store.__all__
}


@EVERY_PAGE
def test_commands_that_a_page_names_are_registered(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"manage\.py ([a-z]\w+)", text)
    named += [name for name in re.findall(r"\bhelix_[a-z]\w*", text) if not name.startswith("helix_store")]
    assert set(named) - get_commands().keys() - COMMANDS_OF_PAGES - COMMANDS_OF_PACKAGES == set()


@EVERY_PAGE
def test_a_page_imports_from_public_paths_only(page: Path) -> None:
    imported = {
        (path, name)
        for path, names in IMPORT.findall(page.read_text())
        for name in re.findall(r"\w+", re.sub(r" as \w+|#.*", "", names))
    }
    assert imported - PUBLIC_PATHS == set()


@pytest.mark.parametrize(
    ("page", "commands"),
    [
        ("demo", ["demo"]),
        ("cleanup", ["cleanup_expired_sessions"]),
        ("doctor", ["helix_doctor"]),
        ("retention-rules", ["helix_retention", "helix_erase"]),
    ],
)
def test_the_options_of_a_page_are_the_options_of_its_commands(page: str, commands: list[str]) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    options: set[str] = set()
    for command in commands:
        parser = CommandParser(add_help=False)
        load_command_class(get_commands()[command], command).add_arguments(parser)
        options |= {option for action in parser._actions for option in action.option_strings}
    assert set(re.findall(r"`(--[a-z-]+)", text)) == options


@EVERY_PAGE
def test_extras_that_a_page_names_can_be_installed(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = page.read_text()
    lists = re.findall(r"(?:helix-store|[\"' ]\.)\[([a-z, -]+)\]", text)
    named = set(chain.from_iterable(re.split(r", *", names) for names in lists))
    named |= set(re.findall(r"\bextra [\"`]([a-z-]+)", text))
    assert named - project["optional-dependencies"].keys() == set()


@EVERY_PAGE
def test_a_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("https:", "http:")):
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.is_file(), target
        assert not heading or heading in _headings(file), target


def _headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_index_lists_each_page_once() -> None:
    listed = Counter(re.findall(r"\]\((\S+?\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert listed == Counter(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md")


FIRST_QUESTIONS: Final = {
    "stream": "out.text(delta)",
    "wait for a person": "step.ask_approval(",
    "next turn in a worker": "@receiver(",
    "worker dies": "$ kill -9",
    "payment be made twice": "turn.effect(id, retry=True)",
    "delete everything about a user": "helix_erase",
    "test my agent": "InMemoryStore()",
    "upgrade": "manage.py migrate",
    "deploy while sessions wait": "Send SIGTERM to the old workers",
    "keep customers apart": "Store(tenant=",
    "limit what an agent spends": "set_budget(",
    "while the agent is working": "session.post(",
}
"""What a reader asks first, and what the section must say to which the overview links."""


@for_each("question", FIRST_QUESTIONS)
def test_a_first_question_is_answered_within_two_clicks_of_the_readme(question: str) -> None:
    assert "](docs/index.md)" in (ROOT / "README.md").read_text()
    overview = (ROOT / "docs" / "index.md").read_text()
    (links,) = re.findall(rf"^\| [^|]*{question}[^|]* \| (.+) \|$", overview, re.MULTILINE)
    answers = [_section(*link) for link in re.findall(r"\]\(([\w-]+\.md)#([\w-]+)\)", links)]
    assert [answer for answer in answers if FIRST_QUESTIONS[question] in answer]


def _section(page: str, anchor: str) -> str:
    """The text below a heading, up to the next one of its level."""
    text = (ROOT / "docs" / page).read_text()
    plain = CODE.sub(lambda block: re.sub("^#", " ", block[0], flags=re.MULTILINE), text)
    for heading in re.finditer(r"^(#+) (.+)$", plain, re.MULTILINE):
        if re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") == anchor:
            end = re.search(rf"^#{{1,{len(heading[1])}}} ", plain[heading.end() :], re.MULTILINE)
            return text[heading.start() : heading.end() + end.start() if end else None]
    raise AssertionError(f"{page} has no section {anchor}")


def test_two_pages_do_not_share_the_id_of_a_session_or_stream() -> None:
    creation = re.compile(r"(?:create_session|create_writer)\(\s*\"([^\"]+)\"")
    ids = [session_id for page in PAGES for session_id in set(creation.findall(page.read_text()))]
    assert [name for name, count in Counter(ids).items() if count > 1] == []


@EVERY_PAGE
def test_a_dotted_name_of_the_package_can_be_imported(page: Path) -> None:
    for dotted in set(re.findall(r"\bhelix_store(?:\.[A-Za-z_]\w*)+", page.read_text())):
        # The ids of checks, and a variable of PostgreSQL.
        if not re.fullmatch(r"helix_store\.([EWI]\d+|tenant)", dotted):
            # The classes of a framework that is not installed say so.
            is_left_out = dotted.startswith(tuple(NOT_IN_DEV))
            with contextlib.suppress(ImportError) if is_left_out else contextlib.nullcontext():
                _resolve(dotted)


def _resolve(dotted: str) -> None:
    names = dotted.split(".")
    for length in range(len(names), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found: Any = import_module(".".join(names[:length]))
            for name in names[length:]:
                found = getattr(found, name)
            return


def test_the_settings_page_lists_every_setting_and_every_check() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    settings = text[text.index("## Settings") : text.index("These settings of Django")]
    assert re.findall(r"^\| `([A-Z_]+)`", settings, re.MULTILINE) == list(conf.DEFAULTS)
    listed = re.findall(r"^\| `helix_store\.(\w+)`", text, re.MULTILINE)
    source = "".join(path.read_text() for path in Path(checks.__file__).parent.glob("*.py"))
    assert sorted(listed) == sorted(set(re.findall(r"helix_store\.([EWI]\d{3})", source)))


def test_the_doctor_page_lists_every_rule_with_its_severity_and_every_fix() -> None:
    findings, fixes = (ROOT / "docs" / "doctor.md").read_text().split("## Fixes")
    row = re.compile(r"^\| `([a-z-]+)` \| (error|warning|info) \|", re.MULTILINE)
    assert sorted(row.findall(findings)) == sorted((rule.id, rule.severity.value) for rule in RULES.values())
    fixed = re.findall(r"^\| `([a-z-]+)` \|", fixes, re.MULTILINE)
    assert sorted(fixed) == sorted(rule.id for rule in RULES.values() if rule.fix)


def test_the_streams_page_lists_every_option_of_streams() -> None:
    text = (ROOT / "docs" / "stream-calls.md").read_text()
    options = text[text.index('`HELIX_STORE["STREAMS"]`:') :]
    assert set(re.findall(r"^\| `(\w+)`", options, re.MULTILINE)) == {
        field.name for field in fields(StreamOptions)
    }


def _cost_of_the_readme(has_prices: bool) -> str:
    """Return the cost of the session that the first example makes."""
    if not has_prices:
        sys.modules["genai_prices"] = None  # type: ignore[assignment]  # as if it were not installed
    namespace: dict[str, Any] = {}
    for block in BLOCK.finditer((ROOT / "README.md").read_text()):
        exec(block[1], namespace)  # noqa: S102  our own documentation
    return str(namespace["session"].usage(tree=True).cost_usd.normalize())


@pytest.mark.parametrize("has_prices", [True, False])
def test_the_example_of_the_readme_costs_what_it_says_with_and_without_prices(
    has_prices: bool, default_database: None
) -> None:
    (said,) = re.findall(r"the turn above\s+costs (\S+) dollars", (ROOT / "README.md").read_text())
    cost = WorkerProcess(_cost_of_the_readme, has_prices).outcome(timeout=60).unwrap()
    assert cost == (said if has_prices else "0")
