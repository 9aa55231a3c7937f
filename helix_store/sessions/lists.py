"""Lists of sessions: the checked query of a page, its cursor, and its rows in the database."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Final, Literal

from django.db.models import BooleanField, Func

from helix_store.conf import constraint_name
from helix_store.core import validation
from helix_store.core.types import UNSET, SessionHead, SessionStatus, Timestamp, Unset
from helix_store.engine.database import Database, reading_moments
from helix_store.engine.expressions import has_metadata, has_tag, read_cursor, write_cursor
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.models import Session
from helix_store.sessions.state import HEAD_FIELDS, listed_head, stored_columns


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
        tags=[] if tags is None else validation.tags(validation.items(tags, "tags")),
        metadata={} if metadata is None else validation.metadata(metadata),
        created_from=_timestamp(filters["created_from"], "created_from"),
        created_to=_timestamp(filters["created_to"], "created_to"),
        order_by=_one_of(filters["order_by"], ("created_at", "updated_at"), "order_by"),  # type: ignore[arg-type]
        descending=_one_of(filters["direction"], ("asc", "desc"), "direction") == "desc",
        limit=validation.page_limit(filters["limit"]),
        offset=validation.page_offset(filters["offset"]),
        count=validation.flag(filters["count"], "count"),
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


_BOUND: Final = [
    field.name for field in fields(SessionQuery) if field.name not in ("limit", "offset", "after", "count")
]


def _cursor_binding(query: SessionQuery, tenant: str | None) -> dict[str, Any]:
    """Return the values that the next page must repeat: the tenant (``None`` for all) and the query."""
    binding = {"tenant": tenant, **{name: getattr(query, name) for name in _BOUND}}
    binding["statuses"] = None if query.statuses is None else sorted(query.statuses)
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


_SESSION: Final = table(Session)
_COLUMNS: Final = ("tenant", *HEAD_FIELDS)
_EQUAL: Final = ("user_id", "root_session_id", "workspace_id")


def select_sessions(
    db: Database, query: SessionQuery, *, of_all_tenants: bool = False
) -> tuple[list[tuple[str, SessionHead]], int | None, bool]:
    """Return the page with its tenants, the total if requested, and whether more sessions follow.

    The statements are written here: Django's queries would take longer to build than to run.
    """
    conditions, parameters = _matching(db, query, of_all_tenants=of_all_tenants)
    total = None
    if query.count:
        ((total,),) = db.execute(
            Statement(f"SELECT count(*) FROM {_SESSION}{_where(conditions)}"), parameters
        )
    names = (query.order_by, "session_id", *(["tenant"] if of_all_tenants else []))
    if query.after is not None:
        # One range of an index; see `after_keyset`.
        last = {f"after_{name}": value for name, value in zip(names, query.after, strict=True)}
        follows = "<" if query.descending else ">"
        conditions.append(f"({', '.join(names)}) {follows} ({', '.join(f'%({name})s' for name in last)})")
        parameters |= last
    order = ", ".join(f"{name} {'DESC' if query.descending else 'ASC'}" for name in names)
    # SQLite plans for the size of a page that is part of the text.
    page = Statement(
        f"SELECT {', '.join(_COLUMNS)} FROM {_SESSION}{_where(conditions)} "
        f"ORDER BY {order} LIMIT {query.limit + 1} OFFSET {query.offset}"
    )
    with reading_moments(db.connection, many=True):
        rows = db.execute(page, parameters)
    found = [(row[0], listed_head(stored_columns(_COLUMNS, row))) for row in rows[: query.limit]]
    return found, total, len(rows) > query.limit


def _where(conditions: list[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def _matching(db: Database, query: SessionQuery, *, of_all_tenants: bool) -> tuple[list[str], dict[str, Any]]:
    """Return the conditions that a session of the list meets, and their parameters."""
    is_postgresql = db.is_postgresql
    conditions: list[str] = []
    parameters: dict[str, Any] = {}
    if not of_all_tenants:
        # An index over all tenants finds the documents. PostgreSQL must therefore know the size of this
        # tenant: if it assumes a small tenant, it also reads all of its sessions to intersect the two sets.
        is_hidden = is_postgresql and not (query.tags or query.metadata)
        conditions.append("tenant = (SELECT %(tenant)s)" if is_hidden else "tenant = %(tenant)s")
        parameters["tenant"] = db.tenant
    if query.agent_type is not None:
        # An agent works for many users, so there are fewer sessions for a user or a workspace than for an
        # agent; SQLite would take the index of the agent, and sort.
        is_of_few = query.user_id is not None or query.workspace_id is not None
        conditions.append(f"{'+' if is_of_few and not is_postgresql else ''}agent_type = %(agent_type)s")
        parameters["agent_type"] = query.agent_type
    for name in _EQUAL:
        if (value := getattr(query, name)) is not None:
            conditions.append(f"{name} = %({name})s")
            parameters[name] = value
    if query.statuses is not None:
        statuses = {f"status_{number}": each.value for number, each in enumerate(sorted(query.statuses))}
        conditions.append(
            f"status IN ({', '.join(f'%({name})s' for name in statuses)})" if statuses else "1 = 0"
        )
        parameters |= statuses
    if query.parent_session_id is None:
        conditions.append("parent_session_id IS NULL")
    elif not isinstance(query.parent_session_id, Unset):
        conditions.append("parent_session_id = %(parent_session_id)s")
        parameters["parent_session_id"] = query.parent_session_id
    for name, follows, value in (
        ("created_from", ">=", query.created_from),
        ("created_to", "<", query.created_to),
    ):
        if value is not None:
            conditions.append(f"created_at {follows} %({name})s")
            parameters[name] = value
    documents = [has_tag(tag) for tag in query.tags]
    documents += [has_metadata(key, value) for key, value in query.metadata.items()]
    for number, document in enumerate(documents):
        condition, values = document.written(f"document_{number}", is_postgresql=is_postgresql)
        conditions.append(condition)
        parameters |= values
    return conditions, parameters
