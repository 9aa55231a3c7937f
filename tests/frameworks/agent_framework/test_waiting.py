"""A session of Agent Framework waits for the answers to its workflows' requests and agents' approvals."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

pytest.importorskip(
    "agent_framework", reason="Microsoft Agent Framework is not installed: pip install agent-framework-core"
)

from agent_framework import Agent, AgentSession, ChatResponse, Content, FunctionInvocationLayer, Message, tool
from asgiref.sync import async_to_sync
from django.test.utils import CaptureQueriesContext

from helix_store.contrib.agent_framework import DjangoCheckpointStorage, DjangoHistoryProvider
from tests.databases import CommittedDatabase
from tests.frameworks.agent_framework.agents import Offer, ScriptedClient, booking
from tests.frameworks.waiting import asked, waiting

OFFER = f"{Offer.__module__}:{Offer.__qualname__}"
WAITS = [("trip", "request")]


class Client(FunctionInvocationLayer[Any], ScriptedClient):
    """A model that calls the tool ``refund`` twice, and then answers."""

    async def _answer(self) -> ChatResponse:
        self.number += 1
        if self.number > 1:
            return ChatResponse(messages=[Message("assistant", ["done"])])
        calls = [
            Content.from_function_call(call_id=f"call-{number}", name="refund", arguments={"amount": number})
            for number in (1, 2)
        ]
        return ChatResponse(messages=[Message("assistant", calls)])


@tool(approval_mode="always_require")
def refund(amount: int) -> str:
    """Refund an amount."""
    return f"refunded {amount}"


def _storage(db: CommittedDatabase) -> DjangoCheckpointStorage:
    return DjangoCheckpointStorage("trip", db.alias, tenant=db.tenant, allowed_checkpoint_types=[OFFER])


def _history(db: CommittedDatabase, **options: Any) -> DjangoHistoryProvider:
    return DjangoHistoryProvider(db.alias, tenant=db.tenant, **options)


@async_to_sync
async def _call(call: Awaitable[Any]) -> Any:
    return await call


def test_a_workflow_waits_until_a_person_has_answered(committed_db: CommittedDatabase) -> None:
    storage = _storage(committed_db)
    with asked(committed_db.tenant) as told:
        (question,) = _call(booking().run("Lisbon", checkpoint_storage=storage)).get_request_info_events()
        assert told == [("trip", [question.request_id], "trip")]
        assert waiting(committed_db) == WAITS
        latest = _call(storage.get_latest(workflow_name="trip"))
        answers: Any = {question.request_id: True}
        resumed = booking().run(
            checkpoint_id=latest.checkpoint_id, checkpoint_storage=storage, responses=answers
        )
        assert _call(resumed).get_outputs() == ["booked for Lisbon: 120 euros"]
        assert waiting(committed_db) == []
        assert len(told) == 1


def test_an_agent_waits_until_each_approval_is_answered(committed_db: CommittedDatabase) -> None:
    # A second provider stores the same messages.
    providers = [_history(committed_db), _history(committed_db, source_id="audit", load_messages=False)]
    agent = Agent(client=Client(), tools=[refund], context_providers=providers)
    session = AgentSession(session_id="trip")
    with asked(committed_db.tenant) as told:
        requests = _call(agent.run("Refund me.", session=session)).user_input_requests
        assert told == [("trip", [request.id for request in requests], "trip")]
        assert len(requests) == 2
        assert waiting(committed_db) == WAITS
        answers = [request.to_function_approval_response(True) for request in requests]
        for provider in providers:
            _call(provider.save_messages("trip", [Message("user", answers[:1])]))
        assert waiting(committed_db) == WAITS
        assert _call(agent.run(Message("user", answers[1:]), session=session)).text == "done"
        assert waiting(committed_db) == []
        assert len(told) == 1


def test_a_call_that_the_application_makes_waits_for_its_result(committed_db: CommittedDatabase) -> None:
    history = _history(committed_db)
    call = Content.from_function_call(call_id="one", name="camera", arguments={})
    call.user_input_request = True
    _call(history.save_messages("trip", [Message("assistant", [call])]))
    assert waiting(committed_db) == WAITS
    result = Content.from_function_result(call_id="one", result="a picture")
    _call(history.save_messages("trip", [Message("tool", [result])]))
    assert waiting(committed_db) == []


def test_a_checkpoint_of_a_workflow_leaves_the_requests_of_others(committed_db: CommittedDatabase) -> None:
    storage = _storage(committed_db)
    _call(booking().run("Lisbon", checkpoint_storage=storage))
    waits = _call(storage.get_latest(workflow_name="trip"))
    done = type(waits)(workflow_name="other", graph_signature_hash="")
    _call(storage.save(done))
    assert waiting(committed_db) == WAITS
    waits.pending_request_info_events = {}
    _call(storage.save(waits))
    assert waiting(committed_db) == []


def test_a_request_costs_no_statement(committed_db: CommittedDatabase) -> None:
    storage = _storage(committed_db)
    _call(booking().run("Lisbon", checkpoint_storage=storage))
    checkpoint = _call(storage.get_latest(workflow_name="trip"))
    pending: Any = checkpoint.pending_request_info_events
    counts = []
    given: list[Any] = [{}, {}, pending, pending]
    for requests in given:
        checkpoint.pending_request_info_events = requests
        with CaptureQueriesContext(committed_db.connection) as queries:
            _call(storage.save(checkpoint))
        counts.append(len(queries))
    assert len(set(counts)) == 1
