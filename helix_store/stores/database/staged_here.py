"""What this process has staged itself: its steps need not read it back to merge it.

Nothing is decided by it. A step that merges what is remembered here goes through only while the rows are
those very ones; otherwise it reads them.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Final, NamedTuple

from helix_store.stores.database.scope import Scope

__all__ = ["StagedRow", "staged_here"]

_MOST_BYTES: Final = 8 * 1024 * 1024
_BYTES_PER_ROW: Final = 600
"""What a row takes beside its text."""

_Place = tuple[str, str, str, str]


class StagedRow(NamedTuple):
    """A staged change as text, and the version of the row that holds it."""

    version: str
    text: str


class _StagedHere:
    """By step, those staged last; safe to use from any thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything and the lock, as a forked child must: its parent may have held it."""
        self._mutex = threading.Lock()
        self._steps: OrderedDict[_Place, dict[str, StagedRow]] = OrderedDict()
        self._bytes = 0

    def add(self, scope: Scope, session_id: str, step_id: str, tool_call_id: str, row: StagedRow) -> None:
        """Remember a row in the place of an earlier one of its call, as the table has it."""
        place = (scope.alias, scope.tenant, session_id, step_id)
        with self._mutex:
            rows = self._steps.setdefault(place, {})
            known = rows.get(tool_call_id)
            self._bytes += _size(row) - (0 if known is None else _size(known))
            rows[tool_call_id] = row
            self._steps.move_to_end(place)
            while self._bytes > _MOST_BYTES:
                _, oldest = self._steps.popitem(last=False)
                self._bytes -= sum(map(_size, oldest.values()))

    def take(self, scope: Scope, session_id: str, step_id: str) -> list[StagedRow]:
        """What is known of a step that is about to be committed, in staging order, and forgotten with it."""
        with self._mutex:
            rows = self._steps.pop((scope.alias, scope.tenant, session_id, step_id), {})
            self._bytes -= sum(map(_size, rows.values()))
        return list(rows.values())


def _size(row: StagedRow) -> int:
    return len(row.text) + _BYTES_PER_ROW


staged_here: Final = _StagedHere()
if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=staged_here.reset)
