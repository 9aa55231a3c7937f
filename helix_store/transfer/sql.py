"""SQL of exports and imports that the ORM cannot express, or not as efficiently."""

from __future__ import annotations

from functools import cache
from typing import Final

from helix_store.engine.clocks import with_clock
from helix_store.engine.statement import Statement, table
from helix_store.models import Lock
from helix_store.transfer.layout import ExportedPart

_LOCK: Final = table(Lock)
_RAISE: Final = f"""
    INSERT INTO {_LOCK} (tenant, name, token) VALUES (%(tenant)s, %(name)s, %(token)s)
    ON CONFLICT (tenant, name) DO UPDATE SET token = excluded.token
    WHERE {_LOCK}.token < excluded.token AND ({_LOCK}.expires_at IS NULL OR {_LOCK}.expires_at <= {{now}})
    RETURNING id"""

# If the clock was read before a wait, the lock appears to be held, which errs on the safe side.
RAISE_TOKEN: Final = with_clock(lambda clock: _RAISE.format(now=clock.now))
"""Create a free lock, or increase its token; return no row if it is held or its token is as high already."""

TOKEN: Final = Statement(f"SELECT token FROM {_LOCK} WHERE tenant = %(tenant)s AND name = %(name)s")


def _is_filled(part: ExportedPart) -> str:
    conditions = "".join(f" AND {name} = '{value}'" for name, value in part.only.items())
    parent = part.format.model._meta.get_field(part.format.parent).column  # type: ignore[union-attr]
    return f"EXISTS (SELECT 1 FROM {table(part.format.model)} WHERE {parent} = %(key)s{conditions})"


@cache
def filled_parts(parts: tuple[ExportedPart, ...]) -> Statement:
    """Return a statement that reports which parts of one session or stream have rows; most have none."""
    return Statement(f"SELECT {', '.join(map(_is_filled, parts))}")
