"""Each key of ``HELIX_STORE`` changes something: none is checked and then read by nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from io import StringIO
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import AnonymousUser
from django.core.management import call_command
from django.http import Http404, HttpRequest
from django.test import Client, RequestFactory, override_settings
from django.test.utils import CaptureQueriesContext

from helix_store import conf
from helix_store.admin.base import permitted_tenants
from helix_store.admin.elements import names_of_users
from helix_store.admin.filters import shown_views
from helix_store.answer_pages import answer_page
from helix_store.cleanup import erase
from helix_store.contrib.chat import Chat
from helix_store.contrib.chat.driver import Pool
from helix_store.core.types import StepInfo
from helix_store.engine.async_twins import in_thread
from helix_store.exceptions import LimitExceeded, SessionErased
from helix_store.items import ItemLog
from helix_store.models import Stream
from helix_store.retention import apply_retention
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, DatabaseStreamManager
from helix_store.workspaces import configured_workspace_providers
from tests.cells import for_each
from tests.cleanup.providers import MemoryProvider
from tests.databases import CommittedDatabase, delete_all_rows, fresh_tenant

provider = MemoryProvider()


def allow(request: HttpRequest, stream_id: str) -> bool:
    return True


def _table(database: CommittedDatabase) -> object:
    """The models have the prefix of the start; ``tests/migrations`` has tables with another one."""
    return conf.table_name("session")


def _refuses_a_message(database: CommittedDatabase) -> object:
    store = _store_with_session(database)
    try:
        store.append_messages("s", [{"role": "user", "content": "hello"}])
    except LimitExceeded:
        return True
    return False


def _minutes_of_a_lock(database: CommittedDatabase) -> object:
    lock = DatabaseLockManager(database.alias, tenant=fresh_tenant()).acquire("lock")
    assert lock is not None
    return round((lock.expires_at - datetime.now(UTC)).total_seconds() / 60)


def _minutes_of_a_writer(database: CommittedDatabase) -> object:
    tenant = fresh_tenant()
    streams = DatabaseStreamManager(database.alias, tenant=tenant)
    async_to_sync(streams.create_writer)("stream", "run", "agent")
    lease = Stream.objects.using(database.alias).get(tenant=tenant).lease_expires_at
    assert lease is not None
    return round((lease - datetime.now(UTC)).total_seconds() / 60)


def _providers(database: CommittedDatabase) -> object:
    return set(configured_workspace_providers())


def _checkpoints(database: CommittedDatabase) -> object:
    store = _store_with_session(database)
    for number in (1, 2, 3):
        state = store.load_state("s")
        assert state is not None
        store.save_state_and_promote_staging("s", state, [], StepInfo(f"step-{number}", number))
    return len(store.list_checkpoints("s").items)


def _survives_retention(database: CommittedDatabase) -> object:
    store = _store_with_session(database)
    apply_retention(using=database.alias, tenant=store.tenant)
    return store.session_exists("s")


def _status_of_the_stream_view(database: CommittedDatabase) -> object:
    return Client().get("/streams/stream/").status_code


def _thread(database: CommittedDatabase) -> object:
    return async_to_sync(in_thread)(lambda: threading.current_thread().name.startswith("helix_store"))


def _batches(database: CommittedDatabase) -> object:
    delete_all_rows(database.alias)
    store = DatabaseStateStore(database.alias)
    for number in range(3):
        store.create_session(f"s{number}", agent_type="agent", expires_at=1_000_000_000_000)
    progress = StringIO()
    call_command(
        "cleanup_expired_sessions", database=database.alias, stdout=StringIO(), stderr=progress, no_color=True
    )
    return progress.getvalue().count("so far")


def _statements_of_a_step(database: CommittedDatabase) -> object:
    store = _store_with_session(database)
    state = store.load_state("s")
    assert state is not None
    with CaptureQueriesContext(database.connection) as captured:
        store.save_state_and_promote_staging("s", state, [], StepInfo("step-1", 1))
    return len(captured)


def _store_with_session(database: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(database.alias, tenant=fresh_tenant())
    store.create_session("s", agent_type="agent")
    return store


def _keys_of_an_error(database: CommittedDatabase) -> object:
    store = _store_with_session(database)
    with suppress(ZeroDivisionError), store.session("s").turn():
        raise ZeroDivisionError("message")
    error: Any = store.list_runs("s")[0].error
    return list(error)


def _stays_erased(database: CommittedDatabase) -> object:
    store = _store_with_session(database)
    erase(using=database.alias, session_id="s", tenant=store.tenant)
    with suppress(SessionErased):
        ItemLog("s", using=database.alias, tenant=store.tenant).append([1])
    return not store.session_exists("s")


def _chats_at_once(database: CommittedDatabase) -> object:
    """Return whether two chats run at once."""
    pool, both = Pool(idle_seconds=0.05), threading.Barrier(2)
    met: list[bool] = []

    def meet() -> None:
        try:
            both.wait(1)
        except threading.BrokenBarrierError:
            met.append(False)
        else:
            met.append(True)

    for key in range(2):
        pool.submit((key,), meet)
    while len(met) < 2 or pool.threads:
        threading.Event().wait(0.01)
    return all(met)


def _chunks_of_an_answer(database: CommittedDatabase) -> object:
    """Return whether each delta of an answer is a chunk of its own."""

    def answer(turn: Any, out: Any) -> None:
        for _ in range(5):
            out.text("x")
        with turn.step() as step:
            step.say({"role": "assistant", "content": "x" * 5})
            step.end_turn()

    store = _store_with_session(database)
    store.session("s").post({"role": "user", "content": "Hello"})
    chat = Chat("chat-of-a-setting", answer, using=database.alias, runner=lambda *thread: None)
    chat.drive("s", tenant=store.tenant)
    streams = DatabaseStreamManager(database.alias, tenant=store.tenant)
    chunks = [each.chunk for each in streams.read_after("s", 0)]
    return sum(chunk["type"] == "text" for chunk in chunks) == 5


def _status_of_an_answer_page(database: CommittedDatabase) -> int:
    # Without a user, an answer page asks somebody to sign in.
    request = RequestFactory().get("/")
    try:
        return answer_page(request, "token").status_code
    except Http404:
        return 404


def _build_of_a_run(database: CommittedDatabase) -> object:
    store = _store_with_session(database)
    return store.start_run("s").build


def _tenants_of_an_operator(database: CommittedDatabase) -> object:
    return permitted_tenants(RequestFactory().get("/"))


def customers(user_ids: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(user_ids, "A customer")


def _name_of_a_user(database: CommittedDatabase) -> object:
    return names_of_users(["c17"])


def _views_of_the_list(database: CommittedDatabase) -> object:
    request = RequestFactory().get("/")
    request.user = AnonymousUser()
    return shown_views(request)


EFFECTS: dict[str, tuple[Any, Callable[[CommittedDatabase], object]]] = {
    "TABLE_PREFIX": ("other_", _table),
    "LIMITS": ({"max_message_bytes": 20}, _refuses_a_message),
    "DEFAULT_LOCK_TTL_MS": (3_600_000, _minutes_of_a_lock),
    "STREAMS": ({"writer_lease": 3_600.0}, _minutes_of_a_writer),
    "WORKSPACE_PROVIDERS": ({"mine": f"{__name__}.provider"}, _providers),
    "CHECKPOINTS_KEEP": (1, _checkpoints),
    "RETENTION": ({"sessions_idle_days": {"active": 0}}, _survives_retention),
    "STREAM_PERMISSION": (f"{__name__}.allow", _status_of_the_stream_view),
    "ASYNC_THREADS": (2, _thread),
    "PAGE_SIZE": (1, _batches),
    "FAST_PATHS": (False, _statements_of_a_step),
    "ROW_LEVEL_SECURITY": (True, _statements_of_a_step),
    "RUN_ERROR_DETAILS": (False, _keys_of_an_error),
    "TOMBSTONE_DAYS": (0, _stays_erased),
    "CHAT_THREADS": (1, _chats_at_once),
    "CHAT_FLUSH_MS": (0, _chunks_of_an_answer),
    "ANSWER_PAGES": (True, _status_of_an_answer_page),
    "BUILD": ("2026.11.2", _build_of_a_run),
    "ADMIN_TENANTS": (lambda request: ["acme"], _tenants_of_an_operator),
    "ADMIN_USERS": (f"{__name__}.customers", _name_of_a_user),
    "ADMIN_VIEWS": ({"Failed": "status__exact=failed"}, _views_of_the_list),
}


POSTGRESQL_ONLY = {"FAST_PATHS", "ROW_LEVEL_SECURITY"}


@pytest.mark.thorough
@for_each("key", conf.DEFAULTS)
def test_each_setting_changes_something(key: str, request: pytest.FixtureRequest) -> None:
    database = request.getfixturevalue("postgres_db" if key in POSTGRESQL_ONLY else "sqlite_db")
    value, observe = EFFECTS[key]
    with override_settings(HELIX_STORE={}):
        by_default = observe(database)
    with override_settings(HELIX_STORE={key: value}):
        assert observe(database) != by_default
