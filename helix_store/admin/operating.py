"""Operations by the mouse: a page that confirms one, buttons that post to it, and actions of a list.

A form posts to the address of its operation, with the value of the guard that its page showed. Nothing is
done by GET, which shows the form of the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.admin.elements import printable
from helix_store.admin.lookups import refuse_surrogates
from helix_store.admin.operations import Operation

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

__all__ = ["EXPECTED", "Button", "OperatedAdmin", "list_action"]

EXPECTED: Final = "expected"
CONFIRMED: Final = "confirmed"
NEXT: Final = "next"

_ROWS_AT_ONCE: Final = 200
_REFUSALS_SHOWN: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    """An operation that a page offers: where it posts to, and the guard that the page showed."""

    operation: Operation
    url: str
    expected: str


class OperatedAdmin(ModelAdmin):
    """Addresses for the operations on a row, and on the table.

    The user needs the permission to view the page, and that of the operation.
    """

    row_operations: ClassVar[Sequence[Operation]] = ()
    table_operations: ClassVar[Sequence[Operation]] = ()

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        view = self.admin_site.admin_view(self.operation_view)
        return [
            path("operation/<slug:operation>/", view, name=f"{name}_table_operation"),
            path("<path:object_id>/operation/<slug:operation>/", view, name=f"{name}_operation"),
            *super().get_urls(),
        ]

    def has_operate_change_permission(self, request: HttpRequest) -> bool:
        return _has_permission(self, request, "change")

    def has_operate_delete_permission(self, request: HttpRequest) -> bool:
        return _has_permission(self, request, "delete")

    def button(self, operation: Operation, row: Any = None) -> Button:
        view = "table_operation" if row is None else "operation"
        arguments = [operation.name] if row is None else [row.pk, operation.name]
        return Button(
            operation=operation,
            url=self._operated_url(view, arguments),
            expected="" if row is None else operation.shown(row),
        )

    def buttons(self, request: HttpRequest, row: Any, operations: Sequence[Operation]) -> list[Button]:
        """Those that the user may use and that are possible now."""
        return [
            self.button(each, row)
            for each in operations
            if each.is_permitted(request) and (row is None or each.is_possible(row))
        ]

    def operation_view(
        self, request: HttpRequest, operation: str, object_id: str | None = None
    ) -> HttpResponse:
        refuse_surrogates(request)
        known = self.table_operations if object_id is None else self.row_operations
        chosen = next((each for each in known if each.name == operation), None)
        if chosen is None:
            raise Http404
        if not self.has_view_permission(request) or not chosen.is_permitted(request):
            raise PermissionDenied
        row = None if object_id is None else self.requested_row(request, object_id)
        if isinstance(row, HttpResponseRedirect):
            return row
        is_sent = request.method == "POST"
        form = chosen.form(request.POST) if is_sent else chosen.form(initial=request.GET.dict())
        if is_sent and form.is_valid() and (not chosen.is_destructive or CONFIRMED in request.POST):
            return self._run(request, chosen, row, form.cleaned_data)
        return self._confirmation(request, chosen, row, form)

    def requested_row(self, request: HttpRequest, object_id: str) -> Any:
        """The row of an address, or a redirect to the list with a message that it is not there."""
        row = self.get_object(request, unquote(object_id))
        if row is not None:
            return row
        name = self.opts.verbose_name
        words = format_lazy(_("This {name} does not exist; it may be deleted."), name=name)
        self.message_user(request, str(words), messages.WARNING)
        return HttpResponseRedirect(self._operated_url("changelist", []))

    def _run(
        self, request: HttpRequest, operation: Operation, row: Any, given: dict[str, Any]
    ) -> HttpResponse:
        outcome = operation.run(request, row, given, expected=request.POST.get(EXPECTED, ""))
        self.message_user(request, str(outcome.message), outcome.level)
        if outcome.row is not None:
            return HttpResponseRedirect(self._operated_url("change", [outcome.row.pk]))
        return HttpResponseRedirect(self._next(request, row))

    def _next(self, request: HttpRequest, row: Any) -> str:
        """Where to go on: the page that asked, the row, or the list."""
        given = request.POST.get(NEXT, "")
        if given and url_has_allowed_host_and_scheme(given, {request.get_host()}, request.is_secure()):
            return given
        if row is not None and type(row)._base_manager.using(row._state.db).filter(pk=row.pk).exists():
            return self._operated_url("change", [row.pk])
        return self._operated_url("changelist", [])

    def _operated_url(self, view: str, arguments: Sequence[Any]) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{view}"
        return reverse(name, args=arguments, current_app=self.admin_site.name)

    def _confirmation(
        self, request: HttpRequest, operation: Operation, row: Any, form: forms.Form
    ) -> HttpResponse:
        sent = request.POST if request.method == "POST" else request.GET
        expected = sent.get(EXPECTED, "" if row is None else operation.shown(row))
        back = self._operated_url("changelist", []) if row is None else self._operated_url("change", [row.pk])
        hidden = [(EXPECTED, expected), (CONFIRMED, "yes"), (NEXT, sent.get(NEXT, ""))]
        return self.confirmation_page(request, operation, form, [] if row is None else [row], hidden, back)

    def confirmation_page(
        self,
        request: HttpRequest,
        operation: Operation,
        form: forms.Form,
        rows: Sequence[Any],
        hidden: Sequence[tuple[str, str]],
        back: str,
    ) -> HttpResponse:
        """The form of an operation, with what it does to which rows."""
        context = {
            **self.admin_site.each_context(request),
            "title": operation.label,
            "opts": self.opts,
            "media": self.media,
            "operation": operation,
            "form": form,
            "rows": [printable(str(row)) for row in rows],
            "hidden": hidden,
            "back": back,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/helix_store/operation.html", context)


def _has_permission(model_admin: Any, request: HttpRequest, permission: str) -> bool:
    options = model_admin.opts
    codename = get_permission_codename(permission, options)
    return bool(request.user.has_perm(f"{options.app_label}.{codename}"))


def list_action(operation: Operation) -> Callable[[Any, HttpRequest, QuerySet[Any]], HttpResponse | None]:
    """An action of a list, for ``actions`` of an `OperatedAdmin` of the operation's model.

    Runs the operation on each selected row, of at most 200, in a transaction of its own. A destructive one
    asks first, on a page that keeps the guards of the rows that it shows.
    """

    @admin.action(description=operation.label, permissions=[f"operate_{operation.permission}"])
    def action(page: OperatedAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        rows = list(queryset[: _ROWS_AT_ONCE + 1])
        if len(rows) > _ROWS_AT_ONCE:
            words = format_lazy(_("Nothing was done: select at most {count}."), count=_ROWS_AT_ONCE)
            page.message_user(request, str(words), messages.ERROR)
            return None
        is_confirmed = CONFIRMED in request.POST
        form = operation.form(request.POST) if is_confirmed else operation.form()
        if operation.is_destructive and not (is_confirmed and form.is_valid()):
            hidden = [("action", name), (CONFIRMED, "yes")]
            for row in rows:
                hidden += [(ACTION_CHECKBOX_NAME, str(row.pk)), (_expected_of(row), operation.shown(row))]
            return page.confirmation_page(request, operation, form, rows, hidden, request.get_full_path())
        given = form.cleaned_data if is_confirmed else {}
        done, refused = 0, []
        for row in rows:
            expected = request.POST.get(_expected_of(row), "") if is_confirmed else operation.shown(row)
            outcome = operation.run(request, row, given, expected=expected)
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
    """The name of the field that keeps the guard of a row."""
    return f"{EXPECTED}-{row.pk}"
