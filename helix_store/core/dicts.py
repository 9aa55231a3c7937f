"""The dicts that calls take, for editors and type checkers. A call also accepts any other mapping; if a
payload may have keys other than those named here, they are stored unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal
from typing import Any, Literal, Required, TypeAlias, TypedDict

from helix_store.core.approvals import Actor
from helix_store.core.types import Duration, Timestamp, UsageKind
from helix_store.core.usage import TokenCounts, UsageSource

__all__ = [
    "AnyMessage",
    "AnyStagedChanges",
    "AnyToolCall",
    "AnyUsageEntry",
    "DefaultResultDict",
    "MessageDict",
    "PatchDict",
    "StagedChangesDict",
    "TokenCountsDict",
    "ToolCallDict",
    "UsageEntryDict",
    "UsageSourceDict",
]


class MessageDict(TypedDict, total=False):
    """A message, in the form of chat completions. Only ``role`` is required.

    Example::

        hello: MessageDict = {"role": "user", "content": "To Kyoto, please."}
        session.say(hello)
    """

    role: Required[str]
    content: str | list[Any] | None
    name: str
    tool_calls: list[Any]
    tool_call_id: str
    thinking: Any


class DefaultResultDict(TypedDict):
    """The result that a call gets if no one answers before its deadline."""

    result: Any


class ToolCallDict(TypedDict, total=False):
    """A tool call that a client or a person answers; with an ``approval_id``, it asks for an approval.

    A ``deadline`` may be a time, or a duration from now. ``permission`` is "app_label.codename", and
    ``requester`` is the actor who may not answer. Only an approval may have ``approvals`` (the number of
    approvals that it needs) and ``editable``. An approval has no other keys: put your own data in
    ``metadata``.

    Example::

        call: ToolCallDict = {"tool_name": "book", "input": {"eur": 394}, "deadline": timedelta(days=7)}
        with session.step() as step:
            step.wait_for({"call-1": call})
    """

    tool_name: Required[str]
    input: Any
    run_id: str | None
    requested_at: Timestamp | None
    deadline: Timestamp | timedelta | None
    approval_id: str | None
    on_expiry: Literal["fail", "reject"] | DefaultResultDict | None
    permission: str | None
    requester: Actor | None
    approvals: int
    editable: bool
    metadata: dict[str, Any]


PatchDict = TypedDict(
    "PatchDict",
    {
        "op": Required[Literal["add", "remove", "replace", "move", "copy", "test"]],
        "path": Required[str | list[str | int]],
        "from": str | list[str | int],
        "value": Any,
    },
    total=False,
)
"""A JSON Patch operation. A path is a JSON pointer or a list of keys and indexes."""


class StagedChangesDict(TypedDict, total=False):
    """The changes of one tool call to the custom state, as patches or as values to merge.

    Example::

        changes: StagedChangesDict = {"tool_call_id": "call-1", "merge_changes": {"order": "A-17"}}
        store.sessions.stage_changes("trip", "step-1", changes)
    """

    tool_call_id: Required[str]
    patches: list[PatchDict]
    merge_changes: dict[str, Any] | None
    timestamp: Timestamp | None


class UsageSourceDict(TypedDict):
    """The agent, tool or sub-agent that caused the usage."""

    type: str
    name: str


class TokenCountsDict(TypedDict, total=False):
    prompt: int
    completion: int
    reasoning: int
    cached: int
    cache_write: int
    audio_prompt: int
    audio_completion: int
    total: int


class UsageEntryDict(TypedDict, total=False):
    """One event with usage; its other fields depend on ``kind``, as in `UsageEntry`.

    Example::

        entry: UsageEntryDict = {
            "kind": "tokens",
            "session_id": "trip",
            "step_count": 1,
            "timestamp": datetime.now(UTC),
            "source": {"type": "agent", "name": "planner"},
            "model": "gpt-4o",
            "tokens": {"prompt": 120, "completion": 30, "total": 150},
        }
        store.usage.record_entry(entry)
    """

    kind: Required[UsageKind | Literal["tokens", "tool", "subagent", "custom"]]
    session_id: Required[str]
    step_count: Required[int]
    timestamp: Required[Timestamp]
    source: Required[UsageSource | UsageSourceDict]
    run_id: str | None
    id: str | None
    cost_usd: Decimal | int | float | str | None
    model: str
    tokens: TokenCounts | TokenCountsDict
    tool_name: str
    agent_type: str
    sub_session_id: str
    success: bool
    duration_ms: Duration | None
    type: str
    name: str
    amount: int | float
    unit: str | None


AnyMessage: TypeAlias = MessageDict | Mapping[str, Any]
AnyToolCall: TypeAlias = ToolCallDict | Mapping[str, Any]
AnyStagedChanges: TypeAlias = StagedChangesDict | Mapping[str, Any]
AnyUsageEntry: TypeAlias = UsageEntryDict | Mapping[str, Any]
