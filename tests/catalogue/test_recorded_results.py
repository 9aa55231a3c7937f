"""Export, import, branch, erasure, retention, cleanup and doctor find the same as when they were recorded.

``HELIX_WRITE_RECORDED=1`` records them again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from helix_store.cleanup import ErasureReceipt, erase, expired_session_cleanup
from helix_store.core.types import RetentionPolicy, SessionStatus
from helix_store.doctor import diagnose
from helix_store.models import Message, Session, Stream, UsageEntry
from helix_store.retention import apply_retention
from helix_store.stores import DatabaseStateStore
from tests.catalogue.worlds import LONG_AGO, OWNER, WORLDS
from tests.cells import for_each
from tests.cleanup.providers import MemoryProvider
from tests.databases import CommittedDatabase, delete_all_rows
from tests.security.damaged_world import World
from tests.transfer.files import exported, imported

RECORDED: Final = Path(__file__).parent / "recorded"

_MASKS: Final = (
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|\+00:00)"), "time"),
    (re.compile(r'(?<="counted_from":")\d{4}[-\d]+'), "period"),
    (re.compile(r"(?<=-t)1[6-9]\d{11}-[0-9a-f]{6}"), "id"),
    (re.compile(r"\b1[6-9]\d{11}\b"), "milliseconds"),
    (re.compile(r'(?<="claim_token":)\d+'), "random number"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "sha256"),
    (re.compile(r"\b[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}\b"), "id"),
    (re.compile(r"[A-Za-z0-9+/]{80,}=*"), "long text"),
)

POLICY: Final = RetentionPolicy(
    sessions_idle_days=dict.fromkeys(SessionStatus, 100),
    checkpoints_keep=1,
    streams_ended_days=0,
    usage_anonymise_days=0,
    usage_drop_days=1_000,
)


def masked(text: str) -> str:
    """Without what differs between two runs."""
    for pattern, name in _MASKS:
        text = pattern.sub(f"<{name}>", text)
    return text


class Recording:
    """What was done to the tenant of one world, and what came of it, as lines."""

    def __init__(self, database: CommittedDatabase) -> None:
        self.lines: list[str] = []
        self._database = database

    def add(self, title: str, *results: Any) -> None:
        self.lines.append(f"# {title}")
        self.lines.extend(masked(json.dumps(each, sort_keys=True)) for each in results)

    def add_export(self, title: str, **options: Any) -> bytes:
        data = exported(self._database, **options)
        self.lines.append(f"# {title}")
        self.lines.extend(masked(data.decode()).splitlines())
        return data

    def add_counts(self, title: str) -> None:
        """The numbers of rows that are left, as an export has them."""
        *_, trailer = exported(self._database).splitlines()
        self.add(title, json.loads(trailer)["counts"])


def _findings(database: CommittedDatabase) -> Iterator[dict[str, Any]]:
    for finding in diagnose(using=database.alias).findings:
        if not finding.id.startswith(("helix_store.", "pooler", "search")):
            for sample in finding.samples:
                row = None if sample.row is None else re.sub(r"\d+", "#", masked(sample.row))
                yield {"id": finding.id, "table": finding.table, "name": sample.name, "row": row}


def _damage(database: CommittedDatabase) -> None:
    def of(model: Any, parent: str) -> Any:
        return model._base_manager.using(database.alias).filter(**{parent: database.tenant})

    first = of(Message, "session__tenant").order_by("pk").first()
    if first is not None:
        of(Message, "session__tenant").filter(pk=first.pk).update(payload="nonsense")
        of(Message, "session__tenant").filter(pk=first.pk + 1).update(session=1 << 60)
    of(Session, "tenant").filter(session_id__endswith="child").update(parent_session_id="nobody")
    of(Stream, "tenant").update(last_sequence=7)
    of(UsageEntry, "tenant").filter(session=None).update(session=1 << 60)


def _receipts(receipt: Callable[..., ErasureReceipt]) -> list[Any]:
    return [receipt(dry_run=True).to_dict(), receipt().to_dict()]


def _recorded(database: CommittedDatabase) -> str:
    recording = Recording(database)
    tenant, alias = database.tenant, database.alias
    providers = {"memory": MemoryProvider({"expired": ["a", "b"], "expired-child": ["c"]})}
    recording.add("findings", *_findings(database))
    data = recording.add_export("export")
    first, last = Session.objects.using(alias).order_by("pk").values_list("session_id", flat=True)[:2]
    recording.add_export("export of a session and its tree", session_ids=[first], with_trees=True)

    def again() -> None:
        delete_all_rows(alias)
        summary, _ = imported(database, data)
        assert summary.problems == []

    again()
    summary, _ = imported(database, data)
    recording.add("repeated import", summary.to_dict())
    assert exported(database) == data
    DatabaseStateStore(alias, tenant=tenant).branch_session(first, new_session_id="a new branch")
    recording.add_counts("after a branch")
    options: dict[str, Any] = {"using": alias, "workspace_providers": providers, "force": True}
    for title, subject in (
        ("session", {"session_id": first, "tenant": tenant}),
        ("second session without its branches", {"session_id": last, "keep_branches": True}),
        ("user", {"user_id": OWNER}),
        ("tenant", {"tenant": tenant}),
    ):
        again()
        recording.add(f"erasure of a {title}", *_receipts(partial(erase, **options, **subject)))
        recording.add_counts(f"after the erasure of a {title}")
    again()
    cleanup = partial(expired_session_cleanup, using=alias, workspace_providers=providers)
    recording.add("cleanup", cleanup(dry_run=True).to_dict(), cleanup(delete_after=1).to_dict())
    recording.add_counts("after the cleanup")
    again()
    Session.objects.using(alias).filter(session_id__lt="o").update(updated_at=LONG_AGO)
    retention = partial(apply_retention, using=alias, policy=POLICY, workspace_providers=providers)
    recording.add("retention", retention(dry_run=True).to_dict(), retention().to_dict())
    recording.add_counts("after retention")
    again()
    _damage(database)
    recording.add("findings in damaged rows", *_findings(database))
    return "\n".join(recording.lines) + "\n"


@for_each("name", WORLDS)
def test_a_world_gives_the_recorded_results(empty_db: CommittedDatabase, name: str) -> None:
    database = CommittedDatabase(alias=empty_db.alias, tenant="tenant")
    WORLDS[name](World(database))
    found = _recorded(database)
    file = RECORDED / f"{name}.jsonl"
    if os.environ.get("HELIX_WRITE_RECORDED"):
        file.write_text(found)
    assert found == file.read_text()
