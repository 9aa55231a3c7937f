"""The items of a session in lanes, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from helix_store import DatabaseLockManager, DatabaseStateStore
from helix_store.core import moments
from helix_store.exceptions import (
    ConflictError,
    FencedOutError,
    IntegrityFault,
    InvalidPayload,
    InvalidQuery,
    LimitExceeded,
)
from helix_store.items import ItemLog
from helix_store.models import Item, Session
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.processes import run_in_threads

EXACT = [
    {"b": 1, "a": [True, None, 1.0, -0.0, 10**40]},
    "\x00 and \ud800",
    "\ud83d" + "\ude00",
    1e308,
    None,
    {"nested": {"": "😀"}},
]


@pytest.fixture
def log(committed_db: CommittedDatabase) -> ItemLog:
    return log_of(committed_db)


def log_of(db: CommittedDatabase, lane: str = "", session_id: str = "session") -> ItemLog:
    return ItemLog(session_id, lane, using=db.alias, tenant=db.tenant)


def payloads(log: ItemLog, **filters: Any) -> list[Any]:
    return [item.payload for item in log.tail(**filters)]


# --- Append and tail -------------------------------------------------------------------------------


def test_items_come_back_in_order_and_exactly(log: ItemLog) -> None:
    assert log.append(EXACT[:2]) == 2
    assert log.append(EXACT[2:]) == 4
    assert repr(payloads(log)) == repr(EXACT)
    assert log.count() == 6


def test_the_first_item_creates_the_session(log: ItemLog, committed_db: CommittedDatabase) -> None:
    assert log.tail() == []
    log.append([1])
    store = DatabaseStateStore(using=committed_db.alias, tenant=committed_db.tenant)
    state = store.load_state("session")
    assert state is not None
    assert state.agent_type == "items"


def test_no_items_create_no_session(log: ItemLog, committed_db: CommittedDatabase) -> None:
    assert log.append([]) == 0
    assert log.replace_suffix([], [])
    assert not log.replace_suffix([1], [2])
    store = DatabaseStateStore(using=committed_db.alias, tenant=committed_db.tenant)
    assert store.load_state("session") is None


def test_items_belong_to_a_session_that_exists(log: ItemLog, committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(using=committed_db.alias, tenant=committed_db.tenant)
    store.create_session("session", agent_type="own")
    log.append([1])
    state = store.load_state("session")
    assert state is not None
    assert state.agent_type == "own"
    store.delete_session("session")
    assert log.tail() == []


def test_a_limit_takes_the_newest_and_before_goes_on(log: ItemLog) -> None:
    log.append(range(10))
    page = log.tail(4)
    assert [item.payload for item in page] == [6, 7, 8, 9]
    assert payloads(log, limit=4, before=page[0].position) == [2, 3, 4, 5]
    assert payloads(log, limit=0) == []


def test_an_item_knows_when_it_was_added(log: ItemLog) -> None:
    before = moments.now()
    log.append([1])
    (item,) = log.tail()
    assert before <= item.created_at <= moments.now()


def test_more_items_than_one_statement_takes_keep_their_order(log: ItemLog) -> None:
    assert log.append(range(2_500)) == 2_500
    assert payloads(log) == list(range(2_500))


def test_an_item_is_a_write_of_its_session(log: ItemLog, committed_db: CommittedDatabase) -> None:
    log.append([1])
    rows = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    (first,) = rows.values_list("updated_at", flat=True)
    log.append([2])
    (second,) = rows.values_list("updated_at", flat=True)
    assert second > first


# --- Keys ------------------------------------------------------------------------------------------


def test_a_repeat_adds_only_the_items_whose_key_is_new(log: ItemLog) -> None:
    assert log.append(["a", "b", "no key"], keys=["1", "2", None]) == 3
    assert log.append(["other", "c", "no key"], keys=["2", "3", None]) == 2
    assert payloads(log) == ["a", "b", "no key", "c", "no key"]


def test_a_key_within_one_call_counts_once(log: ItemLog) -> None:
    assert log.append(["first", "second"], keys=["1", "1"]) == 1
    assert payloads(log) == ["first"]


def test_put_replaces_in_place_or_adds_at_the_end(log: ItemLog) -> None:
    log.append(["a", "b"], keys=["1", "2"])
    log.put("1", "changed")
    log.put("3", "new")
    assert payloads(log) == ["changed", "b", "new"]


def test_get_finds_an_item_by_its_key(log: ItemLog) -> None:
    log.append(["a"], keys=["1"])
    found = log.get("1")
    assert found is not None
    assert (found.key, found.payload) == ("1", "a")
    assert log.get("2") is None


# --- Pop -------------------------------------------------------------------------------------------


def test_pop_takes_the_newest(log: ItemLog) -> None:
    log.append(["a", "b"])
    assert [item and item.payload for item in (log.pop(), log.pop(), log.pop())] == ["b", "a", None]


def test_pop_in_an_unknown_session_creates_none(log: ItemLog, committed_db: CommittedDatabase) -> None:
    assert log.pop() is None
    assert not Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()


def test_pop_deletes_what_validate_refuses(log: ItemLog) -> None:
    log.append([0, "good", *([1] * 250), "bad"])
    asked = []

    def validate(payload: Any) -> bool:
        asked.append(payload)
        return {"good": True, 1: False, "bad": False}[payload]

    popped = log.pop(validate)
    assert popped is not None
    assert popped.payload == "good"
    assert asked == ["bad", *([1] * 250), "good"]
    assert payloads(log) == [0]


def test_an_error_of_validate_deletes_nothing(log: ItemLog) -> None:
    log.append([1, 0, 0])
    with pytest.raises(ZeroDivisionError):
        log.pop(lambda payload: payload == 0 and 1 // payload)
    assert payloads(log) == [1, 0, 0]


def test_pop_deletes_all_when_nothing_is_accepted(log: ItemLog) -> None:
    log.append(range(150))
    assert log.pop(lambda _: False) is None
    assert log.count() == 0


def test_pop_passes_over_an_item_that_cannot_be_read(log: ItemLog, committed_db: CommittedDatabase) -> None:
    log.append(["good", "bad"])
    damage(committed_db, "bad")
    popped = log.pop()
    assert popped is not None
    assert popped.payload == "good"
    assert log.count() == 0


def test_an_item_that_cannot_be_read_is_an_error_unless_it_is_skipped(
    log: ItemLog, committed_db: CommittedDatabase
) -> None:
    log.append(["good", "bad"])
    damage(committed_db, "bad")
    with pytest.raises(IntegrityFault):
        log.tail()
    assert payloads(log, skip_unreadable=True) == ["good"]


def damage(db: CommittedDatabase, payload: str) -> None:
    rows = Item._base_manager.using(db.alias).filter(session__tenant=db.tenant, payload=f'"{payload}"')
    assert rows.update(payload="{") == 1


# --- Replace, clear, lanes -------------------------------------------------------------------------


def test_a_suffix_is_replaced_when_it_is_as_expected(log: ItemLog) -> None:
    log.append([{"n": n} for n in range(5)])
    assert log.replace_suffix([{"n": 3}, {"n": 4}], ["summary"])
    assert payloads(log) == [{"n": 0}, {"n": 1}, {"n": 2}, "summary"]


@for_each("expected", [[3], [0, 1, 2, 3], [2.0], [True, 2]])
def test_a_suffix_that_differs_stays(log: ItemLog, expected: list[Any]) -> None:
    log.append([0, 1, 2])
    assert not log.replace_suffix(expected, ["summary"])
    assert payloads(log) == [0, 1, 2]


def test_a_suffix_of_no_items_is_always_as_expected(log: ItemLog) -> None:
    assert not log.replace_suffix([1], [2])
    assert log.replace_suffix([], [1])
    assert log.replace_suffix([1], [])
    assert payloads(log) == []


def test_a_whole_lane_is_replaced_whatever_it_holds(log: ItemLog, committed_db: CommittedDatabase) -> None:
    assert log.replace_suffix(None, ["first"])
    other = ItemLog(log.session_id, "other", using=committed_db.alias, tenant=committed_db.tenant)
    other.append(["kept"])
    log.append([1, "damaged", 3])
    damage(committed_db, "damaged")
    assert log.replace_suffix(None, ["summary", 4])
    assert (payloads(log), payloads(other)) == (["summary", 4], ["kept"])
    assert log.replace_suffix(None, [])
    assert (payloads(log), payloads(other)) == ([], ["kept"])


def test_the_oldest_items_go_as_long_as_prune_wants_it(log: ItemLog) -> None:
    log.append([*range(230), "kept", 7, "last"])
    assert log.replace_suffix(["last"], ["new"], prune=lambda payload: type(payload) is int)
    assert payloads(log) == ["kept", 7, "new"]
    assert not log.replace_suffix(["other"], [], prune=lambda payload: True)
    assert log.count() == 3


def test_a_lane_is_copied_up_to_a_position(log: ItemLog, committed_db: CommittedDatabase) -> None:
    log.append(["a", "b", "c"], keys=["1", None, "3"])
    third = log.tail(1)[0].position
    copy = log_of(committed_db, "copy")
    assert log.copy_to("copy", before=third) == 2
    assert payloads(copy) == ["a", "b"]
    assert [item.created_at for item in copy.tail()] == [item.created_at for item in log.tail()][:2]
    found = copy.get("1")
    assert found is not None
    with pytest.raises(ConflictError):
        log.copy_to("copy")
    assert copy.count() == 2
    assert log.clear_all() == 5


def test_a_limit_counts_the_items_that_can_be_read(log: ItemLog, committed_db: CommittedDatabase) -> None:
    log.append(["a", "b", "c", "bad"])
    damage(committed_db, "bad")
    assert payloads(log, limit=2, skip_unreadable=True) == ["b", "c"]
    assert payloads(log, limit=9, skip_unreadable=True) == ["a", "b", "c"]


def test_lanes_are_apart(log: ItemLog, committed_db: CommittedDatabase) -> None:
    branch = log_of(committed_db, "branch")
    log.append([1, 2], keys=["k", None])
    branch.append([3], keys=["k"])
    assert (payloads(log), payloads(branch)) == ([1, 2], [3])
    assert log.lanes() == {"": 2, "branch": 1}
    assert log.delete_lane("branch") == 1
    assert log.clear() == 2
    assert log.clear() == 0
    assert log.lanes() == {}


def test_tenants_are_apart(log: ItemLog, committed_db: CommittedDatabase) -> None:
    log.append([1])
    assert ItemLog("session", using=committed_db.alias, tenant=committed_db.tenant + "2").tail() == []


# --- Refused arguments -----------------------------------------------------------------------------


@for_each(
    ("call", "error", "path"),
    [
        (lambda log: log.append([1, {1}]), InvalidPayload, "/payloads/1"),
        (lambda log: log.append("text"), InvalidPayload, "/payloads"),
        (lambda log: log.append([1], keys=["a", "b"]), InvalidPayload, "/keys"),
        (lambda log: log.append([1], keys=[""]), InvalidPayload, "/keys/0"),
        (lambda log: log.append([1], keys=["\x00"]), InvalidPayload, "/keys/0"),
        (lambda log: log.put("", 1), InvalidPayload, "/key"),
        (lambda log: log.put("k", float("nan")), InvalidPayload, "/payload"),
        (lambda log: log.get(1), InvalidPayload, "/key"),
        (lambda log: log.tail(-1), InvalidQuery, "/limit"),
        (lambda log: log.tail(before=True), InvalidQuery, "/before"),
        (lambda log: log.delete_lane(None), InvalidPayload, "/lane"),
        (lambda log: log.append([1], fencing_token="1"), InvalidPayload, "/fencing_token"),
    ],
)
def test_a_bad_argument_is_refused_and_nothing_is_stored(
    log: ItemLog, call: Any, error: type[Exception], path: str
) -> None:
    with pytest.raises(error) as caught:
        call(log)
    assert caught.value.path == path  # type: ignore[attr-defined]
    assert log.tail() == []


def test_a_name_of_a_lane_and_a_key_have_a_bound(log: ItemLog, committed_db: CommittedDatabase) -> None:
    longest = "ü" * 500
    full = log_of(committed_db, longest)
    full.append([1], keys=[longest])
    assert full.get(longest) is not None
    with pytest.raises(LimitExceeded):
        log_of(committed_db, longest + "x")
    with pytest.raises(LimitExceeded):
        log.put(longest + "x", 1)


# --- Fences, transactions, cancellation ------------------------------------------------------------


def test_a_superseded_writer_is_refused(log: ItemLog, committed_db: CommittedDatabase) -> None:
    locks = DatabaseLockManager(using=committed_db.alias, tenant=committed_db.tenant)
    old = locks.acquire("session", owner="old")
    assert old is not None
    log.append([1], fencing_token=old.fencing_token)
    old.release()
    assert locks.acquire("session", owner="new") is not None
    for write in (
        lambda: log.append([2], fencing_token=old.fencing_token),
        lambda: log.put("k", 2, fencing_token=old.fencing_token),
        lambda: log.pop(fencing_token=old.fencing_token),
        lambda: log.replace_suffix([1], [2], fencing_token=old.fencing_token),
        lambda: log.clear(fencing_token=old.fencing_token),
    ):
        with pytest.raises(FencedOutError):
            write()
    assert payloads(log) == [1]


def test_first_items_in_parallel_share_one_session(committed_db: CommittedDatabase) -> None:
    outcomes = run_in_threads(lambda n: log_of(committed_db).append([n]), [(n,) for n in range(8)])
    assert [outcome.unwrap() for outcome in outcomes] == [1] * 8
    assert sorted(payloads(log_of(committed_db))) == list(range(8))


def test_one_of_racing_replacements_wins(committed_db: CommittedDatabase) -> None:
    log_of(committed_db).append(["old"])
    outcomes = run_in_threads(
        lambda n: log_of(committed_db).replace_suffix(["old"], [n]), [(n,) for n in range(8)]
    )
    won = [n for n, outcome in enumerate(outcomes) if outcome.unwrap()]
    assert payloads(log_of(committed_db)) == won
    assert len(won) == 1


async def test_a_cancelled_write_has_ended_when_the_caller_learns_of_it(
    committed_db: CommittedDatabase,
) -> None:
    log = log_of(committed_db)
    await log.aappend(["a", "b"])
    started, may_go_on = threading.Event(), threading.Event()

    def validate(payload: Any) -> bool:
        started.set()
        return may_go_on.wait(30)

    popping = asyncio.create_task(log.apop(validate))
    await asyncio.to_thread(started.wait, 30)
    popping.cancel()
    done, _ = await asyncio.wait({popping}, timeout=0.05)
    assert not done
    popping.cancel()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await popping
    assert [item.payload for item in await log.atail()] == ["a"]


async def test_every_call_has_an_async_version(committed_db: CommittedDatabase) -> None:
    log = log_of(committed_db, "lane")
    assert await log.aappend([1], keys=["a"]) == 1
    await log.aput("b", 2)
    found = await log.aget("b")
    assert found is not None
    assert found.payload == 2
    assert await log.areplace_suffix([2], [3])
    assert await log.acount() == 2
    assert await log.alanes() == {"lane": 2}
    popped = await log.apop()
    assert popped is not None
    assert popped.payload == 3
    assert await log.acopy_to("copy") == 1
    assert await log.aclear() == 1
    assert await log.adelete_lane("copy") == 1
    assert await log.aclear_all() == 0
