"""Arguments that cannot be meant: a typed error from every call, and no statement."""

from __future__ import annotations

from typing import Any, Final

import pytest

pytest.importorskip("google.adk", reason="Google ADK is not installed: pip install google-adk")

from asgiref.sync import async_to_sync
from django.test.utils import CaptureQueriesContext
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import Session
from google.adk.sessions.base_session_service import GetSessionConfig

from helix_store.contrib.google_adk import DjangoSessionService
from helix_store.exceptions import InvalidPayload, InvalidQuery
from tests.cells import for_each
from tests.databases import CommittedDatabase

_APP: Final = {"app_name": "weather"}
_USER: Final = {**_APP, "user_id": "ada"}
_SESSION: Final[dict[str, Any]] = {**_USER, "session_id": "trip"}
_EVENT: Final = {"session": Session(app_name="weather", user_id="ada", id="trip"), "event": Event(author="a")}

_CALLS: Final[dict[str, dict[str, Any]]] = {
    "create_session": {**_SESSION, "state": {}},
    "get_session": {**_SESSION, "config": GetSessionConfig()},
    "list_sessions": _USER,
    "delete_session": _SESSION,
    "get_user_state": _USER,
    "append_event": _EVENT,
}
_ARGUMENTS: Final = [
    pytest.param(call, argument, id=f"{call} {argument}")
    for call, arguments in _CALLS.items()
    for argument in arguments
]


def refused(db: CommittedDatabase, call: str, **arguments: Any) -> None:
    method = getattr(DjangoSessionService(db.alias, tenant=db.tenant), call)
    with (
        CaptureQueriesContext(db.connection) as captured,
        pytest.raises((InvalidPayload, InvalidQuery)),
    ):
        async_to_sync(method)(**{**_CALLS[call], **arguments})
    assert captured.captured_queries == []


@for_each("wrong", [object(), 1.5], ids=["object", "float"], shared=True)
@for_each(("call", "argument"), _ARGUMENTS, shared=True)
def test_a_wrong_type_is_refused_before_sql(
    committed_db: CommittedDatabase, call: str, argument: str, wrong: object
) -> None:
    refused(committed_db, call, **{argument: wrong})


@for_each("app_name", ["", "a\x00b", "a\ud800"], ids=ascii, shared=True)
@for_each("call", ["create_session", "get_session", "list_sessions", "get_user_state"], shared=True)
def test_a_name_that_no_app_can_have_is_refused_before_sql(
    committed_db: CommittedDatabase, call: str, app_name: str
) -> None:
    refused(committed_db, call, app_name=app_name)


def test_values_that_json_cannot_represent_are_refused_before_sql(committed_db: CommittedDatabase) -> None:
    refused(committed_db, "create_session", state={"raw": b"\xff"})
    for event in (
        Event(author="a", actions=EventActions(state_delta={"raw": b"\xff"})),
        Event(author="a", custom_metadata={"value": object()}),
        Event(author="a", output=object()),
    ):
        refused(committed_db, "append_event", event=event)


def test_more_events_than_a_database_can_count_are_all_events(committed_db: CommittedDatabase) -> None:
    service = DjangoSessionService(committed_db.alias, tenant=committed_db.tenant)
    session = async_to_sync(service.create_session)(**_SESSION)
    async_to_sync(service.append_event)(session, Event(author="a", id="first"))
    config = GetSessionConfig(num_recent_events=2**70)
    read = async_to_sync(service.get_session)(**_SESSION, config=config)
    assert read is not None
    assert [event.id for event in read.events] == ["first"]
