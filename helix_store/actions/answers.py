"""The action that answers a call: with a decision, or with text that becomes the call's result or error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from django import forms
from django.contrib.messages import constants as levels
from django.db import router
from django.utils.crypto import constant_time_compare, salted_hmac
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.actions.action import Outcome, SessionAction
from helix_store.actions.sessions import ReasonForm
from helix_store.core.approvals import digest_of
from helix_store.core.limits import UNLIMITED
from helix_store.core.payloads import decode, encode
from helix_store.core.types import UNSET, SubmissionOutcome
from helix_store.exceptions import HelixStoreError, IntegrityFault, shown_id
from helix_store.models import Session
from helix_store.reports.comparison import Change, changes_between
from helix_store.reports.payloads import json_start, payload_of
from helix_store.sessions.approvals import current_call
from helix_store.sessions.tool_calls import ToolCalls
from helix_store.stores import DatabaseStateStore

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise

APPROVE: Final = "approve"
REJECT: Final = "reject"
RESULT: Final = "result"
ERROR: Final = "error"

RECORDED: Final = "recorded"

WHOLE: Final = 20_000
"""The longest input, in characters of indented JSON, that a page shows beside its form."""

_LONGEST_ID: Final = 320
_LONGEST_MARK: Final = 1_000
_LONGEST_VALUE: Final = 100_000

_ANSWERED: Final = {
    APPROVE: _("approved"),
    REJECT: _("rejected"),
    RESULT: _("answered with a result"),
    ERROR: _("answered with an error"),
    RECORDED: _("approved; it also needs the approval of somebody else"),
}
_NOT_ANSWERED: Final = {
    SubmissionOutcome.ALREADY_COMPLETED: (
        _("Nothing was done: somebody has already answered this call."),
        "The call {call} was answered before; nothing was changed.",
    ),
    SubmissionOutcome.ALREADY_RECORDED: (
        _("Nothing was done: you have already approved this call; it also needs somebody else."),
        "This actor has already approved the call {call}; nothing was changed.",
    ),
    SubmissionOutcome.CHANGED: (
        _("Nothing was done: the call has changed since this page was shown. Look at it again."),
        "The call {call} has another digest; nothing was changed.",
    ),
    SubmissionOutcome.UNKNOWN_TOOL_CALL: (
        _("Nothing was done: the session has ended, or no longer waits for this call."),
        "The call {call} is unknown, or its session has ended; nothing was changed.",
    ),
}
_NOT_SHOWN: Final = _(
    "Nothing was done: the input of this call is long, and you have not read it to its end, or "
    "it has changed."
)


def json_value(text: str) -> Any:
    """Return the value of a JSON document given as a string. Raises ``ValueError``."""
    try:
        if not text.startswith("~"):  # A leading "~" marks stored text that is not plain JSON.
            return decode(text)
    except (IntegrityFault, RecursionError):
        pass
    raise ValueError("expected JSON")


class AnswerForm(ReasonForm):
    """An answer to a pending call: a decision with a reason, or a JSON value as its result or error."""

    call = forms.CharField(widget=forms.HiddenInput, max_length=_LONGEST_ID, strip=False)
    approval = forms.CharField(
        widget=forms.HiddenInput, max_length=_LONGEST_ID, required=False, strip=False, empty_value=None
    )
    answer = forms.ChoiceField(
        label=_("Answer"),
        choices=[(APPROVE, _("Approve")), (REJECT, _("Reject")), (RESULT, _("Result")), (ERROR, _("Error"))],
    )
    shown = forms.CharField(widget=forms.HiddenInput, max_length=_LONGEST_MARK, required=False)
    digest = forms.CharField(widget=forms.HiddenInput, max_length=_LONGEST_ID, required=False)
    value = forms.CharField(
        label=_("Value"),
        required=False,
        max_length=_LONGEST_VALUE,
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text=_("JSON. Text that is not JSON is used as it is."),
    )
    edit = forms.CharField(
        label=_("Input to approve instead, as JSON"),
        max_length=_LONGEST_VALUE,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 12, "class": "helix-editor", "spellcheck": "false"}),
    )
    seen = forms.CharField(widget=forms.HiddenInput, max_length=_LONGEST_ID, required=False)
    """The digest of the changed input whose differences a page has already shown."""

    not_named = ("approval", "answer", "digest", "seen", "shown")
    """The hidden fields that do not help a person to identify the call."""
    is_seen = True
    """False until the page has shown the differences of a changed input."""
    submit_label: StrOrPromise = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "edit" not in self.data:
            del self.fields["edit"]
            return
        self.submit_label = _("Approve this input")
        for name in ("answer", "value"):
            self.fields[name].widget = forms.HiddenInput()

    def clean_edit(self) -> Any:
        """Show the differences of a changed input first, and again after each further change."""
        try:
            value = json_value(self.cleaned_data["edit"])
            encode(value, limit=UNLIMITED)
        except (ValueError, HelixStoreError) as exc:
            raise forms.ValidationError(_("This is not JSON.")) from exc
        digest = digest_of(self.cleaned_data.get("call"), value)
        self.is_seen = self.data.get("seen") == digest
        self.data = {**dict(self.data.items()), "seen": digest}
        return value


class Answer(SessionAction):
    """An answer from a user in the admin, or from the given ``actor``."""

    name = "answer"
    label = _("Answer")
    needs_open_session = True
    has_own_place = True
    form = AnswerForm
    help = "Answer an open tool call of a session: decide an approval, or give a result or an error."
    example = 'trip-1 result \'{"booking": "JL 5"}\''
    options = {
        "answer": {"choices": [APPROVE, REJECT, RESULT, ERROR]},
        "value": {
            "nargs": "?",
            "metavar": "VALUE",
            "help": "The result or the error: JSON, or any other text as it is (default of a result: null).",
        },
        "--call": {
            "metavar": "CALL",
            "help": "The id of the call, or its start (default: the only open call).",
        },
        "--reason": {"help": "The reason of an approval or a rejection."},
        "--as": {"dest": "user", "metavar": "USER", "help": "The name of the Django user who answers."},
        "--actor": {"help": "Who answers, if not a Django user: a string that is stored with the answer."},
        "--digest": {"help": "Answer only the call with this digest."},
        "--input": {
            "dest": "edit",
            "type": json_value,
            "default": UNSET,
            "metavar": "JSON",
            "help": "Approve an editable call with this input instead.",
        },
    }

    def changes(self, row: Any, given: Mapping[str, Any]) -> list[Change]:
        if "edit" not in given:
            return []
        try:
            calls = ToolCalls.stored(payload_of(row, "pending_client_tool_calls"), None)
        except IntegrityFault:  # The answer is refused for the same reason, in words.
            return []
        call = calls.pending.get(given["call"])
        return list(changes_between(call.get("input") if isinstance(call, dict) else None, given["edit"]))

    def call(self, row: Any, given: Mapping[str, Any]) -> Outcome:
        alias = router.db_for_write(Session, instance=row)
        refusal = self._refusal(row, alias, given) if given["answer"] == APPROVE else None
        if refusal is not None:
            return Outcome(message=refusal, is_done=False, level=levels.ERROR)
        return self.run(DatabaseStateStore(alias, tenant=row.tenant), row.session_id, given)

    def _refusal(self, row: Any, alias: str, given: Mapping[str, Any]) -> StrOrPromise | None:
        """Refuse to approve a call if the user was not shown the end of its input.

        Lock the session's row, so that the answer applies to the input that was shown.
        """
        rows = Session._base_manager.using(alias).filter(pk=row.pk)
        columns = ("pending_client_tool_calls", "completed_client_tool_calls")
        locked = rows.order_by().select_for_update(no_key=True).values_list(*columns)
        calls = ToolCalls.stored(*(locked.first() or (None, None)))
        call = calls.pending.get(given["call"])
        if isinstance(call, dict):
            if not json_start(call.get("input"), WHOLE)[1]:
                # A short input is shown beside its form.
                return None
            mark = mark_of_end(given["actor"], current_call(call)["digest"])
            return None if constant_time_compare(given.get("shown") or "", mark) else _NOT_SHOWN
        # A call of a sub-session is answered on the page of that sub-session, which shows its input.
        is_answered = given["call"] in calls.completed
        return None if is_answered else _NOT_ANSWERED[SubmissionOutcome.UNKNOWN_TOOL_CALL][0]

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        call, answer = given["call"], given["answer"]
        submission = store.submit_tool_result(session_id, call, **_arguments(answer, given))
        if submission.new_version is None:
            message, problem = _NOT_ANSWERED[submission.outcome]
            return Outcome(
                message=message, is_done=False, level=levels.WARNING, problem=problem.format(call=call)
            )
        return Outcome(
            message=format_lazy(
                _("{call}: {answer}."),
                call=shown_id(call),
                answer=_ANSWERED[RECORDED if submission.outcome is SubmissionOutcome.RECORDED else answer],
            ),
            data={
                "session_id": submission.session_id,
                "tool_call_id": call,
                "outcome": submission.outcome.value,
                "version": submission.new_version,
            },
        )


def mark_of_end(user: Any, digest: str) -> str:
    """Return the mark with which a page proves that it has shown a user the end of a long input. It belongs
    to the user, and to the digest of the call.
    """
    salt = "helix_store.actions.mark_of_end"
    return salted_hmac(salt, f"{user.pk} {digest}", algorithm="sha256").hexdigest()


def _arguments(answer: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `submit_tool_result` for an answer, such as ``approve``."""
    by = {"actor": given.get("actor"), "digest": given.get("digest") or None}
    if answer in (APPROVE, REJECT):
        approval_id, reason = given.get("approval"), given.get("reason")
        decision = {"approved": answer == APPROVE, "approval_id": approval_id, "reason": reason}
        return {**by, **decision, "input": given.get("edit", UNSET)}
    value = given.get("value")
    return {**by, answer: None if value is None else _json_or_text(value)}


def _json_or_text(text: str) -> Any:
    try:
        return json_value(text)
    except ValueError:
        return text


ANSWER: Final = Answer()
