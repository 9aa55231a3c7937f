"""A project with ``USE_TZ = False``: every call works, and its moments are aware, on each database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.test import override_settings

from helix_store.cleanup import expired_session_cleanup
from helix_store.core.validation import MAX_EPOCH_MILLISECONDS
from helix_store.models import Lock, Session
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
    InMemoryLockManager,
    InMemoryStateStore,
    InMemoryUsageStore,
    MemoryWorld,
)
from helix_store.testing.usage.base import custom
from tests.cells import for_each
from tests.database.counted_calls import CALLS, Faces
from tests.databases import CommittedDatabase, close_connections, fresh_tenant

FALL_BACK = datetime(2026, 11, 1, 5, 30, tzinfo=UTC)
"""01:30 in New York, for the first time on that day; an hour later it is 01:30 again."""


@pytest.fixture(autouse=True)
def time_zone(request: pytest.FixtureRequest) -> Iterator[str]:
    """No time zones in a project at this place. Connections are opened under these settings."""
    name = getattr(request, "param", "America/New_York")
    close_connections()
    with override_settings(USE_TZ=False, TIME_ZONE=name):
        yield name
        close_connections()


west_and_east = pytest.mark.parametrize("time_zone", ["America/New_York", "Asia/Tokyo"], indirect=True)


@pytest.fixture(params=["as configured", "portable"])
def database(request: pytest.FixtureRequest, committed_db: CommittedDatabase) -> Iterator[CommittedDatabase]:
    """Each database in turn; PostgreSQL also without prepared statements and forms of one statement."""
    if request.param == "portable" and committed_db.vendor == "sqlite":
        pytest.skip("SQLite has one form")
    with override_settings(HELIX_STORE={"FAST_PATHS": request.param != "portable"}):
        yield committed_db


def moments_in(value: Any) -> Iterator[datetime]:
    """Every datetime in what a call returned."""
    if isinstance(value, datetime):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from moments_in(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from moments_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from moments_in(item)
    else:
        for name in ("expires_at", "created_at"):
            if isinstance(moment := getattr(value, name, None), datetime):
                yield moment


def is_aware_and_recent(moment: datetime) -> bool:
    if moment.utcoffset() is None:
        return False
    # The entries of the calls are of March 2026, and so are the buckets that they are in.
    return moment.year == 2026 or abs(moment - datetime.now(UTC)) < timedelta(minutes=30)


@for_each("face", CALLS)
def test_every_call_works_and_returns_aware_moments(face: str, database: CommittedDatabase) -> None:
    wrong: dict[str, object] = {}
    for name, prepare in CALLS[face].items():
        faces = Faces(CommittedDatabase(alias=database.alias, tenant=fresh_tenant()))
        try:
            moments = list(moments_in(prepare(faces)()))
        except (TypeError, ValueError) as exc:
            wrong[name] = exc
        else:
            if not all(map(is_aware_and_recent, moments)):
                wrong[name] = moments
    assert wrong == {}


def test_the_two_hours_when_clocks_are_set_back_are_told_apart(committed_db: CommittedDatabase) -> None:
    """By the fields of the models, by an expiry and by the buckets of usage."""
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    usage = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    hours = [FALL_BACK, FALL_BACK + timedelta(hours=1)]
    for number, moment in enumerate(hours):
        milliseconds = int(moment.timestamp() * 1000)
        store.create_session(f"s{number}", agent_type="agent", expires_at=milliseconds)
        usage.record_entry(custom(f"s{number}", timestamp=milliseconds))
        Session.objects.using(committed_db.alias).filter(
            tenant=committed_db.tenant, session_id=f"s{number}"
        ).update(created_at=moment)

    rows = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    assert list(rows.order_by("created_at").values_list("created_at", flat=True)) == hours
    assert list(rows.filter(expires_at__gt=hours[0]).values_list("session_id", flat=True)) == ["s1"]
    states = [store.load_state(f"s{number}") for number in range(2)]
    assert [state and state.created_at for state in states] == hours
    assert [session.session_id for session in store.list_sessions(created_from=hours[1]).sessions] == ["s1"]
    buckets = usage.timeseries(date_from=0, date_to=hours[1] + timedelta(days=1), bucket="hour")
    assert [bucket.start for bucket in buckets] == [hour.replace(minute=0) for hour in hours]
    (day,) = usage.timeseries(date_from=0, date_to=hours[1] + timedelta(days=1), bucket="day")
    assert (day.start, day.entry_count) == (datetime(2026, 11, 1, tzinfo=UTC), 2)


@west_and_east
def test_the_last_millisecond_of_the_calendar_is_read_east_of_greenwich(database: CommittedDatabase) -> None:
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    store.create_session("s", agent_type="agent", expires_at=MAX_EPOCH_MILLISECONDS)
    state = store.load_state("s")
    assert state is not None
    assert state.expires_at == MAX_EPOCH_MILLISECONDS
    (head,) = store.list_sessions().sessions
    assert head.expires_at == MAX_EPOCH_MILLISECONDS


@west_and_east
def test_a_local_time_of_a_filter_is_a_time_of_the_projects_zone(
    committed_db: CommittedDatabase, time_zone: str
) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("s", agent_type="agent")
    rows = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    local = datetime.now(ZoneInfo(time_zone)).replace(tzinfo=None)
    assert rows.filter(created_at__lte=local, created_at__gt=local - timedelta(minutes=5)).count() == 1


@west_and_east
def test_the_cleanup_and_its_command_find_what_has_expired(empty_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(empty_db.alias)
    soon = int(datetime.now(UTC).timestamp() * 1000) + 1_800_000
    store.create_session("long gone", agent_type="agent", expires_at=1_000_000_000_000)
    store.create_session("good for half an hour", agent_type="agent", expires_at=soon)
    output = StringIO()
    call_command(
        "cleanup_expired_sessions", database=empty_db.alias, verbosity=0, format="json", stdout=output
    )
    assert '"marked": 1' in output.getvalue()
    assert expired_session_cleanup(using=empty_db.alias, now=soon + 1).marked == 1
    assert expired_session_cleanup(using=empty_db.alias, delete_after=timedelta(days=1)).errors == 0
    assert not store.session_exists("long gone")


def test_streams_are_pruned_by_age(empty_db: CommittedDatabase) -> None:
    streams = DatabaseStreamManager(empty_db.alias)
    async_to_sync(streams.create_writer)("stream", "run", "agent")
    streams.write_sync("stream", [{"type": "text_delta", "delta": "word"}])
    async_to_sync(streams.end_stream)("stream")
    now = datetime.now(UTC)
    assert async_to_sync(streams.prune)(older_than=now - timedelta(minutes=30), dry_run=True).streams == 0
    assert async_to_sync(streams.prune)(older_than=now + timedelta(minutes=30), dry_run=True).streams == 1


def test_the_stores_in_memory_have_aware_moments_too() -> None:
    world = MemoryWorld()
    store, usage = InMemoryStateStore(world=world), InMemoryUsageStore(world=world)
    state = store.create_session("s", agent_type="agent", expires_at=1_000_000_000_000)
    usage.record_entry(custom("s"))
    assert state.created_at is not None
    assert state.created_at.tzinfo is UTC
    assert store.list_sessions(created_from=state.created_at).total == 1
    assert usage.query_usage(date_from=state.created_at - timedelta(days=9999)).total == 1
    lock = InMemoryLockManager(world=world).acquire("lock")
    assert lock is not None
    assert lock.expires_at > datetime.now(UTC)
    assert expired_session_cleanup(state_store=store).marked == 1


def test_a_time_zone_of_the_database_alone_changes_nothing(
    committed_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``DATABASES[…]["TIME_ZONE"]``: with it, Django's fields store local times on SQLite."""

    def use_the_settings() -> None:
        for name in ("timezone", "timezone_name"):
            committed_db.connection.__dict__.pop(name, None)
        committed_db.connection.close()

    monkeypatch.setitem(committed_db.connection.settings_dict, "TIME_ZONE", "America/New_York")
    with override_settings(USE_TZ=True):
        use_the_settings()
        store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
        store.create_session("s", agent_type="agent")
        state = store.load_state("s")
        rows = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
        assert state is not None
        assert rows.get().created_at == state.created_at
        assert rows.filter(created_at__gt=datetime.now(UTC) - timedelta(minutes=5)).count() == 1
        assert DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant).acquire("lock")
        lock = Lock.objects.using(committed_db.alias).get(tenant=committed_db.tenant)
        assert lock.acquired_at is not None
        assert abs(lock.acquired_at - datetime.now(UTC)) < timedelta(minutes=5)
    monkeypatch.undo()
    use_the_settings()
