"""The gauges for Prometheus and the health check: what they count, and who may read them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import connections
from django.http import HttpRequest, HttpResponseBase
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from helix_store import Store
from helix_store.contrib.metrics import HealthView, HelixCollector, MetricsView, bearer_token, read_figures
from helix_store.core import moments
from helix_store.models import Lock, Run, Session, Stream
from helix_store.stores import DatabaseLockManager, DatabaseStreamManager
from tests.cells import for_each
from tests.databases import CommittedDatabase

LONG_AGO = timedelta(hours=7)


@pytest.fixture
def database(empty_db: CommittedDatabase) -> CommittedDatabase:
    """One session of each kind in the test's tenant, and a crashed one in another tenant."""
    alias, tenant = empty_db.alias, empty_db.tenant
    store = Store(alias, tenant=tenant)
    for name in ("crashed", "waits", "posts", "expired", "abandoned"):
        store.new_session(name, agent_type="a")
    with suppress(LookupError), store.session("crashed").turn():
        raise LookupError
    store.sessions.suspend(
        "waits", kind="suspended_client_tool", context={}, pending={"call-1": {"tool_name": "book"}}
    )
    store.sessions.post_message("posts", {"role": "user", "content": "Hello?"})
    DatabaseLockManager(alias, tenant=tenant).acquire("abandoned")
    lock = DatabaseLockManager(alias, tenant=tenant).acquire("job", ttl_ms=3_600_000)
    assert lock is not None
    store.sessions.start_run("abandoned", fencing_token=1)
    store.budgets.set_budget("month", scope="tenant", limit_tokens=200)
    store.usage.record_entry(
        {
            "kind": "tokens",
            "session_id": "waits",
            "step_count": 1,
            "timestamp": int(moments.now().timestamp() * 1_000),
            "source": {"type": "agent", "name": "a"},
            "model": "m",
            "tokens": {"prompt": 25, "completion": 25, "total": 50},
        }
    )
    async_to_sync(DatabaseStreamManager(alias, tenant=tenant).create_writer)("stream", "run", "agent")
    then = moments.now() - LONG_AGO
    sessions = Session.objects.using(alias)
    sessions.filter(session_id="waits").update(pending_deadline=then)
    sessions.filter(session_id="expired").update(expires_at=then)
    Lock.objects.using(alias).filter(name="abandoned").update(expires_at=then)
    Lock.objects.using(alias).filter(name="job").update(acquired_at=then)
    Run.objects.using(alias).filter(status="running").update(started_at=then)
    Stream.objects.using(alias).update(lease_expires_at=then)
    other = Store(alias, tenant="other")
    other.new_session("crashed", agent_type="a")
    with suppress(LookupError), other.session("crashed").turn():
        raise LookupError
    return empty_db


def _request(user: Any = None, **headers: str) -> HttpRequest:
    request = RequestFactory().get("/", headers=headers)
    request.user = AnonymousUser() if user is None else user
    return request


def _superuser() -> User:
    return User(username="operator", is_superuser=True, is_active=True)


def _user(**fields: bool) -> User:
    return User.objects.create(username=f"user-{uuid.uuid4().hex}", **fields)


def _gauges(response: HttpResponseBase) -> dict[str, float]:
    """The samples by name and labels without ``database``, such as ``stuck_sessions condition=crashed``."""
    text = response.content.decode()  # type: ignore[attr-defined]
    return {
        " ".join(
            [
                sample.name.removeprefix("helix_store_"),
                *sorted(f"{name}={value}" for name, value in sample.labels.items() if name != "database"),
            ]
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _metrics(database: CommittedDatabase, **given: Any) -> dict[str, float]:
    view = MetricsView.as_view(using=database.alias, **given)
    return _gauges(view(_request(_superuser())))


def _health(database: CommittedDatabase, user: Any, **given: Any) -> tuple[int, Any]:
    response = HealthView.as_view(using=database.alias, **given)(_request(user))
    return response.status_code, json.loads(response.content)  # type: ignore[attr-defined]


def test_the_gauges_say_what_a_database_holds(database: CommittedDatabase) -> None:
    found = _metrics(database)
    expected = {
        "crashed": 2,
        "abandoned": 1,
        "over_budget": 0,
        "effect_unknown": 0,
        "unanswered": 1,
        "waiting": 1,
    }
    for condition, count in expected.items():
        assert found[f"stuck_sessions condition={condition}"] == count, condition
    for name in ("up", "overdue_calls", "running_runs", "active_streams", "lost_streams"):
        assert found[name] == 1, name
    for name in ("oldest_lock_seconds", "oldest_run_seconds", "cleanup_lag_seconds"):
        assert found[name] == pytest.approx(LONG_AGO.total_seconds(), abs=60), name
    assert found["oldest_stuck_seconds condition=abandoned"] > LONG_AGO.total_seconds() - 60
    assert found[f"budget_spent_ratio budget=month tenant={database.tenant} unit=tokens"] == 0.25


def test_a_tenant_has_its_own_gauges(database: CommittedDatabase) -> None:
    tenant = database.tenant
    found = _metrics(database, tenant=tenant)
    assert found[f"stuck_sessions condition=crashed tenant={tenant}"] == 1
    assert found[f"oldest_lock_seconds tenant={tenant}"] > 0
    assert found[f"budget_spent_ratio budget=month tenant={tenant} unit=tokens"] == 0.25
    other = _metrics(database, tenant="other")
    assert other.pop("stuck_sessions condition=crashed tenant=other") == 1
    assert other.pop("oldest_stuck_seconds condition=crashed tenant=other") < 600
    assert other.pop("up tenant=other") == 1
    assert set(other.values()) == {0}


@for_each("tenant", [None, "other"])
def test_a_scrape_takes_few_statements(database: CommittedDatabase, tenant: str | None) -> None:
    with CaptureQueriesContext(connections[database.alias]) as captured:
        read_figures(database.alias, tenant=tenant)
    # A tenant without budgets has no limits to read.
    assert len(captured) == (9 if tenant is None else 8)


def test_an_empty_database_has_zeros(empty_db: CommittedDatabase) -> None:
    found = _metrics(empty_db)
    assert found.pop("up") == 1
    assert set(found.values()) == {0}
    assert _health(empty_db, _superuser())[0] == 200


@for_each("kind", ["nobody", "without the permission", "inactive"])
def test_the_metrics_need_a_permission(database: CommittedDatabase, kind: str) -> None:
    user = None if kind == "nobody" else _user(is_superuser=kind == "inactive", is_active=kind != "inactive")
    with CaptureQueriesContext(connections[database.alias]) as captured, pytest.raises(PermissionDenied):
        MetricsView.as_view(using=database.alias, permission="helix_store.view_run")(_request(user))
    assert not [query for query in captured if "helix" in query["sql"]]


@pytest.mark.thorough
@for_each(
    "header, is_allowed",
    [("Bearer secret", True), ("Bearer wrong", False), ("secret", False), ("Bearer ", False), ("", False)],
)
def test_a_scraper_sends_a_token(database: CommittedDatabase, header: str, is_allowed: bool) -> None:
    view = MetricsView.as_view(using=database.alias, permission=bearer_token("secret"))
    request = _request(authorization=header)
    if is_allowed:
        assert view(request).status_code == 200
    else:
        with pytest.raises(PermissionDenied):
            view(request)


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        bearer_token("")


def test_a_permission_that_does_not_say_yes_is_a_no(database: CommittedDatabase) -> None:
    with pytest.raises(PermissionDenied):
        MetricsView.as_view(using=database.alias, permission=lambda request: "yes")(_request(_superuser()))


def test_the_registry_of_a_project_takes_the_collector(database: CommittedDatabase) -> None:
    registry = CollectorRegistry(auto_describe=True)
    with CaptureQueriesContext(connections[database.alias]) as captured:
        registry.register(HelixCollector(database.alias))
    assert len(captured) == 0
    labels = {"database": database.alias, "condition": "crashed"}
    assert registry.get_sample_value("helix_store_stuck_sessions", labels) == 2


@pytest.fixture
def nowhere(postgres_db: CommittedDatabase) -> Iterator[None]:
    """An alias whose server does not listen."""
    server = {"HOST": "127.0.0.1", "PORT": 1, "NAME": "nothing"}
    connections.databases["nowhere"] = {**postgres_db.connection.settings_dict, **server}
    yield
    del connections.databases["nowhere"], connections["nowhere"]


@pytest.mark.usefixtures("nowhere")
def test_a_database_that_does_not_answer_is_down() -> None:
    found = _gauges(MetricsView.as_view(using="nowhere")(_request(_superuser())))
    assert found == {"up": 0}
    response = HealthView.as_view(using="nowhere")(_request(_superuser()))
    assert response.status_code == 503
    document = json.loads(response.content)  # type: ignore[attr-defined]
    assert document["problems"] == ["nowhere: the database does not answer"]


def test_the_health_names_what_is_too_old(database: CommittedDatabase) -> None:
    status, document = _health(database, _superuser())
    assert status == 503
    assert document["status"] == "failing"
    assert [problem.partition(" for ")[0] for problem in document["problems"]] == [
        f"{database.alias}: abandoned",
        f"{database.alias}: cleanup",
    ]
    figures = document["databases"][database.alias]
    assert figures["stuck"]["crashed"] == 2
    assert figures["budgets"] == [
        {"tenant": database.tenant, "name": "month", "unit": "tokens", "spent": 0.25}
    ]


def test_everybody_gets_the_status_and_nothing_else(database: CommittedDatabase) -> None:
    assert _health(database, None) == (503, {"status": "failing"})
    assert _health(database, None, limits={"lock": timedelta(days=1)}) == (200, {"status": "ok"})


def test_the_limits_of_the_health_are_chosen(database: CommittedDatabase) -> None:
    for name in ("lock", "run", "cleanup", "abandoned"):
        assert _health(database, None, limits={name: timedelta(hours=6)})[0] == 503, name
        assert _health(database, None, limits={name: timedelta(hours=8)})[0] == 200, name
    with pytest.raises(ImproperlyConfigured, match="'nope'"):
        _health(database, None, limits={"nope": timedelta(hours=1)})
