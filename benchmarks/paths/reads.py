"""Reading a session: its state, its latest checkpoint, a page of its messages."""

from __future__ import annotations

import itertools
import json

from benchmarks.bench import Bench
from benchmarks.figures import Target
from benchmarks.operations import Operation
from benchmarks.payloads import message, state_of
from benchmarks.pgbench import Script
from benchmarks.races import Client, Comparison, Limit, Race
from benchmarks.reference import execute, reference_schema, reference_sessions
from benchmarks.sessions import AGENT_TYPE, READ_SESSIONS, STEPS_BEFORE_READING, live_sessions
from helix_store.core.types import (
    Checkpoint,
    MessagePage,
    SessionState,
)
from helix_store.stores import DatabaseStateStore

__all__ = ["CASES"]

HISTORY = 10_000
PAGE = 50
_STRIDE = 457
"""Between the pages that are read; it visits them in no order that a cache would like."""


class LoadState(Operation):
    def __init__(self, worker: int) -> None:
        self.store = DatabaseStateStore()
        self.sessions = itertools.cycle(READ_SESSIONS)
        self.found: SessionState | None = None

    def __call__(self) -> None:
        self.found = self.store.load_state(next(self.sessions))

    def check(self) -> None:
        assert self.found is not None
        assert self.found.custom_state == state_of(4, STEPS_BEFORE_READING - 1)


class LatestCheckpoint(Operation):
    def __init__(self, worker: int) -> None:
        self.store = DatabaseStateStore()
        self.sessions = itertools.cycle(READ_SESSIONS)
        self.found: Checkpoint | None = None

    def __call__(self) -> None:
        self.found = self.store.get_latest_checkpoint(next(self.sessions))

    def check(self) -> None:
        assert self.found is not None
        assert self.found.step_count == STEPS_BEFORE_READING - 1
        assert self.found.state.custom_state == state_of(4, STEPS_BEFORE_READING - 1)


class PageOfMessages(Operation):
    def __init__(self, worker: int) -> None:
        self.store = DatabaseStateStore()
        self.offsets = itertools.cycle(range(0, HISTORY - PAGE, _STRIDE))
        self.found: MessagePage | None = None

    def __call__(self) -> None:
        self.found = self.store.get_messages("history", offset=next(self.offsets), limit=PAGE)

    def check(self) -> None:
        assert self.found is not None
        assert [each["content"] for each in self.found.messages] == [message(1)["content"]] * PAGE


def history(bench: Bench) -> None:
    """A session of 10,000 messages, ours and the limit's."""
    store = DatabaseStateStore()
    store.create_session("history", agent_type=AGENT_TYPE)
    for _ in range(HISTORY // 1_000):
        store.append_messages("history", [message(1)] * 1_000)
    assert store.get_message_count("history") == HISTORY
    bench.once(reference_schema)
    execute(
        "default",
        """
        INSERT INTO ref_message
        SELECT 'history', n, 'assistant', %s::jsonb, clock_timestamp() FROM generate_series(1, %s) AS n""",
        [json.dumps(message(1)), HISTORY],
    )


PICK = f"\\set s 1 + :k % {len(READ_SESSIONS)}"

CASES = [
    Race(
        contestants={
            "limit": Limit(
                script=Script(choose=PICK, sql="SELECT * FROM ref_session WHERE id = 'r-' || :s;", rows=1)
            ),
            "ours": Client(operation=LoadState),
        },
        comparisons=[Comparison(path="load_state 4 KB", target=Target(0.40, 0.45))],
        needs=[live_sessions, reference_sessions],
    ),
    Race(
        contestants={
            "limit": Limit(
                script=Script(
                    choose=PICK,
                    sql="""
                        SELECT * FROM ref_checkpoint WHERE session_id = 'r-' || :s
                        ORDER BY version DESC LIMIT 1;""",
                    rows=1,
                )
            ),
            "ours": Client(operation=LatestCheckpoint),
        },
        comparisons=[Comparison(path="get_latest_checkpoint 4 KB", target=Target(0.40, 0.49))],
        needs=[live_sessions, reference_sessions],
    ),
    Race(
        contestants={
            "limit": Limit(
                script=Script(
                    choose=f"\\set o (:k * {_STRIDE}) % {HISTORY - PAGE}",
                    sql=f"""
                        SELECT content FROM ref_message
                        WHERE session_id = 'history' AND seq > :o AND seq <= :o + {PAGE} ORDER BY seq;""",
                    rows=PAGE,
                )
            ),
            "ours": Client(operation=PageOfMessages),
        },
        comparisons=[Comparison(path="get_messages(50) of 10,000", target=Target(0.45, 0.65))],
        needs=[history],
    ),
]
