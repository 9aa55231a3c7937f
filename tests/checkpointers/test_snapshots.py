"""Snapshots, on each database and in memory."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import transaction

from helix_store.checkpointers import InMemorySnapshotCheckpointer, SnapshotCheckpointer
from helix_store.core.ids import IdGenerator
from helix_store.exceptions import (
    CheckpointNotFound,
    ConflictError,
    FencedOutError,
    IntegrityFault,
    InvalidPayload,
    InvalidQuery,
    LimitExceeded,
)
from helix_store.models import Checkpoint
from helix_store.stores import MemoryWorld
from tests.cells import for_each
from tests.checkpointers.conftest import Snapshots, Stores
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.strategies import HOSTILE_DOCUMENTS, REFUSED_DOCUMENTS, exact_form

MakeSnapshots = Callable[..., Snapshots]
BAD_IDS = ["", "a\x00", "\ud800", "x" * 256, 7]


def snapshot(number: int = 0, version: int = 2) -> dict[str, Any]:
    return {"version": version, "zz": number, "messages": [{"role": "user"}], "a": 1.0}


@pytest.fixture
def store(make_snapshots: MakeSnapshots) -> Snapshots:
    return make_snapshots()


class TestPut:
    def test_returns_a_new_uuid7_that_gets_the_snapshot_back_exactly(self, store: Snapshots) -> None:
        first, second = store.put("t", snapshot(1)), store.put("t", snapshot(2))
        assert first != second
        assert uuid.UUID(first).version == 7
        assert exact_form(store.get("t", first)) == exact_form(snapshot(1))
        assert exact_form(store.get("t", second)) == exact_form(snapshot(2))
        assert exact_form(store.get("t")) == exact_form(snapshot(2))

    def test_keeps_hostile_payloads_and_their_key_order(self, store: Snapshots) -> None:
        for document in HOSTILE_DOCUMENTS[:-1]:
            value = {"b": 1, "version": 1, **document, "a": 2}
            checkpoint_id = store.put("t", value)
            assert exact_form(store.get("t", checkpoint_id)) == exact_form(value)

    def test_what_is_read_is_detached(self, store: Snapshots) -> None:
        given = snapshot()
        store.put("t", given)
        given["messages"].clear()
        read = store.get("t")
        assert read == snapshot()
        assert read is not None
        read["messages"].clear()
        assert store.get("t") == snapshot()

    @for_each("version", [None, 0, -1, 1.0, "2", True, 2**63])
    def test_refuses_a_version_that_is_no_whole_number_from_one(self, store: Snapshots, version: Any) -> None:
        with pytest.raises(InvalidPayload):
            store.put("t", {"version": version})
        assert store.list("t") == []

    @for_each("value", [{}, [], None, "text", 7])
    def test_refuses_what_is_no_snapshot(self, store: Snapshots, value: Any) -> None:
        with pytest.raises(InvalidPayload):
            store.put("t", value)

    @pytest.mark.thorough
    @for_each(("document", "error"), REFUSED_DOCUMENTS)
    def test_refuses_what_cannot_be_stored_exactly(
        self, document: dict[Any, Any], error: type[Exception]
    ) -> None:
        store = InMemorySnapshotCheckpointer()
        with pytest.raises(error):
            store.put("t", {"version": 1, "document": document})
        assert store.get("t") is None

    def test_refuses_a_snapshot_beyond_the_limit(self, store: Snapshots) -> None:
        with pytest.raises(LimitExceeded) as refused:
            store.put("t", {"version": 1, "x": "y" * (8 * 1024 * 1024)})
        assert refused.value.name == "max_state_bytes"
        assert store.get("t") is None

    def test_an_id_that_is_taken_is_a_conflict(self, make_snapshots: MakeSnapshots) -> None:
        store = make_snapshots(id_factory=lambda: "always the same")
        store.put("t", snapshot(1))
        with pytest.raises(ConflictError):
            store.put("t", snapshot(2))
        assert store.get("t") == snapshot(1)


class TestOrder:
    def test_the_newest_is_the_last_put_also_within_one_millisecond(
        self, make_snapshots: MakeSnapshots
    ) -> None:
        # Another generator for each put, as in as many processes: the ids are in no order.
        store = make_snapshots(id_factory=lambda: IdGenerator(lambda: 1_700_000_000_000_000_000)())
        ids = []
        for number in range(50):
            ids.append(store.put("t", snapshot(number)))
            assert store.get("t") == snapshot(number)
        assert [meta.id for meta in store.list("t")] == ids[::-1]
        assert ids != sorted(ids)

    def test_the_newest_is_the_last_put_also_when_the_clock_steps_back(
        self, make_snapshots: MakeSnapshots
    ) -> None:
        moments: Iterator[int] = iter(range(30, 0, -1))
        store = make_snapshots(
            id_factory=lambda: IdGenerator(lambda: next(moments) * 10**18)(), max_checkpoints_per_thread=1
        )
        for number in range(30):
            checkpoint_id = store.put("t", snapshot(number))
            assert store.get("t") == snapshot(number)
            assert [meta.id for meta in store.list("t")] == [checkpoint_id]

    def test_threads_do_not_mix(self, store: Snapshots) -> None:
        store.put("a:b", snapshot(1))
        store.put("a", snapshot(2))
        foreign = store.list("a")[0].id
        assert store.get("a:b") == snapshot(1)
        assert store.get("a:b", foreign) is None
        assert store.delete("a:b", foreign) == 0


class TestCap:
    @for_each("cap", [1, 3])
    def test_is_exact_after_every_put(self, make_snapshots: MakeSnapshots, cap: int) -> None:
        store = make_snapshots(max_checkpoints_per_thread=cap)
        for number in range(6):
            store.put("t", snapshot(number))
            kept = [store.get("t", meta.id) for meta in store.list("t")]
            assert kept == [snapshot(each) for each in range(number, max(number - cap, -1), -1)]

    def test_is_exact_after_single_deletions_too(self, make_snapshots: MakeSnapshots) -> None:
        store = make_snapshots(max_checkpoints_per_thread=3)
        ids = [store.put("t", snapshot(number)) for number in range(3)]
        store.delete("t", ids[1])
        store.put("t", snapshot(3))
        assert len(store.list("t")) == 3
        store.put("t", snapshot(4))
        assert [store.get("t", meta.id) for meta in store.list("t")] == [
            snapshot(4),
            snapshot(3),
            snapshot(2),
        ]

    def test_none_is_no_cap(self, make_snapshots: MakeSnapshots) -> None:
        store = make_snapshots(max_checkpoints_per_thread=None)
        for number in range(120):
            store.put("t", snapshot(number))
        assert len(store.list("t")) == 120

    def test_the_default_is_a_hundred(self, store: Snapshots) -> None:
        for number in range(103):
            store.put("t", snapshot(number))
        assert len(store.list("t")) == 100

    @for_each("cap", [0, -1, 2.5, float("inf"), "3", True])
    def test_refuses_anything_else(self, make_snapshots: MakeSnapshots, cap: Any) -> None:
        with pytest.raises(InvalidQuery):
            make_snapshots(max_checkpoints_per_thread=cap)

    def test_leaves_the_other_threads_alone(self, make_snapshots: MakeSnapshots) -> None:
        store = make_snapshots(max_checkpoints_per_thread=1)
        store.put("one", snapshot(1))
        store.put("two", snapshot(2))
        assert store.get("one") == snapshot(1)


class TestList:
    def test_is_newest_first_with_everything_but_the_payload(self, store: Snapshots) -> None:
        first = store.put("t", snapshot(1, version=1))
        second = store.put("t", snapshot(2, version=2**62))
        metas = store.list("t")
        assert [(meta.id, meta.agent_snapshot_version) for meta in metas] == [(second, 2**62), (first, 1)]
        assert {meta.thread_id for meta in metas} == {"t"}
        assert metas[1].size_bytes == len(b'{"version":1,"zz":1,"messages":[{"role":"user"}],"a":1.0}')
        assert metas[0].created_at >= metas[1].created_at
        assert metas[0].created_at.tzinfo is not None
        assert store.list("unknown") == []

    def test_pages_by_the_last_id_seen(self, store: Snapshots) -> None:
        ids = [store.put("t", snapshot(number)) for number in range(7)][::-1]
        seen: list[str] = []
        before = None
        while page := store.list("t", limit=3, before=before):
            seen += [meta.id for meta in page]
            before = seen[-1]
        assert seen == ids

    def test_refuses_to_go_on_from_an_id_that_the_thread_does_not_have(self, store: Snapshots) -> None:
        foreign = store.put("other", snapshot())
        for before in ("unknown", foreign):
            with pytest.raises(CheckpointNotFound):
                store.list("t", before=before)

    @for_each("limit", [0, -1, 1.5, float("nan"), float("inf"), "1", True])
    def test_refuses_a_bad_limit(self, store: Snapshots, limit: Any) -> None:
        with pytest.raises(InvalidQuery):
            store.list("t", limit=limit)


class TestDelete:
    def test_takes_one_or_the_whole_thread_and_counts(self, store: Snapshots) -> None:
        ids = [store.put("t", snapshot(number)) for number in range(4)]
        assert store.delete("t", ids[3]) == 1
        assert store.delete("t", ids[3]) == 0
        assert store.get("t", ids[3]) is None
        assert store.get("t") == snapshot(2)
        assert store.delete("t") == 3
        assert (store.delete("t"), store.get("t"), store.list("t")) == (0, None, [])
        store.put("t", snapshot(9))
        assert store.get("t") == snapshot(9)

    def test_erases_threads_and_returns_the_number_of_snapshots_by_thread(self, store: Snapshots) -> None:
        for thread_id, count in [("a", 2), ("b", 1), ("kept", 1)]:
            for number in range(count):
                store.put(thread_id, snapshot(number))
        assert store.delete_threads(["a", "b", "unknown", "a"]) == {"a": 2, "b": 1, "unknown": 0}
        assert store.delete_threads(("a",)) == {"a": 0}
        assert store.delete_threads([]) == {}
        assert (store.get("a"), store.get("b"), store.get("kept")) == (None, None, snapshot(0))

    @for_each("thread_ids", ["abc", b"abc", {"a": 1}, None, 7, ["a", ""], [7]])
    def test_refuses_what_is_no_collection_of_ids_and_deletes_nothing(
        self, store: Snapshots, thread_ids: Any
    ) -> None:
        store.put("a", snapshot())
        with pytest.raises(InvalidPayload):
            store.delete_threads(thread_ids)
        assert store.get("a") == snapshot()


class TestIds:
    @for_each("bad_id", BAD_IDS)
    def test_a_bad_checkpoint_id_is_an_error_and_never_the_newest_or_all(
        self, store: Snapshots, bad_id: Any
    ) -> None:
        store.put("t", snapshot())
        for call in (
            lambda: store.get("t", bad_id),
            lambda: store.delete("t", bad_id),
            lambda: store.list("t", before=bad_id),
            lambda: store.claim("t", bad_id, owner="o"),
        ):
            with pytest.raises(InvalidPayload):
                call()
        assert store.get("t") == snapshot()

    @for_each("bad_id", BAD_IDS)
    def test_a_bad_thread_id_is_an_error(self, store: Snapshots, bad_id: Any) -> None:
        for call in (
            lambda: store.put(bad_id, snapshot()),
            lambda: store.get(bad_id),
            lambda: store.list(bad_id),
            lambda: store.delete(bad_id),
            lambda: store.claim(bad_id, owner="o"),
        ):
            with pytest.raises(InvalidPayload):
                call()


class TestTenants:
    def test_do_not_see_each_other(
        self, snapshots: SnapshotCheckpointer, committed_db: CommittedDatabase
    ) -> None:
        other = SnapshotCheckpointer(committed_db.alias, tenant=committed_db.tenant + "-other")
        self._check(snapshots, other)

    def test_do_not_see_each_other_in_one_world(self) -> None:
        world = MemoryWorld()
        self._check(
            InMemorySnapshotCheckpointer(tenant="a", world=world),
            InMemorySnapshotCheckpointer(tenant="b", world=world),
        )

    def _check(self, store: Snapshots, other: Snapshots) -> None:
        checkpoint_id = store.put("t", snapshot(1))
        assert (other.get("t"), other.get("t", checkpoint_id), other.list("t")) == (None, None, [])
        assert (other.delete("t"), other.delete_threads(["t"])) == (0, {"t": 0})
        assert other.claim("t", owner="o") is None
        other.put("t", snapshot(2))
        assert store.get("t") == snapshot(1)
        assert store.tenant != other.tenant


class TestSessions:
    """A thread is the session with the same id."""

    def test_the_first_snapshot_creates_the_session(self, stores: Stores) -> None:
        store, states = stores.snapshots(), stores.states()
        store.put("t", snapshot())
        state = states.load_state("t")
        assert (state.agent_type, state.version, state.root_session_id) == ("snapshot", 1, "t")
        assert [head.session_id for head in states.list_sessions().sessions] == ["t"]

    def test_snapshots_of_an_existing_session_leave_its_version_alone(self, stores: Stores) -> None:
        store, states = stores.snapshots(), stores.states()
        before = states.create_session("s", agent_type="support")
        store.put("s", snapshot())
        after = states.load_state("s")
        assert (after.agent_type, after.version) == ("support", before.version)
        assert after.updated_at > before.updated_at
        assert states.save_state("s", after, expected_version=before.version) == before.version + 1
        assert store.get("s") == snapshot()

    def test_deleting_the_session_deletes_its_snapshots(self, stores: Stores) -> None:
        store, states = stores.snapshots(), stores.states()
        store.put("t", snapshot())
        assert states.delete_session("t") == 1
        assert store.get("t") is None

    def test_deleting_snapshots_leaves_the_session(self, stores: Stores) -> None:
        store, states = stores.snapshots(), stores.states()
        store.put("t", snapshot())
        store.delete("t")
        assert states.session_exists("t")

    @for_each("call", ["delete", "delete_threads"])
    def test_deleting_snapshots_of_a_session_updates_its_time(self, stores: Stores, call: str) -> None:
        store, states = stores.snapshots(), stores.states()
        states.create_session("s", agent_type="support")
        store.put("s", snapshot())
        before = states.load_state("s")

        def delete() -> Any:
            return store.delete("s") if call == "delete" else store.delete_threads(["s"])["s"]

        assert delete() == 1
        after = states.load_state("s")
        assert after.updated_at > before.updated_at
        assert after.version == before.version
        assert delete() == 0
        assert states.load_state("s") == after

    def test_erasing_takes_a_session_that_put_made_and_no_other(self, stores: Stores) -> None:
        store, states = stores.snapshots(), stores.states()
        states.create_session("s", agent_type="support")
        store.put("s", snapshot())
        store.put("t", snapshot())
        assert store.delete_threads({"s", "t"}) == {"s": 1, "t": 1}
        assert (states.session_exists("s"), states.session_exists("t")) == (True, False)
        assert store.get("s") is None

    def test_a_stale_fencing_token_is_refused(self, stores: Stores) -> None:
        store, locks = stores.snapshots(), stores.locks()
        old = locks.acquire("t")
        old.release()
        new = locks.acquire("t")
        with pytest.raises(FencedOutError):
            store.put("t", snapshot(1), fencing_token=old.fencing_token)
        assert store.get("t") is None
        store.put("t", snapshot(2), fencing_token=new.fencing_token)
        with pytest.raises(FencedOutError):
            store.put("t", snapshot(3), fencing_token=old.fencing_token)
        assert store.get("t") == snapshot(2)


class TestDatabase:
    def test_keeps_the_invariants_of_sessions(
        self, snapshots: SnapshotCheckpointer, committed_db: CommittedDatabase
    ) -> None:
        for number in range(5):
            snapshots.put("t", snapshot(number))
        assert broken_invariants(committed_db) == []

    @for_each("text", ["", "[]", "null", '{"version":', "\x7f"])
    def test_one_unreadable_snapshot_affects_that_snapshot_alone(
        self, snapshots: SnapshotCheckpointer, committed_db: CommittedDatabase, text: str
    ) -> None:
        ids = [snapshots.put("t", snapshot(number)) for number in range(3)]
        Checkpoint.objects.using(committed_db.alias).filter(checkpoint_id=ids[2]).update(payload=text)
        assert [meta.id for meta in snapshots.list("t")] == ids[::-1]
        with pytest.raises(IntegrityFault):
            snapshots.get("t")
        with pytest.raises(IntegrityFault):
            snapshots.claim("t", owner="o")
        assert snapshots.get("t", ids[1]) == snapshot(1)
        snapshots.put("t", snapshot(3))
        assert snapshots.get("t") == snapshot(3)

    def test_joins_the_callers_transaction(
        self, snapshots: SnapshotCheckpointer, committed_db: CommittedDatabase
    ) -> None:
        snapshots.put("t", snapshot(1))
        with transaction.atomic(using=committed_db.alias):
            snapshots.put("t", snapshot(2))
            snapshots.put("new", snapshot(2))
            transaction.set_rollback(True, using=committed_db.alias)
        assert snapshots.get("t") == snapshot(1)
        assert snapshots.get("new") is None

    @for_each("history", [1, 99, 300])
    def test_costs_a_fixed_number_of_statements(
        self,
        snapshots: SnapshotCheckpointer,
        statements: Callable[[Callable[[], Any]], list[str]],
        history: int,
        committed_db: CommittedDatabase,
    ) -> None:
        for number in range(history):
            snapshots.put("t", snapshot(number))
        # All in one on PostgreSQL; BEGIN, lock, trim, insert, head and COMMIT elsewhere.
        sent = 1 if committed_db.vendor == "postgresql" else 6
        assert len(statements(lambda: snapshots.put("t", snapshot()))) == sent
        assert len(statements(lambda: snapshots.get("t"))) == 1
        listing = statements(lambda: snapshots.list("t"))
        assert len(listing) == 1
        assert "payload" not in listing[0]


async def test_async_twins_answer_alike(store: Snapshots) -> None:
    checkpoint_id = await store.aput("t", snapshot())
    assert await store.aget("t", checkpoint_id) == snapshot()
    assert [meta.id for meta in await store.alist("t")] == [checkpoint_id]
    claim = await store.aclaim("t", owner="o")
    assert claim is not None
    assert await claim.arefresh() == claim.expires_at
    assert await claim.arelease()
    assert not await claim.adone()
    assert await store.adelete("t") == 1
    assert await store.adelete_threads(["t"]) == {"t": 0}
