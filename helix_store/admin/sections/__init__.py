"""The sections of the session page, in order."""

from __future__ import annotations

from typing import Final

from helix_store.admin.sections.budgets import Budgets
from helix_store.admin.sections.checkpoints import Checkpoints
from helix_store.admin.sections.conversation import Conversation
from helix_store.admin.sections.details import Details
from helix_store.admin.sections.family import Family
from helix_store.admin.sections.inbox import Inbox
from helix_store.admin.sections.items import Items
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.sections.state import State, state_file
from helix_store.admin.sections.stream import Stream
from helix_store.admin.sections.timeline import Timeline
from helix_store.admin.sections.usage import Usage
from helix_store.admin.sections.waits import Waits

__all__ = ["SECTIONS", "Section", "SessionView", "state_file"]

SECTIONS: Final[tuple[Section, ...]] = (
    Conversation(),
    Timeline(),
    Waits(),
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
