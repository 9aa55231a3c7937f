"""Ten questions of an operator, each answered within two clicks from the start page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import pytest
from django.contrib.auth.models import Permission
from django.test.utils import override_settings
from django.urls import reverse

from helix_store import Store
from helix_store.models import Session
from tests.admin.conftest import Browser, Page
from tests.admin.console import NoAnswer, fill_console
from tests.cells import for_each

_USAGE: Final = r"/usageentry/report/$"
_LIST: Final = r"/helix_store/session/$"

QUESTIONS: Final[list[tuple[str, list[str], str]]] = [
    ("why did it fail", [r"/{failed}/change/\?section=timeline"], r"the rate is not a number"),
    ("what does it cost", [_USAGE], r"By agent type .*writer \$28\.00"),
    ("what is stuck", [r"condition=crashed"], r"Writes a report"),
    ("what happened in step 57", [r"/{long}/change/\?section=timeline", r"step=57$"], r"of step 57\b"),
    ("who approved what", [_LIST, r"/{approved}/change/$"], r"pay_invoice .*approved .*the boss"),
    ("which tool is slow", [_USAGE], r"By tool .*search_flights 14 2 9\.0 s 9\.0 s read_file 14 2 20 ms"),
    ("which agent got dearer this week", [_USAGE], r"writer \$28\.00 \$7\.00 .*planner \$7\.00 \$7\.00"),
    ("who waits longest", [r"condition=waiting"], r"Books a trip .*Asks later"),
    ("what did this user get", [_LIST, r"\?user=mia%40example\.org$"], r"Says much .*Writes a report"),
    ("which build broke it", [], r"ValueError .*build-7"),
]  # fmt: skip
"""The question, the links to follow from the start page, and the answer on the last page."""


@pytest.fixture
def filled(browser: Browser) -> Iterator[tuple[Browser, dict[str, int]]]:
    with override_settings(HELIX_STORE={"BUILD": "build-7"}):
        keys = fill_console(browser.database)
        store = Store(browser.database.alias, tenant=browser.database.tenant)
        with store.new_session("later", agent_type="a", title="Asks later").step() as step:
            step.ask_approval("call-1", "pay", {})
        session = store.new_session("long", agent_type="a", title="Takes long")
        with suppress(NoAnswer), session.turn() as turn:
            for number in range(60):
                with turn.step() as step:
                    step.say({"role": "assistant", "content": f"message of step {number + 1}"})
            raise NoAnswer("after many steps")
        key = _key(browser, "long")
        yield browser, {**keys, "long": key, "failed": keys["failed-1"]}


def _key(browser: Browser, session_id: str) -> int:
    rows = Session.objects.using(browser.database.alias).filter(tenant=browser.database.tenant)
    return int(rows.get(session_id=session_id).pk)


def _follow(browser: Browser, address: str, page: Page, pattern: str) -> tuple[str, Page]:
    """Open the first link of a page whose address matches."""
    links = [str(a["href"]) for tag, a in page.elements.started if tag == "a" and a.get("href")]
    found = [each for each in links if re.search(pattern, each.partition("#")[0])]
    assert found, f"no link of {address} matches {pattern}"
    url = urlsplit(found[0])
    path = url.path or urlsplit(address).path
    return path, browser.open(path, **dict(parse_qsl(url.query)))


@pytest.mark.thorough
@for_each(("question", "clicks", "answer"), QUESTIONS, shared=True)
def test_a_question_is_answered_within_two_clicks(
    filled: tuple[Browser, dict[str, Any]], question: str, clicks: list[str], answer: str
) -> None:
    browser, keys = filled
    assert len(clicks) <= 2
    address = reverse("admin:app_list", args=["helix_store"])
    page = browser.open(address)
    for pattern in clicks:
        address, page = _follow(
            browser, address, page, re.sub(r"\{(\w+)\}", lambda m: str(keys[m[1]]), pattern)
        )
    assert page.status == 200
    assert re.search(answer, page.text), f"{question}: {page.text[-3000:]}"


def _search(browser: Browser, term: str) -> str:
    """Search in the list, and return where the answer leads, or nothing if it is the list."""
    response = browser.client.get(reverse("admin:helix_store_session_changelist"), {"q": term})
    assert response.status_code in {200, 302}
    return str(response.headers.get("Location", ""))


@pytest.mark.thorough
def test_a_search_on_the_start_page_opens_a_step(filled: tuple[Browser, dict[str, Any]]) -> None:
    browser, keys = filled
    start = browser.open(reverse("admin:app_list", args=["helix_store"]))
    (form,) = [a for tag, a in start.elements.started if tag == "form" and a.get("role") == "search"]
    assert form["action"] == reverse("admin:helix_store_session_changelist")
    assert form["method"] == "get"
    step = reverse("admin:helix_store_session_change", args=[keys["long"]]) + "?section=timeline&step=57"
    for term in ("long@step-57", " long@step-57 ", "lo@step-57"):
        address = _search(browser, term)
        assert address == f"{step}#step-57"
        assert re.search(r"of step 57\b", browser.open(step).text)


@pytest.mark.thorough
def test_a_search_that_names_no_single_step_lists_sessions(filled: tuple[Browser, dict[str, Any]]) -> None:
    browser, _keys = filled
    # Several ids begin with "failed", no session is called "nobody", and the others name no step.
    for term in (
        "failed@step-1",
        "nobody@step-1",
        "long@step-",
        "long@step-x",
        "@step-1",
        "long",
        f"long@step-{10**15}",
    ):
        assert _search(browser, term) == "", term


def test_a_search_for_a_session_whose_id_looks_like_a_step_lists_it(visitor: Browser) -> None:
    store = Store(visitor.database.alias, tenant=visitor.database.tenant)
    visitor.sign_in(*_permissions("view_session", "view_run", "view_checkpoint"))
    for session_id in ("s", "s@step-1"):
        with store.new_session(session_id, agent_type="a").turn() as turn, turn.step() as step:
            step.say({"role": "user", "content": "hello"})
        assert bool(_search(visitor, "s@step-1")) is (session_id == "s")
    assert "step=1" in _search(visitor, "s@step-1@step-1")


def test_the_search_for_a_step_needs_the_permissions_of_its_page(visitor: Browser) -> None:
    store = Store(visitor.database.alias, tenant=visitor.database.tenant)
    with store.new_session("s", agent_type="a").turn() as turn, turn.step() as step:
        step.say({"role": "user", "content": "hello"})
    visitor.sign_in(*_permissions("view_session", "view_run"))
    assert _search(visitor, "s@step-1") == ""
    visitor.sign_in(*_permissions("view_session", "view_run", "view_checkpoint"))
    assert "step=1" in _search(visitor, "s@step-1")
    visitor.sign_in(*_permissions("view_run", "view_checkpoint"))
    list_url = reverse("admin:helix_store_session_changelist")
    assert visitor.client.get(list_url, {"q": "s@step-1"}).status_code == 403


def _permissions(*codenames: str) -> list[Permission]:
    found = Permission.objects.filter(codename__in=codenames, content_type__app_label="helix_store")
    return list(found)
