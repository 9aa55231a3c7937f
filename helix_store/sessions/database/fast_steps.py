"""Staging, and the atomic step that merges what was staged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from helix_store.core.ids import checkpoint_id
from helix_store.core.types import StepCommit
from helix_store.engine.connections import release_once
from helix_store.engine.database import Database
from helix_store.sessions.database.bases import bases, stored_payload
from helix_store.sessions.database.staged_here import StagedRow, staged_here
from helix_store.sessions.database.staging import DatabaseStaging, staged_from
from helix_store.sessions.database.steps import DatabaseSteps
from helix_store.sessions.requests import EncodedMessage, StepRequest
from helix_store.sessions.sql import (
    MOST_LISTED,
    stage_sql,
    staged_sql,
    step_sql,
)

__all__ = ["FastStaging", "FastSteps"]


class FastStaging(DatabaseStaging):
    def stage(self, session_id: str, step_id: str, tool_call_id: str, text: str) -> None:
        if self.db.has_fast_writes:
            parameters = {
                "tenant": self.db.tenant,
                "session_id": session_id,
                "step_id": step_id,
                "tool_call_id": tool_call_id,
                "payload": text,
                "at": timezone.now(),
            }
            for (version,) in self.db.try_write(stage_sql(), parameters):
                row = StagedRow(version, text)
                staged_here.add(self.db, session_id, step_id, tool_call_id, row)
                return
        super().stage(session_id, step_id, tool_call_id, text)


class FastSteps(DatabaseSteps):
    _usually_staged = False
    """Whether the last step had changes staged elsewhere: where tools run, they do for most steps."""

    def commit(self, request: StepRequest) -> StepCommit:
        connection = self.db.connection
        with release_once(connection):
            if request.operation_id is None and self.db.has_fast_writes:
                commit = self._in_one_statement(connection, request)
                if commit is not None:
                    return commit
            return super().commit(request)

    def _in_one_statement(self, connection: BaseDatabaseWrapper, request: StepRequest) -> StepCommit | None:
        """Commit a step; ``None`` when it takes more deciding than one statement does.

        What is staged and was not staged here is read before, when it is to be expected, or else after a try
        that it stopped. It is committed only if the staging is still the same.
        """
        parameters = _step_parameters(self.db, request)
        known = staged_here.take(self.db, request.session_id, request.step.step_id)
        is_tried = bool(known) or not self._usually_staged
        if is_tried:
            commit = self._try(connection, request, parameters, known)
            if commit is not None:
                return commit
        rows = self.db.read(staged_sql(), parameters)
        staged = [StagedRow(version, text) for version, text in rows]
        if is_tried and staged == known:
            return None
        self._usually_staged = bool(staged)
        return self._try(connection, request, parameters, staged)

    def _try(
        self,
        connection: BaseDatabaseWrapper,
        request: StepRequest,
        parameters: dict[str, Any],
        staged: Sequence[StagedRow],
    ) -> StepCommit | None:
        encoded = self._promoted(request, [staged_from(row.text) for row in staged])
        stored = stored_payload(encoded, bases.get(self.db, request.session_id))
        sql = step_sql(
            messages=min(len(request.messages), MOST_LISTED + 1),
            merges=bool(staged),
            is_delta=stored.is_delta,
            is_expected=request.guard.expected_version is not None,
            is_fenced=request.guard.fencing_token is not None,
            is_of_run=request.run_id is not None,
        )
        parameters = {
            **parameters,
            "payload": stored.text,
            "base_id": stored.base_id,
            "base_key": stored.base_key,
            "size_bytes": encoded.size_bytes,
            "staged": [row.version for row in staged],
        }
        for version, row_id in self.db.try_write(sql, parameters):
            if not stored.is_delta:
                bases.keep(
                    self.db, request.session_id, stored.base_key, row_id, encoded.payload, encoded.members
                )
            return StepCommit(parameters["checkpoint_id"], new_version=version)
        return None


def _message_parameters(messages: Sequence[EncodedMessage]) -> dict[str, Any]:
    if len(messages) > MOST_LISTED:
        return {
            "roles": [message.role for message in messages],
            "texts": [message.text for message in messages],
        }
    parameters = {}
    for number, message in enumerate(messages, 1):
        parameters[f"role_{number}"], parameters[f"text_{number}"] = message.role, message.text
    return parameters


def _step_parameters(db: Database, request: StepRequest) -> dict[str, Any]:
    columns = request.encoded.columns
    return {
        **columns,
        "tags": json.dumps(columns["tags"]) if columns["tags"] else "[]",
        "metadata": json.dumps(columns["metadata"]) if columns["metadata"] else "{}",
        "tenant": db.tenant,
        "session_id": request.session_id,
        "expected_version": request.guard.expected_version,
        "fencing_token": request.guard.fencing_token,
        "at": timezone.now(),
        **_message_parameters(request.messages),
        "added": len(request.messages),
        "checkpoint_id": checkpoint_id(request.session_id, request.step.step_count),
        "run_id": request.run_id,
        "step_id": request.step.step_id,
        "step_number": request.step.step_count,
        "stream_sequence": request.step.stream_sequence,
        "envelope": request.encoded.envelope,
    }
