"""A page of step checkpoints: the difference between any two of them, restore, branch and prune."""

from __future__ import annotations

from typing import Any, Final

from django.utils.translation import gettext_lazy as _

from helix_store.actions.checkpoints import BRANCH, PRUNE_CHECKPOINTS, RESTORE
from helix_store.admin.documents import difference
from helix_store.admin.elements import badge, printable
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.times import stamp
from helix_store.core.types import CheckpointHead, SessionState
from helix_store.exceptions import HelixStoreError, InvalidCursor, InvalidPayload
from helix_store.models import Checkpoint
from helix_store.reports.comparison import changes_between, shown_state

CURRENT: Final = "current"

_PAGE: Final = 25
_SHORT_ID: Final = 16


class Checkpoints(Section):
    name = "checkpoints"
    label = _("Checkpoints")
    needs = (Checkpoint,)

    def context(self, view: SessionView) -> dict[str, Any]:
        session_id = view.session.session_id
        try:
            page = view.store.list_checkpoints(session_id, limit=_PAGE, cursor=view.text("cursor") or None)
        except InvalidCursor:
            page = view.store.list_checkpoints(session_id, limit=_PAGE)
        a, b = view.text("a"), view.text("b")
        found = view.rows(Checkpoint).filter(checkpoint_id__in=[head.checkpoint_id for head in page.items])
        keys = dict(found.values_list("checkpoint_id", "pk"))
        newest = page.items[0].checkpoint_id if page.items else ""
        return {
            "rows": [_row(view, head, keys) for head in page.items],
            "total": page.total,
            "list_url": view.list_url(Checkpoint),
            "next_url": view.url(cursor=page.next_cursor) if page.next_cursor else "",
            "first_url": view.url() if view.text("cursor") else "",
            "cursor": view.text("cursor"),
            "a": a or (page.items[1].checkpoint_id if len(page.items) > 1 else ""),
            "b": b or newest,
            "current": CURRENT,
            "difference": self._difference(view, a, b) if a and b else None,
            "restore": view.button(RESTORE),
            "branch": view.button(BRANCH),
            "prune": view.button(PRUNE_CHECKPOINTS) if page.items else None,
        }

    def _difference(self, view: SessionView, a: str, b: str) -> dict[str, Any]:
        try:
            before, after = self._state(view, a), self._state(view, b)
        except HelixStoreError as error:
            return {"problem": str(error)}
        if before is None or after is None:
            return {"problem": _("A chosen checkpoint has been deleted.")}
        changes = changes_between(shown_state(before), shown_state(after))
        return {"a": printable(a), "b": printable(b), **difference(changes)}

    def _state(self, view: SessionView, checkpoint_id: str) -> SessionState | None:
        session_id = view.session.session_id
        if checkpoint_id == CURRENT:
            return view.store.load_state(session_id)
        try:
            found = view.store.get_checkpoint(session_id, checkpoint_id)
        except InvalidPayload:
            return None
        return None if found is None else found.state


def _row(view: SessionView, head: CheckpointHead, keys: dict[str | None, int]) -> dict[str, Any]:
    key = keys.get(head.checkpoint_id)
    return {
        "id": head.checkpoint_id,
        "shown_id": printable(head.checkpoint_id),
        "short_id": printable(head.checkpoint_id.rpartition("-")[2])[:_SHORT_ID],
        "url": "" if key is None else view.page.page_url(Checkpoint, key),
        "step": printable(head.step_id),
        "step_count": head.step_count,
        "messages": head.message_count,
        "status": badge(head.status),
        "at": stamp(head.created_at),
    }
