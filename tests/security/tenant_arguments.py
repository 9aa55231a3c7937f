"""Arguments for every public method of every store, by the names of the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from helix_store.core.types import SessionState, StepInfo

__all__ = ["FOLLOWING", "LONG_AGO", "MESSAGE", "Names", "arguments_of", "choices_of", "cursor_of"]

LONG_AGO: Final = 1_600_000_000_000
MESSAGE: Final = {"role": "user", "content": "hello"}


@dataclass(frozen=True, slots=True)
class Names:
    """The ids and other values by which one world is found. ``made`` are those that the stores chose."""

    prefix: str
    made: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return f"{self.prefix}-{name}"

    @property
    def state(self) -> SessionState:
        return SessionState(
            session_id=self.session,
            agent_type=self.agent,
            parent_session_id=self.session,
            root_session_id=self.session,
            stream_id=self.session,
            user_id=self.user,
            workspace_id=self.workspace,
        )

    @property
    def calls(self) -> dict[str, dict[str, Any]]:
        call = {"tool_name": "ask", "deadline": LONG_AGO, "run_id": self.run}
        return {self.call: call}

    @property
    def entry(self) -> dict[str, Any]:
        return {
            "kind": "tokens",
            "session_id": self.session,
            "run_id": self.run,
            "step_count": 1,
            "timestamp": LONG_AGO,
            "source": {"type": "agent", "name": self.agent},
            "id": self.entry_id,
            "model": self.model,
            "tokens": {"prompt": 1, "total": 1},
        }


Value = Callable[[Names], Any]

IDENTIFYING: Final[dict[str, Value]] = {
    "agent_type": lambda names: names.agent,
    "approval_id": lambda names: names.approval,
    "author": lambda names: names.user,
    "calls": lambda names: names.calls,
    "directory": lambda names: names.directory,
    "effect_id": lambda names: names.operation,
    "entries": lambda names: [names.entry],
    "entry": lambda names: names.entry,
    "key": lambda names: names.key,
    "metadata": lambda names: {"of": names.metadata},
    "model": lambda names: names.model,
    "name": lambda names: names.session,
    "namespace": lambda names: names.namespace,
    "new_session_id": lambda names: names.session,
    "operation_id": lambda names: names.operation,
    "owner": lambda names: names.owner,
    "owner_session_id": lambda names: names.session,
    "parent_session_id": lambda names: names.session,
    "refs": lambda names: [{"sub_session_id": names.child, "agent_type": names.agent}],
    "root_session_id": lambda names: names.session,
    "run_id": lambda names: names.run,
    "session_id": lambda names: names.session,
    "staged": lambda names: {"tool_call_id": names.call, "merge_changes": {"notes": [2]}},
    "state": lambda names: names.state,
    "step_id": lambda names: names.step,
    "stream_id": lambda names: names.session,
    "sub_session_id": lambda names: names.child,
    "tags": lambda names: [names.tag],
    "text": lambda names: names.title,
    "thread_id": lambda names: names.thread,
    "thread_ids": lambda names: [names.thread],
    "title": lambda names: names.title,
    "tool_call_id": lambda names: names.call,
    "user_id": lambda names: names.user,
    "value": lambda names: names.user,
    "workspace_id": lambda names: names.workspace,
}
"""Parameters whose value can be that of another tenant: an id, a filter, or a payload with ids in it."""

MADE: Final = {
    "before": "before",
    "checkpoint_id": "checkpoint_id",
    "parent_id": "checkpoint_id",
    "post_id": "post_id",
}
"""The same for ids that the stores make; one store's are not those of another: see `Names.made`."""

REQUIRED: Final[dict[str, Any]] = {
    "agent_name": "writer",
    "append_messages": [MESSAGE],
    "changes": {"notes": [1]},
    "chunks": [{"type": "text_delta"}],
    "context": {},
    "done": True,
    "date_from": datetime(2020, 1, 1, tzinfo=UTC),
    "date_to": datetime(2021, 1, 1, tzinfo=UTC),
    "error": "boom",
    "expected": ["active", "running"],
    "from_sequence": 0,
    "keep": 1,
    "limit_tokens": 1,
    "kind": "suspended_client_tool",
    "message": MESSAGE,
    "messages": [MESSAGE],
    "older_than": timedelta(),
    "role": "user",
    "scope": "user",
    "snapshot": {"version": 1},
    "status": "completed",
    "timeout_ms": 1,
}
"""Values of required parameters that identify nothing."""

GIVEN: Final = frozenset({"limit_tokens"})
"""Optional parameters that their calls need: they take one of several."""

OPTIONAL: Final = {
    *("actor", "digest", "input"),
    *("limit_tokens", "limit_usd", "period"),
    *("approved", "array_replacements", "awaiting_children", "bucket", "chunk_size", "completion_reason"),
    *("content", "count", "created_from", "created_to", "custom_state", "cycle_state", "date_from"),
    *("date_to", "direction", "dry_run", "error", "expected_version", "expires_at", "failure_reason"),
    *("fencing_token", "from_sequence", "group_by", "include_sub_agents", "include_thinking"),
    *(
        "keep_chunks",
        "keep_usage",
        "kind",
        "kinds",
        "limit",
        "message_index",
        "mode",
        "node_id",
        "not_before",
    ),
    *("node_results", "now", "offset", "order", "order_by", "output", "pending", "pending_nodes", "reason"),
    *(
        "result",
        "source",
        "start_sequence",
        "states",
        "status",
        "step_count",
        "step_range",
        "supersede",
        "tokens_in",
    ),
    *(
        "timeout_ms",
        "tokens_out",
        "tool_calls",
        "tool_results",
        "tracing",
        "ttl_ms",
        "version",
        "with_history",
    ),
}
"""Optional parameters that identify nothing; they keep their defaults."""


FOLLOWING: Final = frozenset({"include_sub_agents", "with_history"})
"""Flags that make a call follow stored ids."""


def choices_of(method: Callable[..., Any]) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    """Which parameters are given, and which of these with a value of another tenant.

    All required ones, alone and with each optional one; and each of all of them beside own values.
    """
    parameters = inspect.signature(method).parameters.values()
    named = [each for each in parameters if each.name != "self" and _identifies(method, each)]
    required = frozenset(
        each.name
        for each in parameters
        if each.name in GIVEN or (each.name != "self" and each.default is each.empty)
    )
    others = required & {each.name for each in named}
    yield required, others
    for name in (each.name for each in named):
        yield required | {name}, others | {name}
        yield required | {name}, frozenset({name})


def arguments_of(
    store: type[Any], method: str, chosen: frozenset[str], others: frozenset[str], *, own: Names, other: Names
) -> dict[str, Any]:
    return {name: _value(store, method, name, other if name in others else own) for name in sorted(chosen)}


def cursor_of(store: type[Any], method: str) -> str:
    """The key in `Names.made` of the second page of a list, sync or async."""
    return f"{store.__name__}.{method.removeprefix('a')}"


def _identifies(method: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    name = parameter.name
    if name in IDENTIFYING or name in MADE or name in ("cursor", "step"):
        return True
    known: Container[str] = REQUIRED if parameter.default is parameter.empty else OPTIONAL
    assert name in known, (
        f"{method.__qualname__} has a new parameter {name!r}. Add it to IDENTIFYING in {__name__} if its "
        "value can be one of another tenant, and fill the worlds with it; else to REQUIRED or OPTIONAL."
    )
    return False


def _value(store: type[Any], method: str, name: str, names: Names) -> Any:
    if name in FOLLOWING:
        return True
    if name == "cursor":
        return names.made[cursor_of(store, method)]
    if name in MADE:
        return names.made[f"{store.__name__}.{MADE[name]}"]
    if name == "step":
        return 1 if method.endswith("save_checkpoint") else StepInfo(names.step, 1)
    return IDENTIFYING[name](names) if name in IDENTIFYING else REQUIRED[name]
