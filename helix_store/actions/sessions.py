"""The actions that a person may take: what each consists of, and those on a session, its checkpoints and its
posts.

The base class of all actions. An action changes a row, or a whole table, by calling a public store.

The admin, the management commands and code run the same object. An action declares the Django permission that
it requires, the guard column that detects an outdated page, the form in the admin and the options of the
command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from django import forms
from django.contrib.auth import get_permission_codename
from django.contrib.messages import constants as levels
from django.db import router
from django.db.models import Count, IntegerField, Model, Value
from django.utils import timezone
from django.utils.text import capfirst, format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.catalogue import Table, tables
from helix_store.core import validation
from helix_store.core.ids import new_id
from helix_store.core.transcript import visible
from helix_store.core.types import NON_TERMINAL_STATUSES, SessionStatus, StatusConflict
from helix_store.engine.database import Database
from helix_store.exceptions import (
    CheckpointNotFound,
    ConflictError,
    FencedOutError,
    HelixStoreError,
    IdempotencyConflict,
    NotFoundError,
    NotPermitted,
    OutcomeUnknown,
    SessionEnded,
    SessionNotFound,
    StaleStateError,
    StoreBusy,
    shown_id,
)
from helix_store.models import (
    Checkpoint,
    Decision,
    Effect,
    Item,
    Message,
    Post,
    Run,
    Session,
    StagedChange,
    UsageEntry,
)
from helix_store.reports.payloads import Change, moment, time_argument
from helix_store.reports.session import session_tree
from helix_store.sessions.locking import first_row, session_with_id
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from helix_store.stores.conditions import announce_again

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an action: a message, its level from `django.contrib.messages`, and data for programs.

    ``session_id`` names a session that the action created. If nothing was done, a command reports ``problem``
    instead of the message.
    """

    message: StrOrPromise
    is_done: bool = True
    level: int = levels.SUCCESS
    data: Mapping[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    problem: str = ""


class Action:
    """An action on the rows of a model.

    A destructive action must be confirmed: on a page that shows the ``warning``, or in a terminal that shows
    the ``preview``. The admin offers actions with a ``label``, and `helix_sessions` offers actions with a
    ``help``.
    """

    name: ClassVar[str]
    label: ClassVar[StrOrPromise] = ""
    model: ClassVar[type[Model]]
    permission: ClassVar[Literal["add", "change", "delete", "settle"]] = "change"
    form: ClassVar[type[forms.Form]] = forms.Form
    guard: ClassVar[str | None] = None
    is_destructive: ClassVar[bool] = False
    warning: ClassVar[StrOrPromise] = ""
    is_of_tenants: ClassVar[bool] = False
    """If true, the action on a table respects the tenants that it receives. The admin offers no other one to
    users who may not see all tenants (``HELIX_STORE["ADMIN_TENANTS"]``).
    """
    is_in_section: ClassVar[bool] = False
    """If true, a section of the session page offers the action; otherwise it is a button at the top."""

    def call(self, row: Any, given: Mapping[str, Any]) -> Outcome:
        """Run the action on the row, or on the table if ``row`` is ``None``, with the form's cleaned data.

        On a table, the data may contain ``tenants``: the tenants to which the action is limited.
        """
        raise NotImplementedError

    def is_permitted(self, user: Any) -> bool:
        """Return whether the user has the permission for the model, such as ``change_session``."""
        options = self.model._meta
        return bool(user.has_perm(f"{options.app_label}.{get_permission_codename(self.permission, options)}"))

    def is_possible(self, row: Any) -> bool:
        """Return whether the page of a row offers the action.

        The store makes the final decision when the action runs.
        """
        return True

    def initial(self, row: Any) -> Mapping[str, Any]:
        """Return the initial values of the form in the admin."""
        return {}

    def losses(self, row: Any, given: Mapping[str, Any]) -> list[tuple[StrOrPromise, str]]:
        """Return what the action would delete, with labels, for the page that asks for a confirmation."""
        return []

    def changes(self, row: Any, given: Mapping[str, Any]) -> list[Change]:
        """Return the changes that the page shows before the action runs."""
        return []

    def shown(self, row: Any) -> str:
        """Return the guard's value as a page shows it. Pass it to `perform` as ``expected``."""
        return "" if self.guard is None else str(getattr(row, self.guard))

    def perform(
        self,
        user: Any,
        row: Any,
        given: Mapping[str, Any],
        *,
        expected: str,
        record: Callable[[Outcome], object],
    ) -> Outcome:
        """Run and record the action, or report why not. ``expected`` is the guard's value that the user saw.

        The action receives the form's values, with the user as ``actor``.
        An action on a row is one transaction, which locks the row before it compares the guard. An action on
        a table uses the store's own transactions.
        """

        def recorded() -> Outcome:
            if self.guard is not None:
                self._require_unchanged(row, self.guard, expected)
            outcome = self.call(row, {**given, "actor": user})
            if outcome.is_done:
                record(outcome)
            return outcome

        try:
            if row is None:
                return recorded()
            alias = router.db_for_write(type(row), instance=row)
            return Database(alias, getattr(row, "tenant", ""), None).transaction(recorded)
        except HelixStoreError as error:
            return Outcome(message=in_words(error), is_done=False, level=levels.ERROR)

    def _require_unchanged(self, row: Any, guard: str, expected: str) -> None:
        """Lock the row. Raise `ConflictError` or `StaleStateError` if it has changed since it was shown."""
        rows = type(row)._base_manager.using(router.db_for_write(type(row), instance=row))
        locked = rows.select_for_update(no_key=True).order_by().filter(pk=row.pk)
        current = locked.values_list(guard, flat=True).first()
        if current is None and expected != str(None):
            raise NotFoundError
        if str(current) == expected:
            return
        if guard == "version" and expected.isascii() and expected.isdigit() and len(expected) < 20:
            raise StaleStateError(int(expected), current)
        raise ConflictError


class SessionAction(Action):
    """An action on a session. If it has a ``help``, it is also a sub-command of a management command.

    ``options`` are the arguments of the sub-command, in the form that argparse takes. `run` receives either
    their values or those of the form, so an argument may be missing.
    """

    model: ClassVar[type[Model]] = Session
    needs_open_session: ClassVar[bool] = False
    """If true, the action is offered only until the session ends."""
    command: ClassVar[str] = ""
    """The name of the sub-command. It defaults to the name of the action."""
    help: ClassVar[str] = ""
    example: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        raise NotImplementedError

    def preview(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> str:
        """Return the question that the terminal asks before a destructive action."""
        return f"{self.help} Session: {session_id}."

    def is_possible(self, row: Any) -> bool:
        return not self.needs_open_session or row.status in NON_TERMINAL_STATUSES

    def call(self, row: Any, given: Mapping[str, Any]) -> Outcome:
        alias = router.db_for_write(Session, instance=row)
        return self.run(DatabaseStateStore(alias, tenant=row.tenant), row.session_id, given)


def in_words(error: HelixStoreError) -> StrOrPromise:
    """Return a message that tells a person why an action was refused."""
    if isinstance(error, StaleStateError):
        return format_lazy(
            _(
                "Nothing was done: an agent or another person has changed the session since this page was "
                "shown (version {shown}, now {now}). Look at it again, then repeat."
            ),
            shown=error.expected_version,
            now=error.current_version,
        )
    if isinstance(error, IdempotencyConflict):
        return _(
            "Nothing was done: this form has already been sent with other values. "
            "Reload the page to send it again."
        )
    for kind, words in _WORDS.items():
        if isinstance(error, kind):
            said = str(error)
            return words if said == kind.default_message() else format_lazy("{} ({})", words, said)
    return format_lazy(_("Nothing was done: {}"), str(error))


_WORDS: Final[dict[type[HelixStoreError], StrOrPromise]] = {
    NotPermitted: _("Nothing was done: you may not answer this call."),
    FencedOutError: _("Nothing was done: an agent holds the lock of this session."),
    SessionNotFound: _("Nothing was done: the session has been deleted."),
    CheckpointNotFound: _("Nothing was done: the checkpoint has been deleted."),
    NotFoundError: _("Nothing was done: the object has been deleted."),
    ConflictError: _(
        "Nothing was done: an agent or another person has changed the object since this page was shown. Look "
        "at it again, then repeat."
    ),
    StoreBusy: _("Nothing was done: the database is busy with another write. Try again in a moment."),
    OutcomeUnknown: _(
        "The connection to the database broke, so it is not known whether this was done. Look at the page."
    ),
}


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
        has_worker = DatabaseLockManager(store.alias, tenant=store.tenant).is_locked(session_id)
        if not has_worker:
            message = format_lazy(
                "{} {}",
                message,
                _("Nobody holds its lock in this database, so only its next turn learns of this."),
            )
        return Outcome(message=message, data={**request.to_dict(), "has_worker": has_worker})


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
    is_in_section = True

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
        "new_status": {"choices": _STATUSES, "metavar": "STATUS", "help": f"One of {', '.join(_STATUSES)}."},
        "--reason": {"help": "The failure reason (default: none)."},
        "--expected": {
            "action": "append",
            "choices": _STATUSES,
            "help": "Set it only if the session has this status now; may be repeated.",
        },
    }

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        status, reason = given["new_status"], given.get("reason")
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
        marked = super().call(row, {**given, "new_status": "failed", "expected": [row.status]})
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

    def losses(self, row: Any, given: Mapping[str, Any]) -> list[tuple[StrOrPromise, str]]:
        """Return the number of rows of each kind in the tree. This takes four statements."""
        alias = row._state.db
        walk = session_tree(DatabaseStateStore(alias, tenant=row.tenant), row.session_id).walk()
        names = {node.session_id for _way, node in islice(walk, _MOST_COUNTED) if node.head is not None}
        found = Session._base_manager.using(alias).filter(tenant=row.tenant, session_id__in=names)
        keys = list(found.values_list("pk", flat=True))
        counts: list[tuple[StrOrPromise, int]] = [(Session._meta.verbose_name_plural or "", len(keys))]
        counted = [table for table in tables("session") if _is_counted(table)]
        parts = [
            table.model._base_manager.using(alias)
            .filter(**{f"{table.parent}__in": keys})
            .order_by()
            .annotate(counted_table=Value(place, output_field=IntegerField()))
            .values("counted_table")
            .annotate(counted_rows=Count("pk"))
            .values_list("counted_table", "counted_rows")
            for place, table in enumerate(counted)
        ]
        first, *others = parts
        for place, count in sorted(first.union(*others, all=True)):
            counts.append((counted[place].model._meta.verbose_name_plural or "", count))
        return [(capfirst(label), f"{count:,}") for label, count in counts if count]

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        count = store.delete_session(session_id, keep_usage=given.get("keep_usage", False))
        if not count:
            raise SessionNotFound(session_id)
        return Outcome(
            message=format_lazy(_("Deleted {count} sessions."), count=count),
            data={"session_id": session_id, "deleted_sessions": count},
        )


_MOST_COUNTED: Final = 1_000
"""The maximum number of sessions of a tree whose rows are counted."""

_COUNTED: Final = (Message, Checkpoint, Run, Effect, Decision, Post, Item, UsageEntry)


def _is_counted(table: Table) -> bool:
    """Return whether the rows of a table mean something to people."""
    is_of_app = table.model._meta.app_label != Session._meta.app_label
    return not table.names_tenant and (is_of_app or table.model in _COUNTED)


class RunAgain(SessionAction):
    """A request for another turn, which the receivers of `session_ready` start."""

    name = "run-again"
    label = _("Run again")
    needs_open_session = True
    help = "Send the signal session_ready, so that the project starts another turn of a session."
    example = "trip-1"

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        db = Database(store.alias, store.tenant)
        status = first_row(session_with_id(db, session_id).values_list("status", flat=True))
        if status is None:
            raise SessionNotFound(session_id)
        if SessionStatus(status).is_terminal:
            raise SessionEnded(session_id, status)
        data = {"session_id": session_id, "reason": "again"}
        if DatabaseLockManager(store.alias, tenant=store.tenant).is_locked(session_id):
            return Outcome(
                message=_("Nothing was done: an agent is working on this session."),
                is_done=False,
                level=levels.WARNING,
                data=data,
                problem="A worker holds the lock of this session; nothing was done.",
            )
        announce_again(db, session_id)
        return Outcome(message=_("Asked for another turn of the session."), data=data)


INTERRUPT: Final = Interrupt()
ABORT: Final = Abort()
CLEAR_INTERRUPT: Final = ClearInterrupt()
SET_STATUS: Final = SetStatus()
MARK_FAILED: Final = MarkFailed()
RUN_AGAIN: Final = RunAgain()
DELETE: Final = Delete()


_LONGEST_ID: Final = 320


class CheckpointForm(forms.Form):
    checkpoint = forms.CharField(widget=forms.HiddenInput, max_length=_LONGEST_ID, strip=False)


class BranchForm(CheckpointForm):
    title = forms.CharField(
        label=_("Title of the new session"), required=False, max_length=200, empty_value=None
    )


class KeepForm(forms.Form):
    keep = forms.IntegerField(label=_("Checkpoints to keep"), min_value=0, max_value=1_000_000, initial=20)


class Restore(SessionAction):
    name = "restore"
    label = _("Restore")
    is_in_section = True
    form = CheckpointForm
    guard = "version"
    is_destructive = True
    warning = _("Later messages, later checkpoints and all staged changes of the session are deleted.")

    def preview(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> str:
        found = store.get_checkpoint(session_id, given["checkpoint"])
        if found is None:
            raise CheckpointNotFound(given["checkpoint"])
        count = store.get_message_count(session_id)
        return (
            f"Rewind the session {session_id} of the tenant '{store.tenant}' to {found.step_id} of "
            f"{moment(found.created_at)}: {count - found.message_count:,} of {count:,} messages and every "
            "later checkpoint are deleted?"
        )

    def losses(self, row: Any, given: Mapping[str, Any]) -> list[tuple[StrOrPromise, str]]:
        """Return the step that the session goes back to, and what is after it, in three statements."""
        alias = row._state.db
        steps = Checkpoint._base_manager.using(alias).filter(session=row.pk, kind="step", namespace="")
        columns = ("version", "step_count", "step_id", "message_count")
        found = (
            steps.filter(checkpoint_id=validation.checkpoint_id(given.get("checkpoint")))
            .values_list(*columns)
            .first()
        )
        if found is None:
            return []
        version, number, step_id, messages = found
        later = steps.filter(version__gt=version).count()
        staged = StagedChange._base_manager.using(alias).filter(session=row.pk).count()
        return [
            (_("Back to step"), f"{number:,} {visible(step_id or '')}".strip()),
            (_("Messages after it"), f"{max(0, row.message_count - messages):,}"),
            (_("Checkpoints after it"), f"{later:,}"),
            (_("Staged changes"), f"{staged:,}"),
        ]

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        checkpoint_id = given["checkpoint"]
        version = store.restore_checkpoint(
            session_id, checkpoint_id, expected_version=given.get("expected_version")
        )
        return Outcome(
            message=format_lazy(
                _("Restored the checkpoint {checkpoint}. The session is at version {version}."),
                checkpoint=shown_id(checkpoint_id),
                version=version,
            ),
            data={"session_id": session_id, "checkpoint_id": checkpoint_id, "version": version},
        )


class Branch(SessionAction):
    name = "branch"
    label = _("Branch")
    is_in_section = True
    form = BranchForm

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        checkpoint_id = given["checkpoint"]
        state = store.branch_session(
            session_id,
            checkpoint_id,
            new_session_id=given.get("new_id"),
            message_index=given.get("message_index"),
            title=given.get("title"),
        )
        return Outcome(
            message=format_lazy(
                _("Branched a new session from the checkpoint {checkpoint}."),
                checkpoint=shown_id(checkpoint_id or ""),
            ),
            session_id=state.session_id,
            data={
                "session_id": state.session_id,
                "branched_from": session_id,
                "checkpoint_id": checkpoint_id,
                "message_count": state.message_count,
            },
        )


class PruneCheckpoints(SessionAction):
    name = "prune-checkpoints"
    label = _("Prune checkpoints")
    is_in_section = True
    model = Checkpoint
    permission = "delete"
    form = KeepForm
    is_destructive = True
    warning = _("The oldest checkpoints are deleted. The current state and the messages stay.")

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        count = store.prune_checkpoints(session_id, keep=given["keep"])
        return Outcome(
            message=format_lazy(_("Deleted {count} checkpoints."), count=count), data={"checkpoints": count}
        )


RESTORE: Final = Restore()
BRANCH: Final = Branch()
PRUNE_CHECKPOINTS: Final = PruneCheckpoints()


_LONGEST_POST: Final = 100_000


class PostForm(forms.Form):
    text = forms.CharField(
        label=_("Message"), max_length=_LONGEST_POST, widget=forms.Textarea(attrs={"rows": 3})
    )
    not_before = forms.DateTimeField(
        label=_("Not before"),
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )

    # Sending a form twice posts only once.
    key = forms.CharField(
        widget=forms.HiddenInput, max_length=_LONGEST_ID, required=False, empty_value=None, initial=new_id
    )

    not_named = ("key",)

    def clean_not_before(self) -> datetime | None:
        """Return an aware time, even in projects without time zones."""
        at: datetime | None = self.cleaned_data["not_before"]
        return at if at is None or timezone.is_aware(at) else timezone.make_aware(at)


class WithdrawForm(forms.Form):
    post_id = forms.CharField(widget=forms.HiddenInput, max_length=_LONGEST_ID, strip=False)


class PostMessage(SessionAction):
    """A post from a user in the admin, or from the given ``author``."""

    name = "post"
    label = _("Post a message")
    model = Post
    permission = "add"
    needs_open_session = True
    is_in_section = True
    form = PostForm
    help = "Post a message of a user to a session, even while an agent is working on it."
    example = "trip-1 'And vegetarian, please.' --author ada"
    options = {
        "text": {"metavar": "TEXT", "help": "The content of the message."},
        "--author": {"help": "Who posts it: text, for example a user id."},
        "--key": {"help": "Makes the post idempotent: a repeat under this key stores nothing."},
        "--not-before": {
            "type": time_argument,
            "metavar": "TIME",
            "help": "When the post is due (default: now).",
        },
    }

    def call(self, row: Any, given: Mapping[str, Any]) -> Outcome:
        alias, key = router.db_for_write(Session, instance=row), given.get("key")
        # If a form is sent twice at once, the second waits here, and then finds the post of the first.
        locked = Session._base_manager.using(alias).filter(pk=row.pk).select_for_update(no_key=True)
        locked.values("pk").first()
        posts = Post._base_manager.using(alias).filter(session_id=row.pk, key=key)
        is_repeat = key is not None and posts.exists()
        return replace(super().call(row, given), is_done=not is_repeat)

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        user = given.get("actor")
        post = store.post_message(
            session_id,
            {"role": "user", "content": given["text"]},
            key=given.get("key"),
            author=given.get("author") if user is None else user,
            not_before=given.get("not_before"),
        )
        message = format_lazy(_("Posted the message as number {number}."), number=post.sequence)
        return Outcome(message=message, data=post.to_dict())


class WithdrawPost(SessionAction):
    name = "withdraw-post"
    label = _("Withdraw")
    model = Post
    is_in_section = True
    form = WithdrawForm
    help = "Withdraw a waiting post of a session."
    example = "trip-1 POST_ID"
    options = {"post_id": {"metavar": "POST", "help": "The id of the post."}}

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        post_id = given["post_id"]
        is_withdrawn = store.withdraw_post(session_id, post_id)
        return Outcome(
            message=_("Withdrew the post.") if is_withdrawn else _("The post is no longer waiting."),
            is_done=is_withdrawn,
            level=levels.SUCCESS if is_withdrawn else levels.WARNING,
            data={"session_id": session_id, "post_id": post_id, "withdrawn": is_withdrawn},
            problem=f"No post {post_id} is waiting in this session; nothing was changed.",
        )


POST: Final = PostMessage()
WITHDRAW_POST: Final = WithdrawPost()
