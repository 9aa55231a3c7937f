"""Faults, planted by SQL into the sample: for each rule at least one place that breaks this rule alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.apps import apps
from django.db import connections

from helix_store.doctor.findings import table_of
from helix_store.doctor.invariants import CHILDREN
from helix_store.models import Session
from tests.databases import CommittedDatabase

__all__ = ["FIXABLE", "LEFT", "PLANTED", "Planted", "execute"]

NOBODY: Final = 9_000_000_000
"""The key of no row."""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault: its rule, the table of the finding, and the statements that plant it.

    In a statement ``[run]`` is a table, and ``[=steps]`` the key of a session.
    """

    rule: str
    table: str | None
    sql: str
    count: int = 1
    name: str = ""
    remains: frozenset[str] = frozenset()
    """Columns that are not what they were before the fault, after a fix."""

    @property
    def id(self) -> str:
        return self.name or self.rule

    def plant(self, database: CommittedDatabase) -> None:
        for statement in self.sql.split(";"):
            execute(database, statement)


def execute(database: CommittedDatabase, statement: str) -> None:
    for model in apps.get_app_config("helix_store").get_models():
        statement = statement.replace(f"[{table_of(model)}]", model._meta.db_table)
    if "[=" in statement:
        heads = Session.objects.using(database.alias).filter(tenant=database.tenant)
        for name, key in heads.values_list("session_id", "pk"):
            statement = statement.replace(f"[={name}]", str(key))
    assert "[=" not in statement, statement
    with connections[database.alias].cursor() as cursor:
        cursor.execute(statement)


def _orphan(model: Any, column: str) -> Planted:
    """A copy of any row of a table, for an owner that does not exist."""
    names = [field.column for field in model._meta.concrete_fields if not field.primary_key]
    values = [str(NOBODY) if name == column else f'"{name}"' for name in names]
    columns = ", ".join(f'"{name}"' for name in names)
    table = model._meta.db_table
    return Planted(
        rule="orphan-row",
        table=table_of(model),
        name=f"orphan-row of {table_of(model)}",
        sql=f"INSERT INTO {table} ({columns}) SELECT {', '.join(values)} FROM {table} LIMIT 1",
    )


def _copy_of_current(kind: str) -> str:
    """A full and older state of a session, of another kind than its newest checkpoint."""
    return f"""
        INSERT INTO [checkpoint] (session_id, kind, namespace, version, source, step_count, status,
            message_count, stream_sequence, payload, envelope, size_bytes, created_at)
        SELECT session_id, '{kind}', '', 1, 'input', 0, '', 0, 0, '{{}}',
            '{{"agent_type":"a","status":"active"}}', 0, created_at
        FROM [checkpoint] WHERE id = (SELECT current_id FROM [session] WHERE id = [=steps])"""


_STOPPED: Final = """(SELECT id FROM [session] WHERE stopped_by = 'error'
        AND status IN ('active', 'paused', 'interrupted'))"""
_RUN: Final = """
    INSERT INTO [run] (session_id, run_id, turn, step_count, start_sequence, started_at, status, ended_at,
        completion_reason, fencing_token)
    VALUES ([=branch], 'planted', 1000, 0, 0, '2020-01-01 00:00:00',"""
_LOCK: Final = """
    INSERT INTO [lock] (tenant, name, token)
    SELECT tenant, session_id, 7 FROM [session] WHERE id = [=branch]"""

_NEWEST_STEP: Final = """
    (SELECT max(version) FROM [checkpoint] WHERE session_id = [=steps] AND kind = 'step')"""
_BASE: Final = "(SELECT id FROM [checkpoint] WHERE session_id = [=steps] AND kind = 'base')"
_LOST: Final = "DELETE FROM [message] WHERE session_id = [=steps] AND sequence = "
_PRUNED: Final = "(SELECT id FROM [stream] WHERE stream_id = 'pruned')"

FIXABLE: Final = (
    Planted(
        rule="message-count-off",
        table="session",
        sql="UPDATE [session] SET message_count = message_count + 3 WHERE id = [=steps]",
        name="message-count-off, too high",
    ),
    Planted(
        rule="message-count-off",
        table="session",
        sql="UPDATE [session] SET message_count = 2 WHERE id = [=steps]",
        name="message-count-off, too low",
    ),
    Planted(
        rule="deadline-off",
        table="session",
        sql="UPDATE [session] SET pending_deadline = NULL WHERE id = [=grandchild]",
        name="deadline-off, none",
    ),
    Planted(
        rule="deadline-off",
        table="session",
        sql="UPDATE [session] SET pending_deadline = '2020-01-01 00:00:00' WHERE id = [=branch]",
        name="deadline-off, without a call",
    ),
    Planted(
        rule="next-post-off",
        table="session",
        sql="UPDATE [session] SET next_post_at = NULL WHERE id = [=root]",
        name="next-post-off, none",
    ),
    Planted(
        rule="next-post-off",
        table="session",
        sql="UPDATE [session] SET next_post_at = '2020-01-01 00:00:00' WHERE id = [=branch]",
        name="next-post-off, without a post",
    ),
    Planted(
        rule="stop-unmarked",
        table="session",
        sql=f"UPDATE [session] SET stopped_by = NULL, stopped_at = NULL WHERE id = {_STOPPED}",
    ),
    Planted(
        rule="stop-unmarked",
        table="session",
        sql=f"""UPDATE [run] SET status = 'interrupted', completion_reason = 'budget:month'
            WHERE session_id = {_STOPPED} AND status = 'failed'""",
        name="stop-unmarked, by a budget",
        remains=frozenset({"Run.status", "Run.completion_reason", "Session.stopped_by"}),
    ),
    Planted(
        rule="budget-counter-off",
        table="budget_counter",
        sql="UPDATE [budget_counter] SET spent_tokens = spent_tokens + 1 WHERE name = 'all'",
    ),
    Planted(
        rule="current-mistaken",
        table="session",
        sql="UPDATE [session] SET current_is_checkpoint = FALSE, base_key = NULL WHERE id = [=steps]",
        name="current-mistaken, a checkpoint",
        remains=frozenset({"Session.base_key"}),
    ),
    Planted(
        rule="current-mistaken",
        table="session",
        sql="UPDATE [session] SET current_is_checkpoint = TRUE WHERE id = [=branch]",
        name="current-mistaken, a state",
    ),
    Planted(
        rule="current-mistaken",
        table="session",
        sql="UPDATE [session] SET base_key = 7 WHERE id = [=branch]",
        name="current-mistaken, a base without a checkpoint",
    ),
    Planted(rule="state-unneeded", table="checkpoint", sql=_copy_of_current("state")),
    Planted(rule="base-unneeded", table="checkpoint", sql=_copy_of_current("base")),
    Planted(
        rule="usage-of-unknown-session",
        table="usage_entry",
        sql=f"UPDATE [usage_entry] SET session_id = {NOBODY} WHERE recorded_for = 'full'",
        remains=frozenset({"UsageEntry.session_id"}),
    ),
    Planted(
        rule="stream-last-off",
        table="stream",
        sql="UPDATE [stream] SET last_sequence = 5 WHERE stream_id = 'pruned'",
        name="stream-last-off, too low",
    ),
    Planted(
        rule="lock-expired",
        table="lock",
        sql="UPDATE [lock] SET expires_at = '2020-01-01 00:00:00' WHERE name = 'steps'",
        remains=frozenset({"Lock.owner", "Lock.expires_at"}),
    ),
)
"""Faults that ``--fix`` mends."""

LEFT: Final = (
    Planted(rule="run-abandoned", table="run", sql=f"{_LOCK}; {_RUN} 'running', NULL, NULL, 7)"),
    Planted(
        rule="effect-unknown",
        table="effect",
        sql="""
            INSERT INTO [effect] (session_id, effect_id, sequence, state, tool_name, input, digest,
                needs_approval, attempt, actors, started_at)
            VALUES ([=branch], 'planted', 1000, 'unknown', 'pay', '{}', '', false, 1, '[]',
                '2020-01-01 00:00:00')""",
    ),
    # Histories
    Planted(rule="message-hole", table="message", sql=f"{_LOST} 3"),
    Planted(rule="message-hole", table="message", sql=f"{_LOST} 1", name="message-hole, the first"),
    Planted(
        rule="checkpoint-beyond-history",
        table="checkpoint",
        sql="UPDATE [checkpoint] SET message_count = 99"
        f" WHERE session_id = [=steps] AND version = {_NEWEST_STEP}",
    ),
    # States and checkpoints
    Planted(rule="version-zero", table="session", sql="UPDATE [session] SET version = 0 WHERE id = [=steps]"),
    Planted(
        rule="checkpoint-from-the-future",
        table="checkpoint",
        sql="UPDATE [checkpoint] SET version = 900 WHERE session_id = [=branch] AND kind = 'state'",
    ),
    Planted(
        rule="current-missing",
        table="session",
        sql="UPDATE [session] SET current_id = NULL WHERE id = [=steps]",
        name="current-missing, no key",
    ),
    Planted(
        rule="current-missing",
        table="session",
        sql=f"UPDATE [session] SET current_id = {NOBODY} WHERE id = [=steps]",
        name="current-missing, no row",
    ),
    Planted(
        rule="current-missing",
        table="session",
        sql="UPDATE [session] SET current_id = (SELECT current_id FROM [session] WHERE id = [=branch])"
        " WHERE id = [=steps]",
        name="current-missing, of another session",
    ),
    Planted(
        rule="base-missing", table="checkpoint", sql=f"DELETE FROM [checkpoint] WHERE id = {_BASE}", count=3
    ),
    Planted(
        rule="base-unsound",
        table="checkpoint",
        sql=f"UPDATE [checkpoint] SET version = 900 WHERE id = {_BASE};"
        " UPDATE [session] SET version = 901 WHERE id = [=steps]",
        count=3,
        name="base-unsound, newer",
    ),
    Planted(
        rule="base-named",
        table="checkpoint",
        sql=f"UPDATE [checkpoint] SET checkpoint_id = 'named' WHERE id = {_BASE}",
    ),
    Planted(
        rule="delta-misfit",
        table="checkpoint",
        sql='UPDATE [checkpoint] SET payload = \'{"removed":["never"],"set":{}}\''
        f" WHERE session_id = [=steps] AND version = {_NEWEST_STEP}",
    ),
    Planted(
        rule="operation-misfit",
        table="operation",
        sql="UPDATE [operation] SET checkpoint_id = 'another' WHERE operation_id = 'operation-5'",
        name="operation-misfit, another checkpoint",
    ),
    Planted(
        rule="operation-misfit",
        table="operation",
        sql="UPDATE [operation] SET version = 900 WHERE operation_id = 'operation-2'",
        name="operation-misfit, a version that never was",
    ),
    # Calls and trees
    Planted(
        rule="parent-missing",
        table="session",
        sql="UPDATE [session] SET parent_session_id = 'nobody' WHERE id = [=steps]",
    ),
    Planted(
        rule="root-of-another-tree",
        table="session",
        sql="UPDATE [session] SET root_session_id = 'steps' WHERE id = [=full-child]",
        name="root-of-another-tree, not that of the parent",
    ),
    Planted(
        rule="root-of-another-tree",
        table="session",
        sql="UPDATE [session] SET root_session_id = 'steps' WHERE id = [=branch]",
        name="root-of-another-tree, without a parent",
    ),
    Planted(
        rule="ownership-outside-tree",
        table="session",
        sql='UPDATE [session] SET client_tool_call_ownership = \'{"call-1":"steps"}\' WHERE id = [=root]',
    ),
    # Rows without an owner
    *(_orphan(model, column) for model, column, _ in CHILDREN if model._meta.app_label == "helix_store"),
    Planted(
        rule="usage-of-unknown-session",
        table="usage_entry",
        sql="UPDATE [usage_entry] SET session_id = [=steps] WHERE recorded_for = 'full'",
        name="usage-of-unknown-session, of another",
    ),
    # Streams
    Planted(
        rule="stream-last-off",
        table="stream",
        sql="UPDATE [stream] SET last_sequence = 9 WHERE stream_id = 'pruned'",
        name="stream-last-off, too high",
    ),
    Planted(
        rule="stream-last-off",
        table="stream",
        sql="UPDATE [stream] SET last_sequence = 1 WHERE stream_id = 'empty'",
        name="stream-last-off, without a chunk",
    ),
    Planted(
        rule="stream-floor-off",
        table="stream",
        sql="UPDATE [stream] SET floor = 4 WHERE stream_id = 'pruned'",
    ),
    Planted(
        rule="stream-hole",
        table="stream_chunk",
        sql=f"DELETE FROM [stream_chunk] WHERE sequence = 4 AND stream_id = {_PRUNED}",
    ),
    Planted(
        rule="ref-missing",
        table="sub_session_ref",
        sql="UPDATE [sub_session_ref] SET sub_session_id = 'nobody', status = 'completed'"
        " WHERE session_id = [=root]",
    ),
    # Texts and words
    *(
        Planted(
            rule="unreadable-payload",
            table=table,
            sql=f"UPDATE [{table}] SET {column} = 'nonsense'"
            f" WHERE id = (SELECT max(id) FROM [{table}] WHERE {rows})",
            name=f"unreadable-payload, {table} {column}",
        )
        for table, column, rows in (
            ("message", "payload", "session_id = [=steps]"),
            ("item", "payload", "TRUE"),
            ("staged_change", "payload", "TRUE"),
            ("run", "error", "TRUE"),
            ("sub_session_ref", "output", "TRUE"),
            ("stream", "error", "TRUE"),
            ("stream_chunk", "payload", "TRUE"),
            ("checkpoint", "payload", "session_id = [=branch]"),
            ("checkpoint", "payload", "kind = 'snapshot'"),
        )
    ),
    Planted(
        rule="unreadable-payload",
        table="message",
        sql="UPDATE [message] SET payload = '[]' WHERE session_id = [=steps] AND sequence = 2",
        name="unreadable-payload, no object",
    ),
    Planted(
        rule="unreadable-envelope",
        table="checkpoint",
        sql='UPDATE [checkpoint] SET envelope = \'{"agent_type":"a","status":"asleep"}\''
        f" WHERE session_id = [=steps] AND version = {_NEWEST_STEP}",
    ),
    Planted(
        rule="unreadable-columns",
        table="session",
        sql="UPDATE [session] SET tags = '[7]' WHERE id = [=steps]",
        name="unreadable-columns, tags",
    ),
    Planted(
        rule="unreadable-columns",
        table="session",
        sql="UPDATE [session] SET suspension_context = 'nonsense' WHERE id = [=full]",
        name="unreadable-columns, suspension",
    ),
    Planted(
        rule="unreadable-typed-values",
        table="session",
        sql='UPDATE [session] SET typed_metadata = \'{"$date":"never"}\' WHERE id = [=full-graph]',
        name="unreadable-typed-values, metadata",
    ),
    Planted(
        rule="unreadable-typed-values",
        table="checkpoint",
        sql="UPDATE [checkpoint] SET payload = '{}' WHERE kind = 'graph'",
        name="unreadable-typed-values, checkpoint",
    ),
    Planted(
        rule="unknown-word",
        table="checkpoint",
        sql="""
            UPDATE [checkpoint] SET status = 'asleep' WHERE checkpoint_id = (
                SELECT max(checkpoint_id) FROM [checkpoint] WHERE session_id = [=steps])""",
    ),
)
"""Faults that a person has to look at."""

PLANTED: Final = (*FIXABLE, *LEFT)
