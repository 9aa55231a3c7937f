"""Actions on a whole session: stop it, set its status, delete it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from django import forms
from django.contrib.messages import constants as levels
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.actions.action import Outcome, SessionAction
from helix_store.core.types import SessionStatus, StatusConflict
from helix_store.exceptions import ConflictError, SessionNotFound
from helix_store.reports.session import session_tree
from helix_store.stores import DatabaseStateStore

_LONGEST_REASON: Final = 1_000
_STATUSES: Final = [status.value for status in SessionStatus]


class ReasonForm(forms.Form):
    reason = forms.CharField(label=_("Reason"), required=False, max_length=_LONGEST_REASON, empty_value=None)


class Interrupt(SessionAction):
    name = "interrupt"
    label = _("Interrupt")
    needs_open_session = True
    form = ReasonForm
    help = "Request that the current run of a session stops, in whichever process it runs."
    example = "trip-1 --reason 'costs too much'"
    options = {
        "--abort": {"action": "store_true", "help": "Stop for good (by default, the session can continue)."},
        "--reason": {"help": "A reason that the run can read."},
        "--run": {"dest": "run_id", "metavar": "RUN", "help": "Only this run."},
    }

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        request = store.request_interrupt(
            session_id,
            kind="abort" if given.get("abort") else "interrupt",
            reason=given.get("reason"),
            run_id=given.get("run_id"),
        )
        message = (
            _("Requested an abort: the agent stops at its next step, for good.")
            if given.get("abort")
            else _("Requested an interrupt: the agent stops at its next step, and can continue.")
        )
        return Outcome(message=message, data=request.to_dict())


class Abort(Interrupt):
    name = "abort"
    label = _("Abort")
    is_destructive = True
    warning = _("The agent stops at its next step and does not continue.")
    help = ""

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        return super().run(store, session_id, {**given, "abort": True})


class ClearInterrupt(SessionAction):
    name = "clear-interrupt"
    label = _("Withdraw the request to stop")
    has_own_place = True

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        if store.clear_interrupt(session_id):
            return Outcome(message=_("Withdrew the request to stop."))
        return Outcome(
            message=_("The request to stop no longer exists."), is_done=False, level=levels.WARNING
        )


class SetStatus(SessionAction):
    name = "set-status"
    help = "Set the status of a session, without a condition or only if it has an expected one."
    example = "trip-1 failed --reason 'worker lost'"
    options = {
        "status": {"choices": _STATUSES},
        "--reason": {"help": "The failure reason (default: none)."},
        "--expected": {
            "action": "append",
            "choices": _STATUSES,
            "help": "Set it only if the session has this status now; may be repeated.",
        },
    }

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        status, reason = given["status"], given.get("reason")
        if given["expected"]:
            change = store.compare_and_set_status(
                session_id, given["expected"], status, failure_reason=reason
            )
            if isinstance(change, StatusConflict):
                raise ConflictError(
                    f"The session is {change.current_status.value} at version {change.current_version}; "
                    "nothing was changed."
                )
            version = change.new_version
        else:
            version = store.update_status(session_id, status, failure_reason=reason)
        return Outcome(
            message=f"Set the status to {status}.",
            data={"session_id": session_id, "status": status, "version": version},
        )


class MarkFailed(SetStatus):
    name = "mark-failed"
    label = _("Mark as failed")
    needs_open_session = True
    form = ReasonForm
    guard = "status"
    is_destructive = True
    warning = _(
        "The session ends with the status failed. An agent that is still working on it is not stopped."
    )
    help = ""

    def call(self, row: Any, given: Mapping[str, Any]) -> Outcome:
        marked = super().call(row, {**given, "status": "failed", "expected": [row.status]})
        return replace(marked, message=_("Marked the session as failed."))


class DeleteForm(forms.Form):
    keep_usage = forms.BooleanField(label=_("Keep its usage entries"), required=False, initial=True)


class Delete(SessionAction):
    name = "delete-session"
    label = _("Delete")
    permission = "delete"
    form = DeleteForm
    guard = "version"
    is_destructive = True
    warning = _("The session, all of its data, and all sessions below it are deleted.")
    command = "delete"
    help = "Delete a session with all its data and all sub-sessions below it."
    example = "trip-1 --no-input"
    options = {"--keep-usage": {"action": "store_true", "help": "Keep the usage entries."}}

    def preview(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> str:
        tree = session_tree(store, session_id)
        heads = [node.head for _way, node in tree.walk() if node.head is not None and not node.is_repeated]
        return (
            f"Delete the session {session_id} of the tenant '{store.tenant}': {len(heads):,} sessions with "
            f"{sum(head.message_count for head in heads):,} messages?"
        )

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        count = store.delete_session(session_id, keep_usage=given.get("keep_usage", False))
        if not count:
            raise SessionNotFound(session_id)
        return Outcome(
            message=format_lazy(_("Deleted {count} sessions."), count=count),
            data={"session_id": session_id, "deleted_sessions": count},
        )


INTERRUPT: Final = Interrupt()
ABORT: Final = Abort()
CLEAR_INTERRUPT: Final = ClearInterrupt()
SET_STATUS: Final = SetStatus()
MARK_FAILED: Final = MarkFailed()
DELETE: Final = Delete()
