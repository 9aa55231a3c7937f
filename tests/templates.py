"""The migrated databases of a run: made once, and copied for each worker of pytest-xdist."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Final

from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test.utils import setup_databases

__all__ = ["Created", "copied_databases", "migrated_databases"]

Created = list[tuple[BaseDatabaseWrapper, str, bool]]
"""What `django.test.utils.teardown_databases` takes: connections, their names before, and True."""

_TEMPLATE: Final = "template_of_helix_tests"


def migrated_databases(*, verbosity: int, keepdb: bool) -> Created:
    created = setup_databases(
        verbosity=verbosity,
        interactive=False,
        keepdb=keepdb,
        aliases=settings.DATABASES,
        serialized_aliases=[],
    )
    return [(connection, name, destroys) for connection, name, destroys in created if name is not None]


def copied_databases(folder: Path) -> Created:
    """Copy the templates in a folder that all workers of a run share; the first worker makes them."""
    with (folder / "templates.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "templates").exists():
            _make_templates(folder)
            (folder / "templates").touch()
        return [_copied(connections[alias], folder) for alias in settings.DATABASES]


def _make_templates(folder: Path) -> None:
    named = {alias: connections[alias].settings_dict["TEST"]["NAME"] for alias in settings.DATABASES}
    for alias in named:
        connections[alias].settings_dict["TEST"]["NAME"] = _template(connections[alias], folder)
    for connection, name, _ in migrated_databases(verbosity=0, keepdb=False):
        # A template that somebody is connected to cannot be copied.
        connection.close()
        settings.DATABASES[connection.alias]["NAME"] = connection.settings_dict["NAME"] = name
        connection.settings_dict["TEST"]["NAME"] = named[connection.alias]


def _template(connection: BaseDatabaseWrapper, folder: Path) -> str:
    if connection.vendor == "sqlite":
        return str(folder / f"{_TEMPLATE}_{connection.alias}.sqlite3")
    return f"{_TEMPLATE}_{connection.alias}"


def _copied(connection: BaseDatabaseWrapper, folder: Path) -> tuple[BaseDatabaseWrapper, str, bool]:
    template, before = _template(connection, folder), connection.settings_dict["NAME"]
    name: str = connection.creation._get_test_db_name()  # type: ignore[attr-defined]
    if connection.vendor == "sqlite":
        for written in Path(template).parent.glob(f"{Path(template).name}*"):
            shutil.copy(written, f"{name}{written.name.removeprefix(Path(template).name)}")
    else:
        quoted = connection.ops.quote_name
        with connection._nodb_cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {quoted(name)}")
            cursor.execute(f"CREATE DATABASE {quoted(name)} TEMPLATE {quoted(template)}")
    connection.close()
    settings.DATABASES[connection.alias]["NAME"] = connection.settings_dict["NAME"] = name
    return connection, before, True
