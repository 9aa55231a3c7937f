"""The rules of a sound database, and the findings for them.

The doctor's own rules, with advice for each case in which one is broken.

Findings of the system checks have the ids, messages and levels of those checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple

from django.db.models import Model, QuerySet

from helix_store.catalogue import declared
from helix_store.core.payloads import Serializable
from helix_store.engine.database import Database, Rows
from helix_store.engine.expressions import keyset_pages, list_parameter
from helix_store.engine.statement import Statement
from helix_store.exceptions import IntegrityFault
from helix_store.models import Session, Stream


class Severity(StrEnum):
    """Errors lose data or break calls, and warnings may turn into errors. Only these count as problems."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def is_problem(self) -> bool:
        return self is not Severity.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Serializable):
    """One place with a fault: a session or stream by its id, or one of its rows by a distinguishing value."""

    tenant: str | None = None
    name: str | None = None
    row: str | None = None

    def __str__(self) -> str:
        return " ".join(part for part in (self.name, self.row) if part is not None)


class Fault(NamedTuple):
    """One place where a rule is broken. ``key`` is the key of the row that a fix has to lock.

    ``severity`` is that of the rule, unless this place is less serious than others.
    """

    rule_id: str
    table: str | None
    sample: Sample
    key: int | None = None
    severity: Severity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Serializable):
    """All places in one table in which the same rule is broken, with the same severity. ``samples`` holds the
    first of them.
    """

    id: str
    severity: Severity
    table: str | None
    count: int
    fixed: int = 0
    what: str
    advice: str
    is_fixable: bool = False
    samples: list[Sample] = field(default_factory=list)

    @property
    def is_problem(self) -> bool:
        """True if some of the faults have not been fixed."""
        return self.severity.is_problem and self.count > self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize(Serializable):
    """The estimated rows and the bytes of a table and its indexes, or ``None`` if they are not reported."""

    table: str
    rows: int | None
    table_bytes: int | None
    index_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Serializable):
    """The result of one examination. ``stopped_at`` is ``None`` if the examination is complete."""

    database: str
    schema_version: int
    findings: list[Finding]
    tables: list[TableSize]
    stopped_at: str | None = None

    @property
    def has_problems(self) -> bool:
        return any(finding.is_problem for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule. ``fix`` describes what ``--fix`` does to one row if that is safe."""

    id: str
    severity: Severity
    what: str
    advice: str
    fix: str | None = None


_RESTORE: Final = "Restore the rows from a backup, or branch the session at a checkpoint before the loss."
_DELETE_OR_RESTORE: Final = (
    "Restore the row from a backup. Without one, delete the session, or branch it at a readable checkpoint."
)
_ERROR, _WARNING, _INFO = Severity.ERROR, Severity.WARNING, Severity.INFO

_ALL: Final = (
    # The database
    Rule(
        "schema-behind",
        _ERROR,
        "Migrations of helix_store are not applied; nothing else was examined.",
        "Run manage.py migrate helix_store on this database.",
    ),
    Rule(
        "schema-ahead",
        _ERROR,
        "The database has migrations of a newer helix_store; nothing else was examined.",
        "Install the version of helix_store that migrated the database.",
    ),
    Rule(
        "search-path-splits",
        _ERROR,
        "The search_path takes the tables of helix_store from several schemas.",
        "Set a search_path whose first schema has all tables, for the role or in the OPTIONS of the alias.",
    ),
    Rule(
        "search-path-elsewhere",
        _WARNING,
        "The first schema of the search_path is not that of the tables: a migration would use the wrong one.",
        "Put the schema of the tables first in the search_path.",
    ),
    Rule(
        "pooler-without-prepared-statements",
        _WARNING,
        "A pooler in transaction mode loses prepared statements; connections then continue without them.",
        'Set "DISABLE_SERVER_SIDE_CURSORS": True for the alias, or max_prepared_statements of PgBouncer.',
    ),
    # Rows that cannot be read
    Rule(
        "unreadable-payload",
        _ERROR,
        "A stored payload is not the JSON that its calls expect.",
        _DELETE_OR_RESTORE,
    ),
    Rule(
        "unreadable-envelope",
        _ERROR,
        "The envelope of a stored state cannot be read.",
        _DELETE_OR_RESTORE,
    ),
    Rule(
        "unreadable-columns",
        _ERROR,
        "JSON columns of a session's head cannot be read: tags, metadata, tool calls or a suspension.",
        "Correct the column with SQL; NULL means an empty value; for tags and metadata, use [] and {}.",
    ),
    Rule(
        "unreadable-typed-values",
        _ERROR,
        "Typed values of a graph session or graph checkpoint cannot be read.",
        _DELETE_OR_RESTORE,
    ),
    Rule(
        "unknown-word",
        _ERROR,
        "A checkpoint has a status that this version does not know.",
        "Install the version that wrote it, or correct the status with SQL.",
    ),
    # Histories
    Rule(
        "message-count-off",
        _ERROR,
        "The message count in the head of a session is wrong.",
        "Run it with --fix. If a checkpoint has messages that are lost, restore them from a backup.",
        "set message_count to the number of its messages",
    ),
    Rule(
        "message-hole", _ERROR, "The messages of a session are not numbered 1, 2, 3… without gaps.", _RESTORE
    ),
    # States and checkpoints
    Rule(
        "version-zero",
        _ERROR,
        "A version is below 1, so no write with an expected version can succeed.",
        "Set the version of the session to that of its newest checkpoint with SQL, at least to 1.",
    ),
    Rule(
        "checkpoint-from-the-future",
        _ERROR,
        "A checkpoint has a higher version than its session.",
        "Set the version of the session to that of its newest checkpoint with SQL, with the session locked.",
    ),
    Rule(
        "checkpoint-beyond-history",
        _ERROR,
        "A checkpoint has more messages than its session.",
        "Restore the messages from a backup, or delete the checkpoint with delete_checkpoint().",
    ),
    Rule(
        "current-missing",
        _ERROR,
        "A session does not point at a row with its current state, so it cannot be loaded.",
        "Restore the row from a backup. restore_checkpoint() also sets the state, to that of a checkpoint.",
    ),
    Rule(
        "current-mistaken",
        _ERROR,
        "A session's head names the wrong kind for its current row, or has a base without a checkpoint.",
        "Run it with --fix.",
        "derive current_is_checkpoint and base_key from the current row",
    ),
    Rule(
        "state-unneeded",
        _ERROR,
        "A session has a state between checkpoints that is not its current one: its next save fails.",
        "Run it with --fix. A state newer than the current one is kept: decide which of them is right.",
        "delete the state that is older than the current one",
    ),
    Rule(
        "base-missing",
        _ERROR,
        "A state is stored as a delta, and the full payload that it builds on no longer exists.",
        _DELETE_OR_RESTORE,
    ),
    Rule(
        "base-unsound",
        _ERROR,
        "A delta builds on a row that is not an older full payload of its session.",
        _DELETE_OR_RESTORE,
    ),
    Rule(
        "base-named",
        _ERROR,
        "A deleted checkpoint that is kept as a base still has the id of a checkpoint.",
        "Set its checkpoint_id to NULL with SQL, with the session locked.",
    ),
    Rule(
        "base-unneeded",
        _WARNING,
        "A deleted checkpoint is kept as a base, and no delta builds on it.",
        "Run it with --fix.",
        "delete the bases that no delta builds on",
    ),
    Rule(
        "delta-misfit",
        _ERROR,
        "A delta does not fit the full payload that it builds on.",
        _DELETE_OR_RESTORE,
    ),
    Rule(
        "operation-misfit",
        _ERROR,
        "A recorded operation names a checkpoint other than the one with its version.",
        "Delete the operation with SQL once no client will repeat its step.",
    ),
    # Calls and trees
    Rule(
        "deadline-off",
        _ERROR,
        "The deadline of a session is not that of its first unanswered tool call: cleanup misses the call.",
        "Run it with --fix.",
        "set pending_deadline to the earliest deadline of its unanswered calls",
    ),
    Rule(
        "next-post-off",
        _ERROR,
        "A session has the wrong time for its next due post: no turn or worker finds the post.",
        "Run it with --fix.",
        "set next_post_at to the earliest time of its waiting posts",
    ),
    Rule(
        "stop-unmarked",
        _ERROR,
        "The newest run of a session has failed or was stopped, but its session is not marked: find_stuck() "
        "misses it.",
        "Run it with --fix.",
        "set stopped_by and stopped_at from the newest run",
    ),
    Rule(
        "run-abandoned",
        _WARNING,
        "The worker of a run has been gone for more than an hour, and nobody has continued the session.",
        "Run helix_sessions wake every minute, and connect a receiver to session_ready.",
    ),
    Rule(
        "effect-unknown",
        _WARNING,
        "Nobody has known for more than a day whether an effect happened.",
        "Ask the service that it calls, and settle the effect.",
    ),
    Rule(
        "parent-missing",
        _WARNING,
        "A session names a parent that does not exist.",
        "Restore the parent from a backup, or save the state with parent_session_id=None.",
    ),
    Rule(
        "root-of-another-tree",
        _WARNING,
        "A session has a different root from its parent: its tool calls are looked up in the wrong tree.",
        "Save the state with the root_session_id of its parent, or with its own id if it has no parent.",
    ),
    Rule(
        "ref-missing",
        _WARNING,
        "A local ref names a sub-session that does not exist. While the ref is running, this is only a note: "
        "the sub-session may not have begun.",
        "Restore the sub-session from a backup, or import its tree. If it was deleted on purpose, run "
        "helix_erase --session with its id, which also deletes the refs to it.",
    ),
    Rule(
        "ownership-outside-tree",
        _ERROR,
        "A session records a tool call as owned by a session of another tree.",
        "Export the tree, remove the call from client_tool_call_ownership in the file, and import it again.",
    ),
    # Rows without an owner
    Rule(
        "app-rows-unsound",
        _ERROR,
        "Rows that another app keeps are not sound; each sample shows the result of that app's check.",
        "See the documentation of the app that has the table.",
    ),
    Rule(
        "unreadable-row",
        _ERROR,
        "A row, or one that belongs to it, has a value that is no time or no text in UTF-8, or is nested too "
        "deeply: calls that read it fail, and some checks could not examine it.",
        "Restore the row from a backup, or correct the column with SQL; then run the doctor again.",
    ),
    Rule(
        "orphan-row",
        _ERROR,
        "A row belongs to a session or stream that does not exist; no call reaches it.",
        "Restore the session from a backup, or delete the row with SQL.",
    ),
    Rule(
        "usage-of-unknown-session",
        _ERROR,
        "A usage entry belongs to a session that does not exist, or that has another id or tenant.",
        "Run it with --fix. An entry of an existing session stays: correct its session_id with SQL.",
        "set its session to NULL, as delete_session(keep_usage=True) does",
    ),
    # Streams and locks
    Rule(
        "budget-counter-off",
        _ERROR,
        "A counter of a budget is not the sum of the ledger, so the budget stops too early or too late.",
        "Run it with --fix.",
        "count the usage of the budget again",
    ),
    Rule(
        "stream-last-off",
        _ERROR,
        "The last sequence of a stream is not that of its newest chunk.",
        "Run it with --fix. If the newest chunks are lost, restore them or reset the stream.",
        "raise last_sequence to the newest chunk",
    ),
    Rule(
        "stream-floor-off",
        _ERROR,
        "A stream has chunks below its floor, which should have been removed, or a floor beyond its end.",
        "Delete the chunks up to the floor with SQL, with the stream locked, or reset the stream.",
    ),
    Rule(
        "stream-hole",
        _ERROR,
        "Numbered chunks of a stream are missing: reading them raises IntegrityFault.",
        "Restore the chunks from a backup, or prune or reset the stream.",
    ),
    Rule(
        "lock-expired",
        _WARNING,
        "A lock expired more than a day ago and was never released: its holder has crashed.",
        "Find out why the holder crashed; then run it with --fix.",
        "clear owner and expiry, and keep the token",
    ),
)

RULES: Final[dict[str, Rule]] = {rule.id: rule for rule in _ALL}


UNREADABLE: Final = (IntegrityFault, ValueError, RecursionError)
"""What reading a damaged row raises."""


def in_parts(
    of: type[Model], keys: list[int], examine: Callable[[list[int]], Iterable[Fault]]
) -> list[Fault]:
    """Return the faults of rows. If some cannot be read, halve the keys until each of these is a fault."""
    try:
        return list(examine(keys))
    except UNREADABLE:
        if len(keys) == 1:
            return [fault("unreadable-row", table_of(of), None, None, f"id {keys[0]}", key=keys[0])]
    middle = len(keys) // 2
    return [*in_parts(of, keys[:middle], examine), *in_parts(of, keys[middle:], examine)]


class Stopped(Exception):
    """Raised by the caller to end the examination after the current page."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The rows to examine. ``tenant=None`` means every tenant. A ``session_id`` belongs to one tenant.

    ``after_page`` is called with the number of rows after each page; it may raise `Stopped`.
    """

    db: Database
    tenant: str | None = None
    session_id: str | None = None
    page_size: int = 200
    after_page: Callable[[int], object] = lambda count: None

    @property
    def is_narrowed(self) -> bool:
        return self.tenant is not None

    def pages(self, model: type[Model]) -> Iterator[list[int]]:
        """Yield the keys of the rows in scope, in pages.

        Rows that are added in the meantime may be missed.
        """
        # With a tenant, this is a range of the unique index that begins with the tenant.
        table = declared(model)
        order = table.order[0] if self.is_narrowed and len(table.order) == 1 else "pk"
        rows = self.all_rows(model).filter(**self._conditions(model))
        for page in keyset_pages(self.db, rows, (order,), "pk", sizes=repeat(self.page_size)):
            yield [key for key, _ in page]
            self.after_page(len(page))

    def all_rows(self, model: type[Model]) -> QuerySet[Any]:
        return model._base_manager.using(self.db.alias)

    def _conditions(self, model: type[Model]) -> dict[str, Any]:
        if not self.is_narrowed:
            return {}
        conditions: dict[str, Any] = {"tenant": self.tenant}
        if self.session_id is None:
            return conditions
        if model is Stream:
            sessions = Session.objects.using(self.db.alias).filter(
                tenant=self.tenant, session_id=self.session_id
            )
            return {**conditions, "stream_id__in": sessions.values("stream_id")}
        column = declared(model).session_id
        # A budget belongs to no session.
        return {**conditions, "pk__in": ()} if column is None else {**conditions, column: self.session_id}


def fetched(db: Database, rows: QuerySet[Any, Any]) -> list[Any]:
    """Return the rows of an ORM query."""
    return db.query(lambda: list(rows))


def read_keys(db: Database, statement: Statement, keys: list[int]) -> Rows:
    """Run a statement that `for_keys` has built."""
    return db.read(statement, {"keys": list_parameter(db, keys)})


# --- Checks ------------------------------------------------------------------------------------------

KeyedCheck = Callable[[Database, list[int]], Iterable[Fault]]
RowCheck = Callable[[Scope], Iterable[Fault]]


@dataclass(frozen=True, slots=True)
class Check:
    """A check. ``keyed`` examines rows of ``of`` by their keys; a fix repeats this under the row's lock."""

    rules: tuple[str, ...]
    of: type[Model] | None = None
    keyed: KeyedCheck | None = None
    whole: RowCheck | None = None

    @property
    def name(self) -> str:
        return ", ".join(self.rules)

    def run(self, scope: Scope) -> Iterator[list[Fault]]:
        """Yield the faults in scope, page by page. One statement examines each page, so each page is
        consistent.
        """
        if self.keyed is not None and self.of is not None:
            for keys in scope.pages(self.of):
                yield in_parts(self.of, keys, partial(self.keyed, scope.db))
        if self.whole is not None:
            try:
                for found in self.whole(scope):
                    yield [found]
            except UNREADABLE:
                yield [fault("unreadable-row", None, None, None, f"the check {self.name}")]


def each(of: type[Model], *rules: str) -> Callable[[KeyedCheck], Check]:
    """Turn a function of a database and keys into a check of every row of a model."""
    return lambda function: Check(rules, of=of, keyed=function)


def over(*rules: str) -> Callable[[RowCheck], Check]:
    """Turn a function of a scope into a check."""
    return lambda function: Check(rules, whole=function)


def by_statement(rule: str, of: type[Model], table: str, statement: Statement) -> Check:
    """Return a check that runs a statement, which returns the tenant, name, key and row of each fault."""

    def keyed(db: Database, keys: list[int]) -> Iterator[Fault]:
        for tenant, name, key, row in read_keys(db, statement, keys):
            yield fault(rule, table, tenant, name, row, key=key)

    return Check((rule,), of=of, keyed=keyed)


def fault(
    rule: str,
    table: str | None,
    tenant: str | None,
    name: str | None,
    row: Any = None,
    *,
    key: int | None = None,
    severity: Severity | None = None,
) -> Fault:
    """Return a fault with its sample row. ``row`` distinguishes a row from others of the same name."""
    sample = Sample(tenant=tenant, name=name, row=None if row is None else str(row))
    return Fault(rule, table, sample, key, severity)


def table_of(model: type[Model]) -> str:
    """Return the name of a table without its prefix."""
    return model._meta.db_table.removeprefix(Session._meta.db_table.removesuffix("session"))
