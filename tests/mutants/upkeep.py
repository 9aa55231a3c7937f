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
_ERASURE: Final = named("tests/cleanup/test_erasure.py", "in_use_is_left", "that_is_held_is_left")

_DATABASE: Final = "cleanup/database.py"
_SQL: Final = "cleanup/sql.py"
_RETAIN: Final = "cleanup/retention.py"
_ERASE: Final = "cleanup/erasure.py"
_TREES: Final = "cleanup/trees.py"

_HAS_RUN: Final = "WHERE r.session_id = s.id AND r.status = '{RunStatus.RUNNING.value}'\n"
_IS_LOCKED: Final = "WHERE l.tenant = s.tenant AND l.name = s.session_id AND l.expires_at > {clock.now}\n"
_OR: Final = "            ) OR EXISTS ("
_ORDER: Final = "            )\n        ORDER BY"
_AND_NOT: Final = "            )\n            AND NOT EXISTS ("

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
    Mutant("cleanup", _RETAIN, "if trees.is_in_use(db, keys):", "if False:", _IN_USE),
    # --- What is in use
    Mutant("cleanup", _SQL, _HAS_RUN + _OR, "WHERE false\n" + _OR, _IN_USE),
    Mutant("cleanup", _SQL, _IS_LOCKED + _OR, "WHERE false\n" + _OR, _IN_USE),
    Mutant(
        "cleanup",
        _SQL,
        _IS_LOCKED + _OR,
        _IS_LOCKED.replace("l.tenant = s.tenant AND ", "") + _OR,
        _IN_USE,
    ),
    Mutant(
        "cleanup",
        _SQL,
        _IS_LOCKED + _OR,
        _IS_LOCKED.replace("> {clock.now}", "IS NOT NULL") + _OR,
        _IN_USE,
    ),
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
    Mutant(
        "cleanup", _TREES, 'if set(locks.values_list("pk", flat=True)) - free:', "if False:", _SECOND_LOOKS
    ),
    # --- Checkpoints of sessions that are in use
    Mutant("cleanup", _SQL, "s.tenant = (SELECT %(tenant)s) AND s.session_id >", "s.session_id >", _IN_USE),
    Mutant("cleanup", _SQL, _HAS_RUN + _AND_NOT, "WHERE false\n" + _AND_NOT, _IN_USE),
    Mutant("cleanup", _SQL, _IS_LOCKED + _ORDER, "WHERE false\n" + _ORDER, _IN_USE),
    Mutant(
        "cleanup",
        _SQL,
        _IS_LOCKED + _ORDER,
        _IS_LOCKED.replace("l.tenant = s.tenant AND ", "") + _ORDER,
        _IN_USE,
    ),
    Mutant(
        "cleanup",
        _SQL,
        _IS_LOCKED + _ORDER,
        _IS_LOCKED.replace("> {clock.now}", "IS NOT NULL") + _ORDER,
        _IN_USE,
    ),
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
    Mutant("cleanup", _ERASE, "if not self.force and trees.is_in_use(db, keys):", "if False:", _ERASURE),
    Mutant("cleanup", _ERASE, "locks.exclude(expires_at__gt=now)", "locks.all()", _ERASURE),
)
