"""The search in the list of sessions: by words of titles, users, tags and ids.

An index finds ids and users that begin with the search term. Words are looked up in every session if the
index of `helix_store.contrib.session_search` exists, and otherwise only in the newest sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.db.models import QuerySet

from helix_store.admin.lookups import is_searchable
from helix_store.admin.tenants import MOST_TENANTS, known_tenants, newest_rows, of_tenants
from helix_store.engine.database import Database
from helix_store.engine.expressions import has_tag
from helix_store.models import Session
from helix_store.sessions.words import HAS_INDEX, Contains

NEWEST_SEARCHED: Final = 100_000
"""The number of newest sessions that are searched for words if there is no index."""

MOST_FOUND: Final = 500
"""The maximum number of sessions that a search returns for each way of finding them."""

_MOST_WORDS: Final = 8
_LAST_CHARACTER: Final = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class Found:
    """The keys that a search found (``None`` means all), and whether it left any out."""

    keys: set[int] | None
    is_cut: bool = False
    is_bounded: bool = False


def found_sessions(sessions: QuerySet[Any], term: str) -> Found:
    """Return the sessions whose title, user, tags or id contain each word of the term."""
    words = term.split()[:_MOST_WORDS]
    if not words or not is_searchable(term):
        return Found(None if is_searchable(term) else set())
    start, end = term.strip(), term.strip() + _LAST_CHARACTER
    db = Database(sessions.db, "")
    has_index = db.is_postgresql and db.read(HAS_INDEX, {}) == [(True,)]
    newest, is_bounded = (sessions, False) if has_index else newest_rows(sessions, NEWEST_SEARCHED)
    tenants = known_tenants(Session, sessions.db)
    indexed = of_tenants(sessions, tenants) if len(tenants) <= MOST_TENANTS else sessions
    by_index = [indexed.filter(session_id__gte=start, session_id__lt=end)]
    by_index.append(indexed.filter(user_id__isnull=False, user_id__gte=start, user_id__lt=end))
    keys = [
        list(ways.order_by("-pk").values_list("pk", flat=True)[:MOST_FOUND])
        for ways in (*by_index, newest.filter(*map(Contains, words)))
    ]
    return Found(
        {key for found in keys for key in found},
        is_cut=any(len(found) == MOST_FOUND for found in keys),
        is_bounded=is_bounded,
    )


def with_tag(sessions: QuerySet[Any], tag: str) -> QuerySet[Any]:
    """Return the sessions with a tag. PostgreSQL uses the index on tags; SQLite only searches the newest."""
    if not Database(sessions.db, "").is_postgresql:
        sessions, _is_bounded = newest_rows(sessions, NEWEST_SEARCHED)
    return sessions.filter(has_tag(tag))
