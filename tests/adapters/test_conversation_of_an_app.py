"""The conversation of the app that is printed in docs/adapters.md."""

from __future__ import annotations

from io import StringIO

from django.core.management import call_command

from helix_store.models import Session
from helix_store.reports.conversations import line_of, outlined
from helix_store.reports.session import session_report
from helix_store.stores import DatabaseStateStore
from tests.adapters.conftest import MakeNotebook
from tests.databases import CommittedDatabase


def test_show_prints_the_pages_of_a_notebook_as_messages(
    notebook: MakeNotebook, committed_db: CommittedDatabase
) -> None:
    notes = notebook("shown")
    notes.write("plan", "Find a hotel.")
    notes.write("map", "A map.", b"bytes")
    output = StringIO()
    options = {"tenant": committed_db.tenant, "database": committed_db.alias}
    call_command("helix_sessions", "show", notes.session_id, messages=5, stdout=output, **options)
    _, _, printed = output.getvalue().partition("NOTEBOOK: MESSAGES, NEWEST 2 OF 2")
    assert "plan: Find a hotel." in printed
    assert "[attachment]" in printed


def test_a_report_has_the_newest_messages_of_an_app(
    notebook: MakeNotebook, committed_db: CommittedDatabase
) -> None:
    notes = notebook("reported")
    for number in range(5):
        notes.write(f"page {number}", number)
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    report = session_report(store, notes.session_id, messages=2)
    page = report.conversations["Notebook"]
    assert page.total == 5
    assert [line_of(each.parts or ()) for each in page.messages] == ["page 3: 3", "page 4: 4"]


def test_a_list_has_the_count_and_the_newest_message_of_an_app(
    notebook: MakeNotebook, committed_db: CommittedDatabase
) -> None:
    notebook("one").write("plan", "Go.")
    sessions = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    (outline,) = outlined(list(sessions), committed_db.alias, lambda model: True).values()
    assert outline.count == 1
    assert outline.last is not None
    assert line_of(outline.last.parts or ()) == "plan: Go."
    unseen = outlined(list(sessions), committed_db.alias, lambda model: False)
    assert [each.count for each in unseen.values()] == [0]
