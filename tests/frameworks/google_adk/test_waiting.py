"""An ADK session waits for the user's answers to confirmations and long-running tools."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("google.adk", reason="Google ADK is not installed: pip install google-adk")

from asgiref.sync import async_to_sync
from django.test.utils import CaptureQueriesContext
from google.adk.agents import LlmAgent
from google.adk.events.event import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import Session
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from google.genai import types

from helix_store.contrib.google_adk import DjangoSessionService
from tests.databases import CommittedDatabase
from tests.frameworks.waiting import asked, waiting

APP, USER, SESSION = "shop", "ada", "order"
NAMED: dict[str, Any] = {"app_name": APP, "user_id": USER, "session_id": SESSION}
STORED = DjangoSessionService.session_id_of(APP, USER, SESSION)


class Model(BaseLlm):
    """It calls both tools at first, and then says that it is done."""

    async def generate_content_async(
        self, llm_request: Any, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        if llm_request.contents[-1].parts[-1].text == "please":
            calls: list[Any] = [("refund", {"amount": 5}), ("ask", {"question": "Why?"})]
            parts = [
                types.Part(function_call=types.FunctionCall(name=name, args=args)) for name, args in calls
            ]
        else:
            parts = [types.Part(text="done")]
        yield LlmResponse(content=types.Content(role="model", parts=parts))


def refund(amount: int) -> dict[str, Any]:
    """Refund an amount."""
    return {"refunded": amount}


def ask(question: str) -> dict[str, Any]:
    """Ask the user."""
    return {"status": "pending"}


def _service(db: CommittedDatabase) -> DjangoSessionService:
    return DjangoSessionService(db.alias, tenant=db.tenant)


@async_to_sync
async def _run(service: DjangoSessionService, part: types.Part) -> list[types.FunctionCall]:
    """Run the agent with a message, and return the calls that it leaves to the user."""
    tools: list[Any] = [FunctionTool(refund, require_confirmation=True), LongRunningFunctionTool(ask)]
    agent = LlmAgent(name="agent", model=Model(model="model"), tools=tools)
    runner = Runner(app_name=APP, agent=agent, session_service=service)
    message = types.Content(role="user", parts=[part])
    return [
        call
        async for event in runner.run_async(user_id=USER, session_id=SESSION, new_message=message)
        for call in event.get_function_calls()
        if call.id in (event.long_running_tool_ids or ())
    ]


def _answer(call: types.FunctionCall) -> types.Part:
    response = {"confirmed": True} if call.name == "adk_request_confirmation" else {"status": "answered"}
    answer = types.FunctionResponse(id=call.id, name=call.name, response=response)
    return types.Part(function_response=answer)


def test_an_agent_waits_until_the_user_has_answered_everything(committed_db: CommittedDatabase) -> None:
    service = _service(committed_db)
    async_to_sync(service.create_session)(**NAMED)
    with asked(committed_db.tenant) as told:
        calls = _run(service, types.Part(text="please"))
        assert [call.name for call in calls] == ["ask", "adk_request_confirmation"]
        assert told == [(STORED, [call.id], STORED) for call in calls]
        assert waiting(committed_db) == [(STORED, "request")]
        assert not _run(service, types.Part(text="What is open?"))
        assert not _run(service, _answer(calls[0]))
        assert waiting(committed_db) == [(STORED, "request")]
        assert not _run(service, _answer(calls[1]))
        assert waiting(committed_db) == []
        assert len(told) == 2


def _event(author: str = "agent", *parts: types.Part, **fields: Any) -> Event:
    return Event(author=author, content=types.Content(role="user", parts=list(parts)), **fields)


def _response(name: str) -> types.Part:
    return types.Part(function_response=types.FunctionResponse(id=name, name="ask", response={"ok": 1}))


def _append(service: DjangoSessionService, session: Session, event: Event) -> None:
    async_to_sync(service.append_event)(session, event)


@pytest.fixture
def session(committed_db: CommittedDatabase) -> Session:
    return async_to_sync(_service(committed_db).create_session)(**NAMED)


def test_only_the_user_answers_and_an_answer_below_the_call_counts(
    committed_db: CommittedDatabase, session: Session
) -> None:
    service = _service(committed_db)
    with asked(committed_db.tenant) as told:
        _append(service, session, _event(long_running_tool_ids={"one", "two"}))
        assert told == [(STORED, ["one", "two"], STORED)]
        _append(service, session, _event("agent", _response("one")))
        _append(service, session, _event("user", _response("one")))
        assert waiting(committed_db) == [(STORED, "request")]
        _append(service, session, _event("user", _response("nested"), branch="agent@1.tool@two.inner"))
        assert waiting(committed_db) == []
        assert len(told) == 1


def test_a_repeated_event_tells_nobody_again(committed_db: CommittedDatabase, session: Session) -> None:
    service, event = _service(committed_db), _event(long_running_tool_ids={"one"})
    with asked(committed_db.tenant) as told:
        for _ in range(2):
            _append(service, session, event)
        _append(service, session, _event(long_running_tool_ids={"one"}))
        assert told == [(STORED, ["one"], STORED)]


def test_more_requests_than_a_mark_can_note_still_wait(
    committed_db: CommittedDatabase, session: Session
) -> None:
    service, names = _service(committed_db), [f"call {number}" for number in range(30)]
    _append(service, session, _event(long_running_tool_ids=set(names)))
    assert waiting(committed_db) == [(STORED, "request")]
    _append(service, session, _event("user", *map(_response, names)))
    assert waiting(committed_db) == []


def test_a_request_costs_no_statement(committed_db: CommittedDatabase, session: Session) -> None:
    service, counts = _service(committed_db), []
    given: list[Any] = [{}, {"long_running_tool_ids": {"one"}}]
    for fields in given:
        with CaptureQueriesContext(committed_db.connection) as queries:
            _append(service, session, _event(**fields))
        counts.append(len(queries))
    assert counts[0] == counts[1]
