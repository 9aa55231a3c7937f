"""What a move creates in a database: nobody else may use it, and nothing of it is left afterwards."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
from django.core.management import CommandError
from django.db import DatabaseError, connections

from helix_store.engine.database import Database
from helix_store.stores import DatabaseStateStore
from helix_store.transfer import fences
from helix_store.transfer.fences import ARRIVING, COPYING, FENCED, put_up, take_down
from tests.shards.conftest import Pair
from tests.shards.routers import PLACES
from tests.shards.test_fences import _reader_of_everything
from tests.shards.test_moves import GROUP, MoveWithMore, filled, move

MADE_BY_A_MOVE = """
    SELECT p.proname, p.prosecdef, pg_catalog.has_function_privilege('public', p.oid, 'EXECUTE'),
        (SELECT count(*) FROM pg_catalog.aclexplode(
            coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))
        ) AS given WHERE given.grantee <> p.proowner)
    FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace
    WHERE n.nspname NOT IN ('pg_catalog', 'information_schema') AND p.proname LIKE 'helix\\_fence%%'
    ORDER BY p.proname"""
TABLES = """
    SELECT relname FROM pg_catalog.pg_class WHERE relname LIKE 'helix_store_moved%%' AND relkind = 'r'
    ORDER BY relname"""
TABLES_OF_SQLITE = (
    "SELECT name FROM sqlite_master WHERE name LIKE 'helix_store_moved%%' OR name LIKE 'helix_fence%%'"
)

_PAGES = '"notebook_page"'

ATTACK = """
    SET ROLE {role};
    CREATE TYPE pg_temp.loaded AS (content text);
    CREATE FUNCTION pg_temp.as_text(pg_temp.loaded) RETURNS text LANGUAGE plpgsql AS $f$
        BEGIN EXECUTE 'ALTER ROLE {role} BYPASSRLS'; RETURN ''; END $f$;
    CREATE CAST (pg_temp.loaded AS text) WITH FUNCTION pg_temp.as_text(pg_temp.loaded) AS IMPLICIT;
    CREATE TEMPORARY TABLE bait (tenant pg_temp.loaded, id bigint, session_id text, name text);
    CREATE TRIGGER attack BEFORE INSERT ON bait FOR EACH ROW EXECUTE FUNCTION {function}('');
    INSERT INTO bait VALUES (ROW('x'), 1, 'x', 'x');"""


def query(alias: str, statement: str) -> list[tuple[object, ...]]:
    with connections[alias].cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


@pytest.mark.parametrize("step", ["--abort", "--finish"])
def test_a_process_without_one_of_the_fenced_apps_leaves_the_move_as_it_is(
    routed: Pair, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    DatabaseStateStore(tenant=tenant).create_session("session", agent_type="agent")
    move(tenant, "--to", routed.second)
    if step == "--finish":
        PLACES[GROUP] = routed.second
    every = list(fences.fenced_tables())
    with monkeypatch.context() as patch:
        patch.setattr(fences, "fenced_tables", lambda: iter([each for each in every if each.table != _PAGES]))
        with pytest.raises(CommandError, match="notebook_page, which no installed app has"):
            move(tenant, step)
    move(tenant, step)
    if step == "--finish":
        move(tenant, "--release")
    with connections[routed.first].cursor() as cursor:
        cursor.execute(f"DELETE FROM {_PAGES}")


@pytest.fixture
def attacker(routed: Pair) -> Iterator[str]:
    """A role that is bound by policies and owns nothing."""
    if routed.vendor != "postgresql":
        pytest.skip("SQLite has no roles")
    role = f"attacker_{uuid.uuid4().hex}"
    with connections[routed.first].cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role}")
    try:
        yield role
    finally:
        with connections[routed.first].cursor() as cursor:
            cursor.execute(f"DROP OWNED BY {role}")
            cursor.execute(f"DROP ROLE {role}")


def attack(alias: str, role: str) -> list[str]:
    """Attach each function of a move to a table of the role, with a type of its own.

    Return the functions that have run the role's code with the rights of their owner.
    """
    taken = []
    for function, *_ in query(alias, MADE_BY_A_MOVE):
        connection = connections.create_connection(alias)
        try:
            with connection.cursor() as cursor:
                cursor.execute(ATTACK.format(role=role, function=function))
        except DatabaseError:
            pass
        finally:
            connection.close()
        if query(alias, f"SELECT 1 FROM pg_roles WHERE rolname = '{role}' AND rolbypassrls"):
            taken.append(str(function))
            with connections[alias].cursor() as cursor:
                cursor.execute(f"ALTER ROLE {role} NOBYPASSRLS")
    return taken


@pytest.mark.parametrize("is_granted", [False, True], ids=["nothing granted", "execute granted"])
def test_no_role_gets_the_rights_of_the_role_that_moves_a_tenant(
    routed: Pair, attacker: str, is_granted: bool
) -> None:
    """Not even a role that may execute all functions of the schema."""
    db = Database(routed.first, f"{GROUP}:{routed.tenant}")
    taken = {}
    for phase in (COPYING, FENCED):
        put_up(db, routed.second, phase)
        if is_granted:
            with connections[routed.first].cursor() as cursor:
                cursor.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO {attacker}")
        taken[phase] = attack(routed.first, attacker)
    with _reader_of_everything(routed.first):
        take_down(db)
        taken["ended beside a reader"] = attack(routed.first, attacker)
    assert taken == {COPYING: [], FENCED: [], "ended beside a reader": []}


class WatchedMove(MoveWithMore):
    """It looks at the databases when all rows are copied and writers are still let through."""

    look: Callable[[], None]

    def after_rows(self) -> None:
        self.look()


def test_functions_of_a_move_are_executable_by_nobody_else_and_none_is_left(routed: Pair) -> None:
    if routed.vendor != "postgresql":
        pytest.skip("SQLite has no functions")
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    seen: dict[str, list[list[tuple[object, ...]]]] = {}

    def look(phase: str) -> None:
        seen[phase] = [query(alias, MADE_BY_A_MOVE) for alias in routed.aliases]

    look("before")
    a_move = WatchedMove(tenant, routed.first, routed.second)
    a_move.look = lambda: look("copying")
    a_move.copy()
    look("copied")
    PLACES[GROUP] = routed.second
    move(tenant, "--finish")
    look("moved")
    with _reader_of_everything(routed.first):
        move(tenant, "--release")
        look("released")
    functions = [row for both in seen.values() for rows in both for row in rows]
    assert [row for row in functions if row[2] or row[3]] == []
    has_definers = {
        phase: [any(row[1] for row in rows) for rows in both] for phase, both in seen.items() if any(both)
    }
    # The log exists only while writers are let through, and only in the source.
    assert has_definers == {"copying": [True, False], "copied": [False, False], "moved": [False, False]}
    assert (seen["before"], seen["released"]) == ([[], []], [[], []])


def test_an_ended_move_leaves_no_object_in_either_database(routed: Pair) -> None:
    tables = TABLES if routed.vendor == "postgresql" else TABLES_OF_SQLITE
    tenant, other = (f"{GROUP}:{name}{routed.tenant}" for name in ("", "other "))
    for each in (tenant, other):
        DatabaseStateStore(tenant=each).create_session("session", agent_type="agent")
    move(tenant, "--to", routed.second)
    move(other, "--to", routed.second)
    move(tenant, "--abort")
    # The other tenant's fence needs them.
    assert query(routed.first, tables) != []
    move(other, "--abort")
    assert [query(alias, tables) for alias in routed.aliases] == [[], []]
    move(tenant, "--to", routed.second)
    PLACES[GROUP] = routed.second
    move(tenant, "--finish")
    move(tenant, "--release")
    assert [query(alias, tables) for alias in routed.aliases] == [[], []]


def test_tables_of_a_move_are_closed_to_every_role_but_their_owner(routed: Pair, attacker: str) -> None:
    """Even to one with the documented rights on all tables, and in the name of the moved tenant."""
    tenant = f"{GROUP}:{routed.tenant}"
    db = Database(routed.first, tenant)
    for phase in (COPYING, FENCED):
        put_up(db, routed.second, phase)
        with connections[routed.first].cursor() as cursor:
            cursor.execute(
                "INSERT INTO helix_store_moved_change VALUES (%s, 'session', '[]', false)", [tenant]
            )
            cursor.execute(
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {attacker}"
            )
            try:
                cursor.execute(f"SET ROLE {attacker}")
                cursor.execute("SELECT set_config('helix_store.tenant', %s, false)", [f":{tenant}"])
                for statement in (
                    "SELECT * FROM helix_store_moved_tenant",
                    "SELECT * FROM helix_store_moved_change",
                    "UPDATE helix_store_moved_tenant SET is_open = true",
                    "DELETE FROM helix_store_moved_tenant",
                    "DELETE FROM helix_store_moved_change",
                ):
                    cursor.execute(statement)
                    assert (phase, statement, cursor.rowcount) == (phase, statement, 0)
                for statement in (
                    "INSERT INTO helix_store_moved_tenant VALUES ('x', 'y', 'moved', true)",
                    "INSERT INTO helix_store_moved_change VALUES ('x', 'session', '[]', false)",
                ):
                    with pytest.raises(DatabaseError, match="row-level security"):
                        cursor.execute(statement)
            finally:
                cursor.execute("RESET ROLE")
                cursor.execute("RESET helix_store.tenant")
    take_down(db)


def test_a_fence_in_the_target_goes_too(routed: Pair) -> None:
    db = Database(routed.second, f"{GROUP}:{routed.tenant}")
    put_up(db, routed.first, ARRIVING)
    take_down(db)
    tables = TABLES if routed.vendor == "postgresql" else TABLES_OF_SQLITE
    assert query(routed.second, tables) == []
    if routed.vendor == "postgresql":
        assert query(routed.second, MADE_BY_A_MOVE) == []
