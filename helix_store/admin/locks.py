"""The admin of locks: the holder and expiry of each lock, with the session that it guards."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.upkeep import FORCE_RELEASE
from helix_store.admin.elements import (
    NOTHING,
    badge,
    distance,
    format_time,
    link,
    narrow,
    one_line,
    short_id,
    under,
)
from helix_store.admin.filters import ChoiceFilter
from helix_store.admin.labels import column
from helix_store.admin.lists import OperatedList
from helix_store.admin.lookups import OrderedChangeList
from helix_store.admin.operating import list_action
from helix_store.core import moments
from helix_store.models import Lock, Session

__all__ = ["LockAdmin"]

_NAME_LENGTH: Final = 80


class LockStateFilter(ChoiceFilter):
    title = _("state")
    parameter_name = "state"
    options = (("held", _("held")), ("expired", _("expired, not released")), ("free", _("free")))

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        if value == "free":
            return queryset.filter(expires_at__isnull=True)
        now = moments.now()
        held = (
            queryset.filter(expires_at__gt=now) if value == "held" else queryset.filter(expires_at__lte=now)
        )
        return held


class LockList(OrderedChangeList):
    """A page of locks with the sessions of the same names."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        page: Any = self.model_admin
        if not page.may_view(request, Session):
            return
        locks = list(self.result_list)
        sessions = Session.objects.using(self.root_queryset.db).filter(
            tenant__in={lock.tenant for lock in locks}, session_id__in={lock.name for lock in locks}
        )
        keys = {
            (tenant, name): key for tenant, name, key in sessions.values_list("tenant", "session_id", "pk")
        }
        for lock in locks:
            lock.session_key = keys.get((lock.tenant, lock.name))


@admin.register(Lock)
class LockAdmin(OperatedList):
    list_display = ("title", "of_session", "state", "held_by", "since", "lease_ends", column("token"))
    list_filter = (LockStateFilter,)
    ordering = ("tenant", "name")
    fields = ("tenant", "name", "state", "owner", "token", "acquired", "lease_end")
    readonly_fields = ("state", "acquired", "lease_end")
    of_other_models = {"of_session": Session}
    row_operations = (FORCE_RELEASE,)
    actions = (list_action(FORCE_RELEASE),)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[OrderedChangeList]:
        return LockList

    @admin.display(description=_("lock"))
    def title(self, lock: Lock) -> SafeString:
        return format_html("{}{}", short_id(lock.name), under(lock.tenant) if lock.tenant else "")

    @admin.display(description=_("session"), empty_value=NOTHING)
    def of_session(self, lock: Any) -> SafeString | None:
        key = lock.session_key
        return None if key is None else link(self.page_url(Session, key), gettext("open"))

    @admin.display(description=_("state"))
    def state(self, lock: Lock) -> SafeString:
        if lock.expires_at is None:
            return badge("free")
        return badge("held" if lock.expires_at > moments.now() else "expired")

    @admin.display(description=_("owner"), empty_value=NOTHING)
    def held_by(self, lock: Lock) -> SafeString | None:
        return None if lock.owner is None else narrow(one_line(lock.owner, _NAME_LENGTH))

    @admin.display(description=_("acquired"), empty_value=NOTHING)
    def since(self, lock: Lock) -> SafeString | None:
        return None if lock.acquired_at is None else distance(lock.acquired_at)

    @admin.display(description=_("lease ends"), empty_value=NOTHING)
    def lease_ends(self, lock: Lock) -> SafeString | None:
        return None if lock.expires_at is None else distance(lock.expires_at)

    @admin.display(description=_("acquired"))
    def acquired(self, lock: Lock) -> str:
        return NOTHING if lock.acquired_at is None else format_time(lock.acquired_at)

    @admin.display(description=_("lease ends"))
    def lease_end(self, lock: Lock) -> str:
        return NOTHING if lock.expires_at is None else format_time(lock.expires_at)
