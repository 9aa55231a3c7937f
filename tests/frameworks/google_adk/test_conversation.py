"""Events of Google ADK as messages. They are read without ADK."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from helix_store.contrib.google_adk.catalogue import CONVERSATION
from helix_store.core.transcript import CutText, Part
from helix_store.engine.database import Database
from helix_store.items import ItemLog
from helix_store.models import Session
from tests.cells import for_each
from tests.databases import CommittedDatabase


def parts(*listed: Any, **fields: Any) -> list[Part]:
    said = CONVERSATION.says({"author": "guide", "content": {"parts": [*listed]}, **fields})
    assert said is not None
    return said.parts


def test_texts_thoughts_calls_results_and_files_are_told_apart() -> None:
    call = {"id": "c1", "name": "weather", "args": {"city": "Lisbon"}}
    assert parts(
        {"text": "hm", "thought": True},
        {"text": "It is", "thought_signature": "AP8="},
        {"function_call": call},
        {"function_response": {"id": "c1", "name": "weather", "response": {"result": "sunny"}}},
        {"function_response": {"id": "c2", "name": "weather", "response": {"error": "no"}}},
        {"inline_data": {"data": "AP8=", "mime_type": "image/png"}},
        {"file_data": {"file_uri": "gs://bucket/map", "display_name": "map.png"}},
        {"executable_code": {"code": "1 + 1"}},
    ) == [
        Part(kind="thinking", text="hm"),
        Part(kind="text", text="It is", rest='{"thought_signature": "AP8="}'),
        Part(kind="call", text='{"city": "Lisbon"}', name="weather", call_id="c1"),
        Part(kind="result", text='{"result": "sunny"}', name="weather", call_id="c1"),
        Part(kind="result", text='{"error": "no"}', name="weather", call_id="c2", is_error=True),
        Part(kind="file", text="2 bytes", name="image/png"),
        Part(kind="file", text="gs://bucket/map", name="map.png"),
        Part(kind="call", text="1 + 1", name="executable_code"),
    ]
    cut = {"inline_data": {"data": CutText("AP8="), "mime_type": "image/png"}}
    assert parts(cut) == [Part(kind="file", text="more than 2 bytes", name="image/png")]
    assert parts(error_message="quota") == [Part(kind="other", text="quota", name="error", is_error=True)]


def test_the_author_and_the_time_of_the_event_are_shown() -> None:
    said = CONVERSATION.says({"author": "user", "timestamp": 1_700_000_000.5})
    assert said is not None
    assert (said.role, said.at) == ("user", datetime(2023, 11, 14, 22, 13, 20, 500_000, tzinfo=UTC))


@for_each(
    "event",
    [
        {},
        {"author": 1, "content": 1, "timestamp": "soon"},
        {"content": {"parts": {"text": 1}}, "timestamp": 1e300},
        {
            "content": {
                "parts": [1, {"text": 1}, {"function_call": 1}, {"function_call": {"id": 1, "name": 2}}]
            }
        },
        {"content": {"parts": [{"inline_data": {"data": 1}}, {"function_response": {"response": 1}}]}},
    ],
)
def test_a_damaged_event_raises_nothing(event: dict[str, Any]) -> None:
    assert CONVERSATION.says(event) is not None


def test_a_session_has_one_conversation_and_its_state_is_none(committed_db: CommittedDatabase) -> None:
    options: dict[str, Any] = {"using": committed_db.alias, "tenant": committed_db.tenant}
    ItemLog("s", "google_adk/session", **options).put("travel", {"state": {}})
    for text in ("hi", "hello"):
        event = {"author": "user", "content": {"parts": [{"text": text}]}}
        ItemLog("s", "google_adk/events/travel", **options).append([event])
    key = Session.objects.using(committed_db.alias).get(tenant=committed_db.tenant).pk
    db = Database(committed_db.alias, committed_db.tenant)
    page = CONVERSATION.page(db, key, first=None, limit=10)
    assert page is not None
    assert [message.parts[0].text for message in page.messages if message.parts] == ["hi", "hello"]
    assert page.threads == ()
    assert CONVERSATION.outlines(db, [key])[key].count == 2
