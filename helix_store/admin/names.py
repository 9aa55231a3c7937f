"""The names of statuses and other choices on pages, in the reader's language."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.contrib.admin import ChoicesFieldListFilter
from django.utils.translation import gettext_lazy as _

from helix_store.admin.labels import LABELS

__all__ = ["STATUS_NAMES", "NamedChoicesFilter", "name_of_status"]

STATUS_NAMES: Final = {
    "active": _("active"),
    "running": _("running"),
    "paused": _("paused"),
    "interrupted": _("interrupted"),
    "suspended_client_tool": _("paused for a person"),
    "suspended_awaiting_children": _("waits for sub-agents"),
    "suspended_step_partial": _("step half done"),
    "completed": _("completed"),
    "ended": _("ended"),
    "failed": _("failed"),
    "held": _("held"),
    "free": _("free"),
    "reached": _("limit reached"),
    "resumed": _("resumed"),
    "expired": _("expired"),
    "tokens": _("tokens"),
    "tool": _("tool"),
    "subagent": _("sub-agent"),
    "custom": _("custom"),
    "step": _("step"),
    "graph": _("graph"),
    "snapshot": _("snapshot"),
}


def name_of_status(value: str) -> str:
    """Return the name of a status. An unknown status is returned as it is stored."""
    return str(STATUS_NAMES.get(value, value))


class NamedChoicesFilter(ChoicesFieldListFilter):
    """A filter that shows the choices of a column under their names."""

    def __init__(self, field: Any, *rest: Any, **named: Any) -> None:
        super().__init__(field, *rest, **named)
        self.title = LABELS[field.name]

    def choices(self, changelist: Any) -> Iterator[Any]:
        for choice in super().choices(changelist):
            yield {**choice, "display": name_of_status(str(choice["display"]))}
