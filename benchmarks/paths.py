"""The hot paths: for each the limit's script and our public API."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import connections

from benchmarks.payloads import message, staged_change, state_of
from helix_store.core.ids import new_id
from helix_store.core.types import SessionState, StepInfo

__all__ = ["FILLERS", "HISTORY", "LIVE_SESSIONS", "PATHS", "Path", "prepare_sessions"]

LIVE_SESSIONS = 200
FILLERS = 10_000
HISTORY = 10_000


@dataclass(frozen=True)
class Path:
    """``script`` is for pgbench; ``operation(alias, worker)`` makes what our API does for the same work."""

    name: str
    script: str
    operation: Callable[[str, int], Callable[[], object]]
    floor: float
    aim: float


def quoted(value: Any) -> str:
    """A JSON document as an SQL literal that pgbench leaves alone."""
    return "'" + json.dumps(value).replace("'", "''") + "'"


def step_script(kib: int, staged: int) -> str:
    state = quoted(state_of(kib))
    merged = f"{state}::jsonb" + (
        " || coalesce((SELECT jsonb_object_agg(ord, payload) FROM taken), '{}')" if staged else ""
    )
    return f"""
\\set k :k + 1
\\set s 1 + :k % {LIVE_SESSIONS}
WITH taken AS (
    DELETE FROM ref_staged WHERE session_id = 's-' || :s AND step_id = 'step-' || :k RETURNING ord, payload
), head AS (
    UPDATE ref_session SET version = version + 1, message_count = message_count + 2, status = 'active',
        updated_at = clock_timestamp(), state = {merged}
    WHERE id = 's-' || :s AND version >= 1 RETURNING id, version, message_count, state
), said AS (
    INSERT INTO ref_message
    SELECT id, message_count - 1, 'assistant', {quoted(message(1))}::jsonb, clock_timestamp() FROM head
    UNION ALL
    SELECT id, message_count, 'assistant', {quoted(message(2))}::jsonb, clock_timestamp() FROM head
)
INSERT INTO ref_checkpoint
SELECT id, version, state, message_count, clock_timestamp() FROM head RETURNING version;
"""


def prepare_sessions(alias: str) -> None:
    """The same number of sessions in our tables."""
    from helix_store.stores import DatabaseStateStore

    store = DatabaseStateStore(alias)
    state = state_of(4)
    for number in range(1, LIVE_SESSIONS + 1):
        session = store.create_session(f"s-{number}", agent_type="bench", custom_state=state)
        store.save_state_and_promote_staging(session.session_id, session, [], StepInfo("step-0", 0))
    for number in range(1, (FILLERS if alias == "default" else 0) + 1):
        store.create_session(f"filler-{number}", agent_type="bench")
    store.create_session("history", agent_type="bench")
    for _ in range(HISTORY // 1_000):
        store.append_messages("history", [message(1)] * 1_000)
    with connections[alias].cursor() as cursor:
        cursor.execute("ANALYZE")


def stage_ahead(alias: str, worker: int, tag: str, steps: int) -> None:
    """Stage two changes for each of so many steps to come, past the API: staging is not what is measured."""
    from helix_store.models import Session, StagedChange

    keys = dict(
        Session.objects.using(alias).filter(session_id__startswith="s-").values_list("session_id", "pk")
    )
    now = Session.objects.using(alias).get(session_id="s-1").created_at
    changes = [json.dumps({**staged_change(number), "patches": [], "timestamp": None}) for number in (1, 2)]
    StagedChange.objects.using(alias).bulk_create(
        [
            StagedChange(
                session_id=keys[session_of(worker, step)],
                step_id=f"step-{tag}-{step}",
                tool_call_id=f"call-{number}",
                payload=changes[number - 1],
                created_at=now,
            )
            for step in range(steps)
            for number in (1, 2)
        ],
        batch_size=5_000,
    )


def session_of(worker: int, step: int) -> str:
    """Workers keep to sessions of their own, as the agents of a real system do."""
    return f"s-{1 + (worker * 25 + step % 25) % LIVE_SESSIONS}"


def step_operation(kib: int, staged: int = 0) -> Callable[[str, int], Callable[[], object]]:
    def make(alias: str, worker: int) -> Callable[[], object]:
        from helix_store.stores import DatabaseStateStore

        store = DatabaseStateStore(alias)
        custom_state = state_of(kib)
        messages = [message(1), message(2)]
        steps = itertools.count()
        versions: dict[str, int] = {}
        tag = new_id()
        if staged:
            stage_ahead(alias, worker, tag, 6_000)

        def step() -> None:
            number = next(steps)
            session_id = session_of(worker, number)
            if session_id not in versions:
                loaded = store.load_state(session_id)
                assert loaded is not None
                versions[session_id] = loaded.version
            state = SessionState(
                session_id=session_id, agent_type="bench", custom_state=custom_state, step_count=number
            )
            commit = store.save_state_and_promote_staging(
                session_id,
                state,
                messages,
                StepInfo(f"step-{tag}-{number}", number),
                expected_version=versions[session_id],
            )
            versions[session_id] = commit.new_version

        return step

    return make


def inside_atomic(
    make: Callable[[str, int], Callable[[], object]],
) -> Callable[[str, int], Callable[[], object]]:
    def make_inside(alias: str, worker: int) -> Callable[[], object]:
        from django.db import transaction

        operation = make(alias, worker)

        def step() -> None:
            with transaction.atomic(using=alias):
                operation()

        return step

    return make_inside


def call(method: Callable[[Any, str], object]) -> Callable[[str, int], Callable[[], object]]:
    """An operation on the live sessions in turn."""

    def make(alias: str, worker: int) -> Callable[[], object]:
        from helix_store.stores import DatabaseStateStore

        store = DatabaseStateStore(alias)
        numbers = itertools.cycle(range(1, LIVE_SESSIONS + 1))
        return lambda: method(store, f"s-{next(numbers)}")

    return make


def page_of_history(alias: str, worker: int) -> Callable[[], object]:
    from helix_store.stores import DatabaseStateStore

    store = DatabaseStateStore(alias)
    offsets = itertools.cycle(range(0, HISTORY - 50, 457))
    return lambda: store.get_messages("history", offset=next(offsets), limit=50)


def toggled_status(alias: str, worker: int) -> Callable[[], object]:
    from helix_store.stores import DatabaseStateStore

    store = DatabaseStateStore(alias)
    numbers = itertools.cycle(range(1, LIVE_SESSIONS + 1))
    return lambda: store.compare_and_set_status(f"s-{next(numbers)}", ["active", "running"], "active")


def lock_cycle(alias: str, worker: int) -> Callable[[], object]:
    from helix_store.stores import DatabaseLockManager

    manager = DatabaseLockManager(alias)
    numbers = itertools.cycle(range(200))

    def cycle() -> None:
        lock = manager.acquire(f"lock-{worker}-{next(numbers)}")
        assert lock is not None
        lock.release()

    return cycle


PICK = f"\\set k :k + 1\n\\set s 1 + :k % {LIVE_SESSIONS}\n"

PATHS = [
    Path("step 4 KB", step_script(4, 0), step_operation(4), 0.60, 0.90),
    Path("step 4 KB, 2 staged", step_script(4, 2), step_operation(4, 2), 0.50, 0.75),
    Path("step 16 KB, 2 staged", step_script(16, 2), step_operation(16, 2), 1.0, 1.3),
    Path("step 4 KB inside atomic()", step_script(4, 0), inside_atomic(step_operation(4)), 0.45, 0.55),
    Path(
        "load_state 4 KB",
        PICK + "SELECT * FROM ref_session WHERE id = 's-' || :s;",
        call(lambda store, session_id: store.load_state(session_id)),
        0.40,
        0.49,
    ),
    Path(
        "get_latest_checkpoint",
        PICK + "SELECT * FROM ref_checkpoint WHERE session_id = 's-' || :s ORDER BY version DESC LIMIT 1;",
        call(lambda store, session_id: store.get_latest_checkpoint(session_id)),
        0.40,
        0.49,
    ),
    Path(
        "get_messages(50) of 10,000",
        f"\\set k :k + 457\n\\set o :k % {HISTORY - 50}\n"
        "SELECT content FROM ref_message "
        "WHERE session_id = 'history' AND seq > :o AND seq <= :o + 50 ORDER BY seq;",
        page_of_history,
        0.45,
        0.65,
    ),
    Path(
        "compare_and_set_status",
        PICK
        + "UPDATE ref_session SET status = 'active', version = version + 1, updated_at = clock_timestamp() "
        "WHERE id = 's-' || :s AND status IN ('active', 'running') RETURNING version;",
        toggled_status,
        0.45,
        0.65,
    ),
    Path(
        "lock acquire + release",
        "\\set k :k + 1\n\\set s 1 + :k % 200\n"
        "INSERT INTO ref_lock VALUES ('lock-' || :s, 1, clock_timestamp() + interval '30 s') "
        "ON CONFLICT (name) DO UPDATE SET token = ref_lock.token + 1, expires_at = excluded.expires_at "
        "WHERE ref_lock.expires_at IS NULL OR ref_lock.expires_at < clock_timestamp() RETURNING token;\n"
        "UPDATE ref_lock SET expires_at = NULL WHERE name = 'lock-' || :s;",
        lock_cycle,
        0.45,
        0.65,
    ),
]
