"""PostgreSQL's row-level security, which lets a role see and write only the rows of one tenant."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import router
from django.db.migrations.operations.base import Operation

from helix_store.catalogue import tables
from helix_store.conf import TENANT_POLICY, TENANT_VARIABLE
from helix_store.exceptions import NotSupportedOnBackend

__all__ = ["EnableRowLevelSecurity"]

# NULL without the variable. After the first transaction that sets it, PostgreSQL returns an empty string.
_CURRENT_TENANT: Final = f"substr(nullif(current_setting('{TENANT_VARIABLE}', true), ''), 2)"


class EnableRowLevelSecurity(Operation):
    """A policy on every table of the app and on registered tables, for a migration of the project.

    A row belongs to its ``tenant``, or to the tenant of its session or stream. What is written must belong to
    one tenant as a whole: every column ``tenant``, and every row that a foreign key refers to. A role sees
    and writes the rows of the tenant in the variable ``helix_store.tenant``, which the stores set when
    ``HELIX_STORE["ROW_LEVEL_SECURITY"]`` is True; if the variable is not set, it sees no rows. Superusers,
    roles with ``BYPASSRLS`` and, unless ``force`` is set, the owner of the tables see all rows. Safe to apply
    again, which also adds the policy to new tables. Raises `ImproperlyConfigured` if a registered table does
    not exist yet, and `NotSupportedOnBackend` on other databases.
    """

    reversible = True
    reduces_to_sql = True

    def __init__(self, *, force: bool = False) -> None:
        self.force = force

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        return type(self).__name__, [], {"force": True} if self.force else {}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Do nothing: the models do not change."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        models = list(_models(schema_editor, to_state))
        _require_all(schema_editor.connection, [model for model, _ in models])
        for model, parent in models:
            table = schema_editor.quote_name(model._meta.db_table)
            condition = _condition(model, parent, schema_editor.quote_name)
            rules = [condition, *_rules(model, parent, schema_editor)]
            schema_editor.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
            force = "FORCE" if self.force else "NO FORCE"
            schema_editor.execute(f"ALTER TABLE {table} {force} ROW LEVEL SECURITY")
            schema_editor.execute(f"DROP POLICY IF EXISTS {TENANT_POLICY} ON {table}")
            schema_editor.execute(
                f"CREATE POLICY {TENANT_POLICY} ON {table} USING ({condition})"
                f" WITH CHECK ({' AND '.join(rules)})"
            )

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        models = [model for model, _ in _models(schema_editor, from_state)]
        for model in models:
            table = schema_editor.quote_name(model._meta.db_table)
            schema_editor.execute(f"DROP POLICY IF EXISTS {TENANT_POLICY} ON {table}")
            schema_editor.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY")
            schema_editor.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
        for model in models:
            function = schema_editor.quote_name(_function(model))
            schema_editor.execute(f"DROP FUNCTION IF EXISTS {function}(bigint)")

    def describe(self) -> str:
        return "Enable row-level security on the tables of helix_store"


def _models(schema_editor: Any, state: Any) -> Iterator[tuple[Any, str]]:
    """Yield the models with tables in this database, as of this point in the migrations. Each comes with the
    column of its owner: its tenant, or the key of its session or stream.
    """
    connection = schema_editor.connection
    existing = connection.introspection.table_names()
    # Compare the names of the tables, because models may have had other names before.
    known = {model._meta.db_table: model for model in state.apps.get_models()}
    for table in tables():
        model = known.get(table.model._meta.db_table)
        if model is None and not table.is_own and table.model._meta.db_table in existing:
            # The migration state does not contain apps without migrations.
            model = table.model
        if model is None or not router.allow_migrate_model(connection.alias, model):
            continue
        if connection.vendor != "postgresql":
            raise NotSupportedOnBackend("Row-level security needs PostgreSQL.")
        yield model, "tenant" if table.names_tenant else table.parent


def _require_all(connection: Any, models: Collection[Any]) -> None:
    """Refuse to leave a table of another app without a policy because its migration runs later."""
    known = {model._meta.label for model in models}
    late = sorted(
        {
            table.model._meta.app_label
            for table in tables()
            if not (table.is_own or table.model._meta.label in known)
            and router.allow_migrate_model(connection.alias, table.model)
        }
    )
    if late:
        raise ImproperlyConfigured(
            f"The tables of {', '.join(late)} would get no policy: their migrations have not run yet. "
            "Add the newest migration of each of these apps to the dependencies of this migration."
        )


def _condition(model: Any, parent: str, quote: Any) -> str:
    """Return the condition that a row belongs to the current tenant."""
    table, owner = quote(model._meta.db_table), model._meta.get_field(parent)
    if parent == "tenant":
        return f"{table}.{quote(owner.column)} = {_CURRENT_TENANT}"
    owners = quote(owner.related_model._meta.db_table)
    return (
        f"EXISTS (SELECT 1 FROM {owners} AS owner WHERE owner.id = {table}.{quote(owner.column)} "
        f"AND owner.tenant = {_CURRENT_TENANT})"
    )


def _rules(model: Any, parent: str, schema_editor: Any) -> Iterator[str]:
    """Yield the conditions that a written row must fulfil in addition to its `_condition`.

    A row that another tenant's row refers to would be read with the rights of whoever follows the reference,
    and a second column ``tenant`` puts the row into the lists of that tenant.
    """
    quote = schema_editor.quote_name
    own, declarations = quote(model._meta.db_table), {each.model._meta.db_table: each for each in tables()}
    for field in model._meta.concrete_fields:
        if parent in (field.name, field.attname):
            continue
        column = f"{own}.{quote(field.column)}"
        if field.name == "tenant":
            yield f"{column} = {_CURRENT_TENANT}"
        target = field.related_model._meta.db_table if field.is_relation else ""
        declaration = declarations.get(target)
        if declaration is None:
            continue
        if declaration.names_tenant:
            is_theirs = (
                f"EXISTS (SELECT 1 FROM {quote(target)} AS referred"
                f" WHERE referred.id = {column} AND referred.tenant = {_CURRENT_TENANT})"
            )
        else:
            is_theirs = f"{_visibility(field.related_model, schema_editor)}({column})"
        yield f"({column} IS NULL OR {is_theirs})"


def _function(model: Any) -> str:
    return f"{model._meta.db_table[:50]}_is_visible"


def _visibility(model: Any, schema_editor: Any) -> str:
    """Create the function that reports if its caller sees a row, and return its name.

    PostgreSQL refuses a policy that reads its own table, even through the policy of another one. A function
    with the rights of its caller may: the policy of the table decides which rows it finds.
    """
    quote = schema_editor.quote_name
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(
            "SELECT quote_ident(n.nspname) FROM pg_class AS c"
            " JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = %s::regclass",
            [quote(model._meta.db_table)],
        )
        ((schema,),) = cursor.fetchall()
    name = f"{schema}.{quote(_function(model))}"
    # VOLATILE, because the row may have been written earlier in the same statement.
    schema_editor.execute(
        f"""
        CREATE OR REPLACE FUNCTION {name}(row_id bigint) RETURNS boolean
        LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $function$
        BEGIN
            RETURN EXISTS (SELECT 1 FROM {schema}.{quote(model._meta.db_table)} AS r WHERE r.id = row_id);
        END $function$"""
    )
    # The role that writes calls it.
    schema_editor.execute(f"GRANT EXECUTE ON FUNCTION {name}(bigint) TO PUBLIC")
    return name
