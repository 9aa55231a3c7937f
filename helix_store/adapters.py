"""The building blocks of adapters, classes that keep the sessions of another framework in this store. They
are public so that adapters in other packages can use them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from django.db.models import Model

from helix_store import conf
from helix_store.catalogue import (
    AppTable,
    Branch,
    Conversation,
    ConversationPage,
    ConversationStep,
    Outline,
    declared,
    register_conversation,
    register_table,
    registered_tables,
)
from helix_store.catalogue.table import let_go
from helix_store.core import moments, validation
from helix_store.core.transcript import ConversationMessage, Part
from helix_store.core.types import UserId
from helix_store.core.validation import Guard, guard
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Database
from helix_store.engine.expressions import update_row
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import InvalidPayload, SessionNotFound
from helix_store.models import Session
from helix_store.sessions.heads import delete_tree, lock_or_insert_session, name_user, user_columns
from helix_store.sessions.locking import lock_session
from helix_store.sessions.state import NewSession, root_session
from helix_store.signals import announce, session_waiting

__all__ = [
    "AppTable",
    "Branch",
    "Conversation",
    "ConversationMessage",
    "ConversationPage",
    "ConversationStep",
    "Database",
    "LockedSession",
    "Outline",
    "Part",
    "SessionAdapter",
    "Statement",
    "copy_rows",
    "register_conversation",
    "register_table",
    "registered_tables",
    "session_id_for",
]


_LONGEST_NAME: Final = 80
_NOT_READABLE: Final = re.compile(r"[^A-Za-z0-9._:@/+-]+")
_DERIVED: Final = re.compile(r".*~[0-9a-f]{32}", re.DOTALL)


def session_id_for(*parts: str) -> str:
    """Return the session id for a framework's id, which is the same in every process.

    A single part that is a valid session id is used unchanged. Everything else becomes a readable form of at
    most 80 characters, ``~`` and 32 hexadecimal digits of the SHA-256 of the parts. A single part that
    already looks like this is also converted, so that no one can construct an id that collides with another.
    Raises `InvalidPayload` if there are no parts, or if a part is not a string.
    """
    for index, part in enumerate(parts):
        if type(part) is not str:
            raise InvalidPayload(path=f"parts/{index}", reason=f"expected str, got {type(part).__name__}")
    if not any(parts):
        raise InvalidPayload(path="parts", reason="expected an id that is not empty")
    if len(parts) == 1 and not _DERIVED.fullmatch(parts[0]):
        try:
            return validation.identifier(parts[0], "session_id")
        except InvalidPayload:
            pass
    # JSON distinguishes ("a", "bc") from ("ab", "c"), and writes a lone surrogate as ASCII.
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    name = _NOT_READABLE.sub("-", ".".join(part[:_LONGEST_NAME] for part in parts))[:_LONGEST_NAME]
    return f"{name}~{digest}"


def copy_rows(model: type[Model], branch: Branch) -> None:
    """Copy all rows of the source to the branch, in one statement.

    The copies keep the order of the rows and all values except the key and the session.
    """
    fields = [each for each in model._meta.concrete_fields if not each.primary_key]
    columns = {each.attname: f'"{each.column}"' for each in fields}
    session = columns.pop(declared(model).parent)
    others = "".join(f", {column}" for column in columns.values())
    branch.db.execute(
        Statement(
            f"INSERT INTO {table(model)} ({session}{others}) SELECT %(target)s{others} FROM {table(model)} "
            f"WHERE {session} = %(source)s ORDER BY {model._meta.pk.column}"
        ),
        {"source": branch.source, "target": branch.target},
    )


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class LockedSession:
    """A session in the database ``alias`` whose row is locked until the transaction ends.

    ``key`` is its primary key, for the foreign keys of an adapter's rows. ``is_new`` means that this
    transaction created it.
    """

    key: int
    session_id: str
    tenant: str
    alias: str
    db: Database
    is_new: bool
    waiting_kind: str | None = None
    """What the session waited for before this transaction, as an adapter has passed it to `wait_for`."""
    root_session_id: str | None = None
    """The session at the top of the tree; ``None`` if it is this session."""
    _changes: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _opened: dict[str, None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def wait_for(self, kind: str | None, *, opened: Iterable[str] = ()) -> None:
        """Mark the session as waiting for a person, with a word such as ``"interrupt"``; ``None`` clears the
        mark. A colon and text that only the adapter reads may follow the word. The mark is written in the
        statement that writes the session's ``updated_at``. ``opened`` are the ids of the questions that
        nobody has been asked before: `session_waiting` names them, once, after the commit.
        """
        self._changes["waiting_kind"] = validation.optional_identifier(kind, "kind")
        self._opened.update(dict.fromkeys(opened))


class SessionAdapter:
    """The sessions of one framework, in the database ``using`` and one tenant.

    ``agent_type`` is the agent type of the sessions that the adapter creates. An adapter may also write to a
    session that the application created. ``user_id`` and ``fencing_token`` apply to each call that does not
    pass its own. A session that was erased is not created again, which raises `SessionErased`, unless
    ``recreate`` is True. Every call maps the database's errors, and releases the connection in threads that
    Django does not manage. If an async write is cancelled, the caller is told after the write has ended.
    """

    def __init__(
        self,
        agent_type: str,
        using: str | None = None,
        *,
        tenant: str = "",
        user_id: UserId | None = None,
        fencing_token: int | None = None,
        recreate: bool = False,
    ) -> None:
        conf.require_usable_prefix()
        self.agent_type = validation.identifier(agent_type, "agent_type")
        self.db = Database(using, validation.tenant(tenant))
        self.user_id = validation.user_id(user_id)
        self.fencing_token = guard(fencing_token=fencing_token).fencing_token
        self.recreate = validation.instance(recreate, bool, "recreate")

    @property
    def tenant(self) -> str:
        return self.db.tenant

    def ensure(
        self,
        session_id: str,
        *,
        user_id: UserId | None = None,
        title: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> bool:
        """Create the session unless it exists, and return whether this call created it.

        One transaction. If several callers run concurrently, one creates it, and the others find it. An
        existing session does not change. Raises `InvalidPayload`, `LimitExceeded` and `SessionErased`.
        """
        validation.identifier(session_id, "session_id")
        owner = self.user_id if user_id is None else user_id
        # These arguments are checked before the first statement, even if the session exists.
        new = self._new_session(session_id, user_id=owner, title=title, metadata=metadata)
        create = partial(lock_or_insert_session, self.db, session_id, lambda: new, Guard())
        return self.db.transaction(lambda: create(recreate=self.recreate)[1])

    def write(
        self,
        session_id: str,
        call: Callable[[LockedSession], R],
        *,
        create: bool = True,
        user_id: UserId | None = None,
        title: str | None = None,
        fencing_token: int | None = None,
    ) -> R:
        """Run ``call`` in one transaction in which the session is locked, and return its result.

        The rows that it writes are committed together with the session's new ``updated_at``. It must write to
        ``session.alias``, and must be safe to run again: a transaction that the database aborts because of
        another one is repeated. Inside the caller's ``atomic()`` block it is a savepoint. An unknown session
        is created, with ``title``, or raises `SessionNotFound` with ``create=False``. A session without a
        user gets ``user_id``. If the session belongs to another user, `ConflictError` is raised, and if the
        token is older than the newest one of the session's lock, `FencedOutError`; ``call`` does not run in
        either case.
        """
        validation.identifier(session_id, "session_id")
        conditions = self._guard(fencing_token)
        user_id = self.user_id if user_id is None else validation.user_id(user_id)
        # Also checked if the session exists.
        new = partial(self._new_session, session_id, user_id=user_id, title=validation.title(title))
        columns = (*user_columns(user_id), "waiting_kind", "root_session_id")

        def locked() -> R:
            if create:
                head, is_new = lock_or_insert_session(
                    self.db, session_id, new, conditions, *columns, recreate=self.recreate
                )
            else:
                head, is_new = lock_session(self.db, session_id, conditions, *columns), False
            name_user(self.db, head, user_id)
            session = LockedSession(
                head.pk,
                session_id,
                self.db.tenant,
                self.db.alias,
                self.db,
                is_new,
                head.waiting_kind,
                head.root_session_id,
            )
            result = call(session)
            if session._changes or not is_new:
                self._mark_written(head, **session._changes)
            if session._opened:
                root_id = session.root_session_id or session_id
                opened = list(session._opened)
                announce(
                    self.db, session_id, [session_waiting], tool_call_ids=opened, root_session_id=root_id
                )
            return result

        return self.db.transaction(locked)

    def read(self, call: Callable[[Database], R]) -> R:
        """Run queries that only read, and return the result of ``call``.

        It receives the database, whose ``alias`` is for the ORM; fetch all rows before it returns.
        """
        return self.db.query(lambda: call(self.db))

    def delete(self, session_id: str, *models: type[Model], fencing_token: int | None = None) -> int:
        """Delete what the adapter stored in a session.

        A session that an adapter of this ``agent_type`` created is deleted with all of its data; the result
        is the number of sessions, including sessions of sub-agents. For any other session, only the rows of
        ``models`` are deleted, found by their foreign key ``session``, and the result is their number. Runs
        in one transaction; safe to repeat. Raises `FencedOutError`, like `write`.
        """
        validation.identifier(session_id, "session_id")
        conditions = self._guard(fencing_token)

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
            self._mark_written(head, waiting_kind=None)
            return deleted

        return self.db.transaction(delete_now)

    aensure = async_twin(ensure)
    awrite = async_twin(write)
    adelete = async_twin(delete)
    aread = async_twin(read)

    def _mark_written(self, head: Session, **changes: Any) -> None:
        """Update the time from which idleness is measured; statements that wait for the row recheck it."""
        update_row(self.db, Session, head.pk, {"updated_at": moments.now(), **changes})

    def _guard(self, fencing_token: int | None) -> Guard:
        return guard(fencing_token=self.fencing_token if fencing_token is None else fencing_token)

    def _new_session(
        self,
        session_id: str,
        *,
        user_id: UserId | None,
        title: str | None,
        metadata: Mapping[str, str] | None = None,
    ) -> NewSession:
        return root_session(
            session_id,
            self.agent_type,
            limits=self.db.limits,
            user_id=user_id,
            title=title,
            metadata=validation.metadata(metadata or {}),
        )
