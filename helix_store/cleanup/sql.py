"""The SQL of retention and erasure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from helix_store.core.types import RunStatus
from helix_store.engine.clocks import POSTGRESQL, SQLITE, Clock
from helix_store.engine.expressions import is_in_list
from helix_store.engine.statement import Statement, table
from helix_store.models import Checkpoint, CheckpointKind, Lock, Run, Session, SubSessionRef, UsageEntry

__all__ = ["ANONYMISE_USAGE", "LINKS_INTO", "TOO_MANY_CHECKPOINTS"]

_SESSION: Final = table(Session)
_REF: Final = table(SubSessionRef)


def _in_keys(form: Callable[[str], str], column: str) -> Statement:
    """A statement with a condition on the keys in the parameter ``keys``, in the form of each database."""
    postgresql, sqlite = is_in_list(column, "keys", "bigint")
    return Statement(postgresql=form(postgresql), sqlite=form(sqlite))


LINKS_INTO: Final = _in_keys(
    lambda in_keys: (
        f"""
    SELECT child.id, parent.id FROM {_SESSION} AS child JOIN {_SESSION} AS parent
        ON parent.tenant = child.tenant AND parent.session_id = child.parent_session_id
    WHERE {in_keys}
  UNION ALL
    SELECT child.id, ref.session_id FROM {_SESSION} AS child
    JOIN {_REF} AS ref ON ref.sub_session_id = child.session_id AND ref.location = 'local'
    JOIN {_SESSION} AS owner ON owner.id = ref.session_id AND owner.tenant = child.tenant
    WHERE {in_keys}"""
    ),
    "child.id",
)
"""The keys of these sessions, each with the key of a session that has it as a sub-session."""


def _anonymise(random_id: str) -> Callable[[str], str]:
    # A row that is anonymous already is not written again.
    return lambda in_keys: (
        f"""
        UPDATE {table(UsageEntry)} SET user_id = NULL, session_id = NULL, run_id = NULL,
            sub_session_id = NULL, recorded_for = '', entry_id = {random_id}
        WHERE {in_keys} AND recorded_for <> '' RETURNING id"""
    )


ANONYMISE_USAGE: Final = Statement(
    postgresql=_in_keys(_anonymise("pg_catalog.gen_random_uuid()::text"), "id").postgresql,
    sqlite=_in_keys(_anonymise("lower(hex(randomblob(16)))"), "id").sqlite,
)
"""Remove the user, the session and the run of usage entries.

The id of an entry is replaced too: it may be made from that of the session.
"""


def _too_many_checkpoints(clock: Clock) -> str:
    checkpoints = f"""
        {table(Checkpoint)} AS c
        WHERE c.session_id = s.id AND c.kind = '{CheckpointKind.STEP.value}' AND c.namespace = ''"""
    return f"""
        SELECT s.id, s.session_id, (SELECT count(*) FROM {checkpoints}) - %(keep)s
        FROM {_SESSION} AS s
        WHERE s.tenant = (SELECT %(tenant)s) AND s.session_id > %(after)s
            AND (SELECT c.version FROM {checkpoints} ORDER BY c.version DESC LIMIT 1 OFFSET %(keep)s)
                IS NOT NULL
            AND NOT EXISTS (
                SELECT 1 FROM {table(Run)} AS r
                WHERE r.session_id = s.id AND r.status = '{RunStatus.RUNNING.value}'
            )
            AND NOT EXISTS (
                SELECT 1 FROM {table(Lock)} AS l
                WHERE l.tenant = s.tenant AND l.name = s.session_id AND l.expires_at > {clock.now}
            )
        ORDER BY s.session_id LIMIT %(limit)s"""


TOO_MANY_CHECKPOINTS: Final = Statement(
    postgresql=_too_many_checkpoints(POSTGRESQL), sqlite=_too_many_checkpoints(SQLITE)
)
"""Key, id and number of surplus step checkpoints of sessions that are not in use, in the order of the id."""
