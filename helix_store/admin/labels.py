"""The labels of columns, and the names of statuses and other choices, in the reader's language.

The labels are not the ``verbose_name`` of the fields, because each change to those would need a migration.
"""

from __future__ import annotations

from typing import Any, Final

from django.utils.translation import gettext_lazy as _

LABELS: Final[dict[str, Any]] = {
    "agent_name": _("agent name"),
    "agent_type": _("agent type"),
    "cached_tokens": _("cached tokens"),
    "checkpoint_id": _("checkpoint id"),
    "claim_token": _("token of the claim"),
    "completion_tokens": _("completion tokens"),
    "custom_name": _("custom name"),
    "custom_type": _("custom type"),
    "duration_ms": _("duration in ms"),
    "entry_id": _("entry id"),
    "fencing_token": _("fencing token"),
    "floor": _("removed up to sequence"),
    "kind": _("kind"),
    "last_sequence": _("last sequence"),
    "message_count": _("number of messages"),
    "model": _("model"),
    "name": _("name"),
    "namespace": _("namespace"),
    "owner": _("owner"),
    "parent_checkpoint_id": _("parent checkpoint id"),
    "prompt_tokens": _("prompt tokens"),
    "reasoning_tokens": _("reasoning tokens"),
    "role": _("role"),
    "run_id": _("run id"),
    "sequence": _("sequence"),
    "session_agent_type": _("agent type of the session"),
    "size_bytes": _("size in bytes"),
    "snapshot_version": _("version of the snapshot"),
    "source": _("source"),
    "source_name": _("name of the source"),
    "source_type": _("type of the source"),
    "start_sequence": _("first message after sequence"),
    "status": _("status"),
    "step_count": _("number of steps"),
    "step_id": _("step id"),
    "stream_id": _("stream id"),
    "stream_sequence": _("sequence of the stream"),
    "sub_session_id": _("sub-session id"),
    "success": _("succeeded"),
    "tenant": _("tenant"),
    "token": _("fencing token"),
    "tool_name": _("tool name"),
    "total_tokens": _("total tokens"),
    "turn": _("turn"),
    "user_id": _("user id"),
    "version": _("version"),
    "writer_id": _("writer id"),
}

_STATUS_NAMES: Final = {
    "active": _("active"),
    "running": _("running"),
    "paused": _("paused"),
    "interrupted": _("interrupted"),
    "suspended_client_tool": _("paused for a person"),
    "suspended_awaiting_children": _("waits for sub-agents"),
    "suspended_step_partial": _("step half done"),
    "completed": _("completed"),
    "ended": _("ended"),
    "failed": _("failed"),
    "held": _("held"),
    "free": _("free"),
    "reached": _("limit reached"),
    "resumed": _("resumed"),
    "expired": _("expired"),
    "tokens": _("tokens"),
    "tool": _("tool"),
    "subagent": _("sub-agent"),
    "custom": _("custom"),
    "step": _("step"),
    "graph": _("graph"),
    "snapshot": _("snapshot"),
}


def name_of_status(value: str) -> str:
    """Return the name of a status. An unknown status is returned as it is stored."""
    return str(_STATUS_NAMES.get(value, value))
