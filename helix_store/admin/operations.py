"""An operation: what a person may do to a row, or to a whole table, by a call of a public store.

Each needs a permission of Django, is written to the admin's log, and ends with a message. A page sends the
value of the ``guard`` column that it showed: if an agent has changed the row since, nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from django import forms
from django.contrib import messages
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.auth import get_permission_codename
from django.contrib.contenttypes.models import ContentType
from django.db import router
from django.db.models import Model
from django.http import HttpRequest
from django.utils import translation
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.engine.database import Database
from helix_store.exceptions import (
    CheckpointNotFound,
    ConflictError,
    FencedOutError,
    HelixStoreError,
    NotFoundError,
    OutcomeUnknown,
    SessionNotFound,
    StaleStateError,
    StoreBusy,
)

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise

__all__ = ["NoInput", "Operation", "Outcome", "in_words"]

_LONGEST_TITLE: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an operation did, in words. ``row`` is a row that it created, to go on with."""

    message: StrOrPromise
    is_done: bool = True
    level: int = messages.SUCCESS
    row: Model | None = None


class NoInput(forms.Form):
    """The form of an operation without arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """``call`` gets the row, or ``None`` for an operation on the table, and the valid values of the form.

    A destructive operation is confirmed on a page that shows the ``warning``. ``is_possible`` says whether
    the page of a row offers it; the store decides when it runs.
    """

    name: str
    label: StrOrPromise
    model: type[Model]
    permission: Literal["change", "delete"]
    call: Callable[[Any, Mapping[str, Any]], Outcome]
    form: type[forms.Form] = NoInput
    guard: str | None = None
    is_destructive: bool = False
    warning: StrOrPromise = ""
    is_possible: Callable[[Any], bool] = lambda row: True

    def is_permitted(self, request: HttpRequest) -> bool:
        """Whether the user has Django's permission to change, or to delete, rows of the model."""
        options = self.model._meta
        codename = get_permission_codename(self.permission, options)
        return bool(request.user.has_perm(f"{options.app_label}.{codename}"))

    def shown(self, row: Any) -> str:
        """The value of the guard as a page shows it, for `run`."""
        return "" if self.guard is None else str(getattr(row, self.guard))

    def run(self, request: HttpRequest, row: Any, given: Mapping[str, Any], *, expected: str) -> Outcome:
        """Do it and log it, or say why not. ``expected`` is the value of the guard on the user's page.

        On a row: one transaction, which locks the row before it compares the guard. On a table: the
        transactions of the store.
        """
        try:
            if row is None:
                return self._call(request, None, given)
            alias = router.db_for_write(type(row), instance=row)
            return Database(alias, getattr(row, "tenant", ""), None).transaction(
                lambda: self._call_locked(request, row, given, alias, expected)
            )
        except HelixStoreError as error:
            return Outcome(message=in_words(error), is_done=False, level=messages.ERROR)

    def _call_locked(
        self, request: HttpRequest, row: Any, given: Mapping[str, Any], alias: str, expected: str
    ) -> Outcome:
        if self.guard is not None:
            rows = type(row)._base_manager.using(alias).select_for_update(no_key=True).order_by()
            current = rows.filter(pk=row.pk).values_list(self.guard, flat=True).first()
            _require_unchanged(self.guard, expected, current)
        return self._call(request, row, given)

    def _call(self, request: HttpRequest, row: Any, given: Mapping[str, Any]) -> Outcome:
        model, key, title = (self.model, None, self.label) if row is None else (type(row), row.pk, str(row))
        is_deletion = self.permission == "delete" and type(row) is self.model
        outcome = self.call(row, given)
        if outcome.is_done:
            with translation.override(None):
                LogEntry.objects.create(
                    user_id=cast("int", request.user.pk),
                    content_type=ContentType.objects.get_for_model(model),
                    object_id=key,
                    object_repr=str(title)[:_LONGEST_TITLE],
                    action_flag=DELETION if is_deletion else CHANGE,
                    change_message=str(outcome.message),
                )
        return outcome


def _require_unchanged(guard: str, expected: str, current: Any) -> None:
    """Raise `ConflictError` or `StaleStateError` unless the row is as the page showed it."""
    if current is None and expected != str(None):
        raise NotFoundError
    if str(current) == expected:
        return
    if guard == "version" and expected.isascii() and expected.isdigit() and len(expected) < 20:
        raise StaleStateError(int(expected), current)
    raise ConflictError


def in_words(error: HelixStoreError) -> StrOrPromise:
    """Why an operation was refused, for a person."""
    if isinstance(error, StaleStateError):
        return format_lazy(
            _(
                "Nothing was done: an agent or another person has changed the session since this page was "
                "shown (version {shown}, now {now}). Look at it again, then repeat."
            ),
            shown=error.expected_version,
            now=error.current_version,
        )
    for kind, words in _WORDS.items():
        if isinstance(error, kind):
            said = str(error)
            return words if said == kind.default_message() else format_lazy("{} ({})", words, said)
    return format_lazy(_("Nothing was done: {}"), str(error))


_WORDS: Final[dict[type[HelixStoreError], StrOrPromise]] = {
    FencedOutError: _("Nothing was done: an agent holds the lock of this session."),
    SessionNotFound: _("Nothing was done: the session is deleted."),
    CheckpointNotFound: _("Nothing was done: the checkpoint is deleted."),
    NotFoundError: _("Nothing was done: it is deleted."),
    ConflictError: _(
        "Nothing was done: an agent or another person has changed it since this page was shown. Look at it "
        "again, then repeat."
    ),
    StoreBusy: _("Nothing was done: the database is busy with another write to it. Repeat it in a moment."),
    OutcomeUnknown: _(
        "The connection to the database broke, so it is not known whether this was done. Look at the page."
    ),
}
