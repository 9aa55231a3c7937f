"""Runs that wait for an approval, stored and resumed by one."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from agents import Runner, RunState, set_tracing_disabled
from django.db import transaction
from django.test.utils import CaptureQueriesContext

from helix_store import DatabaseStateStore
from helix_store.contrib.openai_agents import DjangoSession, RunStateStore
from helix_store.contrib.openai_agents.models import OpenAIRunState
from helix_store.core import moments
from helix_store.exceptions import ConflictError, InvalidPayload, LimitExceeded, LockLostError
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.openai_agents.models import approving_agent
from tests.frameworks.waiting import asked, waiting
from tests.processes import run_in_threads

set_tracing_disabled(True)

FUTURE = datetime(2100, 1, 1, tzinfo=UTC)
PAST = datetime(2001, 1, 1, tzinfo=UTC)


@pytest.fixture
def store(committed_db: CommittedDatabase) -> RunStateStore:
    return store_of(committed_db)


def store_of(db: CommittedDatabase) -> RunStateStore:
    return RunStateStore(db.alias, tenant=db.tenant)


def end_term(db: CommittedDatabase) -> None:
    rows = OpenAIRunState._base_manager.using(db.alias).filter(session__tenant=db.tenant)
    assert rows.update(claim_expires_at=moments.now() - timedelta(hours=1)) == 1


async def test_a_run_waits_for_an_approval_and_goes_on(
    committed_db: CommittedDatabase, store: RunStateStore
) -> None:
    agent = approving_agent()
    session = DjangoSession("chat", using=committed_db.alias, tenant=committed_db.tenant)
    waiting = await Runner.run(agent, "Send 5 dollars", session=session)
    state_id = await store.asave("chat", waiting.to_state(), owner="alice", deadline=FUTURE)
    listed = await store.awaiting("chat")
    assert [(each.state_id, each.owner, each.text) for each in listed] == [(state_id, "alice", None)]

    claim = await store.aclaim("chat", state_id, resumer="worker", owner="alice")
    assert claim is not None
    state: Any = await RunState.from_string(agent, claim.text)
    state.approve(state.get_interruptions()[0])
    finished = await Runner.run(agent, state, session=session)
    assert finished.final_output == "done"
    assert await claim.adone()
    assert await store.awaiting("chat") == []


@for_each(
    "text",
    [
        "{}",
        '{"b": 1, "a": 1.0}\n',
        '{"a": "\ud800 é"}',
        '{"a": "\ud83d' + '\ude00"}',
        '{"a": 1e400, "b": NaN}',
    ],
)
def test_a_text_comes_back_character_for_character(store: RunStateStore, text: str) -> None:
    state_id = store.save("chat", text)
    stored = store.load("chat", state_id)
    assert stored is not None
    assert stored.text == text
    assert store.load("chat", "other") is None


def test_a_repeat_is_safe_and_another_text_is_refused(store: RunStateStore) -> None:
    assert store.save("chat", "{}", state_id="1") == "1"
    assert store.save("chat", "{}", state_id="1") == "1"
    with pytest.raises(ConflictError):
        store.save("chat", '{"a":1}', state_id="1")
    assert [each.state_id for each in store.waiting("chat")] == ["1"]


def test_one_of_many_resumers_gets_the_run(committed_db: CommittedDatabase) -> None:
    state_id = store_of(committed_db).save("chat", "{}")
    outcomes = run_in_threads(
        lambda n: store_of(committed_db).claim("chat", state_id, resumer=str(n)) is not None,
        [(n,) for n in range(8)],
    )
    assert [outcome.unwrap() for outcome in outcomes].count(True) == 1


def test_a_run_can_be_claimed_again_after_the_term(
    store: RunStateStore, committed_db: CommittedDatabase
) -> None:
    state_id = store.save("chat", "{}")
    first = store.claim("chat", state_id, resumer="first")
    assert first is not None
    assert store.claim("chat", state_id, resumer="second") is None
    end_term(committed_db)
    second = store.claim("chat", state_id, resumer="second")
    assert second is not None
    assert second.token > first.token
    assert not first.done()
    assert not first.release()
    with pytest.raises(LockLostError):
        first.refresh()
    assert second.refresh() >= second.expires_at
    assert second.done()
    assert second.done()
    assert store.claim("chat", state_id, resumer="third") is None


def test_a_claim_whose_term_is_over_is_neither_refreshed_nor_released(
    store: RunStateStore, committed_db: CommittedDatabase
) -> None:
    """Also while nobody else has claimed the run: its worker must ask again."""
    state_id = store.save("chat", "{}")
    claim = store.claim("chat", state_id, resumer="first")
    assert claim is not None
    end_term(committed_db)
    with pytest.raises(LockLostError):
        claim.refresh()
    assert not claim.release()


def test_a_released_run_can_be_claimed_at_once(store: RunStateStore) -> None:
    state_id = store.save("chat", "{}")
    claim = store.claim("chat", state_id, resumer="first")
    assert claim is not None
    assert claim.release()
    assert not claim.done()
    assert store.claim("chat", state_id, resumer="second") is not None


def test_a_claim_that_was_rolled_back_is_void_even_if_the_run_is_claimed_again(
    store: RunStateStore, committed_db: CommittedDatabase
) -> None:
    state_id = store.save("chat", "{}")
    with suppress(KeyError), transaction.atomic(using=committed_db.alias):
        first = store.claim("chat", state_id, resumer="one")
        raise KeyError
    assert first is not None
    second = store.claim("chat", state_id, resumer="one")
    assert second is not None
    with pytest.raises(LockLostError):
        first.refresh()
    assert not first.done()
    assert not first.release()
    assert second.done()


def test_a_claim_of_a_resumed_run_is_neither_refreshed_nor_released(store: RunStateStore) -> None:
    state_id = store.save("s", "{}")
    claim = store.claim("s", state_id, resumer="w")
    assert claim is not None
    assert claim.done()
    with pytest.raises(LockLostError):
        claim.refresh()
    assert not claim.release()
    assert store.claim("s", state_id, resumer="w") is None
    assert claim.done()


def test_nobody_claims_a_run_after_its_deadline(store: RunStateStore) -> None:
    late, early = store.save("chat", "{}", deadline=PAST), store.save("chat", "{}", deadline=FUTURE)
    assert store.claim("chat", late, resumer="worker") is None
    assert store.claim("chat", early, resumer="worker") is not None
    assert [each.state_id for each in store.waiting("chat")] == [early]
    stored = store.load("chat", late)
    assert stored is not None
    assert stored.deadline == PAST


@pytest.mark.parametrize("owner", [None, "bob"])
def test_only_the_owner_claims_a_run(store: RunStateStore, owner: str | None) -> None:
    state_id = store.save("chat", "{}", owner="alice")
    assert store.claim("chat", state_id, resumer="worker", owner=owner) is None
    assert store.claim("chat", state_id, resumer="worker", owner="alice") is not None


def test_runs_go_with_their_session(store: RunStateStore, committed_db: CommittedDatabase) -> None:
    state_id = store.save("chat", "{}")
    DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant).delete_session("chat")
    assert store.load("chat", state_id) is None
    assert store.claim("chat", state_id, resumer="worker") is None
    assert not store.delete("chat", state_id)


def test_a_run_is_deleted(store: RunStateStore) -> None:
    state_id = store.save("chat", "{}")
    assert store.delete("chat", state_id)
    assert store.waiting("chat") == []


class Deep:
    """A run whose context is nested too deeply for `json`."""

    def to_string(self) -> str:
        return self.to_string()


@for_each(
    "state",
    [
        "",
        "text",
        "\x00",
        '{"a": 1',
        "[1]",
        '"text"',
        "null",
        "[" * 100_000,
        '{"a": ' + "1" * 5_000 + "}",
        Deep(),
    ],
    ids=["empty", "text", "nul", "cut", "list", "string", "null", "deep", "long number", "deep run"],
)
def test_what_no_run_could_continue_from_is_refused_before_sql(
    store: RunStateStore, committed_db: CommittedDatabase, state: Any
) -> None:
    with CaptureQueriesContext(committed_db.connection) as captured, pytest.raises(InvalidPayload) as refused:
        store.save("chat", state)
    assert refused.value.path == "/state"
    assert captured.captured_queries == []


@for_each(
    ("call", "error"),
    [
        (lambda store: store.save("chat", "{}", state_id=""), InvalidPayload),
        (lambda store: store.save("chat", "{}", owner=""), InvalidPayload),
        (lambda store: store.save("chat", "{}", deadline=datetime(2026, 1, 1)), InvalidPayload),  # noqa: DTZ001
        (lambda store: store.save("chat", "x" * 9_000_000), LimitExceeded),
        (lambda store: store.claim("chat", "1", resumer=""), InvalidPayload),
        (lambda store: store.claim("chat", "1", resumer="me", ttl_ms=0), InvalidPayload),
    ],
)
def test_a_bad_argument_is_refused_and_nothing_is_stored(
    store: RunStateStore, call: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        call(store)
    assert store.waiting("chat") == []


def test_a_saved_run_waits_until_the_last_one_is_done_or_deleted(committed_db: CommittedDatabase) -> None:
    runs = RunStateStore(committed_db.alias, tenant=committed_db.tenant)
    with asked(committed_db.tenant) as told:
        first, second = (runs.save("session", f'{{"number": {number}}}') for number in (1, 2))
        runs.save("session", '{"number": 2}', state_id=second)
        assert told == [("session", [each], "session") for each in (first, second)]
    assert waiting(committed_db) == [("session", "approval")]
    claim = runs.claim("session", first, resumer="worker")
    assert claim is not None
    assert claim.done()
    assert waiting(committed_db) == [("session", "approval")]
    assert runs.delete("session", second)
    assert waiting(committed_db) == []
    assert not runs.delete("session", second)
