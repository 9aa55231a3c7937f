"""Expired sessions of every database are cleaned up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django.test import override_settings

from helix_store.cleanup import expired_session_cleanup
from helix_store.exceptions import StoreUnavailable
from helix_store.stores import DatabaseStateStore
from tests.cleanup.conftest import LONG_AGO
from tests.databases import ALIASES, delete_all_rows
from tests.shards.conftest import SECOND, Pair


def expire(pair: Pair) -> None:
    for alias in {*ALIASES.values(), *pair.aliases}:
        delete_all_rows(alias)
    for alias in pair.aliases:
        for number in range(2):
            store = DatabaseStateStore(alias, tenant=pair.tenant)
            store.create_session(f"session-{number}", agent_type="agent", expires_at=LONG_AGO)


def failed(pair: Pair) -> list[int]:
    stores = [DatabaseStateStore(alias, tenant=pair.tenant) for alias in pair.aliases]
    return [len(store.list_sessions(status="failed").sessions) for store in stores]


def test_without_using_every_database_is_cleaned_up(pair: Pair) -> None:
    expire(pair)
    seen: list[int] = []
    summary = expired_session_cleanup(progress=lambda done: seen.append(done.marked))
    assert (summary.detected, summary.marked) == (4, 4)
    assert failed(pair) == [2, 2]
    assert seen == sorted(seen)


def test_using_is_one_database(pair: Pair) -> None:
    expire(pair)
    assert expired_session_cleanup(using=pair.second).marked == 2
    assert failed(pair) == [0, 2]


def test_the_limit_is_that_of_all_databases(pair: Pair) -> None:
    expire(pair)
    assert expired_session_cleanup(limit=3).marked == 3
    assert sum(failed(pair)) == 3


class NotInTheSecond:
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if (db, app_label) == (SECOND, "helix_store") else None


def test_a_database_without_the_app_is_left_alone(pair: Pair) -> None:
    expire(pair)
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.NotInTheSecond"]):
        assert expired_session_cleanup().marked == 2
    assert failed(pair) == [2, 0]


def test_a_database_that_is_down_does_not_keep_it_from_the_next(pair: Pair) -> None:
    expire(pair)
    address = {"NAME": "/nowhere/at/all"} if pair.vendor == "sqlite" else {"HOST": "/nowhere"}
    settings = connections.settings
    connections.settings = {"down": {**settings[SECOND], **address}, **settings}
    try:
        with pytest.raises(StoreUnavailable):
            expired_session_cleanup()
    finally:
        connections.settings = settings
        del connections["down"]
    assert failed(pair) == [2, 2]


def test_a_database_that_was_never_migrated_is_left_alone(pair: Pair, tmp_path: Path) -> None:
    expire(pair)
    address = {"NAME": tmp_path / "empty.sqlite3"} if pair.vendor == "sqlite" else {"NAME": "postgres"}
    settings = connections.settings
    connections.settings = {"warehouse": {**settings[SECOND], **address}, **settings}
    try:
        assert expired_session_cleanup().marked == 4
    finally:
        connections["warehouse"].close()
        connections.settings = settings
        del connections["warehouse"]
    assert failed(pair) == [2, 2]
