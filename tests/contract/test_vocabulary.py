"""Names and value objects, as the contract fixes them."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import pytest

from helix_store.core import types
from helix_store.core.types import (
    Checkpoint,
    CheckpointHead,
    CheckpointPage,
    CheckpointSource,
    InterruptKind,
    InterruptRequest,
    MessagePage,
    Run,
    RunStatus,
    SessionHead,
    SessionMode,
    SessionPage,
    SessionState,
    SessionStatus,
    StagedChanges,
    StatusChange,
    StatusConflict,
    StepCommit,
    StepInfo,
    StreamStatus,
    SubSessionRef,
    UsageKind,
)
from helix_store.exceptions import InvalidPayload
from helix_store.testing.state_store.samples import FIELD_VALUES
from tests.cells import for_each

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
RICHEST: dict[str, Any] = {
    "session_id": "session",
    "version": 3,
    "message_count": 2,
    "created_at": NOW,
    "updated_at": NOW,
    **{field: value for field, value in FIELD_VALUES if value},
}
STATE = SessionState(**RICHEST)
HEAD = SessionHead(**{field.name: RICHEST[field.name] for field in fields(SessionHead)})
CHECKPOINT_HEAD = CheckpointHead(
    checkpoint_id="c",
    session_id="session",
    run_id="run",
    step_id="step",
    step_count=1,
    status=SessionStatus.PAUSED,
    message_count=2,
    stream_sequence=3,
    created_at=NOW,
)
CHECKPOINT = Checkpoint(
    **{field.name: getattr(CHECKPOINT_HEAD, field.name) for field in fields(CHECKPOINT_HEAD)}, state=STATE
)
RUN = Run(
    run_id="run",
    session_id="session",
    turn=1,
    status=RunStatus.FAILED,
    step_count=2,
    start_sequence=3,
    started_at=NOW,
    ended_at=NOW,
    completion_reason="boom",
    error={"code": 1},
)
OBJECTS: list[Any] = [
    STATE,
    HEAD,
    CHECKPOINT,
    CHECKPOINT_HEAD,
    RUN,
    SubSessionRef(sub_session_id="sub", agent_type="a", location="remote", remote={"url": "x"}, output=[1]),
    StagedChanges(tool_call_id="call", patches=[{"op": "remove", "path": "/a"}], merge_changes={"a": 1}),
    StepInfo("step", 1, 2),
    StepCommit("c", 4),
    StatusChange(new_version=2),
    StatusConflict(current_status=SessionStatus.FAILED, current_version=2),
    InterruptRequest(session_id="s", kind=InterruptKind.ABORT, reason="fire", run_id="run", requested_at=NOW),
    SessionPage(sessions=[HEAD], total=None, offset=0, limit=50, has_more=True, next_cursor="c"),
    MessagePage(messages=[{"role": "user"}], total=1, has_more=False),
    CheckpointPage(items=[CHECKPOINT_HEAD], next_cursor=None, total=1),
]


@for_each(
    ("enumeration", "values"),
    [
        (SessionStatus, "active running paused interrupted completed failed"),
        (
            RunStatus,
            "running completed failed interrupted suspended_client_tool suspended_awaiting_children "
            "suspended_step_partial",
        ),
        (SessionMode, "standard persistent"),
        (UsageKind, "tokens tool subagent custom"),
        (StreamStatus, "active paused ended failed"),
        (CheckpointSource, "input loop interrupt fork step"),
        (InterruptKind, "interrupt abort"),
    ],
)
def test_an_enumeration_holds_these_texts(enumeration: type[StrEnum], values: str) -> None:
    assert issubclass(enumeration, StrEnum)
    assert sorted(enumeration) == sorted(values.split())


def test_completed_and_failed_are_the_terminal_statuses() -> None:
    assert {status for status in SessionStatus if status.is_terminal} == {"completed", "failed"}
    assert set(types.TERMINAL_STATUSES) == {"completed", "failed"}
    assert set(types.NON_TERMINAL_STATUSES) == {"active", "running", "paused", "interrupted"}


@for_each(
    ("value_object", "names"),
    [
        (
            SessionState,
            "session_id agent_type status version step_count resume_count mode custom_state output error "
            "failure_reason user_id tags metadata title workspace_id directory parent_session_id "
            "root_session_id stream_id message_count pending_client_tool_calls completed_client_tool_calls "
            "client_tool_call_ownership suspension_context suspended_awaiting_children suspended_step_id "
            "tracing_context expires_at workspace_refs created_at updated_at",
        ),
        (
            Checkpoint,
            "checkpoint_id session_id run_id step_id step_count status state message_count stream_sequence "
            "created_at",
        ),
        (
            Run,
            "run_id session_id turn status step_count start_sequence started_at ended_at completion_reason "
            "error build",
        ),
        (
            SubSessionRef,
            "sub_session_id agent_type parent_tool_call_id status location remote output error",
        ),
        (StagedChanges, "tool_call_id patches merge_changes timestamp"),
        (StepInfo, "step_id step_count stream_sequence"),
        (StepCommit, "checkpoint_id new_version"),
        (StatusChange, "ok new_version"),
        (StatusConflict, "ok current_status current_version"),
        (SessionPage, "sessions total offset limit has_more next_cursor"),
        (MessagePage, "messages total has_more"),
        (CheckpointPage, "items next_cursor total"),
    ],
)
def test_a_value_object_is_a_dataclass_with_at_least_these_fields(value_object: type, names: str) -> None:
    assert is_dataclass(value_object)
    assert {field.name for field in fields(value_object)} >= set(names.split())


def test_the_samples_of_the_contract_suite_cover_every_field_that_a_caller_may_write() -> None:
    owned = {"session_id", "version", "message_count", "created_at", "updated_at"}
    assert {field for field, _ in FIELD_VALUES} == {field.name for field in fields(SessionState)} - owned


@for_each("value", OBJECTS)
def test_a_value_object_comes_back_from_its_dict_and_from_json(value: Any) -> None:
    plain = value.to_dict()
    assert list(plain) == [field.name for field in fields(value)]
    assert repr(type(value).from_dict(plain)) == repr(value)
    text = json.dumps(plain, allow_nan=False)
    assert repr(type(value).from_dict(json.loads(text))) == repr(value)


@for_each("value", OBJECTS)
def test_a_dict_shares_nothing_with_its_value_object(value: Any) -> None:
    before = repr(value)
    _spoil(value.to_dict())
    assert repr(value) == before


@for_each("value", OBJECTS[1:])
def test_a_result_is_frozen(value: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(value)[0].name, "changed")


def test_a_session_state_is_there_to_be_changed() -> None:
    state = SessionState(session_id="session", agent_type="agent")
    state.title = "changed"
    assert state.title == "changed"


@for_each("value", OBJECTS)
def test_a_dict_with_an_unknown_key_or_without_a_needed_one_is_refused(value: Any) -> None:
    plain = value.to_dict()
    with pytest.raises(InvalidPayload):
        type(value).from_dict({**plain, "unknown": 1})
    with pytest.raises(InvalidPayload):
        type(value).from_dict([])


def test_a_status_change_is_truthy_and_a_conflict_is_not() -> None:
    change, conflict = OBJECTS[9], OBJECTS[10]
    assert (bool(change), change.ok, bool(conflict), conflict.ok) == (True, True, False, False)


def _spoil(value: Any) -> None:
    """Change every list and dict in a plain value."""
    if isinstance(value, dict):
        for item in value.values():
            _spoil(item)
        value["spoiled"] = True
    elif isinstance(value, list):
        for item in value:
            _spoil(item)
        value.append("spoiled")
