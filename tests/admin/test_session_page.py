"""The page of one session: its summary, and each of its sections."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.test.utils import override_settings
from django.urls import reverse

from helix_store.admin.sections import SECTIONS
from helix_store.core import moments
from helix_store.core.types import RunStatus, SessionState, StepInfo
from helix_store.models import Checkpoint, Message, Run, Session, UsageEntry
from helix_store.stores import DatabaseLockManager, DatabaseStreamManager, DatabaseUsageStore
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of, write_session
from tests.admin.test_operations import address, row_of, shown_digest, step, told
from tests.cells import for_each

EXACT_TIME = re.compile(r"\d\d:\d\d:\d\d [-+:A-Z0-9]+")


def _state(browser: Browser, session_id: str = "s") -> SessionState:
    state = store_of(browser.database).load_state(session_id)
    assert state is not None
    return state


def _section(browser: Browser, name: str, **query: Any) -> Page:
    page = browser.page_of(row_of(browser), section=name, **query)
    assert page.status == 200
    return page


def _links(page: Page) -> list[str]:
    return [str(attributes.get("href")) for tag, attributes in page.elements.started if tag == "a"]


# --- Summary --------------------------------------------------------------------------------------


def test_the_title_is_the_heading_and_the_id_stands_below(browser: Browser) -> None:
    store_of(browser.database).create_session(
        "s", agent_type="planner", title="Trip to Lisbon", user_id="ann"
    )
    page = browser.page_of(row_of(browser))
    assert "<h1>Trip to Lisbon</h1>" in page.html
    assert re.search(r'<code class="helix-id helix-copy"[^>]*>s</code>', page.html)
    assert "active" in page.text
    assert "Agent planner User ann" in page.text
    assert "Progress 0 steps, 0 messages" in page.text


def test_a_waiting_session_says_for_what_it_waits(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    store.start_run("s")
    call = {"tool_name": "book_trip", "input": {}, "approval_id": "x"}
    store.suspend("s", kind=RunStatus.SUSPENDED_CLIENT_TOOL, context={}, pending={"1": call})
    assert "paused waits for an approval: book_trip" in browser.page_of(row_of(browser)).text
    store.submit_tool_result("s", "1", approval_id="x", approved=True)
    assert "everything it waited for is answered" in browser.page_of(row_of(browser)).text


@pytest.mark.thorough
def test_a_failed_session_shows_its_error_first(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    run = store.start_run("s")
    store.update_run("s", run.run_id, status="failed", error={"code": "no_funds"})
    state = _state(browser)
    state.error = {"type": "PaymentError"}
    store.save_state("s", state)
    store.update_status("s", "failed", failure_reason="The card was refused.")
    for section in SECTIONS:
        text = _section(browser, section.name).text
        head, _, _ = text.partition("Conversation Timeline")
        assert "The card was refused." in head
        assert '"type": "PaymentError"' in head
        assert '"code": "no_funds"' in head


def test_a_session_that_ended_expires_no_more(browser: Browser) -> None:
    store = store_of(browser.database)
    in_an_hour = int((datetime.now(UTC) + timedelta(hours=1)).timestamp() * 1_000)
    store.create_session("s", agent_type="a", expires_at=in_an_hour)
    assert re.search(r"Expires in (1 hour|59 minutes)", browser.page_of(row_of(browser)).text)
    store.update_status("s", "failed", failure_reason="why not")
    assert "Expires" not in browser.page_of(row_of(browser)).text


def test_the_summary_names_the_lock_holder_the_run_and_the_cost(browser: Browser) -> None:
    database = browser.database
    store_of(database).create_session("s", agent_type="a")
    store_of(database).start_run("s")
    assert DatabaseLockManager(database.alias, tenant=database.tenant).acquire("s", owner="worker-7")
    usage = DatabaseUsageStore(database.alias, tenant=database.tenant)
    usage.record_entry(_tokens(1, 1_200, "0.0312"))
    text = browser.page_of(row_of(browser)).text
    assert "Lock held by worker-7" in text
    assert re.search(r"Run 1, started \d+ seconds? ago", text)
    assert "Spent $0.031 · 1,200 tokens" in text


def _tokens(step: int, total: int, cost: str, run_id: str | None = None) -> dict[str, Any]:
    return {
        "kind": "tokens",
        "session_id": "s",
        "step_count": step,
        "timestamp": int(datetime.now(UTC).timestamp() * 1_000),
        "source": {"type": "agent", "name": "a"},
        "model": "m",
        "tokens": {"prompt": total - 1, "completion": 1, "total": total},
        "cost_usd": cost,
        "run_id": run_id,
    }


@pytest.mark.thorough
def test_times_have_seconds_and_a_zone_and_are_nowhere_epoch_milliseconds(browser: Browser) -> None:
    store = store_of(browser.database)
    deadline = int((datetime.now(UTC) + timedelta(days=3)).timestamp() * 1_000)
    store.create_session("s", agent_type="a", expires_at=deadline)
    step(browser, 1)
    store.start_run("s")
    call = {"tool_name": "ask", "input": {}, "deadline": deadline, "on_expiry": "fail"}
    store.suspend("s", kind=RunStatus.SUSPENDED_CLIENT_TOOL, context={}, pending={"1": call})
    pages = browser.sections_of(row_of(browser))
    assert "deadline in 2 days" in pages["waits"].text
    assert "then it fails with an error" in pages["waits"].text
    for name, page in pages.items():
        times = [attributes for tag, attributes in page.elements.started if tag == "time"]
        assert times, name
        for attributes in times:
            assert EXACT_TIME.search(f"{attributes['title']} {page.text}"), attributes
        assert str(deadline) not in page.text, name
        assert not re.search(r"\b1[789]\d{11}\b", re.sub(r"cpv1-\S+", "", page.text)), name


# --- Conversation ---------------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"city": "Oslo"}'}}


def test_a_conversation_reads_like_a_chat(browser: Browser) -> None:
    store = store_of(browser.database)
    state = store.create_session("s", agent_type="a")
    run = store.start_run("s")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "thinking": "Look it up.", "content": "One moment.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "It rains."},
    ]
    usage = DatabaseUsageStore(browser.database.alias, tenant=browser.database.tenant)
    usage.record_entry(_tokens(1, 512, "0.25", run.run_id))
    store.save_state_and_promote_staging("s", state, messages, StepInfo("first", 1), run_id=run.run_id)
    page = _section(browser, "conversation")
    order = ["Step 1 first", "512 tokens · $0.25", "user #1", "Where is it?", "assistant #2", "Thinking"]
    order += ["Look it up.", "One moment.", "find", '{"city": "Oslo"}', "Result", "It rains."]
    places = [page.text.index(each) for each in order]
    assert places == sorted(places)
    # The result stands at its call, not as a message of its own.
    assert "tool #3" not in page.text
    assert ("details", {"class": "helix-thinking"}) in page.elements.started


def test_a_result_on_another_page_than_its_call_is_shown(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    rest = [{"role": "user", "content": f"message {number}"} for number in range(39)]
    late = {"role": "tool", "tool_call_id": "c1", "content": "late"}
    store_of(browser.database).append_messages(
        "s", [{"role": "assistant", "tool_calls": [CALL]}, *rest, late]
    )
    assert "late" not in _section(browser, "conversation", start=1).text
    assert "late" in _section(browser, "conversation").text


def test_a_conversation_is_paged_from_its_end_and_from_its_start(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    store_of(browser.database).append_messages(
        "s", [{"role": "user", "content": f"message {number}."} for number in range(1, 101)]
    )
    newest = _section(browser, "conversation")
    assert "Messages 61 to 100 of 100" in newest.text
    assert "message 61." in newest.text
    assert "message 60." not in newest.text
    seen: list[str] = []
    (start,) = [url for url in _links(newest) if "start=1#" in url][:1]
    page = browser.open(start.partition("#")[0])
    while True:
        seen += re.findall(r"message (\d+)\.", page.text)
        following = [url for url in _links(page) if url.endswith("#section") and ">Newer<" in page.html]
        newer = re.search(r'href="([^"]+)">Newer<', page.html)
        if newer is None or not following:
            break
        page = browser.open(newer[1].replace("&amp;", "&").partition("#")[0])
    assert seen == [str(number) for number in range(1, 101)]


@pytest.mark.thorough
@for_each("start", ["0", "-5", "x", "9" * 30, "1e3", "\u0661", "101"])
def test_a_page_that_does_not_exist_shows_one_that_does(browser: Browser, start: str) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    store_of(browser.database).append_messages("s", [{"role": "user", "content": "hello"}] * 50)
    assert "hello" in _section(browser, "conversation", start=start, step=start).text


def test_one_jumps_to_a_step(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    for number in range(1, 61):
        step(browser, number)
    page = _section(browser, "conversation", step=5)
    assert "Messages 5 to 44 of 60" in page.text
    assert page.text.index("Step 5") < page.text.index("message 5")
    assert "Messages 21 to 60 of 60" in _section(browser, "conversation", step=999).text


def test_a_long_message_is_folded_and_its_page_has_all_of_it(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    store_of(browser.database).append_messages(
        "s",
        [
            {"role": "user", "content": "word " * 1_000 + "the end"},
            {"role": "user", "content": "word " * 200_000 + "far away"},
        ],
    )
    page = _section(browser, "conversation")
    assert "the end" in page.text
    assert "The rest of the text" in page.text
    assert "far away" not in page.text
    assert "It is longer: see the whole message." in page.text
    assert len(page.html) < 100_000


# --- Timeline -------------------------------------------------------------------------------------


def test_a_timeline_shows_runs_steps_waits_and_sub_agents(browser: Browser) -> None:
    store = store_of(browser.database)
    state = store.create_session("s", agent_type="a")
    run = store.start_run("s")
    child = store.create_session("child", agent_type="visa-adviser", parent_session_id="s")
    store.add_sub_session_refs("s", [{"sub_session_id": child.session_id, "agent_type": "visa-adviser"}])
    store.save_state_and_promote_staging("s", state, [], StepInfo("look", 1), run_id=run.run_id)
    store.suspend(
        "s",
        kind=RunStatus.SUSPENDED_CLIENT_TOOL,
        context={},
        pending={"c": {"tool_name": "ask", "input": None}},
    )
    page = _section(browser, "timeline")
    for words in ("Run 1 paused for a person", "Step 1 look", "visa-adviser sub-agent", "Wait still waits"):
        assert words in page.text, words
    bars = [a for tag, a in page.elements.started if tag == "svg" and a.get("class") == "helix-bar"]
    assert len(bars) == 4
    for tag, attributes in page.elements.started:
        if tag == "rect":
            x, width = float(attributes["x"] or ""), float(attributes["width"] or "")
            assert 0 <= x <= x + width <= 1000.1


def _with_steps(browser: Browser, count: int) -> Any:
    """A run whose steps took a second each."""
    store = store_of(browser.database)
    state = store.create_session("s", agent_type="a")
    run = store.start_run("s")
    for number in range(1, count + 1):
        store.save_state_and_promote_staging(
            "s", state, [], StepInfo(f"n{number}", number), run_id=run.run_id
        )
        state = _state(browser)
    store.update_run("s", run.run_id, status=RunStatus.COMPLETED, step_count=count)
    start = moments.now() - timedelta(seconds=count)
    alias = browser.database.alias
    Run.objects.using(alias).update(started_at=start, ended_at=start + timedelta(seconds=count))
    for row in Checkpoint.objects.using(alias).filter(kind="step"):
        ended = start + timedelta(seconds=row.step_count)
        Checkpoint.objects.using(alias).filter(pk=row.pk).update(created_at=ended)
    return store


def test_the_first_step_of_a_full_timeline_begins_where_the_one_before_it_ended(browser: Browser) -> None:
    _with_steps(browser, 62)
    shown = _section(browser, "timeline").text
    assert "Step 2 n2" not in shown
    assert "Step 3 n3" in shown
    assert re.search(r"Step 3 n3 .{0,80}\(1\.0 s\)", shown), shown[:900]


def test_a_step_whose_predecessor_was_pruned_has_no_duration(browser: Browser) -> None:
    _with_steps(browser, 5).prune_checkpoints("s", keep=2)
    shown = _section(browser, "timeline").text
    assert re.search(r"Step 5 n5 .{0,80}\(1\.0 s\)", shown), shown
    assert "(4.0 s)" not in shown


def test_a_long_wait_does_not_hide_the_work_around_it(browser: Browser) -> None:
    from helix_store.admin.sections.timeline import Scale

    start = datetime(2026, 1, 1, tzinfo=UTC)
    seconds = timedelta(seconds=10)
    busy = [(start, start + seconds), (start + timedelta(days=3), start + timedelta(days=3) + seconds)]
    scale = Scale(busy)
    first, wait, last = (
        scale.position(end) - scale.position(begin)
        for begin, end in (busy[0], (busy[0][1], busy[1][0]), busy[1])
    )
    assert first == pytest.approx(last)
    assert first > 10 * wait > 0
    assert first + wait + last == pytest.approx(1000)


# --- Waiting --------------------------------------------------------------------------------------


def test_a_call_can_be_approved_and_the_page_tells_who_did(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    store.start_run("s")
    call = {"tool_name": "book", "input": {"total_eur": 394}, "approval_id": "x"}
    store.suspend("s", kind=RunStatus.SUSPENDED_CLIENT_TOOL, context={}, pending={"call-1": call})
    page = _section(browser, "waits")
    assert '"total_eur": 394' in page.text
    assert 'name="answer" value="approve"' in page.html
    given = {"call": "call-1", "approval": "x", "answer": "approve", "reason": "cheap enough"}
    given["digest"] = shown_digest(browser)
    told(browser, address(row_of(browser), "answer"), given)
    text = _section(browser, "waits").text
    assert re.search(r"approved \d+ seconds? ago by user-[0-9a-f]+", text)
    assert "cheap enough" in text
    store.take_tool_results("s")
    assert re.search(
        r'1 answered call book call-1 .*"total_eur": 394 } approved .* by user-',
        _section(browser, "waits").text,
    )


def test_a_viewer_sees_a_call_without_a_form(visitor: Browser) -> None:
    from tests.admin.test_operations import _sign_in, waiting_session

    waiting_session(visitor)
    _sign_in(visitor, "view_session")
    page = _section(visitor, "waits")
    assert "book" in page.text
    assert "You may not answer it." in page.text
    assert "operation" not in page.html


# --- Checkpoints ----------------------------------------------------------------------------------


def test_two_checkpoints_are_compared(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    first, second = step(browser, 1), step(browser, 2)
    page = _section(browser, "checkpoints", a=first, b=second)
    assert "/custom_state/step 1 2" in page.text
    store_of(browser.database).merge_custom_state("s", {"new": True})
    assert "/custom_state/new true" in _section(browser, "checkpoints", a=second, b="current").text
    assert "The two states are equal." in _section(browser, "checkpoints", a=first, b=first).text


@pytest.mark.thorough
@for_each("other", ["unknown", "\x00", "x" * 1_000, "cpv1-x-s1-t1-0"])
def test_a_checkpoint_that_is_not_there_is_named_in_words(browser: Browser, other: str) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    text = _section(browser, "checkpoints", a=step(browser, 1), b=other).text
    assert "A chosen checkpoint has been deleted." in text


@pytest.mark.thorough
def test_a_difference_shows_no_tracing_context(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    first = step(browser, 1)
    state = _state(browser)
    state.tracing_context = {"api_key": "secret-1"}
    store.save_state_and_promote_staging("s", state, [], StepInfo("2", 2))
    page = _section(browser, "checkpoints", a=first, b="current")
    assert "/step_count" in page.text or "Before" in page.text
    for each in browser.sections_of(row_of(browser)).values():
        assert "secret-1" not in each.html
    assert "secret-1" not in page.html


def test_checkpoints_are_restored_and_branched_from_their_page(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    first = step(browser, 1)
    step(browser, 2)
    links = _links(_section(browser, "checkpoints"))
    (restore,) = [url for url in links if "/restore/" in url and first in url]
    page = browser.open(restore)
    assert "Later messages, later checkpoints" in page.text
    fields = {
        str(attributes["name"]): str(attributes.get("value") or "")
        for tag, attributes in page.elements.started
        if tag == "input" and attributes.get("name") and attributes.get("name") != "csrfmiddlewaretoken"
    }
    told(browser, restore.partition("?")[0], fields)
    assert _state(browser).custom_state == {"step": 1}
    (branch,) = [url for url in links if "/branch/" in url and first in url]
    assert browser.open(branch).status == 200


# --- Long documents -------------------------------------------------------------------------------

LONG = ["x" * 100] * 3_000


def test_a_long_document_of_a_session_is_shown_up_to_a_bound(browser: Browser) -> None:
    store = store_of(browser.database)
    state = store.create_session("s", agent_type="a")
    store.suspend("s", kind=RunStatus.SUSPENDED_CLIENT_TOOL, context={"graph": LONG}, pending={})
    assert re.search(
        r"Continuation more than [0-9,]+ lines of JSON { \"graph\"", _section(browser, "waits").text
    )
    state = _state(browser)
    state.output = {"report": LONG}
    state.error = {"type": "PaymentError"}
    store.save_state("s", state)
    store.update_status("s", "failed", failure_reason="The card was refused.")
    page = _section(browser, "details")
    shown = r'Output, error, workspaces more than [0-9,]+ lines of JSON { "output": { "report"'
    assert re.search(shown, page.text)
    assert '"type": "PaymentError"' in page.text
    assert len(page.html) < 100_000


def test_the_long_error_of_a_failed_run_is_shown_up_to_a_bound(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    run = store.start_run("s")
    store.update_run("s", run.run_id, status="failed", error={"code": "no_funds", "cards": LONG})
    store.update_status("s", "failed", failure_reason="The card was refused.")
    text = browser.page_of(row_of(browser)).text
    assert '"code": "no_funds"' in text
    assert "Cut after 20,000 characters." in text


def test_long_open_calls_are_named_at_the_top_of_the_page(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    call = {"tool_name": "book", "input": LONG}
    store.suspend("s", kind=RunStatus.SUSPENDED_CLIENT_TOOL, context={}, pending={"call-1": call})
    assert "waits for an answer: book" in browser.page_of(row_of(browser)).text


def test_long_answers_are_shown_up_to_a_bound(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    pending = {"call-1": {"tool_name": "book", "input": {}}}
    store.suspend("s", kind=RunStatus.SUSPENDED_CLIENT_TOOL, context={}, pending=pending)
    store.submit_tool_result("s", "call-1", result=LONG)
    store.take_tool_results("s")
    page = _section(browser, "waits")
    assert re.search(r'Answered more than [0-9,]+ lines of JSON { "call-1": {', page.text)
    assert "answered call" not in page.text


# --- State ----------------------------------------------------------------------------------------


def test_a_state_is_downloaded_as_its_exact_text(browser: Browser) -> None:
    custom = {"float": 1.0, "order": {"b": 1, "a": 2}, "text": "é \ud83d\ude00 </script>"}
    store_of(browser.database).create_session("s/..\u00e9 x", agent_type="a", custom_state=custom)
    session = row_of(browser, "s/..\u00e9 x")
    response = browser.client.get(reverse("admin:helix_store_session_state", args=[session.pk]))
    assert json.loads(response.content) == custom
    assert b'"float":1.0,"order":{"b":1,"a":2}' in response.content
    assert response["Content-Disposition"] == 'attachment; filename="state-s_.._x.json"'
    assert response["X-Content-Type-Options"] == "nosniff"


def test_a_state_with_lone_surrogates_is_downloaded(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a", custom_state={"t": "\ud800"})
    response = browser.client.get(reverse("admin:helix_store_session_state", args=[row_of(browser).pk]))
    assert json.loads(response.content.decode("utf-8", "surrogatepass")) == {"t": "\ud800"}


def test_a_state_is_searched_by_key_and_value(browser: Browser) -> None:
    custom = {"trips": [{"to": "Oslo"}, {"to": "Lisbon"}], "osloensis": 1, "number": 7}
    store_of(browser.database).create_session("s", agent_type="a", custom_state=custom)
    page = _section(browser, "state", q="OSLO")
    assert "2 places with" in page.text
    assert '/trips/0/to "Oslo"' in page.text
    assert "/osloensis 1" in page.text
    assert "/trips/1/to" not in page.text
    (place,) = [url for url in _links(page) if "at=%2Ftrips%2F0%2Fto" in url]
    assert 'Show the whole state "Oslo"' in browser.open(place.partition("#")[0]).text
    assert "/number 7" in _section(browser, "state", q="7").text


def test_a_long_state_shows_all_its_keys_and_has_a_page_for_each(browser: Browser) -> None:
    custom = {"history": [{"tool": f"tool {number}"} for number in range(900)], "done": False}
    store_of(browser.database).create_session("s", agent_type="a", custom_state=custom)
    page = _section(browser, "state")
    assert re.search(r"history more than [0-9,]+ lines of JSON", page.text)
    assert "done false" in page.text
    (history,) = [url for url in _links(page) if "at=%2Fhistory" in url]
    page = browser.open(history.partition("#")[0])
    assert "199 3 lines of JSON" in page.text
    assert "… 700 more" in page.text
    (last,) = [url for url in _links(page) if "at=%2Fhistory%2F199" in url]
    assert '"tool": "tool 199"' in browser.open(last.partition("#")[0]).text


@pytest.mark.thorough
def test_a_large_state_is_shown_in_part(browser: Browser) -> None:
    custom = {f"key {number}": list(range(50)) for number in range(1_000)}
    store_of(browser.database).create_session("s", agent_type="a", custom_state=custom)
    page = _section(browser, "state")
    assert "key 0" in page.text
    assert "key 999" not in page.text
    assert len(page.html) < 300_000
    assert "/key 999" in _section(browser, "state", q="key 999").text


# --- Usage, sub-sessions, stream ------------------------------------------------------------------


def test_usage_is_shown_for_the_session_and_for_its_tree(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    store.create_session("child", agent_type="b", parent_session_id="s")
    usage = DatabaseUsageStore(browser.database.alias, tenant=browser.database.tenant)
    usage.record_entry(_tokens(1, 100, "1.50"))
    usage.record_entry({**_tokens(1, 10, "0.25"), "session_id": "child"})
    text = _section(browser, "usage").text
    assert "This session $1.50 Tokens 100" in text
    assert "With sub-sessions $1.75 Tokens 110" in text


def test_the_tree_leads_from_any_session_to_its_family(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("root", agent_type="boss", title="The root")
    store.create_session("s", agent_type="worker", parent_session_id="root")
    store.create_session("leaf", agent_type="helper", parent_session_id="s")
    store.add_sub_session_refs("s", [{"sub_session_id": "far", "agent_type": "x", "location": "remote"}])
    page = _section(browser, "tree")
    for name in ("root", "leaf"):
        url = reverse("admin:helix_store_session_change", args=[row_of(browser, name).pk])
        assert url in _links(page)
    assert "The root" in page.text
    assert re.search(r"far x running remote", page.text)
    assert "this session" in page.text


def test_the_last_chunks_of_a_stream_are_shown(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    assert "This session has no stream." in _section(browser, "stream").text
    streams = DatabaseStreamManager(browser.database.alias, tenant=browser.database.tenant)
    async_to_sync(streams.create_writer)("s", "run", "agent")
    streams.write_sync("s", [{"type": "text_delta", "delta": f"word {n}."} for n in range(1, 101)])
    page = _section(browser, "stream")
    assert "word 100." in page.text
    assert "word 40." not in page.text
    assert "word 40." in _section(browser, "stream", before=41).text
    # Nobody gave the user a permission to read streams live.
    assert 'id="helix-live"' not in page.html


def allow_the_tenant(request: Any, stream_id: str) -> str:
    return "the tenant"


def test_live_chunks_are_offered_for_the_stream_of_this_tenant_only(browser: Browser) -> None:
    given = {"STREAM_PERMISSION": f"{__name__}.allow_the_tenant"}
    for tenant, is_live in (("the tenant", True), ("another", False)):
        database = browser.database
        store = type(store_of(database))(database.alias, tenant=tenant)
        store.create_session("s", agent_type="a")
        streams = DatabaseStreamManager(database.alias, tenant=tenant)
        async_to_sync(streams.create_writer)("s", "run", "agent")
        session = Session.objects.using(database.alias).get(tenant=tenant)
        with override_settings(HELIX_STORE=given):
            page = browser.page_of(session, section="stream")
        assert ('data-url="/streams/s/"' in page.html) is is_live
        assert ("script", {"src": "/static/helix_store/live.js", "defer": None}) in page.elements.started or (
            not is_live
        )
        store.delete_session("s")


# --- All of it ------------------------------------------------------------------------------------


def test_an_unknown_section_is_not_found(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    assert browser.page_of(row_of(browser), section="unknown").status == 404


@pytest.mark.thorough
def test_pages_have_no_script_or_style_of_their_own(browser: Browser) -> None:
    for page in browser.sections_of(write_session(browser.database)).values():
        elements = page.elements.started
        assert [tag for tag, attributes in elements if "style" in attributes or tag == "style"] == []
        assert [a for _, a in elements if any(name.startswith("on") for name in a)] == []
        own = [a for tag, a in elements if tag == "script" and "src" not in a]
        assert own == []


@pytest.fixture(scope="module")
def sizes() -> dict[str, Any]:
    return {}


def _grow(browser: Browser, session: Session, messages: int, steps: int) -> None:
    """Rows as the store writes them, but many at once."""
    alias, now = browser.database.alias, datetime.now(UTC)
    Message.objects.using(alias).filter(session=session).delete()
    Message.objects.using(alias).bulk_create(
        Message(
            session=session,
            sequence=number,
            role="user",
            payload=json.dumps({"role": "user", "content": f"message {number} " + "x" * 200}),
            created_at=now,
        )
        for number in range(1, messages + 1)
    )
    Checkpoint.objects.using(alias).bulk_create(
        Checkpoint(
            session=session,
            kind="step",
            version=10 + number,
            checkpoint_id=f"cpv1-{number}",
            source="step",
            run_id="run",
            step_id=f"step-{number}",
            step_count=number,
            status="active",
            message_count=number * messages // steps,
            payload="{}",
            created_at=now + timedelta(milliseconds=number),
        )
        for number in range(1, steps + 1)
    )
    UsageEntry.objects.using(alias).bulk_create(
        UsageEntry(
            tenant=session.tenant,
            entry_id=f"entry-{number}",
            session=session,
            recorded_for=session.session_id,
            session_agent_type="a",
            kind="tokens",
            timestamp=now,
            source_type="agent",
            source_name="a",
            run_id="run",
            step_count=number,
            total_tokens=10,
        )
        for number in range(1, steps + 1)
    )
    newest = Checkpoint.objects.using(alias).filter(session=session, kind="step").latest("version")
    Session.objects.using(alias).filter(pk=session.pk).update(
        message_count=messages, step_count=steps, version=10 + steps, current=newest.pk
    )


@pytest.mark.thorough
def test_a_session_of_ten_thousand_messages_costs_as_much_as_one_of_a_hundred(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    store_of(browser.database).start_run("s", "run")
    session = row_of(browser)
    _grow(browser, session, messages=100, steps=100)
    browser.sections_of(session)
    small = browser.sections_of(row_of(browser))
    Checkpoint.objects.using(browser.database.alias).filter(kind="step").delete()
    UsageEntry.objects.using(browser.database.alias).all().delete()
    _grow(browser, session, messages=10_000, steps=5_000)
    large = browser.sections_of(row_of(browser))
    for name, page in large.items():
        assert page.status == 200
        assert len(page.statements) == len(small[name].statements), name
        assert len(page.statements) <= 22, (name, len(page.statements))
        assert len(page.html) < 1.1 * len(small[name].html) + 2_000, name
        assert len(page.html) < 120_000, name
    assert "Messages 9,961 to 10,000 of 10,000" in large["conversation"].text
    assert "Step 4999" in large["conversation"].text
    far = _section(browser, "conversation", step=2_500)
    assert "Messages 4,999 to 5,038 of 10,000" in far.text
    assert len(far.statements) <= 22
