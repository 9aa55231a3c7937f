"""Foreign keys of another app to sessions: a deletion does what ``on_delete`` declares, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps
from django.db import connections, models
from django.db.models import CASCADE, DO_NOTHING, PROTECT, RESTRICT, SET, SET_DEFAULT, SET_NULL, Model
from django.test.utils import override_settings

from helix_store import checks
from helix_store.cleanup import ErasureReceipt, erase, expired_session_cleanup
from helix_store.contrib.langgraph.models import LangGraphCheckpoint
from helix_store.core.types import SESSION_EXPIRED, RetentionPolicy
from helix_store.exceptions import ConflictError
from helix_store.models import Checkpoint, Session
from helix_store.retention import RetentionSummary, apply_retention
from helix_store.stores import DatabaseStateStore
from tests.cells import Cells, for_each
from tests.cleanup.providers import MemoryProvider
from tests.commands.running import run
from tests.databases import CommittedDatabase, delete_all_rows

LONG_AGO = timedelta(days=4_000)


@contextmanager
def orders(
    *aliases: str, to: type[Model] = Session, is_managed: bool = True, **options: Any
) -> Iterator[Any]:
    """A model of another app with a foreign key, and its table in these databases."""
    key: Any = models.ForeignKey(to, null=True, related_name="+", **options)
    with model_of_an_app(*aliases, is_managed=is_managed, session=key) as order:
        yield order


@contextmanager
def model_of_an_app(*aliases: str, is_managed: bool = True, **fields: Any) -> Iterator[Any]:
    try:
        meta = type("Meta", (), {"app_label": "notebook", "managed": is_managed})
        order: Any = type("Order", (models.Model,), {"__module__": __name__, "Meta": meta, **fields})
        apps.clear_cache()
        for alias in aliases:
            with connections[alias].schema_editor() as editor:
                editor.create_model(order)
        try:
            yield order
        finally:
            for alias in aliases:
                with connections[alias].schema_editor() as editor:
                    editor.delete_model(order)
    finally:
        del apps.all_models["notebook"]["order"]
        apps.clear_cache()


def created(database: CommittedDatabase, session_id: str, **fields: Any) -> Session:
    """A session that ended long ago, which every way of deletion may delete."""
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    state = store.create_session(session_id, agent_type="agent")
    store.save_state(session_id, replace(state, **fields))
    sessions = Session.objects.using(database.alias).filter(tenant=database.tenant, session_id=session_id)
    session = sessions.get()
    past = session.created_at - LONG_AGO
    sessions.update(status="failed", failure_reason=SESSION_EXPIRED, expires_at=past, updated_at=past)
    return session


def _by_store(database: CommittedDatabase) -> int:
    return DatabaseStateStore(database.alias, tenant=database.tenant).delete_session("doomed")


def _by_erasure(database: CommittedDatabase, **options: Any) -> int:
    return erase(using=database.alias, tenant=database.tenant, session_id="doomed", **options).trees


def _by_erasure_of_the_tenant(database: CommittedDatabase, **options: Any) -> int:
    return _erased_tenant(database, **options).trees


def _erased_tenant(database: CommittedDatabase, **options: Any) -> ErasureReceipt:
    return erase(using=database.alias, tenant=database.tenant, **options)


def _by_cleanup(database: CommittedDatabase, **options: Any) -> int:
    return expired_session_cleanup(using=database.alias, delete_after=timedelta(days=1), **options).deleted


def _by_retention(database: CommittedDatabase, **options: Any) -> int:
    return _retained(database, **options).trees


def _retained(database: CommittedDatabase, **options: Any) -> RetentionSummary:
    policy = RetentionPolicy(sessions_idle_days={"failed": 1})
    return apply_retention(using=database.alias, policy=policy, **options)


WAYS = [_by_store, _by_erasure, _by_erasure_of_the_tenant, _by_cleanup, _by_retention]


BY_THE_DATABASE = [
    getattr(models, name) for name in ("DB_CASCADE", "DB_SET_NULL", "DB_SET_DEFAULT") if hasattr(models, name)
]
"""What Django 6.1 leaves to the database."""


@pytest.mark.parametrize(
    "on_delete", [SET_NULL, SET_DEFAULT, SET(None), SET(lambda: None), *BY_THE_DATABASE[1:]]
)
def test_a_deletion_sets_the_foreign_key_as_it_declares(
    committed_db: CommittedDatabase, on_delete: Any
) -> None:
    with orders(committed_db.alias, on_delete=on_delete, default=None) as order, Cells() as cells:
        for way in WAYS:
            with cells.check(way.__name__):
                delete_all_rows(committed_db.alias)
                rows = order.objects.using(committed_db.alias)
                row = rows.create(session=created(committed_db, "doomed"))
                assert way(committed_db) == 1
                row.refresh_from_db()
                assert row.session_id is None
                assert not Session.objects.using(committed_db.alias).exists()


@pytest.mark.parametrize("on_delete", [PROTECT, RESTRICT])
def test_a_protected_session_is_kept_and_the_error_names_the_model(
    committed_db: CommittedDatabase, on_delete: Any
) -> None:
    with orders(committed_db.alias, on_delete=on_delete) as order:
        delete_all_rows(committed_db.alias)
        order.objects.using(committed_db.alias).create(session=created(committed_db, "doomed"))
        with pytest.raises(ConflictError, match=r"notebook\.Order protect .* session"):
            _by_store(committed_db)
        ended = run(committed_db.alias, "helix_sessions", "delete", "doomed", "--no-input")
        assert (ended.code, "notebook.Order" in ended.err) == (1, True)
        with Cells() as cells:
            for way in WAYS[1:]:
                with cells.check(way.__name__):
                    assert way(committed_db) == 0
        order.objects.using(committed_db.alias).update(session=None)
        assert _by_store(committed_db) == 1


def test_the_snapshots_of_a_protected_session_are_kept(committed_db: CommittedDatabase) -> None:
    with orders(committed_db.alias, on_delete=PROTECT) as order, Cells() as cells:
        for way in (_by_erasure, _by_erasure_of_the_tenant, _by_retention):
            with cells.check(way.__name__):
                order.objects.using(committed_db.alias).all().delete()
                delete_all_rows(committed_db.alias)
                session = created(committed_db, "doomed", workspace_refs={"files": {"provider": "memory"}})
                order.objects.using(committed_db.alias).create(session=session)
                provider = MemoryProvider({"doomed": ["snapshot"]})
                assert way(committed_db, workspace_providers={"memory": provider}) == 0
                assert provider.deleted == []


@pytest.mark.parametrize("on_delete", [PROTECT, RESTRICT])
@pytest.mark.parametrize("way", [_erased_tenant, _retained])
def test_a_dry_run_counts_a_protected_session_as_the_run_then_does(
    committed_db: CommittedDatabase, caplog: pytest.LogCaptureFixture, way: Callable[..., Any], on_delete: Any
) -> None:
    caplog.set_level("DEBUG", logger="helix_store.cleanup")
    with orders(committed_db.alias, on_delete=on_delete) as order:
        delete_all_rows(committed_db.alias)
        for session_id in ("before", "doomed", "after"):
            session = created(committed_db, session_id)
            if session_id == "doomed":
                order.objects.using(committed_db.alias).create(session=session)
        said = way(committed_db, dry_run=True)
        done = way(committed_db)
        assert (done.trees, done.errors) == (2, 1)
        differing = {"dry_run", "started_at", "finished_at"}
        said, done = ({**each.to_dict(), **dict.fromkeys(differing)} for each in (said, done))
        assert said == done
        assert "one by one" not in caplog.text


class NobodyMigrates:
    """A router of a project in which another alias of the same database is for migrations."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return False


def test_an_alias_that_nobody_may_migrate_has_the_foreign_keys_of_its_tables(
    committed_db: CommittedDatabase,
) -> None:
    routers = override_settings(DATABASE_ROUTERS=[NobodyMigrates()])
    with orders(committed_db.alias, on_delete=SET_NULL) as order, routers:
        row = order.objects.using(committed_db.alias).create(session=created(committed_db, "doomed"))
        assert _by_store(committed_db) == 1
        row.refresh_from_db()
        assert row.session_id is None
    with orders(on_delete=SET_NULL), routers:  # the table is in another database
        created(committed_db, "doomed")
        assert _by_store(committed_db) == 1


def test_a_deletion_sets_the_foreign_key_of_an_unmanaged_table(committed_db: CommittedDatabase) -> None:
    with orders(committed_db.alias, on_delete=SET_NULL, is_managed=False) as order:
        row = order.objects.using(committed_db.alias).create(session=created(committed_db, "doomed"))
        assert _by_store(committed_db) == 1
        row.refresh_from_db()
        assert row.session_id is None


def test_no_statement_reads_a_table_whose_foreign_key_does_nothing(committed_db: CommittedDatabase) -> None:
    """A view may also be missing in the database, as this one is."""
    keys: list[dict[str, Any]] = [{"is_managed": False}, {"db_constraint": True}, {"db_constraint": False}]
    with Cells() as cells:
        for options in keys:
            with cells.check(options), orders(on_delete=DO_NOTHING, **options):
                delete_all_rows(committed_db.alias)
                created(committed_db, "doomed")
                assert _by_store(committed_db) == 1


@pytest.mark.thorough
@for_each("on_delete", [DO_NOTHING, CASCADE, PROTECT])
def test_a_foreign_object_has_no_effect_on_deletions(committed_db: CommittedDatabase, on_delete: Any) -> None:
    fields: dict[str, Any] = {name: models.CharField(max_length=255) for name in ("tenant", "name")}
    fields["session"] = models.ForeignObject(
        Session, on_delete, from_fields=list(fields), to_fields=["tenant", "session_id"], related_name="+"
    )
    with model_of_an_app(committed_db.alias, **fields) as order:
        assert checks.settings.check_references() == []
        order.objects.using(committed_db.alias).create(tenant=committed_db.tenant, name="doomed")
        with Cells() as cells:
            for way in WAYS:
                with cells.check(way.__name__):
                    delete_all_rows(committed_db.alias)
                    created(committed_db, "doomed")
                    assert way(committed_db) == 1
        assert order.objects.using(committed_db.alias).exists()


@for_each(
    ("to", "options"),
    [
        *((Session, {"on_delete": each, "default": None}) for each in (SET_NULL, SET_DEFAULT, CASCADE)),
        (Session, {"on_delete": DO_NOTHING, "db_constraint": False}),
        (Session, {"on_delete": DO_NOTHING, "is_managed": False}),
        (Checkpoint, {"on_delete": SET_NULL, "db_constraint": False}),
        (Checkpoint, {"on_delete": CASCADE, "is_managed": False}),
        *((to, {"on_delete": each}) for to in (Session, Checkpoint) for each in BY_THE_DATABASE),
    ],
)
def test_e020_keeps_quiet_about_a_foreign_key_that_works(to: type[Model], options: dict[str, Any]) -> None:
    with orders(to=to, **options):
        assert checks.settings.check_references() == []


@for_each(
    ("to", "on_delete"),
    [
        (Session, DO_NOTHING),
        *((Checkpoint, on_delete) for on_delete in (CASCADE, SET_NULL, PROTECT)),
        (LangGraphCheckpoint, CASCADE),
    ],
)
def test_e020_a_foreign_key_that_prevents_deletions(to: type[Model], on_delete: Any) -> None:
    with orders(to=to, on_delete=on_delete) as order:
        (message,) = checks.settings.check_references()
        assert (message.id, message.obj) == ("helix_store.E020", order._meta.get_field("session"))
        assert f"notebook.Order has a foreign key session to {to._meta.label}" in message.msg


@for_each("on_delete", [PROTECT, RESTRICT])
def test_w013_a_foreign_key_that_protects_sessions(on_delete: Any) -> None:
    with orders(on_delete=on_delete) as order:
        (message,) = checks.settings.check_references()
        assert (message.id, message.obj) == ("helix_store.W013", order._meta.get_field("session"))
        assert "notebook.Order protects sessions by its foreign key session" in message.msg


def test_the_doctor_reports_e020(committed_db: CommittedDatabase) -> None:
    with orders(on_delete=DO_NOTHING):
        ended = run(committed_db.alias, "helix_doctor", "--tenant", committed_db.tenant)
    assert ended.code == 1
    assert "helix_store.E020" in ended.out
