"""The timeline of a session: runs, steps, calls, effects, waits and posts on one axis."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission

from helix_store import Store
from helix_store.core import moments
from helix_store.core.types import StepInfo
from helix_store.models import Checkpoint, Decision, Lock, Run, Session, UsageEntry
from helix_store.stores import DatabaseLockManager, DatabaseUsageStore
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of
from tests.admin.test_operations import row_of
from tests.faults.test_skewed_branches import clock_of

LANE = re.compile(r'<li class="helix-lane helix-lane-([a-z-]+)(?: helix-lane-opened)?"')


def _store(browser: Browser) -> Store:
    return Store(browser.database.alias, tenant=browser.database.tenant)


def _timeline(browser: Browser, **query: Any) -> Page:
    page = browser.page_of(row_of(browser), section="timeline", **query)
    assert page.status == 200
    return page


def _kinds(page: Page) -> list[str]:
    return LANE.findall(page.html)


def _links(page: Page, part: str) -> list[str]:
    found = [str(attributes.get("href")) for tag, attributes in page.elements.started if tag == "a"]
    return [url.partition("#")[0] for url in found if part in url]


def _take(browser: Browser, owner: str) -> int:
    """Take the lock of the session for a worker, and return its fencing token."""
    alias, tenant = browser.database.alias, browser.database.tenant
    Lock.objects.using(alias).update(expires_at=moments.now() - timedelta(seconds=1))
    lock = DatabaseLockManager(alias, tenant=tenant).acquire("s", owner=owner)
    assert lock is not None
    return lock.fencing_token


def _commit(browser: Browser, number: int, run_id: str, *messages: dict[str, Any], **state: Any) -> None:
    store = store_of(browser.database)
    current = store.load_state("s")
    assert current is not None
    current.custom_state.update(state)
    store.save_state_and_promote_staging(
        "s", current, list(messages), StepInfo(f"n{number}", number), run_id=run_id
    )


def _tool(browser: Browser, number: int, run_id: str, name: str, *, success: bool = True) -> None:
    usage = DatabaseUsageStore(browser.database.alias, tenant=browser.database.tenant)
    usage.record_entry(
        {
            "kind": "tool",
            "session_id": "s",
            "step_count": number,
            "timestamp": int(moments.now().timestamp() * 1_000),
            "source": {"type": "tool", "name": name},
            "run_id": run_id,
            "tool_name": name,
            "success": success,
            "duration_ms": 1_200,
        }
    )


def test_the_run_of_a_dead_worker_ends_where_another_worker_took_over(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    first = store.start_run("s", fencing_token=_take(browser, "worker-1"))
    _commit(browser, 1, first.run_id)
    page = _timeline(browser)
    assert "Run 1 running · worker-1" in page.text
    Lock.objects.using(browser.database.alias).update(expires_at=moments.now() - timedelta(seconds=1))
    page = _timeline(browser)
    assert "Run 1 its worker is gone, and nobody has taken over" in page.text
    assert page.html.count('class="helix-bar-gone"') == 1
    store.start_run("s", fencing_token=_take(browser, "worker-2"))
    page = _timeline(browser)
    assert "Run 1 its worker was gone · taken over by run 2 (worker-2)" in page.text
    assert "Run 2 running · worker-2" in page.text
    assert page.html.count('class="helix-bar-gone"') == 1


def test_what_a_dead_worker_spent_on_a_step_that_it_never_committed_is_shown(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    run = store.start_run("s", fencing_token=_take(browser, "worker-1"))
    _commit(browser, 1, run.run_id)
    _tool(browser, 2, run.run_id, "book")
    assert "Step 2 not committed yet" in _timeline(browser).text
    store.start_run("s", fencing_token=_take(browser, "worker-2"))
    page = _timeline(browser)
    assert "Step 2 never committed" in page.text
    assert _kinds(page) == ["run", "step", "step", "tool", "run"]


def test_a_step_has_its_model_tools_and_effects_with_durations_tokens_and_cost(browser: Browser) -> None:
    session = _store(browser).new_session("s", agent_type="a")
    with session.turn() as turn:
        turn.tokens(model="gpt-x", prompt=1_000, completion=200, cost_usd="0.25")
        turn.tool("find_flights", True, 1_500)
        with turn.effect("pay-1", tool_name="charge", input={"eur": 1}) as effect:
            effect.done()
        with turn.step() as step:
            step.say({"role": "user", "content": "hello"})
    page = _timeline(browser)
    assert sorted(_kinds(page)) == ["effect", "model", "run", "step", "tool"]
    assert re.search(r"find_flights tool .{0,120}1\.5 s", page.text), page.text
    assert re.search(r"gpt-x model .{0,120}≤ .{2,8} 1,200 tokens · \$0\.25", page.text), page.text
    assert "charge effect · done" in page.text
    assert page.text.count("1,200 tokens · $0.25") == 3  # the run, the step and the model


def test_a_model_call_with_a_duration_is_as_long_as_it_was(browser: Browser) -> None:
    session = _store(browser).new_session("s", agent_type="a")
    with session.turn() as turn:
        turn.tokens(model="gpt-x", prompt=1, duration=4_200)
        with turn.step() as step:
            step.say({"role": "user", "content": "hello"})
    text = _timeline(browser).text
    assert re.search(r"gpt-x model .{0,120} 4\.2 s 1 tokens?", text), text


def test_waits_say_who_has_decided_and_posts_where_they_were_received(browser: Browser) -> None:
    session = _store(browser).new_session("s", agent_type="a")
    with session.turn() as turn, turn.step() as step:
        step.ask_approval("call-1", "pay", {"eur": 5})
    store_of(browser.database).submit_tool_result(
        "s", "call-1", approval_id="call-1", approved=True, actor="the boss"
    )
    session.post({"role": "user", "content": "and quickly"}, author="ann")
    with session.turn() as turn, turn.step() as step:
        step.say({"role": "assistant", "content": "done"})
    page = _timeline(browser)
    assert "call-1 approved by “the boss”" in page.text
    assert "Post from ann" in page.text
    assert {"wait", "decision", "post"} <= set(_kinds(page))


def test_a_decision_in_the_millisecond_of_the_question_is_shown(browser: Browser) -> None:
    session = _store(browser).new_session("s", agent_type="a")
    with session.turn() as turn, turn.step() as step:
        step.ask_approval("call-1", "pay", {"eur": 5})
    store_of(browser.database).submit_tool_result("s", "call-1", approval_id="call-1", approved=True)
    decided_at = Decision.objects.using(browser.database.alias).get().decided_at
    ended_at = decided_at + timedelta(microseconds=400)
    Run.objects.using(browser.database.alias).update(started_at=decided_at, ended_at=ended_at)
    assert "call-1 approved" in _timeline(browser).text


def _with_failed_tool(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    run = store.start_run("s")
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": "find", "arguments": "{}"}}
        for number in (1, 2)
    ]
    _commit(browser, 1, run.run_id, {"role": "user", "content": "hello"})
    for success in (True, False):
        _tool(browser, 2, run.run_id, "find", success=success)
    _commit(
        browser,
        2,
        run.run_id,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "found it"},
        {"role": "tool", "tool_call_id": "c2", "content": "no such town"},
    )


def test_a_failed_tool_is_red_in_the_timeline_and_in_the_conversation(browser: Browser) -> None:
    _with_failed_tool(browser)
    page = _timeline(browser)
    assert "Step 2 n2 1 failed" in page.text
    assert page.html.count('class="helix-bar-fill helix-bar-bad"') == 1
    conversation = browser.page_of(row_of(browser), section="conversation")
    failed = conversation.html.partition('<div class="helix-call helix-call-failed">')[2]
    assert conversation.html.count("helix-call-failed") == 1
    assert "no such town" in failed
    assert "found it" not in failed


def test_the_number_of_failed_calls_leads_to_them_and_they_to_their_step(browser: Browser) -> None:
    _with_failed_tool(browser)
    usage = browser.page_of(row_of(browser), section="usage")
    (address,) = _links(usage, "failed=")
    failed = browser.open(address)
    assert "Failed calls" in failed.text
    (step,) = [url for url in _links(failed, "step=2") if "section=timeline" in url][:1]
    opened = browser.open(step)
    assert "no such town" in opened.text
    assert "No call has failed." in _timeline(browser, failed="another").text


def test_a_failed_call_of_a_sub_session_leads_to_the_sub_session(browser: Browser) -> None:
    store = store_of(browser.database)
    _with_failed_tool(browser)
    Session.objects.using(browser.database.alias).update(root_session_id="root", parent_session_id="root")
    store.create_session("root", agent_type="a")
    root = Session.objects.using(browser.database.alias).get(session_id="root")
    page = browser.page_of(root, section="timeline", failed="find")
    (address,) = _links(page, "step=2")
    assert f"/{row_of(browser).pk}/" in address
    assert "no such town" in browser.open(address).text


def test_a_step_opens_with_its_messages_and_what_it_has_changed(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    run = store.start_run("s")
    for number in (1, 2, 3):
        said = {"role": "user", "content": f"message {number}."}
        _commit(browser, number, run.run_id, said, place=f"town-{number}", kept=1)
    page = _timeline(browser)
    (address, *_more) = _links(page, "step=2")
    opened = browser.open(address)
    assert "s@step-2" in opened.text
    assert "message 2." in opened.text
    assert "message 1." not in opened.text
    assert "message 3." not in opened.text
    assert "/place" in opened.text
    assert "town-1" in opened.text
    assert "/kept" not in opened.text
    assert 'aria-expanded="true"' in opened.html
    first = _timeline(browser, step=1).text
    assert "/kept" in first
    closed = next(url for url in _links(opened, "run=1") if "until" in url)
    assert "message 2." not in browser.open(closed).text


def test_a_step_that_is_not_stored_says_so(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    run = store.start_run("s")
    _commit(browser, 1, run.run_id)
    for step in ("7", "9" * 14):
        page = _timeline(browser, step=step)
        assert f"Step {step} was not committed, or its checkpoint was deleted." in page.text
        assert "Step 1 n1" in page.text


def test_a_step_whose_predecessor_was_pruned_does_not_guess_its_changes(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    run = store.start_run("s")
    for number in (1, 2):
        _commit(browser, number, run.run_id, place=number)
    store.prune_checkpoints("s", keep=1)
    assert "The checkpoint before it was deleted" in _timeline(browser, step=2).text


def _long_session(browser: Browser, runs: int, steps: int) -> None:
    """Rows as the store writes them, but many at once."""
    store_of(browser.database).create_session("s", agent_type="a")
    session, alias = row_of(browser), browser.database.alias
    start = moments.now() - timedelta(hours=5)
    made: dict[Any, list[Any]] = {Run: [], Checkpoint: [], UsageEntry: []}
    number = 0
    for turn in range(1, runs + 1):
        run = {"session": session, "run_id": f"run-{turn}"}
        began = start + timedelta(seconds=2 * number)
        for _each in range(steps):
            number += 1
            at = start + timedelta(seconds=2 * number)
            made[Checkpoint].append(
                Checkpoint(
                    **run,
                    kind="step",
                    version=10 + number,
                    checkpoint_id=f"cpv1-s-s{number}-t1-abcdef",
                    source="step",
                    step_id=f"n{number}",
                    step_count=number,
                    payload="{}",
                    created_at=at,
                )
            )
            made[UsageEntry].append(
                UsageEntry(
                    **run,
                    tenant=session.tenant,
                    entry_id=f"entry-{number}",
                    recorded_for="s",
                    session_agent_type="a",
                    kind="tool",
                    tool_name="find",
                    success=number != 57,
                    duration_ms=100,
                    timestamp=at,
                    source_type="tool",
                    source_name="find",
                    step_count=number,
                )
            )
        made[Run].append(
            Run(**run, turn=turn, status="completed", step_count=number, started_at=began, ended_at=at)
        )
    for model, rows in made.items():
        model.objects.using(alias).bulk_create(rows)
    Session.objects.using(alias).filter(pk=session.pk).update(step_count=number, version=10 + number)


def test_step_57_of_a_thousand_has_one_address(browser: Browser) -> None:
    _long_session(browser, runs=20, steps=50)
    overview = _timeline(browser)
    assert _kinds(overview).count("run") == 12
    assert _kinds(overview).count("step") == 60
    assert "tool" not in _kinds(overview)
    page = _timeline(browser, step=57)
    assert _kinds(page).count("run") == 1
    assert 'id="step-57"' in page.html
    assert "Step 57 n57 1 failed" in page.text
    assert re.search(r"find tool failed", page.text)
    assert "Step 51 n51" in page.text
    assert "Step 77 n77" in page.text
    assert "Step 78 n78" not in page.text
    (later,) = set(_links(page, "until=137"))
    assert "Step 100 n100" in browser.open(later).text
    for shown in (overview, page):
        assert len(shown.statements) <= 24
        assert len(shown.html) < 130_000


def test_a_run_is_shown_alone_with_links_to_the_runs_beside_it(browser: Browser) -> None:
    _long_session(browser, runs=3, steps=4)
    page = _timeline(browser, run=2)
    assert _kinds(page).count("run") == 1
    assert "Step 5 n5" in page.text
    assert "Step 9 n9" not in page.text
    assert {"run=1", "run=3"} <= {url.rpartition("&")[2] for url in _links(page, "run=")}
    assert _kinds(_timeline(browser, run=99)).count("run") == 3


def test_all_runs_are_reached_page_by_page(browser: Browser) -> None:
    _long_session(browser, runs=30, steps=1)
    seen: list[str] = []
    page = _timeline(browser)
    while True:
        seen = re.findall(r"Run (\d+) completed", page.text) + seen
        before = _links(page, "before=")
        if not before:
            break
        page = browser.open(before[0])
    assert seen == [str(number) for number in range(1, 31)]


def test_a_user_sees_only_the_rows_that_the_user_may_view(visitor: Browser) -> None:
    session = _store(visitor).new_session("s", agent_type="a")
    with session.turn() as turn:
        turn.tokens(model="gpt-x", prompt=1_000, completion=200, cost_usd="0.25")
        with turn.step() as step:
            step.say({"role": "user", "content": "hello"})
    for codenames, kinds in (
        (["view_session", "view_run"], ["run"]),
        (["view_session", "view_run", "view_checkpoint"], ["run", "step"]),
        (["view_session", "view_run", "view_checkpoint", "view_usageentry"], ["run", "step", "model"]),
    ):
        visitor.sign_in(*Permission.objects.filter(codename__in=codenames))
        page = _timeline(visitor)
        assert _kinds(page) == kinds
        assert ("$0.25" in page.text) == ("model" in kinds)
        assert "hello" not in _timeline(visitor, step=1).text


@pytest.mark.parametrize("query", [{"run": "x"}, {"step": "-1"}, {"until": "0"}, {"before": "1"}])
def test_a_page_that_does_not_exist_shows_one_that_does(sqlite_browser: Browser, query: Any) -> None:
    _long_session(sqlite_browser, runs=2, steps=2)
    assert "run" in _kinds(_timeline(sqlite_browser, **query))


def test_a_living_worker_is_not_called_gone_by_the_clock_of_the_server(browser: Browser) -> None:
    store = _store(browser)
    store.new_session("s", agent_type="a")
    with store.session("s").turn(ttl=timedelta(seconds=30)), clock_of(3600):
        assert "its worker is gone" not in _timeline(browser).text


def test_a_run_is_not_abandoned_while_its_successor_takes_the_lock(browser: Browser) -> None:
    """The successor holds a newer token, and has not started its run yet: the session is not stuck either."""
    store = _store(browser)
    store.new_session("s", agent_type="a")
    with store.session("s").turn() as turn:
        assert turn.fencing_token is not None
        _take(browser, "successor")
        assert store.find_stuck() == []
        assert "its worker is gone" not in _timeline(browser).text
