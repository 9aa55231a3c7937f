"""The sections of the session page, in order."""

from __future__ import annotations

from typing import Final

from helix_store.admin.sections.conversation import Conversation, Items, conversation_file
from helix_store.admin.sections.details import (
    Budgets,
    Checkpoints,
    Details,
    Family,
    State,
    Stream,
    Usage,
    state_file,
)
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.sections.timeline import Timeline
from helix_store.admin.sections.waits import Effects, Inbox, Waits

__all__ = ["SECTIONS", "Section", "SessionView", "conversation_file", "state_file"]

SECTIONS: Final[tuple[Section, ...]] = (
    Conversation(),
    Timeline(),
    Waits(),
    Effects(),
    Inbox(),
    Checkpoints(),
    State(),
    Usage(),
    Budgets(),
    Family(),
    Items(),
    Stream(),
    Details(),
)
