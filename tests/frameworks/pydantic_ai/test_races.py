"""Writers of one conversation, and forks beside deletions, at one moment and on separate connections."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import ConversationConflict
from pydantic_ai.exceptions import UserError

from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from tests.database.separate import beside
from tests.databases import CommittedDatabase
from tests.frameworks.pydantic_ai.conversations import (
    entry_ids,
    families,
    forked,
    history,
    saved,
    store_of,
    turn,
)
from tests.processes import run_in_threads

WRITERS = 8
ROUNDS = 40


def save(database: CommittedDatabase, name: str, revision: str | None, text: str) -> bool:
    """Save over a revision, and return whether it was the stored one."""
    conversation = Conversation(conversation_id=name, revision=revision)
    turn(conversation, text)
    try:
        async_to_sync(store_of(database).save)(conversation)
    except ConversationConflict:
        return False
    return True


@pytest.mark.parametrize("exists", [True, False])
def test_of_racing_saves_one_succeeds(committed_db: CommittedDatabase, exists: bool) -> None:
    revision = saved(committed_db, "race", "first").revision if exists else None
    arguments = [(committed_db, "race", revision, f"writer {number}") for number in range(WRITERS)]
    outcomes = [outcome.unwrap() for outcome in run_in_threads(save, arguments)]
    assert sorted(outcomes) == [False] * (WRITERS - 1) + [True]
    # The two messages before the race, if any, which the winner left as a branch, and the two of the winner.
    assert len(entry_ids(committed_db)) == (4 if exists else 2)
    assert families(committed_db) == 1


def fork(database: CommittedDatabase, source: str, new: str) -> bool:
    try:
        forked(database, source, new)
    except (ConversationConflict, UserError):
        return False
    return True


def delete(database: CommittedDatabase, name: str) -> bool:
    async_to_sync(store_of(database).delete)(name)
    return True


def delete_session(database: CommittedDatabase, name: str) -> bool:
    return DatabaseStateStore(database.alias, tenant=database.tenant).delete_session(name) > 0


def in_rounds(start: Barrier, call: Callable[[int], bool]) -> list[bool]:
    """What a call returns in each round, which all callers begin at one moment."""
    outcomes = []
    for number in range(ROUNDS):
        start.wait(60)
        outcomes.append(call(number))
    return outcomes


@pytest.mark.thorough
@pytest.mark.parametrize("delete", [delete, delete_session])
def test_a_fork_beside_a_deletion_has_its_whole_history_or_is_refused(
    committed_db: CommittedDatabase, delete: Callable[[CommittedDatabase, str], bool]
) -> None:
    for number in range(ROUNDS):
        saved(committed_db, f"source-{number}", "one", "two")
    start = Barrier(2)
    calls: list[Callable[[int], bool]] = [
        lambda number: fork(committed_db, f"source-{number}", f"fork-{number}"),
        lambda number: delete(committed_db, f"source-{number}"),
    ]
    made, deleted = (
        outcome.unwrap() for outcome in run_in_threads(in_rounds, [(start, call) for call in calls])
    )
    assert deleted == [True] * ROUNDS
    histories = [history(committed_db, f"fork-{number}") for number in range(ROUNDS)]
    assert [len(entries or ()) for entries in histories] == [4 if is_made else 0 for is_made in made]
    assert entry_ids(committed_db) == {entry for entries in histories for entry in entries or ()}
    assert families(committed_db) == sum(made)


def test_a_deletion_waits_for_a_fork_and_leaves_what_it_reaches(postgres_db: CommittedDatabase) -> None:
    saved(postgres_db, "source", "one", "two")
    with transaction.atomic(using=postgres_db.alias):
        forked(postgres_db, "source", "fork")
        deletion = beside(postgres_db, lambda: delete(postgres_db, "source"))
    assert deletion.result(30)
    entries = history(postgres_db, "fork")
    assert entries is not None
    assert len(entries) == 4
    assert entry_ids(postgres_db) == set(entries)


def test_a_fork_waits_for_a_deletion_and_is_refused(postgres_db: CommittedDatabase) -> None:
    saved(postgres_db, "source", "one", "two")
    with transaction.atomic(using=postgres_db.alias):
        delete(postgres_db, "source")
        outcome = beside(postgres_db, lambda: fork(postgres_db, "source", "fork"))
    assert outcome.result(30) is False
    assert history(postgres_db, "fork") is None
    assert (entry_ids(postgres_db), families(postgres_db)) == (set(), 0)
    sessions = Session.objects.using(postgres_db.alias).filter(tenant=postgres_db.tenant)
    assert not sessions.exists()


def test_a_fork_is_refused_when_only_its_entry_goes(postgres_db: CommittedDatabase) -> None:
    saved(postgres_db, "source", "one", "two")
    forked(postgres_db, "source", "sibling", at=2)
    with transaction.atomic(using=postgres_db.alias):
        delete(postgres_db, "source")
        outcome = beside(postgres_db, lambda: fork(postgres_db, "source", "fork"))
    assert outcome.result(30) is False
    assert history(postgres_db, "fork") is None
    assert entry_ids(postgres_db) == set(history(postgres_db, "sibling") or ())


def test_a_deletion_waits_for_a_save_of_another_conversation(postgres_db: CommittedDatabase) -> None:
    saved(postgres_db, "source", "one")
    conversation = forked(postgres_db, "source", "fork")
    with transaction.atomic(using=postgres_db.alias):
        turn(conversation, "two")
        async_to_sync(store_of(postgres_db).save)(conversation)
        deletion = beside(postgres_db, lambda: delete(postgres_db, "source"))
    assert deletion.result(30)
    entries = history(postgres_db, "fork")
    assert entries is not None
    assert len(entries) == 4
    assert entry_ids(postgres_db) == set(entries)
