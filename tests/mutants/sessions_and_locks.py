"""Mutants of sessions, locks, streams, snapshots and run states."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, in_memory, locks, named, state, streams

__all__ = ["SESSIONS_AND_LOCKS"]

_VERSIONS: Final = state("on_top_of_another_version")
_STATUSES: Final = state("compare_and_set_that_does_not_match")
_FENCED: Final = state("older_than_the_newest", "newest_token_may_write")
_RUNS: Final = state("run_is_refused_while", "superseded", "supersedes", "run_that_is_over", "run_that_waits")
_STARTS: Final = state("start_sets_the_session_active")
_MEMORY: Final = in_memory("supersede")
_REFS: Final = state("adding_a_ref_that_differs")
_WAITS: Final = state(
    "cannot_be_resumed",
    "resumed_once",
    "an_ended_one_cannot",
    "cannot_be_suspended",
    "has_ended_is_refused",
    "stale",
)
_HANGING: Final = ("tests/frameworks/test_hanging.py",)
_REFUSED_CALLERS: Final = named("tests/faults_found/test_async_callers.py", "does_not_write_beside")
_TENANTS: Final = state("tenant")
_ALL_TENANTS: Final = ("tests/security/test_tenants.py",)
_OTHER_TENANTS_STREAMS: Final = (
    "tests/streams/test_retention.py::test_a_stream_whose_writer_died_is_failed_only_for_its_own_tenant",
)
_FENCES_OF_TENANTS: Final = ("tests/security/test_fences_of_tenants.py",)
_LOCKS: Final = locks(
    "tokens_grow_however",
    "taking_a_lock_away",
    "former_holder",
    "held_lock_is_refused",
    "expired_lock",
    "locked_while_it_is_held",
    "tenants_do_not_see",
    "active_locks",
)
_LOST_LOCKS: Final = ("tests/database/test_lost_locks.py",)
_RESTORED: Final = ("tests/database/test_restored_tokens.py",)
_TASKS: Final = ("tests/concurrency/test_transactions_of_tasks.py",)
_REPEATED: Final = ("tests/handles/test_repeated_steps.py",)
_ROLLED_BACK: Final = ("tests/concurrency/test_rolled_back_terms.py",)
_STREAMS: Final = streams(
    "is_over_or_paused",
    "whose_writer_died",
    "as_a_context_beats",
    "has_finished_is_not_missed",
    "older_writer",
    "former_holder",
    "tenants",
    "first_end",
    "reactivation",
)
_STREAM_FIGHTS: Final = ("tests/streams/test_stream_fights.py", "tests/streams/test_retention.py")
_STREAM_COMMAND: Final = ("tests/commands/test_helix_streams_tail.py",)
_CLAIMS: Final = ("tests/checkpointers/test_snapshot_claims.py",)
_RUN_STATES: Final = ("tests/frameworks/openai_agents/test_run_states.py",)
_RACES: Final = ("tests/faults_found/test_one_statement_races.py",)
_TAKEOVERS: Final = ("tests/concurrency/test_fencing.py",)
_LOCK_ORDER: Final = ("tests/faults_found/test_lock_order.py",)
_CITUS: Final = ("tests/deployments/test_citus_form.py",)

_GUARDS: Final = "core/validation.py"
_RULES: Final = "sessions/runs.py"
_WAITING: Final = "sessions/waiting.py"
_SESSIONS: Final = "sessions/statements.py"
_STEP: Final = "sessions/statements.py"
_LOCK_SQL: Final = "locks.py"
_STREAM_SQL: Final = "streams/chunks.py"
_DATABASE: Final = "engine/database.py"
_EXPRESSIONS: Final = "engine/expressions.py"
_SNAPSHOT_SQL: Final = "checkpointers/snapshots.py"
_OPENAI_SQL: Final = "contrib/openai_agents/run_states.py"

SESSIONS_AND_LOCKS: Final = (
    # --- Versions
    Mutant("version", _GUARDS, "self.expected_version != current_version", "False", _VERSIONS),
    Mutant(
        "version",
        _STEP,
        'conditions = ["s.version = %(expected_version)s"]',
        'conditions = ["true"]',
        _VERSIONS + _RACES,
    ),
    Mutant(
        "version",
        _SESSIONS,
        'conditions += ["s.version = %(expected_version)s"]',
        'conditions += ["true"]',
        _VERSIONS,
    ),
    Mutant("status", _SESSIONS, "s.status = 'active'", "true", _STARTS),
    # --- Fencing tokens
    Mutant("fence", _GUARDS, "self.fencing_token < newest_token", "False", _FENCED),
    Mutant(
        "fence", _GUARDS, "self.fencing_token < newest_token", "self.fencing_token > newest_token", _FENCED
    ),
    Mutant("fence", _SESSIONS, "token > %(fencing_token)s::bigint", "false", _FENCED + _TAKEOVERS),
    Mutant("fence", _RULES, "fencing_token <= (running_token or 0)", "False", _RUNS),
    Mutant(
        "fence",
        _RULES,
        "guard.fencing_token is not None and completion_reason == SUPERSEDED",
        "False",
        _RUNS + _MEMORY,
    ),
    Mutant(
        "fence",
        _LOCK_SQL,
        "SET owner = %(owner)s, token = token + 1,",
        "SET owner = %(owner)s, token = token,",
        _LOCKS,
    ),
    Mutant(
        "fence",
        _LOCK_SQL,
        "expires_at = NULL, token = token + 1",
        "expires_at = NULL, token = token",
        _LOCKS,
    ),
    Mutant("fence", _LOCK_SQL, " AND call_id = %(term_id)s AND {_IS_HELD}", " AND {_IS_HELD}", _LOCKS),
    Mutant("fence", _LOCK_SQL, "call_id = %(term_id)s AND {_IS_HELD}", "call_id = %(term_id)s", _LOCKS),
    Mutant("fence", _LOCK_SQL, "lock.lasts and lock.term_id == term.id", "lock.lasts", _ROLLED_BACK),
    Mutant("fence", _LOCK_SQL, "not window.request.is_lost", "True", _ROLLED_BACK),
    Mutant("fence", _LOCK_SQL, " AND call_id = %(call_id)s AND {_IS_HELD}", "AND {_IS_HELD}", _LOST_LOCKS),
    Mutant("fence", _LOCK_SQL, "call_id = %(call_id)s AND {_IS_HELD}", "call_id = %(call_id)s", _LOST_LOCKS),
    Mutant("fence", _LOCK_SQL, " AND call_id = %(call_id)s AND expires_at", " AND expires_at", _LOST_LOCKS),
    Mutant("fence", _LOCK_SQL, "call_id = %(call_id)s AND expires_at IS NULL", "true", _LOST_LOCKS),
    Mutant("fence", _SNAPSHOT_SQL, " AND claim_token = %(token)s", "", _CLAIMS),
    Mutant("fence", _SNAPSHOT_SQL, " AND claim_owner = %(owner)s", "", _RESTORED),
    Mutant("fence", _SNAPSHOT_SQL, "COALESCE(claim_token, 0) + %(gap)s", "1", _CLAIMS),
    Mutant("fence", _OPENAI_SQL, "{_ONE} AND claim_token = %(token)s", "{_ONE}", _RUN_STATES),
    Mutant("fence", _OPENAI_SQL, "claim_token = claim_token + %(gap)s", "claim_token = 1", _RUN_STATES),
    # --- Statuses
    Mutant("status", "sessions/steps.py", "if self.refusal is not None:", "if False:", _REPEATED),
    Mutant("status", _SESSIONS, "AND status = ANY(%(expected)s)", "", _STATUSES),
    Mutant("status", _SESSIONS, "AND coalesce(completion_reason, '') <> '{SUPERSEDED}'", "", _RUNS),
    Mutant(
        "status",
        _RULES,
        "running_run_id is not None and running_run_id != run_id",
        "False",
        in_memory("beside_another"),
    ),
    Mutant("status", _RULES, "status in _OVER or (", "(", _RUNS),
    Mutant("status", _WAITING, "if SessionStatus(status).is_terminal:", "if False:", _WAITS + _RUNS),
    Mutant("status", _RULES, "if status != RunStatus.RUNNING:\n", "if False:\n", _WAITS + _RUNS),
    Mutant("status", _WAITING, 'or columns["status"] not in _RESUMABLE', "", _WAITS),
    Mutant("status", _WAITING, "if not has_continuation or", "if", _WAITS),
    Mutant("status", _RULES, "request.run_id not in (None, running_run_id)", "False", in_memory("stale")),
    Mutant(
        "status",
        _RULES,
        "_identity_of(stored) != _identity_of(given)",
        "_identity_of(given) != _identity_of(given)",
        _REFS,
    ),
    Mutant("status", _STREAM_SQL, "{STREAM_BY_ID} AND status = 'active'", "{STREAM_BY_ID}", _STREAMS),
    Mutant("status", _STREAM_SQL, "WHERE known.status = 'active'", "", _STREAMS),
    Mutant("status", _STREAM_SQL, "{STREAM_BY_ID} AND writer_id = %(writer_id)s", "{STREAM_BY_ID}", _STREAMS),
    Mutant("status", _SNAPSHOT_SQL, '"claim_done_at IS NULL AND (', '"(', _CLAIMS),
    Mutant("status", _SNAPSHOT_SQL, "{_IS_OWN} AND claim_done_at IS NULL AND", "{_IS_OWN} AND", _CLAIMS),
    Mutant("status", _OPENAI_SQL, '"resumed_at IS NULL AND (', '"(', _RUN_STATES),
    Mutant("status", _OPENAI_SQL, "{_OWN} AND resumed_at IS NULL AND", "{_OWN} AND", _RUN_STATES),
    # --- Expiry
    Mutant("expiry", _LOCK_SQL, "expires_at IS NULL OR expires_at <= {now}", "true", _LOCKS),
    Mutant("expiry", _LOCK_SQL, '"expires_at > {now}"', '"expires_at IS NOT NULL"', _LOCKS),
    Mutant(
        "expiry", _SNAPSHOT_SQL, "(claim_expires_at IS NULL OR claim_expires_at <= {now})", "true", _CLAIMS
    ),
    Mutant("expiry", _SNAPSHOT_SQL, " AND claim_expires_at > {{now}}", "", _CLAIMS),
    Mutant("expiry", _SNAPSHOT_SQL, "{_IS_OWN} AND claim_expires_at IS NOT NULL", "{_IS_OWN}", _CLAIMS),
    Mutant(
        "expiry",
        _STREAM_SQL,
        "AND lease_expires_at <= {clock.now} AND",
        "AND lease_expires_at IS NOT NULL AND",
        _STREAMS,
    ),
    Mutant("run state", _OPENAI_SQL, "AND o.resumed_at IS NULL AND (o.", "AND (o.", _RUN_STATES),
    Mutant(
        "expiry",
        _OPENAI_SQL,
        "(claim_expires_at IS NULL OR claim_expires_at <= {{now}})",
        "true",
        _RUN_STATES,
    ),
    Mutant("expiry", _OPENAI_SQL, " AND claim_expires_at > {{now}}", "", _RUN_STATES),
    Mutant("expiry", _OPENAI_SQL, " AND (deadline IS NULL OR deadline > {now})", "", _RUN_STATES),
    Mutant("expiry", _OPENAI_SQL, "{_OWN} AND claim_expires_at IS NOT NULL", "{_OWN}", _RUN_STATES),
    # --- Tenants and owners
    Mutant("tenant", _SESSIONS, "{prefix}tenant = (SELECT %(tenant)s) AND ", "", _TENANTS + _ALL_TENANTS),
    Mutant(
        "tenant",
        _SESSIONS,
        "WHERE tenant = (SELECT %(tenant)s) AND parent",
        "WHERE parent",
        _TENANTS + _ALL_TENANTS,
    ),
    Mutant(
        "tenant",
        _SESSIONS,
        "WHERE tenant = (SELECT %(tenant)s) AND session_id",
        "WHERE session_id",
        _TENANTS + _ALL_TENANTS,
    ),
    Mutant("tenant", _SESSIONS, "child.tenant = %(tenant)s AND ", "", _TENANTS + _ALL_TENANTS),
    Mutant("tenant", _SESSIONS, "target.tenant = %(tenant)s AND ", "", _TENANTS + _ALL_TENANTS),
    Mutant(
        "tenant",
        _SESSIONS,
        "WHERE tenant = %(tenant)s AND name",
        "WHERE name",
        _FENCES_OF_TENANTS,
    ),
    Mutant(
        "tenant",
        _LOCK_SQL,
        '"tenant = %(tenant)s AND name = %(name)s"',
        '"name = %(name)s"',
        _LOCKS + _ALL_TENANTS,
    ),
    Mutant(
        "tenant",
        _LOCK_SQL,
        "WHERE tenant = (SELECT %(tenant)s) AND session_id",
        "WHERE session_id",
        _LOCK_ORDER + _ALL_TENANTS,
    ),
    Mutant(
        "tenant",
        _LOCK_SQL,
        "WHERE tenant = %(tenant)s AND {_IS_HELD}",
        "WHERE {_IS_HELD}",
        _LOCKS + _ALL_TENANTS,
    ),
    Mutant(
        "tenant", _STREAM_SQL, '"tenant = %(tenant)s AND stream_id', '"stream_id', _STREAMS + _ALL_TENANTS
    ),
    Mutant("tenant", _STREAM_SQL, "WHERE stream.tenant = %(tenant)s AND ", "WHERE ", _STREAMS + _ALL_TENANTS),
    Mutant(
        "tenant", _STREAM_SQL, "IS NULL OR tenant = %(tenant)s)", "IS NULL OR true)", _OTHER_TENANTS_STREAMS
    ),
    Mutant("tenant", _EXPRESSIONS, "own.tenant = known.tenant AND ", "", _STREAM_COMMAND),
    Mutant("tenant", _OPENAI_SQL, "AND (owner IS NULL OR owner = %(owner)s)", "", _RUN_STATES),
    # --- Lock order, and locks that hold off others
    Mutant("lock", _LOCK_SQL, "{_SESSION} FOR NO KEY UPDATE SKIP LOCKED", "{_SESSION}", _LOCK_ORDER),
    Mutant("lock", _LOCK_SQL, "WHERE {_ROW} FOR KEY SHARE", "WHERE {_ROW}", _TAKEOVERS + _LOCK_ORDER),
    Mutant("lock", _LOCK_SQL, '"FOR UPDATE SKIP LOCKED"', '""', _TAKEOVERS + _LOCK_ORDER),
    Mutant(
        "lock",
        _SESSIONS,
        "name = %(session_id)s FOR KEY SHARE",
        "name = %(session_id)s",
        _TAKEOVERS + _RACES,
    ),
    Mutant(
        "lock",
        _SESSIONS,
        "SET version = version WHERE id",
        "SET version = version WHERE false AND id",
        _RACES,
    ),
    Mutant("lock", _DATABASE, "features.is_citus and not only_reads", "False", _CITUS),
    # --- Calls that wait for their own caller
    Mutant(
        "waits",
        "engine/threads.py",
        "        if not blocking or not self._is_blocked_by(blocking):",
        "        if blocking or not self._is_blocked_by(blocking):",
        _HANGING,
    ),
    Mutant(
        "waits",
        "engine/threads.py",
        "            raise OutsideTransaction from busy",
        "            return True",
        _HANGING,
    ),
    Mutant(
        "waits",
        "engine/async_twins.py",
        "    note_transactions_of({threading.get_ident(), djangos.caller})",
        "    note_transactions_of({threading.get_ident()})",
        _REFUSED_CALLERS,
    ),
    # --- Calls that would join the transaction of another task
    Mutant("waits", _DATABASE, "if task_blocks:", "if False:", _TASKS),
    Mutant("waits", "engine/tasks.py", "self not in _own_blocks()", "False", _TASKS),
    Mutant("waits", "engine/tasks.py", "not _own_blocks()\n        and", "True\n        and", _TASKS),
    Mutant(
        "waits", "engine/tasks.py", "connection.commit_on_exit and _is_of_task(connection)", "True", _TASKS
    ),
    Mutant("waits", "engine/threads.py", "passed is not None and passed.holds(holder)", "False", _TASKS),
    Mutant(
        "waits",
        "engine/tasks.py",
        "if not _is_of_task(connection) or task_blocks",
        "if True or task_blocks",
        _TASKS,
    ),
    Mutant(
        "waits",
        "engine/tasks.py",
        "for block in _own_blocks()[-1:]:",
        "for block in ():",
        _TASKS,
    ),
)
