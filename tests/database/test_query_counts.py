"""How many statements every public call sends, as ``docs/statement-counts.md`` says.

The tables of the page are generated; the text above them is kept. This command measures every call on
SQLite and PostgreSQL and writes the tables::

    HELIX_WRITE_COUNTS=1 python -m pytest tests/database/test_query_counts.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from tests.cells import for_each
from tests.database.counted_calls import CALLS, CLASSES, Faces
from tests.database.test_statements import sent_by
from tests.databases import ALIASES, CommittedDatabase, close_connections, fresh_tenant

COMMAND: Final = "HELIX_WRITE_COUNTS=1 python -m pytest tests/database/test_query_counts.py"
PAGE: Final = Path(__file__).parents[2] / "docs" / "statement-counts.md"
WRITES: Final = os.environ.get("HELIX_WRITE_COUNTS", "0") not in {"", "0"}
COLUMNS: Final = (("sqlite", True), ("postgres", False), ("postgres", True))
"""Which database, and whether fast paths are on."""

Counts = tuple[str, ...]
Rows = dict[tuple[str, str], Counts]


def documented(text: str) -> Rows:
    """The rows of the page by face and call."""
    rows = {}
    face = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            name = line.removeprefix("## ")
            face = name[:1].lower() + name[1:]
        elif line.startswith("|") and len(cells) == 1 + len(COLUMNS) and cells[-1].isdigit():
            call, *counts = cells
            rows[face, call.replace("`", "")] = tuple(counts)
    return rows


def as_row(call: str, counts: Counts) -> str:
    method, _, case = call.partition(" ")
    return f"| `{method}`{' ' if case else ''}{case} | {' | '.join(counts)} |"


def as_page(rows: Rows) -> str:
    """The text above the first table as it is, and a table for each face in the order of `CALLS`."""
    text, _, _ = PAGE.read_text().partition("\n## ")
    for face, calls in CALLS.items():
        text += f"\n## {face[:1].upper() + face[1:]}\n\n| call | SQLite | PostgreSQL | with fast paths |\n"
        text += "|---|---:|---:|---:|\n"
        text += "".join(f"{as_row(call, rows[face, call])}\n" for call in calls if (face, call) in rows)
    return text


ROWS: Final = documented(PAGE.read_text())


@pytest.fixture
def unblocked(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    with django_db_blocker.unblock():
        yield
        close_connections()


class Measured:
    """What calls send. A call of a store that only reads leaves its sessions to the next one."""

    def __init__(self) -> None:
        self._unchanged: dict[tuple[str, str, bool], Faces] = {}

    def counts(self, face: str, call: str, otherwise: Counts) -> Counts:
        """A database that this run leaves out keeps its figure."""
        return tuple(
            str(len(self._sent(face, call, *column))) if column[0] in ALIASES else figure
            for column, figure in zip(COLUMNS, otherwise, strict=True)
        )

    def _sent(self, face: str, call: str, vendor: str, fast_paths: bool) -> list[str]:
        key = face, vendor, fast_paths
        faces = self._unchanged.pop(key, None)
        faces = faces or Faces(CommittedDatabase(alias=ALIASES[vendor], tenant=fresh_tenant()))
        with override_settings(HELIX_STORE={"FAST_PATHS": fast_paths}):
            sent = sent_by(faces.database.alias, CALLS[face][call](faces))
        if face in CLASSES and all(sql.startswith("SELECT") and " FOR " not in sql for sql in sent):
            self._unchanged[key] = faces
        return sent


@pytest.fixture
def measured() -> Measured:
    return Measured()


@pytest.fixture(scope="module")
def page() -> Iterator[Rows]:
    """The rows of the page. They are written back after the last test when that is asked for."""
    if WRITES and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail("Each worker of pytest-xdist measures a part: write the tables without -n.")
    yield ROWS
    if WRITES:
        PAGE.write_text(as_page(ROWS))


@pytest.mark.thorough
@for_each(("face", "call"), [(face, call) for face, calls in CALLS.items() for call in calls], shared=True)
def test_a_call_sends_as_many_statements_as_its_row_says(
    unblocked: None, measured: Measured, page: Rows, face: str, call: str
) -> None:
    expected = page.get((face, call), ("?",) * len(COLUMNS))
    found = measured.counts(face, call, expected)
    if WRITES:
        assert "?" not in found, "A new row needs both databases: HELIX_TEST_DATABASES=both."
        page[face, call] = found
    assert found == page.get((face, call)), (
        f"docs/{PAGE.name} should say:\n{as_row(call, found)}\nWrite the tables: {COMMAND}"
    )


@pytest.mark.skipif(WRITES, reason="The tables are being written.")
def test_the_tables_of_the_page_are_as_they_are_written() -> None:
    assert PAGE.read_text() == as_page(ROWS), (
        f"Do not edit the tables of docs/{PAGE.name}. Write them: {COMMAND}"
    )


@pytest.mark.skipif(WRITES, reason="The tables are being written.")
def test_every_row_is_of_a_call() -> None:
    assert set(ROWS) == {(face, call) for face, calls in CALLS.items() for call in calls}


@pytest.mark.skipif(WRITES, reason="The tables are being written.")
@for_each(
    ("steps", "turn"),
    [
        (0, "without a step"),
        (1, "of one step"),
        (6, "of six steps"),
        (0, "without a step of a new session"),
        (0, "without a step after a dead worker"),
        (0, "without a step after an answer"),
        (0, "without a step after an answer, the first one"),
        (1, "of one step after an answer"),
        (6, "of six steps after an answer"),
        (0, "while it waits"),
    ],
)
def test_a_turn_costs_what_its_steps_cost_and_little_more(steps: int, turn: str) -> None:
    """On PostgreSQL: at most 11 around the steps, and for each no more than a handle's step."""
    of_turn, of_step = (int(ROWS["session handle", call][-1]) for call in (f"turn {turn}", "step"))
    assert of_turn <= 11 + steps * of_step


@for_each(("face", "cls"), CLASSES.items(), ids=lambda value: str(value))
def test_every_public_method_has_a_row(face: str, cls: type[Any]) -> None:
    assert {call.partition(" ")[0] for call in CALLS[face]} == public_methods(cls)


def public_methods(cls: type[Any]) -> set[str]:
    """Without the async twins, which send what their originals send."""
    names = {name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))}
    return {name for name in names if name[:1] != "a" or name[1:] not in names}
