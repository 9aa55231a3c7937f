"""Joins that find each row by an index, for which PostgreSQL and SQLite need different SQL."""

from __future__ import annotations

from django.db.models import Model

from helix_store.engine.statement import table


def looked_up(model: type[Model], alias: str, condition: str, *, end: str = "LIMIT 1") -> tuple[str, str]:
    """Return, for each database, a join with the row that meets a condition on the preceding tables.

    ``LIMIT 1`` prevents PostgreSQL from joining the whole table. If several rows match, pass ``OFFSET 0``.
    """
    source = f"{table(model)} AS {alias}"
    return (
        f"CROSS JOIN LATERAL (SELECT * FROM {source} WHERE {condition} {end}) AS {alias}",
        f"CROSS JOIN {source} ON {condition}",
    )
