"""Checkpoints of the graph store."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.db import transaction

from helix_store.checkpointers import GraphCheckpointStore
from helix_store.checkpointers.graph.types import NODE_STATUSES
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.types import CheckpointSource, StepInfo
from helix_store.exceptions import (
    CheckpointNotFound,
    ConflictError,
    IntegrityFault,
    InvalidCursor,
    InvalidPayload,
    InvalidQuery,
    LimitExceeded,
    SessionNotFound,
)
from helix_store.models import Checkpoint
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.checkpointers.test_graph_sessions import TYPED
from tests.databases import CommittedDatabase
from tests.strategies import exact_form


@pytest.fixture
def session(graph: GraphCheckpointStore) -> str:
    return graph.create_session("", session_id="s").session_id


class TestSave:
    def test_returns_what_a_read_gives(self, graph: GraphCheckpointStore, session: str) -> None:
        first = graph.save_checkpoint(session, step=0)
        saved = graph.save_checkpoint(
            session,
            namespace="sub",
            version=7,
            step=3,
            node_id="b",
            node_results={"a": {"status": "completed", "output": TYPED}, "b": {"status": "running"}},
            pending_nodes=["b", "c"],
            cycle_state={"back_edge": ("b", "a"), "iteration": 2},
            source="interrupt",
            parent_id=first.checkpoint_id,
        )
        assert saved == graph.get_checkpoint(saved.checkpoint_id)
        assert exact_form(saved.node_results["a"]["output"]) == exact_form(TYPED)
        assert (saved.session_id, saved.namespace, saved.version, saved.step) == ("s", "sub", 7, 3)
        assert (saved.node_id, saved.parent_id) == ("b", first.checkpoint_id)
        assert saved.source is CheckpointSource.INTERRUPT
        assert saved.pending_nodes == ["b", "c"]
        assert saved.cycle_state == {"back_edge": ("b", "a"), "iteration": 2}
        assert uuid.UUID(saved.checkpoint_id).version == 7

    def test_defaults_are_stored_as_they_are_returned(
        self, graph: GraphCheckpointStore, session: str
    ) -> None:
        saved = graph.save_checkpoint(session, step=0)
        assert saved == graph.get_checkpoint(saved.checkpoint_id)
        assert (saved.namespace, saved.version, saved.node_results) == ("", 1, {})
        assert (saved.pending_nodes, saved.cycle_state, saved.parent_id) == ((), None, None)
        assert saved.source is CheckpointSource.LOOP

    @for_each("status", NODE_STATUSES)
    def test_every_node_status_comes_back(
        self, graph: GraphCheckpointStore, session: str, status: str
    ) -> None:
        graph.save_checkpoint(session, step=0, node_results={"a": {"status": status}})
        latest = graph.get_latest_checkpoint(session)
        assert latest is not None
        assert latest.node_results == {"a": {"status": status}}

    def test_takes_the_next_free_version_of_its_namespace(
        self, graph: GraphCheckpointStore, session: str
    ) -> None:
        def version(**options: Any) -> int:
            return graph.save_checkpoint(session, step=0, **options).version

        assert [version(), version(), version(namespace="a")] == [1, 2, 1]
        assert version(version=10) == 10
        assert [version(), version(namespace="a")] == [11, 2]
        assert version(version=5) == 5
        assert version() == 12

    def test_has_no_version_after_the_largest_number(self, graph: GraphCheckpointStore, session: str) -> None:
        graph.save_checkpoint(session, step=0, version=MAX_BIGINT)
        with pytest.raises(LimitExceeded) as refused:
            graph.save_checkpoint(session, step=1)
        assert (refused.value.name, refused.value.limit) == ("version", MAX_BIGINT)
        assert [each.version for each in graph.list_checkpoints(session).items] == [MAX_BIGINT]
        assert graph.save_checkpoint(session, step=1, namespace="sub").version == 1

    def test_refuses_a_taken_version_with_a_conflict(self, graph: GraphCheckpointStore, session: str) -> None:
        first = graph.save_checkpoint(session, step=0, version=3)
        with pytest.raises(ConflictError) as refused:
            graph.save_checkpoint(session, step=1, version=3)
        assert (refused.value.attributes["namespace"], refused.value.attributes["version"]) == ("", 3)
        assert list(graph.list_checkpoints(session)) == [first]
        assert graph.save_checkpoint(session, step=1, version=3, namespace="other").version == 3

    def test_a_refused_version_leaves_the_callers_transaction_usable(
        self, graph: GraphCheckpointStore, session: str, committed_db: CommittedDatabase
    ) -> None:
        graph.save_checkpoint(session, step=0, version=1)
        with transaction.atomic(using=committed_db.alias):
            with pytest.raises(ConflictError):
                graph.save_checkpoint(session, step=0, version=1)
            graph.save_checkpoint(session, step=0, version=2)
        assert [checkpoint.version for checkpoint in graph.list_checkpoints(session)] == [2, 1]

    def test_refuses_an_unknown_parent_and_one_of_another_session(
        self, graph: GraphCheckpointStore, session: str
    ) -> None:
        graph.create_session("", session_id="other")
        foreign = graph.save_checkpoint("other", step=0)
        for parent_id in ("unknown", foreign.checkpoint_id):
            with pytest.raises(CheckpointNotFound):
                graph.save_checkpoint(session, step=0, parent_id=parent_id)
        assert list(graph.list_checkpoints(session)) == []

    @for_each(
        ("options", "error"),
        [
            ({"step": -1}, InvalidPayload),
            ({"step": 1.5}, InvalidPayload),
            ({"step": None}, InvalidPayload),
            ({"version": 0}, InvalidPayload),
            ({"version": 1.5}, InvalidPayload),
            ({"version": True}, InvalidPayload),
            ({"version": 2**63}, InvalidPayload),
            ({"namespace": None}, InvalidPayload),
            ({"namespace": "a\x00"}, InvalidPayload),
            ({"node_id": ""}, InvalidPayload),
            ({"parent_id": ""}, InvalidPayload),
            ({"source": "elsewhere"}, InvalidPayload),
            ({"node_results": [1]}, InvalidPayload),
            ({"node_results": {"a": "completed"}}, InvalidPayload),
            ({"node_results": {"a": {}}}, InvalidPayload),
            ({"node_results": {"a": {"status": "Complete"}}}, InvalidPayload),
            ({"node_results": {"a": {"status": ["completed"]}}}, InvalidPayload),
            ({"node_results": {"a": {"status": "completed", "output": object()}}}, InvalidPayload),
            ({"pending_nodes": "abc"}, InvalidPayload),
            ({"pending_nodes": None}, InvalidPayload),
            ({"cycle_state": float("nan")}, InvalidPayload),
            ({"cycle_state": "x" * (8 * 1024 * 1024)}, LimitExceeded),
        ],
    )
    def test_refuses_bad_input_and_stores_nothing(
        self, graph: GraphCheckpointStore, session: str, options: dict[str, Any], error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            graph.save_checkpoint(session, **{"step": 0, **options})
        assert list(graph.list_checkpoints(session)) == []

    def test_refuses_an_unknown_session(self, graph: GraphCheckpointStore) -> None:
        with pytest.raises(SessionNotFound):
            graph.save_checkpoint("unknown", step=0)

    def test_marks_the_session_as_just_written(self, graph: GraphCheckpointStore, session: str) -> None:
        before = graph.get_session(session)
        saved = graph.save_checkpoint(session, step=0)
        after = graph.get_session(session)
        assert before is not None
        assert after is not None
        assert before.updated_at < after.updated_at == saved.created_at


class TestRead:
    def test_the_latest_is_the_highest_version_whatever_its_step(
        self, graph: GraphCheckpointStore, session: str
    ) -> None:
        graph.save_checkpoint(session, step=9)
        second = graph.save_checkpoint(session, step=1)
        graph.save_checkpoint(session, step=50, namespace="sub")
        assert graph.get_latest_checkpoint(session) == second
        assert graph.get_latest_checkpoint(session, "") == second
        sub = graph.get_latest_checkpoint(session, "sub")
        assert sub is not None
        assert sub.step == 50
        assert graph.list_checkpoints(session)[0] == second

    def test_unknown_ids_are_none(self, graph: GraphCheckpointStore, session: str) -> None:
        assert graph.get_checkpoint("unknown") is None
        assert graph.get_latest_checkpoint(session) is None
        assert graph.get_latest_checkpoint("unknown") is None
        with pytest.raises(SessionNotFound):
            graph.list_checkpoints("unknown")
        assert list(graph.list_checkpoints(session)) == []

    @for_each("checkpoint_id", ["", "a\x00", None, 7])
    def test_refuses_bad_ids(self, graph: GraphCheckpointStore, checkpoint_id: Any) -> None:
        with pytest.raises(InvalidPayload):
            graph.get_checkpoint(checkpoint_id)
        with pytest.raises(InvalidPayload):
            graph.fork(checkpoint_id)

    def test_pages_are_stable_while_new_checkpoints_come(
        self, graph: GraphCheckpointStore, session: str
    ) -> None:
        for number in range(6):
            graph.save_checkpoint(session, step=number, namespace=["", "sub"][number % 2])
        expected = [checkpoint.checkpoint_id for checkpoint in graph.list_checkpoints(session)]
        seen: list[str] = []
        cursor = None
        while True:
            page = graph.list_checkpoints(session, limit=2, cursor=cursor)
            seen += [checkpoint.checkpoint_id for checkpoint in page]
            graph.save_checkpoint(session, step=99)
            if (cursor := page.next_cursor) is None:
                break
        assert seen == expected

    def test_filters_by_namespace_and_the_empty_one_is_a_filter(
        self, graph: GraphCheckpointStore, session: str
    ) -> None:
        root = graph.save_checkpoint(session, step=0)
        sub = graph.save_checkpoint(session, step=0, namespace="sub")
        assert list(graph.list_checkpoints(session, namespace="")) == [root]
        assert list(graph.list_checkpoints(session, namespace="sub")) == [sub]
        assert list(graph.list_checkpoints(session, namespace="none")) == []
        assert len(graph.list_checkpoints(session)) == 2

    @for_each("limit", [0, -1, 1.5, None])
    def test_refuses_a_bad_limit(self, graph: GraphCheckpointStore, session: str, limit: Any) -> None:
        with pytest.raises(InvalidQuery):
            graph.list_checkpoints(session, limit=limit)

    def test_refuses_the_cursor_of_another_namespace(self, graph: GraphCheckpointStore, session: str) -> None:
        for _ in range(3):
            graph.save_checkpoint(session, step=0)
        cursor = graph.list_checkpoints(session, limit=1).next_cursor
        with pytest.raises(InvalidCursor):
            graph.list_checkpoints(session, namespace="", cursor=cursor)

    @for_each("text", ["", "[]", "{}", '{"node_results":{}}', '{"$dict":[[[],1]]}', '{"$os":"system"}'])
    def test_one_unreadable_checkpoint_affects_that_checkpoint_alone(
        self, graph: GraphCheckpointStore, session: str, committed_db: CommittedDatabase, text: str
    ) -> None:
        saved = [graph.save_checkpoint(session, step=number) for number in range(3)]
        rows = Checkpoint.objects.using(committed_db.alias)
        rows.filter(checkpoint_id=saved[1].checkpoint_id).update(payload=text)
        with pytest.raises(IntegrityFault):
            graph.get_checkpoint(saved[1].checkpoint_id)
        listed = list(graph.list_checkpoints(session))
        assert [checkpoint.version for checkpoint in listed] == [3, 2, 1]
        assert (listed[0], listed[2]) == (saved[2], saved[0])
        with pytest.raises(IntegrityFault):
            _ = listed[1].node_results
        assert graph.get_latest_checkpoint(session) == saved[2]
        assert graph.save_checkpoint(session, step=3).version == 4
        assert graph.fork(saved[1].checkpoint_id).title == f"Fork of {saved[1].checkpoint_id}"

    def test_step_checkpoints_of_the_same_session_are_not_among_them(
        self, graph: GraphCheckpointStore, session: str, committed_db: CommittedDatabase
    ) -> None:
        store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
        state = store.load_state(session)
        assert state is not None
        step = store.save_state_and_promote_staging(session, state, [], StepInfo("step", 1))
        wave = graph.save_checkpoint(session, step=0)
        assert list(graph.list_checkpoints(session)) == [wave]
        assert graph.get_checkpoint(step.checkpoint_id) is None
        assert [item.checkpoint_id for item in store.list_checkpoints(session).items] == [step.checkpoint_id]


async def test_async_twins_answer_alike(graph: GraphCheckpointStore, session: str) -> None:
    saved = await graph.asave_checkpoint(session, step=0)
    assert await graph.aget_checkpoint(saved.checkpoint_id) == saved
    assert await graph.aget_latest_checkpoint(session) == saved
    assert list(await graph.alist_checkpoints(session)) == [saved]
    assert (await graph.afork(saved.checkpoint_id)).title == f"Fork of {saved.checkpoint_id}"
