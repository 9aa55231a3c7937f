"""The check for a tenant that is being moved to another database; `transfer.fences` sets up the fences. The
triggers of a fence refuse writes to rows. A call that finds no row writes nothing, so it must check for a
fence itself: the row may be in the other database.
"""

from __future__ import annotations

import hashlib
from typing import Final

from helix_store.engine.database import Database
from helix_store.engine.errors import TENANT_MOVED
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import TenantMoved
from helix_store.models import Session

# Every role may read the catalog, even without privileges on the fences' table. A removed fence may have
# left a disabled trigger behind.
_IS_FENCED: Final = Statement(
    f"SELECT 1 FROM pg_catalog.pg_trigger WHERE tgrelid = pg_catalog.to_regclass('{table(Session)}')"
    " AND tgname = %(trigger)s AND tgenabled <> 'D'",
    "SELECT 1 FROM sqlite_master WHERE type = 'trigger' AND name = %(trigger)s || '_INSERT'",
)


def refuse_moved(db: Database) -> None:
    """Raise `TenantMoved` if the tenant is fenced. Call this after a lookup that found nothing."""
    if db.read(_IS_FENCED, {"trigger": trigger_name(table(Session), db.tenant)}):
        raise TenantMoved(database_code=TENANT_MOVED)


def trigger_name(fenced_table: str, tenant: str) -> str:
    """Return the name of the trigger that fences a tenant in a table (see `engine.statement.table`)."""
    return f"helix_fence_{digest_of_names(fenced_table, tenant)}"


def digest_of_names(*names: str) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:24]
