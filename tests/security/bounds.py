"""The bound of every public argument, as docs/payloads.md states it, and how to reach and to exceed it.

An argument has a path: its name, followed by the names of fields for a value object or a record. The bound
of a path is found under ``method.path``, else under the path, else under its last name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from helix_store.core.limits import (
    MAX_BIGINT,
    MAX_CALL_ITEMS,
    MAX_CHECKPOINT_ID_CHARACTERS,
    MAX_DIRECTORY_BYTES,
    MAX_ID_BYTES,
    MAX_ID_CHARACTERS,
    MAX_LANE_BYTES,
    MAX_METADATA_BYTES,
    MAX_REASON_BYTES,
    MAX_TAGS_BYTES,
    MAX_TITLE_BYTES,
    UNLIMITED,
    Limits,
)
from helix_store.core.patches import MAX_OPERATIONS
from helix_store.core.validation import MAX_EPOCH_MILLISECONDS

__all__ = ["BOUNDS", "COLLECTIONS", "LIMITS", "Bound", "Growing", "bound_of"]

LIMITS: Final = Limits(
    max_state_bytes=100_000, max_message_bytes=20_000, max_staged_bytes=4_000, max_chunk_bytes=2_000
)
"""The configurable limits of the tests: small, so that exceeding them is quick."""

_RANDOM: Final = random.Random(14)  # noqa: S311  text that PostgreSQL cannot compress


@dataclass(frozen=True)
class Bound:
    """Values at the bound, which are accepted, and values beyond it, which are refused before SQL."""

    within: Sequence[Any]
    beyond: Sequence[Any]


@dataclass(frozen=True)
class Growing:
    """A payload with a text of any length in it; the exact bound follows from the error."""

    build: Callable[[str], Any]


def _random_text(length: int, first: int, last: int) -> str:
    return "".join(chr(_RANDOM.randint(first, last)) for _ in range(length))


def _one_of(*words: str) -> Bound:
    return Bound(words, ["", "nothing", "x" * 1_000_000, 7])


def _bytes(limit: int) -> Bound:
    return Bound(
        ["", "x" * limit, _random_text(limit // 4, 0x1F300, 0x1F5FF)],
        ["x" * (limit + 1), _random_text(limit // 4 + 1, 0x1F300, 0x1F5FF), "x" * 10_000_000, 7, "\x00"],
    )


def _number(low: int, high: int) -> Bound:
    return Bound([low, high], [low - 1, high + 1, 2**70, 10**5_000, True, 1.5, "1"])


_astral = MAX_ID_BYTES // 4
_ID: Final = Bound(
    [
        "x" * MAX_ID_CHARACTERS,
        _random_text(MAX_ID_CHARACTERS, 0x4E00, 0x9FFF),
        _random_text(_astral, 0x20000, 0x2A6DF),
    ],
    [
        "",
        "x" * (MAX_ID_CHARACTERS + 1),
        _random_text(_astral + 1, 0x20000, 0x2A6DF),
        "x" * 10_000_000,
        "\x00",
        "\ud800",
        7,
    ],
)
_USER_ID: Final = Bound([*_ID.within, 7, UUID(int=7)], [*_ID.beyond[:-1], True, 1.5])
_OPTIONAL_ID: Final = Bound(["", *_ID.within], _ID.beyond[1:])
_CHECKPOINT_ID: Final = Bound(
    ["x" * MAX_CHECKPOINT_ID_CHARACTERS], ["", "x" * (MAX_CHECKPOINT_ID_CHARACTERS + 1), "\x00", 7]
)
_COUNT: Final = _number(0, MAX_BIGINT)
_FROM_ONE: Final = _number(1, MAX_BIGINT)
_MILLISECONDS: Final = Bound(
    [0, MAX_EPOCH_MILLISECONDS], [-1, MAX_EPOCH_MILLISECONDS + 1, 1_700_000_000, 2**70, 1.5, "now"]
)
_BEFORE_YEAR_ONE: Final = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))
_TIME: Final = Bound(
    [
        0,
        MAX_EPOCH_MILLISECONDS,
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    ],
    [_BEFORE_YEAR_ONE, -1, MAX_EPOCH_MILLISECONDS + 1, 2**70, 1.5, "now", datetime(2026, 1, 1)],  # noqa: DTZ001
)
_CENTURY: Final = timedelta(days=36_525)
_TTL: Final = _number(1, 7 * 24 * 3_600_000)
_FLAG: Final = Bound([True, False], [])
"""Any value counts as true or false, so there is nothing beyond."""
_ANY_TEXT: Final = Bound(["x" * 100_000, "nul \x00", "low \ude00", "x" * 10_000_000], [7])
"""A failure reason: it is cut or mended, and never refused."""
_LANE: Final = Bound(
    ["", "x" * MAX_LANE_BYTES, "é" * (MAX_LANE_BYTES // 2)],
    ["x" * (MAX_LANE_BYTES + 1), "é" * (MAX_LANE_BYTES // 2 + 1), "x" * 10_000_000, "\x00", "\ud800", 7],
)
_KEY: Final = Bound(_LANE.within[1:], ["", *_LANE.beyond])
_CURSOR: Final = Bound([], ["", "x", "x" * 10_000_000, 7, "\x00"])
_TEXT_OF_MEGABYTES: Final = Growing(lambda text: text)
_DOCUMENT: Final = Growing(lambda text: {"text": text})
_LIST: Final = Growing(lambda text: [text])
_STATUS: Final = _one_of("active", "running", "paused", "interrupted", "completed", "failed")
_RUN_STATUS: Final = _one_of("running", "completed", "failed", "interrupted", "suspended_client_tool")
_SUSPENSION: Final = _one_of("suspended_client_tool", "suspended_awaiting_children", "suspended_step_partial")
_STORED_BY_THE_STORE: Final = Bound([None, 0, "x" * 100], [])
"""Fields of a state that a save ignores."""

_TAGS: Final = Bound(
    [[], ["x" * (MAX_TAGS_BYTES - 4)], ["é" * 40] * 195],
    [["x" * (MAX_TAGS_BYTES - 3)], [""] * 10_000, ["x"] * 1_000_000, "text", [7], ["\x00"]],
)
_METADATA: Final = Bound(
    [{}, {"k": "x" * (MAX_METADATA_BYTES - 8)}],
    [{"k": "x" * (MAX_METADATA_BYTES - 7)}, {"x" * MAX_METADATA_BYTES: ""}, {"k": 7}, {7: "v"}, ["k"]],
)


def _many(item: Callable[[int], Any]) -> Bound:
    """A collection of items, one more than a call takes."""
    return Bound([], [[item(number) for number in range(MAX_CALL_ITEMS + 1)], "text", 7])


BOUNDS: Final[dict[str, Bound | Growing]] = {
    # Ids
    **dict.fromkeys(["user_id", "author"], _USER_ID),
    **dict.fromkeys(
        [
            "session_id",
            "agent_type",
            "parent_session_id",
            "root_session_id",
            "stream_id",
            "run_id",
            "step_id",
            "tool_call_id",
            "approval_id",
            "actor",
            "digest",
            "requester",
            "owner_session_id",
            "new_session_id",
            "operation_id",
            "sub_session_id",
            "name",
            "owner",
            "post_id",
            "effect_id",
            "post_message.key",
            "agent_name",
            "thread_id",
            "before",
            "node_id",
            "parent_id",
            "model",
            "tool_name",
            "type",
            "suspended_step_id",
            "parent_tool_call_id",
            "id",
            "role",
            "refs.status",
            "update_sub_session_ref.status",
        ],
        _ID,
    ),
    **dict.fromkeys(["workspace_id", "namespace", "unit", "tenant"], _OPTIONAL_ID),
    "checkpoint_id": _CHECKPOINT_ID,
    **dict.fromkeys(
        [
            f"{method}.checkpoint_id"
            for method in ("graph.get_checkpoint", "graph.fork", "snapshots.get", "snapshots.delete")
        ],
        _ID,
    ),
    "snapshots.claim.checkpoint_id": _ID,
    # Texts
    "title": _bytes(MAX_TITLE_BYTES),
    "text": Bound(["x" * MAX_TITLE_BYTES], ["", "x" * (MAX_TITLE_BYTES + 1), "\x00", 7]),
    "directory": _bytes(MAX_DIRECTORY_BYTES),
    **dict.fromkeys(["reason", "completion_reason"], _bytes(MAX_REASON_BYTES)),
    "failure_reason": _ANY_TEXT,
    "lane": _LANE,
    "key": _KEY,
    "keys": Bound(
        [[None], *([key] for key in _KEY.within)],
        [*([key] for key in _KEY.beyond), [*"ab", 7], "text", 7, {"key": 1}],
    ),
    "tags": _TAGS,
    "metadata": _METADATA,
    "cursor": _CURSOR,
    # Numbers and times
    **dict.fromkeys(
        [
            "expected_version",
            "fencing_token",
            "start_sequence",
            "step_count",
            "stream_sequence",
            "step",
            "resume_count",
            "duration_ms",
            "prompt",
            "completion",
            "reasoning",
            "cached",
            "cache_write",
            "audio_prompt",
            "audio_completion",
            "total",
            "tokens_in",
            "tokens_out",
            "offset",
            "keep",
            "message_index",
            "from_sequence",
            "timeout_ms",
        ],
        _COUNT,
    ),
    **dict.fromkeys(["items.limit", "items.before"], _COUNT),
    "wait_acquire.timeout_ms": Bound([0], _COUNT.beyond),
    "take_over.timeout_ms": Bound([0], _COUNT.beyond),
    **dict.fromkeys(["version", "limit", "chunk_size", "page_size"], _FROM_ONE),
    "keep_chunks": _number(0, UNLIMITED),
    "branch_session.message_index": Bound([0], _COUNT.beyond),
    "amount": Bound([0, 2**53, 1e300], [-1, 2**53 + 1, 1.1e300, float("nan"), float("inf"), "1"]),
    "cost_usd": Bound(
        [0, Decimal(MAX_BIGINT) / 10**12], [-1, Decimal(MAX_BIGINT + 1) / 10**12, Decimal("NaN"), "x", b"1"]
    ),
    **dict.fromkeys(["expires_at", "timestamp", "requested_at", "deadline", "not_before"], _MILLISECONDS),
    **dict.fromkeys(["created_from", "created_to", "date_from", "date_to", "now"], _TIME),
    "graph.get_messages.before": Bound(
        [0, MAX_BIGINT, datetime(1, 1, 1, tzinfo=UTC)], [-1, MAX_BIGINT + 1, 2**70, 1.5, "x", True]
    ),
    "older_than": Bound(
        [timedelta(0), _CENTURY, datetime(1, 1, 1, tzinfo=UTC), None],
        [
            timedelta(-1),
            timedelta.max,
            _CENTURY + timedelta(microseconds=1),
            _BEFORE_YEAR_ONE,
            datetime(2026, 1, 1),  # noqa: DTZ001
            1,
            "1",
        ],
    ),
    "delete_after": Bound(
        [timedelta(0), _CENTURY, 0, None],
        [timedelta(-1), timedelta.max, 36_526, 1e300, -1, float("nan"), "1"],
    ),
    **dict.fromkeys(["ttl_ms", "default_ttl_ms"], _TTL),
    **dict.fromkeys(
        ["poll_interval", "writer_lease"],
        Bound([0.001, timedelta(days=7)], [0, -1, timedelta(days=8), float("nan"), "1"]),
    ),
    "retention": Bound([timedelta(0), _CENTURY], [timedelta(-1), timedelta.max, 1, "1"]),
    "max_checkpoints_per_thread": Bound([1, MAX_BIGINT, None], [0, MAX_BIGINT + 1, 1.5, "1"]),
    "step_range": Bound([(0, MAX_BIGINT), (None, None)], [(0, 2**63), (-1, 0), (0,), 7, "ab", (0.5, 1)]),
    # Words
    "status": _STATUS,
    "list_sessions.status": Bound([*_STATUS.within, list(_STATUS.within)], _STATUS.beyond),
    "update_run.status": _RUN_STATUS,
    "expected": Bound([["active"], list(_STATUS.within)], [["nothing"], "active", ["active"] * 100_001, 7]),
    "states": Bound([[], ["waiting", "received", "withdrawn"]], [["nothing"], "waiting", [[]], 7]),
    "list_effects.states": Bound(
        [[], ["started", "done", "not_done", "unknown"]], [["nothing"], "started", [[]], 7]
    ),
    "mode": _one_of("standard", "persistent"),
    "kind": _one_of("interrupt", "abort"),
    "suspend.kind": _SUSPENSION,
    "suspension_kind": _SUSPENSION,
    **dict.fromkeys(["entry.kind", "entries.kind"], _one_of("custom")),
    "kinds": Bound(["tool", ["tool", "tokens"]], ["nothing", ["nothing"], 7, ["tool"] * 100_001]),
    "order": _one_of("asc", "desc"),
    "direction": _one_of("asc", "desc"),
    "order_by": _one_of("created_at", "updated_at"),
    "bucket": _one_of("hour", "day", "week", "month"),
    "group_by": _one_of("model", "agent_type", "user_id", "kind"),
    "source": _one_of("input", "loop", "interrupt", "fork"),
    "location": _one_of("local", "remote"),
    "graph.role": _one_of("user", "assistant", "system", "tool"),
    **dict.fromkeys(
        [
            "keep_usage",
            "supersede",
            "count",
            "include_thinking",
            "include_sub_agents",
            "with_history",
            "dry_run",
            "create",
            "skip_unreadable",
            "done",
            "recreate",
        ],
        _FLAG,
    ),
    "approved": Bound([True, False], ["yes", 1, 0]),
    "success": Bound([True, False], ["yes", 1, 0]),
    # Payloads
    **dict.fromkeys(
        ["custom_state", "changes", "context", "tracing", "remote", "output", "error"], _DOCUMENT
    ),
    **dict.fromkeys(
        ["pending_client_tool_calls", "completed_client_tool_calls", "client_tool_call_ownership"], _DOCUMENT
    ),
    **dict.fromkeys(["suspension_context", "tracing_context", "workspace_refs", "cycle_state"], _DOCUMENT),
    **dict.fromkeys(["awaiting_children", "suspended_awaiting_children", "pending_nodes"], _LIST),
    **dict.fromkeys(["result", "input", "content", "tool_calls", "tool_results"], _TEXT_OF_MEGABYTES),
    "on_expiry": Growing(lambda text: {"result": text}),
    "merge_changes": _DOCUMENT,
    "patches": Bound(
        [[{"op": "remove", "path": "/a"}] * 100],
        [[{}] * (MAX_OPERATIONS + 1), ["x" * 5_000], "text", {"op": "add"}],
    ),
    "node_results": Growing(lambda text: {"node": {"status": "completed", "text": text}}),
    "graph.create_session.metadata": _DOCUMENT,
    "graph.update_session.metadata": _DOCUMENT,
    "snapshot": Growing(lambda text: {"version": 1, "text": text}),
    "chunk": Growing(lambda text: {"type": "text", "text": text}),
    "message": Growing(lambda text: {"role": "user", "content": text}),
    # Collections
    "messages": Growing(lambda text: [{"role": "user", "content": text}]),
    "append_messages": Growing(lambda text: [{"role": "user", "content": text}]),
    "payload": _TEXT_OF_MEGABYTES,
    **dict.fromkeys(["payloads", "new", "items.expected"], _LIST),
    "chunks": Growing(lambda text: [{"type": "text", "text": text}]),
    "array_replacements": Bound(
        [[], ["key"] * MAX_CALL_ITEMS], [["key"] * (MAX_CALL_ITEMS + 1), [7], [[]], "text", 7]
    ),
    "thread_ids": Bound([[]], [["x"] * (MAX_CALL_ITEMS + 1), ["x" * 256], "text", 7]),
    # Of the store itself
    **dict.fromkeys(["state.version", "state.message_count"], _STORED_BY_THE_STORE),
    **dict.fromkeys(["state.created_at", "state.updated_at"], _STORED_BY_THE_STORE),
    "state.session_id": Bound([], ["another session", "x" * 10_000_000, 7]),
}

COLLECTIONS: Final[dict[str, Bound]] = {
    "messages": _many(lambda _: {"role": "user"}),
    "append_messages": _many(lambda _: {"role": "user"}),
    "chunks": _many(lambda _: {"type": "t"}),
    "refs": _many(lambda number: {"sub_session_id": str(number), "agent_type": "agent"}),
    "calls": Bound([], [{str(n): {"tool_name": "t"} for n in range(MAX_CALL_ITEMS + 1)}, "text", 7]),
    "pending": Bound([], [{str(n): {"tool_name": "t"} for n in range(MAX_CALL_ITEMS + 1)}, "text", 7]),
    "entries": _many(lambda _: {}),
    **dict.fromkeys(["payloads", "keys", "new"], _many(lambda _: None)),
}
"""More items than one call takes, and what is no collection."""


def bound_of(method: str, path: str) -> Bound | Growing | None:
    """The bound of an argument of a method, such as ``graph.fork`` and ``checkpoint_id``."""
    room, _, name = method.partition(".")
    for key in (f"{method}.{path}", f"{name}.{path}", f"{room}.{path}", path, path.rpartition(".")[2]):
        if key in BOUNDS:
            return BOUNDS[key]
    return None
