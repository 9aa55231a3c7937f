"""The examination of a database: it runs every check in turn and collects the findings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from helix_store import conf, schema
from helix_store.core import validation
from helix_store.doctor.checks import Check, Scope, Stopped
from helix_store.doctor.databases import ENVIRONMENT, check_findings, schema_faults, table_sizes
from helix_store.doctor.findings import Diagnosis, Fault, Finding, Sample
from helix_store.doctor.fixes import FIXES, fix
from helix_store.doctor.invariants import INVARIANTS, SUSPICIONS
from helix_store.doctor.readable import READABLE, declared_checks
from helix_store.doctor.rules import RULES
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidQuery, SessionNotFound
from helix_store.sessions.database.rows import session_with_id

_SAMPLES: Final = 10
_Place = tuple[str, str | None]
"""A rule and a table in which it is broken."""

_NOTHING_TO_EXAMINE: Final = frozenset(
    {
        "schema-behind",
        "schema-ahead",
        "helix_store.E002",
        "helix_store.E003",
        "helix_store.E004",
        "helix_store.E012",
    }
)
"""After one of these findings, the tables may be missing, wrong, or unreadable because of the settings."""


def all_checks() -> tuple[Check, ...]:
    """Return the checks of this app, followed by the checks that tables declare."""
    return (*ENVIRONMENT, *INVARIANTS, *SUSPICIONS, *READABLE, *declared_checks())


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
    db = Database(using, tenant or "", None)
    if dry_run and not fix:
        raise InvalidQuery("dry_run reports what fix would do; pass both.", path="dry_run")
    return _Examination(Scope(db, tenant, session_id), fix, dry_run, listener or Listener()).run(deploy)


class _Examination:
    def __init__(self, scope: Scope, fixes: bool, dry_run: bool, listener: Listener) -> None:
        self._db = scope.db
        self._scope = scope
        self._fixes = fixes
        self._dry_run = dry_run
        self._listener = listener
        self._counts: Counter[_Place] = Counter()
        self._fixed: Counter[_Place] = Counter()
        self._samples: defaultdict[_Place, list[Sample]] = defaultdict(list)

    def run(self, deploy: bool) -> Diagnosis:
        of_checks = check_findings(self._db.alias, deploy=deploy)
        self._count(schema_faults(self._db))
        found = {finding.id for finding in of_checks} | {rule for rule, _ in self._counts}
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

            scope = replace(self._scope, page_size=conf.page_size(), after_page=after_page)
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
        for fault in faults:
            place = (fault.rule_id, fault.table)
            self._counts[place] += 1
            if len(self._samples[place]) < _SAMPLES:
                self._samples[place].append(fault.sample)

    def _fix(self, check: Check, page: list[Fault]) -> None:
        rows: dict[tuple[str, int], list[Fault]] = {}
        for fault in page:
            if fault.rule_id in FIXES and fault.key is not None:
                rows.setdefault((fault.rule_id, fault.key), []).append(fault)
        for (rule, key), faults in rows.items():
            action = RULES[rule].fix or ""
            if not self._dry_run:
                self._listener.fixes(faults[0], action)
            left = fix(self._db, check, rule, key, dry_run=self._dry_run)
            mended = max(len(faults) - len(left), 0)
            if left:
                self._listener.left(faults[0])
            elif self._dry_run:
                self._listener.fixes(faults[0], action)
            if not self._dry_run:
                self._fixed[rule, faults[0].table] += mended

    def _diagnosis(self, of_checks: list[Finding], stopped_at: str | None) -> Diagnosis:
        has_tables = stopped_at is None and not self._scope.is_narrowed
        return Diagnosis(
            database=self._db.alias,
            schema_version=self._db.query(lambda: schema.current_version(self._db.alias)),
            findings=of_checks + [self._finding(place) for place in self._counts],
            tables=table_sizes(self._db) if has_tables else [],
            stopped_at=stopped_at,
        )

    def _finding(self, place: _Place) -> Finding:
        rule = RULES[place[0]]
        return Finding(
            id=rule.id,
            severity=rule.severity,
            table=place[1],
            count=self._counts[place],
            fixed=self._fixed[place],
            what=rule.what,
            advice=rule.advice,
            is_fixable=rule.fix is not None,
            samples=self._samples[place],
        )
