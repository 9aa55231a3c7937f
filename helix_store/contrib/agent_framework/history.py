"""The history provider of Microsoft Agent Framework in the project's database."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from agent_framework import AgentResponse, AgentSession, Content, HistoryProvider, Message, SessionContext
from agent_framework import SupportsAgentRun as Agent
from agent_framework._sessions import filter_new_messages

from helix_store.adapters import LockedSession, session_id_for
from helix_store.contrib.agent_framework.catalogue import MESSAGES
from helix_store.contrib.item_storage import (
    ItemStorage,
    OpenRequests,
    built,
    count_of,
    document_of,
    record_usage,
    refuse_unreadable,
    response_entry,
    store_exactly,
)
from helix_store.core import validation
from helix_store.core.types import UserId
from helix_store.core.usage import UsageEntry
from helix_store.exceptions import InvalidPayload
from helix_store.items import ItemLog, lane_name

_saved: Final[ContextVar[tuple[AgentResponse[Any], str] | None]] = ContextVar(
    "helix_store_saved", default=None
)
"""The response whose messages are being saved, and the name of its agent, to record its usage."""


class DjangoHistoryProvider(HistoryProvider):
    """The messages of agents' sessions as items of sessions, in the database ``using`` and one tenant.

    A session of the framework is one session here, and the messages of this provider are one of its lanes.
    Saving messages is one transaction under the session's lock: messages that are already stored are left
    out, as in the framework's own providers, and the usage of the response is recorded in the ledger.
    ``model`` is the name for responses that do not name their model; if it is ``None``, their usage is not
    recorded. ``user_id`` is the user of the sessions; a session of another user raises `ConflictError`. With
    a ``fencing_token``, a write raises `FencedOutError` if the session's lock has a larger one. An erased
    session is not created again, which raises `SessionErased`, unless ``recreate`` is True. The other
    options are the same as for the framework's providers.

    Example::

        history = DjangoHistoryProvider(user_id="ada")
        agent = Agent(client=client, tools=[weather], context_providers=[history])
        await agent.run("How is Lisbon?", session=AgentSession(session_id="lisbon"))
    """

    DEFAULT_SOURCE_ID: Final = "helix_store"

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        agent_type: str = "agent_framework",
        user_id: UserId | None = None,
        model: str | None = "unknown",
        fencing_token: int | None = None,
        recreate: bool = False,
        source_id: str = DEFAULT_SOURCE_ID,
        load_messages: bool = True,
        store_inputs: bool = True,
        store_context_messages: bool = False,
        store_context_from: set[str] | None = None,
        store_outputs: bool = True,
        skip_excluded: bool = False,
    ) -> None:
        super().__init__(
            source_id,
            load_messages=load_messages,
            store_inputs=store_inputs,
            store_context_messages=store_context_messages,
            store_context_from=store_context_from,
            store_outputs=store_outputs,
        )
        self.skip_excluded = skip_excluded
        self._storage = ItemStorage(
            agent_type,
            using,
            tenant=tenant,
            user_id=user_id,
            fencing_token=fencing_token,
            recreate=recreate,
        )
        self._lane = lane_name(f"{MESSAGES}{source_id}", "source_id")
        self._model = validation.optional_identifier(model, "model")

    @staticmethod
    def session_id_of(session_id: str) -> str:
        """Return the session's id in this store, which is derived if the framework's id is too long."""
        return session_id_for(session_id)

    async def get_messages(
        self, session_id: str | None, *, state: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[Message]:
        """Return the stored messages. One query.

        Raises `IntegrityFault` if a message cannot be read, because the agent must not continue without it.
        """
        items = await self._log(session_id).atail()
        messages = [_message(item.payload) for item in items]
        if self.skip_excluded:
            return [each for each in messages if not each.additional_properties.get("_excluded", False)]
        return messages

    async def save_messages(
        self,
        session_id: str | None,
        messages: Sequence[Message],
        *,
        state: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the new messages and the usage of the response, either all of them or nothing."""
        if not messages:
            return
        log, saved, given = self._log(session_id), _saved.get(), list(messages)

        def save(locked: LockedSession) -> None:
            # Messages stored before these cannot overlap with the new ones.
            known = [_message(item.payload) for item in log.tail(len(given) + 1)]
            added = filter_new_messages(known, given)
            new = [message.to_dict() for message in added]
            for document in new:
                refuse_unreadable(Message.from_dict, document, "agent-framework-core", "message")
            store_exactly(log.append, new)
            _note_requests(locked, added)
            if saved is not None and self._model is not None:
                response, agent = saved
                record_usage(locked, [_usage_of(response, agent, locked.session_id, self._model)])

        await self._storage.awrite(log.session_id, save)

    async def after_run(
        self, *, agent: Agent, session: AgentSession, context: SessionContext, state: dict[str, Any]
    ) -> None:
        """Save the messages of a run, and its usage."""
        response = context.response
        token = _saved.set(None if response is None else (response, agent.name or agent.id))
        try:
            await super().after_run(agent=agent, session=session, context=context, state=state)
        finally:
            _saved.reset(token)

    def _log(self, session_id: str | None) -> ItemLog:
        if session_id is None:
            raise InvalidPayload(path="session_id", reason="a history needs a session with an id")
        return self._storage.log(session_id_for(session_id), self._lane)


def _message(payload: Any) -> Message:
    """Build a message from a stored document. Raises `IntegrityFault`."""
    return built(Message.from_dict, document_of(payload), "agent-framework-core", "message")


def _note_requests(locked: LockedSession, messages: Iterable[Message]) -> None:
    """Note the approvals and calls that messages ask of the user, and the answers that they contain."""
    requests = OpenRequests(locked, "messages")
    for content in (content for message in messages for content in message.contents):
        match content:
            case Content(type="function_approval_request", id=str(asked)):
                requests.open(asked)
            case Content(type="function_call", user_input_request=True, call_id=str(asked)):
                requests.open(asked)
            case Content(type="function_approval_response", id=str(answered)):
                requests.answer(answered)
            case Content(type="function_result", call_id=str(answered)):
                requests.answer(answered)
    requests.write()


def _usage_of(response: AgentResponse[Any], agent: str, session_id: str, model: str) -> UsageEntry | None:
    """Return the entry of a response. Its id is that of the response, so that two providers of one agent
    record the usage only once.
    """
    counts: dict[str, Any] = dict(response.usage_details or {})
    named = getattr(response.raw_representation, "model", None)
    name = response.response_id
    entry_id = None if name is None else session_id_for("agent_framework", session_id, name)
    return response_entry(
        session_id,
        entry_id,
        source=session_id_for(agent),
        model=session_id_for(named) if isinstance(named, str) and named else model,
        prompt=count_of(counts.get("input_token_count")),
        completion=count_of(counts.get("output_token_count")),
        reasoning=count_of(counts.get("reasoning_output_token_count")),
        cached=count_of(counts.get("cache_read_input_token_count")),
        cache_write=count_of(counts.get("cache_creation_input_token_count")),
    )
