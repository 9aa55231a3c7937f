"""Messages of the graph store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from helix_store.checkpointers import GraphCheckpointStore
from helix_store.checkpointers.graph.types import StoredMessage
from helix_store.core import moments
from helix_store.exceptions import (
    FencedOutError,
    IntegrityFault,
    InvalidPayload,
    InvalidQuery,
    LimitExceeded,
    SessionNotFound,
)
from helix_store.models import Message
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.cells import for_each
from tests.checkpointers.test_graph_sessions import TYPED
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.strategies import exact_form


@pytest.fixture
def session(graph: GraphCheckpointStore) -> str:
    return graph.create_session("", session_id="s").session_id


def contents(messages: list[StoredMessage]) -> list[str | None]:
    return [message.content for message in messages]


class TestAdd:
    def test_returns_what_a_read_gives(self, graph: GraphCheckpointStore, session: str) -> None:
        added = graph.add_message(
            session,
            role="assistant",
            content="\x00 \ud800",
            tool_calls=[{"name": "f", "input": TYPED, "tool_use_id": "c"}],
            tool_results=({"tool_use_id": "c", "content": b"\x00"},),
            tokens_in=3,
            tokens_out=0,
        )
        assert [added] == graph.get_messages(session)
        assert exact_form(added.tool_calls) == exact_form([{"name": "f", "input": TYPED, "tool_use_id": "c"}])
        assert (added.role, added.content, added.tokens_in, added.tokens_out) == (
            "assistant",
            "\x00 \ud800",
            3,
            0,
        )
        assert added.tool_results == ({"tool_use_id": "c", "content": b"\x00"},)

    @for_each("role", ["user", "assistant", "system", "tool"])
    def test_keeps_no_content_and_empty_content_apart(
        self, graph: GraphCheckpointStore, session: str, role: str
    ) -> None:
        graph.add_message(session, role=role)
        graph.add_message(session, role=role, content="")
        assert contents(graph.get_messages(session)) == [None, ""]

    def test_ids_and_times_increase_in_append_order(
        self, graph: GraphCheckpointStore, session: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stopped = moments.now()
        monkeypatch.setattr(moments, "now", lambda: stopped)
        graph.add_messages(session, [{"role": "user", "content": str(number)} for number in range(5)])
        monkeypatch.setattr(moments, "now", lambda: stopped - timedelta(hours=1))
        graph.add_message(session, role="user", content="5")
        messages = graph.get_messages(session)
        assert contents(messages) == ["0", "1", "2", "3", "4", "5"]
        ids = [message.id for message in messages]
        times = [message.created_at for message in messages]
        assert ids == sorted(set(ids))
        assert times == sorted(set(times))

    def test_several_are_all_or_nothing(
        self, graph: GraphCheckpointStore, session: str, committed_db: CommittedDatabase
    ) -> None:
        with pytest.raises(InvalidPayload) as refused:
            graph.add_messages(session, [{"role": "user"}, {"role": "robot"}])
        assert refused.value.path == "/messages/1/role"
        assert graph.get_messages(session) == []
        assert graph.add_messages(session, []) == []
        added = graph.add_messages(session, [{"role": "user", "content": "a"}, {"role": "tool"}])
        assert added == graph.get_messages(session)
        assert broken_invariants(committed_db) == []

    @for_each(
        ("message", "error"),
        [
            ({"role": "robot"}, InvalidPayload),
            ({"role": None}, InvalidPayload),
            ({"role": "user", "content": b"bytes"}, InvalidPayload),
            ({"role": "user", "content": ["part"]}, InvalidPayload),
            ({"role": "user", "tokens_in": 1.5}, InvalidPayload),
            ({"role": "user", "tokens_in": -1}, InvalidPayload),
            ({"role": "user", "tokens_out": True}, InvalidPayload),
            ({"role": "user", "tool_calls": [object()]}, InvalidPayload),
            ({"role": "user", "tool_results": [float("inf")]}, InvalidPayload),
            ({"role": "user", "content": "x" * (1024 * 1024)}, LimitExceeded),
        ],
    )
    def test_refuses_bad_input_and_stores_nothing(
        self, graph: GraphCheckpointStore, session: str, message: dict[str, Any], error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            graph.add_message(session, **message)
        with pytest.raises(error):
            graph.add_messages(session, [message])
        assert graph.get_messages(session) == []

    @for_each("messages", ["text", {"role": "user"}, [7], [{"role": "user", "text": "x"}]])
    def test_refuses_what_is_no_list_of_messages(
        self, graph: GraphCheckpointStore, session: str, messages: Any
    ) -> None:
        with pytest.raises(InvalidPayload):
            graph.add_messages(session, messages)

    def test_refuses_an_unknown_session(self, graph: GraphCheckpointStore) -> None:
        with pytest.raises(SessionNotFound):
            graph.add_message("unknown", role="user")
        with pytest.raises(SessionNotFound):
            graph.get_messages("unknown")

    def test_refuses_a_stale_fencing_token(
        self, graph: GraphCheckpointStore, session: str, committed_db: CommittedDatabase
    ) -> None:
        locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
        old = locks.acquire(session)
        assert old is not None
        old.release()
        new = locks.acquire(session)
        assert new is not None
        with pytest.raises(FencedOutError):
            graph.add_message(session, role="user", fencing_token=old.fencing_token)
        with pytest.raises(FencedOutError):
            graph.save_checkpoint(session, step=0, fencing_token=old.fencing_token)
        assert graph.get_messages(session) == []
        graph.add_message(session, role="user", fencing_token=new.fencing_token)
        assert graph.save_checkpoint(session, step=0, fencing_token=new.fencing_token).version == 1

    def test_moves_the_version_of_the_session_and_a_checkpoint_does_not(
        self, graph: GraphCheckpointStore, session: str, committed_db: CommittedDatabase
    ) -> None:
        store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)

        def version() -> int:
            state = store.load_state(session)
            assert state is not None
            return state.version

        graph.add_message(session, role="user")
        assert version() == 2
        graph.save_checkpoint(session, step=0)
        assert version() == 2


class TestRead:
    @pytest.fixture
    def added(self, graph: GraphCheckpointStore, session: str) -> list[StoredMessage]:
        return graph.add_messages(session, [{"role": "user", "content": str(number)} for number in range(10)])

    def test_gives_the_newest_ones_in_chronological_order(
        self, graph: GraphCheckpointStore, session: str, added: list[StoredMessage]
    ) -> None:
        assert graph.get_messages(session) == added
        assert graph.get_messages(session, limit=3) == added[-3:]
        assert graph.get_messages(session, limit=100) == added

    @pytest.mark.parametrize("by", ["id", "created_at"])
    def test_pages_backwards_lose_no_message(
        self, graph: GraphCheckpointStore, session: str, added: list[StoredMessage], by: str
    ) -> None:
        seen = graph.get_messages(session, limit=3)
        while page := graph.get_messages(session, before=getattr(seen[0], by), limit=3):
            assert len(page) <= 3
            seen = page + seen
        assert seen == added

    def test_before_the_first_there_is_nothing(
        self, graph: GraphCheckpointStore, session: str, added: list[StoredMessage]
    ) -> None:
        assert graph.get_messages(session, before=added[0].id) == []
        assert graph.get_messages(session, before=added[0].created_at) == []
        assert graph.get_messages(session, before=2**63 - 1) == added
        assert graph.get_messages(session, before=datetime(9999, 1, 1, tzinfo=UTC)) == added

    @for_each("limit", [0, -1, 1.5, "1", True])
    def test_refuses_a_bad_limit(self, graph: GraphCheckpointStore, session: str, limit: Any) -> None:
        with pytest.raises(InvalidQuery):
            graph.get_messages(session, limit=limit)

    @for_each("before", ["1", 1.5, True, -1, 2**63, datetime(2026, 1, 1)])  # noqa: DTZ001
    def test_refuses_a_bad_boundary(self, graph: GraphCheckpointStore, session: str, before: Any) -> None:
        with pytest.raises(InvalidQuery):
            graph.get_messages(session, before=before)

    @for_each("text", ["", "[1]", '{"$set":[[]]}', '{"role":', "null", "\x7f"])
    def test_one_unreadable_message_affects_that_message_alone(
        self,
        graph: GraphCheckpointStore,
        session: str,
        added: list[StoredMessage],
        committed_db: CommittedDatabase,
        text: str,
    ) -> None:
        Message.objects.using(committed_db.alias).filter(pk=added[4].id).update(payload=text)
        read = graph.get_messages(session)
        assert [message.id for message in read] == [message.id for message in added]
        assert read[:4] + read[5:] == added[:4] + added[5:]
        assert (read[4].role, read[4].created_at) == (added[4].role, added[4].created_at)
        for name in ("content", "tool_calls", "tool_results", "tokens_in", "tokens_out"):
            with pytest.raises(IntegrityFault):
                getattr(read[4], name)
        with pytest.raises(AttributeError):
            _ = read[4].unknown  # type: ignore[attr-defined]
        assert graph.add_message(session, role="user", content="more").content == "more"


async def test_async_twins_answer_alike(graph: GraphCheckpointStore, session: str) -> None:
    one = await graph.aadd_message(session, role="user", content="1")
    two = await graph.aadd_messages(session, [{"role": "tool"}])
    assert await graph.aget_messages(session) == [one, *two]
