"""Sessions for an adapter: created when they are needed, and written together with its own rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from django.db.models import Model

from helix_store import conf
from helix_store.core import moments, validation
from helix_store.core.guards import Guard, guard
from helix_store.core.types import SessionState
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Database
from helix_store.exceptions import SessionNotFound
from helix_store.models import Session
from helix_store.sessions.database.app_rows import let_go
from helix_store.sessions.database.locking import lock_session
from helix_store.sessions.database.sessions import lock_or_insert_session
from helix_store.sessions.database.trees import delete_tree
from helix_store.sessions.layout import encode_state
from helix_store.sessions.requests import NewSession

__all__ = ["LockedSession", "SessionAdapter"]

R = TypeVar("R")

_UNGUARDED = Guard()


@dataclass(frozen=True, slots=True)
class LockedSession:
    """A session whose row is locked until the transaction ends, on the database ``alias``.

    ``key`` is its primary key, for the foreign keys of an adapter's rows. ``is_new``: this transaction
    created it.
    """

    key: int
    session_id: str
    tenant: str
    alias: str
    db: Database
    is_new: bool


class SessionAdapter:
    """The sessions of one framework, in the database ``using`` and one tenant.

    ``agent_type`` is that of the sessions that the adapter creates. An adapter may also write to a session
    that the application created. Every call maps the database's errors, and gives the connection back in
    threads that Django does not manage. The async version of a write tells a cancelled caller so when the
    write has ended.
    """

    def __init__(self, agent_type: str, using: str | None = None, *, tenant: str = "") -> None:
        conf.require_usable_prefix()
        self.agent_type = validation.identifier(agent_type, "agent_type")
        self.db = Database(using, validation.tenant(tenant))

    @property
    def tenant(self) -> str:
        return self.db.tenant

    def ensure(
        self,
        session_id: str,
        *,
        user_id: str | None = None,
        title: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> bool:
        """Create the session unless it exists, and return whether this call created it.

        One transaction. Of many callers at once one creates it, and the others find it. An existing session
        stays as it is. Raises `InvalidPayload` and `LimitExceeded`.
        """
        validation.identifier(session_id, "session_id")
        new = self._new_session(session_id, user_id=user_id, title=title, metadata=metadata)
        # Checked before the first statement, also when the session exists.
        made = new()

        def find_or_insert() -> bool:
            _, is_new = lock_or_insert_session(self.db, session_id, lambda: made, _UNGUARDED)
            return is_new

        return self.db.transaction(find_or_insert)

    def write(
        self,
        session_id: str,
        call: Callable[[LockedSession], R],
        *,
        create: bool = True,
        fencing_token: int | None = None,
    ) -> R:
        """Run ``call`` in one transaction in which the session is locked, and return its result.

        The rows that it writes and the session's new ``updated_at`` are committed together, or none of them.
        It must write on ``session.alias``, and must be safe to run again: a transaction that the database
        gave up for another one is repeated. Inside the caller's ``atomic()`` block it is a savepoint. An
        unknown session is created, or is `SessionNotFound` with ``create=False``. Raises `FencedOutError` for
        a token older than the newest of the lock with the session's name; ``call`` does not run then.
        """
        validation.identifier(session_id, "session_id")
        conditions = guard(fencing_token=fencing_token)
        new = self._new_session(session_id)

        def locked() -> R:
            if create:
                head, is_new = lock_or_insert_session(self.db, session_id, new, conditions)
            else:
                head, is_new = lock_session(self.db, session_id, conditions), False
            result = call(LockedSession(head.pk, session_id, self.db.tenant, self.db.alias, self.db, is_new))
            self._mark_written(head)
            return result

        return self.db.transaction(locked)

    def read(self, call: Callable[[Database], R]) -> R:
        """Run queries that only read, and return the result of ``call``.

        It gets the database, whose ``alias`` is for the ORM; rows must be fetched before it returns.
        """
        return self.db.query(lambda: call(self.db))

    def delete(self, session_id: str, *models: type[Model], fencing_token: int | None = None) -> int:
        """Delete what the adapter stored in a session.

        A session that an adapter of this ``agent_type`` created goes with all of its data; the result is the
        number of sessions, those of its sub-agents included. Of any other session only the rows of ``models``
        go, found by their foreign key ``session``, and the result is their number. One transaction; safe to
        repeat. Raises `FencedOutError` as `write`.
        """
        validation.identifier(session_id, "session_id")
        conditions = guard(fencing_token=fencing_token)

        def delete_now() -> int:
            try:
                head = lock_session(self.db, session_id, conditions, "agent_type")
            except SessionNotFound:
                return 0
            if head.agent_type == self.agent_type:
                return delete_tree(self.db, session_id, keep_usage=False)
            rows = (model._base_manager.using(self.db.alias).filter(session_id=head.pk) for model in models)
            let_go(self.db, [head.pk], models)
            deleted = sum(each.delete()[0] for each in rows)
            self._mark_written(head)
            return deleted

        return self.db.transaction(delete_now)

    aensure = async_twin(ensure)
    awrite = async_twin(write)
    adelete = async_twin(delete)
    aread = async_twin(read)

    def _mark_written(self, head: Session) -> None:
        """Idle sessions expire by this time, and single statements that wait for the row look again."""
        Session.objects.using(self.db.alias).filter(pk=head.pk).update(updated_at=moments.now())

    def _new_session(self, session_id: str, **fields: Any) -> Callable[[], NewSession]:
        def new() -> NewSession:
            state = SessionState(
                session_id=session_id,
                agent_type=self.agent_type,
                root_session_id=session_id,
                stream_id=session_id,
                user_id=fields.get("user_id"),
                title=fields.get("title"),
                metadata=validation.metadata(fields.get("metadata") or {}),
            )
            return NewSession(session_id, encode_state(state, self.db.limits, session_id))

        return new
