"""Runs that wait for an approval: the exact text of a ``RunState``, and the right to resume it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from helix_store import conf
from helix_store.adapters import LockedSession, SessionAdapter, session_id_for
from helix_store.contrib.openai_agents.models import OpenAIRunState
from helix_store.core import moments, validation
from helix_store.core.ids import new_id
from helix_store.core.moments import as_utc
from helix_store.core.payloads import decode, encode, size_of
from helix_store.core.types import Duration, UserId
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Rows
from helix_store.engine.statement import Statement, table, with_clock
from helix_store.exceptions import (
    ConflictError,
    IntegrityFault,
    InvalidPayload,
    LockLostError,
    SessionNotFound,
)
from helix_store.locks import claim_gap, ttl_milliseconds
from helix_store.models import Session
from helix_store.sessions.statements import SESSION_BY_ID

if TYPE_CHECKING:
    from agents import RunState


_STATE: Final = table(OpenAIRunState)
_OF_SESSION: Final = f"session_id = (SELECT id FROM {table(Session)} WHERE {SESSION_BY_ID})"
_ONE: Final = "session_id = %(session)s AND state_id = %(state_id)s"
_OWN: Final = f"{_ONE} AND claim_token = %(token)s"
_HELD: Final = f"{_OWN} AND resumed_at IS NULL AND claim_expires_at > {{now}}"
_IS_WAITING: Final = "resumed_at IS NULL AND (deadline IS NULL OR deadline > {now})"

_OTHERS_WAIT: Final = f"""EXISTS (
            SELECT 1 FROM {_STATE} AS o WHERE o.session_id = %(session)s AND o.state_id <> %(state_id)s
                AND o.resumed_at IS NULL AND (o.deadline IS NULL OR o.deadline > {{now}}))"""

HEAD_COLUMNS: Final = (
    *("state_id", "size_bytes", "owner", "deadline"),
    *("claim_owner", "claim_expires_at", "resumed_at", "created_at"),
)
_HEAD: Final = ", ".join(HEAD_COLUMNS)


def _with_clock(text: str) -> Statement:
    """Return a statement in which ``{now}`` is the database's time and ``{end}`` the end of a new term."""
    return with_clock(lambda clock: text.format(now=clock.now, end=clock.after("ttl_ms")))


SAVE: Final = Statement(
    f"""INSERT INTO {_STATE}
            (session_id, state_id, payload, size_bytes, owner, deadline, claim_token, created_at)
        VALUES (%(session)s, %(state_id)s, %(payload)s, %(size_bytes)s, %(owner)s, %(deadline)s, 0, %(at)s)
        ON CONFLICT (session_id, state_id) DO NOTHING RETURNING id"""
)
LOAD: Final = Statement(
    f"SELECT {_HEAD}, payload FROM {_STATE} WHERE {_OF_SESSION} AND state_id = %(state_id)s"
)
WAITING: Final = _with_clock(
    f"SELECT {_HEAD} FROM {_STATE} WHERE {_OF_SESSION} AND {_IS_WAITING} ORDER BY id LIMIT %(limit)s"
)
CLAIM: Final = _with_clock(
    f"""UPDATE {_STATE}
        SET claim_owner = %(resumer)s, claim_token = claim_token + %(gap)s, claim_expires_at = {{end}}
        WHERE {_ONE} AND {_IS_WAITING} AND (claim_expires_at IS NULL OR claim_expires_at <= {{now}})
            AND (owner IS NULL OR owner = %(owner)s)
        RETURNING claim_token, claim_expires_at, payload"""
)
REFRESH: Final = _with_clock(
    f"UPDATE {_STATE} SET claim_expires_at = {{end}} WHERE {_HELD} RETURNING claim_expires_at"
)
RELEASE: Final = _with_clock(f"UPDATE {_STATE} SET claim_expires_at = NULL WHERE {_HELD} RETURNING id")
# This also works after the term has expired, unless someone else has claimed it since: the run was resumed.
FINISH: Final = _with_clock(
    f"""UPDATE {_STATE} SET resumed_at = COALESCE(resumed_at, {{now}})
        WHERE {_OWN} AND claim_expires_at IS NOT NULL RETURNING {_OTHERS_WAIT}"""
)
DELETE: Final = _with_clock(f"DELETE FROM {_STATE} WHERE {_ONE} RETURNING {_OTHERS_WAIT}")
_ENDS: Final = (FINISH, DELETE)
"""The statements after which a run no longer waits. They return whether another run of the session does."""
_WAITING_KIND: Final = "approval"


_TTL_MS: Final = 60_000
_LISTED: Final = 200
_MOMENTS: Final = ("deadline", "claim_expires_at", "resumed_at", "created_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRunState:
    """A stored run. ``owner`` is the user who may answer it, ``claim_owner`` the newest resumer.

    In the result of `RunStateStore.waiting`, ``text`` is ``None``.

    Example::

        states = RunStateStore()
        waiting = await Runner.run(banker, "Send 5 dollars to Bob")
        await states.asave("chat-1", waiting.to_state(), owner="ada")
        print([(stored.state_id, stored.owner) for stored in await states.awaiting("chat-1")])
    """

    session_id: str
    state_id: str
    size_bytes: int
    owner: str | None
    deadline: datetime | None
    claim_owner: str | None
    claim_expires_at: datetime | None
    resumed_at: datetime | None
    created_at: datetime
    text: str | None = None


class RunStateStore:
    """The waiting runs, each in a row of its session. The text of a run is returned exactly as it was saved:
    ``RunState.from_string(agent, text)`` continues the run in any process. According to the SDK, it may
    contain credentials; anyone who can read the table can read them. A save sets ``user_id`` as the user of a
    session without one, and raises `ConflictError` if the session belongs to another user. An erased session
    is not created again, which raises `SessionErased`, unless ``recreate`` is True.

    Example::

        states = RunStateStore()
        waiting = await Runner.run(banker, "Send 5 dollars to Bob")
        state_id = await states.asave("chat-1", waiting.to_state(), owner="ada")
        claim = await states.aclaim("chat-1", state_id, resumer="worker-1", owner="ada")
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        user_id: UserId | None = None,
        recreate: bool = False,
    ) -> None:
        self._sessions = SessionAdapter("openai_agents", using, tenant=tenant, recreate=recreate)
        self._user_id = validation.user_id(user_id)

    def save(
        self,
        session_id: str,
        state: RunState[Any, Any] | str,
        *,
        state_id: str | None = None,
        owner: str | None = None,
        deadline: datetime | None = None,
    ) -> str:
        """Store a waiting run, and return its id, by default a new one. If ``owner`` is set, only this user
        may claim it, and nobody can after ``deadline``. The first run creates the session. A repeat is safe;
        the same id with another text raises `ConflictError`. Raises `InvalidPayload`, for example for text
        that is not a JSON object and could not be resumed, and `LimitExceeded` beyond ``max_state_bytes``.
        """
        text = state if isinstance(state, str) else _written(state)
        payload = encode(text, limit=conf.limits().max_state_bytes, path="/state")
        _require_object(text)
        chosen = new_id() if state_id is None else validation.identifier(state_id, "state_id")
        until = validation.optional(validation.epoch_milliseconds)(deadline, "deadline")
        columns = {
            "state_id": chosen,
            "payload": payload,
            "size_bytes": size_of(payload),
            "owner": validation.optional_identifier(owner, "owner"),
            "deadline": None if until is None else validation.milliseconds_to_datetime(until),
        }

        def insert(session: LockedSession) -> str:
            at = moments.now()
            if session.db.execute(SAVE, {**columns, "session": session.key, "at": at}):
                session.wait_for(_WAITING_KIND, opened=[chosen])
                return chosen
            rows = session.db.execute(LOAD, self._names(session_id, chosen))
            if [row[-1] for row in rows] == [payload]:
                return chosen
            raise ConflictError("The session has another run state with this id.")

        return self._sessions.write(session_id_for(session_id), insert, user_id=self._user_id)

    def load(self, session_id: str, state_id: str) -> StoredRunState | None:
        """Return a stored run with its text, or ``None``. One query; it does not claim the run."""
        validation.identifier(state_id, "state_id")
        for row in self._sessions.db.read(LOAD, self._names(session_id, state_id)):
            return _stored(session_id, row, text=_text(row[-1]))
        return None

    def waiting(self, session_id: str, *, limit: int = 50) -> list[StoredRunState]:
        """List the waiting runs of a session, oldest first, at most 200, without their text. One query."""
        parameters = self._names(session_id, "") | {"limit": validation.page_limit(limit, maximum=_LISTED)}
        return [_stored(session_id, row) for row in self._sessions.db.read(WAITING, parameters)]

    def claim(
        self,
        session_id: str,
        state_id: str,
        *,
        resumer: str,
        owner: str | None = None,
        ttl_ms: Duration = _TTL_MS,
    ) -> RunStateClaim | None:
        """Take the right to resume a run for a term on the database's clock, or return ``None`` if it is
        refused. The claim is refused while another one is active, after one was completed, after the
        deadline, and for an ``owner`` other than the run's. Only one of several concurrent callers gets it.
        """
        term = ttl_milliseconds(ttl_ms, "ttl_ms")
        names = {
            "resumer": validation.identifier(resumer, "resumer"),
            "owner": validation.optional_identifier(owner, "owner"),
        }
        rows = self._write(session_id, state_id, CLAIM, {**names, "ttl_ms": term, "gap": claim_gap()})
        for token, expires_at, payload in rows:
            return RunStateClaim(
                self, session_id, state_id, resumer, token, as_utc(expires_at), _text(payload), term
            )
        return None

    def delete(self, session_id: str, state_id: str) -> bool:
        """Delete a run, claimed or not, and return whether it existed. Safe to repeat."""
        return bool(self._write(session_id, state_id, DELETE, {}))

    def _write(
        self, session_id: str, state_id: str, statement: Statement, parameters: Mapping[str, Any]
    ) -> Rows:
        validation.identifier(state_id, "state_id")

        def run(session: LockedSession) -> Rows:
            named = {**parameters, "session": session.key, "state_id": state_id}
            rows = session.db.execute(statement, named)
            if statement in _ENDS and rows and not rows[0][0]:
                session.wait_for(None)
            return rows

        try:
            return self._sessions.write(session_id_for(session_id), run, create=False)
        except SessionNotFound:
            return []

    def _names(self, session_id: str, state_id: str) -> dict[str, Any]:
        tenant = self._sessions.tenant
        return {"tenant": tenant, "session_id": session_id_for(session_id), "state_id": state_id}

    asave = async_twin(save)
    aload = async_twin(load)
    awaiting = async_twin(waiting)
    aclaim = async_twin(claim)
    adelete = async_twin(delete)


@dataclass(eq=False, repr=False, slots=True)
class RunStateClaim:
    """The right to resume one run. If the resumer dies, the run can be claimed after the term.

    Example::

        states = RunStateStore()
        waiting = await Runner.run(banker, "Send 5 dollars to Bob")
        state_id = await states.asave("chat-1", waiting.to_state())
        claim = await states.aclaim("chat-1", state_id, resumer="worker-1")
        if claim is not None:
            state = await RunState.from_string(banker, claim.text)
            await claim.adone()
    """

    _store: RunStateStore
    session_id: str
    state_id: str
    resumer: str
    token: int
    expires_at: datetime
    text: str
    _ttl_ms: int

    def __repr__(self) -> str:
        return f"<RunStateClaim on {self.state_id} of {self.resumer!r}>"

    def refresh(self, ttl_ms: Duration | None = None) -> datetime:
        """Restart the term and return its new end. Raises `LockLostError` if the term has expired."""
        term = self._ttl_ms if ttl_ms is None else ttl_milliseconds(ttl_ms, "ttl_ms")
        rows = self._write(REFRESH, {"ttl_ms": term})
        if not rows:
            raise LockLostError(name=self.state_id, fencing_token=self.token)
        self._ttl_ms, self.expires_at = term, as_utc(rows[0][0])
        return self.expires_at

    def done(self) -> bool:
        """Mark the run as resumed, so that no one can claim it again. If you call it in the transaction of
        the side effect, both happen or neither does. This also works after the term. Returns ``False`` if the
        run was claimed again, released or deleted.
        """
        return bool(self._write(FINISH, {}))

    def release(self) -> bool:
        """Make the run available again; return ``False`` if the term had expired."""
        return bool(self._write(RELEASE, {}))

    def _write(self, statement: Statement, parameters: Mapping[str, Any]) -> Rows:
        parameters = {**parameters, "token": self.token}
        return self._store._write(self.session_id, self.state_id, statement, parameters)

    arefresh = async_twin(refresh)
    adone = async_twin(done)
    arelease = async_twin(release)


def _written(state: Any) -> str:
    if not hasattr(state, "to_string"):
        raise InvalidPayload(path="state", reason=f"expected RunState or str, got {type(state).__name__}")
    try:
        text = state.to_string()
    except RecursionError:
        text = None
    if text is None:
        raise InvalidPayload(path="state", reason="it is nested too deeply")
    written: str = validation.instance(text, str, "state")
    return written


def _require_object(text: str) -> None:
    try:
        is_object = type(json.loads(text)) is dict
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise InvalidPayload(
            path="state", reason="expected the text of a JSON object, as to_string() writes it"
        )


def _text(payload: str) -> str:
    text = decode(payload)
    if type(text) is not str:
        raise IntegrityFault("A stored run state is not a string; other rows are not affected.")
    return text


def _stored(session_id: str, row: tuple[Any, ...], text: str | None = None) -> StoredRunState:
    columns = dict(zip(HEAD_COLUMNS, row, strict=False))
    for name in _MOMENTS:
        columns[name] = None if columns[name] is None else as_utc(columns[name])
    return StoredRunState(session_id=session_id, text=text, **columns)
