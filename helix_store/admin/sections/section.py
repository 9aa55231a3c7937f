"""The common base of the session page's sections: bounded reads, and links back to the section."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlencode

from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from helix_store.actions.sessions import Action
from helix_store.admin.base import OF_SESSION
from helix_store.admin.elements import identifier, link
from helix_store.admin.operating import Button, OperatedAdmin
from helix_store.counters import Spender
from helix_store.engine.database import Database
from helix_store.exceptions import IntegrityFault
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.reports.payloads import DOCUMENT_LIMIT, PayloadText, document_of, document_start, start_of
from helix_store.reports.session import BudgetReport, reports_of_session
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise

_LONGEST_PARAMETER = 2_000
_FREE_TEXTS = ("title", "directory", "failure_reason")
_LONGEST_TEXT = 5_000

NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
"""The characters that the names of downloaded files do not contain."""

ENVELOPE = "current__envelope"
"""The column of the current state's envelope, as seen from the session."""

UNREADABLE = object()
"""The value that replaces a stored document that cannot be read."""


@dataclass
class SessionView:
    """One session as seen by one user. All reads use the database in which the session was found."""

    request: HttpRequest
    page: OperatedAdmin
    session: Session
    section: str = ""
    texts: dict[str, Any] = field(default_factory=dict)
    _documents: dict[str, tuple[str, Any]] = field(default_factory=dict)

    @property
    def alias(self) -> str:
        return str(self.session._state.db)

    @property
    def db(self) -> Database:
        return Database(self.alias, self.session.tenant)

    @property
    def store(self) -> DatabaseStateStore:
        return DatabaseStateStore(self.alias, tenant=self.session.tenant)

    @property
    def usage(self) -> DatabaseUsageStore:
        return DatabaseUsageStore(self.alias, tenant=self.session.tenant)

    @cached_property
    def budgets(self) -> list[BudgetReport]:
        """The budgets that apply to the session, by name. Reading them takes one statement, on first use."""
        session = self.session
        root_id = session.root_session_id or session.session_id
        spender = Spender(root_id, session.user_id, session.agent_type)
        return reports_of_session(Database(self.alias, session.tenant), spender)

    def rows(self, model: type[Model]) -> QuerySet[Any]:
        """Return the session's rows of a model."""
        return model._default_manager.using(self.alias).filter(session=self.session.pk)

    @property
    def steps(self) -> QuerySet[Any]:
        """The checkpoints of the session's steps."""
        return self.rows(Checkpoint).filter(kind=CheckpointKind.STEP, namespace="")

    def may_view(self, *models: type[Model]) -> bool:
        return all(self.page.may_view(self.request, model) for model in models)

    def buttons(self, *operations: Action) -> list[Button]:
        return self.page.buttons(self.request, self.session, operations)

    def button(self, operation: Action) -> Button | None:
        """Return the button of an operation if the user may run it and it is possible now."""
        return next(iter(self.buttons(operation)), None)

    def url(self, section: str = "", **query: Any) -> str:
        """Return the URL of this session's page with a section, by default the current one.

        It is empty if the query contains a lone surrogate, which no URL can represent.
        """
        given = {name: value for name, value in query.items() if value is not None}
        address = self.page.page_url(Session, self.session.pk)
        try:
            return f"{address}?{urlencode({'section': section or self.section, **given})}"
        except UnicodeEncodeError:
            return ""

    def list_url(self, model: type[Model]) -> str:
        """Return the URL of the list of this session's rows."""
        return self.page.list_url(model, **{OF_SESSION: self.session.pk})

    def text(self, name: str) -> str:
        """Return a query parameter, cut to a reasonable length."""
        return self.request.GET.get(name, "")[:_LONGEST_PARAMETER]

    def number(self, name: str) -> int | None:
        """Return a query parameter as a whole number, or ``None`` for anything else."""
        text = self.text(name)
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None

    def document(self, column: str) -> Any:
        """Return a JSON column of the session, or its readable start if it is long.

        Return `UNREADABLE` if it is damaged, or ``None`` if it is empty. `read` must have read the column.
        """
        text = self.texts[column]
        if text is None:
            return None
        known = self._documents.get(column)
        if known is None or known[0] is not text:
            try:
                known = text, document_of(text)
            except (IntegrityFault, RecursionError):
                known = text, UNREADABLE
            self._documents[column] = known
        return known[1]

    def is_cut(self, column: str) -> bool:
        """Return whether `read` has read only the start of a column."""
        return len(self.texts[column] or "") == DOCUMENT_LIMIT + 1

    def whole_document(self, column: str) -> Any:
        """Return a JSON column of any length. This takes one query if `read` has read only the start."""
        if self.is_cut(column):
            self._read({column: PayloadText(column)})
        return self.document(column)

    def read(self, *columns: str) -> None:
        """Read the starts of text columns for `document` and ``texts``, in one query."""
        if missing := {name: _start(name) for name in columns if name not in self.texts}:
            self._read(missing)

    def _read(self, expressions: Mapping[str, PayloadText]) -> None:
        rows = Session.objects.using(self.alias).filter(pk=self.session.pk)
        found = rows.values_list(*expressions.values()).first() or [None] * len(expressions)
        self.texts.update(zip(expressions, found, strict=True))

    def session_urls(self, session_ids: Iterable[str | None]) -> dict[str, str]:
        """Return the URLs of this tenant's sessions that have one of these ids."""
        wanted = {session_id for session_id in session_ids if session_id is not None}
        if not wanted:
            return {}
        found = Session.objects.using(self.alias).filter(tenant=self.session.tenant, session_id__in=wanted)
        return {
            session_id: self.page.page_url(Session, key)
            for session_id, key in found.values_list("session_id", "pk")
        }

    def session_links(self, session_ids: Iterable[str]) -> dict[str, SafeString]:
        """Return a link for each id of a session of this tenant, and the plain id for any other."""
        wanted = list(session_ids)
        urls = self.session_urls(wanted)
        return {
            each: link(urls[each], identifier(each)) if each in urls else identifier(each) for each in wanted
        }


def current_row(view: SessionView) -> QuerySet[Checkpoint]:
    """Return a queryset of the row with the current state. It is empty if the session has lost the state."""
    key = view.session.current_id or 0
    return view.rows(Checkpoint).filter(pk=key)


def _start(column: str) -> PayloadText:
    return start_of(column, _LONGEST_TEXT) if column in _FREE_TEXTS else document_start(column)


class Section:
    """A section of the session page with its own URL. It reads nothing until it is shown.

    ``needs`` are the models whose rows it shows. Users who may not view all of these models do not see the
    section.
    """

    name: ClassVar[str]
    label: ClassVar[StrOrPromise]
    needs: ClassVar[tuple[type[Model], ...]] = ()

    @property
    def template(self) -> str:
        return f"admin/helix_store/session/{self.name}.html"

    def is_visible(self, view: SessionView) -> bool:
        return view.may_view(*self.needs)

    def context(self, view: SessionView) -> dict[str, Any]:
        raise NotImplementedError
