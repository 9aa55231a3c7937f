"""Security advisories of agent stores, and of what they are built on. Each docstring names one."""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any

import pytest
from django.template import Context, Template
from django.utils.html import format_html

from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.core import typed_json
from helix_store.core.patches import apply_patches
from helix_store.exceptions import IntegrityFault, InvalidQuery, PatchError
from helix_store.items import ItemLog
from helix_store.models import Message, Session
from helix_store.stores import DatabaseStateStore
from helix_store.testing.state_store.samples import loaded, message
from tests.admin.conftest import Elements, browser_on
from tests.databases import CommittedDatabase, fresh_tenant
from tests.museum.naive import (
    Detonation,
    NaiveRows,
    envelope,
    ext_loaded,
    loaded_with_fallback,
    patched_by_attributes,
    pickled_or_json,
    revived,
)


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)


def stored_state(store: DatabaseStateStore, value: Any) -> Any:
    """A value after a round trip through the custom state."""
    store.create_session("s", agent_type="agent", custom_state={"value": value})
    return loaded(store, "s").custom_state["value"]


def test_cve_2025_64439_a_value_that_cannot_be_encoded_strictly_never_becomes_an_object(
    store: DatabaseStateStore, detonations: type[Detonation]
) -> None:
    """CVE-2025-64439, GHSA-wwqv-p2pp-99h5"""
    assert isinstance(loaded_with_fallback(envelope()), Detonation)
    assert detonations.count == 1

    assert stored_state(store, envelope()) == envelope()
    assert detonations.count == 1


def test_cve_2026_28277_a_stored_type_cannot_name_a_function_to_call(
    store: DatabaseStateStore, detonations: type[Detonation]
) -> None:
    """CVE-2026-28277, langgraph#8522"""
    extension = {"$ext": [Detonation.__module__, Detonation.__name__, []]}
    ext_loaded(extension)
    assert detonations.count == 1

    with pytest.raises(IntegrityFault):
        typed_json.loads(json.dumps(extension))
    assert stored_state(store, extension) == extension
    assert detonations.count == 1


def test_cve_2026_27794_a_row_with_a_pickle_is_a_fault_and_is_never_loaded(
    store: DatabaseStateStore, committed_db: CommittedDatabase, detonations: type[Detonation]
) -> None:
    """CVE-2026-27794"""
    pickled = base64.b64encode(pickle.dumps(Detonation())).decode()
    detonations.count = 0
    pickled_or_json(pickled)
    assert detonations.count == 1

    store.create_session("s", agent_type="agent")
    store.append_messages("s", [message("hello")])
    rows = Message.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    assert rows.update(payload=pickled) == 1
    with pytest.raises(IntegrityFault):
        store.get_messages("s")
    assert detonations.count == 1


def test_cve_2025_67644_the_name_of_a_field_never_becomes_sql(
    naive: NaiveRows, store: DatabaseStateStore, committed_db: CommittedDatabase
) -> None:
    """CVE-2025-67644, CVE-2026-27022"""
    hostile = "name = name OR name"
    for tenant in ("ours", "theirs"):
        naive.save_of_tenant(tenant, "plan", f"of {tenant}")
    assert naive.search("ours", hostile, "plan") == ["of ours", "of theirs"]

    store.create_session("s", agent_type="agent", metadata={"name": "plan"})
    assert store.list_sessions(metadata={hostile: "plan"}).sessions == []
    assert len(store.list_sessions(metadata={"name": "plan"}).sessions) == 1
    with pytest.raises(InvalidQuery):
        store.list_sessions(order_by=hostile)


def test_cve_2025_68664_a_dict_of_a_user_cannot_read_a_secret(
    store: DatabaseStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CVE-2025-68664"""
    monkeypatch.setenv("MUSEUM_KEY", "secret")
    given = {"lc": 1, "type": "secret", "id": ["MUSEUM_KEY"]}
    assert revived(given) == "secret"

    assert stored_state(store, given) == given


def test_langgraphjs_2346_an_envelope_stays_data_wherever_it_is_stored(
    store: DatabaseStateStore, committed_db: CommittedDatabase, detonations: type[Detonation]
) -> None:
    """langgraphjs#2346"""
    assert isinstance(revived(envelope()), Detonation)

    place: dict[str, Any] = {"using": committed_db.alias, "tenant": committed_db.tenant}
    assert stored_state(store, envelope()) == envelope()
    store.append_messages("s", [message(envelope())])
    assert [each["content"] for each in store.iter_messages("s")] == [envelope()]
    snapshots, log = SnapshotCheckpointer(**place), ItemLog("log", **place)
    snapshots.put("thread", {"version": 1, "value": envelope()})
    assert snapshots.get("thread") == {"version": 1, "value": envelope()}
    log.append([envelope()])
    assert [item.payload for item in log.tail()] == [envelope()]
    assert detonations.count == 1


def test_cve_2025_64459_names_of_arguments_from_a_user_cannot_change_a_query(
    store: DatabaseStateStore, committed_db: CommittedDatabase
) -> None:
    """CVE-2025-64459, CVE-2025-57833, CVE-2024-42005"""
    theirs = DatabaseStateStore(committed_db.alias, tenant=fresh_tenant())
    theirs.create_session("theirs", agent_type="agent")
    asked: dict[str, Any] = {"tenant": theirs.tenant}
    found = Session.objects.using(committed_db.alias).filter(**{"tenant": committed_db.tenant, **asked})
    assert [session.session_id for session in found] == ["theirs"]

    for name, value in (*asked.items(), ("_connector", "OR"), ("tenant__regex", ".*")):
        with pytest.raises(TypeError):
            store.list_sessions(**{name: value})
        assert store.list_sessions(metadata={name: value}).sessions == []


def test_cve_2026_15920_the_admin_never_turns_a_stored_text_into_a_link(
    committed_db: CommittedDatabase,
) -> None:
    """CVE-2026-15920"""
    script = "javascript:alert(1)"
    assert _links(format_html('<a href="{}">open</a>', script)) == [script]

    for page in _admin_pages(committed_db, script):
        assert script in page
        assert not [link for link in _links(page) if link.startswith("javascript:")]


def test_ghsa_x9jp_4w8m_4f3c_the_admin_escapes_stored_json(committed_db: CommittedDatabase) -> None:
    """GHSA-x9jp-4w8m-4f3c"""
    script = "</textarea><script>alert(1)</script>"
    form = Template("<textarea>{{ json|safe }}</textarea>")
    assert "<script>alert" in form.render(Context({"json": json.dumps(script)}))

    for page in _admin_pages(committed_db, script):
        assert "alert(1)" in page
        assert "<script>alert" not in page


def _admin_pages(database: CommittedDatabase, text: str) -> list[str]:
    """The list of sessions and the page of one whose title and state have this text."""
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    store.create_session("s", agent_type="agent", title=text, custom_state={"link": text})
    row = Session.objects.using(database.alias).get(tenant=database.tenant)
    with browser_on(database) as browser:
        browser.sign_in(superuser=True)
        return [
            browser.list_of(Session, tenant=database.tenant).html,
            browser.page_of(row, section="state").html,
        ]


def _links(page: str) -> list[str]:
    elements = Elements()
    elements.feed(page)
    return [attributes["href"] or "" for _, attributes in elements.started if "href" in attributes]


@pytest.mark.parametrize("path", ["/__proto__", "/constructor/prototype", "/prototype"])
def test_immer_738_a_path_of_a_patch_cannot_leave_its_document(path: str) -> None:
    """immer#738, fast-json-patch#216, jsonpatch-js#30"""

    class Document(dict[str, Any]):
        pass

    patched_by_attributes(Document(), ["__class__", "polluted"], value=True)
    assert getattr(Document(), "polluted", False)

    document = {"constructor": {"a": 1}}
    with pytest.raises(PatchError):
        apply_patches(document, [{"op": "add", "path": path, "value": {"polluted": True}}])
    assert document == {"constructor": {"a": 1}}
