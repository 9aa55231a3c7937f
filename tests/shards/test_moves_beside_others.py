"""A move beside what else a project has: roles, cleanups, retention, and databases that are down."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connections, models
from django.test.utils import isolate_apps

from helix_store.cleanup import expired_session_cleanup
from helix_store.cleanup.retention import apply_retention
from helix_store.core.types import RetentionPolicy
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidQuery, StoreUnavailable, TenantMoved
from helix_store.models import Checkpoint, Session
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from helix_store.testing.usage.base import tokens
from helix_store.transfer import fences as fence_sql
from helix_store.transfer.fences import ARRIVING, COPYING, FENCED, fence_of, put_up, take_down
from helix_store.transfer.moves import TenantMove, find_move
from tests.adapters.test_foreign_keys import orders
from tests.adapters.third_party.models import Page
from tests.cells import for_each
from tests.cleanup.conftest import LONG_AGO
from tests.databases import fresh_tenant
from tests.shards.conftest import Pair
from tests.shards.routers import PLACES
from tests.shards.test_moves import GROUP, MoveWithMore, exported, filled, move

LATER = 4_000_000_000_000
DOWN = "down"


@pytest.fixture
def down(routed: Pair) -> Iterator[str]:
    """One more alias, whose database is not available."""
    postgresql = routed.vendor == "postgresql"
    address = {"HOST": "127.0.0.1", "PORT": "1"} if postgresql else {"NAME": "/nowhere/helix.sqlite3"}
    connections.settings[DOWN] = {**connections[routed.first].settings_dict, **address}
    try:
        yield DOWN
    finally:
        del connections[DOWN]
        del connections.settings[DOWN]


@pytest.fixture
def role(routed: Pair) -> Iterator[str]:
    """A role that owns no table, with the rights on those that the migrations have made."""
    if routed.vendor != "postgresql":
        pytest.skip("SQLite has no roles")
    role = f"writers_{uuid.uuid4().hex}"
    with connections[routed.first].cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role}")
        cursor.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}")
        cursor.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}")
    try:
        yield role
    finally:
        with connections[routed.first].cursor() as cursor:
            cursor.execute("RESET ROLE")
            cursor.execute(f"DROP OWNED BY {role}")
            cursor.execute(f"DROP ROLE {role}")


def test_writers_with_a_role_of_their_own_meet_the_fence_and_others_do_not(routed: Pair, role: str) -> None:
    tenant, other = (f"{GROUP}:{name}{routed.tenant}" for name in ("", "other "))
    store, neighbour = filled(tenant), filled(other)
    move(tenant, "--to", routed.second)
    with connections[routed.first].cursor() as cursor:
        # Only the first move in a database makes this table, and no right was granted on it.
        cursor.execute(f"REVOKE ALL ON helix_store_moved_tenant FROM {role}")
        cursor.execute(f"SET ROLE {role}")
    neighbour.create_session("new", agent_type="agent")
    with pytest.raises(TenantMoved):
        store.create_session("new", agent_type="agent")
    with connections[routed.first].cursor() as cursor:
        cursor.execute("RESET ROLE")
    move(tenant, "--abort")


def test_an_abort_keeps_what_was_written_in_the_target(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    move(tenant, "--to", routed.second)
    PLACES[GROUP] = routed.second
    DatabaseStateStore(tenant=tenant).create_session("acknowledged", agent_type="agent")
    PLACES[GROUP] = routed.first
    with pytest.raises(CommandError, match="would be lost"):
        move(tenant, "--abort")
    PLACES[GROUP] = routed.second
    DatabaseStateStore(tenant=tenant).append_messages("acknowledged", [{"role": "user", "content": "more"}])
    move(tenant, "--finish")
    move(tenant, "--release")
    assert DatabaseStateStore(tenant=tenant).load_state("acknowledged") is not None


class OvertakenMove(TenantMove):
    """Its phase is read, and then another process takes the move back."""

    def _require_phase(self, *phases: str) -> str:
        phase = super()._require_phase(*phases)
        TenantMove(self.tenant, self._source.alias, self._target.alias, force=True).abort()
        return phase


def test_a_move_that_was_taken_back_is_not_finished(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    before = exported(routed.first, tenant)
    move(tenant, "--to", routed.second)
    with pytest.raises(InvalidQuery):
        OvertakenMove(tenant, routed.first, routed.second, force=True).finish()
    assert exported(routed.first, tenant) == before


def test_the_slower_of_two_that_finish_is_wrong_usage(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    move(tenant, "--to", routed.second)
    copied = exported(routed.second, tenant)

    def finish_and_release(text: str) -> None:
        if find_move(tenant) is not None:
            move(tenant, "--finish", "--force")
            move(tenant, "--release")

    with pytest.raises(InvalidQuery, match="Another process"):
        TenantMove(tenant, routed.first, routed.second, force=True, progress=finish_and_release).finish()
    assert find_move(tenant) is None
    assert exported(routed.second, tenant) == copied


def test_the_second_of_two_that_begin_is_wrong_usage(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    db = Database(routed.first, tenant)
    put_up(db, routed.second, "copying")
    with pytest.raises(InvalidQuery, match="Another process"):
        put_up(db, routed.second, "copying")
    take_down(db)


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are rows of a table that no app has registered, with another name of their key."""
    with isolate_apps("tests.adapters.third_party"):

        class Note(models.Model):
            conversation = models.ForeignKey(
                Session, on_delete=models.CASCADE, db_column="session_id", related_name="+"
            )

            class Meta:
                app_label = "notebook"
                db_table = Page._meta.db_table

            def __str__(self) -> str:
                return ""

    relation = Note._meta.get_field("conversation").remote_field
    monkeypatch.setattr(fence_sql, "children_of_sessions", lambda: [relation])


def write_page(alias: str, tenant: str) -> None:
    session = Session.objects.using(alias).filter(tenant=tenant)[0]
    Page.objects.using(alias).create(
        session=session, name=fresh_tenant(), content="1", written_at=session.created_at
    )


def test_rows_that_no_export_has_are_found_by_any_name_of_their_key(routed: Pair, unregistered: None) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    write_page(routed.first, tenant)
    with pytest.raises(CommandError, match="are not exported"):
        move(tenant, "--to", routed.second)
    assert find_move(tenant) is None


class LateMove(TenantMove):
    """A writer is faster than the fence."""

    def _require_a_start(self) -> None:
        super()._require_a_start()
        write_page(self._source.alias, self.tenant)


def test_rows_that_no_export_has_are_looked_for_behind_the_fence(routed: Pair, unregistered: None) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    DatabaseStateStore(tenant=tenant).create_session("session", agent_type="agent")
    with pytest.raises(InvalidQuery, match="are not exported"):
        LateMove(tenant, routed.first, routed.second).copy()
    assert move(tenant, "--abort")["phase"] == "none"


class CleanedMove(MoveWithMore):
    """Between the copy and the comparison, a cleanup of all databases runs."""

    def after_rows(self) -> None:
        expired_session_cleanup()


def test_a_cleanup_of_all_databases_does_not_change_the_copy(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled(tenant)
    store.create_session("expired", agent_type="agent", expires_at=LONG_AGO)
    report = CleanedMove(tenant, routed.first, routed.second).copy()
    assert (report.phase, report.problems) == ("copied", [])
    PLACES[GROUP] = routed.second
    move(tenant, "--finish")
    move(tenant, "--release")
    assert DatabaseStateStore(tenant=tenant).load_state("expired") is not None


def test_a_step_that_was_killed_leaves_no_fence_in_the_target(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    target = Database(routed.second, tenant)
    put_up(target, routed.first, ARRIVING)
    assert find_move(tenant) is None
    move(tenant, "--to", routed.second)
    assert fence_of(target) is None
    put_up(target, routed.first, ARRIVING)
    PLACES[GROUP] = routed.second
    move(tenant, "--finish")
    assert fence_of(target) is None
    move(tenant, "--release")


def test_retention_of_all_tenants_goes_on_after_one_that_is_moved(routed: Pair) -> None:
    tenant, other = (f"{GROUP}:{name}{routed.tenant}" for name in ("a ", "b "))
    for each in (tenant, other):
        filled(each)
        DatabaseUsageStore(tenant=each).record_entry(tokens("session-0"))
    move(tenant, "--to", routed.second)
    policy = RetentionPolicy(checkpoints_keep=1, usage_drop_days=1, streams_ended_days=1)
    report = apply_retention(using=routed.first, policy=policy, now=LATER)
    assert report.errors >= 1
    assert DatabaseUsageStore(tenant=other).get_entries("session-0") == []
    assert DatabaseUsageStore(tenant=tenant).get_entries("session-0") != []
    of_other = Checkpoint.objects.using(routed.first).filter(session__tenant=other, kind="step")
    assert of_other.filter(session__session_id__startswith="deltas").count() == 1
    with pytest.raises(TenantMoved):
        apply_retention(using=routed.first, tenant=tenant, policy=policy, now=LATER)
    move(tenant, "--abort")


def test_a_database_that_is_down_does_not_keep_a_move_from_its_end(routed: Pair, down: str) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    with pytest.raises(StoreUnavailable):
        find_move(tenant)
    # It cannot be known whether the tenant is moved there.
    with pytest.raises(CommandError, match="cannot be reached"):
        move(tenant, "--to", routed.second)
    TenantMove(tenant, routed.first, routed.second).copy()
    assert move(tenant, "--abort")["phase"] == "none"


def test_a_move_to_a_database_that_is_lost_is_aborted_by_force(routed: Pair, down: str) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled(tenant)
    for phase in (COPYING, FENCED):
        put_up(Database(routed.first, tenant), down, phase)
    with pytest.raises(CommandError, match="cannot be reached"):
        move(tenant, "--abort")
    with pytest.raises(TenantMoved):
        store.create_session("new", agent_type="agent")
    with pytest.raises(CommandError, match="not complete"):
        move(tenant, "--abort", "--force")
    store.create_session("new", agent_type="agent")
    assert fence_of(Database(routed.first, tenant)) is None


@for_each("on_delete", [models.SET_NULL, models.PROTECT])
def test_a_move_is_refused_while_another_app_refers_to_its_sessions(routed: Pair, on_delete: Any) -> None:
    tenant = f"{GROUP}:{fresh_tenant()}"
    filled(tenant)
    with orders(*routed.aliases, on_delete=on_delete) as order:
        session = Session.objects.using(routed.first).filter(tenant=tenant)[0]
        row = order.objects.using(routed.first).create(session=session)
        with pytest.raises(CommandError, match=r"Rows of notebook\.Order refer to sessions of the tenant"):
            move(tenant, "--to", routed.second)
        assert find_move(tenant) is None
        row.delete()
        move(tenant, "--to", routed.second)
        move(tenant, "--abort")


def test_a_view_of_another_app_that_refers_to_its_sessions_does_not_prevent_a_move(routed: Pair) -> None:
    tenant = f"{GROUP}:{fresh_tenant()}"
    filled(tenant)
    sessions = Session._meta.db_table
    with (
        orders(on_delete=models.DO_NOTHING, is_managed=False) as order,
        connections[routed.first].cursor() as c,
    ):
        c.execute(f"CREATE VIEW {order._meta.db_table} AS SELECT id, id AS session_id FROM {sessions}")
        try:
            assert order.objects.using(routed.first).filter(session__tenant=tenant).exists()
            move(tenant, "--to", routed.second)
            move(tenant, "--abort")
        finally:
            c.execute(f"DROP VIEW {order._meta.db_table}")
