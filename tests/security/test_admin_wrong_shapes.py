"""A stored text of a wrong shape never breaks a page of the admin, in whichever column it stands."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from typing import Any, Final

import pytest
from django.db.models import Field, JSONField, Model, TextField, Value
from django.db.models.functions import Cast

from helix_store.admin.sections import SECTIONS
from helix_store.models import (
    Budget,
    Checkpoint,
    InterruptRequest,
    Lock,
    Session,
    StagedChange,
    Stream,
    StreamChunk,
    SubSessionRef,
    UsageEntry,
)
from tests.admin.conftest import Browser, browser_on
from tests.admin.rows import MODELS, rows_of, write_session
from tests.cells import for_each
from tests.databases import CommittedDatabase, delete_all_rows

SHOWN: Final = (*MODELS, InterruptRequest, SubSessionRef, StagedChange, StreamChunk)
"""The models whose rows appear on a page."""

COLUMNS: Final = [
    field
    for model in SHOWN
    for field in model._meta.concrete_fields
    if isinstance(field, TextField | JSONField)
]
"""All their columns of free text and JSON, payloads among them, by reflection."""

PART: Final[dict[str, Any]] = {"text": [1], "type": {}, "content": None}
CALL: Final[dict[str, Any]] = {"id": [], "function": {"name": ["n"], "arguments": {"a": None}}}

DOCUMENTS: Final = [
    *(
        "null",
        "true",
        "1",
        "1.5",
        '""',
        '"text"',
        "[]",
        "{}",
        "[null]",
        "[[1]]",
        "[1,2.5,true,{}]",
        '{"":null}',
    ),
    *('{"content":5}', '{"content":{"x":1},"tool_calls":"none"}', '{"content":[[1],null,5]}'),
    json.dumps({"content": [PART, "x", None], "tool_calls": [1, None, CALL, {"function": 5}]}),
    json.dumps({"role": 5, "content": ["\ud800"]}).replace("\\\\", "\\"),
    json.dumps({"tracing_context": [1], "output": 5, "workspace_refs": "none", "tags": {"a": 1}}),
    '{"call":null}',
    '{"call":{"tool_name":5,"deadline":"soon"}}',
    "[" * 200 + "]" * 200,
]
NOT_JSON: Final = [
    *("", "text", "{not json", "~\u2603", "~", "~{}", "[" * 100_000, '{"a":' * 5_000, "NaN", "-Infinity"),
    *("1" * 5_000, '{"a":1}{"b":2}', "'single'", "\u202e", "x" * 100_000, '{"content":"' + "\\" * 1_501),
]


@pytest.fixture
def browser(empty_db: CommittedDatabase) -> Iterator[Browser]:
    with browser_on(empty_db) as browser:
        browser.sign_in(superuser=True)
        yield browser
        # What these tests leave is damaged, and other tests look at every row.
        delete_all_rows(empty_db.alias)


@contextmanager
def _without_checks(browser: Browser) -> Iterator[None]:
    """SQLite stores anything in a column while its checks are off; PostgreSQL cannot be told to."""
    with browser.database.connection.cursor() as cursor:
        cursor.execute("PRAGMA ignore_check_constraints = ON")
    try:
        yield
    finally:
        with browser.database.connection.cursor() as cursor:
            cursor.execute("PRAGMA ignore_check_constraints = OFF")


def _write(database: CommittedDatabase) -> Session:
    """A session to damage, with chunks of a stream."""
    session = write_session(database)
    streams = Stream.objects.using(database.alias).filter(
        tenant=session.tenant, stream_id__startswith=session.session_id
    )
    streams.update(last_sequence=2)
    stream = streams.get()
    for sequence in (1, 2):
        StreamChunk.objects.using(database.alias).create(
            stream=stream, sequence=sequence, payload='{"type":"text","delta":"hello"}'
        )
    session.stream_id = stream.stream_id
    session.save(using=database.alias, update_fields=["stream_id"])
    return session


def _look(browser: Browser, damaged: Mapping[str, Session], model: type[Model]) -> int:
    """Open the pages that show rows of a model, damaged in the ways of the keys; return how many pages.

    All of them are on one list. Each of them is also on one other page: pages that are made of rows of the
    model come first.
    """
    shown = model if model in MODELS else Session
    write_session(browser.database, "readable")
    page = browser.list_of(shown)
    assert page.status == 200
    assert page.row_count == len(damaged) + 1
    # The page of a session shows its state too, which is the payload of a checkpoint.
    own_pages = {shown, Session} if model is Checkpoint else {shown}
    owner = Stream if model is StreamChunk else model
    sections = sorted(SECTIONS, key=lambda section: owner not in section.needs)
    pages: list[type[Model] | str] = [*own_pages, *(section.name for section in sections)]
    for opened, (what, session) in zip(cycle(pages), damaged.items(), strict=False):
        if isinstance(opened, str):
            page = browser.page_of(session, section=opened)
        else:
            page = browser.page_of(next(row for row in rows_of(session) if type(row) is opened))
        assert page.status == 200, (opened, what)
    return 1 + len(damaged)


def _store(browser: Browser, damaged: Session, field: Field[Any, Any], value: Any) -> None:
    rows = field.model._default_manager.using(browser.database.alias)
    of_damaged: dict[str, Any] = {"session_id": damaged.pk}
    if field.model is Session:
        of_damaged = {"pk": damaged.pk}
    elif field.model is StreamChunk:
        of_damaged = {"stream__tenant": damaged.tenant, "stream__stream_id": damaged.stream_id}
    elif field.model is Stream:
        of_damaged = {"tenant": damaged.tenant, "stream_id__startswith": damaged.session_id}
    assert rows.filter(**of_damaged).update(**{field.name: value})


@for_each("field", COLUMNS, ids=str)
def test_a_text_of_a_wrong_shape_breaks_no_page(
    browser: Browser, field: Field[Any, Any], security_counts: Counter[str]
) -> None:
    texts: list[str | None] = [*DOCUMENTS, *(NOT_JSON if isinstance(field, TextField) else [])]
    if field.null:
        texts.append(None)
    if isinstance(field, JSONField) and browser.database.vendor == "postgresql":
        texts = [text for text in texts if "ud800" not in str(text)]  # refused by jsonb
    damaged = {}
    for number, text in enumerate(texts):
        stored = json.loads(text) if isinstance(field, JSONField) and text is not None else text
        # JSON's null, not the database's.
        stored = Value(None, JSONField()) if isinstance(field, JSONField) and stored is None else stored
        session = damaged[f"{number}: {str(text)[:99]}"] = _write(browser.database)
        _store(browser, session, field, stored)
    security_counts["wrong shapes on pages of the admin"] += _look(browser, damaged, field.model)


@for_each("field", COLUMNS, ids=str)
def test_bytes_that_are_no_text_break_no_page(
    sqlite_db: CommittedDatabase, field: Field[Any, Any], security_counts: Counter[str]
) -> None:
    delete_all_rows(sqlite_db.alias)
    with browser_on(sqlite_db) as browser:
        browser.sign_in(superuser=True)
        with _without_checks(browser):
            damaged: dict[str, Session] = {}
            for stored in (b"\xff", b"\xff" * 5_000, b"[1]", 5, "{not json", ""):
                # A cast makes it text; without it the column holds bytes or a number.
                for value in (Cast(Value(stored), TextField()), Value(stored)):
                    session = damaged[f"{len(damaged)}: {stored!r}"[:99]] = _write(sqlite_db)
                    _store(browser, session, field, value)
            security_counts["wrong shapes on pages of the admin"] += _look(browser, damaged, field.model)
    delete_all_rows(sqlite_db.alias)


def test_an_unknown_word_breaks_no_page(sqlite_db: CommittedDatabase) -> None:
    for model in SHOWN:
        for field in model._meta.concrete_fields:
            # The database checks the words of a budget.
            if field.choices and model not in (Lock, UsageEntry, Budget):
                delete_all_rows(sqlite_db.alias)
                with browser_on(sqlite_db) as browser, _without_checks(browser):
                    browser.sign_in(superuser=True)
                    damaged: dict[str, Session] = {}
                    for word in ("unknown", "", "<script>", "x" * 5_000, "\u202e"):
                        session = damaged[word[:99]] = _write(sqlite_db)
                        _store(browser, session, field, Value(word))
                    _look(browser, damaged, field.model)
    delete_all_rows(sqlite_db.alias)
