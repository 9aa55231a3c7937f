"""Mutants of cleanup, retention and erasure: what is expired, idle or in use, and whose it is."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, named, state

__all__ = ["UPKEEP"]

_CLEANUP: Final = ("tests/cleanup/test_cleanup.py",)
_CHANGED: Final = named("tests/cleanup/test_cleanup.py", "that_changes_between", "another_end")
_DELETED: Final = named("tests/cleanup/test_cleanup.py", "long_expired", "another_end")
_SECOND_LOOKS: Final = ("tests/cleanup/test_second_looks.py",)
_IN_USE: Final = ("tests/cleanup/test_in_use.py",)
_RETENTION: Final = named(
    "tests/cleanup/test_retention.py",
    "idle_age",
    "between_the_look",
    "not_waited_for",
    "the_writer_of_a_stream",
)
_SNAPSHOTS: Final = named("tests/cleanup/test_retention.py", "snapshots_go")
_ERASURE: Final = named("tests/cleanup/test_erasure.py", "in_use_is_left", "that_is_held_is_left")

_OF_TENANT: Final = named("tests/cleanup/test_erasure.py", "a_tree_with_a_session_in_use")

_ERASED: Final = ("tests/frameworks/test_erased.py",)

_LEFT: Final = named("tests/shards/test_what_a_move_leaves.py", "executable_by_nobody_else")
_ACCEPTED: Final = ("tests/transfer/test_accepted_values.py",)

_FENCES: Final = "transfer/fences.py"
_COLUMNS: Final = "transfer/records.py"
_DATABASE: Final = "cleanup/expiry.py"
_SQL: Final = "cleanup/erasure.py"
_RETAIN: Final = "cleanup/retention.py"
_ERASE: Final = "cleanup/erasure.py"
_TREES: Final = "cleanup/erasure.py"
_HEADS: Final = "sessions/heads.py"

_RUNS: Final = "sessions/runs.py"
_POSTS: Final = "sessions/messages.py"
_STUCK: Final = ("tests/handles/test_stuck_sessions.py",)

UPKEEP: Final = (
    # --- Expired sessions
    Mutant(
        "cleanup",
        _DATABASE,
        " AND expires_at <= %(now)s",
        " AND %(now)s IS NOT NULL",
        _SECOND_LOOKS + _CHANGED,
    ),
    Mutant(
        "cleanup",
        _DATABASE,
        """status IN ({", ".join(f"'{status}'" for status in NON_TERMINAL)}) AND expires""",
        "expires",
        _SECOND_LOOKS + _CHANGED,
    ),
    Mutant(
        "cleanup",
        _DATABASE,
        "AND s.version = (c.known ->> 'version')::bigint",
        "",
        _SECOND_LOOKS + _CHANGED,
    ),
    Mutant(
        "cleanup",
        _DATABASE,
        "(id, version) IN (\n                SELECT json_extract(value, '$.id'), json",
        "(id, abs(version)) IN (\n                SELECT json_extract(value, '$.id'), version + 0 * json",
        _SECOND_LOOKS + _CHANGED,
    ),
    Mutant("cleanup", _DATABASE, "FOR NO KEY UPDATE OF s SKIP LOCKED", "", _SECOND_LOOKS),
    Mutant("cleanup", _DATABASE, ".filter(version=candidate.version)", "", _CLEANUP),
    Mutant(
        "cleanup",
        _DATABASE,
        "tree.non_terminal().exists() or not top.exists()",
        "not top.exists()",
        _DELETED + _SECOND_LOOKS,
    ),
    Mutant(
        "cleanup",
        _DATABASE,
        "tree.non_terminal().exists() or not top.exists()",
        "tree.non_terminal().exists()",
        _DELETED + _SECOND_LOOKS,
    ),
    Mutant(
        "cleanup",
        _DATABASE,
        "tree.filter(status=SessionStatus.FAILED.value, failure_reason=SESSION_EXPIRED)",
        "tree",
        _DELETED + _SECOND_LOOKS,
    ),
    Mutant(
        "cleanup",
        _DATABASE,
        "marked.filter(pk=key.key).expired(before)",
        "marked.filter(pk=key.key)",
        _DELETED + _SECOND_LOOKS,
    ),
    Mutant("cleanup", _DATABASE, "unindexed.filter(unindexed_tenant=self._tenant)", "unindexed", _CLEANUP),
    Mutant(
        "cleanup",
        _DATABASE,
        "self._of_tenant.non_terminal().expired(now)",
        "self._of_tenant.expired(now)",
        _CLEANUP,
    ),
    Mutant(
        "cleanup",
        "sessions/tool_calls.py",
        "not entry or status in TERMINAL_STATUSES",
        "not entry",
        state("has_ended_waits_for_nobody"),
    ),
    # --- Idle trees
    Mutant("cleanup", _SQL, "NOT coalesce(CASE status {_AGES} END, FALSE)", "FALSE", _RETENTION),
    Mutant("cleanup", _SQL, "CASE status {_AGES} END, FALSE)", "CASE status {_AGES} END, TRUE)", _IN_USE),
    Mutant("cleanup", _SQL, "THEN updated_at <= %({status})s", "THEN %({status})s IS NOT NULL", _RETENTION),
    Mutant("cleanup", _SQL, "parent.tenant = child.tenant AND ", "", _IN_USE),
    Mutant("cleanup", _SQL, " AND owner.tenant = child.tenant", "", _IN_USE),
    Mutant("cleanup", _SQL, " AND ref.location = 'local'", "", _IN_USE),
    Mutant("cleanup", _RETAIN, "if not keys or self._not_idle(db, keys):", "if not keys:", _RETENTION),
    Mutant("cleanup", _RETAIN, "if is_in_use(db, keys):", "if False:", _IN_USE),
    # --- Many trees in a transaction
    Mutant("cleanup", _RETAIN, "kept = self._not_idle(db, keys)", "kept = set[int]()", _RETENTION),
    Mutant("cleanup", _RETAIN, "kept |= in_use_from_now_on(db, keys)", "pass", _IN_USE),
    Mutant("cleanup", _RETAIN, "kept |= with_workspaces(db, keys)", "pass", _SNAPSHOTS),
    Mutant("cleanup", _HEADS, "if keys <= locked}", "}", _SECOND_LOOKS),
    Mutant(
        "cleanup",
        _SQL,
        "                kept |= in_use_from_now_on(db, keys)",
        "                pass",
        _OF_TENANT,
    ),
    # --- What is in use
    Mutant("cleanup", _SQL, '{has_live_run(clock, "s")} OR {is', "{is", _IN_USE),
    Mutant("cleanup", _SQL, '"s")} OR {is_driven(clock)} OR EXISTS', '"s")} OR EXISTS', _IN_USE),
    Mutant(
        "cleanup",
        _RUNS,
        "WHERE r.session_id = {session}.id AND r.status = '{RunStatus.RUNNING.value}'",
        "WHERE r.session_id = {session}.id",
        _IN_USE,
    ),
    Mutant("cleanup", _POSTS, "l.expires_at > {clock.now}", "l.expires_at IS NOT NULL", _IN_USE),
    # --- What is abandoned
    Mutant(
        "cleanup", _RUNS, 'AND NOT {is_abandoned(clock, run="r", session=session)})', ")", _IN_USE + _STUCK
    ),
    Mutant("cleanup", _RUNS, "gone.tenant = {session}.tenant AND ", "", _IN_USE),
    Mutant("cleanup", _RUNS, "gone.token >= {run}.fencing_token", "true", _IN_USE),
    Mutant("cleanup", _RUNS, "gone.token >= {run}", "gone.token > {run}", _IN_USE + _STUCK),
    Mutant("cleanup", _RUNS, "(gone.expires_at IS NULL OR ", "(", _IN_USE + _STUCK),
    Mutant("cleanup", _RUNS, " OR gone.expires_at <= {clock.now})", " OR true)", _IN_USE + _STUCK),
    Mutant("cleanup", _SQL, "st.tenant = s.tenant AND ", "", _IN_USE),
    Mutant("cleanup", _SQL, "AND st.lease_expires_at > {clock.now}", "", _IN_USE),
    Mutant(
        "cleanup",
        _SQL,
        "st.status = '{StreamStatus.ACTIVE.value}' AND st.lease_expires_at > ",
        "st.lease_expires_at > ",
        _IN_USE,
    ),
    Mutant("cleanup", _SQL, "AND st.lease_expires_at > {clock.now}", "AND false", _IN_USE),
    Mutant("cleanup", _TREES, "    if acquired:", "    if False:", _SECOND_LOOKS),
    # --- Checkpoints of sessions that are in use
    Mutant("cleanup", _SQL, "s.tenant = (SELECT %(tenant)s) AND s.session_id >", "s.session_id >", _IN_USE),
    Mutant("cleanup", _SQL, '            AND NOT {has_live_run(clock, "s")}\n', "", _IN_USE),
    Mutant("cleanup", _SQL, "            AND NOT {is_driven(clock)}\n", "", _IN_USE),
    # --- Streams and locks that others have too
    Mutant("cleanup", _SQL, "o.tenant = st.tenant AND ", "", _IN_USE),
    Mutant("cleanup", _SQL, "WHERE st.tenant = (SELECT %(tenant)s)\n            AND", "WHERE", _IN_USE),
    Mutant(
        "cleanup",
        _SQL,
        "            AND NOT EXISTS ({other} AND o.session_id = st.stream_id AND {not_chosen})\n",
        "",
        _IN_USE,
    ),
    Mutant(
        "cleanup",
        _SQL,
        "(o.stream_id < o.session_id OR o.stream_id > o.session_id) AND",
        "false AND",
        _IN_USE,
    ),
    Mutant("cleanup", _ERASE, "if not self.force and is_in_use(db, keys):", "if False:", _ERASURE),
    Mutant("cleanup", _ERASE, "locks.exclude(expires_at__gt=now)", "locks.all()", _ERASURE),
    # --- Erased is erased
    Mutant(
        "tombstones",
        "cleanup/erasure.py",
        "        set_tombstones(db, ids, of_erased_tenant=self._is_of_tenant)\n",
        "",
        _ERASED,
    ),
    Mutant(
        "tombstones",
        "sessions/heads.py",
        "inserted = inserted.filter(~Exists(tombstones_of(db, [new.session_id])))",
        "pass",
        _ERASED,
    ),
    Mutant(
        "tombstones",
        "sessions/heads.py",
        "unless_erased=not recreate",
        "unless_erased=True",
        _ERASED,
    ),
    Mutant(
        "tombstones",
        "cleanup/erasure.py",
        " if each.model is not Tombstone]",
        "]",
        _ERASED,
    ),
    Mutant(
        "cleanup",
        "management/commands/helix_erase.py",
        "if receipt.is_empty and receipt.finished_at",
        "if False and receipt.finished_at",
        named("tests/commands/test_helix_erase.py", "erasing_nobody"),
    ),
    # --- What moves leave, and what policies and imports let through
    Mutant("move", _FENCES, "_drop_unused(db, functions_of(db.tenant))", "pass", _LEFT),
    Mutant(
        "move",
        "catalogue/table.py",
        "USING (false) WITH CHECK (false)",
        "USING (true) WITH CHECK (true)",
        named("tests/shards/test_what_a_move_leaves.py", "closed_to_every_role"),
    ),
    Mutant(
        "policy",
        "contrib/row_level_security.py",
        "({' AND '.join(rules)})",
        "({condition})",
        named("tests/security/test_row_level_security.py", "refers_to_another_tenant"),
    ),
    Mutant("import", _COLUMNS, "if value not in known:", "if False:", _ACCEPTED),
    Mutant("import", _COLUMNS, "if value < least:", "if False:", _ACCEPTED),
    Mutant("import", _COLUMNS, "yield partial(_readable, table.reads)", "pass", _ACCEPTED),
)
