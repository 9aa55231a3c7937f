"""Effects in the admin: the tile, the section of a session, and the decision about an unknown one."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import CHANGE
from django.contrib.auth.models import Permission
from django.urls import reverse

from helix_store.models import Effect
from tests.admin.conftest import Browser
from tests.admin.rows import store_of
from tests.admin.test_operations import address, log_of, row_of, told
from tests.cells import for_each


def _effect(browser: Browser, effect_id: str, outcome: str) -> None:
    with (
        store_of(browser.database)
        .session("s")
        .effect(effect_id, tool_name="refund", input={"amount": "<b>7</b>"}) as effect
    ):
        if outcome == "unknown":
            raise TimeoutError("no answer")
        effect.done({"receipt": "A-17"}) if outcome == "done" else effect.not_done("declined")


@pytest.fixture(autouse=True)
def _effects(visitor: Browser) -> None:
    store_of(visitor.database).create_session("s", agent_type="a", title="The trip")
    for outcome in ("done", "not_done"):
        _effect(visitor, f"call-{outcome}", outcome)
    with pytest.raises(TimeoutError):
        _effect(visitor, "call-unknown", "unknown")


def _sign_in(visitor: Browser, *codenames: str) -> None:
    known = Permission.objects.filter(codename__in=codenames, content_type__app_label="helix_store")
    assert known.count() == len(codenames)
    visitor.sign_in(*known)


def _section(browser: Browser, **query: Any) -> Any:
    return browser.page_of(row_of(browser), section="effects", **query)


def _state(browser: Browser) -> tuple[str, Any, list[str]]:
    effect = store_of(browser.database).list_effects("s").items[-1]
    return effect.state, effect.result, [each.partition(":")[0] for each in effect.actors]


def test_the_section_shows_what_was_called_and_what_came_of_it(browser: Browser) -> None:
    page = _section(browser)
    for shown in ("call-done", "call-not_done", "A-17", "declined", "TimeoutError", "no answer", "refund"):
        assert shown in page.text
    assert "&lt;b&gt;" in page.html
    assert "<b>7</b>" not in page.html
    (effect,) = store_of(browser.database).find_unknown_effects()
    assert effect.key in page.text
    assert page.html.count("It did not happen</button>") == 1


def test_older_effects_are_on_the_next_page(browser: Browser) -> None:
    for number in range(20):
        _effect(browser, f"more-{number:02}", "done")
    page = _section(browser)
    assert "more-19" in page.text
    assert "call-done" not in page.text
    assert "call-done" in _section(browser, before=3).text


def test_the_start_page_names_the_session(browser: Browser) -> None:
    page = browser.open(reverse("admin:app_list", args=["helix_store"]))
    assert "1 with an unknown effect" in page.text
    assert "effect unknown The trip" in page.text
    assert "section=effects" in page.html


@for_each(
    "given, expected",
    [
        ({"outcome": "done", "result": '{"receipt": 1}'}, ("done", {"receipt": 1}, ["user"])),
        ({"outcome": "done"}, ("done", None, ["user"])),
        ({"outcome": "not_done", "result": "ignored"}, ("not_done", None, ["user"])),
    ],
)
def test_an_unknown_effect_is_settled_once(
    browser: Browser, given: dict[str, str], expected: tuple[str, Any, list[str]]
) -> None:
    session = row_of(browser)
    form = {"effect_id": "call-unknown", **given}
    words = "it happened" if given["outcome"] == "done" else "it did not happen"
    assert told(browser, address(session, "settle"), form) == [f"'call-unknown': {words}."]
    assert _state(browser) == expected
    assert log_of(session) == [(CHANGE, "s", f"'call-unknown': {words}.")]
    assert told(browser, address(session, "settle"), form) == [
        "Nothing was done: the effect is decided already."
    ]
    assert len(log_of(session)) == 1


@for_each("result", ["{", '{"a": 1, "a": 2}', "A-17"])
def test_a_result_is_json(browser: Browser, result: str) -> None:
    form = {"effect_id": "call-unknown", "outcome": "done", "result": result}
    response = browser.client.post(address(row_of(browser), "settle"), form)
    assert response.status_code == 200
    assert "JSON" in response.content.decode()
    assert _state(browser)[0] == "unknown"


@for_each(
    "codenames, may_see, may_settle",
    [
        ((), False, False),
        (("view_session",), False, False),
        (("view_session", "view_effect", "change_session"), True, False),
        (("view_session", "view_effect", "settle_effect"), True, True),
    ],
)
def test_settling_has_its_own_permission(
    visitor: Browser, codenames: tuple[str, ...], may_see: bool, may_settle: bool
) -> None:
    _sign_in(visitor, *codenames)
    session = row_of(visitor)
    if "view_session" in codenames:
        page = _section(visitor)
        assert ("call-done" in page.text) is may_see
        assert ("It happened</button>" in page.html) is may_settle
    form = {"effect_id": "call-unknown", "outcome": "done"}
    response = visitor.client.post(address(session, "settle"), form)
    assert response.status_code == (302 if may_settle else 403)
    assert Effect.objects.using(visitor.database.alias).filter(state="unknown").count() == (not may_settle)
