"""The table of run states, for the catalogue."""

from typing import Final

from helix_store.catalogue import AppTable
from helix_store.contrib.openai_agents.models import OpenAIRunState

_NOT_HERE: Final = "The claim belongs to a process that works on the other database."

TABLES: Final = (
    AppTable(
        OpenAIRunState,
        record="openai_run_state",
        order=("state_id",),
        not_exported=dict.fromkeys(("claim_owner", "claim_expires_at"), _NOT_HERE),
    ),
)
