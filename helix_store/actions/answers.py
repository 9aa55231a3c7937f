"""The action that answers a call: with a decision, or with text that becomes the call's result or error."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from django import forms
from django.contrib.auth import get_user_model
from django.contrib.messages import constants as levels
from django.core.exceptions import ValidationError
from django.db import router
from django.utils.crypto import constant_time_compare, salted_hmac
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.actions.sessions import Outcome, ReasonForm, SessionAction
from helix_store.core.approvals import USER, digest_of
from helix_store.core.limits import MAX_BIGINT, UNLIMITED
from helix_store.core.payloads import decode, encode
from helix_store.core.transcript import visible, visible_json
from helix_store.core.types import UNSET, SubmissionOutcome
from helix_store.engine.database import Database
from helix_store.exceptions import HelixStoreError, IntegrityFault, InvalidPayload, NotPermitted, shown_id
from helix_store.models import Session
from helix_store.reports.payloads import Change, changes_between, has_several_pages, json_start, payload_of
from helix_store.sessions.tool_calls import (
    EDITED_FROM,
    LiveDecisions,
    ToolCalls,
    checked_actor,
    current_call,
    number_of_approvals,
    require_permitted,
)
from helix_store.sessions.waiting import open_calls
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
_WITHOUT_DIGEST: Final = _(
    "Nothing was done: the answer does not say which input it is about. Open the session, and answer there."
)


REFUSALS: Final = {
    "permission": _("You may not answer it: it needs an active user with its permission."),
    "requester": _("You may not answer it: somebody other than the requester must answer it."),
}


def json_value(text: str) -> Any:
    """Return the value of a JSON document given as a string. Raises ``ValueError``.

    A repeated key is an error: only one of its values could be stored, and nobody knows which one was meant.
    """
    try:
        if not text.startswith("~"):  # A leading "~" marks stored text that is not plain JSON.
            value = decode(text)
            json.loads(text, object_pairs_hook=_without_repeated_keys)
            return value
    except (IntegrityFault, RecursionError):
        pass
    raise ValueError("expected JSON")


class RepeatedKey(ValueError):
    """An object in a JSON document has a key twice."""


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RepeatedKey(f"the key {json.dumps(key)} is repeated")
        found[key] = value
    return found


def json_argument(text: Any) -> Any:
    """Parse a JSON document for argparse. A value that is not a string is already parsed."""
    if not isinstance(text, str):
        return text
    try:
        return json_value(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{exc}, got {text!r}" if len(text) < 200 else str(exc)) from None


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
    proofs = ("digest", "seen", "shown")
    """The hidden fields with which a page proves what it has shown."""
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
        except RepeatedKey as exc:
            raise forms.ValidationError(_("A key is repeated in this JSON.")) from exc
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
    is_in_section = True
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
            "type": json_argument,
            "default": UNSET,
            "metavar": "JSON",
            "help": "Approve an editable call with this input instead.",
        },
    }

    def is_permitted(self, user: Any) -> bool:
        """Return whether the user may answer calls or change sessions, which includes it."""
        return bool(user.has_perm(f"{Session._meta.app_label}.answer_call")) or super().is_permitted(user)

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
        refusal = self._refusal(row, alias, given)
        if refusal is not None:
            return Outcome(message=refusal, is_done=False, level=levels.ERROR)
        return self.run(DatabaseStateStore(alias, tenant=row.tenant), row.session_id, given)

    def _refusal(self, row: Any, alias: str, given: Mapping[str, Any]) -> StrOrPromise | None:
        """Refuse to answer an approval without its digest, and to approve a call if the user was not shown
        all of its input.

        Lock the session's row, so that the answer applies to the input that was shown.
        """
        rows = Session._base_manager.using(alias).filter(pk=row.pk)
        columns = ("pending_client_tool_calls", "completed_client_tool_calls", "live_decisions")
        locked = rows.order_by().select_for_update(no_key=True).values_list(*columns)
        calls = ToolCalls.stored(*(locked.first() or (None, None)))
        call = calls.pending.get(given["call"])
        if isinstance(call, dict):
            if given["answer"] == APPROVE and not is_shown_whole(call):
                mark = mark_of_end(given["actor"], current_call(call)["digest"])
                if not constant_time_compare(given.get("shown") or "", mark):
                    return _NOT_SHOWN
            is_open = "submitted_at" not in call or (
                given["call"] in open_calls(Database(alias, row.tenant), {row.pk: calls})[row.pk]
            )
            is_approval = call.get("approval_id") is not None
            return _WITHOUT_DIGEST if is_approval and is_open and not given.get("digest") else None
        # A call of a sub-session is answered on the page of that sub-session, which shows its input.
        is_answered = given["call"] in calls.completed or given["answer"] == RESULT
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


def is_shown_whole(call: Mapping[str, Any]) -> bool:
    """Return whether a page shows an input, and all that somebody has changed in it, beside its form."""
    value = call.get("input")
    if json_start(value, WHOLE)[1]:
        return False
    return EDITED_FROM not in call or not has_several_pages(changes_between(call[EDITED_FROM], value))


def mark_of_end(user: Any, digest: str) -> str:
    """Return the mark with which a page proves that it has shown a user all parts of a long input. It belongs
    to the user, and to the digest of the call.
    """
    salt = "helix_store.actions.mark_of_end"
    return salted_hmac(salt, f"{user.pk} {digest}", algorithm="sha256").hexdigest()


def demands_of(
    user: Any, key: str, call: dict[str, Any], people: People, live: LiveDecisions
) -> dict[str, Any]:
    """Return who may answer an open call, who has approved it, and why this user may not answer it."""
    actor, refusal = checked_actor(user), ""
    try:
        require_permitted(key, call, actor)
    except NotPermitted as exc:
        refusal = str(REFUSALS[exc.reason])
    approved_by = live.approved_by(key, call)
    return {
        "requester": people.named(call.get("requester")),
        "permission": visible(str(call.get("permission") or "")),
        "approvals": number_of_approvals(call),
        "approved": len(approved_by),
        "approved_by": people.names(approved_by),
        "refusal": refusal,
        "has_approved": actor.id in approved_by,
    }


def editable_text(entry: dict[str, Any]) -> str:
    """Return the input to edit, with invisible characters escaped; empty if a form cannot change it."""
    if entry.get("editable") is not True:
        return ""
    value = entry.get("input")
    text, is_cut = json_start(value, _LONGEST_VALUE)
    if is_cut:
        return ""
    return text if visible_json(text) == text else json.dumps(value, indent=2)


@dataclass(frozen=True, slots=True)
class People:
    """The names of the Django users among the actors of some of the calls."""

    users: dict[str, str]

    @classmethod
    def of(
        cls, calls: list[tuple[str, Any]], live: LiveDecisions, *, decided_by: Iterable[Any] = ()
    ) -> People:
        of_calls = (
            actor
            for key, call in calls
            if isinstance(call, dict)
            for actor in (*list_of(call.get("actors")), *live.people(key), call.get("requester"))
        )
        return cls.of_actors(chain(decided_by, of_calls))

    @classmethod
    def of_actors(cls, given: Iterable[Any]) -> People:
        actors = {actor for actor in given if isinstance(actor, str) and actor.startswith(USER)}
        model = get_user_model()
        keys = {}
        for actor in actors:
            with suppress(ValidationError):
                key = model._meta.pk.to_python(actor.removeprefix(USER))
                if not isinstance(key, int) or 0 < key <= MAX_BIGINT:
                    keys[key] = actor
        found = model._default_manager.in_bulk(keys) if keys else {}
        return cls({keys[key]: user.get_username() for key, user in found.items()})

    def named(self, actor: Any) -> str:
        """Return the name of a user, or any other text in quotes, so it is not mistaken for a name."""
        if not isinstance(actor, str):
            return ""
        if actor in self.users:
            return visible(self.users[actor])
        return visible(actor if actor.startswith(USER) else f"“{actor}”")

    def names(self, actors: Any) -> str:
        return ", ".join(filter(None, map(self.named, list_of(actors))))


def list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


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
    except RepeatedKey as exc:
        raise InvalidPayload(path="value", reason=str(exc)) from None
    except ValueError:
        return text


ANSWER: Final = Answer()
