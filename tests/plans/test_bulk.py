"""Work on all sessions sends statements for batches, not for sessions."""

from __future__ import annotations

import io
from collections.abc import Callable

from django.test.utils import CaptureQueriesContext

from helix_store.doctor import diagnose
from helix_store.stores import DatabaseStateStore
from helix_store.transfer import DatabaseSource, write_export
from tests.cells import for_each
from tests.databases import CommittedDatabase

FEW, MANY = 20, 300
_MESSAGES = 3


def _export(database: CommittedDatabase) -> None:
    summary = write_export(DatabaseSource(database.alias, tenant=database.tenant), io.BytesIO())
    assert (summary.failed, summary.problems) == (0, [])


def _examine(database: CommittedDatabase) -> None:
    assert diagnose(using=database.alias, tenant=database.tenant).findings == []


@for_each("call", [_export, _examine], ids=["export", "doctor"])
def test_hundreds_of_sessions_take_as_many_statements_as_a_few(
    committed_db: CommittedDatabase, call: Callable[[CommittedDatabase], None]
) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    counts = []
    for first, end in ((0, FEW), (FEW, MANY)):
        for number in range(first, end):
            store.create_session(f"session-{number}", agent_type="agent")
            store.append_messages(f"session-{number}", [{"role": "user", "content": "hi"}] * _MESSAGES)
        with CaptureQueriesContext(committed_db.connection) as captured:
            call(committed_db)
        counts.append(len(captured))
    # The rows of a batch may turn out to be smaller than expected, and are then read once more.
    assert counts[1] <= counts[0] + 5, counts
