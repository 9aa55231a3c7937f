"""``BUILD``: the version of the project's code that is stored with each run."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connections
from django.test import override_settings
from django.urls import reverse

from helix_store import InMemoryStore, Store
from helix_store.models import Run
from tests.admin.conftest import Browser, browser_on
from tests.cells import for_each
from tests.databases import CommittedDatabase, fresh_tenant


def _built(build: Any) -> Any:
    return override_settings(HELIX_STORE={"BUILD": build})


def _fail(store: Any, build: str, session_id: str) -> None:
    store.new_session(session_id, agent_type="a", title=session_id)
    with _built(build), pytest.raises(LookupError), store.session(session_id).turn():
        raise LookupError("no model")


def _builds(store: Any, session_id: str) -> list[str | None]:
    return [run.build for run in store.sessions.list_runs(session_id)]


@pytest.fixture(params=["database", "memory"])
def store(request: pytest.FixtureRequest, committed_db: CommittedDatabase) -> Any:
    if request.param == "memory":
        return InMemoryStore()
    return Store(committed_db.alias, tenant=committed_db.tenant)


def test_a_run_keeps_the_build_that_started_it(store: Any) -> None:
    store.new_session("s", agent_type="a")
    for build in ("2026.11.1", "a1b2c3", None):
        with _built(build), store.session("s").turn(rest=False) as turn, turn.step() as step:
            step.end_turn()
    assert _builds(store, "s") == [None, "a1b2c3", "2026.11.1"]
    assert store.sessions.list_runs("s")[1].to_dict()["build"] == "a1b2c3"


@for_each("is_fast", [True, False])
def test_both_forms_of_the_statement_store_the_build(committed_db: CommittedDatabase, is_fast: bool) -> None:
    store = Store(committed_db.alias, tenant=fresh_tenant())
    store.new_session("s", agent_type="a")
    with override_settings(HELIX_STORE={"BUILD": "b1", "FAST_PATHS": is_fast}):
        run = store.sessions.start_run("s")
        assert run.build == "b1"
    with override_settings(HELIX_STORE={"BUILD": "b2", "FAST_PATHS": is_fast}):
        ended = store.sessions.update_run("s", run.run_id, status="interrupted")
        assert ended.build == "b1"


def test_a_run_that_continues_has_the_build_that_continues_it(store: Any) -> None:
    store.new_session("s", agent_type="a")
    with _built("old"):
        run = store.sessions.start_run("s")
        store.sessions.update_run("s", run.run_id, status="suspended_client_tool")
    with _built("new"):
        assert store.sessions.update_run("s", run.run_id, status="running").build == "new"
    assert _builds(store, "s") == ["new"]


@for_each("build", ["", 7, "x" * 65, "a\nb"])
def test_a_wrong_build_is_an_error(build: Any) -> None:
    store = InMemoryStore()
    store.new_session("s", agent_type="a")
    with _built(build), pytest.raises(ImproperlyConfigured, match="BUILD"):
        store.sessions.start_run("s")


def test_an_export_keeps_the_build(committed_db: CommittedDatabase, tmp_path: Any) -> None:
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    _fail(store, "a1b2c3", "s")
    file = tmp_path / "sessions.jsonl"
    given = {"database": committed_db.alias, "stdout": StringIO(), "stderr": StringIO()}
    call_command("helix_export", output=str(file), tenant=committed_db.tenant, **given)
    assert '"build":"a1b2c3"' in file.read_text().replace(" ", "")
    store.sessions.delete_session("s")
    call_command("helix_import", str(file), **given)
    assert _builds(store, "s") == ["a1b2c3"]


def test_a_worker_of_the_version_before_goes_on(committed_db: CommittedDatabase) -> None:
    """It inserts runs without the column."""
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    store.new_session("s", agent_type="a")
    store.sessions.start_run("s", "run-1")
    rows = Run.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    rows.update(build="b1")
    columns = ", ".join(
        str(field.column) for field in Run._meta.concrete_fields if field.column not in ("id", "build")
    )
    copied = columns.replace("run_id", "'run-2'").replace("turn", "2").replace("status", "'completed'")
    table = Run._meta.db_table
    key = rows.get().pk
    with connections[committed_db.alias].cursor() as cursor:
        cursor.execute(f"INSERT INTO {table} ({columns}) SELECT {copied} FROM {table} WHERE id = %s", [key])
    assert _builds(store, "s") == [None, "b1"]


# --- The admin --------------------------------------------------------------------------------------


@pytest.fixture
def browser(empty_db: CommittedDatabase) -> Any:
    with browser_on(empty_db) as browser:
        browser.sign_in(superuser=True)
        store = Store(empty_db.alias, tenant=empty_db.tenant)
        for number in range(3):
            _fail(store, "good", f"good-{number}") if number == 0 else _fail(store, "bad", f"bad-{number}")
        yield browser


def test_the_start_page_says_which_build_broke_it_and_links_to_its_failures(browser: Browser) -> None:
    page = browser.open(reverse("admin:app_list", args=["helix_store"]))
    assert "in build bad (2), good (1)" in page.text
    (link,) = {
        attributes["href"]
        for tag, attributes in page.elements.started
        if tag == "a" and "build=bad" in (attributes.get("href") or "")
    }
    assert link is not None
    runs = browser.open(link.replace("&amp;", "&"))
    assert runs.row_count == 2
    assert "bad-1" in runs.text
    assert "good-0" not in runs.text


def test_the_runs_are_filtered_by_build(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    from helix_store.admin import filters, records

    page = browser.list_of(Run)
    assert page.row_count == 3
    assert "?build=bad" in page.html
    assert browser.list_of(Run, build="good").row_count == 1
    assert browser.list_of(Run, build="unheard-of").row_count == 0
    for module in (filters, records):
        monkeypatch.setattr(module, "NEWEST_SEARCHED", 1)
    cut = browser.list_of(Run, build="good")
    assert cut.row_count == 0
    assert "Filtered among the newest 1 runs." in cut.text


def test_a_run_and_the_timeline_show_the_build(browser: Browser) -> None:
    run = Run.objects.using(browser.database.alias).select_related("session").filter(build="good").get()
    assert "good" in browser.page_of(run).text
    assert "build good" in browser.page_of(run.session, section="timeline").text
