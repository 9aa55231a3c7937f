"""The optional index of sessions' words: made, used, taken back, and refused on SQLite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.apps import apps
from django.db.migrations.state import ProjectState

from helix_store.admin import filters as search
from helix_store.admin.base import Scope
from helix_store.contrib.session_search import IndexSessionSearch
from helix_store.engine.database import Database
from helix_store.exceptions import NotSupportedOnBackend
from helix_store.models import Session
from helix_store.sessions.lists import HAS_INDEX
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.plans.explained import plans_of


def _apply(database: CommittedDatabase, *, backwards: bool = False) -> None:
    operation, state = IndexSessionSearch(), ProjectState.from_apps(apps)
    move = operation.database_backwards if backwards else operation.database_forwards
    with database.connection.schema_editor(atomic=False) as editor:
        move("helix_store", editor, state, state)


def test_sqlite_refuses_the_index(sqlite_db: CommittedDatabase) -> None:
    with pytest.raises(NotSupportedOnBackend):
        _apply(sqlite_db)


@pytest.fixture
def with_trigrams(postgres_db: CommittedDatabase) -> Iterator[CommittedDatabase]:
    with postgres_db.connection.cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT 1 FROM pg_available_extensions WHERE name = 'pg_trgm')")
        if cursor.fetchone() != (True,):
            pytest.skip("this server has no pg_trgm")
    yield postgres_db
    _apply(postgres_db, backwards=True)


def test_the_search_finds_words_of_all_sessions_by_the_index(
    with_trigrams: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias, tenant = with_trigrams.alias, with_trigrams.tenant
    store = DatabaseStateStore(alias, tenant=tenant)
    store.create_session("old", agent_type="a", title="A Zeppelin über Köln", tags=["rare"])
    for number in range(3):
        store.create_session(f"new-{number}", agent_type="a")
    monkeypatch.setattr(search, "NEWEST_SEARCHED", 2)
    mine = Session.objects.using(alias).filter(tenant=tenant)
    assert search.found_sessions(mine, "zeppelin", Scope(alias)).keys == set()
    _apply(with_trigrams)
    _apply(with_trigrams)
    assert Database(alias, tenant).read(HAS_INDEX, {}) == [(True,)]
    for word in ("zeppelin", "Köln", "rare"):
        found = search.found_sessions(mine, word, Scope(alias))
        assert found.keys == {mine.get(session_id="old").pk}
        assert not found.is_bounded
    with with_trigrams.connection.cursor() as cursor:
        cursor.execute("SET enable_seqscan = off")
        cursor.execute("SET enable_indexscan = off")
        try:
            every = Session.objects.using(alias).all()
            plans = plans_of(with_trigrams, lambda: search.found_sessions(every, "zeppelin", Scope(alias)))
        finally:
            cursor.execute("RESET enable_seqscan")
            cursor.execute("RESET enable_indexscan")
    assert any("helix_session_words_idx" in plan.indexes for plan in plans)
