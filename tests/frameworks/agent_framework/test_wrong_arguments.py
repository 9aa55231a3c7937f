"""Arguments that cannot be meant: a typed error from every call, and no statement."""

from __future__ import annotations

from typing import Any, Final

import pytest

pytest.importorskip(
    "agent_framework", reason="Agent Framework is not installed: pip install agent-framework-core"
)

from agent_framework import AgentSession, Message, WorkflowCheckpoint
from asgiref.sync import async_to_sync
from django.test.utils import CaptureQueriesContext

from helix_store.contrib.agent_framework import (
    DjangoAgentSessions,
    DjangoCheckpointStorage,
    DjangoHistoryProvider,
)
from helix_store.exceptions import InvalidPayload, InvalidQuery
from tests.cells import for_each
from tests.databases import CommittedDatabase

_CHECKPOINT: Final = WorkflowCheckpoint(workflow_name="trip", graph_signature_hash="hash")

_CALLS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "history": {
        "get_messages": {"session_id": "trip"},
        "save_messages": {"session_id": "trip", "messages": [Message("user", ["hello"])]},
    },
    "sessions": {
        "get": {"session_id": "trip"},
        "set": {"session_id": "trip", "session": AgentSession(session_id="trip")},
        "delete": {"session_id": "trip"},
    },
    "checkpoints": {
        "save": {"checkpoint": _CHECKPOINT},
        "load": {"checkpoint_id": "first"},
        "delete": {"checkpoint_id": "first"},
        "get_latest": {"workflow_name": "trip"},
        "list_checkpoints": {"workflow_name": "trip"},
        "list_checkpoint_ids": {"workflow_name": "trip"},
    },
}
_ARGUMENTS: Final = [
    pytest.param(place, call, argument, id=f"{call} {argument}")
    for place, calls in _CALLS.items()
    for call, arguments in calls.items()
    for argument in arguments
]


def refused(db: CommittedDatabase, place: str, call: str, **arguments: Any) -> None:
    given: dict[str, Any] = {"using": db.alias, "tenant": db.tenant}
    places = {
        "history": DjangoHistoryProvider(**given),
        "sessions": DjangoAgentSessions(**given),
        "checkpoints": DjangoCheckpointStorage("trip", **given),
    }
    # The framework's own check of a session's id raises a ValueError.
    with (
        CaptureQueriesContext(db.connection) as captured,
        pytest.raises((InvalidPayload, InvalidQuery, *([ValueError] if place == "sessions" else []))),
    ):
        async_to_sync(getattr(places[place], call))(**{**_CALLS[place][call], **arguments})
    assert captured.captured_queries == []


@for_each("wrong", [object(), 1.5], ids=["object", "float"], shared=True)
@for_each(("place", "call", "argument"), _ARGUMENTS, shared=True)
def test_a_wrong_type_is_refused_before_sql(
    committed_db: CommittedDatabase, place: str, call: str, argument: str, wrong: object
) -> None:
    refused(committed_db, place, call, **{argument: wrong})


@for_each(
    "messages", ["hello", b"hello", ["hello"], [None], Message("user", ["hello"])], ids=str, shared=True
)
def test_only_messages_are_stored(committed_db: CommittedDatabase, messages: Any) -> None:
    refused(committed_db, "history", "save_messages", messages=messages)


@for_each("checkpoint_id", ["", "a\x00b", "a\ud800"], ids=ascii, shared=True)
@for_each("call", ["load", "delete"], shared=True)
def test_an_id_that_no_checkpoint_can_have_is_refused_before_sql(
    committed_db: CommittedDatabase, call: str, checkpoint_id: str
) -> None:
    refused(committed_db, "checkpoints", call, checkpoint_id=checkpoint_id)
