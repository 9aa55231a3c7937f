"""Joins that find each row by an index, which PostgreSQL and SQLite need to be told in different ways."""

from __future__ import annotations

from django.db.models import Model

from helix_store.engine.statement import table


def looked_up(model: type[Model], alias: str, condition: str, *, end: str = "LIMIT 1") -> tuple[str, str]:
    """Return a join with the row that meets a condition on the tables before it, for each database.

    ``LIMIT 1`` keeps PostgreSQL from joining with the whole table. For several rows, pass ``OFFSET 0``.
    """
    source = f"{table(model)} AS {alias}"
    return (
        f"CROSS JOIN LATERAL (SELECT * FROM {source} WHERE {condition} {end}) AS {alias}",
        f"CROSS JOIN {source} ON {condition}",
    )
