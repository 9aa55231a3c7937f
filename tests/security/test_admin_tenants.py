"""``ADMIN_TENANTS``: no page, list, count, document or operation of the admin reaches another tenant.

The table names every address of `admin.site`, so a new page fails until somebody says what it shows. An
operator may see one tenant. Another tenant has rows of every kind. The pages that show many rows have to be
the same as they were before the other tenant existed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.core.exceptions import ImproperlyConfigured
from django.db.models import BinaryField, Field, ForeignKey, Model
from django.http import HttpRequest
from django.test import RequestFactory, override_settings
from django.urls import URLPattern, URLResolver, get_resolver, reverse

from helix_store.admin.base import ReadOnlyAdmin, Scope, permitted_tenants
from helix_store.admin.operating import OperatedAdmin
from helix_store.admin.sections import SECTIONS
from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.core import moments
from helix_store.models import Budget, Post, Session, Stream, StreamChunk
from helix_store.stores import DatabaseLockManager, DatabaseStreamManager, DatabaseUsageStore
from tests.admin.conftest import Browser, browser_on
from tests.admin.rows import MODELS, rows_of, store_of, write_session
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.security.admin_requests import address_of

OWN: Final = "ownmark"
OTHER: Final = "othermark"

PAGES: Final = [model for model, page in admin.site._registry.items() if isinstance(page, ReadOnlyAdmin)]

# --- The table --------------------------------------------------------------------------------------

MANY: Final = "many rows"
ONE: Final = "one row"
ACTS_ON_ONE: Final = "an operation on a row"
ACTS_ON_MANY: Final = "an operation on a table"
NOBODY: Final = "refused to everybody"
NO_ROWS: Final = "no rows"

VIEWS: Final = {
    "changelist": MANY,
    "graphs": MANY,
    "snapshots": MANY,
    "approvals": MANY,
    "live_list": MANY,
    "live_start": MANY,
    "views": NO_ROWS,
    "report": MANY,
    "csv": MANY,
    "change": ONE,
    "history": ONE,
    "payload": ONE,
    "state": ONE,
    "conversation": ONE,
    "live": ONE,
    "operation": ACTS_ON_ONE,
    "table_operation": ACTS_ON_MANY,
    "add": NOBODY,
    "delete": NOBODY,
}
"""What the views of the app's models show, by the last part of their names."""

OF_THE_SITE: Final = {
    "index": NO_ROWS,
    "app_list": MANY,
    "autocomplete": MANY,
    "login": NO_ROWS,
    "logout": NO_ROWS,
    "password_change": NO_ROWS,
    "password_change_done": NO_ROWS,
    "jsi18n": NO_ROWS,
    "view_on_site": NO_ROWS,
}


def _addresses() -> Iterator[tuple[str, type[Model] | None]]:
    """The names of all addresses of the admin, with the model whose page they belong to."""
    models = {f"{each._meta.app_label}_{each._meta.model_name}_": each for each in admin.site._registry}
    pending: list[Any] = list(admin.site.get_urls())
    while pending:
        pattern = pending.pop()
        if isinstance(pattern, URLResolver):
            pending += pattern.url_patterns
        elif isinstance(pattern, URLPattern) and pattern.name is not None:
            found = [prefix for prefix in models if pattern.name.startswith(prefix)]
            prefix = max(found, key=len, default="")
            yield pattern.name.removeprefix(prefix), models.get(prefix)


KINDS: Final = {
    (view, model): (OF_THE_SITE if model is None else VIEWS).get(view)
    for view, model in _addresses()
    if model is None or model in PAGES
}


def test_the_table_names_every_address_of_the_admin() -> None:
    unknown = [(view, model) for (view, model), kind in KINDS.items() if kind is None]
    assert unknown == [], "Say in VIEWS what a new page shows, and that it shows the operator's tenants only."
    assert {model for _view, model in KINDS if model is not None} == set(PAGES)
    assert {view for view, model in KINDS if model is not None} == set(VIEWS)


# --- The tenants ------------------------------------------------------------------------------------


def tenants_of_operator(request: HttpRequest) -> list[str]:
    return [OWN]


@pytest.fixture
def browser(empty_db: CommittedDatabase) -> Iterator[Browser]:
    with browser_on(empty_db) as browser:
        browser.sign_in(superuser=True)
        yield browser


@contextmanager
def limited(function: Any = tenants_of_operator) -> Iterator[None]:
    with override_settings(HELIX_STORE={"ADMIN_TENANTS": function}):
        yield


def _fill(database: CommittedDatabase, mark: str, cost: str) -> Session:
    """Rows of every kind in a tenant, whose texts are ``mark``, and sessions in every condition."""
    of_tenant = replace(database, tenant=mark)
    store, alias, now = store_of(of_tenant), database.alias, moments.now()
    session = write_session(of_tenant, mark, session_id=f"{mark}-all")
    for model in PAGES:
        if model not in MODELS:
            _row(model, session, mark)
    children = ("tree", "waits", "late", "crashed", "works", "posts", "effect", "budget", "expired")
    for name in children:
        store.create_session(f"{mark}-{name}", agent_type=mark, title=f"{mark} {name}", tags=[mark])
    store.create_session(f"{mark}-child", agent_type=mark, parent_session_id=f"{mark}-tree")
    calls = {"call-1": {"tool_name": f"{mark}-tool", "approval_id": "approval-1"}}
    for name in ("waits", "late"):
        store.suspend(f"{mark}-{name}", kind="suspended_client_tool", context={}, pending=calls)
    with suppress(RuntimeError), store.session(f"{mark}-crashed").turn():
        raise RuntimeError(mark)
    store.start_run(f"{mark}-works")
    locks = DatabaseLockManager(alias, tenant=mark)
    locks.acquire(f"{mark}-works", owner=mark)
    store.post_message(f"{mark}-posts", {"role": "user", "content": mark})
    with suppress(TimeoutError), store.session(f"{mark}-effect").effect(f"{mark}-call", tool_name=mark):
        raise TimeoutError
    sessions = Session.objects.using(alias).filter(tenant=mark)
    sessions.filter(session_id=f"{mark}-posts").update(next_post_at=now - timedelta(hours=1))
    sessions.filter(session_id=f"{mark}-late").update(pending_deadline=now - timedelta(hours=1))
    sessions.filter(session_id=f"{mark}-expired").update(expires_at=now - timedelta(hours=1))
    Post.objects.using(alias).filter(session__tenant=mark).update(due_at=now - timedelta(hours=1))
    graphs = GraphCheckpointStore(alias, tenant=mark)
    graphs.create_session(f"/{mark}", session_id=f"{mark}-graph", title=mark, workspace_id=mark)
    graphs.save_checkpoint(f"{mark}-graph", step=1, node_id=mark, pending_nodes=[])
    SnapshotCheckpointer(alias, tenant=mark).put(f"{mark}-snapshot", {"version": 1})
    DatabaseUsageStore(alias, tenant=mark).record_entry(
        {
            "kind": "tokens",
            "session_id": f"{mark}-works",
            "step_count": 1,
            "timestamp": int(now.timestamp() * 1_000),
            "source": {"type": "agent", "name": mark},
            "model": mark,
            "tokens": {"prompt": 1, "completion": 1, "total": 2},
            "cost_usd": cost,
        }
    )
    return session


def _row(model: type[Model], session: Session, mark: str) -> None:
    """Store a row of a framework's app, with ``mark`` in each of its texts."""
    values: dict[str, Any] = {}
    for field in model._meta.concrete_fields:
        if isinstance(field, ForeignKey):
            values[field.name] = session
        elif field.name == "tenant":
            values[field.name] = session.tenant
        elif not (field.primary_key or field.null or field.has_default()):
            values[field.name] = _value(field, mark)
    model._default_manager.using(session._state.db).create(**values)


def _value(field: Field[Any, Any], mark: str) -> Any:
    if isinstance(field, BinaryField):
        return mark.encode()
    return {"DateTimeField": datetime.now(UTC), "BigIntegerField": 1, "IntegerField": 1}.get(
        field.get_internal_type(), json.dumps(mark) if "Payload" in type(field).__name__ else mark
    )


def _rows_of_tenant(alias: str, session: Session) -> list[Any]:
    """A row of each model with a page."""
    rows = list(rows_of(session))
    for model in PAGES:
        if model not in MODELS:
            rows.append(Scope(alias, (session.tenant,)).rows(model).first())
    return rows


@pytest.fixture
def world(browser: Browser) -> dict[str, Session]:
    return {mark: _fill(browser.database, mark, cost) for mark, cost in ((OWN, "1.25"), (OTHER, "7.75"))}


# --- Lists, counts, totals and documents ------------------------------------------------------------

_QUERIES: Final[dict[str, list[dict[str, str]]]] = {
    "changelist": [{}, {"all": ""}],
    "csv": [{"by": by} for by in ("day", "model", "agent_type", "user")],
    "autocomplete": [
        {"app_label": "helix_store", "model_name": "message", "field_name": "session", "term": term}
        for term in ("", OTHER)
    ],
}
_OF_SESSIONS: Final[list[dict[str, str]]] = [
    *({"waiting": each} for each in ("person", "late", "post")),
    *(
        {"condition": each}
        for each in (
            *("any", "stopped", "crashed", "abandoned", "over_budget"),
            *("effect_unknown", "unanswered", "waiting"),
        )
    ),
    *({"expiry": each} for each in ("past", "day", "failed")),
    *({"order": each} for each in ("oldest", "created", "first", "id")),
    {"changed": "today"},
    {"status__exact": "active"},
    {"q": OTHER},
    {"q": "mark"},
    {"tag": OTHER},
    {"agent_type": OTHER},
    {"tenant": OTHER},
]


def _many() -> Iterator[tuple[str, dict[str, str]]]:
    """Every page that shows many rows: its address, with each query that it is tried with."""
    for (view, model), kind in KINDS.items():
        if kind is not MANY:
            continue
        if model is not None:
            url = address_of(model, view)
        else:
            url = reverse(f"admin:{view}", args=["helix_store"] if view == "app_list" else [])
        more = _OF_SESSIONS if (view, model) == ("changelist", Session) else []
        for query in [*_QUERIES.get(view, [{}]), *more]:
            yield url, query


def _pages(browser: Browser) -> dict[str, str]:
    return {f"{url} {query}": _without_tokens(browser.open(url, **query).html) for url, query in _many()}


def _without_tokens(html: str) -> str:
    return re.sub(r'(csrfmiddlewaretoken" value=)"\w+"', r"\1", html)


@pytest.mark.thorough
def test_pages_of_many_rows_are_as_if_there_were_no_other_tenant(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = moments.now() + timedelta(minutes=1)
    _fill(browser.database, OWN, "1.25")
    with monkeypatch.context() as patched:
        patched.setattr(moments, "now", lambda: now)
        with limited():
            before = _pages(browser)
    _fill(browser.database, OTHER, "7.75")
    with monkeypatch.context() as patched:
        patched.setattr(moments, "now", lambda: now)
        of_all = _pages(browser)
        with limited():
            after = _pages(browser)
    assert before == after
    assert any(OWN in html for html in before.values())
    # Without the setting, every such page shows the other tenant, so that the comparison means something.
    unchanged = [address for address, html in of_all.items() if html == before[address]]
    assert [each for each in unchanged if "delete" not in each] == []


# --- Pages of one row -------------------------------------------------------------------------------


def _urls_of(row: Model, kind: str) -> Iterator[str]:
    for (view, model), of_kind in KINDS.items():
        if of_kind is kind and model is type(row):
            if kind is ONE:
                yield address_of(row, view, row.pk)
                continue
            page = admin.site.get_model_admin(model)
            assert isinstance(page, OperatedAdmin)
            for operation in page.row_operations:
                yield address_of(row, view, row.pk, operation.name)


@pytest.mark.thorough
def test_a_page_of_a_row_is_missing_for_another_tenant(browser: Browser, world: dict[str, Session]) -> None:
    alias = browser.database.alias
    tried = set()
    with limited():
        for row in _rows_of_tenant(alias, world[OWN]):
            for url in _urls_of(row, ONE):
                response = browser.client.get(url)
                response.close()
                assert response.status_code == 200, url
                tried.add(url.replace(str(row.pk), "ID"))
        for row in _rows_of_tenant(alias, world[OTHER]):
            for url in _urls_of(row, ONE):
                page = browser.open(url)
                assert page.status == 404, url
                assert OTHER not in page.html
                missing = browser.open(url.replace(f"/{row.pk}/", f"/{row.pk + 10**9}/"))
                assert missing.status == 404, url
        for section in SECTIONS:
            assert browser.page_of(world[OWN], section=section.name).status == 200
            assert browser.page_of(world[OTHER], section=section.name).status == 404
    assert len(tried) == sum(kind is ONE for kind in KINDS.values())


@pytest.mark.thorough
@for_each("model", [model for model in PAGES if "session" in {each.name for each in model._meta.fields}])
def test_a_list_of_one_session_shows_nothing_of_another_tenant(
    browser: Browser, world: dict[str, Session], model: type[Model]
) -> None:
    with limited():
        page = browser.list_of(model, session__id__exact=world[OTHER].pk)
    assert OTHER not in page.html
    assert page.row_count == 0


# --- Operations -------------------------------------------------------------------------------------


def _dump(alias: str, tenant: str) -> dict[str, list[Any]]:
    models: list[type[Model]] = [*PAGES, Post, StreamChunk]
    return {
        model.__name__: list(
            Scope(alias, (tenant,)).rows(model).order_by("pk").values()
            if model is not StreamChunk
            else StreamChunk.objects.using(alias).filter(stream__tenant=tenant).order_by("pk").values()
        )
        for model in models
    }


@pytest.mark.thorough
def test_an_operation_on_a_row_of_another_tenant_is_missing(
    browser: Browser, world: dict[str, Session]
) -> None:
    alias = browser.database.alias
    before = _dump(alias, OTHER)
    given = {"confirmed": "yes", "keep": "0", "text": OWN, "tenant": OWN, "name": OWN}
    tried = 0
    with limited():
        for row in _rows_of_tenant(alias, world[OTHER]):
            for url in _urls_of(row, ACTS_ON_ONE):
                assert browser.client.get(url).status_code == 404, url
                assert browser.client.post(url, given).status_code == 404, url
                tried += 1
        for row in _rows_of_tenant(alias, world[OWN]):
            for url in _urls_of(row, ACTS_ON_ONE):
                assert browser.client.get(url).status_code == 200, url
    assert tried > 10
    assert _dump(alias, OTHER) == before
    assert not LogEntry.objects.filter(object_repr__contains=OTHER).exists()


def _streams(database: CommittedDatabase) -> None:
    for mark in (OWN, OTHER):
        streams = DatabaseStreamManager(database.alias, tenant=mark)
        writer = async_to_sync(streams.create_writer)(f"{mark}-stream", mark, mark)
        async_to_sync(writer.write)({"type": "text", "text": mark})
        async_to_sync(writer.close)()
    Stream.objects.using(database.alias).update(ended_at=moments.now() - timedelta(days=2))


_ON_TABLES: Final[dict[str, Callable[[str], dict[str, str]]]] = {
    "clean-up": lambda tenant: {},
    "prune-streams": lambda tenant: {"days": "0"},
    "add-budget": lambda tenant: {
        "name": "new",
        "tenant": tenant,
        "scope": "tenant",
        "period": "day",
        "limit_tokens": "7",
    },
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(_ON_TABLES))
def test_an_operation_on_a_table_keeps_to_the_tenants_of_the_operator(
    browser: Browser, world: dict[str, Session], name: str
) -> None:
    alias = browser.database.alias
    _streams(browser.database)
    before, own = _dump(alias, OTHER), _dump(alias, OWN)
    (url,) = _table_operations(name)
    with limited():
        for tenant in (OTHER, OWN):
            given = {"confirmed": "yes", **_ON_TABLES[name](tenant)}
            browser.client.post(url, given)
    assert _dump(alias, OTHER) == before
    assert _dump(alias, OWN) != own


def _table_operations(*names: str) -> list[str]:
    return [
        address_of(model, view, operation.name)
        for (view, model), kind in KINDS.items()
        if kind is ACTS_ON_MANY and model is not None
        for operation in getattr(admin.site.get_model_admin(model), "table_operations", ())
        if operation.name in names or not names
    ]


def test_all_operations_on_tables_are_tried() -> None:
    assert len(_table_operations(*_ON_TABLES)) == len(_table_operations()) == len(_ON_TABLES)


def test_a_budget_of_another_tenant_is_refused_without_saying_whether_it_exists(
    browser: Browser, world: dict[str, Session]
) -> None:
    (url,) = _table_operations("add-budget")
    known = Budget.objects.using(browser.database.alias).filter(tenant=OTHER)[0].name
    said = set()
    with limited():
        for name in (known, "unheard-of"):
            response = browser.client.post(url, {**_ON_TABLES["add-budget"](OTHER), "name": name})
            assert "You may not act on this tenant." in response.content.decode()
            said.add(_without_tokens(response.content.decode()).replace(name, "NAME"))
    assert len(said) == 1


@pytest.mark.thorough
def test_an_operation_on_a_table_that_knows_no_tenants_is_refused(
    browser: Browser, world: dict[str, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    from helix_store.actions.upkeep import CleanUp

    monkeypatch.setattr(CleanUp, "is_of_tenants", False)
    (url,) = _table_operations("clean-up")
    assert url in browser.list_of(Session).html
    with limited():
        assert url not in browser.list_of(Session).html
        assert browser.client.post(url, {"confirmed": "yes"}).status_code == 403


@pytest.mark.thorough
def test_actions_of_lists_do_not_reach_rows_of_another_tenant(
    browser: Browser, world: dict[str, Session]
) -> None:
    alias = browser.database.alias
    before = _dump(alias, OTHER)
    request = RequestFactory().get("/")
    request.user = browser.sign_in(superuser=True)
    tried = 0
    for model in PAGES:
        page = admin.site.get_model_admin(model)
        keys = [str(each.pk) for each in Scope(alias, (OTHER,)).rows(model)]
        urls = [address_of(model, "changelist")]
        urls += [address_of(model, name) for name in getattr(page, "side_lists", ())]
        for action in page.get_actions(request):
            for url in urls:
                for across in ("0", "1"):
                    given: dict[str, Any] = {
                        "action": action,
                        "confirmed": "yes",
                        "index": "0",
                        "reason": "",
                        "select_across": across,
                        "_selected_action": keys,
                        "keys": " ".join(keys),
                    }
                    with limited():
                        response = browser.client.post(url, given, follow=True)
                    content = b"".join(response) if response.streaming else response.content
                    response.close()
                    assert OTHER not in content.decode(), (url, action)
                    tried += 1
    assert tried > 8
    assert _dump(alias, OTHER) == before


# --- The function -----------------------------------------------------------------------------------


def _request() -> HttpRequest:
    return RequestFactory().get("/")


def _fails(request: HttpRequest) -> None:
    raise LookupError("the directory of operators is down")


@for_each(
    "given, expected",
    [
        (None, None),
        (lambda request: None, None),
        (lambda request: ["b", "a", "a"], ("a", "b")),
        (lambda request: {"", "a"}, ("", "a")),
        (lambda request: [], ()),
        (f"{__name__}.tenants_of_operator", (OWN,)),
        (_fails, ()),
    ],
)
def test_the_function_says_which_tenants_an_operator_sees(given: Any, expected: Any) -> None:
    with limited(given):
        assert permitted_tenants(_request()) == expected


@for_each(
    "given",
    [
        lambda request: "acme",
        lambda request: b"acme",
        lambda request: True,
        lambda request: ("a" for _ in range(1)),
        lambda request: [1],
        lambda request: [None],
        lambda request: ["a\x00"],
        "nowhere.at_all",
        f"{__name__}.OWN",
        7,
    ],
)
def test_a_wrong_answer_of_the_function_is_an_error(given: Any) -> None:
    with limited(given), pytest.raises(ImproperlyConfigured, match="ADMIN_TENANTS"):
        permitted_tenants(_request())


def test_the_function_is_asked_once_for_each_page(browser: Browser, world: dict[str, Session]) -> None:
    asked = []

    def function(request: HttpRequest) -> list[str]:
        asked.append(request)
        return [OWN]

    with limited(function):
        assert browser.list_of(Session).status == 200
    assert len(asked) == 1


@pytest.mark.thorough
@for_each("function", [lambda request: [], _fails])
def test_without_tenants_an_operator_sees_nothing(
    browser: Browser, world: dict[str, Session], function: Any
) -> None:
    with limited(function):
        for url, query in _many():
            page = browser.open(url, **query)
            shown = page.html.replace(str(query), "")
            assert f"{OTHER}-" not in shown, (url, query)
            assert f"{OWN}-" not in shown, (url, query)
        assert browser.page_of(world[OWN]).status == 404
    with limited():
        assert f"{OWN}-" in browser.list_of(Session).html


@pytest.mark.thorough
def test_an_operator_of_several_tenants_sees_these(browser: Browser, world: dict[str, Session]) -> None:
    _fill(browser.database, "third", "2.50")
    with limited(lambda request: [OWN, "third"]):
        page = browser.list_of(Session)
        assert f"{OWN}-all" in page.html
        assert "third-all" in page.html
        assert OTHER not in page.html
        start = browser.open(reverse("admin:app_list", args=["helix_store"]))
        assert "$3.75" in start.text
        assert OTHER not in start.html
        assert "$3.75" in browser.open(reverse("admin:helix_store_usageentry_report")).text


def test_a_model_without_a_tenant_has_no_rows_in_a_limited_scope(browser: Browser) -> None:
    from django.contrib.auth.models import User

    assert Scope(browser.database.alias).of(User.objects.all()).exists()
    assert not Scope(browser.database.alias, (OWN,)).of(User.objects.all()).exists()


def test_the_resolver_of_the_project_has_the_admin_that_is_walked() -> None:
    assert any(getattr(each, "namespace", "") == "admin" for each in get_resolver().url_patterns)
