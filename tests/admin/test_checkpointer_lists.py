"""The lists of graph sessions and of snapshots: the newest checkpoint of each, in a few statements."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import Permission
from django.urls import reverse

from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.models import Checkpoint, Session
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of
from tests.cells import for_each

HOSTILE = "<script>alert('list')</script>"


def _graphs(browser: Browser) -> GraphCheckpointStore:
    return GraphCheckpointStore(browser.database.alias, tenant=browser.database.tenant)


def _snapshots(browser: Browser) -> SnapshotCheckpointer:
    return SnapshotCheckpointer(browser.database.alias, tenant=browser.database.tenant)


def _list(browser: Browser, name: str, **query: str) -> Page:
    return browser.open(reverse(f"admin:helix_store_session_{name}"), **query)


def _write_graph(browser: Browser, name: str) -> None:
    graphs = _graphs(browser)
    graphs.create_session(f"/home/{name}", session_id=name, title=f"Graph {name}", workspace_id="blue")
    graphs.add_message(name, role="user", content="hello")
    graphs.save_checkpoint(name, step=1, node_id="plan", pending_nodes=["book"])
    graphs.save_checkpoint(name, step=2, node_id="book", pending_nodes=[])


def test_a_graph_session_is_shown_with_its_place_and_its_newest_node(browser: Browser) -> None:
    _write_graph(browser, "trip")
    store_of(browser.database).create_session("other", agent_type="planner", title="No graph")
    page = _list(browser, "graphs")
    assert page.row_count == 1
    assert "Graph trip trip" in page.text
    assert "blue /home/trip book version 2, show all 1" in page.text
    assert "No graph" not in page.text


def test_a_thread_of_snapshots_is_shown_with_its_newest_snapshot_and_the_claim(browser: Browser) -> None:
    snapshots = _snapshots(browser)
    older, newest = {}, {}
    for thread in ("untouched", "claimed", "done"):
        older[thread] = snapshots.put(thread, {"version": 1, "n": 1})
        newest[thread] = snapshots.put(thread, {"version": 1, "n": 2})
    snapshots.claim("claimed", owner="worker-7", ttl_ms=600_000)
    claim = snapshots.claim("done", owner="worker-8", ttl_ms=600_000)
    assert claim is not None
    claim.done()
    page = _list(browser, "snapshots")
    assert page.row_count == 3
    rows = page.html.partition('id="result_list"')[2].split("<tr>")
    (untouched,) = [row for row in rows if newest["untouched"] in row]
    assert not any(checkpoint_id in page.html for checkpoint_id in older.values())
    assert ">free<" in untouched
    assert "held worker-7 ends in 9 minutes" in page.text
    assert re.search(r"resumed worker-8 \d+ seconds? ago", page.text)


def test_an_expired_claim_is_shown_as_expired(browser: Browser) -> None:
    snapshots = _snapshots(browser)
    snapshots.put("thread", {"version": 1})
    snapshots.claim("thread", owner="worker-7", ttl_ms=600_000)
    Checkpoint.objects.using(browser.database.alias).update(claim_expires_at="2026-01-01T00:00Z")
    assert "expired worker-7 ended" in _list(browser, "snapshots").text


@pytest.mark.thorough
def test_the_lists_take_as_many_queries_for_many_sessions(browser: Browser) -> None:
    for name in ("graphs", "snapshots"):
        _write_graph(browser, f"{name}-first")
        _snapshots(browser).put(f"{name}-thread", {"version": 1})
        _list(browser, name)
        one = _list(browser, name)
        for number in range(9):
            _write_graph(browser, f"{name}-{number}")
            _snapshots(browser).put(f"{name}-thread-{number}", {"version": 1})
        ten = _list(browser, name)
        assert ten.row_count >= 10
        assert len(ten.statements) == len(one.statements)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["graphs", "snapshots"])
def test_each_link_of_a_list_leads_to_a_page(browser: Browser, name: str) -> None:
    _write_graph(browser, "trip")
    _snapshots(browser).put("thread", {"version": 1})
    page = _list(browser, name)
    addresses = {
        attributes["href"] or ""
        for tag, attributes in page.elements.started
        if tag == "a" and "/helix_store/" in (attributes.get("href") or "")
    }
    assert any("/checkpoint/?session__id__exact=" in address for address in addresses)
    assert any("/session/" in address and "/change/" in address for address in addresses)
    for address in addresses:
        assert browser.open(address).status == 200, address


def test_the_list_of_sessions_leads_to_both(browser: Browser) -> None:
    page = browser.list_of(Session)
    for name, heading in (("graphs", "Graph sessions"), ("snapshots", "Snapshots")):
        address = reverse(f"admin:helix_store_session_{name}")
        assert f'<a href="{address}">{heading}</a>' in page.html
        assert heading in _list(browser, name).text


def test_without_the_permission_to_view_checkpoints_a_list_shows_none(visitor: Browser) -> None:
    _write_graph(visitor, "trip")
    snapshot_id = _snapshots(visitor).put("thread", {"version": 1})
    permissions = Permission.objects.filter(content_type__app_label="helix_store")
    visitor.sign_in(permissions.get(codename="view_checkpoint"))
    for name in ("graphs", "snapshots"):
        assert _list(visitor, name).status == 403
    visitor.sign_in(permissions.get(codename="view_session"))
    graphs, snapshots = _list(visitor, "graphs"), _list(visitor, "snapshots")
    assert "Graph trip" in graphs.text
    assert "version 2" not in graphs.text
    assert snapshot_id not in snapshots.html
    for page in (graphs, snapshots):
        assert "/checkpoint/" not in page.html


@for_each("lookup", ["title__contains", "tracing_context__contains", "status__exact"])
def test_a_list_refuses_lookups_that_are_not_its_own(browser: Browser, lookup: str) -> None:
    for name in ("graphs", "snapshots"):
        assert _list(browser, name, **{lookup: "a"}).status == 400


def test_the_search_of_a_list_keeps_to_its_sessions(browser: Browser) -> None:
    _write_graph(browser, "trip")
    store_of(browser.database).create_session("trip-of-another-kind", agent_type="planner")
    page = _list(browser, "graphs", q="trip")
    assert page.row_count == 1
    assert "another-kind" not in page.text


def test_texts_are_inert_in_the_lists(browser: Browser) -> None:
    graphs = _graphs(browser)
    graphs.create_session(HOSTILE, session_id=HOSTILE, title=HOSTILE, workspace_id=HOSTILE)
    graphs.save_checkpoint(HOSTILE, step=1, node_id=HOSTILE, pending_nodes=[])
    _snapshots(browser).put(HOSTILE + "2", {"version": 1})
    _snapshots(browser).claim(HOSTILE + "2", owner=HOSTILE, ttl_ms=60_000)
    assert _list(browser, "graphs").text.count(HOSTILE) >= 4
    assert _list(browser, "snapshots").text.count(HOSTILE) >= 1
    for name in ("graphs", "snapshots"):
        assert "<script>alert" not in _list(browser, name).html


def test_the_page_of_a_snapshot_shows_its_claim_and_that_of_a_step_has_none(browser: Browser) -> None:
    _write_graph(browser, "trip")
    snapshots = _snapshots(browser)
    snapshot_id = snapshots.put("thread", {"version": 3})
    snapshots.claim("thread", owner="worker-7", ttl_ms=600_000)
    rows = Checkpoint.objects.using(browser.database.alias)
    shown = browser.page_of(rows.get(checkpoint_id=snapshot_id)).text
    assert "held worker-7" in shown
    assert "Claim" not in browser.page_of(rows.filter(kind="graph").latest("pk")).text
