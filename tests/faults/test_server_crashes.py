"""A server that crashes under load loses nothing acknowledged, and its clients go on without a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import psycopg
import pytest
from django.core.management import call_command
from django.core.signals import request_finished, request_started
from django.db.backends.base.base import BaseDatabaseWrapper
from pytest_django import DjangoDbBlocker

from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.exceptions import OutcomeUnknown, StoreUnavailable
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from tests.database.separate import execute, separate_postgres
from tests.databases import ALIASES, fresh_tenant
from tests.deployments.deployments import another_alias
from tests.faults.campaign import Campaign, Trial, campaign
from tests.faults.clients import SESSION, read
from tests.faults.crew import Crew, until
from tests.faults.history import History, faults_of
from tests.faults.proxy import Cut
from tests.faults.servers import crash_one_process, kill_all_processes
from tests.faults.wires import opened_wire
from tests.postgres import PostgresCluster

_CLIENTS: Final = 4
_NANOSECONDS: Final = 1_000_000_000
_HEALED_WITHIN_SECONDS: Final = 30.0
_UNDURABLE: Final = {"synchronous_commit": "off", "wal_writer_delay": "10s"}

Crash = Callable[[PostgresCluster, BaseDatabaseWrapper, Trial], int]


@dataclass(frozen=True)
class Server:
    """A server of our own that crashes, and clients that live longer than it."""

    cluster: PostgresCluster
    connection: BaseDatabaseWrapper
    crew: Crew


@contextmanager
def server(**options: str) -> Iterator[Server]:
    with (
        PostgresCluster(options=options) as cluster,
        separate_postgres(cluster) as connection,
        Crew(connection.settings_dict, _CLIENTS) as crew,
    ):
        call_command("migrate", "helix_store", database=connection.alias, verbosity=0)
        yield Server(cluster, connection, crew)


@pytest.fixture(scope="module", autouse=True)
def has_postgresql(django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    if "postgres" not in ALIASES:
        pytest.skip("HELIX_TEST_DATABASES leaves PostgreSQL out of this run")
    with django_db_blocker.unblock():
        yield


@pytest.fixture(scope="module")
def of_ours(has_postgresql: None) -> Iterator[Server]:
    with server() as server_of_ours:
        yield server_of_ours


def crash_under_load(server: Server, crash: Crash, trial: Trial, healing: list[float]) -> list[str]:
    """Crash the server while clients work. Returns what the history of its clients cannot explain."""
    tenant = fresh_tenant()
    connection, crew = server.connection, server.crew
    store = DatabaseStateStore(connection.alias, tenant=tenant)
    usage = DatabaseUsageStore(connection.alias, tenant=tenant)
    answering(lambda: store.create_session(SESSION, agent_type="agent", custom_state={"list": []}))
    crew.begin(trial.seed, tenant)
    crew.wait_for_calls(trial.chance.randrange(5 * _CLIENTS, 20 * _CLIENTS))
    ready = crash(server.cluster, connection, trial)
    until(lambda: crew.have_all_succeeded_after(ready), "every client has success again")
    history = crew.end()
    count(trial, history)
    healing += healing_seconds(history, ready)
    answering(lambda: store.load_state(SESSION))
    read(store, history, usage)
    return faults_of(history)


def answering(call: Callable[[], Any]) -> Any:
    """The answer of our own connection, which has crashed too."""
    try:
        return call()
    except (OutcomeUnknown, StoreUnavailable):
        return call()


def count(trial: Trial, history: History) -> None:
    for event in history.events:
        trial.count(f"{event.call}: {event.result}")
        if event.error is not None and event.error.code != "fenced_out":
            trial.count(f"error: {type(event.error).__name__}")
    trial.count("calls", len(history.events))


def healing_seconds(history: History, ready: int) -> list[float]:
    """For each client, the seconds from the moment at which the server was ready to its first success."""
    first: dict[int, int] = {}
    for event in history.events:
        if event.begin > ready and event.result == "ok":
            first[event.client] = min(event.end, first.get(event.client, event.end))
    return [(end - ready) / _NANOSECONDS for end in first.values()]


def run(made: Campaign, server: Server, crash: Crash) -> None:
    healing: list[float] = []

    def crash_once(trial: Trial) -> None:
        faults = crash_under_load(server, crash, trial, healing)
        assert not faults, "\n".join(faults[:5])

    made.run(crash_once)
    made.facts["median seconds until a client heals"] = round(median(healing), 3)
    made.facts["most seconds until a client heals"] = round(max(healing), 3)
    assert max(healing) < _HEALED_WITHIN_SECONDS
    assert made.counts["step: ok"], made.counts
    assert made.counts["error: StoreUnavailable"] + made.counts["error: OutcomeUnknown"], made.counts


@pytest.mark.campaign
def test_a_crash_of_one_process_loses_nothing_and_clients_heal(of_ours: Server) -> None:
    with campaign("server_crashes", "postgres", sizes=(2, 200, 1_000)) as made:
        run(made, of_ours, crash_one_process)


@pytest.mark.campaign
def test_a_kill_of_the_whole_server_loses_nothing_and_clients_heal(of_ours: Server) -> None:
    with campaign("server_crashes", "postgres", sizes=(1, 20, 200)) as made:
        run(made, of_ours, kill_all_processes)


def test_a_server_that_does_not_wait_for_its_disk_is_found_out() -> None:
    trial = Trial(1, Campaign("server_crashes", "postgres", (1, 1, 1)).counts)
    with server(**_UNDURABLE) as forgetful:
        # The session itself is kept: it is what the rest is lost from.
        execute(forgetful.connection, "SET synchronous_commit = on")
        faults = crash_under_load(forgetful, kill_all_processes, trial, [])
    assert any("lost" in fault for fault in faults), faults


# --- Connections that are kept ---------------------------------------------------------------------


def kill_and_start(cluster: PostgresCluster) -> None:
    cluster.kill()
    cluster.start()


RESTARTS: Final[dict[str, Callable[[PostgresCluster], None]]] = {
    "fast": lambda cluster: cluster.restart(),
    "immediate": lambda cluster: cluster.restart(immediate=True),
    "killed": kill_and_start,
}


def step(store: DatabaseStateStore, number: int) -> object:
    state = store.load_state(SESSION)
    assert state is not None
    message = {"role": "user", "content": number}
    info = {"step_id": f"step-{number}", "step_count": number}
    return store.save_state_and_promote_staging(SESSION, state, [message], info)


CALLS: Final[dict[str, Callable[[DatabaseStateStore, int], object]]] = {
    "read": lambda store, number: store.get_messages(SESSION),
    "statement": lambda store, number: store.append_messages(SESSION, [{"role": "user", "content": number}]),
    "step": step,
}


@pytest.mark.parametrize("restart", RESTARTS.values(), ids=RESTARTS)
@pytest.mark.parametrize("is_checked", [True, False], ids=["checked by requests", "in a worker's loop"])
def test_a_kept_connection_costs_at_most_one_typed_error_after_a_restart(
    of_ours: Server, restart: Callable[[PostgresCluster], None], is_checked: bool
) -> None:
    settings = {
        **of_ours.connection.settings_dict,
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": is_checked,
    }
    errors: dict[str, list[str]] = {name: [] for name in CALLS}

    def in_request(call: Callable[[], object]) -> None:
        if not is_checked:
            # No request of Django ends, which would close a connection that has had an error.
            call()
            return
        request_started.send(sender=None)
        try:
            call()
        finally:
            request_finished.send(sender=None)

    def answered(name: str, store: DatabaseStateStore, number: int) -> None:
        while True:
            try:
                return in_request(lambda: CALLS[name](store, number))
            except (StoreUnavailable, OutcomeUnknown) as exc:
                errors[name].append(type(exc).__name__)
                assert len(errors[name]) < 5, errors

    with ExitStack() as aliases:
        # Each call has a connection that none of the others has replaced.
        stores = {
            name: DatabaseStateStore(
                aliases.enter_context(another_alias("kept", **settings)), tenant=fresh_tenant()
            )
            for name in CALLS
        }
        for store in stores.values():
            in_request(partial(store.create_session, SESSION, agent_type="agent"))
        for name, store in stores.items():
            answered(name, store, 1)
        assert not any(errors.values()), errors
        restart(of_ours.cluster)
        for number in (2, 3):
            for name, store in stores.items():
                answered(name, store, number)
        for name in ("statement", "step"):
            messages = stores[name].get_messages(SESSION).messages
            assert [message["content"] for message in messages] == [1, 2, 3]
    assert max(map(len, errors.values())) <= (0 if is_checked else 1), errors
    assert is_checked or errors["read"], "the connection was not kept"


def test_the_first_snapshot_of_a_thread_is_found_on_a_server_that_has_forgotten_its_transactions(
    of_ours: Server,
) -> None:
    """The reset makes the server look like a promoted standby, so the outcome is only known by the row."""

    def forget() -> None:
        # In the thread of the proxy, which has none of our connections.
        with psycopg.connect(of_ours.cluster.url) as connection:
            connection.execute("SELECT pg_stat_reset_shared('bgwriter')")

    with opened_wire(of_ours.connection.alias, fresh_tenant()) as wire:
        snapshots = SnapshotCheckpointer(wire.alias, tenant=wire.tenant)
        # The statement that finds no thread is followed by the transaction that creates one.
        wire.proxy.arm(Cut.AFTER, after=1, meanwhile=forget)
        put = snapshots.put("thread", {"version": 1})
        assert [each.id for each in snapshots.list("thread")] == [put]
