"""The ids by which a one-statement write is found after its reply was lost. Each call generates a random
id (`engine.access.Call.id`) and stores it with what it writes. A row that many calls change keeps the ids of
the last calls, newest first, so that a call can find its own id behind those of other writers.
"""

from __future__ import annotations

from typing import Final

from helix_store.exceptions import OutcomeUnknown

CALL_ID_BYTES: Final = 9
CALL_IDS_LENGTH: Final = 255


def recorded(column: str, value: str = "''") -> str:
    """Return the SQL that adds ``%(call_id)s``, with a value of the call, to a column of ids."""
    entry = f"%(call_id)s || ':' || {value} || ' '"
    return f"left({entry} || coalesce({column}, ''), {CALL_IDS_LENGTH})"


def recorded_value(call_ids: str | None, call_id: str) -> str | None:
    """Return the value that was recorded with a call; ``None`` if the call never changed the row.

    Raises `OutcomeUnknown` if so many other calls are recorded that the column may have dropped this one.
    """
    kept = call_ids or ""
    for entry in kept.split(" "):
        found, _, value = entry.partition(":")
        if found == call_id:
            return value
    if len(kept) == CALL_IDS_LENGTH:
        raise OutcomeUnknown(call_id)
    return None
