"""The message and the traceback of the exception that ended a run are shown to people."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import call_command
from django.test import override_settings

from helix_store.core.payloads import encode
from helix_store.core.types import Run
from helix_store.reports.payloads import said_by, traceback_of
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase


class OutOfSeats(Exception):
    pass


def failed_run(store: DatabaseStateStore, message: str) -> Run:
    def drive() -> None:
        with store.session("s").turn():
            raise OutOfSeats(message)

    store.create_session("s", agent_type="agent")
    with pytest.raises(OutOfSeats):
        drive()
    return store.list_runs("s")[0]


@pytest.fixture
def store(sqlite_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(sqlite_db.alias, tenant=sqlite_db.tenant)


def test_the_page_of_a_session_shows_the_message_and_the_traceback(store: DatabaseStateStore) -> None:
    failed_run(store, "no seat\x1b[31m left")
    written = StringIO()
    call_command(
        "helix_sessions",
        "show",
        "s",
        tenant=store.tenant,
        database=store.alias,
        stdout=written,
        no_color=True,
    )
    assert "raise OutOfSeats(message)" in written.getvalue()
    assert "OutOfSeats: no seat" in written.getvalue()
    assert "\x1b" not in written.getvalue()


def test_message_and_traceback_are_bounded(store: DatabaseStateStore) -> None:
    error = failed_run(store, "x" * 100_000).error
    assert len(error["message"]) == 2_000
    assert len(error["traceback"]) <= 8_000


def test_the_settings_omit_message_and_traceback(store: DatabaseStateStore) -> None:
    with override_settings(HELIX_STORE={"RUN_ERROR_DETAILS": False}):
        assert failed_run(store, "secret").error == {"type": "OutOfSeats"}


def test_the_start_of_a_stored_error_says_type_and_message() -> None:
    stored = encode({"type": "KeyError", "message": 'a "b"\n', "traceback": "lines"}, limit=1_000, path="")
    assert said_by(stored) == 'KeyError: a "b"\n'
    assert said_by(stored[:40]).startswith("KeyError: a")
    assert traceback_of(stored) == "lines"
    for other in (None, "", "null", "[]", "{", '{"code": 1}'):
        assert (said_by(other), traceback_of(other)) == ("", None)
