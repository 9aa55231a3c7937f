"""A primary and its hot standby, and how clients reach them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from django.core.management import call_command

from tests.database.separate import execute, separate_postgres
from tests.deployments.deployments import changed_alias
from tests.postgres import PostgresCluster, PostgresStandby
from tests.settings import postgres_database

__all__ = ["Servers", "primary_and_standby"]

_EVERY_STANDBY: Final = "ALTER SYSTEM SET synchronous_standby_names = '*'"


@dataclass(frozen=True)
class Servers:
    primary: PostgresCluster
    standby: PostgresStandby

    def settings(self) -> dict[str, Any]:
        """Of an alias that finds the one of them that accepts writes."""
        both = (self.primary, self.standby)
        return {
            **postgres_database(None),
            "USER": self.primary.user,
            "HOST": ",".join(str(each.directory) for each in both),
            "PORT": ",".join(str(each.port) for each in both),
            "OPTIONS": {"target_session_attrs": "read-write", "connect_timeout": 10},
        }


@contextmanager
def primary_and_standby(alias: str) -> Iterator[Servers]:
    """Two migrated servers; a commit waits until the standby has applied it. The alias finds the primary."""
    with PostgresCluster(options={"synchronous_commit": "remote_apply"}) as primary:
        with separate_postgres(primary) as connection:
            call_command("migrate", database=connection.alias, verbosity=0)
        with PostgresStandby(primary) as standby:
            with separate_postgres(primary) as connection:
                execute(connection, _EVERY_STANDBY)
                execute(connection, "SELECT pg_reload_conf()")
            servers = Servers(primary, standby)
            with changed_alias(alias, **servers.settings()):
                yield servers
