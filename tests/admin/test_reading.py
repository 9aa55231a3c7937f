"""What the pages show, and what they cost."""

from __future__ import annotations

import re

import pytest
from django.contrib.staticfiles import finders
from django.db.models import Model

from helix_store.admin.base import BoundedPaginator
from helix_store.admin.elements import JSON_LIMIT
from helix_store.core.types import StepInfo
from helix_store.models import (
    Checkpoint,
    Message,
    Run,
    Session,
    Stream,
    UsageEntry,
)
from tests.admin.conftest import Browser, Page
from tests.admin.rows import MODELS, rows_of, store_of, write_session
from tests.cells import for_each

PAYLOAD_COLUMNS = re.compile(
    r"\"(payload|envelope|error|pending_client_tool_calls|completed_client_tool_calls|client_tool_call_ownership"
    r"|suspension_context|suspended_awaiting_children|tracing_context"
    r"|title|tags|metadata|directory|failure_reason|completion_reason)\""
)


def _row(browser: Browser, session_id: str) -> Session:
    sessions = Session.objects.using(browser.database.alias)
    return sessions.get(tenant=browser.database.tenant, session_id=session_id)


@pytest.mark.thorough
def test_a_list_of_fifty_rows_takes_as_many_queries_as_a_list_of_one(browser: Browser) -> None:
    write_session(browser.database, "row")
    browser.list_of(Session)
    one = [browser.list_of(model) for model in MODELS]
    for number in range(49):
        write_session(browser.database, f"row {number}")
    fifty = [browser.list_of(model) for model in MODELS]
    assert [page.row_count for page in one] == [1] * len(MODELS)
    assert [page.row_count for page in fifty] == [50] * len(MODELS)
    costs = [len(page.statements) for page in one]
    assert [len(page.statements) for page in fifty] == costs
    # The signed-in user, the mark of what is new, the count and the rows; of sessions also agent types,
    # tenants, what they spent, their newest messages, their conditions and their numbers of sub-sessions.
    assert max(costs) <= 11


@for_each("model", MODELS, shared=True)
def test_a_list_reads_no_payload(browser: Browser, model: type[Model]) -> None:
    write_session(browser.database)
    page = browser.list_of(model)
    read_whole = [
        statement
        for statement in page.statements
        if PAYLOAD_COLUMNS.search(re.sub(r"(?i)substr(ing)?\([^)]*\)", "", statement))
    ]
    assert read_whole == []


def _leads_to(session: Session, page: Page) -> bool:
    address = f"/admin/helix_store/session/{session.pk}/change/"
    return ("a", {"href": address}) in page.elements.started and session.session_id in page.text


def test_a_list_of_one_session_names_it_once_above(browser: Browser) -> None:
    session = write_session(browser.database, session_id="the-session")
    for model in (Message, Checkpoint, Run):
        page = browser.list_of(model, session__id__exact=session.pk)
        assert _leads_to(session, page)
        assert page.elements.text.count("the-session") == (2 if model is Checkpoint else 1)
        assert browser.list_of(model, session__id__exact=2**40).status == 200
        for no_key in ("none", "9" * 5_000, "-1e3", ""):
            assert browser.list_of(model, session__id__exact=no_key).status in (200, 302)


def test_the_list_of_all_messages_begins_with_the_newest(browser: Browser) -> None:
    store = store_of(browser.database)
    for name in ("old", "new"):
        store.create_session(name, agent_type="a")
        store.append_messages(name, [{"role": "user", "content": f"{name} {number}"} for number in (1, 2)])
    whole = browser.list_of(Message).text
    places = [whole.index(words) for words in ("new 2", "new 1", "old 2", "old 1")]
    assert places == sorted(places)
    one = browser.list_of(Message, session__id__exact=_row(browser, "old").pk)
    assert one.text.index("old 1") < one.text.index("old 2")
    times = [attributes["title"] for tag, attributes in one.elements.started if tag == "time"]
    assert len(times) == 2
    assert re.search(r"\d\d:\d\d:\d\d [-+:A-Z0-9]+", one.text)


def test_a_message_page_shows_all_that_the_message_says(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    content = "First line\n" + "word " * 1_000 + "last"
    store.append_messages("s", [{"role": "assistant", "content": content, "tool_calls": [call]}])
    message = Message.objects.using(browser.database.alias).get(session=_row(browser, "s"))
    page = browser.page_of(message)
    assert f"{content}\n\n→ find({{}})" in page.elements.text
    assert '"tool_calls": [' in page.text


def test_a_state_that_is_not_a_checkpoint_appears_on_the_page_of_its_session_alone(browser: Browser) -> None:
    store = store_of(browser.database)
    state = store.create_session("s", agent_type="a", custom_state={"kept": "between checkpoints"})
    session = _row(browser, state.session_id)
    assert "between checkpoints" in browser.page_of(session, section="state").text
    assert "No step has been committed yet" in browser.page_of(session, section="checkpoints").text
    assert "0 checkpoints" in browser.list_of(Checkpoint, session__id__exact=session.pk).text


def test_messages_of_a_session_are_listed_in_order_with_what_they_say(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"from": "JFK"}'}}
    store.append_messages(
        "s",
        [
            {"role": "user", "content": "First " + "long " * 2_000},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "found"}]},
        ],
    )
    session = _row(browser, "s")
    text = browser.list_of(Message, session__id__exact=session.pk).text
    first, second, third = (
        text.index(part)
        for part in ("1 user First long", '2 assistant → find({"from": "JFK"})', "3 tool found")
    )
    assert first < second < third


def test_a_long_state_is_folded_and_cut(browser: Browser) -> None:
    store = store_of(browser.database)
    state = store.create_session("s", agent_type="a")
    state.custom_state = {"first": 1, "long": ["x" * 100] * 2_000, "last": 2}
    store.save_state_and_promote_staging("s", state, [], StepInfo("1", 1))
    session = _row(browser, "s")
    page = browser.page_of(_latest_checkpoint(session))
    assert f"Cut after {JSON_LIMIT:,} characters." in page.text
    assert '"first": 1' in page.text
    assert '"last"' not in page.text
    assert len(page.html) < 3 * JSON_LIMIT
    assert ("details", {"class": "helix-json"}) in page.elements.started


def _latest_checkpoint(session: Session) -> Checkpoint:
    return Checkpoint.objects.using(session._state.db).filter(session=session).latest("version")


def test_a_list_stops_counting_at_its_bound_and_says_so(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        write_session(browser.database, f"row {number}")
    whole = browser.list_of(Session)
    assert "4 sessions" in whole.text
    assert "Filter or search" not in whole.text
    monkeypatch.setattr(BoundedPaginator, "max_rows", 3)
    bounded = browser.list_of(Session)
    assert "There are more than these first 3." in bounded.text
    (count,) = [statement for statement in bounded.statements if "COUNT(" in statement]
    assert "LIMIT 4" in count


@pytest.mark.thorough
def test_pages_bring_their_style_as_a_file_and_no_style_of_their_own(browser: Browser) -> None:
    assert finders.find("helix_store/admin.css")
    session = write_session(browser.database)
    for row in rows_of(session):
        elements = browser.page_of(row).elements.started
        sheets = [attributes.get("href") for tag, attributes in elements if tag == "link"]
        assert "/static/helix_store/admin.css" in sheets
        assert [attributes for tag, attributes in elements if "style" in attributes or tag == "style"] == []


@pytest.mark.thorough
@for_each("model", MODELS, shared=True)
def test_a_list_is_read_in_the_order_of_an_index(browser: Browser, model: type[Model]) -> None:
    write_session(browser.database)
    statements = browser.list_of(model).statements
    (statement,) = [
        statement
        for statement in statements
        if f'FROM "{model._meta.db_table}"' in statement
        and " ORDER BY " in statement
        and "LIMIT" not in statement
    ]
    plan = _plan_of(statement, browser)
    # A table of SQLite is in the order of its key.
    by_key = browser.database.vendor == "sqlite" and re.search(r'ORDER BY (1|\S+"id") DESC$', statement)
    assert by_key or re.search("index", plan, re.IGNORECASE)
    assert not re.search("sort|temp b-tree", plan, re.IGNORECASE), plan


def _plan_of(statement: str, browser: Browser) -> str:
    with browser.database.connection.cursor() as cursor:
        if browser.database.vendor == "sqlite":
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}")
            return "\n".join(row[3] for row in cursor.fetchall())
        # The tables of the tests are so small that the planner would rather read and sort all of them.
        switches = ("enable_seqscan", "enable_bitmapscan", "enable_sort", "enable_incremental_sort")
        for switch in switches:
            cursor.execute(f"SET {switch} = off")
        try:
            cursor.execute(f"EXPLAIN {statement}")
            return "\n".join(row[0] for row in cursor.fetchall())
        finally:
            for switch in switches:
                cursor.execute(f"RESET {switch}")


@pytest.mark.thorough
def test_an_empty_value_is_a_dash_and_never_the_word_none(browser: Browser) -> None:
    rows = rows_of(write_session(browser.database))
    alias = browser.database.alias
    Run.objects.using(alias).update(ended_at=None)
    Stream.objects.using(alias).update(ended_at=None)
    Checkpoint.objects.using(alias).update(status="")
    UsageEntry.objects.using(alias).update(session=None)
    assert len(rows) == len(MODELS)
    for row in rows[1:]:
        assert ">None<" not in browser.page_of(row).html, row._meta.model_name
        assert ">None<" not in browser.list_of(type(row)).html, row._meta.model_name
