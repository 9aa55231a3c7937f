"""Mutants of posts: what may be posted, who receives it, and which sessions are found."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, named, state

__all__ = ["POSTS"]

_TURNS: Final = "tests/handles/test_posts.py"
_STUCK: Final = "tests/handles/test_stuck_sessions.py"
_ENDED: Final = state("ended_session_takes_no_posts", "ended_session_receives_nothing")
_KEYS: Final = state("repeat_under_a_key", "else_under_a_key")
_MAXIMUM: Final = state("so_many_posts_may_wait")
_WITHDRAWN: Final = state("can_be_withdrawn_once", "of_a_withdrawal_and_a_reception")
_FOUND: Final = state(
    "longest_due_first", "nobody_can_drive", "count_for_the_limit", "other_tenants_do_not_matter"
)
_NOT_DUE: Final = named(_TURNS, "is_not_due")
_GOES_ON: Final = named(_TURNS, "finish_with_a_due_post", "came_before_its_end")
_OPEN_CALLS: Final = named(_TURNS, "tool_calls_are_open", "finish_with_open_calls")

_SQL: Final = "sessions/messages.py"
_STEP: Final = "sessions/statements.py"
_RULES: Final = "sessions/messages.py"
_DATABASE: Final = "sessions/messages.py"
_STEPS: Final = "sessions/steps.py"

POSTS: Final = (
    # --- Posting
    Mutant(
        "post",
        _DATABASE,
        "None if head.status in TERMINAL_STATUSES else self._added(head, new, most)",
        "self._added(head, new, most)",
        _ENDED,
    ),
    Mutant("post", _RULES, "    if status in TERMINAL_STATUSES:", "    if False:", _ENDED),
    Mutant("post", _DATABASE, 'earlier["digest"] != new.digest', "False", _KEYS),
    Mutant("post", _SQL, "AND p.key = {_KEY})", "AND false)", _KEYS),
    Mutant("post", _SQL, "< %(most)s", "<= %(most)s", _MAXIMUM),
    # --- Withdrawal and reception
    Mutant(
        "post",
        _SQL,
        "WHERE {_WAITING} AND post_id = %(post_id)s RETURNING",
        "WHERE session_id = %(key)s AND post_id = %(post_id)s RETURNING",
        _WITHDRAWN,
    ),
    Mutant(
        "post",
        _SQL,
        "WHERE {_WAITING} AND due_at <= {clock.now}",
        "WHERE session_id = %(key)s AND due_at <= {clock.now}",
        state("are_not_received_again"),
    ),
    Mutant("post", _SQL, "{_WAITING} AND due_at <= {clock.now}", "{_WAITING}", state("without_due_posts")),
    Mutant("post", _STEP, "(s.next_post_at IS NULL OR s.next_post_at > {POSTGRESQL.now})", "true", _GOES_ON),
    Mutant("post", _STEPS, "Q(next_post_at__lte=DatabaseNow())", "Q(next_post_at__isnull=False)", _NOT_DUE),
    Mutant("post", _STEPS, "if has_open_calls(", "if False and has_open_calls(", _OPEN_CALLS),
    Mutant("post", "stores/session.py", "if has_open_calls(", "if False and has_open_calls(", _OPEN_CALLS),
    Mutant(
        "post",
        _STEPS,
        "if self.continued is None or not has_due_posts:",
        "if self.continued is None or has_due_posts:",
        _GOES_ON + _NOT_DUE,
    ),
    # --- Finding
    Mutant("post", _SQL, "s.next_post_at <= {due}", "s.next_post_at IS NOT NULL", _FOUND),
    Mutant("post", _SQL, "l.expires_at > {clock.now}", "false", _FOUND),
    Mutant("post", _SQL, "l.tenant = {session}.tenant", "true", _FOUND),
    Mutant(
        "post", _SQL, '"s.tenant = (SELECT %(tenant)s) AND", "+s.tenant = %(tenant)s AND"', '"", ""', _FOUND
    ),
    # --- Wake-ups take turns
    Mutant("post", _SQL, "if len(found) == limit:", "if False:", named(_STUCK, "with_due_posts_take_turns")),
    Mutant("post", _SQL, " FOR NO KEY UPDATE SKIP LOCKED", "", named(_STUCK, "not_waited_for")),
    Mutant(
        "post",
        "stores/conditions.py",
        "if len(ready) >= limit:",
        "if False:",
        named(_STUCK, "ready_sessions_take_turns"),
    ),
    Mutant(
        "post",
        _RULES,
        "return open_calls is None or bool(open_calls)",
        "return False",
        _FOUND,
    ),
)
