"""The inbox of a session in the admin: its posts by state, the form to post, and the button to withdraw."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE
from django.contrib.auth.models import Permission
from django.db import connections
from django.test import RequestFactory
from django.test.utils import override_settings

from helix_store.actions.sessions import POST
from helix_store.admin.operating import run
from helix_store.models import Post
from helix_store.reports.session import session_report
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of
from tests.admin.test_operations import address, log_of, row_of, told
from tests.cells import for_each


def _inbox(browser: Browser, **query: Any) -> Page:
    return browser.page_of(row_of(browser), section="inbox", **query)


def _post(browser: Browser, text: str, **fields: Any) -> str:
    return store_of(browser.database).post_message("s", {"role": "user", "content": text}, **fields).post_id


def _sign_in(visitor: Browser, *codenames: str) -> None:
    known = Permission.objects.filter(codename__in=codenames, content_type__app_label="helix_store")
    assert known.count() == len(codenames)
    visitor.sign_in(*known)


@pytest.fixture(autouse=True)
def _session(visitor: Browser) -> None:
    store_of(visitor.database).create_session("s", agent_type="a")


def test_waiting_posts_come_in_order_and_others_keep_their_trace(browser: Browser) -> None:
    _post(browser, "later", not_before=datetime.now(UTC) + timedelta(hours=5, minutes=1), key="key-later")
    _post(browser, "taken", author="ada")
    withdrawn = _post(browser, "regretted", key="key-back")
    store_of(browser.database).withdraw_post("s", withdrawn)
    store_of(browser.database).receive_posts("s")
    _post(browser, "soon", author="grace")
    waiting, _, past = _inbox(browser).text.partition("Received and withdrawn posts")
    assert waiting.index("soon ") < waiting.index("later in 5 hours - key-later")
    assert "grace" in waiting
    assert re.search(r"withdrawn - - key-back \d seconds? ago", past)
    assert re.search(r"received \d seconds? ago 0 ada - \d seconds? ago", past)
    assert "regretted" not in waiting + past
    assert "taken" not in waiting + past


def test_the_page_and_the_report_of_a_session_show_the_same_waiting_posts(browser: Browser) -> None:
    store = store_of(browser.database)
    for number in range(30):
        _post(browser, f"post-{number:02}", not_before=datetime(2100, 1, 1 + number % 3, tzinfo=UTC))
    _post(browser, "broken")
    Post.objects.using(browser.database.alias).filter(sequence=31).update(payload="{")
    shown = session_report(store, "s", limit=25).waiting_posts
    assert shown is not None
    assert shown.total == 31
    assert [post.sequence for post in shown.items[:3]] == [31, 1, 4]
    page = _inbox(browser)
    assert "Waiting posts 31" in page.text
    texts = [post.text or "This message cannot be read." for post in shown.items]
    assert re.findall(r"post-\d\d|This message cannot be read\.", page.text) == texts


def test_an_operator_posts_a_message_in_the_own_name(browser: Browser) -> None:
    user = browser.sign_in(superuser=True)
    session = row_of(browser)
    assert told(browser, address(session, "post"), {"text": "Vegetarian."}) == [
        "Posted the message as number 1."
    ]
    (post,) = store_of(browser.database).list_posts("s").items
    assert (post.message, post.author) == ({"role": "user", "content": "Vegetarian."}, f"user:{user.pk}")
    assert post.not_before is None
    assert log_of(session) == [(CHANGE, "s", "Posted the message as number 1.")]


def _form_of(page: Page) -> dict[str, str]:
    """The hidden fields of the post form."""
    form = page.html.partition("/operation/post/")[2].partition("</form>")[0]
    names = ("key", "next")
    return {name: re.findall(rf'name="{name}" value="([^"]*)"', form)[0] for name in names}


def test_a_form_that_is_sent_twice_posts_once(browser: Browser) -> None:
    session, store = row_of(browser), store_of(browser.database)
    form = {**_form_of(_inbox(browser)), "text": "Vegetarian."}
    for _ in range(2):
        assert told(browser, address(session, "post"), form) == ["Posted the message as number 1."]
    (refusal,) = told(browser, address(session, "post"), {**form, "text": "Vegan."})
    assert "this form has already been sent with other values" in refusal
    (post,) = store.list_posts("s").items
    assert post.message == {"role": "user", "content": "Vegetarian."}
    assert post.key == form["key"]
    assert log_of(session) == [(CHANGE, "s", "Posted the message as number 1.")]
    told(browser, address(session, "post"), {**_form_of(_inbox(browser)), "text": "Vegetarian."})
    assert len(store.list_posts("s").items) == 2


def test_a_form_that_is_sent_several_times_at_once_is_logged_once(browser: Browser) -> None:
    user, session = browser.sign_in(superuser=True), row_of(browser)
    barrier = threading.Barrier(4, timeout=60)

    def send(_: int) -> str:
        request = RequestFactory().post("/")
        request.user = user
        try:
            barrier.wait()
            return str(
                run(request, POST, session, {"text": "Vegetarian.", "key": "form"}, expected="").message
            )
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(send, range(4))) == {"Posted the message as number 1."}
    assert log_of(session) == [(CHANGE, "s", "Posted the message as number 1.")]


def test_a_form_that_is_shown_again_keeps_its_key(browser: Browser) -> None:
    url, form = address(row_of(browser), "post"), {**_form_of(_inbox(browser)), "text": " "}
    again = browser.client.post(url, form).content.decode()
    assert f'name="key" value="{form["key"]}"' in again
    fresh = browser.client.get(url).content.decode()
    (key,) = re.findall(r'name="key" value="([^"]+)"', fresh)
    assert key != form["key"]
    assert fresh.count(key) == 1


@pytest.mark.parametrize("use_tz", [True, False])
def test_a_post_may_have_a_time_in_the_zone_of_the_page(browser: Browser, use_tz: bool) -> None:
    with override_settings(USE_TZ=use_tz, TIME_ZONE="Europe/Berlin"):
        assert "Not before (Europe/Berlin)" in _inbox(browser).text
        told(browser, address(row_of(browser), "post"), {"text": "x", "not_before": "2100-01-01T12:00"})
    (post,) = store_of(browser.database).list_posts("s").items
    assert post.not_before == datetime(2100, 1, 1, 11, tzinfo=UTC)


@for_each(
    "given",
    [
        {},
        {"text": "  "},
        {"text": "a\0b"},
        {"text": "x" * 100_001},
        {"text": "x", "not_before": "soon"},
    ],
)
def test_a_post_that_cannot_be_stored_is_shown_again(browser: Browser, given: dict[str, str]) -> None:
    response = browser.client.post(address(row_of(browser), "post"), given)
    assert response.status_code == 200
    assert "errorlist" in response.content.decode()
    assert not Post.objects.using(browser.database.alias).exists()


@for_each("at", ["0001-01-01T00:00", "9999-12-31T23:59"])
@for_each("zone", ["Asia/Tokyo", "America/Los_Angeles"])
def test_the_first_and_the_last_time_are_stored_or_refused_in_words(
    browser: Browser, at: str, zone: str
) -> None:
    with override_settings(TIME_ZONE=zone):
        response = browser.client.post(address(row_of(browser), "post"), {"text": "x", "not_before": at})
        assert response.status_code in (200, 302)
        assert _inbox(browser).status == 200


def test_a_waiting_post_is_withdrawn_once(browser: Browser) -> None:
    post_id, session = _post(browser, "regretted"), row_of(browser)
    url = address(session, "withdraw-post")
    assert told(browser, url, {"post_id": post_id}) == ["Withdrew the post."]
    (refusal,) = told(browser, url, {"post_id": post_id})
    assert "is no longer waiting" in refusal
    assert log_of(session) == [(CHANGE, "s", "Withdrew the post.")]
    assert "No post is waiting." in _inbox(browser).text


def test_a_session_that_has_ended_takes_no_posts_but_shows_them(browser: Browser) -> None:
    _post(browser, "too late")
    assert "/operation/post/" in _inbox(browser).html
    store_of(browser.database).update_status("s", "completed")
    page = _inbox(browser)
    assert "too late" in page.text
    assert "/operation/post/" not in page.html
    (refusal,) = told(browser, address(row_of(browser), "post"), {"text": "hello"})
    assert "completed" in refusal
    assert Post.objects.using(browser.database.alias).count() == 1


@for_each(
    ("codenames", "offered"),
    [((), set()), (("add_post",), {"post"}), (("change_post",), {"withdraw-post"})],
)
def test_posting_and_withdrawing_need_permissions_of_their_own(
    visitor: Browser, codenames: tuple[str, ...], offered: set[str]
) -> None:
    post_id, session = _post(visitor, "hello"), row_of(visitor)
    _sign_in(visitor, "view_session", "view_post", *codenames)
    page = _inbox(visitor)
    for name, given in (("post", {"text": "x"}), ("withdraw-post", {"post_id": post_id})):
        assert (f"/operation/{name}/" in page.html) is (name in offered)
        status = visitor.client.post(address(session, name), given).status_code
        assert status == (302 if name in offered else 403)


@pytest.mark.thorough
def test_pages_are_bounded_and_lead_to_every_post(browser: Browser) -> None:
    store = store_of(browser.database)
    _post(browser, "past-00", key="past-00")
    # Without messages, the page would look for the conversation of an adapter.
    store.receive_posts("s")
    few = len(_inbox(browser).statements)
    for number in range(1, 60):
        _post(browser, f"past-{number:02}", key=f"past-{number:02}")
    store.receive_posts("s")
    for number in range(60):
        _post(browser, f"wait-{number:02}", key=f"wait-{number:02}")
    for kind, way in (("wait", "waiting="), ("past", "before=")):
        names = [f"{kind}-{number:02}" for number in range(60)]
        seen: list[str] = []
        page = _inbox(browser)
        while True:
            assert len(page.statements) == few
            shown = [
                f"{kind}-{number:02}" for number in range(60) if f">{kind}-{number:02}</span>" in page.html
            ]
            assert 0 < len(shown) <= 25
            seen += shown
            links = [str(a.get("href")) for tag, a in page.elements.started if tag == "a"]
            onward = [each for each in links if way in each]
            if not onward:
                break
            page = browser.open(onward[0].partition("#")[0])
        assert sorted(seen) == names
