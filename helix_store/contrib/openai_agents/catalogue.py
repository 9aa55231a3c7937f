"""The tables and the conversation that the catalogue registers."""

from __future__ import annotations

from typing import Any, Final

from helix_store.catalogue import AppTable
from helix_store.contrib.openai_agents.models import OpenAIRunState
from helix_store.core.transcript import parts_of
from helix_store.reports import ItemConversation, Said

_NOT_HERE: Final = "The claim belongs to a process that works on the other database."

TABLES: Final = (
    AppTable(
        OpenAIRunState,
        record="openai_run_state",
        order=("state_id",),
        not_exported=dict.fromkeys(("claim_owner", "claim_expires_at"), _NOT_HERE),
    ),
)


def _says(item: dict[str, Any]) -> Said:
    kind = str(item.get("type", "message"))
    role = item.get("role")
    if not isinstance(role, str):
        role = "tool" if kind.endswith("_output") else "assistant"
    return Said(role, parts_of({**item, "role": role}))


CONVERSATION = ItemConversation("OpenAI Agents SDK", _says, lane="main")
"""Branches of a session are lanes. Every session of the SDK begins with ``main``."""
