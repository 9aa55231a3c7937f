"""The primary is killed under load and its synchronous standby is promoted: no client is restarted."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from helix_store.exceptions import HelixStoreError, OutcomeUnknown
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.deployments.servers import primary_and_standby
from tests.processes import PROCESSES, WorkerProcess

_WRITERS: Final = 4
_STEPS: Final = 25
"""Of each writer, at least: before the primary is killed, and after the standby was promoted."""
_PATIENCE_SECONDS: Final = 60.0


@dataclass
class Journal:
    """What a writer was told about its steps, by their numbers."""

    acknowledged: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    healed_at: float = 0.0
    """The first step that was made after the promotion, by the monotonic clock."""


def write_steps(alias: str, tenant: str, name: str, written: Any, promoted: Any) -> Journal:
    """Make one step after another until enough of them were made after the promotion."""
    store = DatabaseStateStore(alias, tenant=tenant)
    state = store.create_session(name, agent_type="t")
    journal = Journal()
    remaining = _STEPS
    number = 0
    while remaining:
        number += 1
        is_after = promoted.is_set()
        try:
            message = {"role": "user", "content": str(number)}
            store.save_state_and_promote_staging(
                name, state, [message], {"step_id": f"step-{number}", "step_count": number}
            )
        except OutcomeUnknown as exc:
            journal.unknown.append(number)
            journal.errors[type(exc).__name__] += 1
        except HelixStoreError as exc:
            if not exc.retryable:
                raise
            journal.errors[f"{type(exc).__name__} {exc.attributes.get('database_code')}"] += 1
            # Not busy while there is no server: the promotion ends this wait.
            promoted.wait(0.05)
        else:
            journal.acknowledged.append(number)
            written.release()
            if is_after:
                journal.healed_at = journal.healed_at or time.monotonic()
                remaining -= 1
    return journal


def test_a_promotion_under_load_loses_nothing_and_clients_heal(postgres_db: CommittedDatabase) -> None:
    alias, tenant = postgres_db.alias, postgres_db.tenant
    promoted = PROCESSES.Event()
    # Of each writer its own: a fast one must not count for one that has not made its session yet.
    written = {f"writer-{number}": PROCESSES.Semaphore(0) for number in range(_WRITERS)}
    with primary_and_standby(alias) as servers:
        writers = [
            WorkerProcess(write_steps, alias, tenant, name, steps, promoted)
            for name, steps in written.items()
        ]
        for steps in written.values():
            for _ in range(_STEPS):
                assert steps.acquire(timeout=_PATIENCE_SECONDS)
        servers.primary.kill()
        killed_at = time.monotonic()
        servers.standby.promote()
        promoted_at = time.monotonic()
        promoted.set()
        journals: list[Journal] = [writer.outcome(_PATIENCE_SECONDS).unwrap() for writer in writers]
        store = DatabaseStateStore(alias, tenant=tenant)
        lost = doubled = unacknowledged = 0
        for name, journal in zip(written, journals, strict=True):
            stored = Counter(int(each["content"]) for each in store.get_messages(name, limit=10_000).messages)
            lost += len(set(journal.acknowledged) - set(stored))
            doubled += sum(count > 1 for count in stored.values())
            unacknowledged += len(set(stored) - set(journal.acknowledged) - set(journal.unknown))
    healed_at = max(journal.healed_at for journal in journals)
    print(  # noqa: T201  pytest shows it with -s, and where a test fails
        f"acknowledged {sum(len(journal.acknowledged) for journal in journals)}, lost {lost}, "
        f"doubled {doubled}, unknown {sum(len(journal.unknown) for journal in journals)}, "
        f"promoted after {promoted_at - killed_at:.2f} s, healed after {healed_at - killed_at:.2f} s, "
        f"errors {dict(sum((journal.errors for journal in journals), Counter[str]()))}"
    )
    assert (lost, doubled, unacknowledged) == (0, 0, 0)
