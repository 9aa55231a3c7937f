"""The atomic step: what our API does, and the statement of the limit."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

from django.db import transaction

from benchmarks.bench import Bench
from benchmarks.evidence import Evidence
from benchmarks.operations import Operation
from benchmarks.payloads import STATES, message, staged_changes, state_of
from benchmarks.pgbench import Script
from benchmarks.races import Limit
from benchmarks.reference import execute
from benchmarks.sessions import PER_WORKER, column_names, sessions_of
from helix_store.core.ids import new_id
from helix_store.core.types import SessionState, StepInfo
from helix_store.models import (
    Checkpoint,
    Message,
    Session,
    StagedChange,
)
from helix_store.stores import DatabaseStateStore

__all__ = ["Step", "StepInFull", "StepInsideAtomic", "step_evidence", "step_limit", "used_staging"]

STAGED = 2
"""Changes that are staged for a step, if any."""

LIMIT_NUMBERS = """
SELECT (SELECT sum(version) FROM ref_session), (SELECT sum(message_count) FROM ref_session),
    (SELECT count(*) FROM ref_message), (SELECT count(*) FROM ref_checkpoint),
    (SELECT count(*) FROM ref_staged)
"""


class Step(Operation):
    """Steps of one worker's sessions in turn, each with the version that the last one returned."""

    def __init__(
        self,
        worker: int,
        *,
        alias: str = "default",
        kib: int = 4,
        is_staged: bool = False,
        is_staged_elsewhere: bool = False,
        **sessions: Any,
    ) -> None:
        self.alias = alias
        self.store = DatabaseStateStore(alias)
        self.sessions = sessions_of(worker, **sessions)
        self.states = [state_of(kib, step) for step in range(STATES)]
        self.messages = [message(1), message(2)]
        self.is_staged = is_staged or is_staged_elsewhere
        self.stage = self._stage_elsewhere if is_staged_elsewhere else self._stage
        self.tag = new_id()
        self.numbers = itertools.count(1)
        self.loaded: dict[str, SessionState] = {}
        self.versions: dict[str, int] = {}
        self.last = 0

    def prepare(self, count: int) -> None:
        for session_id in self.sessions:
            state = self.store.load_state(session_id)
            assert state is not None, session_id
            self.loaded[session_id] = state
            self.versions[session_id] = state.version
        if self.is_staged:
            self.stage(range(self.last + 1, self.last + count + 1))

    def __call__(self) -> None:
        session_id, state, step = self.next_request()
        commit = self.store.save_state_and_promote_staging(
            session_id, state, self.messages, step, expected_version=self.versions[session_id]
        )
        self.versions[session_id] = commit.new_version

    def next_request(self) -> tuple[str, SessionState, StepInfo]:
        self.last = number = next(self.numbers)
        session_id = self._session_of(number)
        state = self.loaded[session_id]
        state.custom_state = self._state_of(number)
        state.step_count = number
        return session_id, state, StepInfo(self._step_id(number), number)

    def check(self) -> None:
        session_id = self._session_of(self.last)
        state = self.store.load_state(session_id)
        assert state is not None
        assert state.version == self.versions[session_id]
        changed = merged_changes() if self.is_staged else {}
        assert state.custom_state == {**self._state_of(self.last), **changed}
        messages = self.store.get_messages(session_id, offset=state.message_count - 2).messages
        assert [stored["content"] for stored in messages] == [each["content"] for each in self.messages]
        left = self.store.get_staged_changes(session_id, self._step_id(self.last))
        assert not left, left

    def _session_of(self, number: int) -> str:
        return self.sessions[number % len(self.sessions)]

    def _state_of(self, number: int) -> dict[str, Any]:
        """From step to step of a session two keys change."""
        return self.states[number // len(self.sessions) % STATES]

    def _step_id(self, number: int) -> str:
        return f"step-{self.tag}-{number}"

    def _stage(self, numbers: range) -> None:
        """Stage changes for steps to come, in this process as most agents do: that is not measured."""
        for number in numbers:
            for changes in staged_changes():
                self.store.stage_changes(self._session_of(number), self._step_id(number), changes)

    def _stage_elsewhere(self, numbers: range) -> None:
        """The same by copying rows of our API in the database, as another process would have staged them."""
        example = f"example-{self.tag}-{numbers.start}"
        for changes in staged_changes():
            self.store.stage_changes(self.sessions[0], example, changes)
        names = column_names(StagedChange)
        values = {"session_id": "session.id", "step_id": "step.id"}
        execute(
            self.alias,
            f"""
            INSERT INTO "{StagedChange._meta.db_table}" ({", ".join(names)})
            SELECT {", ".join(values.get(name, f"example.{name}") for name in names)}
            FROM unnest(%s::text[], %s::text[]) AS step(id, session_name)
            JOIN "{Session._meta.db_table}" AS session ON session.session_id = step.session_name
            JOIN "{StagedChange._meta.db_table}" AS example ON example.step_id = %s""",
            [
                [self._step_id(number) for number in numbers],
                [self._session_of(number) for number in numbers],
                example,
            ],
        )
        self.store.discard_staging(self.sessions[0], example)


class StepInFull(Step):
    """A step that stores the whole state, as one with a state that was made and not loaded does."""

    def next_request(self) -> tuple[str, SessionState, StepInfo]:
        session_id, state, step = super().next_request()
        return session_id, replace(state), step


class StepInsideAtomic(Step):
    """A step in the caller's transaction, which its commit ends."""

    def __call__(self) -> None:
        with transaction.atomic(using=self.alias):
            super().__call__()


def used_staging(bench: Bench) -> None:
    """A table of staged changes that has been in use: how it is read is planned by its pages."""
    store = DatabaseStateStore()
    (session_id,) = sessions_of(0, per_worker=1)
    (changes, *_) = staged_changes()
    for number in range(1_000):
        store.stage_changes(session_id, "earlier", {**changes, "tool_call_id": f"call-{number}"})
    store.discard_staging(session_id, "earlier")


def merged_changes() -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for changes in staged_changes():
        merged |= changes["merge_changes"]
    return merged


def step_evidence(alias: str = "default", prefix: str = "s", *, is_staged: bool = False) -> Evidence:
    """Versions and message counts grow, and with them the rows of messages, checkpoints and taken staging."""
    session = f"FROM \"{Session._meta.db_table}\" WHERE tenant = '' AND session_id LIKE '{prefix}-%'"
    sql = f"""
        SELECT (SELECT sum(version) {session}), (SELECT sum(message_count) {session}),
            (SELECT count(*) FROM "{Message._meta.db_table}"),
            (SELECT count(*) FROM "{Checkpoint._meta.db_table}" WHERE kind = 'step'),
            (SELECT count(*) FROM "{StagedChange._meta.db_table}")"""
    return Evidence(sql, (1, 2, 2, 1, -STAGED if is_staged else 0), alias)


def step_limit(kib: int = 4, *, alias: str = "default", is_staged: bool = False) -> Limit:
    """The same facts by one statement of pgbench."""
    return Limit(
        script=_limit_script(kib, alias),
        evidence=Evidence(LIMIT_NUMBERS, (1, 2, 2, 1, -STAGED if is_staged else 0), alias),
        stage=_stage_for_limit if is_staged else None,
    )


def _limit_script(kib: int, alias: str) -> Script:
    return Script(
        choose=f"\\set s 1 + :client_id * {PER_WORKER} + :k % {PER_WORKER}",
        sql="""
WITH taken AS (
    DELETE FROM ref_staged
    WHERE session_id = 's-' || :s AND step_id = 'step-' || :tag || '-' || :client_id || '-' || :k
    RETURNING payload
), head AS (
    UPDATE ref_session SET version = version + 1, message_count = message_count + 2, status = 'active',
        updated_at = clock_timestamp(),
        state = :state::jsonb || coalesce(
            (SELECT jsonb_object_agg(each.key, each.value) FROM taken, jsonb_each(payload) AS each), '{}')
    WHERE id = 's-' || :s AND version >= 1 RETURNING id, version, message_count, state
), said AS (
    INSERT INTO ref_message
    SELECT id, message_count - 1, 'assistant', :first::jsonb, clock_timestamp() FROM head
    UNION ALL
    SELECT id, message_count, 'assistant', :second::jsonb, clock_timestamp() FROM head
)
INSERT INTO ref_checkpoint
SELECT id, version, state, message_count, clock_timestamp() FROM head RETURNING version;
""",
        parameters={
            "state": json.dumps(state_of(kib)),
            "first": json.dumps(message(1)),
            "second": json.dumps(message(2)),
        },
        alias=alias,
    )


def _stage_for_limit(tag: str, clients: int, numbers: range) -> None:
    """The staged rows of the transactions to come, keyed as `_limit_script` looks for them."""
    for order, changes in enumerate(staged_changes()):
        execute(
            "default",
            f"""
            INSERT INTO ref_staged
            SELECT 's-' || 1 + client * {PER_WORKER} + k %% {PER_WORKER},
                'step-' || %s || '-' || client || '-' || k, %s, %s::jsonb
            FROM generate_series(0, %s) AS client, generate_series(%s, %s) AS k""",
            [tag, order, json.dumps(changes["merge_changes"]), clients - 1, numbers.start, numbers.stop - 1],
        )
