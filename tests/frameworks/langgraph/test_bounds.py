"""What one call of the saver or the store may hold: a typed error before any statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test.utils import CaptureQueriesContext
from langgraph.store.base import ListNamespacesOp, MatchCondition

from helix_store.contrib.langgraph import DjangoSaver, DjangoStore
from helix_store.exceptions import HelixStoreError, InvalidPayload, InvalidQuery, LimitExceeded
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.graphs import config_of, put

MIB = 1024 * 1024
LARGE = b"x" * (7 * MIB)
"""One value, within the limit of a single one. Ten of them are more than a call may store."""
DEEP: list[Any] = []
for _ in range(5_000):
    DEEP = [DEEP]


@pytest.fixture
def saver(committed_db: CommittedDatabase) -> DjangoSaver:
    return DjangoSaver(committed_db.alias, tenant=committed_db.tenant)


TOO_MUCH: dict[str, tuple[Callable[[DjangoSaver], Any], str]] = {
    "bytes of a put": (
        lambda saver: put(saver, config_of("thread"), {str(number): LARGE for number in range(10)}),
        "bytes in one call",
    ),
    "channels of a put": (
        lambda saver: put(saver, config_of("thread"), {str(number): [] for number in range(100_001)}),
        "items in channel_values",
    ),
    "bytes of writes": (
        lambda saver: saver.put_writes(
            config_of("thread", "checkpoint"), [(str(number), LARGE) for number in range(10)], "task"
        ),
        "bytes in one call",
    ),
    "writes of a task": (
        lambda saver: saver.put_writes(config_of("thread", "checkpoint"), [("c", 1)] * 100_001, "task"),
        "items in writes",
    ),
    "names of the channels of writes": (
        lambda saver: saver.put_writes(
            config_of("thread", "checkpoint"), [("c" * 850, None)] * 90_000, "task"
        ),
        "bytes in one call",
    ),
    "channels of a history": (
        lambda saver: saver.get_delta_channel_history(config=config_of("thread"), channels=["c"] * 100_001),
        "items in channels",
    ),
}


@pytest.mark.thorough
@for_each(("call", "name"), TOO_MUCH.values(), ids=TOO_MUCH.keys(), shared=True)
def test_more_than_a_call_may_hold_is_refused_before_sql(
    saver: DjangoSaver, committed_db: CommittedDatabase, call: Callable[[DjangoSaver], Any], name: str
) -> None:
    with CaptureQueriesContext(committed_db.connection) as captured, pytest.raises(LimitExceeded) as refused:
        call(saver)
    assert refused.value.name == name
    assert captured.captured_queries == []


def test_values_that_are_together_larger_than_one_may_be_are_stored(saver: DjangoSaver) -> None:
    stored = put(saver, config_of("thread"), {str(number): LARGE for number in range(2)})
    found = saver.get_tuple(stored)
    assert found is not None
    assert sum(map(len, found.checkpoint["channel_values"].values())) == 2 * len(LARGE)


WRONG: dict[str, Callable[[DjangoSaver], Any]] = {
    "a deep value": lambda saver: put(saver, config_of("thread"), {"channel": DEEP}),
    "a value without a form": lambda saver: put(saver, config_of("thread"), {"channel": [object()]}),
    "deep metadata": lambda saver: put(saver, config_of("thread"), {}, extra=DEEP),
    "a deep write": lambda saver: saver.put_writes(config_of("thread", "c"), [("channel", DEEP)], "task"),
    "a number of a filter": lambda saver: list(saver.list(None, filter={"extra": 10**5_000})),
    "a limit": lambda saver: list(saver.list(None, limit="many")),  # type: ignore[arg-type]
    "a channel": lambda saver: saver.get_delta_channel_history(
        config=config_of("thread"),
        channels=[object()],  # type: ignore[list-item]
    ),
}


@for_each("call", WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_written_or_compared_is_refused_before_sql(
    saver: DjangoSaver, committed_db: CommittedDatabase, call: Callable[[DjangoSaver], Any]
) -> None:
    with (
        CaptureQueriesContext(committed_db.connection) as captured,
        pytest.raises((InvalidPayload, InvalidQuery)),
    ):
        call(saver)
    assert captured.captured_queries == []


# --- Long-term memory ------------------------------------------------------------------------------


def test_a_filter_of_many_fields_is_compared_whole(committed_db: CommittedDatabase) -> None:
    """SQLite refuses a condition of more than 1,000 parts."""
    store = DjangoStore(using=committed_db.alias, tenant=committed_db.tenant)
    fields = {f"field {number}": "x" for number in range(1_500)}
    store.put(("users",), "same", fields)
    store.put(("users",), "other", {**fields, "field 1499": "y"})
    assert [item.key for item in store.search(("users",), filter=fields)] == ["same"]


def test_a_list_of_namespaces_takes_a_hundred_conditions(committed_db: CommittedDatabase) -> None:
    store = DjangoStore(using=committed_db.alias, tenant=committed_db.tenant)
    store.put(("a", "b"), "key", {})

    def listed(count: int) -> Any:
        conditions = (MatchCondition("prefix", ("a", "*")),) * count
        return store.batch([ListNamespacesOp(match_conditions=conditions)])

    assert listed(100) == [[("a", "b")]]
    with (
        CaptureQueriesContext(committed_db.connection) as captured,
        pytest.raises(HelixStoreError) as refused,
    ):
        listed(101)
    assert type(refused.value) is InvalidQuery
    assert captured.captured_queries == []
