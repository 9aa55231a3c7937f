"""The location of another store's data, and the part to import."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Origin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The place where another store keeps its tables, and the tenant here that its sessions get.

    ``schema`` and ``table`` default to the names of the store. With ``only_whole``, a session with a fault in
    one of its rows is left out; otherwise it is imported without that row. With ``leaves_tables``, rows of
    tables that have no counterpart here are counted but are not a problem.
    """

    dsn: str = field(repr=False)
    tenant: str = ""
    schema: str | None = None
    table: str | None = None
    only_whole: bool = False
    leaves_tables: bool = False
