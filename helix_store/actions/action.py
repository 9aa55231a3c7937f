"""The base class of all actions. An action changes a row, or a whole table, by calling a public store.

The admin, the management commands and code run the same object. An action declares the Django permission that
it requires, the guard column that detects an outdated page, the form in the admin and the options of the
command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from django import forms
from django.contrib.auth import get_permission_codename
from django.contrib.messages import constants as levels
from django.db import router
from django.db.models import Model
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.core.types import NON_TERMINAL_STATUSES
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
    SessionNotFound,
    StaleStateError,
    StoreBusy,
)
from helix_store.models import Session
from helix_store.reports.comparison import Change
from helix_store.stores import DatabaseStateStore

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
    permission: ClassVar[Literal["add", "change", "delete"]] = "change"
    form: ClassVar[type[forms.Form]] = forms.Form
    guard: ClassVar[str | None] = None
    is_destructive: ClassVar[bool] = False
    warning: ClassVar[StrOrPromise] = ""
    has_own_place: ClassVar[bool] = False
    """If true, a section of the session page offers the action; otherwise it is a button at the top."""

    def call(self, row: Any, given: Mapping[str, Any]) -> Outcome:
        """Run the action on the row, or on the table if ``row`` is ``None``, with the form's cleaned data."""
        raise NotImplementedError

    def is_permitted(self, user: Any) -> bool:
        """Return whether the user has Django's permission to add, change or delete rows of the model."""
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
