"""Row-level security: a role without privileges sees and writes the rows of its tenant only."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import DatabaseError, ProgrammingError, connections, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.models import Model
from django.test import AsyncClient, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path

from helix_store.catalogue import registered_tables, tables
from helix_store.cleanup import erase
from helix_store.contrib.chat import Chat
from helix_store.contrib.chat.threads import newest_chunk
from helix_store.contrib.langgraph.vectors.models import LangGraphVector
from helix_store.contrib.row_level_security import EnableRowLevelSecurity
from helix_store.core.types import StepInfo, UsageKind
from helix_store.core.usage import UsageEntry, UsageSource
from helix_store.exceptions import NotSupportedOnBackend
from helix_store.items import ItemLog
from helix_store.models import Checkpoint, Lock, Session, Stream
from helix_store.stores import (
    DatabaseBudgetStore,
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
    Store,
)
from helix_store.transfer import DatabaseSource, ExportFile, import_units, write_export
from tests.adapters.third_party.models import Attachment, Page
from tests.adapters.third_party.notebook import Notebook
from tests.chat.conftest import run_input
from tests.databases import CommittedDatabase, close_connections, delete_all_rows

ALIAS = "unprivileged"
# Without notifications: their thread would keep a connection of the second alias, which ends with the test.
ENABLED = {"ROW_LEVEL_SECURITY": True, "STREAMS": {"notify": False}}
MODELS: list[type[Model]] = [*apps.get_app_config("helix_store").get_models(), Page, Attachment]


def migrate(alias: str, *, backwards: bool = False) -> None:
    connection = connections[alias]
    state = MigrationLoader(connection).project_state()
    operation = EnableRowLevelSecurity()
    apply = operation.database_backwards if backwards else operation.database_forwards
    with connection.schema_editor() as editor:
        apply("project", editor, state, state)


@pytest.fixture
def owner(postgres_db: CommittedDatabase) -> Iterator[str]:
    """The alias of the owner of the tables, which have policies; a second alias has no privileges."""
    # The databases of all workers of a test run are on one server, and have its roles in common.
    role = f"unprivileged_{uuid.uuid4().hex}"
    delete_all_rows(postgres_db.alias)
    migrate(postgres_db.alias)
    with connections[postgres_db.alias].cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role}")
        cursor.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}")
        cursor.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}")
    settings = connections[postgres_db.alias].settings_dict
    options = {**settings["OPTIONS"], "options": f"-c role={role}"}
    connections.settings[ALIAS] = {**settings, "OPTIONS": options}
    try:
        yield postgres_db.alias
    finally:
        connections[ALIAS].close()
        close_connections()
        del connections[ALIAS]
        del connections.settings[ALIAS]
        with connections[postgres_db.alias].cursor() as cursor:
            cursor.execute(f"DROP OWNED BY {role}")
            cursor.execute(f"DROP ROLE {role}")
        migrate(postgres_db.alias, backwards=True)


@contextmanager
def tenant_of(alias: str, tenant: str) -> Iterator[Any]:
    """A transaction that has told its tenant by plain SQL."""
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute("SELECT set_config('helix_store.tenant', %s, true)", [f":{tenant}"])
        yield cursor


def visible(alias: str) -> dict[str, int]:
    return {model.__name__: model._base_manager.using(alias).count() for model in MODELS}


def live(alias: str, tenant: str) -> None:
    """Use every store: a session with a row in each table."""
    store = DatabaseStateStore(alias, tenant=tenant)
    store.create_session("session", agent_type="agent", user_id="ada")
    store.create_session("child", agent_type="agent", parent_session_id="session")
    store.add_sub_session_refs(
        "session", [{"sub_session_id": "child", "agent_type": "agent", "status": "running"}]
    )
    store.start_run("session", "run-1")
    state = store.load_state("session")
    assert state is not None
    store.stage_changes("session", "step-2", {"tool_call_id": "call", "merge_changes": {"a": 1}})
    store.save_state_and_promote_staging(
        "session",
        state,
        [{"role": "user", "content": "hello"}],
        StepInfo("step-1", 1),
        operation_id="operation",
    )
    store.request_interrupt("session")
    store.post_message("session", {"role": "user", "content": "hello"})
    lock = DatabaseLockManager(alias, tenant=tenant).acquire("session")
    assert lock is not None
    assert lock.refresh()
    DatabaseBudgetStore(alias, tenant=tenant).set_budget("budget", scope="tenant", limit_usd=1)
    DatabaseUsageStore(alias, tenant=tenant).record_entry(
        UsageEntry(
            session_id="session",
            kind=UsageKind.TOOL,
            timestamp=1_700_000_000_000,
            source=UsageSource(type="agent", name="a"),
            step_count=1,
            tool_name="search",
            success=True,
            duration_ms=1,
            cost_usd=Decimal("0.5"),
        )
    )
    streams = DatabaseStreamManager(alias, tenant=tenant)

    async def write() -> None:
        writer = await streams.create_writer("session", "run-1", "agent")
        await writer.write({"type": "text", "text": "hello"})
        await writer.close()

    async_to_sync(write)()
    assert [stored.sequence for stored in streams.read_after("session", 0)] == [1]
    assert len(store.list_sessions().sessions) == 2
    assert ItemLog("session", using=alias, tenant=tenant).append(["item"], keys=["key"]) == 1
    Notebook("project", "session", alias, tenant=tenant).write("page", 1, b"attachment")
    store.add_pending_tool_calls("session", {"call": {"tool_name": "pay", "approval_id": "approval"}})
    store.submit_tool_result("session", "call", approved=True, approval_id="approval", actor="ann")
    store.session("session").effect("effect").__enter__()
    store.create_session("erased", agent_type="agent")
    erase(using=alias, session_id="erased", tenant=tenant)


def test_the_stores_work_and_each_role_sees_its_tenant_only(owner: str) -> None:
    with override_settings(HELIX_STORE=ENABLED):
        for tenant in ("", "a"):
            live(ALIAS, tenant)
    both = visible(owner)
    assert [name for name, count in both.items() if count == 0] == []
    for tenant in ("", "a"):
        with tenant_of(ALIAS, tenant):
            assert visible(ALIAS) == {name: count // 2 for name, count in both.items()}
    with tenant_of(ALIAS, "b"):
        assert set(visible(ALIAS).values()) == {0}
    # Outside of a transaction the variable is not set any more, which is not the tenant "".
    assert set(visible(ALIAS).values()) == {0}


def test_a_store_that_does_not_tell_its_tenant_sees_and_writes_nothing(owner: str) -> None:
    with override_settings(HELIX_STORE=ENABLED):
        DatabaseStateStore(ALIAS, tenant="a").create_session("session", agent_type="agent")
    with override_settings(HELIX_STORE={}):
        store = DatabaseStateStore(ALIAS, tenant="a")
        assert store.load_state("session") is None
        assert store.delete_session("session") == 0
        with pytest.raises(ProgrammingError, match="row-level security"):
            store.create_session("other", agent_type="agent")


def test_an_import_into_a_tenant_finds_what_is_stored(owner: str) -> None:
    file = io.BytesIO()
    with override_settings(HELIX_STORE=ENABLED):
        DatabaseStateStore(ALIAS, tenant="a").create_session("s", agent_type="agent")
        write_export(DatabaseSource(ALIAS, tenant="a"), file)
        file.seek(0)
        summary = import_units(ExportFile(file).units(), ALIAS, tenant="a")
    assert (summary.identical, summary.problems) == ({"session": 1}, [])


@pytest.mark.thorough
def test_another_tenant_cannot_be_written(owner: str) -> None:
    live(owner, "a")
    with tenant_of(ALIAS, "b"):
        assert Session.objects.using(ALIAS).update(title="stolen") == 0
        assert Lock.objects.using(ALIAS).all().delete()[0] == 0
    with tenant_of(ALIAS, "a"):
        session = Session.objects.using(ALIAS).first()
    assert session is not None
    for model in MODELS:
        row = model._base_manager.using(owner).first()
        assert row is not None
        row.pk = None
        with pytest.raises(ProgrammingError, match="row-level security"), tenant_of(ALIAS, "b"):
            row.save(using=ALIAS, force_insert=True)
    with pytest.raises(ProgrammingError, match="row-level security"), tenant_of(ALIAS, "a"):
        Session.objects.using(ALIAS).update(tenant="b")


def _references() -> Iterator[tuple[type[Model], Any]]:
    """Every column that names a tenant or refers to a row of one, in all registered tables."""
    theirs = {table.model for table in tables()}
    for table in tables():
        for field in table.model._meta.concrete_fields:
            if field.name == "tenant" or field.related_model in theirs:
                yield table.model, field


def _fill_adapters(alias: str, tenant: str) -> None:
    """Store a row in each table of an adapter whose columns name a tenant or a session."""
    session = Session.objects.using(alias).get(tenant=tenant, session_id="session")
    for table in registered_tables():
        model = table.model
        if model._meta.app_label == "notebook" or model is LangGraphVector:
            continue
        values: dict[str, Any] = {}
        for field in model._meta.concrete_fields:
            if field.name == "tenant":
                values["tenant"] = tenant
            elif field.name == "session":
                values["session"] = session
            elif not (field.null or field.has_default() or field.primary_key):
                kind = field.get_internal_type()
                moment = session.created_at if kind == "DateTimeField" else None
                values[field.name] = moment or (
                    1 if "Integer" in kind else b"1" if "Binary" in kind else "{}"
                )
        model._base_manager.using(alias).create(**values)


@pytest.mark.thorough
def test_no_row_refers_to_another_tenant(owner: str) -> None:
    """Not by raw SQL, in no column of any table, by an update or an insert."""
    for tenant in ("a", "b"):
        live(owner, tenant)
        _fill_adapters(owner, tenant)
    checked, accepted = set(), []
    for model, field in _references():
        rows = model._base_manager.using(owner)
        names_tenant = any(each.name == "tenant" for each in model._meta.concrete_fields)
        path = (
            "tenant"
            if names_tenant
            else next(
                f"{each.name}__tenant"
                for each in model._meta.concrete_fields
                if each.name in ("session", "stream")
            )
        )
        mine = rows.filter(**{path: "b"}).first()
        if mine is None:
            assert model is LangGraphVector
            continue
        if field.name == "tenant":
            foreign: Any = "a"
        else:
            target = field.related_model
            theirs = "tenant" if target in (Session, Stream) else "session__tenant"
            foreign = target._base_manager.using(owner).filter(**{theirs: "a"}).first().pk
        quote = connections[owner].ops.quote_name
        table = quote(model._meta.db_table)
        columns = ", ".join(
            quote(str(each.column)) for each in model._meta.concrete_fields if not each.primary_key
        )
        forged = ", ".join(
            "%s" if each is field else quote(str(each.column))
            for each in model._meta.concrete_fields
            if not each.primary_key
        )
        for statement, parameters in (
            (f"UPDATE {table} SET {quote(field.column)} = %s WHERE id = %s", [foreign, mine.pk]),
            (
                f"INSERT INTO {table} ({columns}) SELECT {forged} FROM {table} WHERE id = %s",
                [foreign, mine.pk],
            ),
        ):
            checked.add((model.__name__, field.name))
            # A policy is checked before a constraint.
            outcome = "accepted"
            try:
                with tenant_of(ALIAS, "b") as cursor:
                    cursor.execute(statement, parameters)
            except DatabaseError as error:
                outcome = str(error)
            if "row-level security" not in outcome:
                accepted.append((model.__name__, field.name, statement.split()[0], outcome))
    assert accepted == []
    assert {("Session", "current"), ("Checkpoint", "base"), ("UsageEntry", "session")} <= checked
    assert ("ClaudeSession", "tenant") in checked


@pytest.mark.thorough
def test_what_the_stores_write_refers_to_their_own_rows_only(owner: str) -> None:
    """Steps with deltas, restores, branches, pruned checkpoints and deletions pass the policies."""
    with override_settings(HELIX_STORE=ENABLED):
        store = Store(ALIAS, tenant="a")
        session = store.new_session("s", agent_type="agent")
        for number in range(12):
            with session.turn() as turn, turn.step() as step:
                step.say({"role": "user", "content": str(number)})
                step.state.custom_state[f"key-{number}"] = "value" * 50
        sessions = store.sessions
        checkpoints = sessions.list_checkpoints("s").items
        sessions.branch_session("s", checkpoint_id=checkpoints[3].checkpoint_id, new_session_id="branch")
        sessions.restore_checkpoint("s", checkpoints[5].checkpoint_id)
        sessions.prune_checkpoints("s", keep=2)
        sessions.append_messages("branch", [{"role": "user", "content": "more"}])
        file = io.BytesIO()
        write_export(DatabaseSource(ALIAS, tenant="a"), file)
        assert sessions.delete_session("s") == 1
        file.seek(0)
        summary = import_units(ExportFile(file).units(), ALIAS, tenant="a")
        assert (summary.imported, summary.problems) == ({"session": 1}, [])
    assert Checkpoint.objects.using(owner).filter(base__isnull=False).exists()


def test_stores_of_two_tenants_share_a_transaction(owner: str) -> None:
    stores = {tenant: DatabaseStateStore(ALIAS, tenant=tenant) for tenant in ("a", "b")}
    with override_settings(HELIX_STORE=ENABLED), transaction.atomic(using=ALIAS):
        for store in stores.values():
            store.create_session("session", agent_type="agent")
        for store in stores.values():
            assert store.load_state("session") is not None
    assert visible(owner)["Session"] == 2


@pytest.mark.thorough
def test_going_back_and_applying_it_again(owner: str) -> None:
    live(owner, "a")
    migrate(owner)
    migrate(owner, backwards=True)
    assert visible(ALIAS) == visible(owner)
    migrate(owner)
    assert set(visible(ALIAS).values()) == {0}


def test_another_database_refuses(sqlite_db: CommittedDatabase) -> None:
    connection = connections[sqlite_db.alias]
    state = MigrationLoader(connection).project_state()
    with pytest.raises(NotSupportedOnBackend):
        EnableRowLevelSecurity().database_forwards("project", _Editor(connection), state, state)


class _Editor:
    """What the operation asks of a schema editor; that of SQLite wants foreign keys off before it starts."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection


@pytest.mark.parametrize("force", [False, True])
def test_the_operation_can_be_written_into_a_migration(force: bool) -> None:
    name, args, kwargs = EnableRowLevelSecurity(force=force).deconstruct()
    assert EnableRowLevelSecurity(*args, **kwargs).force is force
    assert name == "EnableRowLevelSecurity"


def test_without_the_setting_no_statement_is_added(owner: str) -> None:
    store = DatabaseStateStore(owner, tenant="a")
    store.create_session("session", agent_type="agent")
    with override_settings(HELIX_STORE={}), CaptureQueriesContext(connections[owner]) as captured:
        store.load_state("session")
    assert len(captured) == 1


def test_a_chat_reads_its_threads_and_their_streams(owner: str) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.text("Yes.")
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Yes."})
            step.end_turn()

    chat = Chat(
        f"agent-{uuid.uuid4().hex}", answer, using=ALIAS, tenant="a", owner="ann", runner=lambda *thread: None
    )

    async def begin() -> None:
        response: Any = await AsyncClient().generic("POST", "/agui/", json.dumps(run_input("t")))
        await response.streaming_content.aclose()

    async def threads() -> Any:
        return json.loads((await AsyncClient().get("/threads/")).content)["threads"]

    with override_settings(HELIX_STORE=ENABLED, ROOT_URLCONF=(path("", chat.urls),)):
        async_to_sync(begin)()
        session_id = chat.session_id("ann", "t")
        chat.drive(session_id, tenant="a")
        (thread,) = async_to_sync(threads)()
        position, chunk = newest_chunk(chat.store("a"), session_id)
    assert (thread["id"], chunk["type"]) == ("t", "end")
    assert position > 0
