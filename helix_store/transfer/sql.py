"""The SQL of exports and imports that the ORM does not say, or says too slowly."""

from __future__ import annotations

from functools import cache
from typing import Final

from helix_store.engine.clocks import with_clock
from helix_store.engine.statement import Statement, table
from helix_store.models import Lock
from helix_store.transfer.layout import Part

__all__ = ["RAISE_TOKEN", "TOKEN", "filled_parts"]

_LOCK: Final = table(Lock)
_RAISE: Final = f"""
    INSERT INTO {_LOCK} (tenant, name, token) VALUES (%(tenant)s, %(name)s, %(token)s)
    ON CONFLICT (tenant, name) DO UPDATE SET token = excluded.token
    WHERE {_LOCK}.token < excluded.token AND ({_LOCK}.expires_at IS NULL OR {_LOCK}.expires_at <= {{now}})
    RETURNING id"""

# A clock that is older than a wait finds the lock held: it errs to the safe side.
RAISE_TOKEN: Final = with_clock(lambda clock: _RAISE.format(now=clock.now))
"""Create a free lock, or raise the token of a free one; no row when it is held, or its token is as high."""

TOKEN: Final = Statement(f"SELECT token FROM {_LOCK} WHERE tenant = %(tenant)s AND name = %(name)s")


def _is_filled(part: Part) -> str:
    conditions = "".join(f" AND {name} = '{value}'" for name, value in part.only.items())
    parent = part.table.model._meta.get_field(part.parent).column  # type: ignore[union-attr]
    return f"EXISTS (SELECT 1 FROM {table(part.table.model)} WHERE {parent} = %(key)s{conditions})"


@cache
def filled_parts(parts: tuple[Part, ...]) -> Statement:
    """Whether each part of one session or stream has a row. Most parts of most sessions have none."""
    return Statement(f"SELECT {', '.join(map(_is_filled, parts))}")
