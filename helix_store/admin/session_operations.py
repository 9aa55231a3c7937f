"""The operations on a session: stop it, answer its calls, rewind, branch, prune and delete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django import forms
from django.contrib import messages
from django.db import router
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.admin.operations import Operation, Outcome
from helix_store.core.payloads import decode
from helix_store.core.types import NON_TERMINAL_STATUSES, SessionStatus, SubmissionOutcome
from helix_store.exceptions import ConflictError, IntegrityFault, shown_id
from helix_store.models import Checkpoint, Session
from helix_store.stores import DatabaseStateStore

__all__ = [
    "ABORT",
    "ANSWER",
    "BRANCH",
    "CLEAR_INTERRUPT",
    "DELETE",
    "INTERRUPT",
    "MARK_FAILED",
    "PRUNE_CHECKPOINTS",
    "RESTORE",
    "SESSION_OPERATIONS",
    "answered_call",
]

_LONGEST_REASON: Final = 1_000
_LONGEST_ID: Final = 320
_LONGEST_VALUE: Final = 100_000


def store_of(session: Session) -> DatabaseStateStore:
    """The store of the session's tenant, in the database that takes its writes."""
    return DatabaseStateStore(router.db_for_write(Session, instance=session), tenant=session.tenant)


def _is_not_over(session: Session) -> bool:
    return session.status in NON_TERMINAL_STATUSES


# --- Interrupt -------------------------------------------------------------------------------------


class ReasonForm(forms.Form):
    reason = forms.CharField(label=_("Reason"), required=False, max_length=_LONGEST_REASON)


def _interrupt(session: Session, given: Mapping[str, Any]) -> Outcome:
    store_of(session).request_interrupt(
        session.session_id, kind="interrupt", reason=given.get("reason") or None
    )
    return Outcome(message=_("Requested an interrupt: the agent stops at its next step, and can continue."))


def _abort(session: Session, given: Mapping[str, Any]) -> Outcome:
    store_of(session).request_interrupt(session.session_id, kind="abort", reason=given.get("reason") or None)
    return Outcome(message=_("Requested an abort: the agent stops at its next step, for good."))


def _clear_interrupt(session: Session, given: Mapping[str, Any]) -> Outcome:
    if store_of(session).clear_interrupt(session.session_id):
        return Outcome(message=_("Withdrew the request to stop."))
    return Outcome(message=_("There is no request to stop any more."), is_done=False, level=messages.WARNING)


def _mark_failed(session: Session, given: Mapping[str, Any]) -> Outcome:
    change = store_of(session).compare_and_set_status(
        session.session_id,
        [SessionStatus(session.status)],
        SessionStatus.FAILED,
        failure_reason=given.get("reason") or None,
    )
    if not change:
        raise ConflictError
    return Outcome(message=_("Marked the session as failed."))


INTERRUPT: Final = Operation(
    name="interrupt",
    label=_("Interrupt"),
    model=Session,
    permission="change",
    call=_interrupt,
    form=ReasonForm,
    is_possible=_is_not_over,
)

ABORT: Final = Operation(
    name="abort",
    label=_("Abort"),
    model=Session,
    permission="change",
    call=_abort,
    form=ReasonForm,
    is_destructive=True,
    warning=_("The agent stops at its next step and does not continue."),
    is_possible=_is_not_over,
)

CLEAR_INTERRUPT: Final = Operation(
    name="clear-interrupt",
    label=_("Withdraw the request to stop"),
    model=Session,
    permission="change",
    call=_clear_interrupt,
)

MARK_FAILED: Final = Operation(
    name="mark-failed",
    label=_("Mark as failed"),
    model=Session,
    permission="change",
    call=_mark_failed,
    form=ReasonForm,
    guard="status",
    is_destructive=True,
    warning=_("The session ends with the status failed. An agent that still works on it is not stopped."),
    is_possible=_is_not_over,
)


# --- Answers ---------------------------------------------------------------------------------------

APPROVE, REJECT, RESULT, ERROR = "approve", "reject", "result", "error"


class AnswerForm(forms.Form):
    """An answer to a pending call: a decision with its reason, or a JSON value as the result or the error."""

    call = forms.CharField(widget=forms.HiddenInput, max_length=_LONGEST_ID, strip=False)
    approval = forms.CharField(widget=forms.HiddenInput, max_length=_LONGEST_ID, required=False, strip=False)
    answer = forms.ChoiceField(
        label=_("Answer"),
        choices=[(APPROVE, _("Approve")), (REJECT, _("Reject")), (RESULT, _("Result")), (ERROR, _("Error"))],
    )
    reason = forms.CharField(label=_("Reason"), required=False, max_length=_LONGEST_REASON)
    value = forms.CharField(
        label=_("Value"),
        required=False,
        max_length=_LONGEST_VALUE,
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text=_("JSON. A text that is not JSON is taken as a text."),
    )


def _answer(session: Session, given: Mapping[str, Any]) -> Outcome:
    call, answer = given["call"], given["answer"]
    arguments: dict[str, Any]
    if answer in (APPROVE, REJECT):
        arguments = {
            "approved": answer == APPROVE,
            "approval_id": given.get("approval") or None,
            "reason": given.get("reason") or None,
        }
    else:
        arguments = {answer: _json_or_text(given.get("value") or "")}
    submission = store_of(session).submit_tool_result(session.session_id, call, **arguments)
    if submission.outcome is SubmissionOutcome.ACCEPTED:
        return Outcome(message=answered_call(call, _ANSWERED[answer]))
    words = _NOT_ANSWERED[submission.outcome]
    return Outcome(message=words, is_done=False, level=messages.WARNING)


def answered_call(call: str, answer: Any) -> Any:
    """The message of an answer, which the log keeps: it begins with the id of the call."""
    return format_lazy(_("{call}: {answer}."), call=shown_id(call), answer=answer)


_ANSWERED: Final = {
    APPROVE: _("approved"),
    REJECT: _("rejected"),
    RESULT: _("answered with a result"),
    ERROR: _("answered with an error"),
}
_NOT_ANSWERED: Final = {
    SubmissionOutcome.ALREADY_COMPLETED: _("Nothing was done: somebody answered this call before."),
    SubmissionOutcome.UNKNOWN_TOOL_CALL: _(
        "Nothing was done: the session has ended, or does not wait for this call any more."
    ),
}


def _json_or_text(text: str) -> Any:
    if text.startswith("~"):  # It marks a stored text that is not plain JSON.
        return text
    try:
        return decode(text)
    except (IntegrityFault, RecursionError):
        return text


ANSWER: Final = Operation(
    name="answer",
    label=_("Answer"),
    model=Session,
    permission="change",
    call=_answer,
    form=AnswerForm,
    is_possible=_is_not_over,
)


# --- Checkpoints -----------------------------------------------------------------------------------


class CheckpointForm(forms.Form):
    checkpoint = forms.CharField(widget=forms.HiddenInput, max_length=_LONGEST_ID, strip=False)


class BranchForm(CheckpointForm):
    title = forms.CharField(label=_("Title of the new session"), required=False, max_length=200)


class KeepForm(forms.Form):
    keep = forms.IntegerField(label=_("Checkpoints to keep"), min_value=0, max_value=1_000_000, initial=20)


def _restore(session: Session, given: Mapping[str, Any]) -> Outcome:
    version = store_of(session).restore_checkpoint(session.session_id, given["checkpoint"])
    return Outcome(
        message=format_lazy(
            _("Restored the checkpoint {checkpoint}. The session is at version {version}."),
            checkpoint=shown_id(given["checkpoint"]),
            version=version,
        )
    )


def _branch(session: Session, given: Mapping[str, Any]) -> Outcome:
    store = store_of(session)
    state = store.branch_session(session.session_id, given["checkpoint"], title=given.get("title") or None)
    branches = Session.objects.using(store.alias).filter(tenant=session.tenant, session_id=state.session_id)
    return Outcome(
        message=format_lazy(
            _("Branched a new session from the checkpoint {checkpoint}."),
            checkpoint=shown_id(given["checkpoint"]),
        ),
        row=branches.only("pk").first(),
    )


def _prune(session: Session, given: Mapping[str, Any]) -> Outcome:
    count = store_of(session).prune_checkpoints(session.session_id, keep=given["keep"])
    return Outcome(message=format_lazy(_("Deleted {count} checkpoints."), count=count))


RESTORE: Final = Operation(
    name="restore",
    label=_("Restore"),
    model=Session,
    permission="change",
    call=_restore,
    form=CheckpointForm,
    guard="version",
    is_destructive=True,
    warning=_("Later messages, later checkpoints and all staged changes of the session are deleted."),
)

BRANCH: Final = Operation(
    name="branch",
    label=_("Branch"),
    model=Session,
    permission="change",
    call=_branch,
    form=BranchForm,
)

PRUNE_CHECKPOINTS: Final = Operation(
    name="prune-checkpoints",
    label=_("Prune checkpoints"),
    model=Checkpoint,
    permission="delete",
    call=_prune,
    form=KeepForm,
    is_destructive=True,
    warning=_("The oldest checkpoints are deleted. The current state and the messages stay."),
)


# --- Delete ----------------------------------------------------------------------------------------


class DeleteForm(forms.Form):
    keep_usage = forms.BooleanField(label=_("Keep its usage entries"), required=False, initial=True)


def _delete(session: Session, given: Mapping[str, Any]) -> Outcome:
    count = store_of(session).delete_session(session.session_id, keep_usage=given.get("keep_usage", False))
    return Outcome(message=format_lazy(_("Deleted {count} sessions."), count=count))


DELETE: Final = Operation(
    name="delete-session",
    label=_("Delete"),
    model=Session,
    permission="delete",
    call=_delete,
    form=DeleteForm,
    guard="version",
    is_destructive=True,
    warning=_("The session, all that belongs to it, and all sessions below it are deleted."),
)

SESSION_OPERATIONS: Final = (
    INTERRUPT,
    ABORT,
    CLEAR_INTERRUPT,
    MARK_FAILED,
    ANSWER,
    RESTORE,
    BRANCH,
    PRUNE_CHECKPOINTS,
    DELETE,
)
