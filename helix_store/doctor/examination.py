"""The examination of a database."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from django.core.checks import CheckMessage
from django.core.checks import messages as levels
from django.db.migrations.loader import MigrationLoader

from helix_store import conf, schema
from helix_store.catalogue import tables
from helix_store.catalogue.table import APP
from helix_store.checks import check_database
from helix_store.core import validation
from helix_store.doctor.findings import (
    RULES,
    UNREADABLE,
    Check,
    Diagnosis,
    Fault,
    Finding,
    Sample,
    Scope,
    Severity,
    Stopped,
    TableSize,
    fault,
    over,
    table_of,
)
from helix_store.doctor.invariants import FIXES, INVARIANTS, PAYLOAD_CHECKS, SUSPICIONS, declared_checks, fix
from helix_store.engine.database import Database, postgres_module
from helix_store.engine.expressions import list_parameter
from helix_store.engine.statement import Statement
from helix_store.exceptions import InvalidQuery, SessionNotFound
from helix_store.sessions.locking import session_with_id

# --- Schema and settings -----------------------------------------------------------------------------


def schema_faults(db: Database) -> list[Fault]:
    """Return the migrations of the app and of registered tables that the database or this version lacks."""
    loader = db.query(lambda: MigrationLoader(db.connection))
    apps_ = {table.model._meta.app_label for table in tables()}
    known = {each for each in loader.disk_migrations if each[0] in apps_}
    applied = {each for each in loader.applied_migrations if each[0] in apps_}
    # A squashed migration counts as the migrations that it replaces.
    known |= {
        each for migration in loader.replacements.values() for each in migration.replaces if each[0] in apps_
    }
    behind = sorted(each for each in known - applied if each in loader.graph.nodes)
    return [fault("schema-behind", "django_migrations", None, _migration(*each)) for each in behind] + [
        fault("schema-ahead", "django_migrations", None, _migration(*each))
        for each in sorted(applied - known)
    ]


def _migration(app: str, name: str) -> str:
    return name if app == APP else f"{app}.{name}"


def check_findings(alias: str, *, deploy: bool) -> list[Finding]:
    """Return the system check messages about one database, with messages of the same id merged.

    Messages that ``SILENCED_SYSTEM_CHECKS`` names are left out, as they are in ``manage.py check``.
    """
    by_id: dict[str, list[CheckMessage]] = {}
    for message in check_database(alias, deploy=deploy):
        if not message.is_silenced():
            by_id.setdefault(message.id or "", []).append(message)
    return [_finding(id_, messages) for id_, messages in by_id.items()]


def _finding(id_: str, messages: list[CheckMessage]) -> Finding:
    level = max(message.level for message in messages)
    return Finding(
        id=id_,
        severity=(
            Severity.ERROR
            if level >= levels.ERROR
            else Severity.WARNING
            if level >= levels.WARNING
            else Severity.INFO
        ),
        table=None,
        count=len(messages),
        what=" ".join(str(message.msg) for message in messages),
        advice=str(messages[0].hint or ""),
    )


# --- Search path and poolers -------------------------------------------------------------------------

_VISIBLE: Final = Statement(
    postgresql="""
        SELECT c.relname, n.nspname, n.nspname = pg_catalog.current_schema()
        FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.relname = ANY(%(names)s::text[]) AND c.relkind IN ('r', 'p')
            AND pg_catalog.pg_table_is_visible(c.oid)
        ORDER BY c.relname""",
    sqlite="SELECT NULL, NULL, NULL WHERE FALSE",
)
"""The app's tables that an unqualified name refers to, their schema, and whether that schema is first."""


@over("search-path-splits", "search-path-elsewhere")
def search_path(scope: Scope) -> Iterator[Fault]:
    if not scope.db.is_postgresql:
        return
    rows = scope.db.read(_VISIBLE, {"names": _table_names()})
    schemas = {schema for _, schema, _ in rows}
    if len(schemas) > 1:
        for name, schema, _ in rows:
            yield fault("search-path-splits", None, None, f"{schema}.{name}")
    elif rows and not rows[0][2]:
        yield fault("search-path-elsewhere", None, None, rows[0][1])


@over("pooler-without-prepared-statements")
def pooler(scope: Scope) -> Iterator[Fault]:
    connection = scope.db.connection
    if not conf.fast_paths() or connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
        return
    driver = postgres_module()  # another driver does not prepare statements
    if driver is not None and scope.db.query(lambda: driver.loses_prepared_statements(connection)):
        host, port = connection.settings_dict["HOST"], connection.settings_dict["PORT"]
        yield fault("pooler-without-prepared-statements", None, None, f"{host}:{port}")


ENVIRONMENT: Final = (search_path, pooler)


# --- Sizes -------------------------------------------------------------------------------------------

_SIZES: Final = Statement(
    postgresql="""
        SELECT c.relname, CASE WHEN c.reltuples >= 0 THEN c.reltuples::bigint END,
            pg_catalog.pg_table_size(c.oid), pg_catalog.pg_indexes_size(c.oid)
        FROM pg_catalog.pg_class AS c
        WHERE c.relname = ANY(%(names)s::text[]) AND c.relkind IN ('r', 'p')
            AND pg_catalog.pg_table_is_visible(c.oid)""",
    sqlite="""
        SELECT m.tbl_name, NULL, SUM(CASE WHEN m.type = 'table' THEN d.pgsize END),
            SUM(CASE WHEN m.type = 'index' THEN d.pgsize END)
        FROM sqlite_schema AS m JOIN dbstat AS d ON d.name = m.name AND d.aggregate = TRUE
        WHERE m.tbl_name IN (SELECT value FROM json_each(%(names)s)) GROUP BY m.tbl_name""",
)
_HAS_SIZES: Final = Statement(
    postgresql="SELECT 1", sqlite="SELECT 1 FROM pragma_module_list WHERE name = 'dbstat'"
)


def table_sizes(db: Database) -> list[TableSize]:
    """Return the size of each of the app's tables and its indexes, as far as the database reports it."""
    parameters = {"names": list_parameter(db, _table_names())}
    rows: Iterable[Any] = db.read(_SIZES, parameters) if db.read(_HAS_SIZES, {}) else ()
    known = {name: sizes for name, *sizes in rows}
    return [
        TableSize(
            table=table_of(model),
            rows=rows_,
            table_bytes=None if of_table is None else int(of_table),
            index_bytes=None if of_indexes is None else int(of_indexes),
        )
        for model in (table.model for table in tables())
        for rows_, of_table, of_indexes in [known.get(model._meta.db_table, (None, None, None))]
    ]


def _table_names() -> list[str]:
    return [table.model._meta.db_table for table in tables()]


_SAMPLES: Final = 10
_PAGES_AT_ONCE: Final = 10
"""How many of the setting's pages are examined together, unless they are also fixed."""
_Broken = tuple[str, str | None, Severity]
"""A rule, a table in which it is broken, and how serious that is."""

_NOTHING_TO_EXAMINE: Final = frozenset(
    {
        "schema-behind",
        "schema-ahead",
        "helix_store.E002",
        "helix_store.E003",
        "helix_store.E004",
        "helix_store.E012",
        "helix_store.E017",
        "helix_store.E021",
    }
)
"""After one of these findings, the tables may be missing, wrong, or unreadable because of the settings."""


def all_checks() -> tuple[Check, ...]:
    """Return the checks of this app, followed by the checks that tables declare."""
    return (*ENVIRONMENT, *INVARIANTS, *SUSPICIONS, *PAYLOAD_CHECKS, *declared_checks())


class Listener:
    """An observer of an examination, which can end it after the current page. The base class does nothing."""

    def examined(self, check: Check, done: int, total: int, rows: int) -> None:
        """Report that ``rows`` were examined for a check, and ``done`` of ``total`` checks are complete."""

    def fixes(self, fault: Fault, action: str) -> None:
        """Report that a fault will be fixed, or could be fixed in a dry run."""

    def left(self, fault: Fault) -> None:
        """Report that a fix would not have been safe."""

    def must_stop(self) -> bool:
        return False


def diagnose(
    *,
    using: str | None = None,
    tenant: str | None = None,
    session_id: str | None = None,
    fix: bool = False,
    dry_run: bool = False,
    deploy: bool = False,
    listener: Listener | None = None,
) -> Diagnosis:
    """Examine the database ``using``, or one tenant or session in it.

    Read page by page, each page in one statement, without a lock and in constant memory. With ``fix``, fix
    each fault that is safe to fix, in one transaction under the row's lock; ``dry_run`` rolls it back.
    ``deploy`` adds the checks of ``check --deploy``. A session belongs to the given tenant, by default
    ``""``. It is safe to repeat and to interrupt. Raise `InvalidQuery` and `SessionNotFound`.
    """
    if session_id is not None:
        session_id, tenant = validation.identifier(session_id, "session_id"), tenant or ""
    tenant = None if tenant is None else validation.tenant(tenant)
    for name, flag in {"fix": fix, "dry_run": dry_run, "deploy": deploy}.items():
        validation.query_flag(flag, name)
    db = Database(using, tenant or "", None)
    if dry_run and not fix:
        raise InvalidQuery("dry_run reports what fix would do; pass both.", path="dry_run")
    schema.require_app(db)
    return _Examination(Scope(db, tenant, session_id), fix, dry_run, listener or Listener()).run(deploy)


class _Examination:
    def __init__(self, scope: Scope, fixes: bool, dry_run: bool, listener: Listener) -> None:
        self._db = scope.db
        self._scope = scope
        self._fixes = fixes
        self._dry_run = dry_run
        self._listener = listener
        self._counts: Counter[_Broken] = Counter()
        self._fixed: Counter[_Broken] = Counter()
        self._unreadable: set[tuple[str | None, Sample]] = set()
        self._samples: defaultdict[_Broken, list[Sample]] = defaultdict(list)

    def run(self, deploy: bool) -> Diagnosis:
        of_checks = check_findings(self._db.alias, deploy=deploy)
        self._count(schema_faults(self._db))
        found = {finding.id for finding in of_checks} | {rule for rule, *_ in self._counts}
        if found & _NOTHING_TO_EXAMINE:
            return self._diagnosis(of_checks, "the settings and the schema, which come first")
        session_id = self._scope.session_id
        if session_id is not None and not self._db.query(session_with_id(self._db, session_id).exists):
            raise SessionNotFound(session_id)
        return self._diagnosis(of_checks, self._examine())

    def _examine(self) -> str | None:
        """Run every check. If the examination was stopped, return its progress."""
        checks = all_checks()
        for number, check in enumerate(checks):
            rows = 0

            def after_page(count: int, check: Check = check, done: int = number) -> None:
                nonlocal rows
                rows += count
                self._listener.examined(check, done, len(checks), rows)
                if self._listener.must_stop():
                    raise Stopped

            size = conf.page_size() * (1 if self._fixes else _PAGES_AT_ONCE)
            scope = replace(self._scope, page_size=size, after_page=after_page)
            try:
                for page in check.run(scope):
                    self._count(page)
                    if self._fixes:
                        self._fix(check, page)
                # Not every check has pages.
                after_page(0, done=number + 1)
            except Stopped:
                return f"{check.name} after {rows} rows ({number} of {len(checks)} checks complete)"
        return None

    def _count(self, faults: Iterable[Fault]) -> None:
        for each in faults:
            if each.rule_id == "unreadable-row":
                # Several checks read the same row.
                if (each.table, each.sample) in self._unreadable:
                    continue
                self._unreadable.add((each.table, each.sample))
            broken = _group_of(each)
            self._counts[broken] += 1
            if len(self._samples[broken]) < _SAMPLES:
                self._samples[broken].append(each.sample)

    def _fix(self, check: Check, page: list[Fault]) -> None:
        rows: dict[tuple[str, int], list[Fault]] = {}
        for each in page:
            if each.rule_id in FIXES and each.key is not None:
                rows.setdefault((each.rule_id, each.key), []).append(each)
        for (rule, key), faults in rows.items():
            action = RULES[rule].fix or ""
            if not self._dry_run:
                self._listener.fixes(faults[0], action)
            try:
                left = fix(self._db, check, rule, key, dry_run=self._dry_run)
            except UNREADABLE:
                # A fix reads the whole row, of which another column may be damaged.
                left = faults
            mended = max(len(faults) - len(left), 0)
            if left:
                self._listener.left(faults[0])
            elif self._dry_run:
                self._listener.fixes(faults[0], action)
            if not self._dry_run:
                self._fixed[_group_of(faults[0])] += mended

    def _diagnosis(self, of_checks: list[Finding], stopped_at: str | None) -> Diagnosis:
        has_tables = stopped_at is None and not self._scope.is_narrowed
        return Diagnosis(
            database=self._db.alias,
            schema_version=self._db.query(lambda: schema.current_version(self._db.alias)),
            findings=of_checks + [self._finding(broken) for broken in self._counts],
            tables=table_sizes(self._db) if has_tables else [],
            stopped_at=stopped_at,
        )

    def _finding(self, broken: _Broken) -> Finding:
        rule = RULES[broken[0]]
        return Finding(
            id=rule.id,
            severity=broken[2],
            table=broken[1],
            count=self._counts[broken],
            fixed=self._fixed[broken],
            what=rule.what,
            advice=rule.advice,
            is_fixable=rule.fix is not None,
            samples=self._samples[broken],
        )


def _group_of(fault: Fault) -> _Broken:
    return fault.rule_id, fault.table, fault.severity or RULES[fault.rule_id].severity
