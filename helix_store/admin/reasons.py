"""Why a session has failed, or what it waits for, in one line."""

from __future__ import annotations

import re
from typing import Any, Final

from django.utils.translation import gettext

from helix_store.admin.elements import one_line
from helix_store.admin.names import name_of_status
from helix_store.core.types import TERMINAL_STATUSES

__all__ = ["CALLS_READ", "REASON_LENGTH", "reason_of", "waits_for"]

CALLS_READ: Final = 600
"""Characters of the pending tool calls in which their names are looked for."""

REASON_LENGTH: Final = 60

_TOOL_NAME: Final = re.compile(r'"tool_name": ?"([^"\\]{1,60})"')


def reason_of(session: Any) -> str:
    """By the columns of the session, and the annotations ``failure_start`` and ``calls_start``."""
    if session.status == "failed":
        return one_line(session.failure_start or "", REASON_LENGTH)
    if session.status in TERMINAL_STATUSES or session.suspension_kind is None:
        return ""
    tools = waits_for(session.calls_start)
    if session.suspension_kind != "suspended_client_tool" or not tools:
        return name_of_status(session.suspension_kind)
    return gettext("waits for %(tools)s") % {"tools": one_line(tools, REASON_LENGTH)}


def waits_for(calls_start: str | None) -> str:
    """The tools at the start of the stored calls, each once; empty if none can be read."""
    return ", ".join(dict.fromkeys(_TOOL_NAME.findall(calls_start or "")))
