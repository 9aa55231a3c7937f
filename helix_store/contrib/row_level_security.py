"""Row-level security of PostgreSQL: a role sees and writes the rows of one tenant only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.db import router
from django.db.migrations.operations.base import Operation

from helix_store.app_tables import registered_tables
from helix_store.core.tenants import TENANT_VARIABLE
from helix_store.exceptions import NotSupportedOnBackend

__all__ = ["EnableRowLevelSecurity"]

_APP: Final = "helix_store"
_POLICY: Final = "helix_store_tenant"
# NULL without the variable. After the first transaction that has set it, PostgreSQL takes it for empty then.
_CURRENT_TENANT: Final = f"substr(nullif(current_setting('{TENANT_VARIABLE}', true), ''), 2)"


class EnableRowLevelSecurity(Operation):
    """A policy on every table of the app and on registered ones, for a migration of the project.

    A row belongs to its ``tenant``, or to that of its session or stream. A role sees and writes the rows of
    the tenant in the variable ``helix_store.tenant``, which the stores set when
    ``HELIX_STORE["ROW_LEVEL_SECURITY"]`` is True; without the variable it sees none. Superusers, roles with
    ``BYPASSRLS`` and, unless ``force``, the owner of the tables see all rows. Safe to apply again, which also
    adds the policy to new tables. Raises `NotSupportedOnBackend` on other databases.
    """

    reversible = True
    reduces_to_sql = True

    def __init__(self, *, force: bool = False) -> None:
        self.force = force

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        return type(self).__name__, [], {"force": True} if self.force else {}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """The models stay as they are."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        for model, parent in _models(schema_editor, to_state):
            table = schema_editor.quote_name(model._meta.db_table)
            condition = _condition(model, parent, schema_editor.quote_name)
            schema_editor.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
            force = "FORCE" if self.force else "NO FORCE"
            schema_editor.execute(f"ALTER TABLE {table} {force} ROW LEVEL SECURITY")
            schema_editor.execute(f"DROP POLICY IF EXISTS {_POLICY} ON {table}")
            schema_editor.execute(
                f"CREATE POLICY {_POLICY} ON {table} USING ({condition}) WITH CHECK ({condition})"
            )

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        for model, _ in _models(schema_editor, from_state):
            table = schema_editor.quote_name(model._meta.db_table)
            schema_editor.execute(f"DROP POLICY IF EXISTS {_POLICY} ON {table}")
            schema_editor.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY")
            schema_editor.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")

    def describe(self) -> str:
        return "Enable row-level security on the tables of helix_store"


def _models(schema_editor: Any, state: Any) -> Iterator[tuple[Any, str]]:
    """The models with tables in this database, as they are at this point of the migrations.

    With each comes the column of its owner: its tenant, or the key of its session or stream.
    """
    connection = schema_editor.connection
    for model, parent in (*_own_models(state), *_registered_models(state)):
        if not router.allow_migrate_model(connection.alias, model):
            continue
        if connection.vendor != "postgresql":
            raise NotSupportedOnBackend("Row-level security needs PostgreSQL.")
        yield model, parent


def _own_models(state: Any) -> Iterator[tuple[Any, str]]:
    for model in state.apps.get_app_config(_APP).get_models():
        columns = {field.attname for field in model._meta.concrete_fields}
        yield model, next(each for each in ("tenant", "session_id", "stream_id") if each in columns)


def _registered_models(state: Any) -> Iterator[tuple[Any, str]]:
    """Those of other apps, without an app whose migrations have not run yet."""
    for table in registered_tables():
        label = table.model._meta.app_label, table.model._meta.model_name
        if label in state.models:
            yield state.apps.get_model(*label), table.parent


def _condition(model: Any, parent: str, quote: Any) -> str:
    """The condition that a row belongs to the current tenant."""
    table, owner = quote(model._meta.db_table), model._meta.get_field(parent)
    if parent == "tenant":
        return f"{table}.{quote(owner.column)} = {_CURRENT_TENANT}"
    owners = quote(owner.related_model._meta.db_table)
    return (
        f"EXISTS (SELECT 1 FROM {owners} AS owner WHERE owner.id = {table}.{quote(owner.column)} "
        f"AND owner.tenant = {_CURRENT_TENANT})"
    )
