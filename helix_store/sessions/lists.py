"""Lists of sessions: the checked query of a page, its cursor, and its rows in the database."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Literal

from django.db.models import BooleanField, F, Func, QuerySet

from helix_store.conf import constraint_name
from helix_store.core import validation
from helix_store.core.types import UNSET, SessionHead, SessionStatus, Timestamp, Unset
from helix_store.engine.database import Database
from helix_store.engine.expressions import (
    NoIndexHint,
    after_keyset,
    has_metadata,
    has_tag,
    read_cursor,
    tenant_parameter,
    write_cursor,
)
from helix_store.engine.statement import Statement
from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.models import Session
from helix_store.sessions.state import HEAD_FIELDS, listed_head


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionQuery:
    """Filters, joined by AND. ``None`` sets none; for ``parent_session_id``: None = roots, UNSET = any."""

    agent_type: str | None = None
    statuses: frozenset[SessionStatus] | None = None
    user_id: str | None = None
    parent_session_id: str | Unset | None = UNSET
    root_session_id: str | None = None
    workspace_id: str | None = None
    tags: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    created_from: datetime | None = None
    created_to: datetime | None = None
    order_by: Literal["created_at", "updated_at"] = "updated_at"
    descending: bool = True
    limit: int = 50
    offset: int = 0
    after: tuple[Any, ...] | None = None
    """The time, the id and in a list of all tenants the tenant of the last session before the page."""
    count: bool = True


def checked_query(filters: Mapping[str, Any]) -> SessionQuery:
    """Return a query from the parameters of ``list_sessions``. Raises `InvalidQuery` and `InvalidPayload`."""
    parent_session_id, tags, metadata = (filters[name] for name in ("parent_session_id", "tags", "metadata"))
    return SessionQuery(
        agent_type=validation.optional_identifier(filters["agent_type"], "agent_type"),
        statuses=_status_filter(filters["status"]),
        user_id=validation.user_id(filters["user_id"]),
        parent_session_id=(
            parent_session_id
            if isinstance(parent_session_id, Unset)
            else validation.optional_identifier(parent_session_id, "parent_session_id")
        ),
        root_session_id=validation.optional_identifier(filters["root_session_id"], "root_session_id"),
        workspace_id=validation.optional_identifier(filters["workspace_id"], "workspace_id", empty=True),
        tags=[] if tags is None else validation.tags(tags if isinstance(tags, str) else list(tags)),
        metadata={} if metadata is None else validation.metadata(metadata),
        created_from=_timestamp(filters["created_from"], "created_from"),
        created_to=_timestamp(filters["created_to"], "created_to"),
        order_by=_one_of(filters["order_by"], ("created_at", "updated_at"), "order_by"),  # type: ignore[arg-type]
        descending=_one_of(filters["direction"], ("asc", "desc"), "direction") == "desc",
        limit=validation.page_limit(filters["limit"]),
        offset=validation.page_offset(filters["offset"]),
        count=bool(filters["count"]),
    )


def after_cursor(query: SessionQuery, cursor: str | None, *, tenant: str | None) -> SessionQuery:
    """Return the query for the page at a cursor. Raises `InvalidCursor` and `InvalidQuery`."""
    if cursor is None:
        return query
    if query.offset:
        raise InvalidQuery("Pass a cursor or an offset, not both.", path="cursor")
    time, *ids = read_cursor(cursor, query=_cursor_binding(query, tenant))
    return replace(query, after=(datetime.fromisoformat(time), *ids))


def next_cursor(query: SessionQuery, last: SessionHead, *last_tenant: str, tenant: str | None) -> str:
    """Return the cursor of the page after a session, with its tenant in a list of all tenants."""
    position = [getattr(last, query.order_by).isoformat(), last.session_id, *last_tenant]
    return write_cursor(position, query=_cursor_binding(query, tenant))


def _cursor_binding(query: SessionQuery, tenant: str | None) -> dict[str, Any]:
    """Return the values that the next page must repeat: the tenant (``None`` for all) and the query."""
    binding = {"tenant": tenant, **asdict(query)}
    binding["statuses"] = None if query.statuses is None else sorted(query.statuses)
    for paging in ("limit", "offset", "after", "count"):
        del binding[paging]
    return binding


def _status_filter(
    status: SessionStatus | str | Collection[SessionStatus | str] | None,
) -> frozenset[SessionStatus] | None:
    if status is None:
        return None
    try:
        return validation.statuses([status] if isinstance(status, str) else status, "status")
    except InvalidPayload as exc:
        raise InvalidQuery(f"status: {exc.reason}.", path="status") from exc


def _timestamp(value: Timestamp | None, name: str) -> datetime | None:
    return None if value is None else validation.aware_datetime(value, name)


def _one_of(value: str, allowed: tuple[str, ...], name: str) -> str:
    if value not in allowed:
        raise InvalidQuery(f"{name} must be one of {', '.join(allowed)}.", path=name)
    return value


INDEX_NAME: Final = constraint_name("session_words_idx")


SEARCHED_TEXT: Final = (
    "((COALESCE({title}, '') || ' ' || {session_id} || ' ' || COALESCE({user_id}, '') || ' ' || {tags}::text)"
    ' COLLATE pg_catalog."default")'
)
"""The indexed text. Ids have the collation C, in which only ASCII letters have an upper and a lower case."""


HAS_INDEX: Final = Statement(
    "SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_index "
    f"WHERE indexrelid = to_regclass('{INDEX_NAME}') AND indisvalid)"
)


class Contains(Func):
    """The condition that the title, user, tags or id of a session contain a word, ignoring case."""

    columns = ("title", "session_id", "user_id", "tags")

    def __init__(self, word: str) -> None:
        super().__init__(*self.columns, output_field=BooleanField())
        self.word = word

    def _columns(self, compiler: Any) -> dict[str, str]:
        compiled = (compiler.compile(source)[0] for source in self.source_expressions)
        return dict(zip(self.columns, compiled, strict=True))

    def as_postgresql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        text = SEARCHED_TEXT.format(**self._columns(compiler))
        return f"({text} ILIKE %s)", (_pattern(self.word),)

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> tuple[str, tuple[Any, ...]]:
        columns = self._columns(compiler)
        conditions = " OR ".join(f"{columns[name]} LIKE %s ESCAPE '\\'" for name in self.columns)
        written_in_json = json.dumps(self.word)[1:-1]
        pattern = _pattern(self.word)
        return f"({conditions})", (pattern, pattern, pattern, _pattern(written_in_json))


def _pattern(word: str) -> str:
    for special in "\\%_":
        word = word.replace(special, f"\\{special}")
    return f"%{word}%"


def select_sessions(
    db: Database, query: SessionQuery, *, of_all_tenants: bool = False
) -> tuple[list[tuple[str, SessionHead]], int | None, bool]:
    """Return the page with its tenants, the total if requested, and whether more sessions follow."""
    sessions = Session.objects.using(db.alias).all() if of_all_tenants else _of_tenant(db, query)
    matching = _filtered(sessions, query)
    total = matching.count() if query.count else None
    names = (query.order_by, "session_id", *(["tenant"] if of_all_tenants else []))
    prefix = "-" if query.descending else ""
    page = matching.order_by(*(f"{prefix}{name}" for name in names))
    if query.after is not None:
        last = dict(zip(names, query.after, strict=True))
        page = page.filter(after_keyset(Session, last, descending=query.descending))
    rows = list(page.values("tenant", *HEAD_FIELDS)[query.offset : query.offset + query.limit + 1])
    found = [(row["tenant"], listed_head(row)) for row in rows[: query.limit]]
    return found, total, len(rows) > query.limit


def _of_tenant(db: Database, query: SessionQuery) -> QuerySet[Session]:
    # An index over all tenants finds the documents. PostgreSQL must therefore know the size of this tenant:
    # if it assumes a small tenant, it also reads all of the tenant's sessions to intersect the two sets.
    is_by_document = query.tags or query.metadata
    tenant = db.tenant if is_by_document else tenant_parameter(db.tenant)
    return Session.objects.using(db.alias).filter(tenant=tenant)


def _filtered(sessions: QuerySet[Session], query: SessionQuery) -> QuerySet[Session]:
    """Return the sessions that match every filter of a query."""
    # An agent works for many users, so there are fewer sessions for a user or a workspace than for an agent.
    is_of_few = query.user_id is not None or query.workspace_id is not None
    sessions = sessions.alias(agent=NoIndexHint("agent_type") if is_of_few else F("agent_type"))
    equal: dict[str, Any] = {
        "agent": query.agent_type,
        "user_id": query.user_id,
        "root_session_id": query.root_session_id,
        "workspace_id": query.workspace_id,
        "created_at__gte": query.created_from,
        "created_at__lt": query.created_to,
    }
    sessions = sessions.filter(**{name: value for name, value in equal.items() if value is not None})
    if query.statuses is not None:
        sessions = sessions.filter(status__in=sorted(query.statuses))
    if query.parent_session_id is None:
        sessions = sessions.filter(parent_session_id__isnull=True)
    elif not isinstance(query.parent_session_id, Unset):
        sessions = sessions.filter(parent_session_id=query.parent_session_id)
    for tag in query.tags:
        sessions = sessions.filter(has_tag(tag))
    for key, value in query.metadata.items():
        sessions = sessions.filter(has_metadata(key, value))
    return sessions
