"""Operations that people start from the admin: confirmation pages, buttons, list actions and their log.

A form posts to the URL of its operation, with the guard's value that its page showed. A GET request never
changes anything; it shows the form of the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, cast

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.db.models import Model, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.urls import URLPattern, path
from django.utils import translation
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.text import format_lazy
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.sessions import Action, Outcome
from helix_store.actions.upkeep import BudgetForm
from helix_store.admin.base import ReadOnlyAdmin, permitted_tenants, refuse_surrogates
from helix_store.admin.elements import printable
from helix_store.core.limits import MAX_BIGINT
from helix_store.exceptions import HelixStoreError
from helix_store.reports.payloads import Change, difference_pages

EXPECTED: Final = "expected"
CONFIRMED: Final = "confirmed"
NEXT: Final = "next"

KEYS: Final = "keys"

_ROWS_AT_ONCE: Final = 200
MOST_ROWS: Final = 10_000
"""The most rows of a list that one operation changes."""

_REFUSALS_SHOWN: Final = 10
_LONGEST_TITLE: Final = 200
_LINES_SHOWN: Final = 2_000
"""The most rows of a difference on one page. With more, the page has no button."""


class Button(NamedTuple):
    """A button for an operation: the URL that it posts to, and the guard's value that the page showed."""

    operation: Action
    url: str
    expected: str = ""


class OperatedAdmin(ReadOnlyAdmin):
    """An admin with URLs for operations on a row and on the whole table, and for related lists.

    The user needs permission to view the page and permission for the operation. The list shows, above
    its rows, the operations that the user may run on the table.
    """

    row_operations: ClassVar[Sequence[Action]] = ()
    table_operations: ClassVar[Sequence[Action]] = ()

    side_lists: ClassVar[Mapping[str, type[OperatedAdmin]]] = {}
    """Lists of some of the table's rows, with their own columns, keyed by the last part of their URL."""

    heading: ClassVar[Any] = ""
    """The title of a side list."""

    change_list_template = "admin/helix_store/operated_list.html"

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        wrapped = self.admin_site.admin_view
        operate = wrapped(self.operation_view)
        lists = {each: page(self.model, self.admin_site) for each, page in self.side_lists.items()}
        return [
            *(
                path(f"{each}/", wrapped(page.changelist_view), name=f"{name}_{each}")
                for each, page in lists.items()
            ),
            path("operation/<slug:operation>/", operate, name=f"{name}_table_operation"),
            path("<path:object_id>/operation/<slug:operation>/", operate, name=f"{name}_operation"),
            *super().get_urls(),
        ]

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        # The operations use the project's stores, regardless of the database that this site shows.
        has_database = hasattr(self.admin_site, "database")
        return {
            **super().list_context(request),
            "table_buttons": [] if has_database else self.buttons(request, None, self.table_operations),
            "side_links": [
                (page.heading, self.view_url(self.model, name)) for name, page in self.side_lists.items()
            ],
        }

    def has_operate_change_permission(self, request: HttpRequest) -> bool:
        return admin.ModelAdmin.has_change_permission(self, request)

    def has_operate_delete_permission(self, request: HttpRequest) -> bool:
        return admin.ModelAdmin.has_delete_permission(self, request)

    def buttons(self, request: HttpRequest, row: Any, operations: Sequence[Action]) -> list[Button]:
        """Return buttons for the operations that the user may run and that are possible now."""
        permitted = [each for each in operations if each.is_permitted(request.user)]
        if row is None:
            return [
                Button(each, self.view_url(self.model, "table_operation", each.name))
                for each in permitted
                if each.is_of_tenants or permitted_tenants(request) is None
            ]
        return [
            Button(each, self.view_url(self.model, "operation", row.pk, each.name), each.shown(row))
            for each in permitted
            if each.is_possible(row)
        ]

    def operation_view(
        self, request: HttpRequest, operation: str, object_id: str | None = None
    ) -> HttpResponse:
        refuse_surrogates(request)
        known = self.table_operations if object_id is None else self.row_operations
        chosen = next((each for each in known if each.name == operation), None)
        if chosen is None:
            raise Http404
        if not self.has_view_permission(request) or not chosen.is_permitted(request.user):
            raise PermissionDenied
        tenants = permitted_tenants(request) if object_id is None else None
        if tenants is not None and not chosen.is_of_tenants:
            raise PermissionDenied
        row = None if object_id is None else self.requested_row(request, object_id)
        if isinstance(row, HttpResponseRedirect):
            return row
        is_sent = request.method == "POST"
        if is_sent:
            form = chosen.form(request.POST)
        else:
            form = chosen.form(initial={**chosen.initial(row), **_named_by(request, chosen)})
        limits = {} if tenants is None else {"tenants": tenants}
        if isinstance(form, BudgetForm):
            form.tenants = tenants
        is_confirmed = CONFIRMED in request.POST or not chosen.is_destructive
        if is_sent and form.is_valid() and is_confirmed and getattr(form, "is_seen", True):
            return self._run(request, chosen, row, {**form.cleaned_data, **limits})
        return self._confirmation(request, chosen, row, form)

    def _run(self, request: HttpRequest, operation: Action, row: Any, given: dict[str, Any]) -> HttpResponse:
        outcome = run(request, operation, row, given, expected=request.POST.get(EXPECTED, ""))
        self.message_user(request, str(outcome.message), outcome.level)
        if outcome.session_id is not None:
            sessions = type(row)._base_manager.using(router.db_for_write(type(row), instance=row))
            row = sessions.only("pk").get(tenant=row.tenant, session_id=outcome.session_id)
            return HttpResponseRedirect(self.page_url(self.model, row.pk))
        return HttpResponseRedirect(self._next(request, row))

    def _next(self, request: HttpRequest, row: Any) -> str:
        """Return the URL to continue at: the page that asked, the row's page, or the list."""
        given = request.POST.get(NEXT, "")
        if given and url_has_allowed_host_and_scheme(given, {request.get_host()}, request.is_secure()):
            return given
        if row is not None and type(row)._base_manager.using(row._state.db).filter(pk=row.pk).exists():
            return self.page_url(self.model, row.pk)
        return self.list_url(self.model)

    def _confirmation(
        self, request: HttpRequest, operation: Action, row: Any, form: forms.Form
    ) -> HttpResponse:
        sent = request.POST if request.method == "POST" else request.GET
        shown = "" if row is None else operation.shown(row)
        # A link must not fill in a guard: it would say that the user has seen what the link names.
        expected = request.POST.get(EXPECTED, shown)
        back = self.list_url(self.model) if row is None else self.page_url(self.model, row.pk)
        changes = operation.changes(row, form.cleaned_data) if form.is_bound and form.is_valid() else []
        hidden = [(EXPECTED, expected), (CONFIRMED, "yes"), (NEXT, sent.get(NEXT, ""))]
        rows = [] if row is None else [row]
        given = {field.name: field.value() for field in form}
        losses: list[tuple[Any, str]] = []
        # A session whose rows are damaged can be deleted all the same.
        with suppress(HelixStoreError, ValueError):
            losses = [] if row is None else operation.losses(row, given)
        return self._confirmation_page(request, operation, form, rows, hidden, back, changes, losses)

    def response_action(  # type: ignore[override]  # Django 5.2 and 6.1 differ in the arguments
        self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **kwargs: Any
    ) -> HttpResponseBase | None:
        """Refuse keys that no row can have, for which Django's query would fail."""
        if all(map(is_key, request.POST.getlist(ACTION_CHECKBOX_NAME))):
            # Django 6.1 also passes the place of the form.
            return super().response_action(request, queryset, *args, **kwargs)
        self.message_user(request, gettext("Nothing was done: a selected row cannot exist."), messages.ERROR)
        return HttpResponseRedirect(request.get_full_path())

    def selected_rows(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any] | None:
        """Return the rows that a list action applies to, or tell the user that there are none or too many."""
        rows = list(queryset[: _ROWS_AT_ONCE + 1])
        if not rows:
            # Somebody has deleted them since the list was shown.
            words = gettext("Nothing was done: the selected rows do not exist any more.")
            self.message_user(request, words, messages.ERROR)
            return None
        if len(rows) <= _ROWS_AT_ONCE:
            return rows
        too_many = format_lazy(_("Nothing was done: select at most {count}."), count=_ROWS_AT_ONCE)
        self.message_user(request, str(too_many), messages.ERROR)
        return None

    def confirm_rows(
        self, request: HttpRequest, operation: Action, form: forms.Form, rows: list[Any], name: str
    ) -> HttpResponse:
        """Return the page that confirms a list action. It keeps the guards of the rows that it shows."""
        hidden = [("action", name), (CONFIRMED, "yes")]
        for row in rows:
            hidden += [(ACTION_CHECKBOX_NAME, str(row.pk)), (_expected_of(row), operation.shown(row))]
        return self._confirmation_page(request, operation, form, rows, hidden, request.get_full_path())

    def _confirmation_page(
        self,
        request: HttpRequest,
        operation: Action,
        form: forms.Form,
        rows: Sequence[Any],
        hidden: Sequence[tuple[str, str]],
        back: str,
        changes: Sequence[Change] = (),
        losses: Sequence[tuple[Any, str]] = (),
    ) -> HttpResponse:
        """Return the form of an operation, with its effect and the rows that it would change."""
        all_lines = [line for page in difference_pages(changes) for line in page]
        lines = all_lines[:_LINES_SHOWN]
        context = {
            "losses": losses,
            "difference": {"lines": lines, "has_more": len(lines) < len(all_lines)},
            "rows": [
                *((printable(str(row)), self.name_of(row)) for row in rows),
                *((value, "") for value in _named_in(form)),
            ],
            "hidden": hidden,
            "back": back,
        }
        return self._form_page(request, "admin/helix_store/operation.html", operation, form, context)

    def _form_page(
        self,
        request: HttpRequest,
        template: str,
        operation: Action,
        form: forms.Form,
        context: Mapping[str, Any],
    ) -> HttpResponse:
        form.label_suffix = ""
        shared = {"title": operation.label, "operation": operation, "form": form}
        return self.rendered(request, template, {**shared, **context})

    def name_of(self, row: Any) -> str:
        """Return what people call a row that an operation would change, or nothing if it only has an id."""
        return ""

    def run_on_all(
        self, request: HttpRequest, operation: Action, name: str, queryset: QuerySet[Any]
    ) -> HttpResponse | None:
        """Ask for confirmation, then run an operation on all rows that match the filter of the list.

        The rows are those that matched when the question was shown, at most `MOST_ROWS`, and still match.
        Each request runs the operation on a part of them, each row in its own transaction, and returns a page
        that continues.
        """
        sent = _keys_in(request.POST.get(KEYS))
        if CONFIRMED not in request.POST or sent is None:
            keys = list(queryset.order_by("pk").values_list("pk", flat=True)[: MOST_ROWS + 1])
            if not keys:
                return None
            progress = Progress(
                keys=keys[:MOST_ROWS], total=len(keys[:MOST_ROWS]), is_cut=len(keys) > MOST_ROWS
            )
            return self._page_of_all(request, operation, operation.form(), name, progress)
        form = operation.form(request.POST)
        progress = Progress.of(request, sent)
        if not form.is_valid():
            return self._page_of_all(request, operation, form, name, progress)
        batch, progress.keys = sent[:_ROWS_AT_ONCE], sent[_ROWS_AT_ONCE:]
        done = 0
        for row in queryset.filter(pk__in=batch).order_by("pk"):
            outcome = run(request, operation, row, form.cleaned_data, expected=operation.shown(row))
            done += outcome.is_done
        progress.done += done
        progress.refused += len(batch) - done
        if progress.keys:
            return self._page_of_all(request, operation, form, name, progress)
        words = format_lazy(_("{label}: {count} done."), label=operation.label, count=progress.done)
        self.message_user(request, str(words), messages.SUCCESS)
        if progress.refused:
            words = format_lazy(_("{count} were refused, or no longer match."), count=progress.refused)
            self.message_user(request, str(words), messages.WARNING)
        return None

    def _page_of_all(
        self, request: HttpRequest, operation: Action, form: forms.Form, name: str, progress: Progress
    ) -> HttpResponse:
        context = {
            "progress": progress,
            "hidden": [
                # Django runs an action only if a row is selected.
                *(("action", name), ("index", "0"), ("select_across", "1"), (CONFIRMED, "yes")),
                (ACTION_CHECKBOX_NAME, str(progress.keys[0])),
                *progress.fields(),
            ],
            "back": request.get_full_path(),
        }
        return self._form_page(request, "admin/helix_store/operation_on_all.html", operation, form, context)


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far an operation on many rows has come, and the keys of the rows that are left."""

    keys: list[int]
    total: int
    done: int = 0
    refused: int = 0
    is_cut: bool = False
    """True if more rows match than one operation changes."""

    @classmethod
    def of(cls, request: HttpRequest, keys: list[int]) -> Progress:
        total, done, refused = (_number(request.POST.get(name)) for name in ("total", "done", "refused"))
        return cls(keys=keys, total=total or len(keys), done=done, refused=refused)

    @property
    def over(self) -> int:
        return self.total - len(self.keys)

    def fields(self) -> list[tuple[str, str]]:
        counts = {"total": self.total, "done": self.done, "refused": self.refused}
        return [
            (KEYS, " ".join(map(str, self.keys))),
            *((name, str(count)) for name, count in counts.items()),
        ]


def _keys_in(text: str | None) -> list[int] | None:
    """Return the keys in a field of the form, or ``None`` if it does not hold any."""
    words = (text or "").split(" ", MOST_ROWS)[:MOST_ROWS]
    return list(map(int, words)) if all(map(is_key, words)) else None


def _number(text: str | None) -> int:
    return int(text) if text and is_key(text) else 0


def is_key(text: str) -> bool:
    """Return whether a text is a key that a row can have."""
    # Every key is a BigAutoField. An int of thousands of digits would be slow to read.
    return text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= MAX_BIGINT


def run(
    request: HttpRequest, action: Action, row: Any, given: Mapping[str, Any], *, expected: str
) -> Outcome:
    """Run an action and log it in the same transaction. ``expected`` is the guard on the user's page.

    If the log is in another database than the row, the entry is written after the commit.
    """
    model, key, title = (action.model, None, action.label) if row is None else (type(row), row.pk, row)
    flag = DELETION if action.permission == "delete" and type(row) is action.model else CHANGE

    def record(outcome: Outcome) -> None:
        write = partial(log, request, model, key, title, outcome.message, flag=flag)
        alias = router.db_for_write(action.model if row is None else type(row), instance=row)
        if alias == router.db_for_write(LogEntry):
            write()
        else:
            transaction.on_commit(write, using=alias)

    return action.perform(request.user, row, given, expected=expected, record=record)


def log(
    request: HttpRequest, model: type[Model], key: Any, title: Any, message: Any, *, flag: int = CHANGE
) -> None:
    """Add an entry to the admin's log, in the language of the source code."""
    with translation.override(None):
        LogEntry.objects.create(
            user_id=cast("int", request.user.pk),
            content_type=ContentType.objects.get_for_model(model),
            object_id=key,
            object_repr=str(title)[:_LONGEST_TITLE],
            action_flag=flag,
            change_message=str(message),
        )


def _named_by(request: HttpRequest, operation: Action) -> dict[str, Any]:
    """Return the values in the URL for the hidden fields, which identify the subject of the operation.

    The user fills in the other fields, and a page those that prove what it has shown. A link must not.
    """
    fields, proofs = operation.form.base_fields, getattr(operation.form, "proofs", ())
    return {
        name: text
        for name, text in request.GET.items()
        if name in fields and fields[name].widget.is_hidden and name not in proofs
    }


def _named_in(form: forms.Form) -> list[str]:
    """Return the values of the hidden fields, so that the page can name the subject in its question."""
    not_named = getattr(form, "not_named", ())
    fields = (field for field in form.hidden_fields() if field.name not in not_named)
    return [printable(str(value)) for field in fields if (value := field.value())]


def list_action(operation: Action) -> Callable[[Any, HttpRequest, QuerySet[Any]], HttpResponse | None]:
    """Return a list action for the ``actions`` of an `OperatedAdmin` of the operation's model.

    It runs the operation on up to 200 selected rows, each in its own transaction. If the operation is
    destructive, a page asks for confirmation first, and keeps the guards of the rows that it shows. If the
    user has selected all rows that match the filter, see `OperatedAdmin.run_on_all`.
    """

    @admin.action(description=operation.label, permissions=[f"operate_{operation.permission}"])
    def action(page: OperatedAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        if request.POST.get("select_across") == "1":
            return page.run_on_all(request, operation, name, queryset)
        rows = page.selected_rows(request, queryset)
        if rows is None:
            return None
        is_confirmed = CONFIRMED in request.POST
        form = operation.form(request.POST) if is_confirmed else operation.form()
        if operation.is_destructive and not (is_confirmed and form.is_valid()):
            return page.confirm_rows(request, operation, form, rows, name)
        given = form.cleaned_data if is_confirmed else {}
        done, refused = 0, []
        for row in rows:
            expected = request.POST.get(_expected_of(row), "") if is_confirmed else operation.shown(row)
            outcome = run(request, operation, row, given, expected=expected)
            if outcome.is_done:
                done += 1
            else:
                refused.append(format_lazy("{}: {}", printable(str(row)), outcome.message))
        if done:
            words = format_lazy(_("{label}: {count} done."), label=operation.label, count=done)
            page.message_user(request, str(words), messages.SUCCESS)
        for words in refused[:_REFUSALS_SHOWN]:
            page.message_user(request, str(words), messages.WARNING)
        if len(refused) > _REFUSALS_SHOWN:
            words = format_lazy(_("{count} more were refused."), count=len(refused) - _REFUSALS_SHOWN)
            page.message_user(request, str(words), messages.WARNING)
        return None

    name = operation.name.replace("-", "_")
    action.__name__ = name
    return action


def _expected_of(row: Any) -> str:
    """Return the name of the form field that holds the guard of a row."""
    return f"{EXPECTED}-{row.pk}"
