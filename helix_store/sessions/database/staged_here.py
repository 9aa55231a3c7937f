"""What this process has staged itself: its steps need not read it back to merge it.

Nothing is decided by it. A step that merges what is remembered here goes through only while the rows are
those very ones; otherwise it reads them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from helix_store.engine.database import Database
from helix_store.sessions.database.recent import Recent

__all__ = ["StagedHere", "StagedRow", "staged_here"]

_MOST_BYTES: Final = 8 * 1024 * 1024
_BYTES_PER_ROW: Final = 600
"""What a row takes beside its text."""


class StagedRow(NamedTuple):
    """A staged change as text, and the version of the row that holds it."""

    version: str
    text: str


class StagedHere:
    """The staged changes of each step, by tool call."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._steps: Recent[dict[str, StagedRow]] = Recent(most_bytes)

    def add(self, db: Database, session_id: str, step_id: str, tool_call_id: str, row: StagedRow) -> None:
        """Remember a row in the place of an earlier one of its call, as the table has it."""
        place = (db.alias, db.tenant, session_id, step_id)
        with self._steps.lock:
            rows = self._steps.take(place) or {}
            rows[tool_call_id] = row
            self._steps.put(place, rows, sum(len(each.text) + _BYTES_PER_ROW for each in rows.values()))

    def take(self, db: Database, session_id: str, step_id: str) -> list[StagedRow]:
        """What is known of a step that is about to be committed, in staging order, and forgotten with it."""
        rows = self._steps.take((db.alias, db.tenant, session_id, step_id))
        return [] if rows is None else list(rows.values())


staged_here: Final = StagedHere()
