"""The list of sessions in the admin: its filters, its orders and its search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.contrib import admin
from django.contrib.auth.models import User
from django.test import RequestFactory, override_settings

from helix_store.admin import filters as search
from helix_store.admin import start
from helix_store.admin.base import BoundedPaginator, Scope
from helix_store.admin.filters import AgentTypeFilter
from helix_store.admin.sessions import SessionAdmin
from helix_store.models import Session
from tests.admin.conftest import EverythingOn
from tests.plans.calls import ANALYSED, PAGE, SQLITE, Call, gap
from tests.plans.rows import World

__all__ = ["ADMIN_CALLS"]

_SMALL: Final = (
    (BoundedPaginator, "max_rows", 100),
    (AgentTypeFilter, "newest", 100),
    (search, "NEWEST_SEARCHED", 200),
    (start, "NEWEST_LOCKS", 200),
)
"""Bounds as small as the tables of the tests: with those of the pages every plan would keep to them."""


@contextmanager
def _small_bounds() -> Iterator[None]:
    before = [(place, name, getattr(place, name)) for place, name, _value in _SMALL]
    for place, name, value in _SMALL:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def _as_superuser(world: World, query: dict[str, str], show: Callable[[Any], object]) -> Callable[[], object]:
    request = RequestFactory().get("/", query)
    request.user = User(username="reader", is_staff=True, is_superuser=True, is_active=True)

    def call() -> object:
        with override_settings(DATABASE_ROUTERS=[EverythingOn(world.database.alias)]), _small_bounds():
            return show(request)

    return call


def _list(**query: str) -> Callable[[World], Callable[[], object]]:
    return _list_of(admin.site.get_model_admin(Session), **query)


def _list_of(page: Any, **query: str) -> Callable[[World], Callable[[], object]]:
    return lambda world: _as_superuser(
        world, query, lambda request: list(page.get_changelist_instance(request).result_list)
    )


_GAPS: Final = {
    "waiting": "SQLite takes the index by status, and passes over sessions that do not wait",
}
_LISTS: Final[dict[str, dict[str, str]]] = {
    "all": {},
    "status": {"status__exact": "active"},
    "waiting": {"waiting": "person"},
    "overdue posts": {"waiting": "post"},
    "expired": {"expiry": "past"},
    "expiring": {"expiry": "day"},
    "failed by expiry": {"expiry": "failed"},
    "agent type": {"agent_type": "agent-3"},
    "tag": {"tag": "rare"},
    "oldest": {"order": "oldest"},
    "created": {"order": "created"},
    "by id": {"order": "id"},
    "search": {"q": "session-77"},
    "search for nothing": {"q": "unheard-of"},
}

ADMIN_CALLS: Final = [
    *(
        Call(
            f"admin list, {name}",
            _list(**query),
            # The first page of all sessions shows the costs of the busy session of each tenant.
            reads=(100 if name == "all" else 60) * PAGE,
            sorts=40 * PAGE,
            gaps=gap(_GAPS[name], [SQLITE, ANALYSED]) if name in _GAPS else {},
        )
        for name, query in _LISTS.items()
    ),
    *(
        Call(f"admin list, {name}", _list_of(page(Session, admin.site)), reads=60 * PAGE, sorts=40 * PAGE)
        for name, page in SessionAdmin.side_lists.items()
    ),
    Call(
        "admin start page, oldest lock",
        lambda world: _as_superuser(
            world, {}, lambda request: start.oldest_held_lock(Scope(world.database.alias))
        ),
        reads=60 * PAGE,
        sorts=40 * PAGE,
    ),
]
