"""The effects of a session: calls of the world, and what a person can say about those that nobody knows."""

from __future__ import annotations

from typing import Any, Final

from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.utils.translation import gettext_lazy as _

from helix_store.actions.effects import SETTLE, SettleForm
from helix_store.admin.base import Scope
from helix_store.admin.elements import distance, json_block
from helix_store.admin.sections.section import Section, SessionView
from helix_store.core import moments
from helix_store.core.effects import effect_key
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.transcript import visible
from helix_store.models import Effect, EffectState, Lock
from helix_store.models.sessions import OPEN_EFFECTS, OneOf
from helix_store.reports.payloads import document_start, without_payloads

_PAGE: Final = 20
_DOCUMENTS: Final = ("input", "result", "error", "actors")


def with_held(effects: QuerySet[Any]) -> QuerySet[Any]:
    """Annotate effects with whether the lock of the session is held with their token."""
    of_effect = Lock.objects.filter(
        tenant=OuterRef("session__tenant"),
        name=OuterRef("session__session_id"),
        token=OuterRef("fencing_token"),
        expires_at__gt=moments.now(),
    )
    annotated: QuerySet[Any] = effects.annotate(is_held=Exists(of_effect))
    return annotated


def unknown_effects(scope: Scope) -> QuerySet[Any]:
    """Return the effects of which nobody knows whether they happened, the oldest first."""
    open_effects = scope.rows(Effect).filter(OneOf(F("state"), OPEN_EFFECTS))
    is_unknown = Q(state=EffectState.UNKNOWN) | Q(is_held=False)
    return with_held(open_effects).filter(is_unknown).order_by("started_at", "pk")


class Effects(Section):
    name = "effects"
    label = _("Effects")
    needs = (Effect,)

    def context(self, view: SessionView) -> dict[str, Any]:
        before = view.number("before")
        newest = with_held(view.rows(Effect)).order_by("-sequence")
        rows = without_payloads(newest.filter(sequence__lte=MAX_BIGINT if before is None else before))
        starts = {f"{name}_start": document_start(name) for name in _DOCUMENTS}
        found = list(rows.annotate(**starts)[: _PAGE + 1])
        return {
            "effects": [_shown(view, row) for row in found[:_PAGE]],
            "newest_url": view.url() if before is not None else "",
            "older_url": view.url(before=found[_PAGE].sequence) if len(found) > _PAGE else "",
            "settle": view.button(SETTLE),
            "form": SettleForm(),
            "next": view.url(),
        }


def _shown(view: SessionView, row: Any) -> dict[str, Any]:
    is_unknown = row.state == EffectState.UNKNOWN or (row.state == EffectState.STARTED and not row.is_held)
    return {
        "id": row.effect_id,
        "shown_id": visible(row.effect_id),
        "tool": visible(row.tool_name),
        "key": effect_key(view.session.tenant, view.session.session_id, row.effect_id),
        "is_unknown": is_unknown,
        "state": EffectState.UNKNOWN.label if is_unknown else row.get_state_display(),
        "attempt": row.attempt,
        "run": visible(row.run_id or ""),
        "step": row.step_count,
        "started": distance(row.started_at),
        "ended": "" if row.ended_at is None else distance(row.ended_at),
        "input": json_block(row.input_start),
        "result": "" if row.state != EffectState.DONE else json_block(row.result_start),
        "error": "" if row.error_start is None else json_block(row.error_start),
        "actors": "" if row.actors_start == "[]" else json_block(row.actors_start),
    }
