"""The SQL of exports and imports that the ORM does not say, or says too slowly."""

from __future__ import annotations

from typing import Final

from helix_store.engine.clocks import POSTGRESQL, SQLITE
from helix_store.engine.statement import Statement, table
from helix_store.models import Lock
from helix_store.transfer.layout import SESSION_PARTS, STREAM_PARTS, Part

__all__ = ["FILLED_PARTS", "RAISE_TOKEN", "TOKEN"]

_LOCK: Final = table(Lock)
_RAISE: Final = f"""
    INSERT INTO {_LOCK} (tenant, name, token) VALUES (%(tenant)s, %(name)s, %(token)s)
    ON CONFLICT (tenant, name) DO UPDATE SET token = excluded.token
    WHERE {_LOCK}.token < excluded.token AND ({_LOCK}.expires_at IS NULL OR {_LOCK}.expires_at <= {{now}})
    RETURNING id"""

RAISE_TOKEN: Final = Statement(
    postgresql=_RAISE.format(now=POSTGRESQL.now), sqlite=_RAISE.format(now=SQLITE.now)
)
"""Create a free lock, or raise the token of a free one; no row when it is held, or its token is as high."""

TOKEN: Final = Statement(f"SELECT token FROM {_LOCK} WHERE tenant = %(tenant)s AND name = %(name)s")


def _is_filled(part: Part) -> str:
    conditions = "".join(f" AND {name} = '{value}'" for name, value in part.only.items())
    return f"EXISTS (SELECT 1 FROM {table(part.table.model)} WHERE {part.parent} = %(key)s{conditions})"


FILLED_PARTS: Final[dict[tuple[Part, ...], Statement]] = {
    parts: Statement(f"SELECT {', '.join(map(_is_filled, parts))}") for parts in (SESSION_PARTS, STREAM_PARTS)
}
"""Whether each part of one session or stream has a row. Most parts of most sessions have none."""
