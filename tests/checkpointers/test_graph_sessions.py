"""Sessions of the graph store."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from django.db import connections

from helix_store.checkpointers import GraphCheckpointStore
from helix_store.checkpointers.graph.types import GraphSession
from helix_store.exceptions import (
    IntegrityFault,
    InvalidCursor,
    InvalidPayload,
    InvalidQuery,
    LimitExceeded,
    SessionExists,
    SessionNotFound,
)
from helix_store.models import Checkpoint, Session
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.database.separate import execute
from tests.databases import CommittedDatabase
from tests.deployments.deployments import another_alias
from tests.invariants import broken_invariants
from tests.strategies import exact_form

TYPED: dict[Any, Any] = {
    "when": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    "price": Decimal("1.10"),
    "tuple": (1, date(2026, 1, 1)),
    "set": {1, 2},
    "id": uuid.UUID(int=7),
    "raw": b"\x00\xff",
    7: "a key that is not text",
    "$set": {"$set": ["looks like a tag"]},
    "nul": "\x00 \ud800",
}


class TestCreate:
    def test_gives_back_what_a_read_gives(self, graph: GraphCheckpointStore) -> None:
        created = graph.create_session(
            "./project", title="Scan", workspace_id="w", metadata=TYPED, session_id="s"
        )
        assert created == graph.get_session("s")
        assert (created.session_id, created.directory, created.title) == ("s", "./project", "Scan")
        assert (created.workspace_id, created.created_at) == ("w", created.updated_at)
        assert exact_form(created.metadata) == exact_form(TYPED)

    def test_without_an_id_makes_a_new_one_and_leaves_the_rest_unset(
        self, graph: GraphCheckpointStore
    ) -> None:
        session = graph.create_session("")
        assert uuid.UUID(session.session_id).version == 7
        assert (session.title, session.workspace_id, session.metadata) == (None, None, None)

    def test_what_is_returned_is_detached(self, graph: GraphCheckpointStore) -> None:
        metadata = {"list": [1]}
        session = graph.create_session("", metadata=metadata)
        metadata["list"].append(2)
        assert session.metadata == {"list": [1]}
        session.metadata["list"].append(3)
        stored = graph.get_session(session.session_id)
        assert stored is not None
        assert stored.metadata == {"list": [1]}

    def test_refuses_a_taken_id_and_never_overwrites(self, graph: GraphCheckpointStore) -> None:
        first = graph.create_session("a", session_id="s")
        with pytest.raises(SessionExists):
            graph.create_session("b", session_id="s")
        assert graph.get_session("s") == first

    @for_each(
        ("options", "error"),
        [
            ({"session_id": ""}, InvalidPayload),
            ({"session_id": "a\x00b"}, InvalidPayload),
            ({"title": "a\x00b"}, InvalidPayload),
            ({"title": 7}, InvalidPayload),
            ({"workspace_id": "w" * 256}, InvalidPayload),
            ({"metadata": ["a list"]}, InvalidPayload),
            ({"metadata": {"x": object()}}, InvalidPayload),
            ({"metadata": {"x": float("nan")}}, InvalidPayload),
            ({"metadata": {"x": "y" * (8 * 1024 * 1024)}}, LimitExceeded),
        ],
    )
    def test_refuses_bad_input_and_stores_nothing(
        self, graph: GraphCheckpointStore, options: dict[str, Any], error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            graph.create_session("", **options)
        assert list(graph.list_sessions()) == []

    @for_each("directory", [None, 7, "a\x00b"])
    def test_refuses_a_directory_that_is_not_text(self, graph: GraphCheckpointStore, directory: Any) -> None:
        with pytest.raises(InvalidPayload):
            graph.create_session(directory)


class TestSharedTables:
    def test_a_graph_session_is_a_session_of_the_state_store(
        self, graph: GraphCheckpointStore, committed_db: CommittedDatabase
    ) -> None:
        graph.create_session("dir", title="T", workspace_id="w", session_id="s")
        graph.add_message("s", role="user", content="hello")
        store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
        state = store.load_state("s")
        assert state is not None
        assert (state.agent_type, state.title, state.directory) == ("graph", "T", "dir")
        assert (state.root_session_id, state.stream_id, state.message_count) == ("s", "s", 1)
        assert store.get_messages("s").messages == [{"role": "user", "content": "hello"}]
        assert [head.session_id for head in store.list_sessions().sessions] == ["s"]
        assert broken_invariants(committed_db) == []

    def test_any_session_can_have_graph_checkpoints_but_only_graph_sessions_are_listed(
        self, graph: GraphCheckpointStore, committed_db: CommittedDatabase
    ) -> None:
        store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
        store.create_session("s", agent_type="support")
        assert graph.save_checkpoint("s", step=0).version == 1
        session = graph.get_session("s")
        assert session is not None
        assert session.metadata is None
        assert list(graph.list_sessions()) == []

    def test_another_tenant_sees_nothing(
        self, graph: GraphCheckpointStore, committed_db: CommittedDatabase
    ) -> None:
        graph.create_session("", session_id="s")
        checkpoint = graph.save_checkpoint("s", step=0)
        other = GraphCheckpointStore(committed_db.alias, tenant=committed_db.tenant + "-other")
        assert other.get_session("s") is None
        assert other.get_checkpoint(checkpoint.checkpoint_id) is None
        assert other.get_latest_checkpoint("s") is None
        assert other.get_session_summary("s") is None
        assert other.continue_latest() is None
        assert other.delete_session("s") == 0
        for call in (
            lambda: other.add_message("s", role="user"),
            lambda: other.get_messages("s"),
            lambda: other.save_checkpoint("s", step=0),
            lambda: other.list_checkpoints("s"),
            lambda: other.update_session("s", title="t"),
        ):
            with pytest.raises(SessionNotFound):
                call()


class TestUpdate:
    def test_replaces_what_is_given_and_keeps_the_rest(self, graph: GraphCheckpointStore) -> None:
        created = graph.create_session("d", title="t", workspace_id="w", metadata={"a": 1}, session_id="s")
        updated = graph.update_session("s", title="new", metadata={"b": (2,)})
        assert updated == graph.get_session("s")
        assert (updated.title, updated.metadata) == ("new", {"b": (2,)})
        assert (updated.directory, updated.workspace_id) == ("d", "w")
        assert updated.updated_at > created.updated_at

    def test_none_clears_and_an_empty_text_does_not(self, graph: GraphCheckpointStore) -> None:
        graph.create_session("d", title="t", workspace_id="w", metadata={"a": 1}, session_id="s")
        empty = graph.update_session("s", title="", workspace_id="", metadata={})
        assert (empty.title, empty.workspace_id, empty.metadata) == ("", "", {})
        cleared = graph.update_session("s", title=None, workspace_id=None, metadata=None, directory=None)
        assert (cleared.title, cleared.workspace_id, cleared.metadata) == (None, None, None)
        assert cleared.directory == ""

    def test_refuses_an_unknown_session_and_bad_input(self, graph: GraphCheckpointStore) -> None:
        with pytest.raises(SessionNotFound):
            graph.update_session("unknown", title="t")
        session = graph.create_session("", session_id="s")
        with pytest.raises(InvalidPayload):
            graph.update_session("s", title="t", metadata=[1])  # type: ignore[arg-type]
        assert graph.get_session("s") == session


class TestDelete:
    def test_takes_everything_along(
        self, graph: GraphCheckpointStore, committed_db: CommittedDatabase
    ) -> None:
        graph.create_session("", session_id="s")
        graph.add_message("s", role="user", content="x")
        checkpoint = graph.save_checkpoint("s", step=0)
        assert graph.delete_session("s") == 1
        assert graph.delete_session("s") == 0
        assert graph.get_session("s") is None
        assert graph.get_checkpoint(checkpoint.checkpoint_id) is None


class TestList:
    def test_is_ordered_by_the_last_write_and_pages_without_gaps(self, graph: GraphCheckpointStore) -> None:
        for number in range(7):
            graph.create_session("", session_id=f"s{number}")
        graph.add_message("s2", role="user", content="x")
        graph.save_checkpoint("s4", step=0)
        expected = ["s4", "s2", "s6", "s5", "s3", "s1", "s0"]
        assert [session.session_id for session in graph.list_sessions()] == expected
        seen: list[str] = []
        cursor = None
        while True:
            page = graph.list_sessions(limit=3, cursor=cursor)
            seen += [session.session_id for session in page.items]
            cursor = page.next_cursor
            if not page.has_more:
                break
        assert seen == expected
        assert cursor is None

    def test_an_empty_workspace_id_is_a_filter_and_none_means_without_one(
        self, graph: GraphCheckpointStore
    ) -> None:
        for name, workspace_id in [("none", None), ("empty", ""), ("w", "w")]:
            graph.create_session("", session_id=name, workspace_id=workspace_id)
        assert [session.session_id for session in graph.list_sessions("")] == ["empty"]
        assert [session.session_id for session in graph.list_sessions(None)] == ["none"]
        assert [session.session_id for session in graph.list_sessions("w")] == ["w"]
        assert len(graph.list_sessions()) == 3

    @for_each("limit", [0, -1, 1.5, "1", True])
    def test_refuses_a_bad_limit(self, graph: GraphCheckpointStore, limit: Any) -> None:
        with pytest.raises(InvalidQuery):
            graph.list_sessions(limit=limit)

    def test_refuses_the_cursor_of_another_query(self, graph: GraphCheckpointStore) -> None:
        for _ in range(3):
            graph.create_session("", workspace_id="w")
        cursor = graph.list_sessions(limit=1).next_cursor
        with pytest.raises(InvalidCursor):
            graph.list_sessions("w", cursor=cursor)
        with pytest.raises(InvalidCursor):
            graph.search_sessions("x", cursor=cursor)
        with pytest.raises(InvalidCursor):
            graph.list_sessions(cursor="forged")

    def test_one_unreadable_session_affects_that_session_alone(
        self, graph: GraphCheckpointStore, committed_db: CommittedDatabase
    ) -> None:
        for name in ("good", "bad"):
            graph.create_session("", session_id=name, metadata={"x": 1})
        rows = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
        rows.filter(session_id="bad").update(typed_metadata='{"$python":"os.system"}')
        with pytest.raises(IntegrityFault):
            graph.get_session("bad")
        listed: dict[str, GraphSession] = {session.session_id: session for session in graph.list_sessions()}
        assert listed["good"].metadata == {"x": 1}
        assert "bad" in repr(listed["bad"])
        with pytest.raises(IntegrityFault):
            _ = listed["bad"].metadata
        assert graph.update_session("bad", metadata={"x": 2}).metadata == {"x": 2}


class TestSearch:
    def test_finds_title_directory_and_id_in_either_case(self, graph: GraphCheckpointStore) -> None:
        graph.create_session("/home/Alpha", session_id="one")
        graph.create_session("", title="the ALPHA plan", session_id="two", workspace_id="w")
        graph.create_session("", session_id="alpha-3")
        graph.create_session("", title="beta", session_id="four")
        found = {session.session_id for session in graph.search_sessions("alpha")}
        assert found == {"one", "two", "alpha-3"}
        assert [session.session_id for session in graph.search_sessions("alpha", "w")] == ["two"]

    def test_finds_other_letters_than_ascii_where_the_locale_knows_their_cases(
        self, postgres_db: CommittedDatabase
    ) -> None:
        if postgres_db.connection.pg_version < 170_000:  # type: ignore[attr-defined]  # PostgreSQL's own
            pytest.skip("PostgreSQL has had a locale of its own since version 17")
        name = f"locale_{uuid.uuid4().hex}"
        execute(
            postgres_db.connection,
            f"CREATE DATABASE {name} TEMPLATE template0 LOCALE_PROVIDER builtin BUILTIN_LOCALE 'C.UTF-8'",
        )
        settings = {**connections.settings[postgres_db.alias], "NAME": name}
        with another_alias("locale", **settings) as alias:
            with connections[alias].schema_editor() as editor:
                for model in (Session, Checkpoint):
                    editor.create_model(model)
            graph = GraphCheckpointStore(alias)
            graph.create_session("/CAFÉ", session_id="one")
            graph.create_session("", title="Café", session_id="two")
            graph.create_session("", session_id="café")
            assert {session.session_id for session in graph.search_sessions("Fé")} == {"one", "two", "café"}
        execute(postgres_db.connection, f"DROP DATABASE {name}")

    def test_takes_wildcards_and_quotes_literally(self, graph: GraphCheckpointStore) -> None:
        graph.create_session("", title="100%_'x'\\", session_id="special")
        graph.create_session("", title="plain", session_id="plain")
        for text in ("%", "_", "'", "\\"):
            assert [session.session_id for session in graph.search_sessions(text)] == ["special"]

    def test_pages(self, graph: GraphCheckpointStore) -> None:
        for number in range(5):
            graph.create_session("", title="x", session_id=f"s{number}")
        first = graph.search_sessions("X", limit=3)
        rest = graph.search_sessions("X", limit=3, cursor=first.next_cursor)
        assert [session.session_id for session in [*first, *rest]] == ["s4", "s3", "s2", "s1", "s0"]

    def test_refuses_an_empty_text(self, graph: GraphCheckpointStore) -> None:
        with pytest.raises(InvalidQuery):
            graph.search_sessions("")


class TestSummaries:
    def test_hold_counts_and_the_last_message(self, graph: GraphCheckpointStore) -> None:
        graph.create_session("", session_id="full")
        for number in range(3):
            graph.add_message("full", role="user", content=str(number))
            graph.save_checkpoint("full", step=number)
        graph.create_session("", session_id="empty")
        full = graph.get_session_summary("full")
        assert full is not None
        assert (full.message_count, full.checkpoint_count) == (3, 3)
        assert full.last_message is not None
        assert (full.last_message.content, full.last_message_at) == ("2", full.last_message.created_at)
        assert full.duration == full.session.updated_at - full.session.created_at
        empty = graph.get_session_summary("empty")
        assert empty is not None
        assert (empty.message_count, empty.checkpoint_count, empty.last_message) == (0, 0, None)
        assert empty.last_message_at is None
        assert list(graph.list_session_summaries()) == [empty, full]
        page = graph.list_session_summaries(limit=1)
        assert list(graph.list_session_summaries(limit=1, cursor=page.next_cursor)) == [full]
        assert graph.get_session_summary("unknown") is None

    def test_continue_latest_gives_everything_needed_to_go_on(self, graph: GraphCheckpointStore) -> None:
        graph.create_session("", session_id="other", workspace_id="other")
        graph.create_session("", session_id="s", workspace_id="w")
        graph.add_message("s", role="user", content="one")
        checkpoint = graph.save_checkpoint("s", step=0)
        graph.add_message("s", role="user", content="two")
        graph.create_session("", session_id="newest", workspace_id="x")
        found = graph.continue_latest("w")
        assert found is not None
        assert found.session == graph.get_session("s")
        assert [message.content for message in found.messages] == ["one", "two"]
        assert found.checkpoint == checkpoint
        newest = graph.continue_latest()
        assert newest is not None
        assert (newest.session.session_id, newest.messages, newest.checkpoint) == ("newest", [], None)
        assert graph.continue_latest("unknown") is None

    @pytest.mark.parametrize("sessions", [1, 30])
    def test_cost_a_fixed_number_of_queries(
        self,
        graph: GraphCheckpointStore,
        statements: Callable[[Callable[[], Any]], list[str]],
        sessions: int,
    ) -> None:
        for number in range(sessions):
            graph.create_session("", session_id=f"s{number}", title="x")
            graph.add_messages(f"s{number}", [{"role": "user", "content": "hello"}] * sessions)
            graph.save_checkpoint(f"s{number}", step=0)
        assert len(statements(graph.list_sessions)) == 1
        assert len(statements(lambda: graph.search_sessions("x"))) == 1
        assert len(statements(graph.continue_latest)) == 3
        assert len(statements(lambda: graph.get_session_summary("s0"))) == 3
        assert len(statements(graph.list_session_summaries)) == 3


async def test_async_twins_answer_alike(graph: GraphCheckpointStore) -> None:
    created = await graph.acreate_session("d", session_id="s")
    assert await graph.aget_session("s") == created
    updated = await graph.aupdate_session("s", title="t")
    assert list(await graph.alist_sessions()) == [updated]
    assert list(await graph.asearch_sessions("t")) == [updated]
    found = await graph.acontinue_latest()
    assert found is not None
    assert found.session == updated
    summary = await graph.aget_session_summary("s")
    assert list(await graph.alist_session_summaries()) == [summary]
    assert await graph.adelete_session("s") == 1
