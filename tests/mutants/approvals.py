"""Mutants of approvals: who may answer, of which content, how many must, and that each is used once."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, in_memory, named, state

__all__ = ["APPROVALS"]

_RULES: Final = "sessions/tool_calls.py"
_CALLS: Final = "sessions/tool_calls.py"
_PERMITTED: Final = state(
    "with_a_permission_needs", "requester_does_not", "for_several_approvals_has_an_actor"
)
_CONTENT: Final = state(
    "to_another_content", "to_a_replaced_input", "of_a_replaced_input", "discards_the_earlier"
)
_COUNTED: Final = state("two_people_approve", "are_each_counted_once")
_USED: Final = state(
    "is_used_once",
    "writes_into_an_open_call",
    "survives_a_rewind",
    "cannot_be_used",
    "a_branch_has_no",
    "expired_call",
)
_STEPS: Final = state("has_no_earlier_decision")
_DEADLINES: Final = state("switch_the_deadline_off", "switches_the_deadline_off")
_LINKS: Final = named("tests/admin/test_answer_pages.py", "works_once", "come_back", "at_once")
_RACED: Final = ("tests/concurrency/test_approvals.py", "tests/handles/test_approvals.py")

APPROVALS: Final = (
    Mutant("approval", _RULES, "user.is_active and ", "", _PERMITTED),
    Mutant("approval", _RULES, "and user.has_perm(permission)", "", _PERMITTED),
    Mutant(
        "approval",
        _RULES,
        "(actor.id is None or actor.has_requested(call))",
        "actor.id is None",
        _PERMITTED,
    ),
    Mutant(
        "approval",
        _RULES,
        "(actor.id is None or actor.has_requested(call))",
        "actor.has_requested(call)",
        _PERMITTED,
    ),
    Mutant("approval", _RULES, "return requester in names", "return requester == self.id", _PERMITTED),
    Mutant("approval", _RULES, "if name not in _KEYS_OF_APPROVALS:", "if False:", state("a_slip_in")),
    Mutant("approval", _RULES, 'entry["deadline"] < _FIRST_DEADLINE', "False", state("a_slip_in")),
    Mutant("approval", _RULES, "actor.id is None and number_of_approvals(call) > 1", "False", _PERMITTED),
    Mutant(
        "approval",
        _RULES,
        """None} {call['digest']}\"""",
        """None}\"""",
        _CONTENT,
    ),
    Mutant(
        "approval",
        _RULES,
        'call["digest"] = digest or digest_of(',
        'call["digest"] = entry.get("digest") or digest_of(',
        _CONTENT,
    ),
    Mutant(
        "approval", _RULES, 'call.get("editable") is not True', "False", state("approval_of_an_editable_call")
    ),
    Mutant("approval", _RULES, "if each.used_at is not None:", "if False:", _USED),
    Mutant("approval", _RULES, '"submitted_at" not in entry:\n        raise', "False:\n        raise", _USED),
    Mutant(
        "approval",
        _RULES,
        "of_asking = [each for each in decisions if each.asking == asking]",
        "of_asking = list(decisions)",
        state("does_not_become_approved", "has_no_earlier_decision"),
    ),
    Mutant(
        "approval",
        _RULES,
        'if entry.get("mark") == marks.get(key, "")',
        "",
        in_memory("has_no_earlier_decision", "rewind_to_the_open"),
    ),
    Mutant("approval", "sessions/statements.py", "live.value ->> 'mark' =", "'' <>", _STEPS),
    Mutant(
        "approval", _RULES, 'if entry is None or entry.get("mark") != mark:', "if entry is None:", _CONTENT
    ),
    Mutant("approval", _RULES, 'answer.digest not in (None, call["digest"])', "False", _CONTENT),
    Mutant("approval", _CALLS, "if actor in earlier:", "if False:", _COUNTED),
    Mutant("approval", _RULES, "if not answer.is_default:", "if True:", _RACED),
    Mutant(
        "approval",
        "stores/step.py",
        "if version != self._version:",
        "if False:",
        state("on_an_outdated_state"),
    ),
    Mutant("approval", "sessions/steps.py", "not (step.uses or step.encoded.doubtful)", "True", _USED),
    Mutant(
        "approval",
        "sessions/steps.py",
        "not (step.uses or step.encoded.doubtful)",
        "not step.uses",
        _DEADLINES,
    ),
    Mutant("approval", "sessions/state.py", "if doubtful.claimed:", "if False:", _DEADLINES),
    Mutant("approval", _RULES, " - self.open(decisions).keys())", ")", state("in_the_state_is_not_taken")),
    Mutant(
        "approval",
        "sessions/state.py",
        "doubtful.open(decisions(doubtful.claimed))",
        "doubtful.claimed",
        _DEADLINES,
    ),
    Mutant(
        "approval",
        _RULES,
        "any(map(_entry, self.pending.values())) and not self.open(decisions)",
        "any(map(_entry, self.pending.values())) and not self.unanswered",
        named("tests/contract/test_signals.py", "answer_of_the_agent"),
    ),
    Mutant(
        "approval",
        _RULES,
        'columns["root_session_id"] not in (None, session_id)',
        "False",
        state("are_its_own"),
    ),
    Mutant(
        "approval",
        "answering.py",
        "(self.digest, self.requested_at)",
        "(self.digest, _requested_at(call))",
        _LINKS,
    ),
    Mutant("approval", "answer_pages.py", "version__gt=link.version", "version__lt=0", _LINKS),
    Mutant(
        "approval",
        "answer_pages.py",
        "problem = _problem(*_read(link), link)",
        "problem = None",
        _LINKS,
    ),
)
