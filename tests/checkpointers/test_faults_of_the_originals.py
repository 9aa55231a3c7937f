"""Every fault of the original stores that concerns what we offer: red on a naive variant, green on ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helix_store.checkpointers import GraphCheckpointStore, InMemorySnapshotCheckpointer
from helix_store.core import moments
from helix_store.core.ids import IdGenerator
from helix_store.exceptions import (
    CheckpointNotFound,
    ConflictError,
    InvalidPayload,
    InvalidQuery,
)
from tests.cells import for_each
from tests.checkpointers.conftest import Snapshots
from tests.checkpointers.originals import NaiveGraphStore, NaiveSnapshots, corrupt
from tests.databases import CommittedDatabase
from tests.processes import run_in_threads
from tests.strategies import exact_form

MakeSnapshots = Callable[..., Snapshots]


def snapshot(number: int = 0) -> dict[str, Any]:
    return {"version": 1, "number": number}


class TestSnapshotFaults:
    def test_the_older_of_two_puts_of_one_millisecond_came_back(self, make_snapshots: MakeSnapshots) -> None:
        naive = NaiveSnapshots(now=lambda: 1_800_000_000.0)
        ours = make_snapshots(id_factory=lambda: IdGenerator(lambda: 1_800_000_000 * 10**9)())
        wrong = 0
        for number in range(60):
            naive.put("t", snapshot(number))
            ours.put("t", snapshot(number))
            wrong += naive.get("t") != snapshot(number)
            assert ours.get("t") == snapshot(number)
        assert wrong > 10

    def test_a_clock_that_stepped_back_hid_the_newest(self, make_snapshots: MakeSnapshots) -> None:
        moments = [2_000_000_000, 1_000_000_000]
        naive = NaiveSnapshots(now=iter(moments).__next__)
        clock = iter(moments)
        ours = make_snapshots(id_factory=lambda: IdGenerator(lambda: next(clock) * 10**9)())
        for number in range(2):
            naive.put("t", snapshot(number))
            ours.put("t", snapshot(number))
        assert naive.get("t") == snapshot(0)
        assert ours.get("t") == snapshot(1)

    def test_one_snapshot_more_than_the_cap_stayed(self, make_snapshots: MakeSnapshots) -> None:
        moments = iter(range(1_000, 2_000))
        naive, ours = NaiveSnapshots(3, lambda: next(moments)), make_snapshots(max_checkpoints_per_thread=3)
        for number in range(6):
            naive.put("t", snapshot(number))
            ours.put("t", snapshot(number))
        assert len(naive.ids("t")) == 4
        assert len(ours.list("t")) == 3

    @for_each("cap", [0, 2.5])
    def test_a_cap_that_makes_no_sense_was_taken(self, make_snapshots: MakeSnapshots, cap: Any) -> None:
        naive = NaiveSnapshots(cap)
        naive.put("t", snapshot())
        assert len(naive.ids("t")) == 1
        with pytest.raises(InvalidQuery):
            make_snapshots(max_checkpoints_per_thread=cap)

    def test_an_empty_id_meant_the_latest_or_the_whole_thread(self, make_snapshots: MakeSnapshots) -> None:
        naive, ours = NaiveSnapshots(), make_snapshots()
        naive.put("t", snapshot())
        ours.put("t", snapshot())
        assert naive.get("t", "") == snapshot()
        naive.delete("t", "")
        assert naive.get("t") is None
        for call in (ours.get, ours.delete):
            with pytest.raises(InvalidPayload):
                call("t", "")
        assert ours.get("t") == snapshot()

    def test_an_empty_thread_id_was_taken(self, make_snapshots: MakeSnapshots) -> None:
        assert NaiveSnapshots().put("", snapshot())
        with pytest.raises(InvalidPayload):
            make_snapshots().put("", snapshot())

    def test_key_order_was_lost(self, make_snapshots: MakeSnapshots) -> None:
        value = {"version": 1, "zz": 1, "a": 2, "bb": 3}
        naive, ours = NaiveSnapshots(), make_snapshots()
        naive.put("t", value)
        ours.put("t", value)
        assert exact_form(naive.get("t")) != exact_form(value)
        assert exact_form(ours.get("t")) == exact_form(value)

    def test_values_without_a_json_form_were_changed_silently(self, make_snapshots: MakeSnapshots) -> None:
        value = {"version": 1, "when": moments.now(), "set": {1}}
        naive, ours = NaiveSnapshots(), make_snapshots()
        naive.put("t", value)
        assert naive.get("t") != value
        with pytest.raises(InvalidPayload):
            ours.put("t", value)
        assert ours.get("t") is None

    @for_each("text", ["\x00", "\ud800", "\udc00\ud800"])
    def test_nul_and_lone_surrogates_were_refused(self, make_snapshots: MakeSnapshots, text: str) -> None:
        with pytest.raises(UnicodeEncodeError) if text != "\x00" else pytest.raises(ValueError):
            _as_jsonb(text)
        ours = make_snapshots()
        ours.put("t", {"version": 1, text: text})
        assert ours.get("t") == {"version": 1, text: text}

    @for_each("version", [None, 0, -1, "2"])
    def test_a_snapshot_of_no_known_version_was_taken(
        self, make_snapshots: MakeSnapshots, version: Any
    ) -> None:
        assert NaiveSnapshots().put("t", {"version": version})
        with pytest.raises(InvalidPayload):
            make_snapshots().put("t", {"version": version})

    def test_two_resumes_ran_the_side_effect_twice(self, make_snapshots: MakeSnapshots) -> None:
        naive, ours = NaiveSnapshots(), make_snapshots()
        naive.put("t", snapshot())
        ours.put("t", snapshot())
        effects: dict[str, int] = {"naive": 0, "ours": 0}

        def resume_naively() -> None:
            if naive.get("t") is not None:
                effects["naive"] += 1

        def resume() -> None:
            claim = ours.claim("t", owner="worker")
            if claim is not None:
                effects["ours"] += 1
                claim.done()

        for _ in range(2):
            resume_naively()
            resume()
        assert effects == {"naive": 2, "ours": 1}

    def test_threads_with_a_separator_in_their_id_shared_keys(self, make_snapshots: MakeSnapshots) -> None:
        assert ":".join(["a:b", "c"]) == ":".join(["a", "b:c"])
        ours = make_snapshots()
        ours.put("a:b", snapshot(1))
        ours.put("a", snapshot(2))
        assert (ours.get("a:b"), ours.get("a")) == (snapshot(1), snapshot(2))

    def test_lists_could_not_be_paged(self, make_snapshots: MakeSnapshots) -> None:
        assert "before" not in NaiveSnapshots.ids.__code__.co_varnames
        ours = make_snapshots()
        ids = [ours.put("t", snapshot(number)) for number in range(4)]
        first = ours.list("t", limit=2)
        assert [meta.id for meta in ours.list("t", before=first[-1].id)] == [ids[1], ids[0]]

    def test_erasure_gave_no_proof(self, make_snapshots: MakeSnapshots) -> None:
        naive, ours = NaiveSnapshots(), make_snapshots()
        for store in (naive, ours):
            store.put("a", snapshot())
        assert naive.delete("a") is None  # type: ignore[func-returns-value]
        assert ours.delete_threads(["a", "b"]) == {"a": 1, "b": 0}

    def test_a_function_in_a_snapshot_was_dropped_by_one_store_and_refused_by_another(self) -> None:
        with pytest.raises(InvalidPayload):
            InMemorySnapshotCheckpointer().put("t", {"version": 1, "call": print})


def _as_jsonb(text: str) -> str:
    """What a jsonb column takes."""
    if "\x00" in text:
        raise ValueError("unsupported Unicode escape sequence")
    return text.encode().decode()


class TestGraphFaults:
    def test_parallel_callers_got_the_message_of_another_caller(
        self, graph: GraphCheckpointStore, committed_db: CommittedDatabase
    ) -> None:
        naive = NaiveGraphStore()
        naive.between_insert_and_read_back = lambda: naive.messages.append(
            {"id": len(naive.messages) + 1, "session": "s", "created_at": 0, "content": "another caller's"}
        )
        assert naive.add_message("s", content="mine")["content"] == "another caller's"
        graph.create_session("", session_id="s")

        def add(number: int) -> str | None:
            own = GraphCheckpointStore(committed_db.alias, tenant=committed_db.tenant)
            return own.add_message("s", role="user", content=str(number)).content

        outcomes = run_in_threads(add, [(number,) for number in range(8)])
        assert [outcome.unwrap() for outcome in outcomes] == [str(number) for number in range(8)]

    def test_one_malformed_message_made_the_whole_session_unreadable(
        self, graph: GraphCheckpointStore
    ) -> None:
        naive = NaiveGraphStore()
        naive.add_message("s", content="good")
        naive.add_message("s", tool_calls="malformed")
        with pytest.raises(corrupt):
            naive.get_messages("s")
        graph.create_session("", session_id="s")
        graph.add_message("s", role="user", content="good")
        graph.add_message("s", role="user", tool_calls="malformed")
        assert [message.tool_calls for message in graph.get_messages("s")] == [None, "malformed"]

    def test_messages_of_one_millisecond_were_lost_at_a_page_boundary(
        self, graph: GraphCheckpointStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        naive = NaiveGraphStore(now=lambda: 1_800_000_000_000)
        stopped = moments.now()
        monkeypatch.setattr(moments, "now", lambda: stopped)
        graph.create_session("", session_id="s")
        for number in range(4):
            naive.add_message("s", content=str(number))
            graph.add_message("s", role="user", content=str(number))
        newest = naive.get_messages("s", limit=2)
        assert naive.get_messages("s", before=newest[0]["created_at"], limit=2) == []
        for by in ("id", "created_at"):
            page = graph.get_messages("s", limit=2)
            rest = graph.get_messages("s", before=getattr(page[0], by), limit=2)
            assert [message.content for message in rest + page] == ["0", "1", "2", "3"]

    def test_a_page_before_a_time_was_the_oldest_and_not_the_newest(
        self, graph: GraphCheckpointStore
    ) -> None:
        moments = iter(range(100))
        naive = NaiveGraphStore(now=lambda: next(moments))
        graph.create_session("", session_id="s")
        for number in range(5):
            naive.add_message("s", content=str(number))
            last = graph.add_message("s", role="user", content=str(number))
        assert [row["content"] for row in naive.get_messages("s", before=4, limit=2)] == ["0", "1"]
        page = graph.get_messages("s", before=last.created_at, limit=2)
        assert [message.content for message in page] == ["2", "3"]

    def test_a_limit_of_zero_was_everything(self, graph: GraphCheckpointStore) -> None:
        naive = NaiveGraphStore()
        naive.add_message("s", content="x")
        assert len(naive.get_messages("s", limit=0)) == 1
        graph.create_session("", session_id="s")
        with pytest.raises(InvalidQuery):
            graph.get_messages("s", limit=0)

    def test_roles_and_token_counts_were_not_checked(self, graph: GraphCheckpointStore) -> None:
        assert NaiveGraphStore().add_message("s", role="robot", tokens_in=-1.5)["role"] == "robot"
        graph.create_session("", session_id="s")
        for bad in ({"role": "robot"}, {"role": "user", "tokens_in": -1}, {"role": "user", "tokens_in": 1.5}):
            with pytest.raises(InvalidPayload):
                graph.add_message("s", **bad)

    def test_a_title_could_not_be_removed(self, graph: GraphCheckpointStore) -> None:
        naive = NaiveGraphStore()
        naive.create_session("s", title="t")
        naive.update_session("s", title=None)
        assert naive.sessions["s"]["title"] == "t"
        graph.create_session("", session_id="s", title="t")
        assert graph.update_session("s", title=None).title is None

    def test_an_empty_workspace_id_listed_every_tenants_sessions(self, graph: GraphCheckpointStore) -> None:
        naive = NaiveGraphStore()
        naive.create_session("s", workspace_id="other")
        graph.create_session("", session_id="s", workspace_id="other")
        assert naive.list_sessions("") == ["s"]
        assert list(graph.list_sessions("")) == []

    def test_the_latest_was_the_highest_step_and_a_second_run_collided(
        self, graph: GraphCheckpointStore
    ) -> None:
        naive = NaiveGraphStore()
        graph.create_session("", session_id="s")
        for version, step in [(1, 0), (2, 1), (3, 2), (4, 3), (5, 1)]:
            naive.save_checkpoint("s", version=version, step=step)
            graph.save_checkpoint("s", step=step)
        assert naive.get_latest_checkpoint("s")["version"] == 4
        assert naive.next_version("s") == 5
        latest = graph.get_latest_checkpoint("s")
        assert latest is not None
        assert (latest.version, latest.step) == (5, 1)
        assert graph.save_checkpoint("s", step=1).version == 6

    def test_a_taken_version_was_no_typed_conflict(self, graph: GraphCheckpointStore) -> None:
        naive = NaiveGraphStore()
        for _ in range(2):
            assert naive.save_checkpoint("s", version=1, step=0)["version"] == 1
        graph.create_session("", session_id="s")
        graph.save_checkpoint("s", version=1, step=0)
        with pytest.raises(ConflictError):
            graph.save_checkpoint("s", version=1, step=0)

    @for_each("status", ["pending", "running", "skipped"])
    def test_a_skipped_or_pending_node_could_not_be_resumed(
        self, graph: GraphCheckpointStore, status: str
    ) -> None:
        naive = NaiveGraphStore()
        results = {"a": {"status": status}}
        naive.save_checkpoint("s", version=1, step=0, node_results=results)
        with pytest.raises(corrupt):
            naive.get_latest_checkpoint("s")
        graph.create_session("", session_id="s")
        saved = graph.save_checkpoint("s", step=0, node_results=results)
        assert saved.node_results == results
        assert graph.get_latest_checkpoint("s") == saved

    def test_a_node_of_no_known_status_was_stored_and_made_the_session_unreadable(
        self, graph: GraphCheckpointStore
    ) -> None:
        naive = NaiveGraphStore()
        naive.save_checkpoint("s", version=1, step=0, node_results={"a": {"output": 1}})
        with pytest.raises(corrupt):
            naive.get_latest_checkpoint("s")
        graph.create_session("", session_id="s")
        with pytest.raises(InvalidPayload):
            graph.save_checkpoint("s", step=0, node_results={"a": {"output": 1}})
        assert graph.get_latest_checkpoint("s") is None

    def test_what_a_save_returned_was_not_what_was_stored(self, graph: GraphCheckpointStore) -> None:
        given: dict[str, Any] = {"a": {"status": "completed"}}
        naive = NaiveGraphStore()
        assert naive.save_checkpoint("s", version=1, step=0, node_results=given)["node_results"] is given
        graph.create_session("", session_id="s")
        saved = graph.save_checkpoint("s", step=0, node_results=given)
        given["a"]["status"] = "failed"
        assert saved.node_results == {"a": {"status": "completed"}}
        assert saved == graph.get_checkpoint(saved.checkpoint_id)

    def test_a_fork_lost_the_times_and_took_messages_from_after_the_checkpoint(
        self, graph: GraphCheckpointStore
    ) -> None:
        moments = iter([1, 2, 2, 2, 9, 9, 9, 9, 9])
        naive = NaiveGraphStore(now=lambda: next(moments))
        graph.create_session("", session_id="s")
        originals = []
        for content in ("one", "two"):
            naive.add_message("s", content=content)
            originals.append(graph.add_message("s", role="user", content=content))
        naive_checkpoint = naive.save_checkpoint("s", version=1, step=0)
        checkpoint = graph.save_checkpoint("s", step=0)
        naive.add_message("s", content="after")
        graph.add_message("s", role="user", content="after")
        naive.fork(naive_checkpoint, "fork")
        assert [row["content"] for row in naive.get_messages("fork")] == ["one", "two", "after"]
        assert {row["created_at"] for row in naive.get_messages("fork")} == {9}
        copied = graph.get_messages(graph.fork(checkpoint.checkpoint_id).session_id)
        assert [(message.content, message.created_at) for message in copied] == [
            (message.content, message.created_at) for message in originals
        ]

    def test_a_fork_had_one_of_fifty_checkpoints(self, graph: GraphCheckpointStore) -> None:
        naive = NaiveGraphStore()
        graph.create_session("", session_id="s")
        for number in range(50):
            last = naive.save_checkpoint("s", version=number + 1, step=number)
            saved = graph.save_checkpoint("s", step=number)
        naive.fork(last, "fork")
        assert sum(row["session"] == "fork" for row in naive.checkpoints) == 1
        fork = graph.fork(saved.checkpoint_id, with_history=True)
        assert len(graph.list_checkpoints(fork.session_id, limit=200)) == 50

    def test_a_parent_that_does_not_exist_was_taken(self, graph: GraphCheckpointStore) -> None:
        assert NaiveGraphStore().save_checkpoint("s", version=1, step=0, parent_id="dangling")
        graph.create_session("", session_id="s")
        with pytest.raises(CheckpointNotFound):
            graph.save_checkpoint("s", step=0, parent_id="dangling")

    def test_a_checkpoint_did_not_count_as_a_write_to_its_session(self, graph: GraphCheckpointStore) -> None:
        naive = NaiveGraphStore()
        naive.create_session("s", updated_at=1)
        naive.save_checkpoint("s", version=1, step=0)
        assert naive.sessions["s"]["updated_at"] == 1
        before = graph.create_session("", session_id="s")
        graph.save_checkpoint("s", step=0)
        after = graph.get_session("s")
        assert after is not None
        assert after.updated_at > before.updated_at
