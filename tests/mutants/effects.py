"""Mutants of effects: who may attempt one, which approval it uses, and which end counts."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, in_memory, named, state

__all__ = ["EFFECTS"]

_TURNS: Final = "tests/handles/test_effects.py"
_LOCK: Final = state("former_holder_stores_nothing")
_SAME_CALL: Final = state("same_id_is_the_same_call")
_UNKNOWN: Final = state("nobody_repeats_it", "attempts_it_again_with_the_same_key")
_AT_ONCE: Final = state("begin_at_once_attempt_it_once")
_LATE: Final = state("late_end_of_an_attempt", "late_end_of_a_settled_attempt")
_APPROVAL: Final = state(
    "approved_effect_uses_its_approval",
    "that_a_step_has_used_serves",
    "walks_around_an_approval",
    "stays_bound_to_its_approval",
)
_AGAIN: Final = state("newest_asking_decides_about_another")
_SETTLED: Final = state("settling_decides", "permission_to_settle")
_LISTED: Final = state("listed_in_order_and_by_state", "the_oldest_first")
_LIMITS: Final = state("limits_of_inputs_results")
_WAKES: Final = named(_TURNS, "settling_announces")
_CALLER: Final = named(_TURNS, "in_a_transaction", "was_rolled_back")
_UNWRITTEN: Final = named(_TURNS, "effect_that_is_done_writes_nothing")
_STOPPED: Final = named(_TURNS, "attempts_nothing_more")
_RESTS: Final = named("tests/handles/test_rest.py", "settled_during_the_last_turn")
_DEAD: Final = named(_TURNS, "stops_at_an_effect_of_a_dead_worker", "survives_the_death")

_STORE: Final = "sessions/effects.py"
_CALLS: Final = "sessions/store.py"
_HANDLE: Final = "stores/effect.py"
_TURN: Final = "stores/turn.py"
_MEMORY: Final = "sessions/memory.py"

EFFECTS: Final = (
    # --- Rules
    Mutant("effect", _STORE, "if intent.digest not in (None, stored.digest):", "if False:", _SAME_CALL),
    Mutant(
        "effect",
        _STORE,
        "self.state == StoredState.STARTED and not self.is_held",
        "False",
        _LOCK + _DEAD,
    ),
    Mutant(
        "effect",
        _STORE,
        'if state == "started":\n        raise ConflictError(\n            f"A',
        'if False:\n        raise ConflictError(\n            f"A',
        _LOCK,
    ),
    Mutant("effect", _STORE, 'if state == "not_done" or intent.may_retry', "if True", _UNKNOWN + _DEAD),
    Mutant("effect", _STORE, "if has_decisions or is_approval:", "if False:", _APPROVAL),
    Mutant("effect", _STORE, 'return state == "unknown"', "return True", _SETTLED),
    Mutant("effect", _STORE, ' or "approved" in entry', "", state("around_an_approval_in_a_branch")),
    Mutant(
        "effect",
        _STORE,
        "if outcome is Outcome.BEGUN:\n            raise",
        "if False:\n            raise",
        _AGAIN,
    ),
    Mutant("effect", _STORE, "newer is not None and newer.digest != stored.digest", "False", _AGAIN),
    # --- Entering
    Mutant("effect", _STORE, "AND NOT EXISTS (SELECT 1 FROM known)", "", _AT_ONCE + _UNWRITTEN),
    Mutant(
        "effect",
        _STORE,
        "strpos(coalesce(s.pending_client_tool_calls, ''), %(quoted_id)s) = 0",
        "true",
        _APPROVAL + state("becomes_one_of_an_approval"),
    ),
    Mutant("effect", _STORE, "{sequence} < %(most)s", "true", _LIMITS),
    Mutant("effect", _STORE, "entry.last_sequence >= self.db.limits.max_effects", "False", _LIMITS),
    Mutant(
        "effect",
        _STORE,
        "SET used_at = added.started_at, used_by_effect = added.effect_id",
        "SET used_by_effect = NULL",
        _APPROVAL,
    ),
    Mutant(
        "effect",
        _STORE,
        "SET used_at = {clock.now}, used_by_effect = %(effect_id)s",
        "SET used_by_effect = NULL",
        _APPROVAL,
    ),
    # --- The end
    Mutant("effect", _STORE, "AND e.attempt = %(attempt)s", "", _LATE),
    Mutant("effect", _STORE, "AND e.state = %(known_state)s", "", _LATE),
    # --- Settling and finding
    Mutant(
        "effect", _STORE, "l.expires_at > {clock.now}", "true", state("former_holder_stores_nothing") + _DEAD
    ),
    Mutant("effect", _STORE, "l.tenant = s.tenant", "true", state("lock_of_another_tenant")),
    Mutant("effect", _STORE, "AND l.token = {effect}.fencing_token", "", _LOCK + _DEAD),
    Mutant("effect", _STORE, "AND s.tenant = %(tenant)s", "", _LISTED),
    Mutant("effect", _STORE, "if is_last:", "if True:", _WAKES),
    Mutant("effect", _STORE, "status not in TERMINAL_STATUSES and not waits", "not waits", _WAKES),
    Mutant(
        "effect",
        _CALLS,
        "if not (actor.is_active and actor.has_perm(SETTLE_PERMISSION)):",
        "if False:",
        _SETTLED,
    ),
    # --- Handles and turns
    Mutant(
        "effect", _HANDLE, "self._may_retry and self._stored.attempt > 1", "False", state("while_it_enters")
    ),
    Mutant("effect", _HANDLE, "if self._stores.in_callers_transaction:", "if False:", _CALLER),
    Mutant(
        "effect",
        _HANDLE,
        "if self._uncommitted is not None and self._uncommitted.is_lost:",
        "if False:",
        _CALLER,
    ),
    Mutant(
        "effect",
        _TURN,
        "if turn._effects.setdefault(self.id, self) is not self:",
        "if False:",
        named(_TURNS, "one_thread_of_a_turn"),
    ),
    Mutant("effect", _TURN, "self._turn._interrupt = unknown", "pass", _DEAD),
    # --- A turn that was stopped elsewhere, and what arrives for a session at rest
    Mutant(
        "effect",
        _STORE,
        "{_RUN} IS NULL OR {_IS_OPEN} AND NOT EXISTS",
        "{_RUN} IS NULL OR NOT EXISTS",
        _STOPPED,
    ),
    Mutant("effect", _STORE, "i.session_id = s.id AND i.run_id = {_RUN}", "1 = 0", _STOPPED),
    Mutant("effect", _STORE, "    if status in _CLOSED:", "    if False:", _STOPPED),
    Mutant("effect", _STORE, "if kind is not None and run_id == intent.run_id:", "if False:", _STOPPED),
    Mutant("effect", "sessions/statements.py", " OR e.ended_at > r.started_at AND {_IS_SETTLED}", "", _RESTS),
    # --- In memory
    Mutant(
        "effect",
        _MEMORY,
        "if not usable.issuperset(step.uses):",
        "if False:",
        in_memory("do_not_use_the_same_approval"),
    ),
    Mutant(
        "effect",
        _MEMORY,
        "if not of.is_same_attempt(stored()):",
        "if False:",
        in_memory("late_end_of_an_attempt"),
    ),
    Mutant(
        "effect",
        _MEMORY,
        "is_held=self._scope.is_held(",
        "is_held=True or self._scope.is_held(",
        in_memory("former_holder_stores_nothing"),
    ),
)
