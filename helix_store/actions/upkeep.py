"""Actions on budgets, locks and streams."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from django import forms
from django.contrib.messages import constants as levels
from django.db import router
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.actions.sessions import Action, Outcome
from helix_store.budgets import checked_definition
from helix_store.cleanup.expiry import expired_session_cleanup
from helix_store.cleanup.workspaces import CleanupSummary
from helix_store.core import validation
from helix_store.exceptions import InvalidPayload, LimitExceeded
from helix_store.models import Budget, Lock, Session, Stream
from helix_store.stores import DatabaseBudgetStore, DatabaseLockManager, DatabaseStateStore
from helix_store.streams.database import prune_streams

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise


SCOPES: Final[dict[str, StrOrPromise]] = {
    "tree": _("one tree of sessions"),
    "user": _("users"),
    "agent_type": _("agent types"),
    "tenant": _("the whole tenant"),
}
PERIODS: Final[dict[str, StrOrPromise]] = {
    "total": _("in total"),
    "day": _("per day"),
    "month": _("per month"),
}
_LONGEST: Final = 255


class LimitForm(forms.Form):
    """The fields of a budget except its name. `set_budget` checks them."""

    scope = forms.ChoiceField(label=_("Caps"), choices=list(SCOPES.items()))
    value = forms.CharField(
        label=_("Id of the root session, user id or agent type; leave it empty for each user or agent type"),
        max_length=_LONGEST,
        required=False,
        strip=False,
        empty_value=None,
    )
    period = forms.ChoiceField(label=_("Period, in UTC"), choices=list(PERIODS.items()))
    limit_usd = forms.DecimalField(label=_("Limit in dollars"), required=False)
    limit_tokens = forms.IntegerField(label=_("Limit in tokens"), required=False)

    def clean(self) -> dict[str, Any]:
        given: dict[str, Any] = super().clean() or {}
        if not self.errors:
            try:
                checked_definition(given.get("name", "x"), **_limits_of(given))
            except (InvalidPayload, LimitExceeded) as error:
                self._refuse(error)
        return given

    def _refuse(self, error: InvalidPayload | LimitExceeded) -> None:
        """Attach a store's error to the form field that the error names."""
        if isinstance(error, LimitExceeded):
            self.add_error(None, str(error))
            return
        field = error.path.split("/")[1] if error.path else ""
        self.add_error(field if field in self.fields else None, error.reason)


class BudgetForm(LimitForm):
    """A new budget. ``set_budget`` would replace an existing budget of the same name."""

    tenant = forms.CharField(label=_("Tenant"), max_length=_LONGEST, required=False, strip=False)
    name = forms.CharField(label=_("Name"), max_length=_LONGEST, strip=False)

    field_order = ("name", "tenant")

    tenants: Collection[str] | None = None
    """The tenants that may get a budget; ``None`` means all."""

    def clean(self) -> dict[str, Any]:
        given = super().clean()
        if self.errors:
            return given
        if self.tenants is not None and given["tenant"] not in self.tenants:
            # Before the lookup, which would reveal the names of budgets.
            self.add_error("tenant", _("You may not act on this tenant."))
            return given
        try:
            store = DatabaseBudgetStore(tenant=validation.tenant(given["tenant"]))
            is_known = store.get_budget(given["name"]) is not None
        except (InvalidPayload, LimitExceeded) as error:
            self._refuse(error)
        else:
            if is_known:
                self.add_error("name", _("This tenant already has a budget with this name."))
        return given


class AddBudget(Action):
    name = "add-budget"
    label = _("Add a budget")
    model = Budget
    permission = "add"
    form = BudgetForm
    is_of_tenants = True

    def call(self, row: None, given: Mapping[str, Any]) -> Outcome:
        store = DatabaseBudgetStore(tenant=given["tenant"])
        return _set(store, given["name"], given)


class ChangeBudget(Action):
    name = "change-budget"
    label = _("Change the budget")
    model = Budget
    form = LimitForm
    guard = "updated_at"

    def initial(self, row: Any) -> dict[str, Any]:
        return {
            "scope": row.scope,
            "value": row.value,
            "period": row.period,
            "limit_usd": None if row.limit_usd is None else f"{row.limit_usd.normalize():f}",
            "limit_tokens": row.limit_tokens,
        }

    def call(self, row: Any, given: Mapping[str, Any]) -> Outcome:
        return _set(_store_of(row), row.name, given)


class DeleteBudget(Action):
    name = "delete-budget"
    label = _("Delete the budget")
    model = Budget
    permission = "delete"
    guard = "updated_at"
    is_destructive = True
    warning = _("Sessions are no longer capped by this budget. Their usage stays in the ledger.")

    def call(self, row: Any, given: Mapping[str, Any]) -> Outcome:
        _store_of(row).delete_budget(row.name)
        return Outcome(message=format_lazy(_("Deleted the budget {name}."), name=row.name))


def _store_of(row: Any) -> DatabaseBudgetStore:
    return DatabaseBudgetStore(router.db_for_write(Budget, instance=row), tenant=row.tenant)


def _set(store: DatabaseBudgetStore, name: str, given: Mapping[str, Any]) -> Outcome:
    budget = store.set_budget(name, **_limits_of(given))
    message = _("Set the budget {name}. Sessions that it has stopped continue with their next turn.")
    return Outcome(message=format_lazy(message, name=name), data=budget.to_dict())


def _limits_of(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("scope", "value", "period", "limit_usd", "limit_tokens")}


ADD_BUDGET: Final = AddBudget()
CHANGE_BUDGET: Final = ChangeBudget()
DELETE_BUDGET: Final = DeleteBudget()


_SESSIONS_AT_ONCE: Final = 1_000
"""A browser's request must end soon, so the admin limits the number of sessions. The command has no limit."""


class ForceRelease(Action):
    name = "force-release"
    label = _("Force release")
    model = Lock
    guard = "token"
    is_destructive = True
    warning = _("The holder loses the lock, and its guarded writes are refused from now on.")

    def is_possible(self, row: Any) -> bool:
        return row.expires_at is not None

    def call(self, row: Any, given: Mapping[str, Any]) -> Outcome:
        locks = DatabaseLockManager(router.db_for_write(Lock, instance=row), tenant=row.tenant)
        if locks.force_release(row.name):
            return Outcome(message=_("Released the lock. Its former holder can no longer write."))
        return Outcome(message=_("Nobody holds this lock any more."), is_done=False, level=levels.WARNING)


class CleanUp(Action):
    name = "clean-up"
    is_of_tenants = True
    label = _("Clean up expired sessions")
    model = Session
    is_destructive = True
    warning = _(
        "Expired sessions are marked as failed, and their workspace snapshots are deleted. At most 1,000 "
        "sessions at once."
    )

    def call(self, row: None, given: Mapping[str, Any]) -> Outcome:
        summary = self._clean_up(given.get("tenants"))
        return Outcome(
            message=format_lazy(
                _(
                    "Found {detected} expired sessions: {marked} are marked as failed, {deleted} snapshots "
                    "are deleted, {defaults} calls received their default answer, {errors} have a problem."
                ),
                detected=summary.detected,
                marked=summary.marked,
                deleted=summary.snapshots_deleted,
                defaults=summary.defaults_applied,
                errors=summary.errors,
            ),
            level=levels.WARNING if summary.errors else levels.SUCCESS,
        )

    def _clean_up(self, tenants: Collection[str] | None) -> CleanupSummary:
        if tenants is None:
            return expired_session_cleanup(limit=_SESSIONS_AT_ONCE)
        summary = CleanupSummary()
        for tenant in tenants:
            if summary.detected == _SESSIONS_AT_ONCE:
                break
            rest = _SESSIONS_AT_ONCE - summary.detected
            store = DatabaseStateStore(tenant=tenant)
            summary = summary.plus(**expired_session_cleanup(state_store=store, limit=rest).to_dict())
        return summary


class AgeForm(forms.Form):
    days = forms.IntegerField(
        label=_("Streams that ended this many days ago"), min_value=0, max_value=36_500, initial=7
    )


class PruneStreams(Action):
    name = "prune-streams"
    is_of_tenants = True
    label = _("Prune streams")
    model = Stream
    permission = "delete"
    form = AgeForm
    is_destructive = True
    warning = _("The chunks of these streams are removed. The streams and the sessions stay.")

    def call(self, row: None, given: Mapping[str, Any]) -> Outcome:
        tenants = given.get("tenants")
        age = timedelta(days=given["days"])
        pruned = [
            prune_streams(older_than=age, tenant=tenant)
            for tenant in ([None] if tenants is None else tenants)
        ]
        return Outcome(
            message=format_lazy(
                _("Removed {chunks} chunks of {streams} streams; failed {failed} streams without a writer."),
                chunks=sum(each.chunks for each in pruned),
                streams=sum(each.streams for each in pruned),
                failed=sum(each.failed for each in pruned),
            )
        )


FORCE_RELEASE: Final = ForceRelease()
CLEAN_UP: Final = CleanUp()
PRUNE_STREAMS: Final = PruneStreams()
