"""The table of locks, for the catalogue."""

from typing import Final

from helix_store.catalogue import Table
from helix_store.models import Lock

_LEASE: Final = "The lease belongs to a process that writes to the other database. Only the token is copied."

TABLES: Final = (
    Table(
        Lock,
        record="lock",
        order=("name",),
        parent="tenant",
        not_exported=dict.fromkeys(("owner", "acquired_at", "expires_at"), _LEASE),
        unit="locks",
        session_id="name",
    ),
)
