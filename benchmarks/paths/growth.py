"""Growth: what a step costs late in a long session, and among a million sessions."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.bench import Bench
from benchmarks.figures import Target
from benchmarks.large import large_database
from benchmarks.peers import PUT_AND_WRITE_HISTORY, peer_tables
from benchmarks.races import Client, Comparison, Race
from benchmarks.reference import execute
from benchmarks.server import create_database
from benchmarks.sessions import copy_rows, create_sessions, sessions_of
from benchmarks.steps import Step, step_evidence
from helix_store.models import Message, Session
from helix_store.stores import DatabaseStateStore

__all__ = ["CASES"]

LENGTHS = (10, 1_000, 100_000)
SESSIONS_PER_LENGTH = 8
MOST_STEPS = 400
"""Of a leg in a round, so that a short session stays short."""


class StepAt(Step):
    """Steps of sessions that have so many messages; what a round added is cut off before the next one."""

    def __init__(self, worker: int, *, length: int) -> None:
        super().__init__(worker, alias="growth", prefix=_prefix(length), per_worker=SESSIONS_PER_LENGTH)
        self.length = length

    def prepare(self, count: int) -> None:
        for session_id in self.sessions:
            self.store.truncate_messages(session_id, self.length)
        super().prepare(count)


def long_sessions(bench: Bench) -> None:
    """Sessions of every length; the messages of the long ones are copies made by SQL."""
    create_database(bench.cluster, "growth")
    store = DatabaseStateStore("growth")
    for length in LENGTHS:
        for session_id in sessions_of(0, prefix=_prefix(length), per_worker=SESSIONS_PER_LENGTH):
            create_sessions("growth", [session_id])
            store.append_messages(session_id, [{"role": "user", "content": "a short message"}])
            copy_rows("growth", Message, session_id, range(2, length + 1), {"sequence": "n"})
            execute(
                "growth",
                f'UPDATE "{Session._meta.db_table}" SET message_count = %s WHERE session_id = %s',
                [length, session_id],
            )
            last = store.get_messages(session_id, offset=length - 1)
            assert last.total == length
            assert len(last.messages) == 1


def first_sessions(bench: Bench) -> None:
    """The same 200 sessions as in the large database, with nobody else."""
    create_database(bench.cluster, "first")
    create_sessions("first", sessions_of(0))


def _prefix(length: int) -> str:
    return f"after-{length}"


def _step_at(length: int) -> Client:
    return Client(operation=partial(StepAt, length=length), evidence=step_evidence("growth", _prefix(length)))


def _step_in(alias: str) -> Client:
    return Client(operation=partial(Step, alias=alias), evidence=step_evidence(alias))


def _cost(path: str, *, small: str, large: str, **options: Any) -> Comparison:
    """How many times as long a step takes: the rate of the small over that of the large."""
    return Comparison(path=path, of=small, to=large, **options)


NOT_MORE = Target(1.2, 1.1, at_most=True)

CASES = [
    Race(
        contestants={f"after {length:,}": _step_at(length) for length in LENGTHS},
        comparisons=[
            _cost("cost of a step after 1,000 messages, to after 10", small="after 10", large="after 1,000"),
            _cost(
                "cost of a step after 100,000 messages, to after 10",
                small="after 10",
                large="after 100,000",
                target=NOT_MORE,
            ),
        ],
        needs=[long_sessions],
        aliases=("growth",),
        bounds=lambda scale: (1, MOST_STEPS),
    ),
    Race(
        contestants={"ours": _step_at(1_000), "LangGraph": PUT_AND_WRITE_HISTORY},
        comparisons=[
            Comparison(
                path="step against LangGraph put + put_writes, after 1,000 messages",
                to="LangGraph",
                target=Target(8, 10),
            )
        ],
        needs=[long_sessions, peer_tables],
        aliases=("growth", "peers"),
        bounds=lambda scale: (1, MOST_STEPS),
    ),
    Race(
        contestants={"alone": _step_in("first"), "among many": _step_in("large")},
        comparisons=[
            _cost(
                "cost of a step in the last of very many sessions, to the first",
                small="alone",
                large="among many",
                target=NOT_MORE,
            )
        ],
        needs=[first_sessions, large_database],
        aliases=("first", "large"),
    ),
]
