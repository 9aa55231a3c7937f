"""Actions of lists: each asks first, needs its permission, and does what the store does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.contrib.admin import site
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db.models import Model
from django.urls import reverse

from helix_store.admin import operating
from helix_store.admin.operating import OperatedAdmin
from helix_store.catalogue import registered_tables, tables
from helix_store.models import Lock, Session, Stream
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.admin.conftest import Browser
from tests.admin.rows import store_of, write_session
from tests.cells import Cells


def _post(browser: Browser, model: type[Model], action: str, rows: list[Any], **fields: str) -> Any:
    address = reverse(f"admin:helix_store_{model._meta.model_name}_changelist")
    return browser.client.post(
        address, {"action": action, "_selected_action": [row.pk for row in rows], **fields}
    )


def _confirm(browser: Browser, model: type[Model], action: str, rows: list[Any], **fields: str) -> Any:
    """Send the form of the page that asks."""
    asked = _post(browser, model, action, rows)
    assert asked.status_code == 200
    html = asked.content.decode()
    assert 'name="confirmed"' in html
    hidden = dict(re.findall(r'<input type="hidden" name="(expected-\d+)" value="([^"]*)">', html))
    return _post(browser, model, action, rows, confirmed="yes", **hidden, **fields)


def _sessions(browser: Browser, *names: str) -> list[Session]:
    for name in names:
        store_of(browser.database).create_session(name, agent_type="a")
    rows = Session.objects.using(browser.database.alias)
    return [rows.get(session_id=name) for name in names]


def test_a_question_names_the_sessions_as_people_do(browser: Browser) -> None:
    state = store_of(browser.database).create_session("s", agent_type="a", title="The trip <b>")
    row = Session.objects.using(browser.database.alias).get(session_id=state.session_id)
    for page in (
        _post(browser, Session, "delete_session", [row]),
        browser.client.get(reverse("admin:helix_store_session_operation", args=[row.pk, "delete-session"])),
    ):
        assert 'The trip &lt;b&gt; <code class="helix-id">s</code>' in page.content.decode()


def test_the_labels_of_an_operation_end_without_a_colon(sqlite_browser: Browser) -> None:
    rows = _sessions(sqlite_browser, "one")
    of_one = reverse("admin:helix_store_session_operation", args=[rows[0].pk, "interrupt"])
    pages = {
        "of one row": sqlite_browser.client.get(of_one),
        "of selected rows": _post(sqlite_browser, Session, "interrupt", rows),
        "of all rows": _post(sqlite_browser, Session, "interrupt", rows, select_across="1", index="0"),
    }
    with Cells() as cells:
        for name, page in pages.items():
            with cells.check(name):
                labels = re.findall(r"<label[^>]*>\s*(.*?)\s*</label>", page.content.decode(), re.DOTALL)
                assert labels
                assert not [label for label in labels if label.endswith(":")]


def test_sessions_are_interrupted_after_a_question(browser: Browser) -> None:
    rows = _sessions(browser, "one", "two", "other")
    store = store_of(browser.database)
    assert _post(browser, Session, "interrupt", rows[:2]).status_code == 200
    assert store.check_interrupt("one") is None
    _confirm(browser, Session, "interrupt", rows[:2], reason="Maintenance")
    found = store.check_interrupt("one")
    assert found is not None
    assert found.reason == "Maintenance"
    assert store.check_interrupt("two") is not None
    assert store.check_interrupt("other") is None


def test_sessions_are_marked_as_failed_with_a_reason(browser: Browser) -> None:
    rows = _sessions(browser, "one", "other")
    _confirm(browser, Session, "mark_failed", rows[:1], reason="Given up")
    for row in rows:
        row.refresh_from_db()
    assert [(row.status, row.failure_reason) for row in rows] == [("failed", "Given up"), ("active", None)]


def test_sessions_are_deleted_after_a_question(browser: Browser) -> None:
    rows = _sessions(browser, "one", "other")
    _confirm(browser, Session, "delete_session", rows[:1])
    assert list(Session.objects.using(browser.database.alias).values_list("session_id", flat=True)) == [
        "other"
    ]


@pytest.mark.thorough
def test_a_selection_that_is_gone_or_never_was_does_nothing(browser: Browser) -> None:
    """For every action of every list, asked for and confirmed, none ends in an error of the server."""
    (row,) = _sessions(browser, "one")
    store_of(browser.database).delete_session("one")
    outcomes = {}
    for model, admin in site._registry.items():
        if not isinstance(admin, OperatedAdmin):
            continue
        for action in admin.get_actions(_request_of(browser)):
            address = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
            for key in (
                str(row.pk),
                "0",
                "x",
                "",
                "-1",
                "1.5",
                str(10**18),
                str(10**30),
                "9" * 5_000,
                "\x00",
            ):
                for fields in ({}, {"confirmed": "yes"}):
                    response = browser.client.post(
                        address, {"action": action, "_selected_action": [key], **fields}, follow=True
                    )
                    words = response.content.decode()
                    outcomes[model.__name__, action, key[:30], *fields] = (
                        response.status_code,
                        "Nothing was done" in words,
                    )
    assert len(outcomes) > 100
    assert {place: outcome for place, outcome in outcomes.items() if outcome != (200, True)} == {}


def _request_of(browser: Browser) -> Any:
    request = browser.client.get(reverse("admin:helix_store_session_changelist")).wsgi_request
    request.user = get_user_model()._base_manager.get(pk=browser.client.session["_auth_user_id"])
    return request


def test_the_export_of_sessions_is_a_file_of_json_lines(browser: Browser) -> None:
    exported = write_session(browser.database, "hello", session_id="wanted")
    write_session(browser.database, "other", session_id="unwanted")
    response = _confirm(browser, Session, "export_sessions", [exported])
    assert "attachment" in response["Content-Disposition"]
    lines = [json.loads(line) for line in b"".join(response.streaming_content).splitlines()]
    assert lines[0]["record"] == "header"
    assert lines[-1]["record"] == "trailer"
    assert lines[-1]["failed"] == 0
    assert "wanted" in json.dumps(lines)
    assert "unwanted" not in json.dumps(lines)
    logged = LogEntry.objects.using(browser.database.alias).get(change_message="Exported.")
    assert logged.object_id == str(exported.pk)
    logged.delete()


def test_an_export_is_of_one_tenant(browser: Browser) -> None:
    (mine,) = _sessions(browser, "same")
    DatabaseStateStore(browser.database.alias, tenant="acme").create_session("same", agent_type="a")
    theirs = Session.objects.using(browser.database.alias).get(tenant="acme")
    response = _post(browser, Session, "export_sessions", [mine, theirs], confirmed="yes")
    assert response.status_code == 302
    assert "select sessions of one tenant" in browser.list_of(Session).text
    alone = _confirm(browser, Session, "export_sessions", [mine])
    assert b'"acme"' not in b"".join(alone.streaming_content)


def test_an_export_needs_the_permission_to_view_all_that_it_contains(visitor: Browser) -> None:
    rows = _sessions(visitor, "one")
    permissions = Permission.objects.all()
    names = [f"view_{table.model._meta.model_name}" for table in tables()]
    for missing in ("view_message", "change_session", None):
        given = {*names, "change_session"} - {missing}
        visitor.sign_in(*permissions.filter(codename__in=given))
        offered = 'value="export_sessions"' in visitor.list_of(Session).html
        assert offered is (missing is None)
        response = _post(visitor, Session, "export_sessions", rows, confirmed="yes")
        assert ("Content-Disposition" in response) is (missing is None)
        response.close()


def test_an_export_needs_the_permission_to_view_the_rows_of_other_apps_too(visitor: Browser) -> None:
    rows = _sessions(visitor, "one")
    own = Permission.objects.filter(
        content_type__app_label="helix_store", codename__regex="^view_|^change_session"
    )
    other = next(table.model._meta for table in registered_tables())
    theirs = Permission.objects.filter(codename__startswith="view_").exclude(
        content_type__app_label="helix_store"
    )
    for missing in (other.model_name, None):
        given = theirs.exclude(content_type__app_label=other.app_label, content_type__model=missing)
        visitor.sign_in(*own, *given)
        response = _post(visitor, Session, "export_sessions", rows, confirmed="yes")
        assert ("Content-Disposition" in response) is (missing is None)
        response.close()


def test_a_user_who_may_only_view_has_no_actions_and_no_buttons(visitor: Browser) -> None:
    rows = _sessions(visitor, "one")
    permissions = Permission.objects.filter(content_type__app_label="helix_store")
    visitor.sign_in(*permissions.filter(codename__startswith="view_"))
    for model in (Session, Lock, Stream):
        page = visitor.list_of(model)
        assert 'name="action"' not in page.html
        assert "/operation/" not in page.html
    for action in ("interrupt", "mark_failed", "delete_session"):
        _post(visitor, Session, action, rows, confirmed="yes")
    rows[0].refresh_from_db()
    assert rows[0].status == "active"
    assert store_of(visitor.database).check_interrupt("one") is None


def test_a_lock_is_released_from_the_list_after_a_question(browser: Browser) -> None:
    locks = DatabaseLockManager(browser.database.alias, tenant=browser.database.tenant)
    assert locks.acquire("job") is not None
    row = Lock.objects.using(browser.database.alias).get(name="job")
    _confirm(browser, Lock, "force_release", [row])
    assert not locks.is_locked("job")


def test_a_lock_of_a_session_leads_to_the_session(browser: Browser) -> None:
    (session,) = _sessions(browser, "guarded")
    locks = DatabaseLockManager(browser.database.alias, tenant=browser.database.tenant)
    locks.acquire("guarded")
    locks.acquire("nightly")
    page = browser.list_of(Lock)
    links = [a.get("href") for tag, a in page.elements.started if tag == "a"]
    assert links.count(f"/admin/helix_store/session/{session.pk}/change/") == 1
    assert browser.list_of(Lock, state="held").row_count == 2
    assert browser.list_of(Lock, state="free").row_count == 0


def test_the_list_of_streams_leads_to_their_pruning(browser: Browser) -> None:
    write_session(browser.database, session_id="s")
    page = browser.list_of(Stream)
    assert "Prune streams" in page.text
    assert "failed" in page.text
    assert (
        browser.open(reverse("admin:helix_store_stream_table_operation", args=["prune-streams"])).status
        == 200
    )


# --- All rows that match the filter


def _many(browser: Browser, count: int, *, agent_type: str) -> None:
    store = store_of(browser.database)
    for number in range(count):
        store.create_session(f"{agent_type}-{number}", agent_type=agent_type)


def _hidden(html: str) -> dict[str, str]:
    form = html.partition('<div class="helix-confirm">')[2]
    return dict(re.findall(r'<input type="hidden" name="([a-z_]+)" value="([^"]*)"', form))


def _on_all(browser: Browser, action: str, *, agent_type: str) -> tuple[str, Any]:
    """Ask for an action on all sessions of a type, and return the address and the page that asks."""
    address = reverse("admin:helix_store_session_changelist") + f"?agent_type={agent_type}"
    key = Session.objects.using(browser.database.alias).filter(agent_type=agent_type).values("pk")[0]["pk"]
    given = {"action": action, "select_across": "1", "index": "0", "_selected_action": str(key)}
    return address, browser.client.post(address, given)


def test_an_action_applies_to_all_rows_that_match_the_filter(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operating, "_ROWS_AT_ONCE", 4)
    _many(browser, 10, agent_type="old")
    _many(browser, 2, agent_type="new")
    address, page = _on_all(browser, "mark_failed", agent_type="old")
    html = page.content.decode()
    assert "This applies to all 10 rows that match the filter." in html
    assert "continue.js" not in html
    logged = LogEntry.objects.count()
    said = []
    given = {**_hidden(html), "reason": "Too old"}
    while (page := browser.client.post(address, given)).status_code == 200:
        html = page.content.decode()
        said += re.findall(r"(\d+ of \d+: \d+ done)", html)
        assert '<progress value="' in html
        assert 'src="/static/helix_store/continue.js"' in html
        given = _hidden(html)
    assert said == ["4 of 10: 4 done", "8 of 10: 8 done"]
    rows = Session.objects.using(browser.database.alias)
    assert rows.filter(status="failed", failure_reason="Too old").count() == 10
    assert rows.filter(agent_type="new", status="active").count() == 2
    assert LogEntry.objects.count() - logged == 10
    assert "10 done" in browser.open(address).text


def test_rows_that_no_longer_match_are_left_alone(browser: Browser) -> None:
    _many(browser, 3, agent_type="old")
    address, page = _on_all(browser, "mark_failed", agent_type="old")
    rows = Session.objects.using(browser.database.alias)
    rows.filter(session_id="old-1").update(agent_type="kept")
    browser.client.post(address, {**_hidden(page.content.decode()), "reason": "Too old"})
    assert rows.filter(status="failed").count() == 2
    text = browser.open(address).text
    assert "2 done" in text
    assert "1 were refused, or no longer match." in text


def test_an_action_on_all_rows_asks_first_and_keeps_its_permission(browser: Browser) -> None:
    _many(browser, 2, agent_type="old")
    for action in ("interrupt", "mark_failed", "delete_session"):
        _address, page = _on_all(browser, action, agent_type="old")
        assert "This applies to all 2 rows" in page.content.decode()
    rows = Session.objects.using(browser.database.alias)
    assert rows.filter(status="active").count() == 2
    browser.sign_in(*Permission.objects.filter(codename__in=["view_session", "delete_session"]))
    address, page = _on_all(browser, "delete_session", agent_type="old")
    given = {**_hidden(page.content.decode()), "action": "mark_failed"}
    browser.client.post(address, given)
    assert rows.filter(status="active").count() == 2


@pytest.mark.parametrize("keys", ["", "x", "1 2 x", "9" * 30, "-1"])
def test_keys_that_no_page_has_given_do_nothing(sqlite_browser: Browser, keys: str) -> None:
    _many(sqlite_browser, 2, agent_type="old")
    address, page = _on_all(sqlite_browser, "mark_failed", agent_type="old")
    given = {**_hidden(page.content.decode()), "keys": keys, "total": "x", "done": "-1"}
    assert sqlite_browser.client.post(address, given).status_code in (200, 302)
    assert Session.objects.using(sqlite_browser.database.alias).filter(status="active").count() == 2
