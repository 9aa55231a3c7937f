"""The table of usage, for the catalogue."""

from typing import Final

from helix_store.catalogue import Part, Table
from helix_store.models import UsageEntry

# An entry outlives its session, so entries are ordered within their tenant.
TABLES: Final = (
    Table(
        UsageEntry,
        record="usage_entry",
        order=("entry_id",),
        parts=(Part(("timestamp", "id")),),
        session_id="recorded_for",
    ),
)
