"""Mutants of approvals: who may answer, of which content, how many must, and that each is used once."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, in_memory, state

__all__ = ["APPROVALS"]

_RULES: Final = "sessions/approvals.py"
_CALLS: Final = "sessions/tool_calls.py"
_PERMITTED: Final = state(
    "with_a_permission_needs", "requester_does_not", "for_several_approvals_has_an_actor"
)
_CONTENT: Final = state(
    "to_another_content", "to_a_replaced_input", "of_a_replaced_input", "discards_the_earlier"
)
_COUNTED: Final = state("two_people_approve", "are_each_counted_once")
_USED: Final = state("is_used_once", "survives_a_rewind", "cannot_be_used", "a_branch_has_no", "expired_call")
_RACED: Final = ("tests/concurrency/test_approvals.py", "tests/handles/test_approvals.py")

APPROVALS: Final = (
    Mutant("approval", _RULES, "user.is_active and ", "", _PERMITTED),
    Mutant("approval", _RULES, "and user.has_perm(permission)", "", _PERMITTED),
    Mutant("approval", _RULES, "actor.id in (None, requester)", "actor.id == requester", _PERMITTED),
    Mutant("approval", _RULES, "actor.id in (None, requester)", "actor.id is None", _PERMITTED),
    Mutant("approval", _RULES, "actor.id is None and number_of_approvals(call) > 1", "False", _PERMITTED),
    Mutant("approval", _RULES, 'call.get("digest") != digest or ', "", _CONTENT),
    Mutant("approval", _RULES, 'call["digest"] = digest\n', 'call.setdefault("digest", digest)\n', _CONTENT),
    Mutant(
        "approval", _RULES, 'call.get("editable") is not True', "False", state("approval_of_an_editable_call")
    ),
    Mutant("approval", _RULES, 'approval is not None and "used_by" in approval', "False", _USED),
    Mutant("approval", _RULES, '"submitted_at" not in entry:\n        raise', "False:\n        raise", _USED),
    Mutant("approval", _RULES, 'entry.get("approved") is False or "error" in entry', "False", _USED),
    Mutant("approval", _RULES, 'answer.digest not in (None, call["digest"])', "False", _CONTENT),
    Mutant("approval", _CALLS, "if actor in earlier:", "if False:", _COUNTED),
    Mutant("approval", _RULES, "if not answer.is_default:", "if True:", _RACED),
    Mutant(
        "approval",
        _CALLS,
        'if "used_by" not in self.approved.get(tool_call_id, {}):',
        "if True:",
        in_memory("survives_a_rewind"),
    ),
    Mutant(
        "approval",
        "stores/step.py",
        "if version != self._version:",
        "if False:",
        state("on_an_outdated_state"),
    ),
    Mutant("approval", "sessions/database/steps.py", " and not request.uses", "", _USED),
)
