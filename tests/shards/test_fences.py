"""Fences beside readers, other processes, and temporary tables."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connections

from helix_store.engine.database import Database
from helix_store.exceptions import HelixStoreError, InvalidQuery, NotSupportedOnBackend, TenantMoved
from helix_store.models import Lock, Session
from helix_store.stores import DatabaseStateStore
from helix_store.transfer.fences import fence_of, put_up, take_down
from helix_store.transfer.moves import TenantMove
from tests.databases import close_connections
from tests.shards.conftest import Pair
from tests.shards.routers import PLACES
from tests.shards.test_moves import GROUP, exported, filled, move

FENCES = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'helix_fence_%'"
MOVES_AT_ONCE = 8


@contextmanager
def _reader_of_everything(alias: str) -> Iterator[Any]:
    """A transaction that has read every table, as a dump does."""
    reader = connections.create_connection(alias)
    tables = connections[alias].introspection.table_names()
    try:
        with reader.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            for table in tables:
                cursor.execute(f'SELECT 1 FROM "{table}" LIMIT 1')
            yield cursor
    finally:
        reader.close()


@pytest.mark.thorough
def test_a_long_reader_delays_no_move(routed: Pair) -> None:
    """Eight tenants are copied, moved back and released while a reader holds every table."""
    if routed.vendor != "postgresql":
        pytest.skip("SQLite has one writer, and no table locks")
    tenants = [f"{GROUP}:{number} {routed.tenant}" for number in range(MOVES_AT_ONCE)]
    stores = [DatabaseStateStore(routed.first, tenant=tenant) for tenant in tenants]
    for store in stores:
        store.create_session("session", agent_type="agent")
    outcomes: dict[str, str] = {}
    start = threading.Barrier(MOVES_AT_ONCE)

    def there_and_away(tenant: str, number: int) -> None:
        try:
            start.wait(30)
            a_move = TenantMove(tenant, routed.first, routed.second, force=True)
            a_move.copy()
            if number % 2:
                outcomes[tenant] = a_move.abort().phase
            else:
                a_move.finish()
                outcomes[tenant] = a_move.release().phase
        except HelixStoreError as exc:
            outcomes[tenant] = repr(exc)
        finally:
            close_connections()

    with _reader_of_everything(routed.first) as reader:
        movers = [
            threading.Thread(target=there_and_away, args=(tenant, number))
            for number, tenant in enumerate(tenants)
        ]
        for mover in movers:
            mover.start()
        for mover in movers:
            mover.join(60)
        assert outcomes == dict.fromkeys(tenants, "none")
        # The reader is still there, and every writer passes.
        for store in stores:
            store.create_session("later", agent_type="agent")
        reader.execute("COMMIT")
    put_up(Database(routed.first, routed.tenant), routed.second, "copying")
    take_down(Database(routed.first, routed.tenant))
    with connections[routed.first].cursor() as cursor:
        cursor.execute(FENCES)
        assert cursor.fetchone() == (0,)


def test_a_fence_goes_up_again_where_a_reader_kept_its_disabled_triggers(routed: Pair) -> None:
    if routed.vendor != "postgresql":
        pytest.skip("SQLite drops triggers beside a reader")
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled(tenant)
    with _reader_of_everything(routed.first):
        move(tenant, "--to", routed.second)
        move(tenant, "--abort")
        move(tenant, "--to", routed.second)
        with pytest.raises(TenantMoved):
            store.append_messages("session-0", [{"role": "user", "content": "x"}])
        with pytest.raises(TenantMoved):
            store.delete_session("session-0")
    move(tenant, "--abort")


def test_a_move_back_never_takes_the_fence_down(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    late = filled(tenant)
    move(tenant, "--to", routed.second)
    PLACES[GROUP] = routed.second
    move(tenant, "--finish")
    heard: list[str] = []

    class Watched(TenantMove):
        def _close_target(self) -> None:
            with pytest.raises(TenantMoved):
                late.create_session("late", agent_type="agent")
            super()._close_target()
            heard.append(fence_of(self._target).phase)  # type: ignore[union-attr]

    back = Watched(tenant, routed.second, routed.first)
    back.copy()
    assert heard == ["returning", "returning"]
    PLACES[GROUP] = routed.first
    back.finish()
    move(tenant, "--release")


def test_a_move_back_that_is_aborted_leaves_the_fence_of_the_first_move(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    late = filled(tenant)
    move(tenant, "--to", routed.second)
    PLACES[GROUP] = routed.second
    move(tenant, "--finish")
    stopped = TenantMove(tenant, routed.second, routed.first, is_stopped=lambda: True)
    assert stopped.copy().phase == "copying"
    TenantMove(tenant, routed.second, routed.first).abort()
    with pytest.raises(TenantMoved):
        late.create_session("late", agent_type="agent")
    assert move(tenant, "--release")["phase"] == "none"


def test_a_damaged_session_is_found_before_writers_are_refused(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = DatabaseStateStore(tenant=tenant)
    for name in ("sound", "damaged"):
        store.create_session(name, agent_type="agent")
    sessions = Session.objects.using(routed.first).filter(tenant=tenant)
    theirs = sessions.values_list("current_id", flat=True).get(session_id="sound")
    sessions.filter(session_id="damaged").update(current_id=theirs)
    report = TenantMove(tenant, routed.first, routed.second).copy()
    assert report.phase == "none"
    assert ["is not a checkpoint of its session" in problem for problem in report.problems] == [True]
    assert [fence_of(Database(alias, tenant)) for alias in routed.aliases] == [None, None]
    store.append_messages("sound", [{"role": "user", "content": "goes on"}])


def test_a_role_that_owns_no_table_is_told_what_it_lacks(routed: Pair) -> None:
    if routed.vendor != "postgresql":
        pytest.skip("SQLite has no roles")
    tenant = f"{GROUP}:{routed.tenant}"
    role = f"mover_{uuid.uuid4().hex}"
    with connections[routed.first].cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role}")
        cursor.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}")
        try:
            cursor.execute(f"SET ROLE {role}")
            with pytest.raises(InvalidQuery, match=rf"{role} needs CREATE on the schema public") as caught:
                TenantMove(tenant, routed.first, routed.second).copy()
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute(f"DROP OWNED BY {role}")
            cursor.execute(f"DROP ROLE {role}")
    assert f"needs the rights of the owner of {Session._meta.db_table} in" in str(caught.value)
    assert str(caught.value).endswith("Run the command as their owner.")


@pytest.mark.parametrize("place", ["first", "second"])
def test_a_move_on_citus_is_refused_before_any_fence(routed: Pair, place: str) -> None:
    if routed.vendor != "postgresql":
        pytest.skip("Citus is an extension of PostgreSQL")
    tenant = f"{GROUP}:{routed.tenant}"
    store = DatabaseStateStore(tenant=tenant)
    store.create_session("session", agent_type="agent")
    settings = connections[getattr(routed, place)].settings_dict
    settings["HELIX_STORE_CITUS"] = True
    try:
        with pytest.raises(NotSupportedOnBackend, match="citus_schema_move") as caught:
            TenantMove(tenant, routed.first, routed.second).copy()
    finally:
        del settings["HELIX_STORE_CITUS"]
    assert not caught.value.retryable
    assert [fence_of(Database(alias, tenant)) for alias in routed.aliases] == [None, None]
    store.create_session("later", agent_type="agent")


class OvertakenAbort(TenantMove):
    """Its phase is read, and then another process finishes the move."""

    def _require_phase(self, *phases: str) -> str:
        phase = super()._require_phase(*phases)
        TenantMove(self.tenant, self._source.alias, self._target.alias, force=True).finish()
        return phase


@pytest.mark.parametrize("force", [False, True])
def test_an_abort_beside_a_finish_leaves_the_target_open(routed: Pair, force: bool) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    before = exported(routed.first, tenant)
    move(tenant, "--to", routed.second)
    with pytest.raises(InvalidQuery):
        OvertakenAbort(tenant, routed.first, routed.second, force=force).abort()
    assert fence_of(Database(routed.second, tenant)) is None
    assert exported(routed.second, tenant) == before
    PLACES[GROUP] = routed.second
    DatabaseStateStore(tenant=tenant).create_session("new", agent_type="agent")
    move(tenant, "--release")


def test_temporary_tables_open_no_fence(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled(tenant)
    move(tenant, "--to", routed.second)
    key = Session.objects.using(routed.first).get(tenant=tenant, session_id="session-0").pk
    parent = Session._meta.db_table
    with connections[routed.first].cursor() as cursor:
        cursor.execute(
            "CREATE TEMPORARY TABLE helix_store_moved_tenant"
            " (tenant text, target text, phase text, is_open boolean)"
        )
        cursor.execute("INSERT INTO helix_store_moved_tenant VALUES (%s, 'x', 'copying', true)", [tenant])
        cursor.execute(f"CREATE TEMPORARY TABLE {parent} (id bigint, tenant text)")
        cursor.execute(f"INSERT INTO {parent} VALUES (%s, 'another')", [key])
    locks = Lock.objects.using(routed.first).filter(tenant=tenant)
    messages = f"DELETE FROM helix_store_message WHERE session_id = {key}"
    try:
        with pytest.raises(Exception, match="the tenant is moved"):
            locks.update(owner="late")
        with (
            pytest.raises(Exception, match="the tenant is moved"),
            connections[routed.first].cursor() as cursor,
        ):
            cursor.execute(messages)
    finally:
        with connections[routed.first].cursor() as cursor:
            schema = "pg_temp" if routed.vendor == "postgresql" else "temp"
            cursor.execute(f"DROP TABLE {schema}.helix_store_moved_tenant")
            cursor.execute(f"DROP TABLE {schema}.{parent}")
    assert len(store.get_messages("session-0").messages) == 1
    move(tenant, "--abort")
