"""The lookup matrix: a list of the admin answers the lookups of its own filters and links, and no other.

Each lookup that Django has for a column can be asked by an address. One that reaches the database tells
whether a hidden text begins with a letter, and a regular expression may keep the database busy for minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import pytest
from django.contrib import admin
from django.contrib.admin.exceptions import DisallowedModelAdminLookup
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.auth.models import User
from django.db.models import Field, JSONField, Model, Transform
from django.test import RequestFactory
from django.urls import reverse

from helix_store.admin.base import ReadOnlyAdmin
from helix_store.admin.elements import HIDDEN
from helix_store.admin.sections import SECTIONS
from helix_store.models import (
    Checkpoint,
    Message,
    Session,
)
from tests.admin.conftest import Browser, browser_on
from tests.admin.rows import MODELS, rows_of, write_session
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.security.admin_requests import address_of, statements

OWN_PARAMETERS: Final = {"q", "p", "e", "o", "all", "_facets", "_popup", "_to_field", "_changelist_filters"}
"""Parameters of every list, which are no lookups."""

REFUSED: Final = "refused"

APP_MODELS: Final = [
    model
    for model, page in admin.site._registry.items()
    if isinstance(page, ReadOnlyAdmin) and model._meta.app_label != Session._meta.app_label
]
"""The models of the frameworks' apps that have pages."""

SECRET: Final = "sk-recover-me"


@pytest.fixture
def browser(empty_db: CommittedDatabase) -> Iterator[Browser]:
    with browser_on(empty_db) as browser:
        browser.sign_in(superuser=True)
        yield browser


# --- The matrix -----------------------------------------------------------------------------------


def _endings(field: Field[Any, Any]) -> set[str]:
    """What may follow a column's name, by reflection: its lookups, its transforms, and their lookups."""
    endings = {""}
    for name, kind in field.get_lookups().items():
        endings.add(f"__{name}")
        if issubclass(kind, Transform):
            output = getattr(kind, "output_field", field)
            endings.update(f"__{name}__{after}" for after in {**kind.get_lookups(), **output.get_lookups()})
    if isinstance(field, JSONField):
        endings.update({"__key", "__0", "__key__contains", "__key__regex", "__key__isnull"})
    return endings


def _paths(model: type[Model], *, with_relations: bool = True) -> Iterator[tuple[str, Field[Any, Any]]]:
    """The columns of a model, and those one relation away in both directions."""
    for field in model._meta.get_fields():
        if field.concrete and isinstance(field, Field):
            yield field.name, field
            if field.attname != field.name:
                yield field.attname, field
            if field.primary_key:
                yield "pk", field
        if field.is_relation and with_relations and isinstance(field.related_model, type):
            for path, beyond in _paths(field.related_model, with_relations=False):
                yield f"{field.name}__{path}", beyond


def _all_lookups(model: type[Model]) -> list[str]:
    return sorted({path + ending for path, field in _paths(model) for ending in _endings(field)})


def _outcome(model: type[Model], lookup: str, value: str, user: User) -> str:
    """What the list of a model does with a lookup."""
    request = RequestFactory().get("/", {lookup: value})
    request.user = user
    try:
        admin.site.get_model_admin(model).get_changelist_instance(request)
    except (DisallowedModelAdminLookup, IncorrectLookupParameters):
        return REFUSED
    except Exception as error:  # noqa: BLE001  each lookup is tried, whatever the one before raised
        return type(error).__name__
    return "answered"


def _used_lookups(browser: Browser, session: Session) -> dict[type[Model], dict[str, str]]:
    """The lookups in the links of all pages, each with a value of such a link, by model."""
    used: dict[type[Model], dict[str, str]] = {model: {} for model in MODELS}
    lists = {address_of(model, "changelist"): model for model in MODELS}
    addresses = [
        *lists,
        *(address_of(row, "change", row.pk) for row in rows_of(session)),
        *(f"{address_of(session, 'change', session.pk)}?section={section.name}" for section in SECTIONS),
    ]
    for address in addresses:
        for tag, attributes in browser.open(address).elements.started:
            parts = urlsplit(attributes.get("href") or "")
            model = lists.get(parts.path or address)
            if tag == "a" and model is not None:
                used[model].update(
                    (name, value) for name, value in parse_qsl(parts.query) if name not in OWN_PARAMETERS
                )
    return used


def test_a_list_answers_the_lookups_of_its_own_links_and_refuses_all_others_before_any_statement(
    browser: Browser, security_counts: Counter[str]
) -> None:
    all_used = _used_lookups(browser, write_session(browser.database))
    user = browser.sign_in(superuser=True)
    for model, used in all_used.items():
        others = [lookup for lookup in _all_lookups(model) if lookup not in used]
        with statements(browser) as sent:
            outcomes = {lookup: _outcome(model, lookup, "1", user) for lookup in others}
        reached = {lookup: outcome for lookup, outcome in outcomes.items() if outcome != REFUSED}
        assert reached == {}, f"{model}: {len(reached)} of {len(others)} lookups are not refused"
        assert sent == []
        for lookup, value in used.items():
            assert browser.list_of(model, **{lookup: value}).status == 200, lookup
        security_counts["lookups of the admin, by reflection"] += len(others) + len(used)


def test_a_request_with_a_lookup_of_another_kind_is_answered_with_400(
    browser: Browser, security_counts: Counter[str]
) -> None:
    for model, used in _used_lookups(browser, write_session(browser.database)).items():
        kinds: dict[str, str] = {}
        for path, field in _paths(model):
            for ending in _endings(field):
                kinds.setdefault(ending, path + ending)
        refused = {*kinds.values(), "unknown", "un__known", "__", "a__" * 500}.difference(used)
        with statements(browser) as sent:
            answers = {lookup: browser.list_of(model, **{lookup: "1"}).status for lookup in refused}
        assert set(answers.values()) == {400}, (model, answers)
        assert sent == []
        security_counts["requests with lookups of the admin"] += len(answers)


@for_each("model", APP_MODELS)
def test_a_list_of_a_framework_answers_its_own_lookups_and_refuses_all_others_before_any_statement(
    browser: Browser, model: type[Model], security_counts: Counter[str]
) -> None:
    page: Any = admin.site.get_model_admin(model)
    filters = {getattr(each, "parameter_name", None) for each in page.list_filter} - {None}
    own = {*page.link_lookups, *filters}
    user = browser.sign_in(superuser=True)
    others = [lookup for lookup in _all_lookups(model) if lookup not in own]
    with statements(browser) as sent:
        outcomes = {lookup: _outcome(model, lookup, "1", user) for lookup in others}
    reached = {lookup: outcome for lookup, outcome in outcomes.items() if outcome != REFUSED}
    assert reached == {}, f"{len(reached)} of {len(others)} lookups are not refused"
    assert sent == []
    for lookup in page.link_lookups:
        assert browser.list_of(model, **{lookup: "1"}).status == 200, lookup
    security_counts["lookups of the admin, by reflection"] += len(others) + len(own)


# --- Values ---------------------------------------------------------------------------------------

VALUES: Final = {
    "NUL": "%00",
    "NUL inside": "a%00b",
    "not UTF-8": "%ff%fe",
    "too long": "x" * 100_000,
    "a pattern of SQLite that is too long": "%25" * 60_000,
    "text": "abc",
    "a huge integer": "1" + "0" * 30,
    "an integer that Python does not read": "9" * 5_000,
    "negative": "-1",
    "nothing": "",
    "broken regex": "%28%5B",
    "slow regex": "%5E%28a%2B%29%2B%24",
    "infinity": "inf",
    "digits of another script": "%EF%BC%91",
    "a date": "2026-99-99",
    "maybe": "maybe",
    "a list": "1,2,3",
}
SURROGATES: Final = {"charset=utf-7": "%2B2AA-", "charset=unicode-escape": "%5Cud800"}
"""Lone surrogates: the address is read in the character set that the request names."""

PARAMETERS: Final = (
    *("q", "p", "o", "e", "all", "_facets", "_popup", "_to_field", "_changelist_filters", "agent_type"),
    *("status__exact", "status__isnull", "tenant", "parent_session_id", "session__id__exact"),
    *("created_at__year", "updated_at__gte", "title__regex", "id__exact", "tags__contains"),
)


def _open(browser: Browser, path: str, query: str, **headers: str) -> int:
    return browser.client.get(f"{path}?{query}", **headers).status_code  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [Session, Message])
def test_no_value_of_any_parameter_breaks_a_list(
    browser: Browser,
    model: type[Model],
    monkeypatch: pytest.MonkeyPatch,
    security_counts: Counter[str],
) -> None:
    monkeypatch.setattr(ReadOnlyAdmin, "list_per_page", 1)
    for number in range(2):
        write_session(browser.database, f"row {number}")
    path = address_of(model, "changelist")
    for parameter in PARAMETERS:
        for value in VALUES.values():
            assert _open(browser, path, f"{parameter}={value}") in (200, 302, 400), (parameter, value[:99])
        for charset, value in SURROGATES.items():
            named = {"CONTENT_TYPE": f"text/plain; {charset}"}
            assert _open(browser, path, f"{parameter}={value}", **named) == 400, (parameter, charset)
        security_counts["hostile values for lists of the admin"] += len(VALUES) + len(SURROGATES)


def test_a_value_that_the_column_cannot_hold_reaches_no_table(browser: Browser) -> None:
    session = write_session(browser.database)
    impossible = [
        (Session, "status__exact", ["%00", "unknown", "active%00", ""]),
        (Session, "agent_type", ["%00", "x" * 256, "%ED%A0%80%00"]),
        (Session, "tenant", ["%00", "x" * 256]),
        (Session, "parent_session_id", ["%00", "x" * 100_000]),
        (Message, "session__id__exact", ["%00", "abc", "1" + "0" * 30, "9" * 5_000, "", "1.5", "maybe"]),
    ]
    with statements(browser) as sent:
        for model, lookup, values in impossible:
            for value in values:
                assert _open(browser, address_of(model, "changelist"), f"{lookup}={value}") == 302, (
                    lookup,
                    value,
                )
    assert sent == []
    assert browser.list_of(Message, session__id__exact=session.pk).row_count == 1


def test_a_lookup_that_is_given_many_times_reaches_no_table(browser: Browser) -> None:
    # SQLite refuses an expression of more than a thousand alternatives.
    write_session(browser.database)
    with statements(browser) as sent:
        assert (
            _open(browser, address_of(Session, "changelist"), "&".join(["status__exact=active"] * 1_000))
            == 302
        )
        assert _open(browser, address_of(Session, "changelist"), "agent_type=a&agent_type=b") == 302
    assert sent == []


def test_no_parameter_sorts_a_list(browser: Browser) -> None:
    write_session(browser.database)
    for model in MODELS:
        plain = browser.list_of(model)
        for order in ("1", "-1", "2.-3", "-4", "99", "x", "1" * 5_000, ".".join(["1"] * 5_000)):
            ordered = browser.list_of(model, o=order)
            assert ordered.status == 200
            assert _orders(ordered.statements) == _orders(plain.statements)


def _orders(statements: list[str]) -> list[str]:
    return [sql.partition(" ORDER BY ")[2] for sql in statements if " ORDER BY " in sql]


@for_each("term", ["x\x00", "\ud800", "%" * 60_000, "x" * 100_000])
def test_a_search_for_a_text_that_no_row_can_hold_finds_nothing(browser: Browser, term: str) -> None:
    write_session(browser.database)
    request = RequestFactory().get("/")
    sessions = Session.objects.using(browser.database.alias)
    found, _ = admin.site.get_model_admin(Session).get_search_results(request, sessions.all(), term)
    assert list(found) == []
    if term.isprintable():
        asked = {"app_label": "helix_store", "model_name": "message", "field_name": "session", "term": term}
        answer = browser.client.get(reverse("admin:autocomplete"), asked)
        assert answer.json()["results"] == []


def test_no_page_of_one_row_breaks_over_itsaddress(browser: Browser) -> None:
    for row in rows_of(write_session(browser.database)):
        for key in ("%00", "abc", "1" + "0" * 30, "9" * 5_000, "_2F", "..%2f", "-1", "%ff"):
            for view in ("change", "history", "delete"):
                path = address_of(row, view, "KEY").replace("KEY", key)
                assert browser.client.get(path).status_code in (302, 403, 404), path[:99]
        for view in ("change", "history"):
            path = address_of(row, view, row.pk)
            for query in ("_to_field=", "_to_field=id", "_to_field=payload", "_popup=", "p=-1", "p=%00"):
                assert _open(browser, path, query) in (200, 400), query
            assert _open(browser, path, f"_changelist_filters={VALUES['NUL inside']}") == 200
            for charset, value in SURROGATES.items():
                named = {"CONTENT_TYPE": f"text/plain; {charset}"}
                assert _open(browser, path, f"_changelist_filters={value}", **named) == 400


# --- Secrets --------------------------------------------------------------------------------------


def _session_with_secrets(database: CommittedDatabase) -> Session:
    session = write_session(database)
    secret = f'{{"api_key":"{SECRET}","trace_id":"shown"}}'
    Session.objects.using(database.alias).filter(pk=session.pk).update(tracing_context=secret)
    envelope = f'{{"agent_type":"a","status":"active","tracing_context":{secret}}}'
    Checkpoint.objects.using(database.alias).update(envelope=envelope)
    return session


@for_each(("model", "column"), [(Session, "tracing_context"), (Checkpoint, "envelope"), (Message, "payload")])
def test_a_hidden_text_is_not_found_by_guessing(
    browser: Browser, model: type[Model], column: str, security_counts: Counter[str]
) -> None:
    _session_with_secrets(browser.database)
    guesses = [SECRET[:length] + ending for length in range(1, len(SECRET)) for ending in ("", "~")]
    lookups = ["contains", "icontains", "startswith", "regex", "iregex", "gt", "lt", "exact", "in", "range"]
    with statements(browser) as sent:
        answers = {
            browser.list_of(model, **{f"{column}__{lookup}": guess}).status
            for guess in guesses
            for lookup in lookups
        }
    assert answers == {400}
    assert sent == []
    security_counts["guesses of hidden texts in the admin"] += len(guesses) * len(lookups)


def test_a_hidden_text_is_not_found_by_search_order_counts_or_errors(browser: Browser) -> None:
    session = _session_with_secrets(browser.database)
    asked = [
        {},
        {"q": SECRET[:5]},
        {"o": "1"},
        {"o": "tracing_context"},
        {"_facets": "True"},
        {"all": ""},
        {"_popup": "1", "_to_field": "id"},
        {"_to_field": "tracing_context"},
        {"p": SECRET[:5]},
        {"agent_type": SECRET[:5]},
        {"tracing_context__contains": SECRET[:3]},
    ]
    for model in MODELS:
        for query in asked:
            page = browser.list_of(model, **query)
            assert SECRET not in page.html, query
            if "q" in query and model is Session:
                assert page.row_count == 0
    _assert_hidden_on_every_page(browser, session)
    # The context itself is shown, without its secret.
    assert HIDDEN in browser.sections_of(session)["details"].html


def _assert_hidden_on_every_page(browser: Browser, session: Session) -> None:
    """Also on each section of the session, of which its page shows one at a time."""
    pages = {row._meta.model_name: browser.page_of(row) for row in rows_of(session)}
    pages |= browser.sections_of(session)
    assert {name: page.status for name, page in pages.items()} == dict.fromkeys(pages, 200)
    assert [name for name, page in pages.items() if SECRET in page.html] == []


@for_each("wrong", ['[{"tracing_context":{"api_key":"%s"}}]', '"%s"', '{"x":1}{"%s"'])
def test_a_hidden_text_in_a_document_of_another_shape_stays_hidden(browser: Browser, wrong: str) -> None:
    session = _session_with_secrets(browser.database)
    Checkpoint.objects.using(browser.database.alias).update(envelope=wrong % SECRET)
    Session.objects.using(browser.database.alias).update(tracing_context=wrong % SECRET)
    _assert_hidden_on_every_page(browser, session)
