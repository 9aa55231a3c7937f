"""The base classes of the admin: tenants, lookups, databases, and the marks by which an open page learns that
it is out of date.

The lookups that the URL of a list may contain.

Django answers every lookup on a model's own columns. A lookup on a hidden column would reveal whether its
text contains a letter, and a regular expression could keep the database busy for minutes. A list therefore
answers only the lookups of its filters and links, each with one value that the column can hold.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.admin import AdminSite
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.sites import site
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import ORDER_VAR, ChangeList
from django.contrib.auth import get_permission_codename
from django.core.exceptions import (
    FieldDoesNotExist,
    ImproperlyConfigured,
    PermissionDenied,
    SuspiciousOperation,
    ValidationError,
)
from django.core.paginator import Paginator
from django.db import router
from django.db.models import Field, Max, Min, Model, OuterRef, QuerySet, Subquery
from django.db.models.constants import LOOKUP_SEP
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, URLResolver, path, reverse
from django.utils.functional import cached_property
from django.utils.safestring import SafeString
from django.utils.text import format_lazy
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store import conf
from helix_store.admin.elements import LABELS, grouped, identifier, link
from helix_store.core import moments, validation
from helix_store.core.limits import MAX_TITLE_BYTES
from helix_store.core.types import NON_TERMINAL_STATUSES, RunStatus
from helix_store.engine.database import Database, app_aliases
from helix_store.engine.expressions import all_tenants, list_parameter, tenant_parameter
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import InvalidPayload, LimitExceeded
from helix_store.models import Checkpoint, Effect, Lock, Message, Run, Session
from helix_store.reports.payloads import payload_of, without_payloads

SESSION_SECONDS: Final = 3
"""The time between two questions of the page of a session."""

START_SECONDS: Final = 10
LIST_SECONDS: Final = 10

COSTS_SECONDS: Final = 300
"""The time after which an open start page reads its costs again, which are sums over days."""

_SESSION: Final = ("status", "version", "message_count", "step_count", "updated_at", "next_post_at")
_MOST_RUNNING: Final = 1_000
_MOST_TENANTS: Final = 200

_RUNNING: Final = f"""(SELECT count(*) FROM (SELECT id FROM {table(Run)}
        WHERE status = '{RunStatus.RUNNING.value}' LIMIT {_MOST_RUNNING}) AS running)"""


def _newest(*models: type[Model]) -> Statement:
    """Return a statement that reads the newest key of each table, and the number of running runs."""
    keys = (f"(SELECT max(id) FROM {table(model)})" for model in models)
    return Statement(f"SELECT {', '.join(keys)}, {_RUNNING}")


_START: Final = _newest(Session, Run, Effect)
_LISTS: Final = _newest(Session, Run, Effect, Checkpoint, Message)


_NEWEST_OF_TENANT: Final = f"""(SELECT max(s.updated_at) FROM {table(Session)} AS s
            WHERE s.tenant = tenants.value)"""
_START_OF_TENANTS: Final = Statement(
    f"SELECT max({_NEWEST_OF_TENANT}) FROM unnest(%(tenants)s::text[]) AS tenants(value)",
    f"SELECT max({_NEWEST_OF_TENANT}) FROM json_each(%(tenants)s) AS tenants",
)


def mark_of_session(sessions: QuerySet[Any], key: int) -> dict[str, Any] | None:
    """Return a mark that changes with a session, its runs, its newest effect and its lock.

    It is ``None`` if the session is gone. While a run is running, it also changes every minute, because
    nothing is written when a worker dies.
    """
    run = Run.objects.filter(session=OuterRef("pk")).order_by("-turn")
    effect = Effect.objects.filter(session=OuterRef("pk")).order_by("-sequence")
    lock = Lock.objects.filter(tenant=OuterRef("tenant"), name=OuterRef("session_id"))
    columns = (
        *(Subquery(run.values(name)[:1]) for name in ("status", "turn")),
        *(Subquery(effect.values(name)[:1]) for name in ("sequence", "state", "attempt")),
        Subquery(lock.values("token")[:1]),
    )
    row = sessions.filter(pk=key).values_list(*_SESSION, *columns).first()
    if row is None:
        return None
    is_running = row[len(_SESSION)] == RunStatus.RUNNING
    return {"mark": _mark(row, is_running=is_running), "is_over": row[0] not in NON_TERMINAL_STATUSES}


def mark_of_start(using: str, tenants: Sequence[str] | None) -> dict[str, Any]:
    """Return a mark that changes when a session or an effect is created, and when a run starts or ends.

    For some of the tenants, it changes when one of their sessions changes, and every minute: no index finds
    their newest runs and effects. ``None`` means all tenants.
    """
    return _mark_of(_START, using, tenants)


def mark_of_lists(using: str, tenants: Sequence[str] | None) -> dict[str, Any]:
    """Return a mark that also changes with each step and message, for the lists."""
    return _mark_of(_LISTS, using, tenants)


def _mark_of(statement: Statement, using: str, tenants: Sequence[str] | None) -> dict[str, Any]:
    db = Database(using, "")
    if tenants is not None:
        given = list_parameter(db, list(tenants[:_MOST_TENANTS]))
        (newest,) = db.read(_START_OF_TENANTS, {"tenants": given})
        return {"mark": _mark(newest, is_running=True), "is_over": False}
    (row,) = db.read(statement, {})
    return {"mark": _mark(row, is_running=bool(row[-1])), "is_over": False}


def _mark(values: Iterable[Any], *, is_running: bool) -> str:
    minute = f"{moments.now():%H:%M}" if is_running else ""
    return sha256("|".join([minute, *map(str, values)]).encode()).hexdigest()[:16]


MOST_TENANTS: Final = 200
"""The maximum number of listed tenants. With more, a filter without a tenant only covers the newest rows."""

NEWEST_FILTERED: Final = 100_000
"""The number of rows that a filter covers if there are too many tenants to search each of them."""


_logger = logging.getLogger(__name__)


def permitted_tenants(request: HttpRequest) -> tuple[str, ...] | None:
    """Return the tenants that the user of a request may see, in order, or ``None`` for all tenants.

    ``HELIX_STORE["ADMIN_TENANTS"]`` decides, once for each request. If it raises an error, the error is
    logged and the user sees no tenant. Raise `ImproperlyConfigured` if it returns anything else than tenants.
    """
    if not hasattr(request, "helix_store_tenants"):
        request.helix_store_tenants = _asked_tenants(request)  # type: ignore[attr-defined]
    return cast("tuple[str, ...] | None", request.helix_store_tenants)  # type: ignore[attr-defined]


def _asked_tenants(request: HttpRequest) -> tuple[str, ...] | None:
    function = conf.admin_tenants()
    if function is None:
        return None
    try:
        found = function(request)
    except Exception:
        _logger.exception('HELIX_STORE["ADMIN_TENANTS"] failed; the user sees no tenant.')
        return ()
    return None if found is None else _checked_tenants(found)


def _checked_tenants(found: Any) -> tuple[str, ...]:
    problem = 'The function of HELIX_STORE["ADMIN_TENANTS"] must return None or a collection of tenants'
    if isinstance(found, str | bytes) or not isinstance(found, Collection):
        raise ImproperlyConfigured(f"{problem}, not {type(found).__name__}.")
    try:
        return tuple(sorted({validation.tenant(tenant) for tenant in found}))
    except (InvalidPayload, LimitExceeded) as exc:
        raise ImproperlyConfigured(f"{problem}: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Scope:
    """The rows that a page may show: those of a database and, unless ``tenants`` is ``None``, of these
    tenants.

    Example::

        scope = Scope("default", ("acme",))
        print(scope.rows(Session).count(), "sessions of acme")
    """

    using: str
    tenants: tuple[str, ...] | None = None

    def rows(self, model: type[Model]) -> QuerySet[Any]:
        """Return the rows of a model."""
        return self.of(model._default_manager.using(self.using))

    def of(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Return those of the rows that are in the scope. A model without a tenant has none."""
        if self.tenants is None:
            return rows
        model: Any = rows.model
        path = _path_of_tenant(model)
        if path is None or not self.tenants:
            return rows.none()
        if len(self.tenants) == 1:
            return rows.filter(**{path: self.tenants[0]})
        return rows.filter(**{f"{path}__in": self.tenants})

    def known_tenants(self, model: type[Model]) -> list[str]:
        """Return the tenants of a table in order, at most one more than `MOST_TENANTS`.

        This takes at most one statement. Tenants of a limited scope need not have rows.
        """
        if self.tenants is not None:
            return list(self.tenants[: MOST_TENANTS + 1])
        return [tenant for (tenant,) in Database(self.using, "").read(_tenants(model), {})]


@lru_cache
def _path_of_tenant(model: type[Model]) -> str | None:
    """Return the lookup of the tenant from a model, if it has one."""
    names = {field.name: field for field in model._meta.concrete_fields}
    if "tenant" in names:
        return "tenant"
    is_of_session = "session" in names and names["session"].related_model is Session
    return f"session{LOOKUP_SEP}tenant" if is_of_session else None


@lru_cache
def _tenants(model: type[Model]) -> Statement:
    return Statement(all_tenants(table(model), most=MOST_TENANTS))


def of_tenants(queryset: QuerySet[Any], tenants: list[str]) -> QuerySet[Any]:
    """Return the rows in a form that uses the indexes by tenant; the newest rows if there are too many."""
    if len(tenants) > MOST_TENANTS:
        return newest_rows(queryset, NEWEST_FILTERED)[0]
    if len(tenants) == 1:
        return queryset.filter(tenant=tenants[0])
    return queryset.filter(tenant__in=tenants)


def newest_rows(queryset: QuerySet[Any], count: int) -> tuple[QuerySet[Any], bool]:
    """Return the rows that are among the newest of their table, and whether the table has others."""
    rows = queryset.model._base_manager.using(queryset.db)
    before = (rows.aggregate(key=Max("pk"))["key"] or 0) - count
    # Keys have gaps: few rows may be left of a table whose keys are high. SQLite reads all rows for the
    # lowest key and the highest in one statement, so ask for each by itself.
    has_others = before > 0 and (rows.aggregate(key=Min("pk"))["key"] or 0) <= before
    return queryset.filter(pk__gt=before), has_others


def keys_in_order(
    rows: QuerySet[Any], tenants: Sequence[str], order: Sequence[str], *, start: int, stop: int
) -> list[Any]:
    """Return the keys of these tenants' rows from ``start`` to ``stop`` in an order, such as by time.

    This takes one statement: the database merges the tenants' rows, each in the order of an index that begins
    with the tenant.
    """
    if start >= stop:
        return []
    columns = {name.removeprefix("-") for name in order}
    values = rows.order_by().values("id", *sorted(columns - {"id"}))
    parts = [values.filter(tenant=tenant_parameter(tenant)) for tenant in tenants]
    if len(parts) == 1:
        return [row["id"] for row in parts[0].order_by(*order)[start:stop]]
    if Database(rows.db, "").is_postgresql:
        # Without statistics, PostgreSQL would sort all rows. SQLite merges the rows itself, without limits.
        parts = [part.order_by(*order)[:stop] for part in parts]
    first, *others = parts
    merged = first.union(*others, all=True).order_by(*order)
    return [row["id"] for row in merged[start:stop]]


EXACT: Final = f"{LOOKUP_SEP}exact"

_TIMES: Final = frozenset({"updated_at", "created_at", "timestamp"})
_BY_OTHER_INDEXES: Final = frozenset({"q", "expiry", "tag", "waiting"})
"""Parameters whose rows are found by keys, or by an index that does not begin with the tenant."""

_LONGEST_SEARCH: Final = 1_000
"""The maximum length of a search, in characters. SQLite refuses a pattern of more than 50,000 bytes."""


class OrderedChangeList(ChangeList):
    """A list that ignores any requested order, because only the order of its admin has an index.

    That index begins with the tenant. The rows of several tenants are merged by the other columns.
    """

    model_admin: Any

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        self.params.pop(ORDER_VAR, None)
        return list(super().get_ordering(request, queryset))

    def get_queryset(self, request: HttpRequest, *arguments: Any, **more: Any) -> QuerySet[Any]:
        self.root_queryset = self.root_queryset.annotate(**self.model_admin.list_texts)
        return super().get_queryset(request, *arguments, **more)

    def get_results(self, request: HttpRequest) -> None:
        # What changes while the rows are read must change the mark, and a refused lookup reads no table.
        self.live = self.model_admin.live_list(request)
        super().get_results(request)
        if not (self.query or self.has_active_filters):
            # Django would offer to show all of what it shows.
            self.full_result_count = self.result_count
        rows = list(self._rows_of_page(request))
        self.result_list = rows
        counted = len(rows)
        self.model_admin.complete_rows(request, rows)
        self.folded = counted - len(rows)

    def _rows_of_page(self, request: HttpRequest) -> Any:
        tenants: list[str] | None = getattr(request, "tenants_to_merge", None)
        # Django lists the columns twice.
        tenant, *order = dict.fromkeys(str(name) for name in self.queryset.query.order_by)
        is_by_time = tenant.endswith("tenant") and order[0].removeprefix("-") in _TIMES
        if tenants is None or not is_by_time:
            return self.result_list
        # Other indexes find only a few rows, so the database can sort them.
        shows_all = self.show_all and self.can_show_all
        start = (self.page_num - 1) * self.list_per_page
        stop = start + self.list_per_page
        if shows_all or not _BY_OTHER_INDEXES.isdisjoint(request.GET):
            rows = self.queryset.order_by(*order)
            return rows if shows_all else rows[start:stop]
        keys = keys_in_order(self.queryset, tenants, order, start=start, stop=min(stop, self.result_count))
        return self.root_queryset.filter(pk__in=keys).order_by(*order)


def fields_of(model: type[Model], lookup: str) -> list[Field[Any, Any]]:
    """Return the relations that a lookup follows, then its column; an unknown name returns an empty list."""
    fields: list[Field[Any, Any]] = []
    for name in lookup.removesuffix(EXACT).split(LOOKUP_SEP):
        try:
            field = model._meta.get_field(name)
        except FieldDoesNotExist:
            return []
        if not isinstance(field, Field):
            return []
        fields.append(field)
        if isinstance(field.related_model, type):
            model = field.related_model
    return fields


def check_value(field: Field[Any, Any], values: list[str]) -> None:
    """Raise `IncorrectLookupParameters` unless there is exactly one value and the column can hold it."""
    try:
        (value,) = values
        validation.text(value, field.name, limit=MAX_TITLE_BYTES)
        field.clean(value, None)
    except (ValueError, InvalidPayload, LimitExceeded, ValidationError):
        raise IncorrectLookupParameters from None


def is_searchable(term: str) -> bool:
    """Return whether a column can hold the search text."""
    try:
        validation.text(term, "q", limit=_LONGEST_SEARCH)
    except (InvalidPayload, LimitExceeded):
        return False
    return True


if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    AnyPaginator = Paginator[Any]
else:
    ModelAdmin = admin.ModelAdmin
    AnyPaginator = Paginator

OF_SESSION: Final = "session__id__exact"
"""The filter that limits a list to the rows of one session."""


class BoundedPaginator(AnyPaginator):
    """A paginator that only counts and shows the first rows, because counting a large table is slow."""

    max_rows = 10_000

    @cached_property
    def _seen_rows(self) -> int:
        rows = cast("QuerySet[Any]", self.object_list).order_by().values("pk")
        return rows[: self.max_rows + 1].count()

    @cached_property
    def count(self) -> int:
        return min(self._seen_rows, self.max_rows)

    @property
    def has_unseen_rows(self) -> bool:
        return self._seen_rows > self.max_rows


class ReadOnlyAdmin(ModelAdmin):
    """A page that never offers add, change or delete, regardless of the user's permissions.

    Payloads may be megabytes long, so only pages that show them read them. Columns are not sortable, because
    most of them have no index. A list answers the lookups of its filters and links and refuses all others.
    """

    link_lookups: ClassVar[tuple[str, ...]] = ()
    """Exact lookups that links to this list use in the URL, besides those of ``list_filter``."""

    of_other_models: ClassVar[Mapping[str, type[Model]]] = {}
    """Columns and fields that show rows of another model. They require the permission to view that model."""

    orders: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Orders of the list, by its query parameter ``order``. Without it, ``ordering`` applies."""

    list_texts: ClassVar[Mapping[str, Any]] = {}
    """The payload parts that the columns of the list show, by the attribute of a row that receives them."""

    page_template: ClassVar[str] = ""
    """The template of `row_page`. Without it, Django shows the row as a form."""

    actions: Any = None
    list_per_page = 50
    paginator = BoundedPaginator
    show_facets = admin.ShowFacets.NEVER
    show_full_result_count = False
    sortable_by = ()

    class Media:
        css: ClassVar[dict[str, list[str]]] = {"all": ["helix_store/admin.css", "helix_store/lists.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    @property
    def alias(self) -> str:
        """The alias of the site's database, or of the one that the router chooses."""
        return getattr(self.admin_site, "database", None) or router.db_for_read(self.model)

    def scope(self, request: HttpRequest) -> Scope:
        """Return the database of this page and the tenants that the user may see."""
        return Scope(self.alias, permitted_tenants(request))

    def rows(self, request: HttpRequest, model: type[Model]) -> QuerySet[Any]:
        """Return the rows of a model that the user may see, from the database of this page."""
        return self.scope(request).rows(model)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = super().get_queryset(request).using(self.alias)
        return without_payloads(self.scope(request).of(rows))

    def get_ordering(self, request: HttpRequest) -> tuple[Any, ...]:
        order = self.orders.get(request.GET.get("order", ""))
        return order or tuple(super().get_ordering(request))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[OrderedChangeList]:
        return OrderedChangeList

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        refuse_surrogates(request)
        return super().changelist_view(request, {**self.list_context(request), **(extra_context or {})})

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_live_list"
        view = self.admin_site.admin_view(self.live_list_view)
        return [path("live-list.json", view, name=name), *super().get_urls()]

    def live_list_view(self, request: HttpRequest) -> HttpResponse:
        """Return the mark of the list."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return JsonResponse(mark_of_lists(self.alias, permitted_tenants(request)))

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        """Return the context of the list. The template calls functions in it after the rows are read."""
        return {"search_notes": partial(self.list_notes, request)}

    def live_list(self, request: HttpRequest) -> dict[str, Any] | None:
        """Return how the list stays up to date, or ``None`` if its model is not registered."""
        url = self.view_url(self.model, "live_list")
        mark = mark_of_lists(self.alias, permitted_tenants(request)) if url else {}
        return {"url": url, "seconds": LIST_SECONDS, **mark} if url else None

    def list_notes(self, request: HttpRequest) -> Iterator[str]:
        """Yield notes on the rows that the list leaves out and on its order."""
        if getattr(request, "is_of_newest", False):
            words = gettext(
                "Filtered among the newest %(count)s rows. Choose a tenant to see all of its rows."
            )
            yield words % {"count": grouped(NEWEST_FILTERED)}
        if getattr(request, "is_by_tenant", False):
            yield gettext("Sorted by tenant, then by time. Choose a tenant to sort by time alone.")

    def complete_rows(self, request: HttpRequest, rows: list[Any]) -> None:
        """Set attributes of the rows on a list page, for columns that need more than the row itself."""

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        if not self.page_template:
            refuse_surrogates(request)
            return super().changeform_view(request, object_id, form_url, extra_context)
        row = self.readable_row(request, object_id)
        if isinstance(row, HttpResponseRedirect):
            return row
        return self.row_page(request, row, {**self.page_context(request, row), **(extra_context or {})})

    def row_page(self, request: HttpRequest, row: Any, context: Mapping[str, Any]) -> HttpResponse:
        """Return the page of a row, rendered with ``page_template``."""
        of_row = {"original": row, "history_url": self.view_url(self.model, "history", row.pk)}
        return self.rendered(request, self.page_template, {**of_row, **context})

    def page_context(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Return the context of ``page_template`` for a row."""
        raise NotImplementedError

    def readable_row(self, request: HttpRequest, object_id: str | None) -> Any:
        """Return the row that the user wants to read, or a redirect to the list if it does not exist.

        Raise `PermissionDenied` if the user may not view it, or if the request does more than read.
        """
        refuse_surrogates(request)
        is_read = request.method in ("GET", "HEAD")
        if object_id is None or not is_read or not self.has_view_permission(request):
            raise PermissionDenied
        return self.requested_row(request, object_id)

    def requested_row(self, request: HttpRequest, object_id: str) -> Any:
        """Return the row that the URL names, or a redirect to the list if it does not exist.

        Raise `Http404` for a missing row if the user may not see all tenants.
        """
        row = self.get_object(request, unquote(object_id))
        if row is not None:
            return row
        name = self.opts.verbose_name
        words = format_lazy(_("This {name} does not exist; it may have been deleted."), name=name)
        self.message_user(request, str(words), messages.WARNING)
        return HttpResponseRedirect(self.list_url(self.model))

    def rendered(self, request: HttpRequest, template: str, context: Mapping[str, Any]) -> HttpResponse:
        """Return a page inside the frame of the admin site."""
        request.current_app = self.admin_site.name
        frame = {**self.admin_site.each_context(request), "opts": self.opts, "media": self.media}
        return TemplateResponse(request, template, {**frame, **context})

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        refuse_surrogates(request)
        return super().history_view(request, object_id, extra_context)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Allow a lookup if this list's filters or links use it and the user may view each model on its path.

        Raise `IncorrectLookupParameters` if the column cannot hold the value.
        """
        if request is None:
            return False
        filters: Iterable[Any] = self.get_list_filter(request)
        if lookup not in {*map(parameter_of, filters), *self.link_lookups}:
            return False
        fields = fields_of(self.model, lookup)
        if not all(self.may_view(request, field.related_model) for field in fields[:-1]):
            return False
        if fields:
            check_value(fields[-1], request.GET.getlist(lookup))
        return True

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        return super().get_form(request, obj, change, labels=LABELS, **kwargs)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        # If `_to_field` were empty, Django would look for a column without a name.
        found = super().get_object(request, object_id, from_field or None)
        if found is None and permitted_tenants(request) is not None:
            # The response is the same for a row of another tenant and for one that does not exist.
            raise Http404
        return found

    def may_view(self, request: HttpRequest, model: Any) -> bool:
        """Return whether the user may view rows of another model."""
        if self.admin_site.is_registered(model):
            return self.admin_site.get_model_admin(model).has_view_permission(request)
        codename = get_permission_codename("view", model._meta)
        return bool(request.user.has_perm(f"{model._meta.app_label}.{codename}"))

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        return self._visible(request, super().get_list_display(request))

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields that the user may view, without groups that would become empty."""
        groups = [
            (heading, {**options, "fields": self._visible(request, options["fields"])})
            for heading, options in super().get_fieldsets(request, obj)
        ]
        return [(heading, options) for heading, options in groups if options["fields"]]

    def _visible(self, request: HttpRequest, names: Iterable[Any]) -> list[Any]:
        return [
            name
            for name in names
            if name not in self.of_other_models or self.may_view(request, self.of_other_models[name])
        ]

    def page_url(self, model: type[Model], key: Any) -> str:
        """Return the URL of a row's page."""
        return self.view_url(model, "change", key)

    def list_url(self, model: type[Model], **filters: Any) -> str:
        """Return the URL of a model's list, filtered by exact values."""
        address = self.view_url(model, "changelist")
        return f"{address}?{urlencode(filters)}" if address and filters else address

    def view_url(self, model: type[Model], view: str, *arguments: Any) -> str:
        """Return the URL of a view of a model's admin, or an empty string for an unregistered model."""
        if not self.admin_site.is_registered(model):
            return ""
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_{view}"
        return reverse(name, args=arguments, current_app=self.admin_site.name)


def refuse_surrogates(request: HttpRequest) -> None:
    """Refuse parameters that no page could repeat in its links. The client chooses their character set."""
    for name, values in request.GET.lists():
        for text in (name, *values):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise SuspiciousOperation("A parameter holds a lone surrogate.") from None


def parameter_of(list_filter: Any) -> str:
    """Return the parameter of an entry of ``list_filter``: a filter, a column, or both."""
    column = list_filter[0] if isinstance(list_filter, tuple) else list_filter
    return str(getattr(column, "parameter_name", f"{column}{EXACT}"))


class PayloadDownload(ReadOnlyAdmin):
    """A page of rows with a ``payload``: the page shows the start of a long one, and a download all of it."""

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_payload"
        view = self.admin_site.admin_view(self.payload_view)
        return [path("<path:object_id>/payload.json", view, name=name), *super().get_urls()]

    def payload_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Return the exact text of the payload as a file."""
        row = self.readable_row(request, object_id)
        if isinstance(row, HttpResponseRedirect):
            return row
        text = payload_of(row, "payload") or ""
        # Text with a leading mark encodes the bytes of a document with lone surrogates.
        body = (
            text[1:].encode("latin-1", "replace") if text.startswith("~") else text.encode(errors="replace")
        )
        response = HttpResponse(body, content_type="application/json; charset=utf-8")
        response["Content-Disposition"] = f'attachment; filename="{self.opts.model_name}-{row.pk}.json"'
        response["X-Content-Type-Options"] = "nosniff"
        return response

    @admin.display(description=_("Download"))
    def download(self, row: Any) -> SafeString:
        return link(self.view_url(self.model, "payload", row.pk), "JSON")


class SessionChildAdmin(ReadOnlyAdmin):
    """A page of rows that belong to a session. Rows of deleted sessions are not shown.

    A list of one session's rows shows the session once, above the list, and has the ``order_of_session``.
    """

    order_of_session: ClassVar[tuple[str, ...]] = ()
    link_lookups = (OF_SESSION,)
    of_other_models = {"of_session": Session}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return without_payloads(super().get_queryset(request).select_related("session"), session=True)

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        columns = super().get_list_display(request)
        return [column for column in columns if column != "of_session" or OF_SESSION not in request.GET]

    def get_ordering(self, request: HttpRequest) -> tuple[Any, ...]:
        of_session = self.order_of_session if OF_SESSION in request.GET else ()
        return of_session or super().get_ordering(request)

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        of_session = partial(self._shown_session, request) if OF_SESSION in request.GET else ""
        return {**super().list_context(request), "of_session": of_session}

    def _shown_session(self, request: HttpRequest) -> SafeString | str:
        # The lookup was allowed, so the key is a number and the user may view sessions.
        session = (
            self.rows(request, Session).filter(pk=int(request.GET[OF_SESSION])).only("session_id").first()
        )
        return "" if session is None else self.session_link(session)

    @admin.display(description=_("session"))
    def of_session(self, row: Any) -> SafeString:
        return self.session_link(row.session)

    def session_link(self, session: Session) -> SafeString:
        return link(self.page_url(Session, session.pk), identifier(session.session_id))


class DatabaseSite(AdminSite):
    """The app's pages for one database. Users, permissions and the log are those of the project."""

    index_template = "admin/helix_store/site_index.html"

    def __init__(self, database: str) -> None:
        super().__init__(name=f"helix_store_{database}")
        self.database = database
        self.site_header = format_lazy("{} · {}", site.site_header, database)
        for model, page in site._registry.items():
            if isinstance(page, ReadOnlyAdmin):
                self.register(model, type(page))


def database_sites() -> list[URLResolver]:
    """Return URL patterns, for ``include``, of a site for each database that the app is migrated to."""
    return [path(f"{alias}/", DatabaseSite(alias).urls) for alias in app_aliases()]
