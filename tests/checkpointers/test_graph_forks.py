"""Forks of graph sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import DatabaseError

from helix_store.checkpointers import GraphCheckpointStore
from helix_store.checkpointers.graph.types import (
    GraphCheckpoint,
    GraphSession,
    StoredMessage,
)
from helix_store.core import moments
from helix_store.core.types import CheckpointSource
from helix_store.engine.database import stay_on_node
from helix_store.exceptions import CheckpointNotFound, InvalidPayload
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants


def session_with_history(
    graph: GraphCheckpointStore, *, messages: int = 4, checkpoints: int = 4, session_id: str = "s"
) -> list[GraphCheckpoint]:
    """Alternate messages and checkpoints, each the parent of the next, every other one in a sub-graph."""
    graph.create_session("dir", title="Scan", workspace_id="w", metadata={"k": (1,)}, session_id=session_id)
    saved: list[GraphCheckpoint] = []
    for number in range(checkpoints):
        batch = messages * (number + 1) // checkpoints - messages * number // checkpoints
        graph.add_messages(session_id, [{"role": "user", "content": f"{number}"}] * batch)
        saved.append(
            graph.save_checkpoint(
                session_id,
                namespace=["", "sub"][number % 2],
                step=number,
                node_results={"a": {"status": "completed", "output": number}},
                pending_nodes=["b"],
                parent_id=saved[-1].checkpoint_id if saved else None,
            )
        )
    return saved


def without_identity(messages: list[StoredMessage]) -> list[tuple[Any, ...]]:
    return [(message.role, message.content, message.created_at) for message in messages]


class TestFork:
    def test_has_the_session_as_it_was_at_the_checkpoint(self, graph: GraphCheckpointStore) -> None:
        saved = session_with_history(graph)
        original = graph.get_messages("s")
        fork = graph.fork(saved[1].checkpoint_id)
        assert fork == graph.get_session(fork.session_id)
        assert (fork.title, fork.directory, fork.workspace_id) == ("Fork of Scan", "dir", "w")
        assert fork.metadata == {"k": (1,)}
        copied = graph.get_messages(fork.session_id)
        assert without_identity(copied) == without_identity(original[:2])
        assert min(message.id for message in copied) > max(message.id for message in original)
        (first,) = graph.list_checkpoints(fork.session_id)
        assert first.parent_id == saved[1].checkpoint_id
        assert first.source is CheckpointSource.FORK
        assert first.checkpoint_id != saved[1].checkpoint_id
        for name in ("namespace", "version", "step", "node_id", "node_results", "pending_nodes"):
            assert getattr(first, name) == getattr(saved[1], name)
        assert first.created_at == fork.created_at

    def test_leaves_the_original_as_it_is(self, graph: GraphCheckpointStore) -> None:
        saved = session_with_history(graph)
        before = (graph.get_session("s"), graph.get_messages("s"), list(graph.list_checkpoints("s")))
        graph.fork(saved[1].checkpoint_id, with_history=True)
        assert before == (graph.get_session("s"), graph.get_messages("s"), list(graph.list_checkpoints("s")))

    def test_leaves_out_a_message_of_the_same_moment_after_the_checkpoint(
        self, graph: GraphCheckpointStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stopped = moments.now()
        monkeypatch.setattr(moments, "now", lambda: stopped)
        graph.create_session("", session_id="s")
        graph.add_message("s", role="user", content="before")
        checkpoint = graph.save_checkpoint("s", step=0)
        graph.add_message("s", role="user", content="after")
        fork = graph.fork(checkpoint.checkpoint_id)
        assert [message.content for message in graph.get_messages(fork.session_id)] == ["before"]

    def test_goes_on_by_itself(self, graph: GraphCheckpointStore, committed_db: CommittedDatabase) -> None:
        saved = session_with_history(graph)
        fork = graph.fork(saved[2].checkpoint_id)
        graph.add_message(fork.session_id, role="user", content="new")
        first = graph.get_latest_checkpoint(fork.session_id)
        assert first is not None
        following = graph.save_checkpoint(fork.session_id, step=9, parent_id=first.checkpoint_id)
        assert following.version == first.version + 1
        assert [message.content for message in graph.get_messages(fork.session_id)] == ["0", "1", "2", "new"]
        assert len(graph.get_messages("s")) == 4
        assert broken_invariants(committed_db) == []

    @pytest.mark.parametrize("with_history", [False, True])
    def test_deleting_the_original_leaves_it_whole(
        self, graph: GraphCheckpointStore, with_history: bool
    ) -> None:
        saved = session_with_history(graph)
        fork = graph.fork(saved[3].checkpoint_id, with_history=with_history)
        of_fork = graph.fork(graph.list_checkpoints(fork.session_id)[0].checkpoint_id)

        def everything() -> list[Any]:
            return [
                (graph.get_session(each), graph.get_messages(each), list(graph.list_checkpoints(each)))
                for each in (fork.session_id, of_fork.session_id)
            ]

        before = everything()
        assert graph.delete_session("s") == 1
        assert everything() == before
        first = before[0][2][0]
        assert graph.get_checkpoint(first.parent_id) is None

    def test_titles(self, graph: GraphCheckpointStore) -> None:
        graph.create_session("", session_id="untitled")
        checkpoint = graph.save_checkpoint("untitled", step=0)
        fork = graph.fork(checkpoint.checkpoint_id)
        assert fork.title == f"Fork of {checkpoint.checkpoint_id}"
        assert graph.fork(checkpoint.checkpoint_id, title="").title == ""
        assert graph.fork(checkpoint.checkpoint_id, title="Mine").title == "Mine"
        (first,) = graph.list_checkpoints(fork.session_id)
        assert graph.fork(first.checkpoint_id).title == f"Fork of Fork of {checkpoint.checkpoint_id}"
        with pytest.raises(InvalidPayload):
            graph.fork(checkpoint.checkpoint_id, title="a\x00")

    def test_a_fork_of_a_session_with_the_longest_title_can_be_saved(
        self, graph: GraphCheckpointStore, committed_db: CommittedDatabase
    ) -> None:
        graph.create_session("", title="é" * 2_048, session_id="long")
        fork = graph.fork(graph.save_checkpoint("long", step=0).checkpoint_id)
        assert str(fork.title).startswith("Fork of éé")
        store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
        state = store.load_state(fork.session_id)
        assert state is not None
        assert store.save_state(fork.session_id, state) == state.version + 1

    def test_refuses_an_unknown_checkpoint_and_that_of_another_tenant(
        self, graph: GraphCheckpointStore, committed_db: CommittedDatabase
    ) -> None:
        saved = session_with_history(graph)
        other = GraphCheckpointStore(committed_db.alias, tenant=committed_db.tenant + "-other")
        with pytest.raises(CheckpointNotFound):
            graph.fork("unknown")
        with pytest.raises(CheckpointNotFound):
            other.fork(saved[0].checkpoint_id)
        assert len(graph.list_sessions()) == 1

    def test_keeps_the_owner_and_names_its_origin_for_the_state_store(
        self, graph: GraphCheckpointStore, committed_db: CommittedDatabase
    ) -> None:
        store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
        store.create_session("s", agent_type="support", user_id="u", tags=["t"], metadata={"m": "x"})
        fork = graph.fork(graph.save_checkpoint("s", step=0).checkpoint_id)
        state = store.load_state(fork.session_id)
        assert state is not None
        assert (state.agent_type, state.user_id, state.tags) == ("support", "u", ["t"])
        assert state.metadata == {"m": "x", "branched_from": "s"}

    def test_and_a_branch_keep_the_metadata_of_the_graph(
        self, graph: GraphCheckpointStore, committed_db: CommittedDatabase
    ) -> None:
        metadata = {"due": (1, {2})}
        graph.create_session("/home", session_id="s", metadata=metadata)
        fork = graph.fork(graph.save_checkpoint("s", step=0).checkpoint_id)
        branch = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant).branch_session("s")
        for copied in (fork.session_id, branch.session_id):
            session = graph.get_session(copied)
            assert session is not None
            assert session.metadata == metadata

    def test_of_a_history_that_was_cut_since_has_what_is_left(
        self, graph: GraphCheckpointStore, committed_db: CommittedDatabase
    ) -> None:
        saved = session_with_history(graph)
        store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
        store.truncate_messages("s", 1)
        fork = graph.fork(saved[3].checkpoint_id)
        assert [message.content for message in graph.get_messages(fork.session_id)] == ["0"]
        assert broken_invariants(committed_db) == []


class TestWithHistory:
    def test_copies_the_ancestors_and_the_other_namespaces(self, graph: GraphCheckpointStore) -> None:
        saved = session_with_history(graph, checkpoints=6, messages=6)
        fork = graph.fork(saved[4].checkpoint_id, with_history=True)
        copies = {
            (checkpoint.namespace, checkpoint.version): checkpoint
            for checkpoint in graph.list_checkpoints(fork.session_id)
        }
        assert set(copies) == {("", 1), ("", 2), ("", 3), ("sub", 1), ("sub", 2)}
        for original in saved[:4]:
            copy = copies[original.namespace, original.version]
            assert (copy.node_results, copy.created_at) == (original.node_results, original.created_at)
            assert copy.source is CheckpointSource.LOOP
        forked = copies["", 3]
        assert (forked.parent_id, forked.source) == (saved[4].checkpoint_id, CheckpointSource.FORK)
        assert graph.get_latest_checkpoint(fork.session_id) == forked

    def test_the_copies_have_the_copies_as_their_parents(self, graph: GraphCheckpointStore) -> None:
        saved = session_with_history(graph)
        fork = graph.fork(saved[3].checkpoint_id, with_history=True)
        copies = sorted(graph.list_checkpoints(fork.session_id), key=lambda checkpoint: checkpoint.step)
        assert len({checkpoint.checkpoint_id for checkpoint in copies}) == 4
        assert not {copy.checkpoint_id for copy in copies} & {each.checkpoint_id for each in saved}
        assert copies[0].parent_id is None
        assert copies[1].parent_id == copies[0].checkpoint_id
        assert copies[2].parent_id == copies[1].checkpoint_id
        assert copies[3].parent_id == saved[3].checkpoint_id

    def test_the_forked_checkpoint_is_the_latest_of_its_namespace(self, graph: GraphCheckpointStore) -> None:
        graph.create_session("", session_id="s")
        graph.save_checkpoint("s", step=0, version=10)
        earlier = graph.save_checkpoint("s", step=1, version=5)
        fork = graph.fork(earlier.checkpoint_id, with_history=True)
        latest = graph.get_latest_checkpoint(fork.session_id)
        assert latest is not None
        assert latest.version == 5

    def test_a_copied_checkpoint_can_be_forked_again(self, graph: GraphCheckpointStore) -> None:
        saved = session_with_history(graph)
        fork = graph.fork(saved[3].checkpoint_id, with_history=True)
        copies = sorted(graph.list_checkpoints(fork.session_id), key=lambda checkpoint: checkpoint.step)
        again = graph.fork(copies[1].checkpoint_id, with_history=True)
        assert [message.content for message in graph.get_messages(again.session_id)] == ["0", "1"]
        assert len(graph.list_checkpoints(again.session_id)) == 2


class TestCost:
    @pytest.mark.thorough
    @for_each("with_history", [False, True])
    @for_each(("messages", "checkpoints"), [(2, 2), (500, 50)])
    def test_is_at_most_eight_statements_whatever_the_size(
        self,
        graph: GraphCheckpointStore,
        statements: Callable[[Callable[[], Any]], list[str]],
        messages: int,
        checkpoints: int,
        with_history: bool,
    ) -> None:
        saved = session_with_history(graph, messages=messages, checkpoints=checkpoints)
        forks: list[GraphSession] = []
        sent = statements(
            lambda: forks.append(graph.fork(saved[-1].checkpoint_id, with_history=with_history))
        )
        # On Citus, one more keeps the transaction on the node of its tenant.
        assert len([each for each in sent if each != stay_on_node().postgresql]) <= 8, sent
        (fork,) = forks
        assert without_identity(graph.get_messages(fork.session_id)) == without_identity(
            graph.get_messages("s")
        )
        summary = graph.get_session_summary(fork.session_id)
        assert summary is not None
        assert summary.checkpoint_count == (checkpoints if with_history else 1)


@for_each("failing", range(6))
def test_a_fork_that_fails_at_any_statement_leaves_nothing(
    graph: GraphCheckpointStore, committed_db: CommittedDatabase, failing: int
) -> None:
    saved = session_with_history(graph)
    numbers = iter(range(100))

    def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if next(numbers) == failing:
            raise DatabaseError("cut off")
        return execute(sql, params, many, context)

    with committed_db.connection.execute_wrapper(fail), pytest.raises(DatabaseError):
        graph.fork(saved[0].checkpoint_id)
    rows = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    assert [row.session_id for row in rows] == ["s"]
    assert broken_invariants(committed_db) == []
    assert next(numbers) == failing + 1
