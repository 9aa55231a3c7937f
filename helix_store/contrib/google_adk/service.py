"""The session service of Google ADK in the project's database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from google.adk.errors import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events.event import Event
from google.adk.platform import time as platform_time
from google.adk.sessions import BaseSessionService, Session, State
from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse
from google.genai.types import MediaModality, ModalityTokenCount
from pydantic_core import to_jsonable_python

from helix_store.adapters import LockedSession, SessionAdapter, session_id_for
from helix_store.contrib.google_adk.catalogue import (
    APP,
    EVENTS,
    LISTED,
    LISTED_OF_USER,
    SESSION,
    SESSION_WITH_EVENTS,
    USER,
)
from helix_store.contrib.item_storage import (
    Document,
    ItemStorage,
    LockedItems,
    OpenRequests,
    built,
    count_of,
    document_of,
    is_same,
    record_usage,
    refuse_unreadable,
    response_entry,
)
from helix_store.core import validation
from helix_store.core.ids import new_id
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.payloads import decode
from helix_store.core.usage import UsageEntry
from helix_store.engine.async_twins import in_thread, in_thread_to_the_end
from helix_store.exceptions import InvalidPayload, InvalidQuery, SessionNotFound
from helix_store.items import item_key
from helix_store.models import Item

_AGENT_TYPE: Final = "google_adk"
_ROWS_PER_PAGE: Final = 1_000
_SHARED: Final = (USER, APP)
"""The lanes for the state that several sessions share. Writers lock their sessions in this order."""


class DjangoSessionService(BaseSessionService):
    """Sessions of ADK in the database ``using`` and one tenant.

    A session of ADK is one session here, which belongs to ADK's user, and its events are items. The state of
    an app and the state of each of its users are kept in separate sessions. A user's state belongs to the
    user, so an erasure of the user deletes it. Every write is one transaction under the session's lock. An
    event that is appended to an outdated `Session` raises ADK's ``StaleSessionError``, and nothing is stored.
    The usage of responses is recorded in the usage ledger in the transaction of the event; ``model`` is the
    name for responses that do not name their model, and if it is ``None``, their usage is not recorded. With
    a ``fencing_token``, a write raises `FencedOutError` if the session's lock has a larger one. If a write is
    cancelled, the caller is told after its transaction has ended. An erased session, or the erased state of a
    user, is not created again, which raises `SessionErased`, unless ``recreate`` is True.

    Example::

        service = DjangoSessionService()
        runner = Runner(app_name="travel", agent=agent, session_service=service)
        await service.create_session(app_name="travel", user_id="ada", session_id="lisbon")
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        agent_type: str = _AGENT_TYPE,
        model: str | None = "unknown",
        fencing_token: int | None = None,
        recreate: bool = False,
    ) -> None:
        self._storage = ItemStorage(
            agent_type, using, tenant=tenant, fencing_token=fencing_token, recreate=recreate
        )
        # The fencing token belongs to the lock of one session, not to the lock of a shared state's session.
        self._shared_states = SessionAdapter(agent_type, using, tenant=tenant, recreate=recreate)
        self._model = validation.optional_identifier(model, "model")

    @staticmethod
    def session_id_of(app_name: str, user_id: str, session_id: str) -> str:
        """Return the id of the session in this store."""
        return session_id_for("google_adk", app_name, user_id, session_id)

    # --- Sessions ----------------------------------------------------------------------------------

    async def create_session(
        self,
        *,
        app_name: str,
        user_id: str,
        state: dict[str, Any] | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Create a session, or use one that the application created with the id of `session_id_of`.

        Raises ADK's ``AlreadyExistsError``; also raises `InvalidPayload` and `LimitExceeded`.
        """
        item_key(app_name, "app_name")
        chosen = ("" if session_id is None else _stripped(session_id)) or new_id()
        deltas = _deltas({} if state is None else state)
        document = {
            "id": chosen,
            "last_update_time": platform_time.get_time(),
            "last_event": None,
            "marker": new_id(),
            "state": deltas[SESSION],
        }
        stored_id = self.session_id_of(app_name, user_id, chosen)

        def create(locked: LockedSession) -> Session:
            if not LockedItems(locked, SESSION).add(app_name, document):
                raise AlreadyExistsError(f"Session with id {chosen} already exists.")
            shared = {
                lane: self._merge(lane, app_name, user_id, deltas[lane])
                if deltas[lane]
                else self._shared(lane, app_name, user_id)
                for lane in _SHARED
            }
            return _session(app_name, user_id, chosen, document, shared)

        return await self._storage.awrite(stored_id, create, user_id=user_id)

    async def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: GetSessionConfig | None = None
    ) -> Session | None:
        """Return a session with its events, or ``None``. One statement.

        Raises `IntegrityFault` if an event cannot be read, because the agent must not continue without it.
        """
        if config is not None and not isinstance(config, GetSessionConfig):
            reason = f"config is a GetSessionConfig, not {type(config).__name__}."
            raise InvalidQuery(reason, path="config")
        newest = config.num_recent_events if config is not None else None
        name = _stripped(session_id)
        session = await in_thread(partial(self._read, app_name, user_id, name, newest=newest))
        if session is not None and config is not None and config.after_timestamp is not None:
            # As in ADK, return the events after the last one that is too old.
            old = [event.timestamp < config.after_timestamp for event in session.events]
            first = len(old) - old[::-1].index(True) if True in old else 0
            session.events = session.events[first:]
        return session

    async def list_sessions(self, *, app_name: str, user_id: str | None = None) -> ListSessionsResponse:
        """Return the sessions of an app, or of one of its users, without events. The least recently updated
        one comes first. Takes one statement for 1,000 sessions, and one for the state of the app.

        Sessions that the application created with another agent type are not listed.
        """
        user_id = validation.user_id(user_id)
        return ListSessionsResponse(sessions=await in_thread(partial(self._list, app_name, user_id)))

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Delete a session with its events and usage, but not the state of the app and the user. Safe to
        repeat. If the application created the session, only the items are deleted.
        """
        stored_id = self.session_id_of(app_name, user_id, _stripped(session_id))
        await self._storage.adelete(stored_id, Item)

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Return the state of a user in an app, without the prefix ``user:``."""
        return _state(await in_thread(partial(self._shared, USER, app_name, user_id)))

    # --- Events ------------------------------------------------------------------------------------

    async def append_event(self, session: Session, event: Event) -> Event:
        """Store an event, the state that it changes and its usage; either all of it is stored or nothing.

        Raises ADK's ``StaleSessionError`` if ``session`` lacks an event that another writer has stored; get
        the session again and redo the change. A repeat of the same event has no effect. Raises ADK's
        ``SessionNotFoundError``, and ``AlreadyExistsError`` for another event with the same id; also raises
        `InvalidPayload` and `LimitExceeded`.
        """
        for name, given, kind in (("session", session, Session), ("event", event, Event)):
            if not isinstance(given, kind):
                reason = f"expected {kind.__name__}, got {type(given).__name__}"
                raise InvalidPayload(path=name, reason=reason)
        if event.partial:
            return event
        is_new = False

        def append() -> None:
            nonlocal is_new
            is_new = self._append(session, event)

        try:
            await in_thread_to_the_end(append)
        finally:
            # Also if the task was cancelled: then the event is stored, and the next one follows it.
            if is_new:
                event = await super().append_event(session, event)
        return event

    def _append(self, session: Session, event: Event) -> bool:
        """Store an event, and return whether it was new."""
        stored_id = self.session_id_of(session.app_name, session.user_id, session.id)
        document = _stored_event(event)
        deltas = _deltas(event.actions.state_delta)
        before, marker = session._storage_update_marker, new_id()

        def append(locked: LockedSession) -> bool:
            nonlocal before
            items = LockedItems(locked, SESSION)
            stored = items.get(session.app_name)
            if stored is None:
                raise SessionNotFoundError(f"Session {session.id} not found.")
            if not self._add(locked, session, event, document):
                return False
            # This is read under the lock, because branches of a run append to the same object. After an
            # aborted transaction, the object may already have the marker of this call.
            if session._storage_update_marker != marker:
                before = session._storage_update_marker
            _refuse_stale(session, before, stored)
            changed = {
                "last_update_time": event.timestamp,
                "last_event": event.id,
                "marker": marker,
                "state": {**_state(stored), **deltas[SESSION]},
            }
            items.put(session.app_name, {**stored, **changed})
            _note_requests(locked, event)
            for lane in _SHARED:
                if deltas[lane]:
                    self._merge(lane, session.app_name, session.user_id, deltas[lane])
            session._storage_update_marker = marker
            return True

        try:
            is_new = self._storage.write(stored_id, append, create=False, user_id=session.user_id)
        except SessionNotFound as exc:
            raise SessionNotFoundError(f"Session {session.id} not found.") from exc
        except BaseException:
            if session._storage_update_marker == marker:
                session._storage_update_marker = before
            raise
        if is_new:
            session.last_update_time = event.timestamp
        return is_new

    def _add(self, locked: LockedSession, session: Session, event: Event, document: Document) -> bool:
        """Add the item and the usage of an event, and return whether it was new."""
        events = LockedItems(locked, f"{EVENTS}{session.app_name}")
        if not events.add(event.id, document):
            if not is_same(events.get(event.id), document):
                raise AlreadyExistsError(f"Event {event.id} already exists in session {session.id}.")
            return False
        if self._model is not None:
            record_usage(locked, [_usage_of(event, session_id=locked.session_id, model=self._model)])
        return True

    # --- State -------------------------------------------------------------------------------------

    def _merge(self, lane: str, app_name: str, user_id: str, delta: Document) -> Document:
        def merge(locked: LockedSession) -> Document:
            items = LockedItems(locked, lane)
            merged = {"state": {**_state(items.get(app_name) or {}), **delta}}
            items.put(app_name, merged)
            return merged

        owner, of = (user_id, "a user of the app") if lane == USER else (None, "the app")
        shared_id = _shared_id(lane, app_name, user_id)
        return self._shared_states.write(shared_id, merge, user_id=owner, title=f"State of {of} {app_name}")

    def _shared(self, lane: str, app_name: str, user_id: str) -> Document:
        return self._storage.get(_shared_id(lane, app_name, user_id), lane, app_name) or {}

    # --- Reads -------------------------------------------------------------------------------------

    def _read(self, app_name: str, user_id: str, session_id: str, *, newest: int | None) -> Session | None:
        parameters = {
            "tenant": self._storage.tenant,
            "session": self.session_id_of(app_name, user_id, session_id),
            "user_state": _shared_id(USER, app_name, user_id),
            "app_state": _shared_id(APP, app_name, user_id),
            "app": item_key(app_name, "app_name"),
            "events": f"{EVENTS}{app_name}",
            "limit": MAX_BIGINT if newest is None else min(newest, MAX_BIGINT),
        }
        rows = self._storage.db.read(SESSION_WITH_EVENTS, parameters)
        stored = {lane: document_of(decode(text)) for lane, _, text in rows if lane != parameters["events"]}
        if SESSION not in stored:
            return None
        events = sorted((key, text) for lane, key, text in rows if lane == parameters["events"])
        session = _session(app_name, user_id, session_id, stored[SESSION], stored)
        documents = [document_of(decode(text)) for _, text in events]
        session.events = [built(Event.model_validate, each, "google-adk", "event") for each in documents]
        return session

    def _list(self, app_name: str, user_id: str | None) -> list[Session]:
        sessions: dict[tuple[str, str], Document] = {}
        users: dict[str, Document] = {}
        shared = {APP: self._shared(APP, app_name, "")}
        for session_id, user, lane, text in self._pages(app_name, user_id):
            document = document_of(decode(text))
            if lane == USER:
                users[user] = document
            elif lane == SESSION and session_id == self.session_id_of(app_name, user, document["id"]):
                # A branch of a session holds the same document as its source.
                sessions[user, document["id"]] = document
        found = [
            _session(app_name, user, name, document, {**shared, USER: users.get(user, {})})
            for (user, name), document in sessions.items()
        ]
        return sorted(found, key=lambda each: (each.last_update_time, each.user_id, each.id))

    def _pages(self, app_name: str, user_id: str | None) -> Any:
        """Yield the id, user, lane and document of an app's sessions, in statements of one page each."""
        parameters: dict[str, Any] = {
            "tenant": self._storage.tenant,
            "agent_type": self._storage.agent_type,
            "app": app_name,
            "user": user_id,
            "at": datetime.min.replace(tzinfo=UTC),
            "after": "",
            "limit": _ROWS_PER_PAGE,
        }
        statement = LISTED if user_id is None else LISTED_OF_USER
        while rows := self._storage.db.read(statement, parameters):
            yield from (row[1:] for row in rows)
            if len(rows) < _ROWS_PER_PAGE:
                return
            parameters["at"], parameters["after"] = rows[-1][:2]


def _stripped(session_id: Any) -> str:
    """Return an id as ADK's services read it. Raises `InvalidPayload`."""
    if type(session_id) is not str:
        raise InvalidPayload(path="session_id", reason=f"expected str, got {type(session_id).__name__}")
    return session_id.strip()


def _shared_id(lane: str, app_name: str, user_id: str) -> str:
    """Return the id of the session that holds the state of a user or an app."""
    return session_id_for("google_adk", app_name, *((user_id,) if lane == USER else ()))


def _note_requests(locked: LockedSession, event: Event) -> None:
    """Note what an event asks of the user, and what the user answers in it.

    As in ADK, this is every call whose id is in ``long_running_tool_ids``: confirmations, credentials, inputs
    and long-running tools. The tool's own first result is not an answer.
    """
    requests = OpenRequests(locked, _AGENT_TYPE)
    if event.author == "user" and (responses := event.get_function_responses()):
        # In a branch below the call, the answer to a nested request also answers the call.
        runs = [segment.rpartition("@")[2] for segment in (event.branch or "").split(".") if "@" in segment]
        for answered in (*(response.id for response in responses), *runs):
            requests.answer(answered or "")
    for asked in sorted(event.long_running_tool_ids or ()):
        requests.open(asked)
    requests.write()


def _refuse_stale(session: Session, marker: str | None, stored: Document) -> None:
    """Raise ``StaleSessionError`` if a session object lacks the newest event. An object that the caller has
    built has no marker.
    """
    if marker is not None:
        is_stale = marker != stored["marker"]
    else:
        newest = session.events[-1].id if session.events else None
        is_stale = stored["last_update_time"] > session.last_update_time and stored["last_event"] != newest
    if is_stale:
        raise StaleSessionError(
            "The session was changed after it was read; get it again and redo the change."
        )


def _deltas(state: Mapping[str, Any]) -> dict[str, Document]:
    """Return the state of the session, the user and the app as JSON, without the prefixes. State that applies
    to a single invocation is left out. Raises `InvalidPayload`.
    """
    if not isinstance(state, Mapping):
        raise InvalidPayload(path="state", reason=f"expected dict, got {type(state).__name__}")
    prefixes = {State.USER_PREFIX: USER, State.APP_PREFIX: APP}
    deltas: dict[str, Document] = {SESSION: {}, USER: {}, APP: {}}
    plain = _plain(
        partial(to_jsonable_python, dict(state), serialize_unknown=True, inf_nan_mode="constants"), "state"
    )
    for key, value in plain.items():
        prefix = next((each for each in prefixes if key.startswith(each)), "")
        if not key.startswith(State.TEMP_PREFIX):
            deltas[prefixes.get(prefix, SESSION)][key.removeprefix(prefix)] = value
    return deltas


def _session(
    app_name: str, user_id: str, session_id: str, stored: Document, shared: Mapping[str, Document]
) -> Session:
    state = dict(_state(stored))
    for lane, prefix in ((APP, State.APP_PREFIX), (USER, State.USER_PREFIX)):
        state.update({f"{prefix}{key}": value for key, value in _state(shared.get(lane, {})).items()})
    session = Session(
        app_name=app_name,
        user_id=user_id,
        id=session_id,
        state=state,
        last_update_time=stored["last_update_time"],
    )
    session._storage_update_marker = stored["marker"]
    return session


def _state(document: Document) -> Document:
    state: Document = document.get("state") or {}
    return state


def _stored_event(event: Event) -> Document:
    """Return an event as a document, without the state of a single invocation. Raises `InvalidPayload`."""
    document: Document = _plain(partial(event.model_dump, mode="json", exclude_none=True), "event")
    if _has_null(document):
        document = _with_numbers(document, event.model_dump(exclude_none=True))
    refuse_unreadable(Event.model_validate, document, "google-adk", "event")
    delta = document["actions"]["state_delta"].items()
    document["actions"]["state_delta"] = {
        key: value for key, value in delta if not key.startswith(State.TEMP_PREFIX)
    }
    return document


def _plain(convert: Callable[[], Any], path: str) -> Any:
    """Return what Pydantic makes of a value. Raises `InvalidPayload` if JSON cannot represent the value."""
    try:
        return convert()
    except (ValueError, TypeError, RecursionError) as exc:
        reason = f"it cannot be written as JSON ({type(exc).__name__})"
    # This is raised here because Pydantic's error may contain the value, and would become the context.
    raise InvalidPayload(path=path, reason=reason)


def _has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_null, value.values()))
    return value is None or (isinstance(value, list) and any(map(_has_null, value)))


def _with_numbers(plain: Any, value: Any) -> Any:
    """Return a JSON value with NaN and infinity where ``value``, from which it was made, has them: Pydantic
    writes null, as the configuration of ADK's models says.
    """
    if isinstance(plain, dict) and isinstance(value, Mapping) and len(plain) == len(value):
        pairs = zip(plain.items(), value.values(), strict=True)
        return {key: _with_numbers(each, original) for (key, each), original in pairs}
    if isinstance(plain, list) and isinstance(value, list | tuple) and len(plain) == len(value):
        return [_with_numbers(each, original) for each, original in zip(plain, value, strict=True)]
    return value if plain is None and isinstance(value, float) else plain


def _usage_of(event: Event, *, session_id: str, model: str) -> UsageEntry | None:
    """Return the ledger entry for a model's response, or ``None`` for an event without usage. It has the id
    of the event, so that a copy in another session is not counted again.
    """
    usage = event.usage_metadata
    if usage is None:
        return None
    thoughts = count_of(usage.thoughts_token_count)
    return response_entry(
        session_id,
        session_id_for(f"google_adk:{event.id}"),
        source=session_id_for(event.author or "agent"),
        model=session_id_for(event.model_version or model),
        prompt=count_of(usage.prompt_token_count) + count_of(usage.tool_use_prompt_token_count),
        completion=count_of(usage.candidates_token_count) + thoughts,
        reasoning=thoughts,
        cached=count_of(usage.cached_content_token_count),
        audio_prompt=_audio(usage.prompt_tokens_details) + _audio(usage.tool_use_prompt_tokens_details),
        audio_completion=_audio(usage.candidates_tokens_details),
    )


def _audio(details: Sequence[ModalityTokenCount] | None) -> int:
    return sum(count_of(each.token_count) for each in details or () if each.modality is MediaModality.AUDIO)
