"""The store of graph checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from django.db import IntegrityError
from django.db.models import Count, F, OuterRef, Q, QuerySet, Subquery
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce

from helix_store import conf
from helix_store.checkpointers.graph.types import (
    CHECKPOINT_COLUMNS,
    GRAPH_AGENT_TYPE,
    SESSION_COLUMNS,
    GraphCheckpoint,
    GraphContinuation,
    GraphPage,
    GraphSession,
    GraphSessionSummary,
    StoredMessage,
    created_session,
    encode_checkpoint,
    encode_message,
    encode_messages,
    encode_metadata,
    new_session,
    read_checkpoint,
    read_message,
    read_session,
)
from helix_store.checkpointers.snapshots import optional_count
from helix_store.core import moments, validation
from helix_store.core.ids import new_id
from helix_store.core.limits import MAX_BIGINT, MAX_TITLE_BYTES, Limits
from helix_store.core.payloads import size_of
from helix_store.core.types import BRANCHED_FROM, UNSET, CheckpointSource, Unset
from helix_store.core.validation import Guard, guard
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Database, DatabaseOperations, writes
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.expressions import (
    InDefaultCollation,
    NoIndexHint,
    after_keyset,
    read_cursor,
    tenant_parameter,
    write_cursor,
)
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import CheckpointNotFound, ConflictError, InvalidQuery
from helix_store.models import Checkpoint, CheckpointKind, Message, Session
from helix_store.sessions.heads import delete_tree, insert_session
from helix_store.sessions.locking import advance, first_row, lock_session, pk_of, session_key, session_with_id
from helix_store.sessions.state import EncodedMessage, root_session
from helix_store.sessions.statements import COPY_MESSAGES

_THIS_ONE: Final = "{row}.kind = 'graph' AND {row}.id = %(forked)s"
# A later version of the same namespace would replace the forked checkpoint as the fork's latest one.
_ALL_UP_TO_THIS_ONE: Final = """{row}.kind = 'graph' AND {row}.id <= %(forked)s
    AND ({row}.namespace <> %(namespace)s OR {row}.version <= %(version)s)"""


def _copy(is_copied: str) -> Statement:
    """Return the statement that copies checkpoints. The id of a copy is a prefix and the original's key, so
    the same statement can translate the ids of parents. The forked checkpoint has the original as its parent.
    A parent that is not copied stays unchanged.
    """
    text = f"""
        INSERT INTO {table(Checkpoint)} (
            session_id, kind, namespace, version, checkpoint_id, parent_checkpoint_id, source, run_id,
            step_id, step_count, status, message_count, stream_sequence, payload, envelope, size_bytes,
            created_at
        )
        SELECT
            %(target)s, original.kind, original.namespace, original.version,
            %(id_prefix)s || {{original_digits}},
            CASE WHEN original.id = %(forked)s THEN original.checkpoint_id
                 WHEN parent.id IS NULL THEN original.parent_checkpoint_id
                 ELSE %(id_prefix)s || {{parent_digits}} END,
            CASE WHEN original.id = %(forked)s THEN 'fork' ELSE original.source END,
            original.run_id, original.step_id, original.step_count, original.status,
            CASE WHEN original.message_count < %(message_count)s THEN original.message_count
                 ELSE %(message_count)s END,
            original.stream_sequence, original.payload, original.envelope, original.size_bytes,
            CASE WHEN original.id = %(forked)s THEN %(at)s ELSE original.created_at END
        FROM {table(Checkpoint)} AS original
        LEFT JOIN {table(Checkpoint)} AS parent ON parent.session_id = %(source)s
            AND parent.checkpoint_id = original.parent_checkpoint_id AND {is_copied.format(row="parent")}
        WHERE original.session_id = %(source)s AND {is_copied.format(row="original")}
        ORDER BY original.id"""

    def with_digits(digits: str) -> str:
        """Return the SQL that computes the last 12 digits of a UUID from the keys of the rows."""
        return text.format(
            original_digits=digits.format("original.id & 281474976710655"),
            parent_digits=digits.format("parent.id & 281474976710655"),
        )

    return Statement(
        postgresql=with_digits("lpad(to_hex({}), 12, '0')"), sqlite=with_digits("printf('%%012x', {})")
    )


COPY_CHECKPOINT: Final = _copy(_THIS_ONE)
COPY_HISTORY: Final = _copy(_ALL_UP_TO_THIS_ONE)


class GraphCheckpoints(DatabaseOperations):
    """The calls for checkpoints."""

    def save_checkpoint(
        self,
        session_id: str,
        *,
        namespace: str = "",
        version: int | None = None,
        step: int,
        node_id: str | None = None,
        node_results: dict[Any, Any] | None = None,
        pending_nodes: Any = (),
        cycle_state: Any = None,
        source: CheckpointSource | str = CheckpointSource.LOOP,
        parent_id: str | None = None,
        fencing_token: int | None = None,
    ) -> GraphCheckpoint:
        """Store the progress of a graph and return the stored checkpoint.

        One transaction under the session's lock. Without a ``version``, the checkpoint takes the next free
        one of its namespace, so a graph may run and resume any number of times. ``node_results`` has a dict
        with a ``status`` for each node id; typed values are kept. The call updates the session's
        ``updated_at`` and does not change its version. Raises `SessionNotFound`, `ConflictError` for a
        version in use, `CheckpointNotFound` for a parent that is not in the session, `InvalidPayload`,
        `LimitExceeded` and `FencedOutError`. A repeat without a version stores a second checkpoint.
        """
        validation.identifier(session_id, "session_id")
        if version is not None:
            validation.whole_number(version, "version", minimum=1)
        chosen = validation.tenant(namespace, "namespace")
        columns = {
            "step_count": validation.whole_number(step, "step"),
            "step_id": validation.optional_identifier(node_id, "node_id"),
            "payload": encode_checkpoint(
                node_results=node_results,
                pending_nodes=pending_nodes,
                cycle_state=cycle_state,
                limits=conf.limits(),
            ),
            "source": validation.enum(CheckpointSource, source, "source").value,
            "parent_checkpoint_id": validation.optional_identifier(parent_id, "parent_id"),
        }
        return self._save(session_id, chosen, version, columns, guard(fencing_token=fencing_token))

    @writes
    def _save(
        self, session_id: str, namespace: str, version: int | None, columns: Mapping[str, Any], guard: Guard
    ) -> GraphCheckpoint:
        head = lock_session(self.db, session_id, guard)
        existing = Checkpoint.objects.using(self.db.alias).filter(
            session_id=head.pk, kind=CheckpointKind.GRAPH
        )
        parent_id = columns["parent_checkpoint_id"]
        if parent_id is not None and not existing.filter(checkpoint_id=parent_id).exists():
            raise CheckpointNotFound(parent_id)
        if version is None:
            versions = existing.filter(namespace=namespace).order_by("-version")
            newest = first_row(versions.values_list("version", flat=True)) or 0
            version = validation.next_number(newest, "version")
        try:
            row = Checkpoint.objects.using(self.db.alias).create(
                session_id=head.pk,
                kind=CheckpointKind.GRAPH,
                namespace=namespace,
                version=version,
                checkpoint_id=new_id(),
                message_count=head.message_count,
                size_bytes=size_of(columns["payload"]),
                created_at=moments.now(),
                **columns,
            )
        except IntegrityError as exc:
            if is_unique_violation(exc):
                raise ConflictError(
                    "The namespace already has a checkpoint with this version; save without a version to "
                    "take the next free one.",
                    namespace=namespace,
                    version=version,
                ) from exc
            raise
        Session.objects.using(self.db.alias).filter(pk=head.pk).update(updated_at=row.created_at)
        return read_checkpoint({name: getattr(row, name) for name in CHECKPOINT_COLUMNS}, session_id)

    def get_checkpoint(self, checkpoint_id: str) -> GraphCheckpoint | None:
        """Return a checkpoint by its id alone, or ``None``. One query.

        Raises `IntegrityFault` if it cannot be read.
        """
        found = Checkpoint.objects.using(self.db.alias).filter(
            kind=CheckpointKind.GRAPH,
            session__tenant=self.db.tenant,
            checkpoint_id=validation.identifier(checkpoint_id, "checkpoint_id"),
        )
        row = self.db.query(lambda: first_row(found.values("session__session_id", *CHECKPOINT_COLUMNS)))
        return None if row is None else read_checkpoint(row, row["session__session_id"]).readable()

    def get_latest_checkpoint(self, session_id: str, namespace: str | None = None) -> GraphCheckpoint | None:
        """Return the checkpoint with the highest version, in one namespace or in all, or ``None``. One query.

        Its step may be lower than another checkpoint's step. If versions in several namespaces are equal, it
        is the one that was saved last.
        """
        validation.identifier(session_id, "session_id")
        chosen = validation.optional_identifier(namespace, "namespace", empty=True)
        return self.db.query(lambda: latest_checkpoint(self.db, session_id, chosen))

    def list_checkpoints(
        self,
        session_id: str,
        *,
        namespace: str | None = None,
        limit: int = 20,
        cursor: str | None = None,
    ) -> GraphPage[GraphCheckpoint]:
        """List checkpoints, the highest version first: the first one is the latest. One query.

        ``namespace=None`` means all namespaces; the empty one belongs to the outermost graph. ``limit`` is 1
        to 200 (above means 200). A checkpoint that cannot be read is in the list, and raises `IntegrityFault`
        when one of its typed values is read. Raises `SessionNotFound`, `InvalidQuery` and `InvalidCursor`.
        """
        validation.identifier(session_id, "session_id")
        chosen = validation.optional_identifier(namespace, "namespace", empty=True)
        rows = _newest_first(self.db, session_id, chosen)
        binding = ["graph checkpoints", self.db.tenant, session_id, chosen]
        if cursor is not None:
            version, key = read_cursor(cursor, query=binding)
            rows = rows.filter(after_keyset(Checkpoint, {"version": version, "id": key}, descending=True))
        limit = validation.page_limit(limit)

        def read() -> list[dict[str, Any]]:
            found = list(rows.values(*CHECKPOINT_COLUMNS)[: limit + 1])
            if not found:
                session_key(self.db, session_id)
            return found

        page = self.db.query(read)
        next_cursor = None
        if len(page) > limit:
            last = page[limit - 1]
            next_cursor = write_cursor([last["version"], last["pk"]], query=binding)
        return GraphPage(
            items=[read_checkpoint(row, session_id) for row in page[:limit]], next_cursor=next_cursor
        )

    def fork(
        self, checkpoint_id: str, *, title: str | None = None, with_history: bool = False
    ) -> GraphSession:
        """Start a new session from a checkpoint and return it.

        The fork contains the messages up to the checkpoint, with their times, and a copy of the checkpoint
        whose parent is the original and whose source is ``fork``. ``with_history=True`` also copies the
        checkpoints that were saved before it, in all namespaces, except later versions of its own namespace.
        One transaction under the session's lock; six statements, however long the history is. A fork stays
        complete if the original is deleted. Raises `CheckpointNotFound`. A repeat creates a second fork.
        """
        validation.identifier(checkpoint_id, "checkpoint_id")
        statement = COPY_HISTORY if with_history else COPY_CHECKPOINT
        return self._fork(checkpoint_id, new_id(), validation.title(title), statement)

    @writes
    def _fork(
        self, checkpoint_id: str, new_session_id: str, title: str | None, copy: Statement
    ) -> GraphSession:
        source: Any = self._locked_source(checkpoint_id)
        at = moments.now()
        message_count = min(source.checkpoint_message_count, source.message_count)
        if title is None:
            # A longer title than the limit could not be saved again.
            title = validation.shortened(f"Fork of {source.title or checkpoint_id}", limit=MAX_TITLE_BYTES)
        new = root_session(
            new_session_id,
            source.agent_type,
            user_id=source.user_id,
            tags=source.tags,
            metadata={**source.metadata, BRANCHED_FROM: source.session_id},
            title=title,
            workspace_id=source.workspace_id,
            directory=source.directory,
        )
        new.encoded.columns.update(message_count=message_count, typed_metadata=source.typed_metadata)
        target, _ = insert_session(self.db, new, root_session_id=new_session_id, at=at)
        parameters = {
            "source": source.pk,
            "target": target,
            "message_count": message_count,
            "forked": source.forked_key,
            "namespace": source.forked_namespace,
            "version": source.forked_version,
            "id_prefix": _id_prefix(),
            "at": at,
        }
        if message_count:
            self.db.execute(COPY_MESSAGES, parameters)
        self.db.execute(copy, parameters)
        return created_session(new, at)

    def _locked_source(self, checkpoint_id: str) -> Session:
        """Return the checkpoint's session, locked so that its history does not change. The joined row may be
        older than the lock, but a graph checkpoint never changes, and is deleted only with its session.
        """
        sessions: QuerySet[Any] = Session.objects.using(self.db.alias)
        source = first_row(
            sessions.select_for_update(of=("self",), no_key=True)
            .filter(
                tenant=tenant_parameter(self.db.tenant),
                checkpoints__kind=CheckpointKind.GRAPH,
                checkpoints__checkpoint_id=checkpoint_id,
            )
            .annotate(
                forked_key=F("checkpoints__pk"),
                forked_namespace=F("checkpoints__namespace"),
                forked_version=F("checkpoints__version"),
                checkpoint_message_count=F("checkpoints__message_count"),
            )
        )
        if source is None:
            raise CheckpointNotFound(checkpoint_id)
        return source  # type: ignore[no-any-return]

    asave_checkpoint = async_twin(save_checkpoint)
    aget_checkpoint = async_twin(get_checkpoint)
    aget_latest_checkpoint = async_twin(get_latest_checkpoint)
    alist_checkpoints = async_twin(list_checkpoints)
    afork = async_twin(fork)


def latest_checkpoint(db: Database, session_id: str, namespace: str | None = None) -> GraphCheckpoint | None:
    """Return the checkpoint with the highest version, in one namespace or in all of them. One query."""
    row = first_row(_newest_first(db, session_id, namespace).values(*CHECKPOINT_COLUMNS))
    return None if row is None else read_checkpoint(row, session_id).readable()


def _newest_first(db: Database, session_id: str, namespace: str | None) -> QuerySet[Checkpoint]:
    rows: QuerySet[Checkpoint] = Checkpoint.objects.using(db.alias).filter(
        kind=CheckpointKind.GRAPH, session_id=pk_of(db, session_id)
    )
    if namespace is None:
        return rows.order_by("-version", "-pk")
    return rows.filter(namespace=namespace).order_by("-version")


def _id_prefix() -> str:
    """Return a UUIDv7 without its last 12 digits."""
    # New ids of one millisecond may differ only in the last digits, because the other random bits are drawn
    # here.
    random = int.from_bytes(os.urandom(4), "big")
    return f"{new_id()[:15]}{random >> 20:03x}-{0x8000 | random & 0x3FFF:04x}-"


MESSAGE_COLUMNS: Final = ("id", "role", "payload", "created_at")

_ROWS_PER_STATEMENT: Final = 1_000
_TICK: Final = timedelta(microseconds=1)


class GraphMessages(DatabaseOperations):
    """The calls for messages."""

    def add_message(
        self,
        session_id: str,
        *,
        role: str,
        content: str | None = None,
        tool_calls: Any = None,
        tool_results: Any = None,
        tokens_in: int | None = None,
        tokens_out: int | None = None,
        fencing_token: int | None = None,
    ) -> StoredMessage:
        """Append a message and return the stored one.

        One transaction under the session's lock: ids and times increase in append order. Tool calls and
        results may contain typed values. Raises `SessionNotFound`, `InvalidPayload`, `LimitExceeded` beyond
        ``max_message_bytes``, and `FencedOutError`. A repeat appends a second message.
        """
        validation.identifier(session_id, "session_id")
        message = {
            "role": role,
            "content": content,
            "tool_calls": tool_calls,
            "tool_results": tool_results,
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
        }
        encoded = encode_message(message, conf.limits())
        return self._add(session_id, [encoded], guard(fencing_token=fencing_token))[0]

    def add_messages(
        self, session_id: str, messages: Sequence[Mapping[str, Any]], *, fencing_token: int | None = None
    ) -> list[StoredMessage]:
        """Append messages in order, all or none; each is a dict of the arguments of `add_message`.

        One transaction; errors and repeats are the same as for `add_message`.
        """
        validation.identifier(session_id, "session_id")
        encoded = encode_messages(messages, conf.limits())
        return self._add(session_id, encoded, guard(fencing_token=fencing_token))

    def get_messages(
        self, session_id: str, *, before: int | datetime | None = None, limit: int | None = None
    ) -> list[StoredMessage]:
        """Return the newest ``limit`` messages before a message id or a time, oldest first; by default, all.

        For the next page, pass the id of the first message of this page as ``before``. A message that cannot
        be read is in the list, and raises `IntegrityFault` when its content is read. Raises `SessionNotFound`
        and `InvalidQuery`.
        """
        validation.identifier(session_id, "session_id")
        position, count = _checked_before(before), optional_count(limit, "limit")

        def read() -> list[StoredMessage]:
            messages = newest_messages(self.db, session_id, before=position, limit=count)
            if not messages:
                session_key(self.db, session_id)
            return messages

        return self.db.query(read)

    aadd_message = async_twin(add_message)
    aadd_messages = async_twin(add_messages)
    aget_messages = async_twin(get_messages)

    @writes
    def _add(self, session_id: str, messages: Sequence[EncodedMessage], guard: Guard) -> list[StoredMessage]:
        head = lock_session(self.db, session_id, guard)
        if not messages:
            return []
        first = self._next_time(head)
        rows = Message.objects.using(self.db.alias).bulk_create(
            [
                Message(
                    session_id=head.pk,
                    sequence=head.message_count + 1 + index,
                    role=message.role,
                    payload=message.text,
                    created_at=first + index * _TICK,
                )
                for index, message in enumerate(messages)
            ],
            batch_size=_ROWS_PER_STATEMENT,
        )
        advance(self.db, head, at=rows[-1].created_at, message_count=rows[-1].sequence)
        return [
            read_message({name: getattr(row, name) for name in MESSAGE_COLUMNS}, session_id) for row in rows
        ]

    def _next_time(self, head: Session) -> datetime:
        """Return a time later than every message's, because a page must not end between two equal times."""
        last = first_row(
            Message.objects.using(self.db.alias)
            .filter(session_id=head.pk, sequence=head.message_count)
            .values_list("created_at", flat=True)
        )
        now = moments.now()
        return now if last is None else max(now, last + _TICK)


def newest_messages(
    db: Database, session_id: str, *, before: int | datetime | None = None, limit: int | None = None
) -> list[StoredMessage]:
    """Return the newest messages before an id or a time, oldest first. One query."""
    rows: QuerySet[Message] = Message.objects.using(db.alias).filter(session_id=pk_of(db, session_id))
    if limit is not None:
        # Numbers have no gaps, so a page is a range of numbers, which every query plan finds by an index.
        last = _last_number(db, session_id, rows, before)
        rows = rows.filter(sequence__lte=last, sequence__gt=last - limit)
    elif isinstance(before, datetime):
        rows = rows.filter(created_at__lt=before)
    elif before is not None:
        rows = rows.filter(pk__lt=before)
    newest = rows.order_by("-sequence").values(*MESSAGE_COLUMNS)
    return [read_message(row, session_id) for row in reversed(newest)]


def _last_number(
    db: Database, session_id: str, rows: QuerySet[Message], before: int | datetime | None
) -> Combinable:
    """Return the number of the newest message before a message id or a time."""
    if before is None:
        return Subquery(session_with_id(db, session_id).values("message_count"))
    newest_first = rows.order_by("-sequence").values("sequence")
    if isinstance(before, datetime):
        return Subquery(newest_first.filter(created_at__lt=before)[:1])
    # The id of a message of another session is also a position, but takes longer to find.
    own = Subquery(rows.filter(pk=before).values("sequence"))
    return Coalesce(own - 1, Subquery(newest_first.filter(pk__lt=before)[:1]))


def _checked_before(before: int | datetime | None) -> int | datetime | None:
    if isinstance(before, datetime):
        return validation.aware_datetime(before, "before")
    if before is None:
        return None
    if type(before) is not int or not 0 <= before <= MAX_BIGINT:
        raise InvalidQuery("before must be a message id or an aware datetime.", path="before")
    return before


Listed = TypeVar("Listed", GraphSession, GraphSessionSummary)


class GraphCheckpointStore(GraphMessages, GraphCheckpoints):
    """Sessions, messages and checkpoints of graph runtimes in a Django database, with a checkpoint per wave
    of nodes, a namespace per sub-graph, and forks. Its sessions are sessions of agent type ``graph``: a state
    store loads them, and this store finds the sessions of a state store by their id. Source: the
    checkpoint store of `@obsku/checkpoint-postgres`.

    Example::

        graphs = GraphCheckpointStore()
        scan = graphs.create_session("./project", title="Security scan")
        graphs.save_checkpoint(scan.session_id, step=0, node_results={"plan": {"status": "completed"}})
    """

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        conf.require_usable_prefix()
        super().__init__(Database(using, validation.tenant(tenant)))
        self.tenant: Final = self.db.tenant

    @property
    def limits(self) -> Limits:
        return conf.limits()

    def create_session(
        self,
        directory: str,
        *,
        title: str | None = None,
        workspace_id: str | None = None,
        metadata: dict[Any, Any] | None = None,
        session_id: str | None = None,
    ) -> GraphSession:
        """Create a session, by default with a new id.

        One transaction. ``metadata`` may contain typed values. Raises `SessionExists` for an id in use, and
        `InvalidPayload`. A repeat with the same id raises `SessionExists`.
        """
        chosen_id = new_id() if session_id is None else validation.identifier(session_id, "session_id")
        new = new_session(
            chosen_id,
            directory=directory,
            title=title,
            workspace_id=workspace_id,
            metadata=metadata,
            limits=conf.limits(),
        )
        at = moments.now()
        self.db.transaction(lambda: insert_session(self.db, new, root_session_id=chosen_id, at=at))
        return created_session(new, at)

    def get_session(self, session_id: str) -> GraphSession | None:
        """Return a session of any agent type, or ``None``. One query.

        Raises `IntegrityFault` if its metadata cannot be read.
        """
        found = session_with_id(self.db, validation.identifier(session_id, "session_id"))
        row = self.db.query(lambda: first_row(found.values(*SESSION_COLUMNS)))
        return None if row is None else read_session(row).readable()

    def update_session(
        self,
        session_id: str,
        *,
        title: str | Unset | None = UNSET,
        metadata: dict[Any, Any] | Unset | None = UNSET,
        directory: str | Unset | None = UNSET,
        workspace_id: str | Unset | None = UNSET,
    ) -> GraphSession:
        """Replace the given fields and return the session; ``None`` clears a field (the directory: ``""``).

        One transaction under the session's lock. Raises `SessionNotFound` and `InvalidPayload`. Safe to
        repeat.
        """
        validation.identifier(session_id, "session_id")
        columns: dict[str, Any] = {}
        if not isinstance(title, Unset):
            columns["title"] = validation.title(title)
        if not isinstance(metadata, Unset):
            columns["typed_metadata"] = encode_metadata(metadata, conf.limits())
        if not isinstance(directory, Unset):
            columns["directory"] = "" if directory is None else validation.directory(directory)
        if not isinstance(workspace_id, Unset):
            columns["workspace_id"] = _workspace_filter(workspace_id)

        def update() -> GraphSession:
            head = lock_session(self.db, session_id)
            if columns:
                advance(self.db, head, **columns)
            return read_session(session_with_id(self.db, session_id).values(*SESSION_COLUMNS).get())

        return self.db.transaction(update)

    def delete_session(self, session_id: str) -> int:
        """Delete a session with its rows in all tables and its local descendants; its forks stay complete.

        One transaction. Returns the number of deleted sessions, 0 for an unknown id. Safe to repeat.
        """
        validation.identifier(session_id, "session_id")
        return self.db.transaction(lambda: delete_tree(self.db, session_id, keep_usage=False))

    def list_sessions(
        self, workspace_id: str | Unset | None = UNSET, *, limit: int = 50, cursor: str | None = None
    ) -> GraphPage[GraphSession]:
        """List graph sessions, the most recently written first. One query.

        An empty workspace id is also a filter; ``None`` means sessions without a workspace. ``limit`` is 1 to
        200; larger values mean 200. Raises `InvalidQuery` and `InvalidCursor`.
        """
        return self._page(self._sessions, workspace_id, limit, cursor)

    def search_sessions(
        self,
        text: str,
        workspace_id: str | Unset | None = UNSET,
        *,
        limit: int = 50,
        cursor: str | None = None,
    ) -> GraphPage[GraphSession]:
        """List sessions that contain a string in their title, directory or id, ignoring case; on SQLite, only
        that of ASCII letters. One query, which reads all graph sessions of the tenant or the workspace,
        because no index contains the text.
        """
        if not validation.text(text, "text", limit=MAX_TITLE_BYTES):
            raise InvalidQuery("The text to search for is empty; list_sessions lists all.", path="text")
        return self._page(self._sessions, workspace_id, limit, cursor, text=text)

    def continue_latest(self, workspace_id: str | Unset | None = UNSET) -> GraphContinuation | None:
        """Return the graph session written last, with its messages and its latest checkpoint, or ``None``.

        Three queries.
        """
        newest = self._matching(_workspace_filter(workspace_id))

        def read() -> GraphContinuation | None:
            row = first_row(newest.values(*SESSION_COLUMNS))
            if row is None:
                return None
            return GraphContinuation(
                session=read_session(row).readable(),
                messages=newest_messages(self.db, row["session_id"]),
                checkpoint=latest_checkpoint(self.db, row["session_id"]),
            )

        return self.db.query(read)

    def get_session_summary(self, session_id: str) -> GraphSessionSummary | None:
        """Return a session with its counts and its last message, or ``None``. Three queries."""
        found = session_with_id(self.db, validation.identifier(session_id, "session_id"))
        return next(iter(self.db.query(lambda: self._summaries(found))), None)

    def list_session_summaries(
        self, workspace_id: str | Unset | None = UNSET, *, limit: int = 50, cursor: str | None = None
    ) -> GraphPage[GraphSessionSummary]:
        """List sessions with counts and last messages. Three queries for a page of any size."""
        return self._page(self._summaries, workspace_id, limit, cursor)

    acreate_session = async_twin(create_session)
    aget_session = async_twin(get_session)
    aupdate_session = async_twin(update_session)
    adelete_session = async_twin(delete_session)
    alist_sessions = async_twin(list_sessions)
    asearch_sessions = async_twin(search_sessions)
    acontinue_latest = async_twin(continue_latest)
    aget_session_summary = async_twin(get_session_summary)
    alist_session_summaries = async_twin(list_session_summaries)

    def _page(
        self,
        read: Callable[[QuerySet[Session]], list[Listed]],
        workspace_id: str | Unset | None,
        limit: int,
        cursor: str | None,
        *,
        text: str | None = None,
    ) -> GraphPage[Listed]:
        """Return a page of sessions in the form that ``read`` returns, the most recently written first."""
        workspace_id = _workspace_filter(workspace_id)
        sessions = self._matching(workspace_id, text)
        binding = ["graph sessions", self.db.tenant, workspace_id, text]
        if cursor is not None:
            updated_at, session_id = read_cursor(cursor, query=binding)
            position = {"updated_at": datetime.fromisoformat(updated_at), "session_id": session_id}
            sessions = sessions.filter(after_keyset(Session, position, descending=True))
        limit = validation.page_limit(limit)
        found = self.db.query(lambda: read(sessions[: limit + 1]))
        next_cursor = None
        if len(found) > limit:
            item = found[limit - 1]
            last = item.session if isinstance(item, GraphSessionSummary) else item
            next_cursor = write_cursor([last.updated_at.isoformat(), last.session_id], query=binding)
        return GraphPage(items=found[:limit], next_cursor=next_cursor)

    def _sessions(self, sessions: QuerySet[Session]) -> list[GraphSession]:
        return [read_session(row) for row in sessions.values(*SESSION_COLUMNS)]

    def _summaries(self, sessions: QuerySet[Session]) -> list[GraphSessionSummary]:
        """Return summaries, with three queries for any number of sessions, messages and checkpoints."""
        messages = Message.objects.using(self.db.alias)
        last_message = messages.filter(session_id=OuterRef("pk"), sequence=OuterRef("message_count"))
        listed = sessions.annotate(last_message_id=Subquery(last_message.values("pk")))
        rows = {
            row["pk"]: row
            for row in listed.values("pk", "message_count", "last_message_id", *SESSION_COLUMNS)
        }
        counted = (
            Checkpoint.objects.using(self.db.alias)
            .filter(session_id__in=rows, kind=CheckpointKind.GRAPH)
            .order_by()
            .values_list("session_id")
            .annotate(Count("pk"))
        )
        checkpoint_counts = dict(counted)
        last_messages = messages.filter(pk__in=[row["last_message_id"] for row in rows.values()])
        last = {
            row["session_id"]: read_message(row, rows[row["session_id"]]["session_id"])
            for row in last_messages.values("session_id", *MESSAGE_COLUMNS)
        }
        return [
            GraphSessionSummary(
                session=read_session(row),
                message_count=row["message_count"],
                last_message=last.get(key),
                checkpoint_count=checkpoint_counts.get(key, 0),
            )
            for key, row in rows.items()
        ]

    def _matching(self, workspace_id: str | Unset | None, text: str | None = None) -> QuerySet[Session]:
        # The workspace index finds fewer sessions than the agent type index.
        is_of_workspace = isinstance(workspace_id, str)
        sessions = (
            Session.objects.using(self.db.alias)
            .alias(agent=NoIndexHint("agent_type") if is_of_workspace else F("agent_type"))
            .alias(id_text=InDefaultCollation("session_id"))
            .filter(tenant=tenant_parameter(self.db.tenant), agent=GRAPH_AGENT_TYPE)
        )
        if workspace_id is None:
            sessions = sessions.filter(workspace_id__isnull=True)
        elif not isinstance(workspace_id, Unset):
            sessions = sessions.filter(workspace_id=workspace_id)
        if text is not None:
            sessions = sessions.filter(
                Q(title__icontains=text) | Q(directory__icontains=text) | Q(id_text__icontains=text)
            )
        return sessions.order_by("-updated_at", "-session_id")


def _workspace_filter(workspace_id: Any) -> str | Unset | None:
    """Check a filter: `UNSET` for all workspaces, ``None`` for sessions without one, or an id, even empty."""
    if isinstance(workspace_id, Unset):
        return workspace_id
    return validation.optional_identifier(workspace_id, "workspace_id", empty=True)
