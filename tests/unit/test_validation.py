"""Arguments: what is accepted is returned, what is refused is named and not shown."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helix_store.core import validation
from helix_store.core.limits import MAX_ID_BYTES, MAX_ID_CHARACTERS, MAX_REASON_BYTES
from helix_store.core.types import (
    RunStatus,
    SessionMode,
    SessionStatus,
)
from helix_store.exceptions import InvalidPayload, InvalidQuery, LimitExceeded
from tests.cells import for_each
from tests.strategies import SafeText, texts

# --- Identifiers and texts ------------------------------------------------------------------------

LEGAL_IDENTIFIERS = [
    "a",
    " ",
    "x" * 255,
    "\U0001f600" * 191,
    "€" * 255,
    "../../etc/passwd",
    "%00",
    "\u202egnp.exe",
    "\u00a0\u2028\u200b\ufeff\uffff\ue000",
    "e\u0301",
    "'; DROP TABLE session; --",
]
ILLEGAL_IDENTIFIERS = [
    "",
    "x" * 256,
    "\x00",
    "a\x00",
    "a\n",
    "\x1f",
    "\x7f",
    "\x80",
    "\x9f",
    "\ud800",
    "a\udfff",
    "\ud83d\ude00",
]
NOT_TEXT: list[Any] = [None, 1, True, b"bytes", ["a"], SafeText("x"), SessionStatus.ACTIVE]


@for_each("value", LEGAL_IDENTIFIERS)
def test_an_identifier_is_opaque(value: str) -> None:
    assert validation.identifier(value, "session_id") == value
    assert validation.optional_identifier(value, "session_id") == value
    assert validation.tenant(value) == value


@for_each("value", [*ILLEGAL_IDENTIFIERS, *NOT_TEXT])
def test_anything_else_is_no_identifier(value: Any) -> None:
    with pytest.raises(InvalidPayload) as caught:
        validation.identifier(value, "session_id")
    assert caught.value.path == "/session_id"


@given(texts(6))
def test_an_identifier_is_decided_by_length_and_unicode_category(value: str) -> None:
    is_legal = value != "" and not any(unicodedata.category(char) in ("Cc", "Cs") for char in value)
    try:
        accepted = validation.identifier(value, "session_id") == value
    except InvalidPayload:
        accepted = False
    assert accepted is is_legal


def test_an_optional_identifier_may_be_none_and_on_request_empty() -> None:
    assert validation.optional_identifier(None, "user_id") is None
    assert validation.optional_identifier("", "workspace_id", empty=True) == ""
    assert validation.optional_identifier("x", "workspace_id", empty=True) == "x"
    for value, empty in [("", False), (0, True), (SafeText(), True), ("\x00", True)]:
        with pytest.raises(InvalidPayload):
            validation.optional_identifier(value, "workspace_id", empty=empty)


def test_the_empty_tenant_is_a_tenant() -> None:
    assert validation.tenant("") == ""
    for value in [None, 0, SafeText(), "\x00", "x" * 256]:
        with pytest.raises(InvalidPayload):
            validation.tenant(value)


def test_text_may_be_empty_and_hold_control_characters() -> None:
    for value in ["", "a\n\tb\x7f", "x" * 100]:
        assert validation.text(value, "title", limit=100) == value
        assert validation.title(value) == value
    assert validation.title(None) is None


@pytest.mark.parametrize("letter", ["x", "é", "€", "\U0001f600"])
def test_text_is_limited_in_bytes(letter: str) -> None:
    longest = letter * (120 // len(letter.encode()))
    assert validation.text(longest, "title", limit=120) == longest
    with pytest.raises(LimitExceeded) as caught:
        validation.text(longest + "x", "title", limit=120)
    assert (caught.value.limit, caught.value.actual) == (120, 121)


@pytest.mark.parametrize("letter", ["x", "é", "€", "\U0001f600"])
def test_an_identifier_is_limited_in_characters_and_in_bytes(letter: str) -> None:
    longest = letter * min(MAX_ID_CHARACTERS, MAX_ID_BYTES // len(letter.encode()))
    assert validation.identifier(longest, "session_id") == longest
    with pytest.raises(InvalidPayload):
        validation.identifier(longest + letter, "session_id")


@given(reason=st.text(max_size=20), repeats=st.integers(1, 20_000))
@example(reason="\U0001f600", repeats=2_100)
@example(reason="€", repeats=2_731)
@example(reason="\x00\ud800", repeats=1)
def test_every_text_is_a_failure_reason_that_can_be_stored(reason: str, repeats: int) -> None:
    stored = validation.failure_reason(reason * repeats)
    assert stored is not None
    assert validation.reason(stored) == stored
    assert validation.failure_reason(stored) == stored
    fits = len((reason * repeats).encode("utf-8", "surrogatepass")) <= MAX_REASON_BYTES
    assert stored.endswith("(cut)") or fits or "\x00" in reason or "\ud800" in reason


@for_each("value", ["\x00", "\ud800", 1, b"x", SafeText("x")])
def test_text_holds_no_nul_and_no_lone_surrogates(value: Any) -> None:
    with pytest.raises(InvalidPayload) as caught:
        validation.title(value)
    assert caught.value.path == "/title"


# --- Numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1])
def test_whole_numbers_within_bounds_are_returned(value: int) -> None:
    assert validation.whole_number(value, "step_count") == value


@for_each("value", [-1, 2**63, True, False, 1.0, 1.5, float("nan"), "1", None, 10**4_000])
def test_anything_else_is_no_whole_number(value: Any) -> None:
    with pytest.raises(InvalidPayload) as caught:
        validation.whole_number(value, "step_count")
    assert caught.value.path == "/step_count"


def test_bounds_of_a_whole_number_are_inclusive() -> None:
    assert [validation.whole_number(value, "ttl_ms", minimum=5, maximum=7) for value in (5, 6, 7)] == [
        5,
        6,
        7,
    ]
    for value in (4, 8):
        with pytest.raises(InvalidPayload):
            validation.whole_number(value, "ttl_ms", minimum=5, maximum=7)


# --- Times ----------------------------------------------------------------------------------------

END_OF_TIME = 253_402_300_799_999


@for_each("value", [0, 1, 10**8 - 1, 10**11, 1_767_225_600_000, END_OF_TIME])
def test_epoch_milliseconds_are_returned(value: int) -> None:
    assert validation.epoch_milliseconds(value, "expires_at") == value


@for_each("value", [-1, END_OF_TIME + 1, 10**18, True, 1.5e12, "1767225600000", None])
def test_anything_else_is_no_epoch_milliseconds(value: Any) -> None:
    with pytest.raises(InvalidPayload) as caught:
        validation.epoch_milliseconds(value, "expires_at")
    assert caught.value.path == "/expires_at"


@pytest.mark.parametrize("value", [10**8, 1_767_225_600, 10**11 - 1])
def test_epoch_seconds_are_recognised(value: int) -> None:
    with pytest.raises(InvalidPayload, match="seconds"):
        validation.epoch_milliseconds(value, "expires_at")


@given(st.integers(0, END_OF_TIME))
def test_milliseconds_survive_the_way_through_a_datetime(milliseconds: int) -> None:
    moment = validation.milliseconds_to_datetime(milliseconds)
    assert moment.tzinfo is UTC
    assert validation.datetime_to_milliseconds(moment) == milliseconds


def test_milliseconds_are_exact_at_both_ends() -> None:
    assert validation.milliseconds_to_datetime(0) == datetime(1970, 1, 1, tzinfo=UTC)
    last = datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
    assert validation.milliseconds_to_datetime(END_OF_TIME) == last
    assert validation.datetime_to_milliseconds(last + timedelta(microseconds=999)) == END_OF_TIME


def test_a_datetime_in_another_zone_is_the_same_moment() -> None:
    moment = datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert validation.datetime_to_milliseconds(moment) == 1_767_225_600_000


def test_a_filter_takes_aware_datetimes_and_milliseconds() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    assert validation.aware_datetime(moment, "date_from") == moment
    assert validation.aware_datetime(1_767_225_600_000, "date_from") == moment


@for_each(
    "value",
    [
        datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None),
        date(2026, 1, 1),
        -1,
        1_767_225_600,
        True,
        1.5,
        "2026-01-01",
        None,
    ],
)
def test_a_filter_takes_no_other_times(value: Any) -> None:
    with pytest.raises(InvalidQuery) as caught:
        validation.aware_datetime(value, "date_from")
    assert caught.value.attributes == {"path": "/date_from"}


# --- Enumerations ---------------------------------------------------------------------------------


@for_each("status", SessionStatus)
def test_a_member_is_known_by_itself_and_by_its_text(status: SessionStatus) -> None:
    assert validation.enum(SessionStatus, status, "status") is status
    assert validation.enum(SessionStatus, status.value, "status") is status


@for_each("value", ["nope", "ACTIVE", "", None, 1, [], {}, RunStatus.RUNNING, SafeText("active")])
def test_an_unknown_member_is_refused_with_what_is_allowed(value: Any) -> None:
    with pytest.raises(InvalidPayload) as caught:
        validation.enum(SessionMode, value, "mode")
    assert caught.value.path == "/mode"
    assert caught.value.reason == "expected one of standard, persistent"


@pytest.mark.parametrize("collection", [list, tuple, set, frozenset])
def test_statuses_are_a_collection(collection: Callable[[Any], Any]) -> None:
    expected = {SessionStatus.ACTIVE, SessionStatus.PAUSED}
    assert validation.statuses(collection(["active", SessionStatus.PAUSED]), "expected") == expected
    assert validation.statuses(collection([]), "expected") == frozenset()


@for_each(
    "value",
    ["active", SessionStatus.ACTIVE, b"active", None, 1, {"active": 1}, ["nope"], [["active"]], [None]],
)
def test_anything_else_is_no_collection_of_statuses(value: Any) -> None:
    with pytest.raises(InvalidPayload) as caught:
        validation.statuses(value, "expected")
    assert caught.value.path == "/expected"


# --- Pages ----------------------------------------------------------------------------------------


def test_a_page_is_clamped_to_the_largest() -> None:
    assert [validation.page_limit(limit) for limit in (1, 50, 200, 201, 10**9)] == [1, 50, 200, 200, 200]
    assert validation.page_limit(1_000, maximum=500) == 500


@for_each("limit", [0, -1, None, True, 1.0, "10"])
def test_a_page_holds_at_least_one(limit: Any) -> None:
    with pytest.raises(InvalidQuery):
        validation.page_limit(limit)


def test_an_offset_counts_from_zero() -> None:
    assert [validation.page_offset(offset) for offset in (0, 1, 2**63 - 1)] == [0, 1, 2**63 - 1]


@for_each("offset", [-1, 2**63, None, True, 0.0, "0"])
def test_anything_else_is_no_offset(offset: Any) -> None:
    with pytest.raises(InvalidQuery):
        validation.page_offset(offset)


# --- Messages -------------------------------------------------------------------------------------


def test_a_message_has_a_role_and_anything_else() -> None:
    value = {"content": [1], "role": "tool", "\x00": None}
    assert validation.messages([value]) == [value["role"]]


@for_each(
    ("value", "path"),
    [
        (None, "/messages/7"),
        ("text", "/messages/7"),
        ([("role", "user")], "/messages/7"),
        ({}, "/messages/7"),
        ({"Role": "user"}, "/messages/7"),
        ({"role": None}, "/messages/7/role"),
        ({"role": ""}, "/messages/7/role"),
        ({"role": "us\x00er"}, "/messages/7/role"),
        ({"role": ["user"]}, "/messages/7/role"),
    ],
)
def test_anything_else_is_no_message(value: Any, path: str) -> None:
    with pytest.raises(InvalidPayload) as caught:
        validation.messages([{"role": "user"}] * 7 + [value])
    assert caught.value.path == path


def test_a_refusal_shows_no_argument() -> None:
    secret = "s3cr3t-canary"
    attempts: list[Callable[[], object]] = [
        lambda: validation.identifier(secret + "\x00", "session_id"),
        lambda: validation.identifier(secret * 100, "session_id"),
        lambda: validation.title(secret + "\x00"),
        lambda: validation.whole_number(secret, "step_count"),
        lambda: validation.epoch_milliseconds(secret, "expires_at"),
        lambda: validation.enum(SessionStatus, secret, "status"),
        lambda: validation.statuses(secret, "expected"),
        lambda: validation.messages([{"role": secret + "\n"}]),
        lambda: validation.aware_datetime(secret, "date_from"),
        lambda: validation.page_limit(secret),
    ]
    for attempt in attempts:
        with pytest.raises((InvalidPayload, InvalidQuery)) as caught:
            attempt()
        assert secret not in f"{caught.value!s}{caught.value!r}{caught.value.to_dict()}"
