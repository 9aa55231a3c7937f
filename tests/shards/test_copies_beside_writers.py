"""Writers continue while their tenant is copied, and what they change is copied again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from django.db import connections

from helix_store.cleanup import erase
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidQuery, StoreBusy
from helix_store.models import Decision, Lock, Session, Stream, UsageEntry
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, DatabaseStreamManager
from helix_store.transfer import fences as fence_sql
from helix_store.transfer import importing, moves
from helix_store.transfer.fences import COPYING, FENCED, changes_of, fence_of, put_up, take_down
from helix_store.transfer.moves import TenantMove
from helix_store.transfer.records import Unit, digest_of
from tests.adapters.third_party.models import Attachment, Page
from tests.cells import for_each
from tests.shards.conftest import Pair
from tests.shards.test_moves import GROUP, WRITES, MoveWithMore, exported, filled, move
from tests.shards.test_moves_beside_others import role

__all__ = ["role"]

GREETING = {"role": "user", "content": "é"}
LATER = 4_000_000_000_000
DELTAS = "deltas é\u2028"


class BesideWriter(MoveWithMore):
    """When all rows are copied, a writer changes some."""

    write: Callable[[], Any]

    def after_rows(self) -> None:
        self.write()


def filled_with_pages(tenant: str) -> DatabaseStateStore:
    """`filled`, with posts, an approved call, and rows of another app: pages, and shared attachments."""
    store = filled(tenant)
    with store.session("session-2").turn() as turn, turn.step() as step:
        asked = {"tool_name": "pay", "input": {"amount": 7}}
        step.wait_for({call: {**asked, "approval_id": call} for call in ("first", "second")})
    _approve(store, "first")
    for session_id, name in (("session-0", "é"), ("session-1", "other")):
        session = Session.objects.using(store.alias).get(tenant=tenant, session_id=session_id)
        Page.objects.using(store.alias).create(
            session=session, name=name, content="1", attachment=name, written_at=datetime.now(UTC)
        )
        _attachments(tenant, store).create(tenant=tenant, digest=name, content=b"1")
        store.post_message(session_id, GREETING, key="key", author="ann")
        _write(tenant, store, session_id)
    return store


def _approve(store: DatabaseStateStore, call: str) -> None:
    store.submit_tool_result("session-2", call, approved=True, approval_id=call, actor="ann")
    decisions = Decision.objects.using(store.alias).filter(session__tenant=store.tenant)
    assert decisions.filter(session__session_id="session-2", tool_call_id=call).exists()


def logged(alias: str, tenant: str) -> int:
    """Count the logged changes. The log goes with the last fence of the database."""
    if "helix_store_moved_change" not in connections[alias].introspection.table_names():
        return 0
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM helix_store_moved_change WHERE tenant = %s", [tenant])
        (found,) = cursor.fetchone()
        return int(found)


def _attachments(tenant: str, store: DatabaseStateStore) -> Any:
    return Attachment.objects.using(store.alias).filter(tenant=tenant)


def _write(tenant: str, store: DatabaseStateStore, stream_id: str) -> int:
    streams = DatabaseStreamManager(store.alias, tenant=tenant)
    asyncio.run(streams.create_writer(stream_id, "run", "agent"))
    return streams.write_sync(stream_id, [{"type": "text_delta"}])


def _give_away(tenant: str, store: DatabaseStateStore) -> None:
    """Give the page of one session to another one."""
    pages = Page.objects.using(store.alias).filter(session__tenant=tenant)
    pages.filter(name="é").update(session=pages.get(name="other").session_id)


MORE_WRITES: dict[str, Callable[[str, DatabaseStateStore], Any]] = {
    "delete, keep usage": lambda tenant, store: store.delete_session(DELTAS, keep_usage=True),
    "branch": lambda tenant, store: store.branch_session(DELTAS),
    "erase": lambda tenant, store: erase(
        using=store.alias, tenant=tenant, session_id="session-1", force=True
    ),
    "many": lambda tenant, store: [
        # More than one batch, and the log does not name the root first.
        store.create_session(
            f"many {number}", agent_type="agent", parent_session_id="many 0" if number else None
        )
        for number in range(110)
    ],
    "append to another": lambda tenant, store: store.append_messages("session-2", [GREETING]),
    "post": lambda tenant, store: store.post_message("session-0", GREETING, not_before=LATER),
    "withdraw a post": lambda tenant, store: store.withdraw_post(
        "session-0", store.list_posts("session-0").items[0].post_id
    ),
    "receive posts": lambda tenant, store: store.receive_posts("session-0"),
    "approve": lambda tenant, store: _approve(store, "second"),
    "own stream": lambda tenant, store: (
        store.create_session("with a stream", agent_type="agent", stream_id="of its own"),
        _write(tenant, store, "of its own"),
    ),
    "lock without session": lambda tenant, store: DatabaseLockManager(tenant=tenant).acquire("é%'"),
    "delete locks": lambda tenant, store: Lock.objects.using(store.alias).filter(tenant=tenant).delete(),
    "change usage": lambda tenant, store: (
        UsageEntry.objects.using(store.alias).filter(tenant=tenant).update(model="other")
    ),
    "delete usage": lambda tenant, store: (
        UsageEntry.objects.using(store.alias).filter(tenant=tenant).delete()
    ),
    "stream without session": lambda tenant, store: _write(tenant, store, "new stream"),
    "chunk": lambda tenant, store: _write(tenant, store, "session-0"),
    "delete streams": lambda tenant, store: Stream.objects.using(store.alias).filter(tenant=tenant).delete(),
    "give a page away": _give_away,
    "remove a page, and keep its attachment": lambda tenant, store: (
        Page.objects.using(store.alias).filter(session__tenant=tenant, name="é").delete()
    ),
    "attach": lambda tenant, store: _attachments(tenant, store).create(
        tenant=tenant, digest='new "é%', content=b"2"
    ),
    "change an attachment": lambda tenant, store: (
        _attachments(tenant, store).filter(digest="é").update(content=b"3")
    ),
    "rename an attachment": lambda tenant, store: (
        _attachments(tenant, store).filter(digest="é").update(digest="renamed")
    ),
    "delete attachments": lambda tenant, store: _attachments(tenant, store).delete(),
}
EVERY_WRITE = {**WRITES, **MORE_WRITES}
IN_EVERY_TABLE = (
    "append",
    "post",
    "approve",
    "usage",
    "items",
    "chunk",
    "new lock",
    "give a page away",
    "attach",
    "change an attachment",
    "erase",
)
# Rows that another owner takes over, and rows that are gone.
AFTER_A_KILL = (
    "delete, keep usage",
    "give a page away",
    "rename an attachment",
    "delete attachments",
    "receive posts",
    "delete streams",
    "erase",
)


@for_each("name", EVERY_WRITE)
def test_what_changes_during_the_copy_is_copied_again(routed: Pair, name: str) -> None:
    write = EVERY_WRITE[name]
    tenant = f"{GROUP}:%'é {routed.tenant} {name}"
    store = filled_with_pages(tenant)
    before = exported(routed.first, tenant)
    a_move = BesideWriter(tenant, routed.first, routed.second)
    a_move.write = lambda: write(tenant, store)
    report = a_move.copy()
    assert (report.phase, report.problems) == ("copied", [])
    after = exported(routed.first, tenant)
    # Only leases and staged changes that are discarded leave no trace in an export.
    assert after != before or write in (WRITES["lock"], WRITES["discard"])
    assert exported(routed.second, tenant) == after
    move(tenant, "--abort")
    assert logged(routed.first, tenant) == 0


class KilledMove(BesideWriter):
    """When all rows are copied, a writer changes some, and the command dies."""

    def after_rows(self) -> None:
        super().after_rows()
        raise KeyboardInterrupt


@for_each("name", AFTER_A_KILL)
def test_what_changes_before_and_after_a_kill_is_copied_again(routed: Pair, name: str) -> None:
    tenant = f"{GROUP}:{routed.tenant} {name}"
    store = filled_with_pages(tenant)
    killed = KilledMove(tenant, routed.first, routed.second)
    killed.write = partial(EVERY_WRITE[name], tenant, store)
    with pytest.raises(KeyboardInterrupt):
        killed.copy()
    EVERY_WRITE["append to another"](tenant, store)
    assert TenantMove(tenant, routed.first, routed.second).copy().phase == "copied"
    assert exported(routed.second, tenant) == exported(routed.first, tenant)
    move(tenant, "--abort")
    assert logged(routed.first, tenant) == 0


def test_changes_of_other_tenants_are_not_logged(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled_with_pages(tenant)
    other = f"{tenant} other"
    others = filled_with_pages(other)
    db = Database(routed.first, tenant)
    put_up(db, routed.second, COPYING)
    for name in IN_EVERY_TABLE:
        EVERY_WRITE[name](other, others)
    assert logged(routed.first, tenant) == 0
    for name in IN_EVERY_TABLE:
        EVERY_WRITE[name](tenant, store)
    assert set(changes_of(db)) == {*("session", "stream", "lock", "tombstone", "notebook_attachment")}
    take_down(db)
    assert logged(routed.first, tenant) == 0


def test_rows_without_an_exact_name_are_copied_as_a_whole_table(
    routed: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence_sql, "_distinguishing", lambda table: ())
    for name in ("change an attachment", "rename an attachment"):
        tenant = f"{GROUP}:{name} {routed.tenant}"
        store = filled_with_pages(tenant)
        a_move = BesideWriter(tenant, routed.first, routed.second)
        a_move.write = partial(MORE_WRITES[name], tenant, store)
        assert a_move.copy().phase == "copied"
        assert exported(routed.first, tenant) == exported(routed.second, tenant)
        move(tenant, "--abort")


def test_a_copy_that_was_stopped_goes_on_with_what_has_changed(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled_with_pages(tenant)
    copied = Session.objects.using(routed.second).filter(tenant=tenant)
    stopped = TenantMove(tenant, routed.first, routed.second, is_stopped=copied.exists)
    assert stopped.copy().phase == "copying"
    assert copied.exists()
    for number, name in enumerate(("append", "delete", "erase", "rename an attachment")):
        EVERY_WRITE[name](tenant, store)
        if number % 2:
            # The change is known, but was not copied.
            Database(routed.first, tenant).write(fence_sql.MARK, {"tenant": tenant})
    assert move(tenant, "--to", routed.second)["phase"] == "copied"
    assert exported(routed.first, tenant) == exported(routed.second, tenant)
    move(tenant, "--abort")


def test_an_abort_before_the_fence_refuses_nobody_and_leaves_no_log(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled_with_pages(tenant)

    def write() -> None:
        store.append_messages("session-0", [{"role": "user", "content": "x"}])
        a_move.abort()
        store.append_messages("session-0", [{"role": "user", "content": "y"}])

    a_move = BesideWriter(tenant, routed.first, routed.second)
    a_move.write = write
    with pytest.raises(InvalidQuery, match="Another process"):
        a_move.copy()
    assert [fence_of(Database(alias, tenant)) for alias in routed.aliases] == [None, None]
    assert exported(routed.second, tenant)[0] == 0
    assert logged(routed.first, tenant) == 0


def test_a_late_writer_delays_the_fence_and_loses_nothing(
    routed: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled_with_pages(tenant)
    tries: list[str] = []

    def busy_twice(db: Database, target: str, phase: str) -> None:
        if phase == FENCED:
            tries.append(phase)
            if len(tries) <= 2:
                store.append_messages("session-0", [{"role": "user", "content": "late"}])
                raise StoreBusy
        put_up(db, target, phase)

    monkeypatch.setattr(moves, "put_up", busy_twice)
    assert TenantMove(tenant, routed.first, routed.second).copy().phase == "copied"
    assert (len(tries), store.get_message_count("session-0")) == (3, 3)
    assert exported(routed.first, tenant) == exported(routed.second, tenant)
    move(tenant, "--abort")


def test_writers_with_a_role_of_their_own_need_no_right_on_the_log(routed: Pair, role: str) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled_with_pages(tenant)
    db = Database(routed.first, tenant)
    put_up(db, routed.second, COPYING)
    with connections[routed.first].cursor() as cursor:
        cursor.execute(f"REVOKE ALL ON helix_store_moved_change FROM {role}")
        cursor.execute(f"SET ROLE {role}")
    store.append_messages("session-0", [{"role": "user", "content": "x"}])
    with connections[routed.first].cursor() as cursor:
        cursor.execute("RESET ROLE")
    assert changes_of(db) == {"session": [["session-0"]]}
    move(tenant, "--abort")


def test_time_behind_the_fence_depends_on_what_has_changed(
    routed: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the fence, a session that has not changed is read on neither side."""
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled_with_pages(tenant)
    read: list[str] = []

    def noted(unit: Unit) -> str:
        read.append(unit.name)
        return digest_of(unit)

    def behind_the_fence(db: Database, target: str, phase: str) -> None:
        if phase == FENCED:
            store.append_messages("session-1", [{"role": "user", "content": "last"}])
        put_up(db, target, phase)
        if phase == FENCED:
            monkeypatch.setattr(importing, "digest_of", noted)

    monkeypatch.setattr(moves, "put_up", behind_the_fence)
    assert TenantMove(tenant, routed.first, routed.second).copy().phase == "copied"
    assert exported(routed.first, tenant) == exported(routed.second, tenant)
    assert set(read) == {"session-1"}
    move(tenant, "--abort")
