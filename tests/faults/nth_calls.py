"""Every public call that sends a statement, with what it may leave when one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from helix_store.adapters import SessionAdapter
from tests.database import counted_calls
from tests.database.counted_calls import Faces
from tests.databases import CommittedDatabase
from tests.faults import framework_calls, upkeep_calls
from tests.faults.nth_statement import Case

__all__ = ["CALLS", "CASES", "CLASSES", "ELSEWHERE", "FUNCTIONS", "NO_STATEMENT"]

Prepare = Callable[[CommittedDatabase], Callable[[], object]]


def _on_faces(prepare: Callable[[Faces], Callable[[], object]]) -> Prepare:
    return lambda database: prepare(Faces(database))


CLASSES: Final[dict[str, type[Any]]] = {
    **counted_calls.CLASSES,
    "adapter": SessionAdapter,
    **framework_calls.CLASSES,
}
FUNCTIONS: Final = {**upkeep_calls.FUNCTIONS, **upkeep_calls.TRANSFER}

CALLS: Final[dict[str, dict[str, Prepare]]] = {
    **{
        face: {name: _on_faces(prepare) for name, prepare in calls.items()}
        for face, calls in counted_calls.CALLS.items()
        if face in counted_calls.CLASSES
    },
    "adapter": upkeep_calls.ADAPTER,
    "upkeep": upkeep_calls.FUNCTIONS,
    "transfer": upkeep_calls.TRANSFER,
    **framework_calls.CALLS,
}

_IN_BATCHES: Final = {
    "upkeep": set(upkeep_calls.FUNCTIONS),
    "transfer": set(upkeep_calls.TRANSFER),
    "session handle": {"step with staged changes"},
    "LangGraph saver": {"put in a new thread"},
    "LangGraph store": {"delete_namespace"},
    "streams": {"prune to two chunks of one stream"},
}
"""Calls of more transactions than one. Each fault leaves whole ones, and a repeat does the rest.

A step stages a change before it ends, so that nothing is lost with the process; a thread's session is created
before its first checkpoint.
"""


_IN_A_BLOCK: Final = {"create_reader", "create_resumable_reader"}
"""Calls whose rows make them in a transaction, where a reader uses the connection of its caller."""


def _is_turn(face: str, name: str) -> bool:
    """A turn is a run: how it ended is written down, so a failed one leaves more than whole steps."""
    return face == "session handle" and name.startswith("turn")


def _is_effect(face: str, name: str) -> bool:
    """A failed effect is unknown and refuses a repeat: `test_lost_effects` and `test_effects` try these."""
    return face == "session handle" and name.startswith("effect")


CASES: Final = [
    Case(
        face,
        name,
        prepare,
        in_batches=name in _IN_BATCHES.get(face, set()) or _is_turn(face, name),
        ends=_is_turn(face, name),
        in_a_block=name in _IN_A_BLOCK,
    )
    for face, calls in CALLS.items()
    for name, prepare in calls.items()
    if not _is_effect(face, name)
]

NO_STATEMENT: Final = framework_calls.NO_STATEMENT
"""Public methods that send nothing, by class."""

_PURE: Final = "It computes, and sends nothing."
_ANNOUNCES: Final = "It reads, marks what it announces, and sends signals."
_IN_A_TURN: Final = "Its statements are those of the turns and steps of a session handle."
_MIGRATION: Final = "An operation of a migration: Django runs it in the migration's transaction."
_IN_MEMORY: Final = "It has no database."
_READS: Final = "It reads, across tenants."
_FIELD: Final = "A field of a model."
_SUITE: Final = "A suite of tests."
_IN_TABLES: Final = "Called in the transaction of an adapter, whose calls have rows."

_CHAT: Final = "Its statements are those of turns, posts and streams; tests/chat cuts and kills it."

ELSEWHERE: Final = {
    "helix_store.answering.aanswer_url": _READS,
    "helix_store.answering.answer_url": _READS,
    "helix_store.contrib.chat.Chat": _CHAT,
    "helix_store.contrib.chat.ChatTurn": _CHAT,
    "helix_store.contrib.chat.Out": _CHAT,
    "helix_store.contrib.langgraph.chat_answer": _CHAT,
    "helix_store.contrib.metrics.HealthView": _READS,
    "helix_store.contrib.metrics.HelixCollector": _READS,
    "helix_store.contrib.metrics.MetricsView": _READS,
    "helix_store.contrib.metrics.bearer_token": _PURE,
    "helix_store.contrib.metrics.read_figures": _READS,
    "helix_store.contrib.opentelemetry.TracedEffect": _IN_A_TURN,
    "helix_store.contrib.opentelemetry.TracedStep": _IN_A_TURN,
    "helix_store.contrib.opentelemetry.TracedTurn": _IN_A_TURN,
    "helix_store.contrib.opentelemetry.traced": _IN_A_TURN,
    "helix_store.contrib.opentelemetry.traced_answer": _CHAT,
    "helix_store.contrib.strands.DjangoStorage": "Its statements are those of the repository.",
    "helix_store.adapters.copy_rows": _IN_TABLES,
    "helix_store.adapters.register_conversation": _PURE,
    "helix_store.adapters.register_table": _PURE,
    "helix_store.adapters.registered_tables": _PURE,
    "helix_store.adapters.session_id_for": _PURE,
    "helix_store.adapters.Statement": _PURE,
    "helix_store.admin.SessionChildAdmin": "A page; its requests are tested in tests/admin.",
    "helix_store.admin.database_sites": _PURE,
    "helix_store.checkpointers.InMemorySnapshotCheckpointer": _IN_MEMORY,
    "helix_store.contrib.langgraph.register_types": _PURE,
    "helix_store.contrib.langgraph.UsageRecorder": "An error of the ledger never reaches the agent.",
    "helix_store.contrib.row_level_security.EnableRowLevelSecurity": _MIGRATION,
    "helix_store.contrib.session_search.IndexSessionSearch": _MIGRATION,
    "helix_store.core.approvals.call_digest": _PURE,
    "helix_store.core.contracts.require_state_store": _PURE,
    "helix_store.core.ids.checkpoint_id": _PURE,
    "helix_store.core.ids.parse_checkpoint_id": _PURE,
    "helix_store.core.merging.merge_changes": _PURE,
    "helix_store.core.patches.merge_changes": _PURE,
    "helix_store.core.patches.apply_patches": _PURE,
    "helix_store.core.payloads.decode": _PURE,
    "helix_store.core.payloads.encode": _PURE,
    "helix_store.core.transcript.parts_of": _PURE,
    "helix_store.core.typed_json.dumps": _PURE,
    "helix_store.core.typed_json.loads": _PURE,
    "helix_store.doctor.diagnose": "It reads; a repair is one transaction, tested in tests/doctor.",
    "helix_store.handles.Step": _IN_A_TURN,
    "helix_store.handles.Turn": _IN_A_TURN,
    "helix_store.models.fields.IdentifierField": _FIELD,
    "helix_store.models.fields.MomentField": _FIELD,
    "helix_store.models.fields.PayloadField": _FIELD,
    "helix_store.reports.Said": _PURE,
    "helix_store.reports.SessionDirectory": "It reads, and prunes one session after the other.",
    "helix_store.reports.list_streams": _READS,
    "helix_store.reports.usage_report": _READS,
    "helix_store.sessions.messages.aannounce_due_posts": _ANNOUNCES,
    "helix_store.sessions.messages.announce_due_posts": _ANNOUNCES,
    "helix_store.stores.InMemoryBudgetStore": _IN_MEMORY,
    "helix_store.stores.InMemoryLockManager": _IN_MEMORY,
    "helix_store.stores.InMemoryStateStore": _IN_MEMORY,
    "helix_store.stores.InMemoryStore": _IN_MEMORY,
    "helix_store.stores.InMemoryStreamManager": _IN_MEMORY,
    "helix_store.stores.InMemoryUsageStore": _IN_MEMORY,
    "helix_store.stores.MemoryWorld": _IN_MEMORY,
    "helix_store.stores.NoOpLockManager": _IN_MEMORY,
    "helix_store.stores.Step": _IN_A_TURN,
    "helix_store.stores.Store": "Its statements are those of its parts.",
    "helix_store.stores.Turn": _IN_A_TURN,
    "helix_store.stores.conditions.aannounce_ready": _ANNOUNCES,
    "helix_store.stores.conditions.afind_stuck": _READS,
    "helix_store.stores.conditions.announce_ready": _ANNOUNCES,
    "helix_store.stores.conditions.find_stuck": _READS,
    "helix_store.testing.state_store.MessageContract": _SUITE,
    "helix_store.testing.state_store.SessionContract": _SUITE,
    "helix_store.transfer.DatabaseSource": _READS,
    "helix_store.transfer.ExportFile": _PURE,
    "helix_store.views.stream_events": "A view on the readers of streams, whose calls have rows.",
    "helix_store.workspaces.StorageWorkspaceProvider": "It deletes files.",
    "helix_store.workspaces.configured_workspace_providers": _PURE,
}
"""Public names without a row, and why."""
