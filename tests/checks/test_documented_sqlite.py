"""The options for SQLite that the pages show satisfy the checks, with any version of SQLite."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from helix_store import checks
from tests.cells import for_each
from tests.databases import CommittedDatabase

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = ["README.md", "docs/tutorial.md", "docs/settings.md"]
VERSIONS: Final = [(3, 40, 1), (3, 44, 6), (3, 50, 7), (3, 51, 2), (3, 51, 3), (3, 53, 0)]


def documented_command(page: str) -> str:
    """The ``init_command`` that a page gives to this version of SQLite."""
    text = (ROOT / page).read_text()
    names: dict[str, Any] = {"sqlite3": sqlite3}
    for line in re.findall(r"^(JOURNAL_MODE = .+)$", text, re.MULTILINE):
        exec(line, names)  # noqa: S102  our own documentation
    (command,) = re.findall(r'"init_command": (f?".+"),$', text, re.MULTILINE)
    return str(eval(command, names))  # noqa: S307  the same


@pytest.fixture
def options(sqlite_db: CommittedDatabase) -> Iterator[dict[str, Any]]:
    """The options of the SQLite database, restored afterwards."""
    settings = sqlite_db.connection.settings_dict
    before = settings["OPTIONS"]
    settings["OPTIONS"] = dict(before)
    try:
        yield settings["OPTIONS"]
    finally:
        settings["OPTIONS"] = before


@for_each("version", VERSIONS, ids=lambda version: ".".join(map(str, version)))
@for_each("page", PAGES)
def test_the_checks_are_clean_with_the_options_of_a_page(
    page: str, version: tuple[int, int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    options["init_command"] = documented_command(page)
    assert [*checks.databases.check_sqlite_settings(), *checks.databases.check_sqlite_version()] == []
