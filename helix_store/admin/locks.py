"""The admin of locks: the holder and expiry of each lock, with the session that it guards."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.upkeep import FORCE_RELEASE
from helix_store.admin.columns import column, own_column
from helix_store.admin.elements import NOTHING, badge, link, narrow, one_line, short_id, stacked
from helix_store.admin.filters import ChoiceFilter
from helix_store.admin.operating import OperatedAdmin, list_action
from helix_store.admin.times import distance, format_time
from helix_store.core import moments
from helix_store.models import Lock, Session

_NAME_LENGTH: Final = 80


class LockStateFilter(ChoiceFilter):
    title = _("state")
    parameter_name = "state"
    options = (("held", _("held")), ("expired", _("expired, not released")), ("free", _("free")))

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        if value == "free":
            return queryset.filter(expires_at__isnull=True)
        now = moments.now()
        return queryset.filter(Q(expires_at__gt=now) if value == "held" else Q(expires_at__lte=now))


@admin.register(Lock)
class LockAdmin(OperatedAdmin):
    list_display = ("title", "of_session", "state", "held_by", "since", "lease_ends", own_column("token"))
    list_filter = (LockStateFilter,)
    ordering = ("tenant", "name")
    fields = ("tenant", "name", "state", "owner", "token", "acquired", "lease_end")
    of_other_models = {"of_session": Session}
    row_operations = (FORCE_RELEASE,)
    actions = (list_action(FORCE_RELEASE),)

    held_by = column("owner", _("owner"), lambda owner: narrow(one_line(owner, _NAME_LENGTH)))
    since = column("acquired_at", _("acquired"), distance)
    acquired = column("acquired_at", _("acquired"), format_time)
    lease_ends = column("expires_at", _("lease ends"), distance)
    lease_end = column("expires_at", _("lease ends"), format_time)

    def complete_rows(self, request: HttpRequest, rows: list[Any]) -> None:
        """Set, for each lock, the key of the session with the same name."""
        if not self.may_view(request, Session):
            return
        sessions = self.rows(Session).filter(
            tenant__in={lock.tenant for lock in rows}, session_id__in={lock.name for lock in rows}
        )
        keys = {
            (tenant, name): key for tenant, name, key in sessions.values_list("tenant", "session_id", "pk")
        }
        for lock in rows:
            lock.session_key = keys.get((lock.tenant, lock.name))

    @admin.display(description=_("lock"))
    def title(self, lock: Lock) -> SafeString:
        return stacked(short_id(lock.name), lock.tenant)

    @admin.display(description=_("session"), empty_value=NOTHING)
    def of_session(self, lock: Any) -> SafeString | None:
        key = lock.session_key
        return None if key is None else link(self.page_url(Session, key), gettext("open"))

    @admin.display(description=_("state"))
    def state(self, lock: Lock) -> SafeString:
        if lock.expires_at is None:
            return badge("free")
        return badge("held" if lock.expires_at > moments.now() else "expired")
