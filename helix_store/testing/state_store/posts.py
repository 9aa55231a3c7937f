"""Posts: messages on their way into a session."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from asgiref.sync import async_to_sync

from helix_store.core.limits import Limits
from helix_store.core.posts import DuePost, PostState, PostStore
from helix_store.core.types import SessionStatus
from helix_store.exceptions import (
    FencedOutError,
    IdempotencyConflict,
    InvalidCursor,
    InvalidPayload,
    InvalidQuery,
    LimitExceeded,
    SessionEnded,
    SessionNotFound,
    StaleStateError,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.approvals import approve, forge_answer
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import contents, loaded, message, messages
from helix_store.testing.state_store.tool_calls import APPROVE, ASK

__all__ = ["PostContract"]

ALL: tuple[PostState, ...] = ("waiting", "received", "withdrawn")


def _in_an_hour() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)


def _texts(store: PostStore, session_id: str) -> list[Any]:
    return store.get_messages(session_id).messages


class PostContract(StoreTests):
    """Tests for `post_message` and the other calls for posts, for a store that has them."""

    @pytest.fixture
    def store(self) -> PostStore:
        return cast(PostStore, self.make_store())

    # Posting

    def test_a_post_waits_and_changes_neither_history_nor_state(
        self, store: PostStore, session_id: str
    ) -> None:
        before = contents(store, session_id)
        post = store.post_message(session_id, message("hello"), author="ada")
        assert contents(store, session_id) == before
        assert (post.session_id, post.sequence, post.message) == (session_id, 1, message("hello"))
        assert (post.author, post.key, post.state) == ("ada", None, "waiting")
        assert (post.not_before, post.received_at, post.position) == (None, None, None)
        assert post.posted_at.utcoffset() == timedelta(0)
        assert store.list_posts(session_id).items == [post]

    def test_sequences_count_from_one_in_each_session(self, store: PostStore, session_id: str) -> None:
        other = store.create_session(agent_type="agent").session_id
        posts = [store.post_message(session_id, each) for each in messages(3)]
        assert [post.sequence for post in posts] == [1, 2, 3]
        assert len({post.post_id for post in posts}) == 3
        assert store.post_message(other, message("x")).sequence == 1

    def test_concurrent_posts_get_different_sequences(self, store: PostStore, session_id: str) -> None:
        posts = self.at_once(*(lambda: store.post_message(session_id, message("x")) for _ in range(4)))
        assert sorted(post.sequence for post in posts if not isinstance(post, Exception)) == [1, 2, 3, 4]

    @table("bad", [{}, {"role": 7}, "text", None, {"role": "user", "content": float("nan")}], shared=True)
    def test_a_post_is_a_message(self, store: PostStore, session_id: str, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.post_message(session_id, bad)

    @table(
        "arguments",
        [
            {"key": ""},
            {"key": 7},
            {"author": ""},
            {"author": 1.5},
            {"author": "user:3"},
            {"not_before": datetime(2030, 1, 1)},  # noqa: DTZ001  a time without a zone is the point
            {"not_before": 1_900_000_000},
            {"not_before": "tomorrow"},
        ],
        shared=True,
    )
    def test_arguments_are_checked_before_anything_is_read(
        self, store: PostStore, session_id: str, arguments: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.post_message(session_id, message("x"), **arguments)

    def test_a_post_is_as_long_as_a_message_may_be(self) -> None:
        store = cast(PostStore, self.make_store(limits=Limits(max_message_bytes=50)))
        session_id = store.create_session(agent_type="agent").session_id
        with pytest.raises(LimitExceeded):
            store.post_message(session_id, message("x" * 50))

    def test_so_many_posts_may_wait(self) -> None:
        store = cast(PostStore, self.make_store(limits=Limits(max_waiting_posts=2)))
        session_id = store.create_session(agent_type="agent").session_id
        first = store.post_message(session_id, message("1"), key="first")
        store.post_message(session_id, message("2"))
        with pytest.raises(LimitExceeded) as error:
            store.post_message(session_id, message("3"))
        assert (error.value.name, error.value.limit) == ("max_waiting_posts", 2)
        assert store.post_message(session_id, message("1"), key="first") == first
        store.receive_posts(session_id, limit=1)
        assert store.post_message(session_id, message("3")).sequence == 3

    def test_an_ended_session_takes_no_posts(self, store: PostStore, session_id: str) -> None:
        store.update_status(session_id, "completed")
        with pytest.raises(SessionEnded) as error:
            store.post_message(session_id, message("x"))
        assert (error.value.session_id, error.value.status) == (session_id, "completed")
        assert store.list_posts(session_id, states=ALL).items == []

    def test_a_paused_session_takes_posts(self, store: PostStore, session_id: str) -> None:
        store.update_status(session_id, "paused")
        assert store.post_message(session_id, message("x")).state == "waiting"

    def test_every_call_refuses_an_unknown_session(self, store: PostStore) -> None:
        for call in (
            lambda: store.post_message("nobody", message("x")),
            lambda: store.list_posts("nobody"),
            lambda: store.withdraw_post("nobody", "post"),
            lambda: store.receive_posts("nobody"),
        ):
            with pytest.raises(SessionNotFound):
                call()

    # Keys

    def test_a_repeat_under_a_key_returns_the_first_post(self, store: PostStore, session_id: str) -> None:
        at = _in_an_hour()
        given: dict[str, Any] = {"key": "k", "author": "ada", "not_before": at}
        post = store.post_message(session_id, {"role": "user", "content": "x"}, **given)
        again = store.post_message(session_id, {"content": "x", "role": "user"}, **given)
        assert again == post
        assert post.not_before == at
        assert store.post_message(session_id, message("other")).sequence == 2

    def test_a_repeat_shows_the_post_as_it_is_now(self, store: PostStore, session_id: str) -> None:
        post = store.post_message(session_id, message("x"), key="k")
        store.receive_posts(session_id)
        store.update_status(session_id, "completed")
        again = store.post_message(session_id, message("x"), key="k")
        assert replace(again, received_at=None) == replace(post, message=None, state="received", position=0)

    @table("other", [{"message": message("y")}, {"author": "bob"}, {"not_before": 1_900_000_000_000}])
    def test_anything_else_under_a_key_is_a_conflict(
        self, store: PostStore, session_id: str, other: dict[str, Any]
    ) -> None:
        store.post_message(session_id, message("x"), key="k")
        store.receive_posts(session_id)
        with pytest.raises(IdempotencyConflict):
            store.post_message(session_id, **{"message": message("x"), "key": "k", **other})

    def test_concurrent_repeats_store_one_post(self, store: PostStore, session_id: str) -> None:
        posts = self.at_once(
            *(lambda: store.post_message(session_id, message("x"), key="k") for _ in range(4))
        )
        assert posts == [posts[0]] * 4
        assert len(store.list_posts(session_id).items) == 1

    # Listing

    def test_posts_are_listed_by_state_in_pages(self, store: PostStore, session_id: str) -> None:
        posts = [store.post_message(session_id, each) for each in messages(5)]
        store.withdraw_post(session_id, posts[1].post_id)
        store.receive_posts(session_id, limit=1)
        assert [post.sequence for post in store.list_posts(session_id, states=["received"])] == [1]
        assert [post.sequence for post in store.list_posts(session_id, states=["withdrawn"])] == [2]
        page = store.list_posts(session_id, limit=2)
        assert [post.sequence for post in page] == [3, 4]
        rest = store.list_posts(session_id, limit=2, cursor=page.next_cursor)
        assert ([post.sequence for post in rest], rest.next_cursor) == ([5], None)
        assert len(store.list_posts(session_id, states=ALL)) == 5

    def test_a_cursor_belongs_to_its_session_and_states(self, store: PostStore, session_id: str) -> None:
        other = store.create_session(agent_type="agent").session_id
        for each in messages(2):
            store.post_message(session_id, each)
        cursor = store.list_posts(session_id, limit=1).next_cursor
        changes: tuple[dict[str, Any], ...] = ({"session_id": other}, {"states": ALL}, {"cursor": "x"})
        for change in changes:
            with pytest.raises(InvalidCursor):
                store.list_posts(**{"session_id": session_id, "cursor": cursor, **change})

    @table("arguments", [{"states": ["lost"]}, {"states": "waiting"}, {"limit": 0}], shared=True)
    def test_a_list_of_nothing_that_exists_is_refused(
        self, store: PostStore, session_id: str, arguments: dict[str, Any]
    ) -> None:
        with pytest.raises(InvalidQuery):
            store.list_posts(session_id, **arguments)

    # Withdrawing

    def test_a_waiting_post_can_be_withdrawn_once(self, store: PostStore, session_id: str) -> None:
        post = store.post_message(session_id, message("x"), key="k")
        assert store.withdraw_post(session_id, post.post_id)
        assert not store.withdraw_post(session_id, post.post_id)
        assert not store.withdraw_post(session_id, "unknown")
        assert store.receive_posts(session_id) == []
        expected = replace(post, message=None, state="withdrawn")
        assert store.list_posts(session_id, states=ALL).items == [expected]

    def test_of_a_withdrawal_and_a_reception_one_wins(self, store: PostStore, session_id: str) -> None:
        for number in range(1, 6):
            post = store.post_message(session_id, message(str(number)))
            before = store.get_message_count(session_id)
            outcomes = self.at_once(
                lambda post=post: store.withdraw_post(session_id, post.post_id),  # type: ignore[misc]
                lambda: store.receive_posts(session_id),
            )
            received = store.get_message_count(session_id) - before
            assert outcomes in ([True, []], [False, [message(str(number))]])
            assert received == (outcomes[0] is False)

    # Receiving

    def test_due_posts_move_into_the_history_in_one_version(self, store: PostStore, session_id: str) -> None:
        store.append_messages(session_id, [message("first")])
        for each in messages(2):
            store.post_message(session_id, each)
        store.post_message(session_id, message("later"), not_before=_in_an_hour())
        version = loaded(store, session_id).version
        assert store.receive_posts(session_id) == messages(2)
        state = loaded(store, session_id)
        assert (state.version, state.message_count) == (version + 1, 3)
        assert _texts(store, session_id) == [message("first"), *messages(2)]
        received = store.list_posts(session_id, states=["received"]).items
        assert [(post.message, post.position) for post in received] == [(None, 1), (None, 2)]
        assert all(post.received_at is not None for post in received)
        assert [post.message for post in store.list_posts(session_id)] == [message("later")]

    def test_posts_are_received_by_due_time_and_then_by_sequence(
        self, store: PostStore, session_id: str
    ) -> None:
        for text, not_before in (("now", None), ("early", 1_600_000_000_000), ("now too", None)):
            store.post_message(session_id, message(text), not_before=not_before)
        assert store.receive_posts(session_id, limit=2) == [message("early"), message("now")]
        assert store.receive_posts(session_id) == [message("now too")]

    def test_without_due_posts_nothing_is_written(self, store: PostStore, session_id: str) -> None:
        store.post_message(session_id, message("later"), not_before=_in_an_hour())
        before = contents(store, session_id)
        assert store.receive_posts(session_id) == []
        assert contents(store, session_id) == before

    def test_received_and_withdrawn_posts_are_not_received_again(
        self, store: PostStore, session_id: str
    ) -> None:
        store.post_message(session_id, message("received"))
        store.receive_posts(session_id)
        withdrawn = store.post_message(session_id, message("withdrawn"))
        store.withdraw_post(session_id, withdrawn.post_id)
        store.post_message(session_id, message("waiting"))
        assert store.receive_posts(session_id) == [message("waiting")]
        assert _texts(store, session_id) == [message("received"), message("waiting")]

    def test_open_tool_calls_do_not_matter_to_an_explicit_call(
        self, store: PostStore, session_id: str
    ) -> None:
        store.append_messages(session_id, [{"role": "assistant", "tool_calls": [{"id": "a"}]}])
        store.post_message(session_id, message("x"))
        assert store.receive_posts(session_id) == [message("x")]

    def test_a_reception_is_guarded(self, store: PostStore, session_id: str) -> None:
        store.post_message(session_id, message("x"))
        with pytest.raises(StaleStateError):
            store.receive_posts(session_id, expected_version=7)
        locks = self.make_lock_manager()
        if locks is not None:
            first = locks.acquire(session_id)
            assert first is not None
            first.release()
            second = locks.acquire(session_id)
            assert second is not None
            with pytest.raises(FencedOutError):
                store.receive_posts(session_id, fencing_token=first.fencing_token)
            assert store.receive_posts(session_id, fencing_token=second.fencing_token) == [message("x")]

    def test_an_ended_session_receives_nothing(self, store: PostStore, session_id: str) -> None:
        store.post_message(session_id, message("x"))
        store.update_status(session_id, "failed")
        with pytest.raises(SessionEnded):
            store.receive_posts(session_id)
        assert len(store.list_posts(session_id).items) == 1

    def test_concurrent_receptions_receive_each_post_once(self, store: PostStore, session_id: str) -> None:
        for each in messages(5):
            store.post_message(session_id, each)
        outcomes = self.at_once(*(lambda: store.receive_posts(session_id) for _ in range(3)))
        assert sorted(map(len, cast(list[list[Any]], outcomes))) == [0, 0, 5]
        assert _texts(store, session_id) == messages(5)

    def test_a_rewind_leaves_received_posts_received(self, store: PostStore, session_id: str) -> None:
        store.post_message(session_id, message("x"))
        store.receive_posts(session_id)
        store.truncate_messages(session_id, 0)
        (post,) = store.list_posts(session_id, states=ALL).items
        assert (post.state, post.position) == ("received", 0)
        assert store.receive_posts(session_id) == []

    def test_a_branch_starts_without_posts(self, store: PostStore, session_id: str) -> None:
        store.post_message(session_id, message("x"))
        branch = store.branch_session(session_id).session_id
        assert store.list_posts(branch, states=ALL).items == []
        assert store.receive_posts(branch) == []

    # Finding

    def test_sessions_with_due_posts_are_found_the_longest_due_first(
        self, store: PostStore, session_id: str
    ) -> None:
        other = store.create_session(agent_type="agent").session_id
        post = store.post_message(session_id, message("x"))
        store.post_message(session_id, message("later"), not_before=_in_an_hour())
        for at in (1_700_000_000_000, 1_600_000_000_000):
            store.post_message(other, message("early"), not_before=at)
        early = datetime.fromtimestamp(1_600_000_000, UTC)
        expected = [
            DuePost(session_id=other, due_at=early, count=2),
            DuePost(session_id=session_id, due_at=post.posted_at, count=1),
        ]
        assert store.find_due_posts() == expected
        assert store.find_due_posts(limit=1) == expected[:1]
        store.receive_posts(other)
        assert store.find_due_posts() == expected[1:]

    def test_sessions_that_nobody_can_drive_are_not_found(self, store: PostStore, session_id: str) -> None:
        ended = store.create_session(agent_type="agent").session_id
        later = store.create_session(agent_type="agent").session_id
        for each in (session_id, ended):
            store.post_message(each, message("x"))
        store.post_message(later, message("x"), not_before=_in_an_hour())
        store.update_status(ended, SessionStatus.COMPLETED)
        store.suspend(session_id, kind="suspended_client_tool", context={}, pending={"ask": ASK})
        assert store.find_due_posts() == []
        store.submit_tool_result(session_id, "ask", result="yes")
        assert [due.session_id for due in store.find_due_posts()] == [session_id]
        locks = self.make_lock_manager()
        lock = None if locks is None else locks.acquire(session_id)
        if lock is not None:
            assert store.find_due_posts() == []
            lock.release()
            assert len(store.find_due_posts()) == 1
        store.update_status(session_id, "active")

    @table("others", [{}, {"answered": ASK}])
    def test_sessions_whose_agent_has_answered_its_own_approval_are_not_found(
        self, store: PostStore, session_id: str, others: dict[str, Any]
    ) -> None:
        store.post_message(session_id, message("x"))
        store.suspend(
            session_id, kind="suspended_client_tool", context={}, pending={"call": APPROVE, **others}
        )
        for each in others:
            store.submit_tool_result(session_id, each, result="yes")
        forge_answer(store, session_id)
        assert store.find_due_posts() == []
        approve(store, session_id, approved=False)
        assert [due.session_id for due in store.find_due_posts()] == [session_id]

    def test_sessions_with_an_open_call_do_not_count_for_the_limit(
        self, store: PostStore, session_id: str
    ) -> None:
        waiting = [store.create_session(agent_type="agent").session_id for _ in range(2)]
        for each in waiting:
            store.post_message(each, message("x"))
            calls = {"open": ASK, "answered": ASK}
            store.suspend(each, kind="suspended_client_tool", context={}, pending=calls)
            store.submit_tool_result(each, "answered", result="yes")
        store.post_message(session_id, message("x"))
        assert [due.session_id for due in store.find_due_posts(limit=1)] == [session_id]
        for each in waiting:
            store.submit_tool_result(each, "open", result="yes")
        assert [due.session_id for due in store.find_due_posts(limit=2)] == waiting

    def test_posts_and_locks_of_other_tenants_do_not_matter(self, store: PostStore, session_id: str) -> None:
        store.post_message(session_id, message("x"))
        other = cast(PostStore, self.make_store(tenant="other"))
        other.create_session("of another tenant", agent_type="agent")
        other.post_message("of another tenant", message("x"))
        locks = self.make_lock_manager(tenant="other")
        if locks is not None:
            locks.acquire(session_id)
        assert [due.session_id for due in store.find_due_posts()] == [session_id]

    def test_the_size_of_a_page_is_checked(self, store: PostStore) -> None:
        with pytest.raises(InvalidQuery):
            store.find_due_posts(limit=0)

    # Async

    def test_every_call_has_an_async_twin(self, store: PostStore, session_id: str) -> None:
        calls: Any = store

        @async_to_sync
        async def run() -> None:
            post = await calls.apost_message(session_id, message("x"))
            assert (await calls.alist_posts(session_id)).items == [post]
            assert [due.session_id for due in await calls.afind_due_posts()] == [session_id]
            assert await calls.areceive_posts(session_id) == [message("x")]
            assert not await calls.awithdraw_post(session_id, post.post_id)

        run()
