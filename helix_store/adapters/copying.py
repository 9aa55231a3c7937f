"""The usual ``branch`` of a registered table, which gives the new session a copy of every row."""

from __future__ import annotations

from django.db.models import Model

from helix_store.catalogue import Branch, declared
from helix_store.engine.statement import Statement, table


def copy_rows(model: type[Model], branch: Branch) -> None:
    """Copy all rows of the source to the branch, in one statement.

    The copies keep the order of the rows and all values except the key and the session.
    """
    fields = [each for each in model._meta.concrete_fields if not each.primary_key]
    columns = {each.attname: f'"{each.column}"' for each in fields}
    session = columns.pop(declared(model).parent)
    others = "".join(f", {column}" for column in columns.values())
    branch.db.execute(
        Statement(
            f"INSERT INTO {table(model)} ({session}{others}) SELECT %(target)s{others} FROM {table(model)} "
            f"WHERE {session} = %(source)s ORDER BY {model._meta.pk.column}"
        ),
        {"source": branch.source, "target": branch.target},
    )
