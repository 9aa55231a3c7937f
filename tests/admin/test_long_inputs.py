"""Nobody approves the input of a call that no page has shown to its end."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest

from helix_store.admin.sections import waits
from helix_store.core.types import RunStatus
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of
from tests.admin.test_operations import address, row_of, shown_digest, told, waiting_session
from tests.cells import for_each

GIVEN = {"call": "call-1", "approval": "approval-1", "answer": "approve"}
APPROVE = 'value="approve"'
LONG = {"script": ["line " * 20] * 600, "last": "rm -rf everything"}


def _waits(browser: Browser, **query: Any) -> Page:
    return browser.page_of(row_of(browser), section="waits", **query)


def _ask(browser: Browser, value: Any) -> None:
    waiting_session(browser, approval_id="approval-1", input=value)


def _link(page: Page, words: str) -> str:
    return unescape(re.findall(rf'<a href="([^"]*)">{words}', page.html)[0])


def _answers(browser: Browser) -> Any:
    return store_of(browser.database).take_tool_results("s")


def _nested(depth: int) -> Any:
    value: Any = "innermost"
    for _ in range(depth):
        value = {"k": value}
    return value


@pytest.mark.thorough
@for_each(
    ("value", "last"),
    [
        ({"body": "x" * 2_000 + "THE-END"}, "THE-END"),
        ([f"item-{number}" for number in range(400)], "item-399"),
        ({f"key-{number}": number for number in range(400)}, "key-399"),
        ({"k" * 400 + "THE-END": 1}, "THE-END"),
        (_nested(60), "innermost"),
        ("first\u202elast", "\\u202elast"),
    ],
)
def test_an_input_that_can_be_approved_is_shown_whole_and_unfolded(
    browser: Browser, value: Any, last: str
) -> None:
    _ask(browser, value)
    page = _waits(browser)
    assert APPROVE in page.html
    assert last in page.text
    section = page.html.partition('id="section"')[2]
    assert "<details>" not in section.partition("helix-answer")[0]
    assert "…" not in section.partition("helix-answer")[0]


def test_a_long_input_is_approved_at_the_end_of_its_last_part(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "_PART", 30_000)
    _ask(browser, LONG)
    page = _waits(browser)
    assert APPROVE not in page.html
    assert 'value="reject"' in page.html
    page = browser.open(_link(page, "Read it from its beginning."))
    read = ""
    for number in (1, 2, 3):
        assert f"Part {number} of 3" in page.text
        assert (APPROVE in page.html) is (number == 3)
        read += re.findall(r'<pre class="helix-code helix-whole">(.*?)</pre>', page.html, re.DOTALL)[0]
        if number < 3:
            page = browser.open(_link(page, "Next part"))
    assert read.count("line " * 20) == 600
    assert "rm -rf everything" in read
    (mark,) = re.findall(r'name="shown" value="([^"]+)"', page.html)
    given = {**GIVEN, "shown": mark, "digest": shown_digest(browser)}
    assert told(browser, address(row_of(browser), "answer"), given) == ["'call-1': approved."]
    assert _answers(browser)["call-1"]["approved"] is True


def test_an_approval_of_a_long_input_needs_the_mark_of_its_last_part(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "_PART", 30_000)
    _ask(browser, LONG)
    page = browser.open(_link(_waits(browser), "Read it from its beginning."))
    assert 'name="shown" value=""' in page.html
    for mark in ("", "forged"):
        given = {**GIVEN, "shown": mark, "digest": shown_digest(browser)}
        (refusal,) = told(browser, address(row_of(browser), "answer"), given)
        assert "have not read it to its end" in refusal
    assert _answers(browser) == {}
    given = {**GIVEN, "answer": "reject", "digest": shown_digest(browser)}
    assert told(browser, address(row_of(browser), "answer"), given) == ["'call-1': rejected."]


def test_the_mark_of_a_user_and_an_input_serves_no_other(browser: Browser) -> None:
    _ask(browser, LONG)
    page = browser.open(_link(_waits(browser), "Read it from its beginning."))
    (mark,) = re.findall(r'name="shown" value="([^"]+)"', page.html)
    assert APPROVE in page.html
    store = store_of(browser.database)
    state = store.load_state("s")
    assert state is not None
    state.pending_client_tool_calls["call-1"]["input"]["last"] = "something else"
    store.save_state("s", state)
    (refusal,) = told(browser, address(row_of(browser), "answer"), {**GIVEN, "shown": mark})
    assert "it has changed" in refusal
    page = browser.open(_link(_waits(browser), "Read it from its beginning."))
    (mark,) = re.findall(r'name="shown" value="([^"]+)"', page.html)
    browser.sign_in(superuser=True)
    (refusal,) = told(browser, address(row_of(browser), "answer"), {**GIVEN, "shown": mark})
    assert "have not read it to its end" in refusal


def test_a_column_of_calls_that_is_too_long_for_a_page_can_be_answered(browser: Browser) -> None:
    _ask(browser, {"body": "x" * 150_000})
    store = store_of(browser.database)
    calls = {"call-2": {"tool_name": "other", "input": {"body": "y" * 150_000}, "approval_id": "b"}}
    store.add_pending_tool_calls("s", calls)
    page = _waits(browser)
    assert len(page.html) < 60_000
    page = browser.open(_link(page, "Read it from its beginning."))
    page = browser.open(_link(page, "Next part"))
    assert APPROVE in page.html


def test_many_calls_are_shown_up_to_a_bound_and_the_others_have_pages_of_their_own(browser: Browser) -> None:
    calls = {f"call-{n}": {"tool_name": "t", "input": "x" * 19_000, "approval_id": "a"} for n in range(20)}
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    store.suspend("s", kind=RunStatus.SUSPENDED_CLIENT_TOOL, context={}, pending=calls)
    page = _waits(browser)
    assert page.html.count(APPROVE) == 3
    assert len(page.html) < 150_000
    assert APPROVE in browser.open(_link(page, "Read it from its beginning.")).html


def test_a_call_of_a_session_below_is_approved_on_its_own_page(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    store.create_session("below", agent_type="a", parent_session_id="s")
    call = {"tool_name": "t", "input": LONG, "approval_id": "approval-1"}
    store.add_pending_tool_calls("below", {"call-1": call})
    (refusal,) = told(browser, address(row_of(browser), "answer"), GIVEN)
    assert "no longer waits for this call" in refusal
    assert store.take_tool_results("below") == {}
